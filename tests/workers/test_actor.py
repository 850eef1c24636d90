import pytest
import torch

from hybridrl.algorithms.kl import KLConfig
from hybridrl.algorithms.policy_loss import PPOClip
from hybridrl.protocol.batch import padded
from hybridrl.protocol.register import contract_of
from hybridrl.workers import Actor, RankContext
from tests.workers.ranks import actor_config
from tests.workers.tiny import ARCHITECTURES, gradients_of, make_batch, plain_log_probs, plain_model, relative, weights_of


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_are_those_of_transformers_at_the_temperature_of_the_rollout(name, temperature, models):
    data, path = make_batch(), str(models / name)
    config = actor_config(path, precision="float64", rollout={"temperature": temperature})
    column = Actor(config, RankContext()).log_probs(data)["old_log_probs"]
    expected, _, _ = plain_log_probs(plain_model(path), data, temperature)
    assert torch.equal(column.offsets(), data["tokens"].offsets())
    torch.testing.assert_close(padded(column), expected, rtol=0, atol=1e-10)


def test_it_reads_what_its_loss_reads(models):
    path = str(models / "llama")
    with_loss_penalty = contract_of(Actor, "update", actor_config(path)).reads
    without = contract_of(Actor, "update", actor_config(path, kl=KLConfig(placement="reward"))).reads
    assert without == ("tokens", "response_mask", "old_log_probs", "advantages")
    assert with_loss_penalty == (*without, "ref_log_probs")
    assert contract_of(Actor, "log_probs", actor_config(path)).reads == ("tokens", "response_mask")


def test_every_term_of_the_loss_counts(models):
    data, path = make_batch(), str(models / "llama")

    def gradients(kl_coef=0.0, **changes):
        actor = Actor(actor_config(path, **changes), RankContext())
        return gradients_of(actor.trainer, lambda: actor.update(data, kl_coef=kl_coef))[0]

    plain = gradients(entropy_coef=0.0)
    off = gradients(entropy_coef=0.0, kl=KLConfig(placement="off"))
    assert relative(off, plain) == 0
    for changed in (
        gradients(entropy_coef=0.1),
        gradients(entropy_coef=0.0, kl_coef=0.1),
        gradients(entropy_coef=0.0, loss=PPOClip(clip_low=0.1)),
        gradients(entropy_coef=0.0, loss=PPOClip(dual_clip=1.5)),
    ):
        assert relative(changed, plain) > 1e-3


def test_on_policy_rows_have_ratio_one_and_the_gradient_of_the_plain_policy_gradient(models):
    data, path = make_batch(dtype=torch.float64), str(models / "qwen3")
    actor = Actor(actor_config(path, precision="float64", kl=KLConfig(placement="off"), entropy_coef=0.0), RankContext())
    data["old_log_probs"] = actor.log_probs(data)["old_log_probs"]
    gradients, metrics = gradients_of(actor.trainer, lambda: actor.update(data))
    assert metrics["actor/ratio"] == pytest.approx(1, rel=1e-12)
    assert metrics["actor/clip_fraction"] == 0
    plain = plain_model(path)
    log_probs, _, mask = plain_log_probs(plain, data, 0.9)
    (-(log_probs * torch.where(mask, padded(data["advantages"]), 0)).sum() / mask.sum()).backward()
    assert relative(gradients, {n: p.grad for n, p in plain.named_parameters()}) < 1e-12


def test_good_tokens_become_likelier(models):
    actor, data = Actor(actor_config(str(models / "llama"), kl=KLConfig(placement="off")), RankContext()), make_batch()
    before = actor.log_probs(data)["old_log_probs"]
    data["old_log_probs"] = before
    for _ in range(3):
        actor.update(data)
    mask, gain = data["response_mask"].values(), actor.log_probs(data)["old_log_probs"].values() - before.values()
    assert (gain * data["advantages"].values())[mask].mean() > 0.01


def test_versions_count_changes_of_the_weights(models, tmp_path):
    actor, data = Actor(actor_config(str(models / "llama")), RankContext()), make_batch()
    actor.log_probs(data)
    actor.save(tmp_path)
    assert actor.version == 0
    actor.update(data)
    assert actor.version == 1
    actor.load(tmp_path)
    assert actor.version == 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_loaded_checkpoint_is_what_generates(models, tmp_path, precision):
    from tests.workers.tiny import prompt_batch

    config = actor_config(str(models / "llama"), lr=3e-2, rollout={"precision": precision})
    actor, prompts = Actor(config, RankContext()), prompt_batch(range(8))
    actor.save(tmp_path)
    first = actor.generate(prompts)["tokens"].values()
    actor.update(make_batch())
    changed = actor.generate(prompts)["tokens"].values()
    assert not torch.equal(changed, first)
    actor.load(tmp_path)
    assert torch.equal(actor.generate(prompts)["tokens"].values(), first)
    assert weights_of(actor.trainer).keys()
