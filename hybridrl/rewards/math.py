"""Rewards for answers that can be compared: equal text, and equal final number.

Both take the reference from the data's field "answer" and give 1.0 or 0.0. The final number after "####" is GSM8K's convention
(Cobbe et al., 2021, arXiv:2110.14168).
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from hybridrl.protocol.errors import RewardError

MARKER = "####"

# A minus is a sign only where nothing stands before it to subtract from: "48-24" ends in 24, "= -24" in -24. Commas belong to a
# number in groups of three. A dollar sign may stand on either side of the minus.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]}%])[-\u2212]\$?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def exact_match(prompts: list[str], completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1.0 where the completion is the answer, white space around the two aside. Raises `RewardError` for a row without one."""
    if None in answer:
        raise RewardError(f"exact_match: row {answer.index(None)} has no answer; give every data line the field 'answer'")
    return [
        float(completion.strip() == str(reference).strip()) for completion, reference in zip(completions, answer, strict=True)
    ]


def numeric_answer(prompts: list[str], completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1.0 where the completion's final number equals the answer's, as decimals: 1,000 is 1000.00, and $5 or 5% is 5.

    The final number of a text is the first after its last "####", or without one there, the last of the text. A completion
    without a number earns 0.0. Raises `RewardError` for an answer without one.
    """
    rewards = []
    for row, (completion, reference) in enumerate(zip(completions, answer, strict=True)):
        expected = final_number(str(reference))
        if expected is None:
            raise RewardError(
                f"numeric_answer: the answer of row {row}, {str(reference)[:80]!r}, has no number; put the solution in the "
                "field 'answer' of the data, or use exact_match for answers in words"
            )
        rewards.append(float(final_number(completion) == expected))
    return rewards


def final_number(text: str) -> Decimal | None:
    """The number that a solution ends in, or None."""
    _, marker, tail = text.rpartition(MARKER)
    found = NUMBER.search(tail) if marker else None
    if found is None:
        numbers = list(NUMBER.finditer(text))
        if not numbers:
            return None
        found = numbers[-1]
    value = Decimal(found["digits"].replace(",", ""))
    return value.copy_negate() if found["sign"] else value  # unary minus would round to 28 digits
