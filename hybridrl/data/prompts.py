"""Prompt files: JSON lines in, token rows out, and the order in which the steps of a run go through them.

Every problem of a file is a `DataError` that names the file, the line (counted from 1), what is wrong and how to mend it.
Nothing is dropped unless the configuration says "skip", and what was dropped is counted.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hybridrl.protocol.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which file, how a line becomes a prompt, and how many prompts make a step.

    `instruction` is put after the prompt's own text as it is. With template "chat" the two are one user message of the
    tokenizer's chat template; with "plain" they are the prompt. `response_field`, where set, names the text that a supervised
    run learns.
    """

    path: str
    """JSON-lines file of prompts."""
    prompt_field: str = "prompt"
    """Field of a line that holds the prompt."""
    response_field: str = ""
    """Field that holds the text to learn (supervised recipes)."""
    template: Literal["plain", "chat"] = "plain"
    """plain: the prompt as it is; chat: through the tokenizer's chat template."""
    instruction: str = ""
    """Text after the prompt's own."""
    max_prompt_tokens: int = 256
    """The longest prompt."""
    over_length: Literal["stop", "skip"] = "stop"
    """What to do with a longer one."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """What to do with a line that cannot be used."""
    batch_size: int = 128
    """Prompts per step."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    seed: int = 0
    """Draws the order."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("path must name a JSON-lines file, not ''")
        if not self.prompt_field:
            raise ConfigError("prompt_field must name a field of the data lines, not ''")
        _one_of("template", self.template, "plain", "chat")
        _one_of("over_length", self.over_length, "stop", "skip")
        _one_of("bad_lines", self.bad_lines, "stop", "skip")
        _at_least("max_prompt_tokens", self.max_prompt_tokens, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("seed", self.seed, 0)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The usable rows of a file, all lists in file order.

    `prompts[i]` are token ids; `texts[i]` the same prompt as text, template and instruction included; `fields[i]` the whole
    data line. `responses[i]` are the target's token ids, ended by the end-of-text token; the list is empty when no response
    field was asked for. `skipped` counts the lines left out.
    """

    prompts: list[list[int]]
    texts: list[str]
    fields: list[dict[str, Any]]
    responses: list[list[int]]
    skipped: int

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, slots=True)
class _Line:
    """A data line that parsed: where it stands ("FILE line N"), and what it holds."""

    place: str
    fields: dict[str, Any]
    prompt: str
    response: str


@dataclass(slots=True)
class _Skips:
    """How many lines were left out, and the first reason, for the case that no row is left."""

    count: int = 0
    first: DataError | None = None

    def handle(self, error: DataError, policy: str) -> None:
        if policy == "stop":
            raise error
        self.count += 1
        self.first = self.first or error


