import pytest
import torch

from hybridrl.protocol.batch import padded
from hybridrl.workers import Actor, ModelConfig, RankContext, Reference, ReferenceConfig
from tests.workers.ranks import actor_config
from tests.workers.tiny import make_batch, plain_log_probs, plain_model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_says_what_transformers_says(models, temperature):
    data, path = make_batch(), str(models / "qwen3")
    reference = Reference(ReferenceConfig(ModelConfig(path=path, precision="float64"), temperature), RankContext())
    column = reference.log_probs(data)["ref_log_probs"]
    expected, _, _ = plain_log_probs(plain_model(path), data, temperature)
    assert torch.equal(column.offsets(), data["tokens"].offsets())
    torch.testing.assert_close(padded(column), expected, rtol=0, atol=1e-10)


def test_it_agrees_bitwise_with_the_actor_it_began_as(models):
    data, path = make_batch(), str(models / "tied")
    actor = Actor(actor_config(path), RankContext())
    model = actor.config.model
    reference = Reference(ReferenceConfig(model, actor.config.rollout.temperature), RankContext())
    first = reference.log_probs(data)["ref_log_probs"].values()
    assert torch.equal(first, actor.log_probs(data)["old_log_probs"].values())
    actor.update(data)
    assert torch.equal(reference.log_probs(data)["ref_log_probs"].values(), first)
    assert not any(p.requires_grad for p in reference.trainer.root.parameters())


def test_no_rows_give_an_empty_column(models):
    reference = Reference(ReferenceConfig(ModelConfig(path=str(models / "llama"))), RankContext())
    column = reference.log_probs(make_batch(prompts=(), responses=()))["ref_log_probs"]
    assert column.is_nested and column.size(0) == 0
