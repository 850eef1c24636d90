"""The addition task: right sums, nothing of the test in training, equal files for equal seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.data.arithmetic import write_task
from hybridrl.protocol.errors import ConfigError


def pairs(file: Path) -> list[tuple[int, int]]:
    """The pairs of a file, every line checked."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        a, b = row["prompt"].removesuffix("=").split("+")
        assert row == {"prompt": f"{a}+{b}=", "answer": str(int(a) + int(b)), "response": str(int(a) + int(b))}
        found.append((int(a), int(b)))
    return found


def test_every_sum_is_in_one_file_but_for_mirrors_of_held_out_ones(tmp_path: Path) -> None:
    train, test = map(pairs, write_task(tmp_path))
    assert len(test) == 256
    assert len(set(train)) == len(train) and len(set(test)) == len(test)
    mirrors = {(b, a) for a, b in test}
    assert not set(train) & (set(test) | mirrors)
    assert set(train) | set(test) | mirrors == {(a, b) for a in range(10, 50) for b in range(10, 50)}


def test_the_seed_decides_the_files(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        texts.append([file.read_bytes() for file in write_task(tmp_path / name, smallest=0, largest=9, seed=seed, held_out=20)])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"largest": 1000}, "smallest and largest must be numbers from 0 to 999 in this order, not 10 and 1000"),
        ({"smallest": 60}, "smallest and largest must be numbers from 0 to 999 in this order, not 60 and 49"),
        ({"smallest": 0, "largest": 9, "held_out": 26}, "held_out must be from 1 to 25, a quarter of the 100 sums, not 26"),
        ({"held_out": 0}, "held_out must be from 1 to 400"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        write_task(tmp_path, **options)


def test_the_command_writes_the_files_and_refuses_with_status_2(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hybridrl.data.arithmetic",
        "--out",
        str(tmp_path / "task"),
        "--smallest",
        "0",
        "--largest",
        "9",
    ]
    done = subprocess.run([*command, "--held-out", "9"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert len(pairs(tmp_path / "task" / "test.jsonl")) == 9
    refused = subprocess.run([*command, "--held-out", "99"], capture_output=True, text=True)
    assert refused.returncode == 2 and "held_out must be from 1 to 25" in refused.stderr and "Traceback" not in refused.stderr
