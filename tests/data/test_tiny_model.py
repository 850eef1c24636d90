"""The tiny model: its tokenizer round-trips any text, and the saved folder loads by path."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.data.tiny_model import SPECIAL, byte_tokenizer, main, make_tiny_model
from hybridrl.protocol.errors import ConfigError

TOKENIZER = byte_tokenizer()


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips_with_one_token_a_byte(text: str) -> None:
    text = unicodedata.normalize("NFC", text)
    assume(not any(token in text for token in SPECIAL))
    tokens = TOKENIZER(text)["input_ids"]
    assert len(tokens) == len(text.encode("utf-8"))
    assert TOKENIZER.decode(tokens) == text


def test_the_name_of_a_special_token_is_that_token() -> None:
    assert TOKENIZER("<eos>")["input_ids"] == [1]


def test_decode_keeps_spaces_before_punctuation() -> None:
    text = "Janet\u2019s  ducks , don 't . \n\t\u00bd 12+34="
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_the_folder_loads_by_path_with_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, hidden=64, layers=1))
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert len(tokenizer) == 260
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    text = "12+34=46 caf\u00e9"
    assert tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert tokenizer.decode([*tokenizer(text)["input_ids"], 1, 0], skip_special_tokens=True) == text
    asked = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    told = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "ho"}], tokenize=False)
    assert (prompt, told) == ("<user>hi<assistant>", "<user>hi<assistant>ho<eos>")


def test_the_model_loads_by_path_generates_and_has_equal_heads_for_tensor_parallel(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    assert model.num_parameters() == 1_051_776
    config = model.config
    assert config.hidden_size // config.num_attention_heads == 32
    assert config.vocab_size % 4 == config.num_attention_heads % 4 == config.num_key_value_heads % 2 == 0
    assert model.generation_config.eos_token_id == config.eos_token_id == 1
    tokens = model.generate(torch.tensor([TOKENIZER("12+34=")["input_ids"]]), max_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, 9) or tokens[0, -1] == 1


def test_equal_seeds_make_equal_weights_and_leave_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    models = [make_tiny_model(tmp_path / name, 64, 1, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert torch.equal(torch.rand(3), expected)
    a, b, c = (AutoModelForCausalLM.from_pretrained(model).state_dict() for model in models)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


@pytest.mark.parametrize("hidden", [0, 32, 100])
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, hidden: int) -> None:
    with pytest.raises(ConfigError, match=f"^hidden must be a multiple of 64, not {hidden}"):
        make_tiny_model(tmp_path, hidden=hidden)
    with pytest.raises(ConfigError, match=r"^layers must be at least 1, not 0"):
        make_tiny_model(tmp_path, layers=0)


def test_the_command_writes_a_model_and_refuses_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "hybridrl.data.tiny_model",
        "--hidden",
        "64",
        "--layers",
        "1",
        "--out",
        str(tmp_path / "model"),
    ]
    subprocess.run(command, capture_output=True, check=True)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), "--hidden", "65"])
    assert "hidden must be a multiple of 64, not 65" in capsys.readouterr().err
