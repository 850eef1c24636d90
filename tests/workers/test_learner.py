import pytest
import torch

from hybridrl.workers import Learner, LearnerConfig, ModelConfig, OptimizerConfig, RankContext
from tests.workers.tiny import gradients_of, make_batch, plain_log_probs, plain_model, relative


def make_learner(path, **model):
    config = ModelConfig(path=str(path), **{"precision": "float64", "micro_batch_tokens": 20, **model})
    return Learner(LearnerConfig(config, OptimizerConfig(lr=1e-2, clip_norm=0.0)), RankContext())


@pytest.mark.parametrize("tokens", [1, 25, 100_000])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_is_that_of_the_mean_likelihood_of_response_tokens(models, tokens, recompute):
    data = make_batch()
    plain = plain_model(str(models / "qwen2"))
    log_probs, entropies, mask = plain_log_probs(plain, data)
    loss = -log_probs.sum() / mask.sum()
    loss.backward()
    learner = make_learner(models / "qwen2", micro_batch_tokens=tokens, activation_checkpointing=recompute)
    gradients, metrics = gradients_of(learner.trainer, lambda: learner.update(data))
    assert relative(gradients, {n: p.grad for n, p in plain.named_parameters()}) < 1e-12
    assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["learner/entropy"] == pytest.approx((entropies.sum() / mask.sum()).item(), rel=1e-12)


def test_mixed_precision_learns_the_same(models):
    data = make_batch()
    whole, mixed = (make_learner(models / "llama", precision=p) for p in ("float32", "bfloat16"))
    losses = [(whole.update(data)["learner/loss"], mixed.update(data)["learner/loss"]) for _ in range(10)]
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert all(b == pytest.approx(a, rel=0.05) for a, b in losses)
    assert {p.dtype for p in mixed.trainer.model.parameters()} == {torch.float32}
