"""Finding reward functions by name, calling them, and every way in which they can be wrong."""

from __future__ import annotations

import asyncio
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrl.protocol.errors import ConfigError, RewardError
from hybridrl.rewards.function import check_columns, load_reward, score
from hybridrl.rewards.math import exact_match, numeric_answer

PROMPTS = ["12+34=", "1+1=", "2+2=", "3+3="]
COMPLETIONS = ["46", "2", "5", "6"]
COLUMNS: dict[str, list[Any]] = {"answer": ["46", "2", "4", "6"], "difficulty": [3, 1, 1, 1]}


def run(function: Any) -> list[float]:
    return score(function, "mine", PROMPTS, COMPLETIONS, COLUMNS)


def refused(function: Any) -> str:
    with pytest.raises(RewardError) as caught:
        run(function)
    return str(caught.value)


def write(folder: Path, text: str) -> str:
    file = folder / "my_rewards.py"
    file.write_text(text)
    return str(file)


def test_load_from_a_module() -> None:
    assert load_reward("hybridrl.rewards.math:numeric_answer") is numeric_answer


def test_load_from_a_file_whose_name_hides_nothing(tmp_path: Path) -> None:
    file = tmp_path / "math.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Length:\n    scale: float\n"
        "    def __call__(self, completions, **_):\n        return [self.scale * len(c) for c in completions]\n"
        "half = Length(0.5)\n"
    )
    assert run(load_reward(f"{file}:half")) == [1.0, 0.5, 0.5, 0.5]
    assert math.sqrt(4) == 2


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    for value in (1.0, 22.0):
        path = write(tmp_path, f"def f(completions):\n    return [{value}] * len(completions)\n")
        assert run(load_reward(f"{path}:f")) == [value] * 4


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("numeric_answer", "must be 'package.module:name' or 'path/to/file.py:name'"),
        (":numeric_answer", "must be 'package.module:name' or 'path/to/file.py:name'"),
        ("hybridrl.rewards.math:", "must be 'package.module:name' or 'path/to/file.py:name'"),
        (
            "hybridrl.rewards.maths:f",
            "no module 'hybridrl.rewards.maths' (did you mean 'hybridrl.rewards.math'?); install it, or name",
        ),
        ("hybridlr.rewards.math:f", "no module 'hybridlr' (did you mean 'hybridrl'?); install it"),
        ("json.nowhere.deep:f", "no module 'json.nowhere'"),
        ("colorsys.nowhere:f", "no module 'colorsys.nowhere'; install it"),
        (
            "hybridrl.rewards.math:numeric_answers",
            "hybridrl.rewards.math has no 'numeric_answers' (did you mean 'numeric_answer'?); it has",
        ),
        ("hybridrl.rewards.math:MARKER", "'MARKER' is a str; name a function f(prompts, completions, **columns)"),
        ("hybridrl.rewards.math:Decimal", "'Decimal' is a class; name a function"),
        ("builtins:max", "the arguments of 'max' cannot be read; wrap it in a Python function"),
    ],
)
def test_a_spec_that_names_no_function_is_refused(spec: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_reward(spec)
    assert str(caught.value).startswith(f"reward '{spec}'") and said in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"no file .*/my_reward.py \(did you mean 'my_rewards.py'\?\); give the path"):
        load_reward(f"{tmp_path}/my_reward.py:f")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax (at {file}:2)"),
        ("x = 1\nimport surely_not_installed\n", "ModuleNotFoundError: No module named 'surely_not_installed' (at {file}:2)"),
        ("x = {}['key']\n", "KeyError: 'key' (at {file}:1)"),
    ],
)
def test_a_file_that_fails_on_import_names_the_line(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_reward(f"{file}:f")
    assert str(caught.value) == f"reward '{file}:f': {file} fails on import: {said.format(file=file)}; mend it there"
    assert caught.value.__cause__ is not None


def test_a_module_whose_own_import_is_missing_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rewards_with_a_need.py"
    file.write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_reward("rewards_with_a_need:f")
    assert f"fails on import: ModuleNotFoundError: No module named 'surely_not_installed' (at {file}:1)" in str(caught.value)


def test_only_the_columns_that_the_function_takes_are_passed() -> None:
    def named(completions: list[str], answer: list[str], weight: float = 2.0) -> list[float]:
        return [weight * (c == a) for c, a in zip(completions, answer, strict=True)]

    def every(prompts: list[str], **columns: list[Any]) -> list[float]:
        assert set(columns) == {"completions", "answer", "difficulty"}
        return [float(d) for d in columns["difficulty"]]

    assert run(named) == [2.0, 2.0, 0.0, 2.0]
    assert run(every) == [3.0, 1.0, 1.0, 1.0]
    assert run(exact_match) == [1.0, 1.0, 0.0, 1.0]


def test_a_missing_column_is_refused_before_anything_runs() -> None:
    def hard(completions: list[str], dificulty: list[int]) -> list[float]:
        raise AssertionError

    with pytest.raises(RewardError) as caught:
        check_columns(hard, "mine", COLUMNS)
    said = (
        "reward 'mine' needs the column 'dificulty' (did you mean 'difficulty'?), and the data has 'answer', 'difficulty'; "
        "rename the argument, or add the field to the data"
    )
    assert str(caught.value) == refused(hard) == said
    check_columns(exact_match, "mine", ["answer"])


def test_a_column_with_the_name_of_an_argument_is_refused() -> None:
    with pytest.raises(RewardError, match="the data's column 'completions' has the name of an argument; rename the field"):
        score(exact_match, "mine", PROMPTS, COMPLETIONS, {**COLUMNS, "completions": ["", "", "", ""]})


async def slow(completions: list[str], **_: Any) -> list[float]:
    """Async: all rows at once, each after a turn of the loop."""

    async def one(completion: str) -> float:
        await asyncio.sleep(0)
        return float(completion)

    return await asyncio.gather(*map(one, completions))


def test_async_functions_are_awaited_inside_a_running_loop_too() -> None:
    async def notebook() -> list[float]:
        return run(slow)

    assert run(slow) == asyncio.run(notebook()) == [46.0, 2.0, 5.0, 6.0]


def test_async_calls_share_one_loop_so_that_clients_can_be_kept() -> None:
    loops = []

    async def keeps(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    run(keeps), run(keeps)
    assert loops[0] is loops[1]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_an_exception_names_function_type_message_and_line(tmp_path: Path, prefix: str) -> None:
    file = write(
        tmp_path, f"import json\n{prefix}def f(completions, **_):\n    return [json.loads('nope') for c in completions]\n"
    )
    with pytest.raises(RewardError) as caught:
        run(load_reward(f"{file}:f"))
    assert str(caught.value) == (
        f"reward 'mine' raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) (at {file}:3); mend the function"
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_hybridrl_and_an_interrupt_pass_as_they_are() -> None:
    def stop(completions: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(RewardError, match=r"^numeric_answer: the answer of row 0"):
        score(numeric_answer, "mine", ["a"], ["1"], {"answer": ["blue"]})
    with pytest.raises(KeyboardInterrupt):
        run(stop)


@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5, True, -2],
        (1.0, 0.5, 1.0, -2.0),
        [np.float32(1), np.int64(0) + 0.5, Fraction(1), -2],
        np.array([1, 0.5, 1, -2]),
        torch.tensor([1, 0.5, 1, -2]),
    ],
)
def test_all_kinds_of_numbers_come_back_as_floats(result: Any) -> None:
    rewards = run(lambda completions: result)
    assert rewards == [1.0, 0.5, 1.0, -2.0]
    assert all(type(reward) is float for reward in rewards)


def test_a_wrong_count_is_refused() -> None:
    said = "reward 'mine' returned 3 rewards for 4 completions; return one for each"
    assert refused(lambda completions: [1.0, 2.0, 3.0]) == said


@pytest.mark.parametrize(
    ("result", "kind"), [(None, "NoneType"), (1.0, "float"), ("good", "str"), ({0: 1.0}, "dict"), (torch.tensor(1.0), "Tensor")]
)
def test_what_is_no_list_is_refused(result: Any, kind: str) -> None:
    assert (
        refused(lambda completions: result) == f"reward 'mine' returned a {kind}; return a list with one number per completion"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1e39, "1e+39"),
        (10**400, "1000"),
        ("x" * 500, "'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
        ("1.0", "'1.0'"),
        (Decimal(1), "Decimal('1')"),
        ([1.0], "[1.0]"),
        (1j, "1j"),
    ],
)
def test_a_value_that_is_no_finite_number_is_named_with_its_row(value: Any, shown: str) -> None:
    message = refused(lambda completions: [0.0, 1.0, value, value])
    assert message.startswith(f"reward 'mine' returned {shown}")
    assert "for row 2 (prompt '2+2=', completion '5'); return a finite number, such as 0.0" in message


def test_a_long_completion_is_shortened_at_its_middle() -> None:
    with pytest.raises(RewardError) as caught:
        score(lambda completions: [None], "mine", ["p\n"], ["start " + "x" * 5000 + " the end"], {})
    assert f"(prompt 'p\\n', completion 'start {'x' * 51}...{'x' * 12} the end')" in str(caught.value)
