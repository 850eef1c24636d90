"""What the user sees while a run goes: a live display on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_TREND = 32


class Progress:
    """`with Progress(120, "PPO", ["reward/mean", "eval/exact_match"]) as progress: progress.update(step, metrics)`.

    `columns` are the metric keys to show, in order; one that a step lacks keeps its last value. `start` is the step that a
    resumed run continues from. Only the time spent here since `start` counts in the remaining time.
    """

    def __init__(self, total: int, title: str, columns: Sequence[str], start: int = 0, console: Console | None = None) -> None:
        self._total, self._title, self._start, self._step = total, title, start, start
        self._seen: dict[str, list[float]] = {column: [] for column in columns}
        self._console = console or Console()
        self._began = self._updated = time.monotonic()
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps of the total are done; `metrics` are its numbers, of which the columns are shown."""
        self._step, self._updated = step, time.monotonic()
        shown = {column: float(metrics[column]) for column in self._seen if column in metrics}
        for column, value in shown.items():
            # A new list, not an append: the display's thread may be reading the old one.
            self._seen[column] = [*self._seen[column], value][-_TREND:]
        if not self._console.is_terminal:
            numbers = "  ".join(f"{column} {_number(value)}" for column, value in shown.items())
            self._line(f"{self._title} {step}/{self._total}  {numbers}  {self._clock()}")

    def note(self, message: RenderableType) -> None:
        """Print a text or a table; on a terminal it stays above the live display."""
        self._console.print(message, markup=False, highlight=False)

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the display as it is; notes go below it from here on."""
        if self._console.is_terminal:
            self._live.stop()

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _clock(self) -> str:
        now, done = time.monotonic(), self._step - self._start
        elapsed = _duration(now - self._began)
        if done < 1:
            return f"elapsed {elapsed}"
        pace = (self._updated - self._began) / done
        left = max(pace * (self._total - self._step) - (now - self._updated), 0.0)
        return f"{pace:.3g} s/step  elapsed {elapsed}  left {_duration(left)}"

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total, completed=self._step, width=32, finished_style="green")
        head.add_row(
            Text(self._title, style="bold"), bar, Text(f"{self._step}/{self._total}"), Text(self._clock(), style="dim")
        )
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(justify="right", min_width=9)
        table.add_column(style="green", no_wrap=True)
        for column, values in self._seen.items():
            table.add_row(column, _number(values[-1]) if values else "-", sparkline(values))
        return Group(head, Padding(table, (0, 0, 0, 2)))


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt answered before and after training; the scores are the reward function's, above 0 for a good answer."""

    prompt: str
    expected: str
    before: str
    after: str
    before_score: float
    after_score: float


def before_after_table(rows: Iterable[Example], title: str = "Before and after") -> Table:
    """The answers side by side: good ones green, others red."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("prompt", "expected", "before", "after"):
        table.add_column(name, overflow="fold")
    for row in rows:
        before, after = _judged(row.before, row.before_score), _judged(row.after, row.after_score)
        table.add_row(Text(row.prompt), Text(row.expected), before, after)
    return table


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, scaled from the least to the greatest; "·" for NaN and infinities, "" for none."""
    finite = [value for value in values if math.isfinite(value)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    return "".join(_bar((value - low) / span if span else 0.0) if math.isfinite(value) else "·" for value in values)


def _bar(share: float) -> str:
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]


def _judged(answer: str, score: float) -> Text:
    return Text(f"✓ {answer}", style="green") if score > 0 else Text(f"✗ {answer}", style="red")


def _number(value: float) -> str:
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
