"""The quickstart's task: addition, as JSON lines that hold the prompt, the answer and a target to learn from.

A line is {"prompt": "12+34=", "answer": "46", "response": "46"}. `python -m hybridrl.data.arithmetic --out DIR` writes it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from hybridrl.protocol.errors import ConfigError


def write_task(
    directory: str | Path, smallest: int = 10, largest: int = 49, seed: int = 0, held_out: int = 256
) -> tuple[Path, Path]:
    """Write every sum a+b of two numbers in [smallest, largest], in an order drawn from `seed`; return the train and test file.

    `held_out` pairs (a, b) make test.jsonl. train.jsonl holds the others, less the mirrored pairs (b, a) of the held-out ones,
    which would give the answer away: no test sum is seen in training in either order.
    """
    if not 0 <= smallest < largest <= 999:
        raise ConfigError(f"smallest and largest must be numbers from 0 to 999 in this order, not {smallest} and {largest}")
    numbers = range(smallest, largest + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    if not 1 <= held_out <= len(pairs) // 4:
        raise ConfigError(f"held_out must be from 1 to {len(pairs) // 4}, a quarter of the {len(pairs)} sums, not {held_out}")
    random.Random(seed).shuffle(pairs)
    test = pairs[:held_out]
    known = {pair for a, b in test for pair in ((a, b), (b, a))}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    train_file, test_file = folder / "train.jsonl", folder / "test.jsonl"
    _write(train_file, (pair for pair in pairs if pair not in known))
    _write(test_file, test)
    return train_file, test_file


def _write(file: Path, pairs: Iterable[tuple[int, int]]) -> None:
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b)} for a, b in pairs)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hybridrl.data.arithmetic", description="Write the addition task.")
    parser.add_argument("--out", required=True, help="directory for train.jsonl and test.jsonl")
    parser.add_argument("--smallest", type=int, default=10, help="the smallest number to add")
    parser.add_argument("--largest", type=int, default=49, help="the largest")
    parser.add_argument("--seed", type=int, default=0, help="draws the order and the held-out sums")
    parser.add_argument("--held-out", type=int, default=256, help="sums in test.jsonl")
    options = parser.parse_args(arguments)
    try:
        write_task(options.out, options.smallest, options.largest, options.seed, options.held_out)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
