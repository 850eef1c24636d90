import pytest
import torch

from hybridrl.protocol.batch import batch, lengths_of, ragged
from hybridrl.protocol.errors import ConfigError
from hybridrl.workers import Actor, NativeRollout, RankContext
from tests.workers.ranks import actor_config
from tests.workers.tiny import EOS, make_batch, plain_model, prompt_batch, rows_of

EVERY = pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "tied"])


def make_actor(models, name="qwen3", **rollout):
    return Actor(actor_config(str(models / name), lr=3e-2, rollout=rollout), RankContext())


@EVERY
def test_columns_hold_prompt_and_response_and_say_which_is_which(models, name):
    actor, prompts = make_actor(models, name), prompt_batch(range(20))
    columns = actor.generate(prompts)
    assert set(columns) == {"tokens", "response_mask", "rollout_log_probs"}
    ended = 0
    for prompt, tokens, mask, log_probs in zip(
        prompts["prompts"].unbind(), *(columns[c].unbind() for c in columns), strict=True
    ):
        assert len(tokens) == len(mask) == len(log_probs)
        assert torch.equal(tokens[: len(prompt)], prompt)
        assert mask.tolist() == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
        assert (log_probs[~mask] == 0).all() and (log_probs[mask] < 0).all()
        response = tokens[mask]
        assert 1 <= len(response) <= 12 and EOS not in response[:-1]
        ended += int(response[-1] == EOS)
        assert response[-1] == EOS or len(response) == 12
    assert 0 < ended < 20


@EVERY
def test_the_engine_and_the_trainer_agree_before_and_after_updates(models, name):
    actor, prompts = make_actor(models, name), prompt_batch(range(20))
    seen = []
    for _ in range(3):
        columns = actor.generate(prompts)
        trainer = actor.log_probs(batch({n: columns[n] for n in ("tokens", "response_mask")}))["old_log_probs"]
        torch.testing.assert_close(columns["rollout_log_probs"].values(), trainer.values(), rtol=0, atol=1e-5)
        seen.append(columns["tokens"].values())
        actor.update(make_batch())
    assert not torch.equal(seen[0], seen[1])


def test_an_actor_that_recomputes_activations_generates_the_same(models):
    prompts, seen = prompt_batch(range(10)), []
    for recompute in (False, True):
        config = actor_config(str(models / "llama"), activation_checkpointing=recompute, rollout={"precision": "float32"})
        actor = Actor(config, RankContext())
        actor.update(make_batch())
        seen.append(actor.generate(prompts)["rollout_log_probs"].values())
        assert not actor.trainer.model.training
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=1e-5)


def test_weights_are_shared_in_one_process_of_one_precision_and_follow_in_another(models):
    shared, copied = make_actor(models), make_actor(models, precision="bfloat16")
    model = copied.engine._engine._model
    assert shared.engine._engine._model is shared.trainer.model and model is not copied.trainer.model
    copied.generate(prompt_batch([0]))
    copied.update(make_batch())
    stale = {n: p.clone() for n, p in model.named_parameters()}
    copied.generate(prompt_batch([0]))
    for name, p in copied.trainer.model.named_parameters():
        assert torch.equal(model.get_parameter(name), p.to(torch.bfloat16))
    assert any(not torch.equal(p, stale[n]) for n, p in model.named_parameters())


@EVERY
def test_temperature_zero_is_the_greedy_decoding_of_transformers(models, name):
    actor, prompts = make_actor(models, name), prompt_batch(range(10))
    actor.update(make_batch())
    plain = plain_model(str(models / name), torch.float32)
    plain.load_state_dict(actor.trainer.model.state_dict())
    greedy = actor.generate(prompts, temperature=0.0)["tokens"].unbind()
    again = actor.generate(prompt_batch(range(50, 60)), temperature=0.0)["tokens"].unbind()
    for prompt, tokens, same in zip(prompts["prompts"].unbind(), greedy, again, strict=True):
        mask = torch.ones_like(prompt[None])
        expected = plain.generate(
            prompt[None], attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=EOS, pad_token_id=0
        )
        assert tokens.tolist() == same.tolist() == expected[0].tolist()


def test_a_sample_depends_on_its_seed_and_not_on_its_company(models):
    actor, prompts = make_actor(models), prompt_batch([7, 8, 7, 9, 10, 11])
    whole = [t.tolist() for t in actor.generate(prompts)["tokens"].unbind()]
    for rows in ([3], [5, 0], [1, 2, 4]):
        part = actor.generate(rows_of(prompts, rows))["tokens"].unbind()
        assert [t.tolist() for t in part] == [whole[row] for row in rows]
    same_prompt = batch({"prompts": ragged([[5, 6]] * 3, torch.int64), "seed": torch.tensor([1, 2, 1])})
    first, second, third = (t.tolist() for t in actor.generate(same_prompt)["tokens"].unbind())
    assert first == third != second


def test_another_temperature_is_another_distribution(models):
    actor, prompts = make_actor(models), prompt_batch(range(40))
    cold = actor.generate(prompts, temperature=0.1)["rollout_log_probs"].values().mean()
    assert cold > actor.generate(prompts)["rollout_log_probs"].values().mean()


def test_no_prompts_give_empty_columns(models):
    columns = make_actor(models).generate(prompt_batch([]))
    assert all(column.is_nested and column.size(0) == 0 and len(lengths_of(column)) == 0 for column in columns.values())
    assert columns["tokens"].dtype is torch.int64 and columns["response_mask"].dtype is torch.bool


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, 4])
def test_samples_do_not_depend_on_the_number_of_ranks(world, worlds):
    one, ranks = worlds.of[1][0]["rollout"], [rank["rollout"] for rank in worlds.of[world]]
    for name in one:
        together = [tokens for rank in ranks for tokens in rank[name]["tokens"]]
        assert together == one[name]["tokens"]
        assert len(together) == 13  # not a multiple of the ranks


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_engine_of_every_rank_has_the_weights_of_the_last_update(world, worlds):
    for rank in worlds.of[world]:
        for name, seen in rank["rollout"].items():
            limit = 0.2 if name == "bfloat16" else 1e-5
            assert seen["gap before"] < limit and seen["gap after"] < limit
            assert seen["gap if stale"] > 1
            assert seen["shared"] == (world == 1 and name != "bfloat16")
            for parameter, held in seen["engine"].items():
                assert torch.equal(held, seen["weights"][parameter].to(held.dtype))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": 0.0}, "temperature must be over 0"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"max_new_tokens": 64, "max_length": 64}, "max_length must be over max_new_tokens=64"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_settings_out_of_range_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        NativeRollout(**settings)
