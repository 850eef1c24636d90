"""Reading prompt files: what comes out, every message for what cannot be used, and the order of the steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hybridrl.data.prompts import DataConfig, PromptOrder, PromptRows, read_rows
from hybridrl.data.tiny_model import byte_tokenizer
from hybridrl.protocol.errors import ConfigError, DataError

TOKENIZER = byte_tokenizer()

NATALIA = {
    "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72",
}
JANET = {
    "question": "Janet\u2019s ducks lay 16 eggs per day and cost \u20ac9\u2028each. How many eggs in 2 days?",
    "answer": "16 \u00d7 2 = <<16*2=32>>32\n#### 32",
}


def write(folder: Path, *lines: object) -> str:
    """A file with a line for each value; strings are written as they are."""
    file = folder / "train.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n" for line in lines))
    return str(file)


def read(path: str, **options: object) -> PromptRows:
    return read_rows(DataConfig(path=path, **options), TOKENIZER)  # type: ignore[arg-type]


def refused(path: str, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **options)
    return str(caught.value)


def test_a_plain_row_is_the_prompt_and_the_instruction(tmp_path: Path) -> None:
    line = {"prompt": "12+34=", "answer": "46", "meta": {"digits": [2, 2], "carry": None}}
    rows = read(write(tmp_path, line), instruction=" ?")
    assert rows.texts == ["12+34= ?"]
    assert rows.prompts == [TOKENIZER("12+34= ?")["input_ids"]]
    assert rows.fields == [line]
    assert (rows.responses, rows.skipped, len(rows)) == ([], 0, 1)


def test_gsm8k_lines_with_target_come_back_exactly(tmp_path: Path) -> None:
    rows = read(write(tmp_path, NATALIA, JANET), prompt_field="question", response_field="answer")
    assert [TOKENIZER.decode(prompt) for prompt in rows.prompts] == [NATALIA["question"], JANET["question"]]
    assert [TOKENIZER.decode(response) for response in rows.responses] == [
        NATALIA["answer"] + "<eos>",
        JANET["answer"] + "<eos>",
    ]
    assert rows.fields == [NATALIA, JANET]


def test_chat_puts_prompt_and_instruction_into_one_user_message(tmp_path: Path) -> None:
    rows = read(write(tmp_path, {"prompt": "hi"}), template="chat", instruction="\nBe brief.")
    assert rows.texts == ["<user>hi\nBe brief.<assistant>"]
    known = TOKENIZER.get_vocab()
    assert rows.prompts == [[known["<user>"], *TOKENIZER("hi\nBe brief.")["input_ids"], known["<assistant>"]]]


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    rows = read(str(file))
    assert (rows.texts, rows.skipped) == (["a", "b"], 0)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "a"})
    message = refused(str(tmp_path / "trian.jsonl"))
    assert message.endswith("trian.jsonl: no such file (did you mean 'train.jsonl'?); set data.path to a JSON-lines file")
    assert "no such file; set data.path" in refused(str(tmp_path / "nowhere" / "train.jsonl"))


def test_a_directory_and_what_lies_under_a_file_are_refused(tmp_path: Path) -> None:
    assert refused(str(tmp_path)) == f"{tmp_path} is a directory; set data.path to a JSON-lines file in it"
    assert "cannot be read (Not a directory)" in refused(write(tmp_path, {"prompt": "a"}) + "/x")


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    message = refused(write(tmp_path, text), bad_lines="skip")
    assert message == f"{tmp_path}/train.jsonl is empty; write one JSON object a line, or set data.path to another file"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a" "b"}', "not JSON (Expecting ',' delimiter at column 16); mend the line"),
        ("[" * 100_000, "not JSON that can be read (maximum recursion depth exceeded"),
        ("9" * 5000, "not JSON that can be read (Exceeds the limit"),
        ('["prompt"]', 'a JSON array, not an object such as {"prompt": ...}; mend the line'),
        ("17", "a JSON number, not an object"),
        (
            '{"promt": "a", "answer": "b"}',
            "no field 'prompt' (did you mean 'promt'?), the line has 'promt', 'answer'; set data.prom",
        ),
        ("{}", "no field 'prompt', the line has no fields"),
        (
            '{"prompt": 17}',
            "field 'prompt' is a JSON number, not a string; mend the line, set data.prompt_field to another field",
        ),
        ('{"prompt": null}', "field 'prompt' is a JSON null, not a string"),
        ('{"prompt": [{"role": "user"}]}', "field 'prompt' is a JSON array, not a string"),
        ('{"prompt": " \\n"}', "field 'prompt' is empty; mend the line"),
        ('{"prompt": "a\\ud800"}', "field 'prompt' holds half of a surrogate pair ('\\ud800'), which is no text"),
    ],
)
def test_a_bad_line_stops_with_its_place_or_is_skipped_and_counted(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path, {"prompt": "first"}, "", line, {"prompt": "last"})
    assert refused(path).startswith(f"{path} line 3: {said}")
    rows = read(path, bad_lines="skip")
    assert (rows.texts, rows.skipped) == (["first", "last"], 1)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert refused(str(file)) == f"{file} line 2: not UTF-8 (byte 16 of the line); save the file as UTF-8"


def test_a_missing_or_empty_response_names_its_own_key(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "answer": ""})
    assert "line 1: field 'answer' is empty; mend the line, set data.response_field" in refused(path, response_field="answer")
    assert "no field 'response', the line has 'prompt', 'answer'; set data.response_field" in refused(
        path, response_field="response"
    )


def test_a_prompt_over_the_limit_stops_or_is_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "four"}, {"prompt": "seven.."})
    assert refused(path, max_prompt_tokens=4) == (
        f"{path} line 2: the prompt has 7 tokens, over the limit of 4; raise data.max_prompt_tokens, "
        "or leave such prompts out with data.over_length=skip"
    )
    rows = read(path, max_prompt_tokens=4, over_length="skip")
    assert (rows.texts, rows.skipped) == (["four"], 1)
    assert read(path, max_prompt_tokens=7).skipped == 0


def test_the_limit_counts_instruction_and_template(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "four"})
    assert "has 8 tokens" in refused(path, max_prompt_tokens=7, instruction="!!", template="chat")
    assert len(read(path, max_prompt_tokens=8, instruction="!!", template="chat").prompts[0]) == 8


def test_skipping_every_line_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    path = write(tmp_path, "x", {"prompt": "too long"})
    message = refused(path, bad_lines="skip", over_length="skip", max_prompt_tokens=2)
    assert message.startswith(f"{path}: no row is left, all 2 lines were skipped; the first: {path} line 1: not JSON")


def test_a_tokenizer_that_lacks_what_is_asked_for_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "answer": "b"})
    bare = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer)
    with pytest.raises(
        ConfigError, match=r"^template is 'chat', but the model's tokenizer has no chat template; set data.template"
    ):
        read_rows(DataConfig(path=path, template="chat"), bare)
    with pytest.raises(ConfigError, match=r"^response_field needs a tokenizer with an end-of-text token"):
        read_rows(DataConfig(path=path, response_field="answer"), bare)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": ""}, "path must name a JSON-lines file, not ''"),
        ({"prompt_field": ""}, "prompt_field must name a field of the data lines, not ''"),
        ({"template": "chta"}, "template must be 'plain' or 'chat', not 'chta' (did you mean 'chat'?)"),
        ({"over_length": "cut"}, "over_length must be 'stop' or 'skip', not 'cut'"),
        ({"bad_lines": True}, "bad_lines must be 'stop' or 'skip', not True"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1, not 0"),
        ({"batch_size": -4}, "batch_size must be at least 1, not -4"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, not 2.5"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"seed": True}, "seed must be a whole number, not True"),
    ],
)
def test_a_wrong_configuration_names_its_field(options: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(**{"path": "train.jsonl", **options})
    assert str(caught.value) == said


@settings(deadline=None)
@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 100),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    steps=st.integers(1, 12),
    resume=st.integers(0, 11),
)
def test_steps_lay_epochs_end_to_end_and_resume_exactly(
    count: int, batch_size: int, shuffle: bool, seed: int, steps: int, resume: int
) -> None:
    order = PromptOrder(count, batch_size, shuffle, seed)
    batches = [order.rows(step) for step in range(steps)]
    assert all(len(batch) == batch_size for batch in batches)
    assert all(type(row) is int for batch in batches for row in batch)
    taken = [row for batch in batches for row in batch]
    epochs = [taken[start : start + count] for start in range(0, len(taken), count)]
    for epoch in epochs[:-1]:
        assert Counter(epoch) == Counter(range(count))
    assert len(set(epochs[-1])) == len(epochs[-1])
    again = PromptOrder(count, batch_size, shuffle, seed)
    assert [again.rows(step) for step in range(resume, steps)] == batches[resume:]


def test_epochs_and_seeds_shuffle_differently_and_no_shuffle_is_file_order() -> None:
    order = PromptOrder(100, 100, seed=3)
    assert order.rows(0) != order.rows(1)
    assert order.rows(0) != PromptOrder(100, 100, seed=4).rows(0)
    assert order.rows(0) != list(range(100))
    assert PromptOrder(3, 4, shuffle=False).rows(1) == [1, 2, 0, 1]


def test_the_permutation_is_the_one_that_older_runs_resume_with() -> None:
    assert PromptOrder(8, 8, seed=0).rows(0) == [2, 4, 3, 6, 5, 0, 1, 7]


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^count must be at least 1, not 0"):
        PromptOrder(0, 4)
    with pytest.raises(ConfigError, match=r"^batch_size must be at least 1, not 0"):
        PromptOrder(4, 0)
