import json
import shutil

import pytest
import torch
from transformers import BloomConfig, CohereConfig, Gemma2Config, GPT2Config, GptOssConfig, GraniteConfig, MistralConfig

from hybridrl.data.tiny_model import make_tiny_model
from hybridrl.parallel.attention import PackedRows
from hybridrl.protocol.batch import ragged
from hybridrl.protocol.errors import ConfigError, ModelError
from hybridrl.workers.packed_model import (
    ModelConfig,
    PackedCausalLM,
    PackedValueModel,
    check_model,
    compute_in,
    load_causal_lm,
    load_value_model,
)  # fmt: skip
from hybridrl.workers.packing import pack
from tests.workers.tiny import (
    ARCHITECTURES,
    SIZES,
    make_batch,
    plain_log_probs,
    plain_model,
    plain_padded_output,
    relative,
    save_config,
    save_model,
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def exact(path):
    return ModelConfig(path=path, precision="float64")


def packed_rows(data):
    return pack(data, torch.arange(data.batch_size[0]).numpy(), "cpu")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_equal_a_padded_forward_of_transformers(path, temperature):
    data = make_batch()
    micro = packed_rows(data)
    log_probs, entropies = PackedCausalLM(load_causal_lm(exact(path)))(micro.tokens_T, micro.rows, micro.index_S, temperature)
    expected_log_probs, expected_entropies, mask = plain_log_probs(plain_model(path), data, temperature)
    torch.testing.assert_close(log_probs, expected_log_probs[mask], rtol=0, atol=1e-10)
    torch.testing.assert_close(entropies, expected_entropies[mask], rtol=0, atol=1e-10)
    assert log_probs.std() > 0.1 and entropies.std() > 0.01  # not a model that says the same of everything


def test_each_row_is_computed_as_if_it_were_alone(path):
    data = make_batch()
    micro = packed_rows(data)
    together, _ = PackedCausalLM(load_causal_lm(exact(path)))(micro.tokens_T, micro.rows, micro.index_S)
    model, apart = plain_model(path), []
    for tokens, mask in zip(data["tokens"].unbind(), data["response_mask"].unbind(), strict=True):
        log_p = model(tokens[None], use_cache=False).logits[0].log_softmax(-1)
        apart += [log_p[t - 1, tokens[t]] for t in mask.nonzero()[:, 0]]
    torch.testing.assert_close(together, torch.stack(apart), rtol=0, atol=1e-10)


def test_values_equal_a_padded_forward_of_transformers(path, tmp_path):
    data = make_batch()
    micro = packed_rows(data)
    model = load_value_model(exact(path))
    model.save_pretrained(tmp_path)
    values = PackedValueModel(model)(micro.tokens_T, micro.rows, micro.index_S)
    logits_BT1, _, mask = plain_padded_output(plain_model(str(tmp_path), values=True), data)
    before = torch.cat([torch.zeros_like(logits_BT1[:, :1, 0]), logits_BT1[:, :-1, 0]], 1)[mask]
    assert values.dtype is torch.float64
    torch.testing.assert_close(values, before, rtol=0, atol=1e-10)


def test_a_head_cut_in_chunks_changes_nothing(tmp_path):
    path = save_model(tmp_path, num_hidden_layers=1, max_position_embeddings=2048)
    data = make_batch(prompts=(1, 2, 3), responses=(1500, 1100, 400))
    micro = packed_rows(data)
    assert len(micro.index_S) > 2048  # more than the head takes at once
    packed = PackedCausalLM(load_causal_lm(exact(path)))
    log_probs, entropies = packed(micro.tokens_T, micro.rows, micro.index_S)
    (log_probs * micro.columns["advantages"] + entropies).sum().backward()
    plain = plain_model(path)
    expected, expected_entropies, mask = plain_log_probs(plain, data)
    (expected[mask] * micro.columns["advantages"] + expected_entropies[mask]).sum().backward()
    torch.testing.assert_close(log_probs, expected[mask], rtol=0, atol=1e-10)
    ours = {n: p.grad for n, p in packed.model.named_parameters()}
    assert relative(ours, {n: p.grad for n, p in plain.named_parameters()}) < 1e-12


def test_nobody_asked_gives_nothing_and_a_gradient_of_zero(path):
    packed = PackedCausalLM(load_causal_lm(exact(path)))
    nowhere = torch.zeros(0, dtype=torch.int64)
    log_probs, entropies = packed(torch.tensor([3, 4]), PackedRows.of([2]), nowhere)
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.shape == entropies.shape == (0,)
    assert all(float(p.grad.abs().sum()) == 0 for p in packed.parameters())


def test_an_untrained_value_head_follows_the_seed_and_a_trained_one_the_folder(path, tmp_path):
    torch.manual_seed(3)
    first = load_value_model(exact(path))
    torch.manual_seed(3)
    assert torch.equal(load_value_model(exact(path)).score.weight, first.score.weight)
    first.save_pretrained(tmp_path)
    assert torch.equal(load_value_model(exact(str(tmp_path))).score.weight, first.score.weight)


def test_mixed_precision_is_near_and_keeps_float32_weights(path):
    micro = packed_rows(make_batch())
    packed = PackedCausalLM(load_causal_lm(ModelConfig(path=path, precision="bfloat16")))
    assert {p.dtype for p in packed.parameters()} == {torch.float32}
    with torch.no_grad():
        whole = packed(micro.tokens_T, micro.rows, micro.index_S)[0]
        with compute_in("bfloat16", "cpu"):
            mixed = packed(micro.tokens_T, micro.rows, micro.index_S)[0]
    assert mixed.dtype is torch.float32
    assert 0 < (mixed - whole).abs().mean() < 0.05


SMALL = {**{k: v for k, v in SIZES.items() if k != "initializer_range"}, "initializer_range": 0.02}
"""With the small weights that models begin with: what is refused has to be refused before it shows."""


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Gemma2Config(**SMALL), "softcap"),
        (Gemma2Config(**SMALL, attn_logit_softcapping=None), "soft-capping"),
        (GraniteConfig(**SMALL, logits_scaling=8.0), "logits"),
        (CohereConfig(**{**SMALL, "tie_word_embeddings": True}, logit_scale=0.5), "logits"),
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "s_aux"),
        (
            BloomConfig(vocab_size=51, hidden_size=32, n_layer=2, n_head=4),
            "AttentionInterface|attends otherwise|cannot be loaded",
        ),
        (GPT2Config(vocab_size=51, n_embd=32, n_layer=2, n_head=4, n_positions=64), "dropout"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_architectures_that_would_be_computed_wrongly_are_refused(config, named, tmp_path):
    path = save_config(tmp_path, config)
    with pytest.raises(ModelError, match=named):
        PackedCausalLM(load_causal_lm(ModelConfig(path=path)))


def test_without_its_dropout_a_refused_architecture_is_exact(tmp_path):
    config = GPT2Config(
        vocab_size=51, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    path, data = save_config(tmp_path, config), make_batch()
    micro = packed_rows(data)
    log_probs, _ = PackedCausalLM(load_causal_lm(exact(path)))(micro.tokens_T, micro.rows, micro.index_S)
    expected, _, mask = plain_log_probs(plain_model(path), data)
    torch.testing.assert_close(log_probs, expected[mask], rtol=0, atol=1e-10)


def test_rows_longer_than_an_attention_window_are_refused_and_others_exact(tmp_path):
    path = save_config(tmp_path, MistralConfig(**SIZES, sliding_window=16))
    packed = PackedCausalLM(load_causal_lm(exact(path)))
    fits, too_long = make_batch(prompts=(4, 3), responses=(12, 5)), make_batch(prompts=(4, 3), responses=(13, 5))
    micro = packed_rows(fits)
    expected, _, mask = plain_log_probs(plain_model(path), fits)
    torch.testing.assert_close(packed(micro.tokens_T, micro.rows, micro.index_S)[0], expected[mask], rtol=0, atol=1e-10)
    micro = packed_rows(too_long)
    with pytest.raises(ModelError, match="row of 17 tokens is longer than the 16"):
        packed(micro.tokens_T, micro.rows, micro.index_S)


def test_bad_model_paths_are_named(tmp_path):
    folder = make_tiny_model(tmp_path / "model", 64, 2)
    check_model(str(folder))
    with pytest.raises(ModelError, match="does not exist"):
        check_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        check_model(str(tmp_path))
    shutil.copytree(folder, tmp_path / "light")
    (tmp_path / "light/model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        load_causal_lm(ModelConfig(path=str(tmp_path / "light")))


def test_damaged_models_are_refused_with_their_path(tmp_path):
    folder = make_tiny_model(tmp_path / "model", 64, 2)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "no_such_type"}))
    with pytest.raises(ModelError, match=r"model' cannot be loaded: .*no_such_type"):
        load_causal_lm(ModelConfig(path=str(folder)))
    (folder / "config.json").write_text(json.dumps({**settings, "hidden_size": 128, "num_attention_heads": 4}))
    with pytest.raises(ModelError, match="model' cannot be loaded"):
        load_causal_lm(ModelConfig(path=str(folder)))
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="model' cannot be loaded"):
        load_causal_lm(ModelConfig(path=str(folder)))


def test_a_folder_without_some_of_the_weights_is_refused(tmp_path):
    path = save_model(tmp_path / "policy")
    load_value_model(ModelConfig(path=path)).save_pretrained(tmp_path / "critic")
    with pytest.raises(ModelError, match=r"lack 1 of Qwen2ForCausalLM's, 'lm_head.weight'"):
        load_causal_lm(ModelConfig(path=str(tmp_path / "critic")))


def test_micro_batches_hold_at_least_a_token():
    with pytest.raises(ConfigError, match="micro_batch_tokens must be at least 1, not 0"):
        ModelConfig(path="x", micro_batch_tokens=0)


def test_an_empty_column_stays_empty():
    assert ragged([], torch.int64).size(0) == 0
