"""Rewards that compare answers."""

from __future__ import annotations

from decimal import Decimal

import pytest

from hybridrl.protocol.errors import RewardError
from hybridrl.rewards.math import exact_match, final_number, numeric_answer

CLIPS = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (CLIPS, 1.0),
        ("#### 72", 1.0),
        ("####72.", 1.0),
        ("#### $72.00", 1.0),
        ("She sold 72 clips.", 1.0),
        ("\\boxed{72}", 1.0),
        ("#### 72\n\nNatalia has 3 friends.", 1.0),
        ("#### 70, no:\n#### 72", 1.0),
        ("72 #### ", 1.0),
        ("#### 24", 0.0),
        ("#### -72", 0.0),
        ("72 clips in 2 months", 0.0),
        ("72 or not #### 24", 0.0),
        ("seventy-two", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_answers(completion: str, reward: float) -> None:
    assert numeric_answer(["How many clips?"], [completion], [CLIPS]) == [reward]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,000", "1000"),
        ("#### 1,450,000.50", "1450000.5"),
        ("12,34", "34"),
        ("1, 2, 3", "3"),
        ("= -24", "-24"),
        ("48-24", "24"),
        ("48 - 24", "24"),
        ("(48)-24", "24"),
        ("x-24", "24"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22125 degrees", "-5"),
        ("50%.", "50"),
        ("50%-20", "20"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("3.14.", "3.14"),
        ("#### 007", "7"),
        ("-123456789012345678901234567890123", "-123456789012345678901234567890123"),
    ],
)
def test_forms_of_numbers(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "####", "-", "$", ",", "#### ."])
def test_no_number(text: str) -> None:
    assert final_number(text) is None


def test_references_may_be_json_numbers() -> None:
    assert numeric_answer(["", ""], ["#### 46", "#### 0.50"], [46, 0.5]) == [1.0, 1.0]
    assert exact_match([""], ["46"], [46]) == [1.0]


def test_a_reference_without_a_number_is_refused_with_its_row() -> None:
    with pytest.raises(RewardError, match="the answer of row 1, 'blue', has no number; put the solution in the field 'answer'"):
        numeric_answer(["", ""], ["1", "2"], ["1", "blue"])


def test_a_row_without_answer_is_refused_rather_than_wrong() -> None:
    with pytest.raises(RewardError, match=r"^exact_match: row 1 has no answer; give every data line the field 'answer'"):
        exact_match(["", ""], ["1", "None"], ["1", None])
    with pytest.raises(RewardError, match=r"^numeric_answer: the answer of row 0, 'None', has no number"):
        numeric_answer([""], ["1"], [None])


def test_exact_match_ignores_white_space_around_and_nothing_else() -> None:
    completions = [" 46\n", "46", "046", "46.", ""]
    assert exact_match([""] * 5, completions, ["46", " 46", "46", "46", "46"], digits=[2] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
