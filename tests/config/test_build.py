"""Trees become typed dataclasses, and every complaint names its dotted key."""

from pathlib import Path

import pytest

from hybridrl.config.build import build, to_yaml
from hybridrl.protocol.errors import ConfigError
from tests.config.example_recipe import GROUPS, ActorConfig, AdamConfig, DataConfig, ExampleConfig, PenaltyConfig, VLLMConfig


def test_builds_every_kind():
    tree = {
        "name": 7,
        "amp": True,
        "reward_weights": {"format": 1},
        "penalty": {"coefficient": 1},
        "data": {"path": "a/b.jsonl"},
        "actor": {"adam": {"betas": [0, 1]}, "layers": [1, 2], "checkpoint_every": "never"},
        "rollout": {"memory_share": 0.7},
    }
    assert build(ExampleConfig, tree, chosen={"rollout": VLLMConfig}) == ExampleConfig(
        name="7",
        amp=True,
        reward_weights={"format": 1.0},
        penalty=PenaltyConfig(coefficient=1.0),
        data=DataConfig(path=Path("a/b.jsonl")),
        actor=ActorConfig(adam=AdamConfig(betas=(0.0, 1.0)), layers=(1, 2), checkpoint_every="never"),
        rollout=VLLMConfig(memory_share=0.7),
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"data": {"batch_size": "abc"}}, "data.batch_size must be an integer, not 'abc'"),
        ({"data": {"batch_size": 1.0}}, "data.batch_size must be an integer, not 1.0"),
        ({"data": {"batch_size": True}}, "data.batch_size must be an integer, not true"),
        ({"data": {"batch_size": None}}, "data.batch_size must be an integer, not null"),
        ({"data": {"path": "x", "batch_size": -4}}, "data.batch_size must be at least 1, not -4"),
        ({"data": {"batchsize": 3}}, "unknown key 'data.batchsize' (did you mean 'data.batch_size'?)"),
        ({"data": 5}, "data must be a group of keys (path, batch_size), not 5"),
        ({"data": {"path": "???"}}, "data.path has no value: add data.path=... to the command or the preset"),
        ({"amp": "yes"}, "amp must be true or false, not 'yes'"),
        ({"name": 1.5}, "name must be a text or null, not 1.5"),
        ({"reward_weights": {"format": "x"}}, "reward_weights.format must be a number, not 'x'"),
        ({"penalty": {"coef": 1}}, "unknown key 'penalty.coef' (did you mean 'penalty.coefficient'?)"),
        ({"penalty": 1}, "penalty must be a group of keys (coefficient) or null, not 1"),
        ({"actor": {"loss": "gsp"}}, "actor.loss must be one of 'ppo', 'gspo', not 'gsp' (did you mean 'gspo'?)"),
        ({"actor": {"layers": [1, "x"]}}, "actor.layers[1] must be an integer, not 'x'"),
        ({"actor": {"layers": 1}}, "actor.layers must be a list, each an integer, not 1"),
        ({"actor": {"adam": {"betas": [1]}}}, "actor.adam.betas must be a list of 2, [a number, a number], not [1]"),
        ({"actor": {"adam": {"betas": [1, 0]}}}, "actor.adam: the first moment must not decay slower than the second"),
        ({"actor": {"checkpoint_every": "x"}}, "actor.checkpoint_every must be an integer or 'never', not 'x'"),
    ],
)
def test_complains_with_the_dotted_key(tree, message):
    with pytest.raises(ConfigError) as caught:
        build(ExampleConfig, tree)
    assert str(caught.value) == message


def test_yaml_keeps_the_choice_of_each_group():
    config = ExampleConfig(data=DataConfig(path=Path("a")), rollout=VLLMConfig())
    assert to_yaml(config, GROUPS).startswith("defaults:\n- base\n- override rollout: vllm\n- _self_\nseed: 1\n")
