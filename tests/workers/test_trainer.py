import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.algorithms.aggregation import AGGREGATIONS
from hybridrl.protocol.batch import padded
from hybridrl.protocol.errors import ConfigError, ModelError
from hybridrl.workers import Actor, OptimizerConfig, RankContext
from tests.workers.ranks import ROWS, SCENARIOS, actor_config
from tests.workers.tiny import gradients_of, make_batch, plain_log_probs, plain_model, relative, rows_of, weights_of

KL, ENTROPY, TEMPERATURE, LONGEST = 0.1, 0.01, 0.9, 12


def plain_loss(model, data, aggregation):
    """PPO's loss over padded rows, in formulas: no packing, no weights of tokens, no micro-batches."""
    log_probs, entropies, mask = plain_log_probs(model, data, TEMPERATURE)
    old, ref, advantages = (torch.where(mask, padded(data[n]), 0) for n in ("old_log_probs", "ref_log_probs", "advantages"))
    ratio = (log_probs - old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = loss + KL * ((ref - log_probs).exp() - (ref - log_probs) - 1) - ENTROPY * entropies
    loss = torch.where(mask, loss, 0)
    counts, rows = mask.sum(1), mask.any(1).sum()
    return {
        "token-mean": lambda: loss.sum() / mask.sum(),
        "seq-mean-token-sum": lambda: loss.sum(1).sum() / rows,
        "seq-mean-token-mean": lambda: (loss.sum(1) / counts.clamp(min=1)).sum() / rows,
        "seq-mean-token-sum-norm": lambda: loss.sum(1).sum() / LONGEST / rows,
    }[aggregation]()


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_are_those_of_a_padded_batch_whatever_the_micro_batches(aggregation, precision, tolerance, models):
    path, dtype = str(models / "qwen3"), getattr(torch, precision)
    data = make_batch(dtype=dtype)
    plain = plain_model(path, dtype)
    loss = plain_loss(plain, data, aggregation)
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    metrics = []
    for tokens, recompute in ((1, False), (20, True), (20, False), (35, False), (1_000_000, True)):
        config = actor_config(
            path, precision=precision, aggregation=aggregation, micro_batch_tokens=tokens, activation_checkpointing=recompute
        )
        actor = Actor(config, RankContext())
        gradients, seen = gradients_of(actor.trainer, lambda actor=actor: actor.update(data, kl_coef=KL))
        assert relative(gradients, expected) < tolerance
        metrics.append(seen)
    for seen in metrics:
        assert seen["actor/loss"] == pytest.approx(loss.item(), rel=tolerance)
        assert seen == pytest.approx(metrics[0], rel=tolerance)
    norm = torch.stack([g.double().norm() for g in expected.values()]).norm()
    assert metrics[0]["actor/grad_norm"] == pytest.approx(float(norm), rel=tolerance)


@pytest.mark.parametrize("name", ["qwen2", "llama", "tied"])
def test_gradients_are_those_of_a_padded_batch_in_every_architecture(name, models):
    data, path = make_batch(dtype=torch.float64), str(models / name)
    plain = plain_model(path)
    plain_loss(plain, data, "token-mean").backward()
    actor = Actor(actor_config(path, precision="float64"), RankContext())
    gradients, _ = gradients_of(actor.trainer, lambda: actor.update(data, kl_coef=KL))
    assert relative(gradients, {n: p.grad for n, p in plain.named_parameters()}) < 1e-12


def test_rows_order_and_company_do_not_matter(models):
    data, config = make_batch(dtype=torch.float64), actor_config(str(models / "llama"), precision="float64")
    results = []
    for order in (range(ROWS), (3, 8, 1, 0, 2, 7, 6, 5, 4)):
        actor = Actor(config, RankContext())
        results.append(gradients_of(actor.trainer, lambda actor=actor, order=order: actor.update(rows_of(data, order)))[0])
    assert relative(*results) < 1e-12


def test_metrics_are_means_over_tokens_whatever_the_aggregation(models):
    data, metrics = make_batch(), []
    for aggregation in AGGREGATIONS:
        metrics.append(Actor(actor_config(str(models / "llama"), aggregation=aggregation), RankContext()).update(data))
    for name in ("actor/clip_fraction", "actor/entropy", "actor/ratio", "actor/kl"):
        assert len({seen[name] for seen in metrics}) == 1
    assert len({seen["actor/loss"] for seen in metrics}) == len(AGGREGATIONS)


def test_rows_without_responses_alone_change_nothing(models):
    actor = Actor(actor_config(str(models / "llama")), RankContext())
    before = weights_of(actor.trainer)
    metrics = actor.update(make_batch(prompts=(3, 2), responses=(0, 0)), kl_coef=KL)
    assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0
    assert relative(weights_of(actor.trainer), before) == 0


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, 4])
def test_the_update_does_not_depend_on_the_number_of_ranks(world, worlds):
    one, ranks = worlds.of[1][0], worlds.of[world]
    for name in [*SCENARIOS, "critic"]:
        if name not in ranks[0]:
            continue
        tolerance = 1e-12 if name == "exact" else 1e-6
        for rank in ranks:
            assert relative(rank[name]["gradients"], one[name]["gradients"]) < tolerance if one[name]["gradients"] else True
            assert relative(rank[name]["weights"], one[name]["weights"]) < tolerance
            for ours, theirs in zip(rank[name]["metrics"], one[name]["metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=2 * tolerance, abs=tolerance)
            assert rank[name]["metrics"] == ranks[0][name]["metrics"]
        together = torch.cat([rank[name]["log_probs"] for rank in ranks])
        torch.testing.assert_close(together, one[name]["log_probs"], rtol=0, atol=10 * tolerance)


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", ["llama", "tied"])
def test_what_some_ranks_save_other_numbers_go_on_from(world, model, worlds):
    def losses(of, origin):
        return (of["checkpoint"][model][origin] if origin else of["checkpoint"][model])["on"]

    one, ranks = worlds.of[1][0], worlds.of[world]
    for rank in ranks:
        assert losses(rank, f"from {world}") == losses(rank, None)  # bitwise: as if it had never stopped
        assert losses(rank, "from 1") == pytest.approx(losses(one, None), rel=1e-6)
    actor = Actor(actor_config(str(worlds.models / model), warmup_steps=4), RankContext())
    actor.load(worlds.out / f"{model}-{world}")
    data = make_batch()
    assert [actor.update(data)["actor/loss"] for _ in range(2)] == pytest.approx(losses(ranks[0], None), rel=1e-6)
    assert relative(weights_of(actor.trainer), ranks[0]["checkpoint"][model]["weights"]) < 1e-6


@pytest.mark.parametrize("model", ["qwen2", "tied"])
@pytest.mark.parametrize("steps", [0, 2])
def test_going_on_from_a_checkpoint_is_bitwise_never_having_stopped(model, steps, models, tmp_path):
    settings = {"schedule": "cosine", "warmup_steps": 2, "total_steps": 6, "weight_decay": 0.1, "beta2": 0.9, "lr": 1e-2}
    base = actor_config(str(models / model))
    config = type(base)(base.model, OptimizerConfig(**settings), base.rollout, kl=base.kl)
    data = [make_batch(seed) for seed in range(5)]

    def go_on(actor):
        return [actor.update(part, kl_coef=KL) for part in data[steps:]], weights_of(actor.trainer)

    plain = Actor(config, RankContext())
    unbroken = [plain.update(part, kl_coef=KL) for part in data]
    stopped = Actor(config, RankContext())
    for part in data[:steps]:
        stopped.update(part, kl_coef=KL)
    stopped.save(tmp_path / "saved")
    elsewhere = Actor(config, RankContext())
    elsewhere.update(make_batch(9))
    elsewhere.load(tmp_path / "saved")
    for actor in (stopped, elsewhere):  # saving changes nothing, and loading leaves nothing of what was
        metrics, weights = go_on(actor)
        assert metrics == unbroken[steps:]
        assert relative(weights, weights_of(plain.trainer)) == 0


@pytest.mark.parametrize("model", ["qwen2", "tied"])
def test_a_checkpoint_is_a_hugging_face_model(model, models, tmp_path):
    actor, data = Actor(actor_config(str(models / model)), RankContext()), make_batch()
    actor.update(data)
    actor.save(tmp_path / "saved")
    actor.export(tmp_path / "exported")
    trained, _, _ = plain_log_probs(actor_as_plain(actor), data)
    for folder in ("saved", "exported"):
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values())
        torch.testing.assert_close(plain_log_probs(loaded, data)[0], trained, rtol=0, atol=1e-5)
        assert relative(dict(loaded.named_parameters()), weights_of(actor.trainer)) == 0
        assert loaded.config.tie_word_embeddings == (model == "tied")
        settings = json.loads((tmp_path / folder / "config.json").read_text())
        assert settings.get("use_cache", True)  # whoever generates with it needs its cache
    assert not (tmp_path / "exported/trainer.pt").exists()


def actor_as_plain(actor):
    plain = plain_model(actor.config.model.path, torch.float32)
    plain.load_state_dict(actor.trainer.model.state_dict())
    return plain


def test_a_checkpoint_without_some_weights_is_refused(models, tmp_path):
    from safetensors.torch import load_file, save_file

    actor = Actor(actor_config(str(models / "llama")), RankContext())
    actor.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' among them"):
        actor.load(tmp_path)


def test_gradients_are_clipped_to_their_norm(models):
    free, held = (Actor(actor_config(str(models / "llama"), clip_norm=norm), RankContext()) for norm in (0.0, 0.05))
    data = make_batch()
    whole, metrics = gradients_of(free.trainer, lambda: free.update(data))
    clipped, same = gradients_of(held.trainer, lambda: held.update(data))
    assert same["actor/grad_norm"] == metrics["actor/grad_norm"] > 1
    factor = 0.05 / metrics["actor/grad_norm"]
    assert relative(clipped, {n: g * factor for n, g in whole.items()}) < 1e-5


def test_the_learning_rate_follows_its_schedule(models):
    base = actor_config(str(models / "llama"))
    optimizer = OptimizerConfig(lr=0.1, warmup_steps=2, schedule="linear", total_steps=6)
    actor = Actor(type(base)(base.model, optimizer, base.rollout), RankContext())
    seen = [actor.update(make_batch())["actor/lr"] for _ in range(7)]
    assert seen == pytest.approx([0.05, 0.1, 0.1, 0.075, 0.05, 0.025, 0.0])
    cosine = OptimizerConfig(schedule="cosine", warmup_steps=1, total_steps=5)
    assert [cosine.factor(step) for step in (0, 1, 3, 5, 9)] == pytest.approx([1, 1, 0.5, 0, 0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lr": 0.0}, "lr must be over 0"),
        ({"clip_norm": -1.0}, "clip_norm must be 0"),
        ({"schedule": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps must be over warmup_steps=5"),
    ],
)
def test_settings_out_of_range_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        OptimizerConfig(**settings)
