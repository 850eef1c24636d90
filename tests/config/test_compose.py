"""Defaults, presets, groups and overrides make one configuration."""

from pathlib import Path

import pytest

from hybridrl.config.build import to_yaml
from hybridrl.config.compose import load
from hybridrl.protocol.errors import ConfigError
from tests.config.example_recipe import GROUPS, DataConfig, ExampleConfig, NativeConfig, PenaltyConfig, VLLMConfig

PRESETS = Path(__file__).parent / "config"
HERE = DataConfig(path=Path("x"))


def loaded(*overrides: str, **options) -> ExampleConfig:
    return load(ExampleConfig, ["data.path=x", *overrides], GROUPS, **options)


def test_defaults():
    assert loaded() == ExampleConfig(data=HERE)


def test_a_group_choice_and_its_keys_in_any_order():
    chosen = VLLMConfig(temperature=0.7, memory_share=0.25)
    assert loaded("rollout.temperature=0.7", "rollout=vllm", "rollout.memory_share=0.25").rollout == chosen
    assert loaded("rollout=vllm").rollout == VLLMConfig()
    assert loaded("rollout=native").rollout == NativeConfig(temperature=0.9)


def test_lists_mappings_interpolation_and_components_that_are_null():
    config = loaded("actor.adam.betas=[0.1, 0.2]", "reward_weights.format=2", "penalty.coefficient=0.5", "name=run-${seed}")
    assert config.actor.adam.betas == (0.1, 0.2)
    assert config.reward_weights == {"format": 2.0}
    assert config.penalty == PenaltyConfig(coefficient=0.5)
    assert config.name == "run-1"
    assert loaded("penalty={coefficient: 0.5}", "actor.adam.lr=1e-5").actor.adam.lr == 1e-5


def test_a_preset_below_the_command_line():
    config = load(ExampleConfig, ["data.batch_size=8"], GROUPS, "small", PRESETS)
    assert config.data == DataConfig(path=Path("small.jsonl"), batch_size=8)
    assert config.rollout == VLLMConfig(temperature=0.3)


def test_the_written_configuration_is_a_preset(tmp_path):
    config = loaded("rollout=vllm", "seed=7", "actor.adam.lr=3e-7", "name='1e-5'", "penalty.coefficient=2", "actor.layers=[3]")
    (tmp_path / "config.yaml").write_text(to_yaml(config, GROUPS))
    assert load(ExampleConfig, [], GROUPS, "config", tmp_path) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batchsize=3", "unknown key 'data.batchsize' (did you mean 'data.batch_size'?)"),
        ("hydra.verbose=true", "unknown key 'hydra.verbose'"),
        ("data={size: 3}", "unknown key 'data.size' (did you mean 'data.batch_size'?)"),
        ("rollout.memory_share=1", "unknown key 'rollout.memory_share' of rollout=native (rollout=vllm has it)"),
        ("rollout=vlm", "rollout must be one of 'native', 'vllm', not 'vlm' (did you mean 'vllm'?)"),
        ("rollout=3", "rollout must be one of 'native', 'vllm', not 3"),
        ("foo", "'foo' is not key=value, such as seed=1: --help lists the keys"),
        ("seed=1,2", "'seed=1,2' gives several values: a run takes one; write a list as seed=[...]"),
        ("+seed=1", "'+seed=1' adds or removes a key: write key=value, without + or ~"),
        ("name=a(b", "'name=a(b' cannot be read; put quotes around a text with signs in it: name=\"'...'\""),
        ("name=${sed}", "name: Interpolation key 'sed' not found"),
        ("seed.a=1", "seed must be an integer, not {'a': 1}"),
    ],
)
def test_overrides_that_cannot_be_used(override, message):
    with pytest.raises(ConfigError) as caught:
        loaded(override)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {path: x}", "the preset 'mine' lacks actor, .*: begin it with 'defaults: \\[base, _self_\\]'"),
        ("defaults: [base, _self_]\ndata: {paht: x}", "unknown key 'data.paht' \\(did you mean 'data.path'\\?\\)"),
        ("defaults: [base, override rollout: vlm, _self_]", "preset 'mine': .*Could not find 'rollout/vlm'.*native vllm$"),
        ("defaults: [base, other, _self_]", "preset 'mine': .*Could not load 'other'"),
        ("defaults: [base, other: 3]", "preset 'mine': Unsupported item value"),
        ("defaults: [base", "preset 'mine': while parsing a flow sequence.*mine.yaml.*line 1"),
    ],
)
def test_presets_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(ExampleConfig, [], GROUPS, "mine", tmp_path)


def test_a_preset_that_does_not_exist():
    with pytest.raises(
        ConfigError, match=r"no preset 'smal' in .*config \(did you mean 'small'\?\): it has small; see --config"
    ):
        load(ExampleConfig, [], GROUPS, "smal", PRESETS)
