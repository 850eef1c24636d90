"""The numbers of a run: one JSON line per step, and the same as TensorBoard scalars.

Keys under `time/` are wall-clock. They are the only ones that may differ between two runs of one configuration, so that
equality of runs is checked by comparing everything else (`without_time`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

TIME = "time/"


class Metrics:
    """Writes `metrics.jsonl` and TensorBoard. Use as a context manager, or call `close`.

    `after` is the step that a resumed run continues from: TensorBoard drops what it had of later steps (of all, for None).
    The lines of later steps have been dropped by `RunDirectory.reopen`.
    """

    def __init__(self, file: Path, tensorboard: Path, after: int | None = None) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._last = -1 if after is None else after
        self._board = SummaryWriter(str(tensorboard), purge_step=self._last + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step, keys sorted, and hand it to the operating system before returning.

        Steps must grow: a step is logged once. NaN and infinities are written as the strings "nan", "inf", "-inf", since JSON
        has no numbers for them; `read_metrics` turns them back.
        """
        if step <= self._last:
            raise ValueError(f"step {step} was logged after step {self._last}: log each step once, in order")
        self._last = step
        numbers = {key: float(metrics[key]) for key in sorted(metrics)}
        line = {"step": step, **{key: value if math.isfinite(value) else str(value) for key, value in numbers.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for key, value in numbers.items():
            self._board.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._board.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_metrics(file: Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl`, each with its "step" (an int) and its numbers."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    return [{key: value if key == "step" else float(value) for key, value in line.items()} for line in lines]


def without_time(line: Mapping[str, float]) -> dict[str, float]:
    """A line less its wall-clock keys: what two runs of one configuration agree on."""
    return {key: value for key, value in line.items() if not key.startswith(TIME)}