def read_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptRows:
    """Read and tokenize a file.

    A plain prompt gets the special tokens that the tokenizer adds by default (such as a beginning-of-text token). Blank lines
    are no rows and are not counted.

    Raises `DataError` for a file or line that cannot be used, `ConfigError` where the tokenizer lacks what the configuration
    needs.
    """
    if config.template == "chat" and not tokenizer.chat_template:
        raise ConfigError("template is 'chat', but the model's tokenizer has no chat template; set data.template=plain")
    if config.response_field and tokenizer.eos_token_id is None:
        raise ConfigError("response_field needs a tokenizer with an end-of-text token, and the model's has none")
    skips = _Skips()
    lines = list(_parsed_lines(config, skips))
    texts = [_render(config, tokenizer, line.prompt) for line in lines]
    prompts = _tokenize(tokenizer, texts, add_special_tokens=config.template == "plain")
    kept = [i for i, line in enumerate(lines) if _fits(config, line.place, len(prompts[i]), skips)]
    if not kept:
        if skips.first is None:
            raise DataError(f"{config.path} is empty; write one JSON object a line, or set data.path to another file")
        raise DataError(f"{config.path}: no row is left, all {skips.count} lines were skipped; the first: {skips.first}")
    responses: list[list[int]] = []
    if config.response_field:
        targets = _tokenize(tokenizer, [lines[i].response for i in kept], add_special_tokens=False)
        responses = [[*tokens, tokenizer.eos_token_id] for tokens in targets]
    return PromptRows(
        prompts=[prompts[i] for i in kept],
        texts=[texts[i] for i in kept],
        fields=[lines[i].fields for i in kept],
        responses=responses,
        skipped=skips.count,
    )


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Which rows each step takes, as a pure function of the step: a run that resumes needs its step number and nothing else.

    Epoch after epoch, each a permutation of all `count` rows drawn from (seed, epoch), is laid end to end, and step `s` takes
    places `s * batch_size` up to `(s + 1) * batch_size`. Batches run over the border of an epoch, so no row is dropped, every
    batch is full, and a batch may be larger than the file.
    """

    count: int
    batch_size: int
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("count", self.count, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("seed", self.seed, 0)

    def rows(self, step: int) -> list[int]:
        """The `batch_size` row indices of a step, counted from 0."""
        place, end = step * self.batch_size, (step + 1) * self.batch_size
        rows: list[int] = []
        while place < end:
            epoch, first = divmod(place, self.count)
            last = min(self.count, first + end - place)
            rows += _epoch(self.count, self.seed, epoch)[first:last].tolist() if self.shuffle else range(first, last)
            place += last - first
        return rows


@functools.lru_cache(maxsize=2)
def _epoch(count: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch. Kept for the epoch at hand and its neighbour: drawing it costs time in `count`."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def _parsed_lines(config: DataConfig, skips: _Skips) -> Iterator[_Line]:
    # Split at newline bytes alone: str.splitlines would also cut at separators such as U+2028 that JSON strings may hold.
    for number, raw in enumerate(_read_bytes(config.path).split(b"\n"), start=1):
        if not raw.strip():
            continue
        place = f"{config.path} line {number}"
        try:
            fields = _parse(place, raw)
            prompt = _text(place, fields, config.prompt_field, "data.prompt_field")
            response = _text(place, fields, config.response_field, "data.response_field") if config.response_field else ""
        except DataError as error:
            skips.handle(error, config.bad_lines)
            continue
        yield _Line(place, fields, prompt, response)


def _read_bytes(path: str) -> bytes:
    file = Path(path).expanduser()
    try:
        return file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError as error:
        siblings = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        raise DataError(f"{path}: no such file{nearest(file.name, siblings)}; set data.path to a JSON-lines file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a directory; set data.path to a JSON-lines file in it") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); set data.path to a file that can") from error


def _parse(place: str, raw: bytes) -> dict[str, Any]:
    mend = "mend the line, or leave such lines out with data.bad_lines=skip"
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno}); {mend}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of open brackets
        raise DataError(f"{place}: not JSON that can be read ({error}); {mend}") from error
    if not isinstance(value, dict):
        raise DataError(f'{place}: a JSON {_json_type(value)}, not an object such as {{"prompt": ...}}; {mend}')
    return value


def _text(place: str, fields: dict[str, Any], name: str, key: str) -> str:
    """The text in field `name`; `key` is the configuration key that chose it."""
    if name not in fields:
        held = ", ".join(f"'{known}'" for known in fields) or "no fields"
        raise DataError(
            f"{place}: no field '{name}'{nearest(name, fields)}, the line has {held}; set {key} to one of its fields"
        )
    value = fields[name]
    mend = f"mend the line, set {key} to another field, or leave such lines out with data.bad_lines=skip"
    if not isinstance(value, str):
        raise DataError(f"{place}: field '{name}' is a JSON {_json_type(value)}, not a string; {mend}")
    if not value.strip():
        raise DataError(f"{place}: field '{name}' is empty; {mend}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise DataError(
            f"{place}: field '{name}' holds half of a surrogate pair ({half!r}), which is no text; {mend}"
        ) from error
    return value


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _render(config: DataConfig, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    text = prompt + config.instruction
    if config.template == "plain":
        return text
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False)["input_ids"]


def _fits(config: DataConfig, place: str, tokens: int, skips: _Skips) -> bool:
    """Whether a prompt of so many tokens can be used; counts or raises where it cannot."""
    if tokens <= config.max_prompt_tokens:
        return True
    error = DataError(
        f"{place}: the prompt has {tokens} tokens, over the limit of {config.max_prompt_tokens}; raise data.max_prompt_tokens, "
        "or leave such prompts out with data.over_length=skip"
    )
    skips.handle(error, config.over_length)
    return False


def _one_of(name: str, value: object, *known: str) -> None:
    if value not in known:
        choices = " or ".join(f"'{choice}'" for choice in known)
        raise ConfigError(f"{name} must be {choices}, not {value!r}{nearest(str(value), known)}")


def _at_least(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, not {value}")
