import pytest
import torch
from transformers import AutoModelForTokenClassification

from hybridrl.algorithms.aggregation import AGGREGATIONS
from hybridrl.protocol.batch import padded
from hybridrl.protocol.errors import ConfigError
from hybridrl.workers import Critic, CriticConfig, ModelConfig, OptimizerConfig, RankContext
from tests.workers.tiny import gradients_of, make_batch, plain_model, plain_padded_output, relative, weights_of

LONGEST = 12


def make_critic(path, aggregation="token-mean", seed=0, lr=1e-3, **model):
    config = CriticConfig(
        ModelConfig(path=str(path), **{"precision": "float64", "micro_batch_tokens": 20, **model}),
        OptimizerConfig(lr=lr, clip_norm=0.0),
        aggregation=aggregation,
        max_tokens=LONGEST,
    )
    return Critic(config, RankContext(seed=seed))


def plain_values(model, data):
    logits_BT1, _, mask = plain_padded_output(model, data)
    return torch.cat([torch.zeros_like(logits_BT1[:, :1, 0]), logits_BT1[:, :-1, 0]], 1), mask


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_are_those_of_a_padded_batch(aggregation, models, tmp_path):
    data = make_batch(dtype=torch.float64)
    make_critic(models / "qwen2").export(tmp_path)  # the untrained head with it
    plain = plain_model(str(tmp_path), values=True)
    values, mask = plain_values(plain, data)
    old, returns = padded(data["values"]), padded(data["returns"])
    held = old + (values - old).clamp(-0.2, 0.2)
    loss = torch.where(mask, torch.max((values - returns).square(), (held - returns).square()) / 2, 0)
    counts, rows = mask.sum(1), mask.any(1).sum()
    expected = {
        "token-mean": lambda: loss.sum() / mask.sum(),
        "seq-mean-token-sum": lambda: loss.sum() / rows,
        "seq-mean-token-mean": lambda: (loss.sum(1) / counts.clamp(min=1)).sum() / rows,
        "seq-mean-token-sum-norm": lambda: loss.sum() / rows / LONGEST,
    }[aggregation]()
    expected.backward()
    for tokens in (1, 30, 100_000):
        critic = make_critic(tmp_path, aggregation, micro_batch_tokens=tokens)
        gradients, metrics = gradients_of(critic.trainer, lambda critic=critic: critic.update(data))
        assert metrics["critic/loss"] == pytest.approx(expected.item(), rel=1e-12)
        assert relative(gradients, {n: p.grad for n, p in plain.named_parameters()}) < 1e-12


def test_values_are_aligned_with_the_tokens_they_choose(models, tmp_path):
    critic, data = make_critic(models / "qwen3"), make_batch()
    critic.update(make_batch(dtype=torch.float64))
    critic.export(tmp_path)
    expected, mask = plain_values(plain_model(str(tmp_path), values=True), data)
    column = critic.values(data)["values"]
    assert torch.equal(column.offsets(), data["tokens"].offsets())
    torch.testing.assert_close(padded(column), torch.where(mask, expected, 0), rtol=0, atol=1e-10)


def test_an_untrained_head_is_a_function_of_the_seed_alone(models):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights_of(make_critic(models / "llama").trainer)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert relative(weights_of(make_critic(models / "llama").trainer), first) == 0
    assert relative(weights_of(make_critic(models / "llama", seed=1).trainer), first) > 0


def test_training_state_is_saved_and_taken_back(models, tmp_path):
    data = make_batch(dtype=torch.float64)
    critic = make_critic(models / "tied", lr=1e-2)
    critic.update(data)
    critic.save(tmp_path)
    assert AutoModelForTokenClassification.from_pretrained(tmp_path).config.num_labels == 1
    other = make_critic(models / "tied", seed=5, lr=1e-2)
    other.load(tmp_path)
    assert [other.update(data), other.update(data)] == [critic.update(data), critic.update(data)]
    assert relative(weights_of(other.trainer), weights_of(critic.trainer)) == 0


def test_it_learns_the_returns(models):
    critic, data = make_critic(models / "llama", lr=1e-2, precision="float32"), make_batch()
    losses = []
    for _ in range(40):
        data["values"] = critic.values(data)["values"]
        losses.append(critic.update(data)["critic/squared_error"])
    assert losses[-1] < 0.1 * losses[0]


def test_a_fixed_length_has_to_be_given():
    with pytest.raises(ConfigError, match="max_new_tokens"):
        CriticConfig(ModelConfig(path="x"), aggregation="seq-mean-token-sum-norm")
