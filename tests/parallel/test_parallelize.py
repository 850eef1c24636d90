import pytest
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.parallel.parallelize import decoder_layers, parallelize
from hybridrl.protocol.errors import ConfigError
from hybridrl.protocol.layout import Layout


@pytest.fixture
def model():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=20, num_hidden_layers=3, **sizes))


def test_the_blocks_are_the_architecture_s_own(model):
    assert decoder_layers(model) == list(model.model.layers)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, dp=2)])
def test_other_layouts_than_data_are_refused_with_what_to_use(model, layout):
    with pytest.raises(ConfigError, match=f"use dp={layout.world}"):
        parallelize(model, model, layout, "cpu", False)


@pytest.mark.parametrize("recompute", [False, True])
def test_one_rank_needs_no_sharding(model, recompute):
    before = dict(model.named_parameters())
    assert parallelize(model, model, Layout(), "cpu", recompute) is model
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.is_gradient_checkpointing == recompute
