"""The display: plain lines off a terminal, a live table on one."""

import io
import math
import re

import pytest
from rich.console import Console

from hybridrl.tracking.progress import Example, Progress, before_after_table, sparkline


def test_one_plain_line_per_step_off_a_terminal():
    stream = io.StringIO()
    with Progress(3, "PPO", ["reward/mean", "eval/exact_match"], start=1, console=Console(file=stream)) as progress:
        progress.note("resumed from [step 1]")
        progress.update(2, {"reward/mean": 0.25, "eval/exact_match": 1 / 3, "actor/loss": 9.0})
        progress.update(3, {"reward/mean": 0.5})
    note, first, second = stream.getvalue().splitlines()
    assert note == "resumed from [step 1]"
    assert first.startswith("PPO 2/3  reward/mean 0.25  eval/exact_match 0.3333  ")
    assert re.fullmatch(r"PPO 3/3  reward/mean 0\.5  \S+ s/step  elapsed 0:00  left 0:00", second)


def test_a_live_display_on_a_terminal():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=100)
    with Progress(2, "PPO", ["reward/mean", "eval/exact_match"], console=console) as progress:
        for step in (1, 2):
            progress.update(step, {"reward/mean": step / 2})
    last = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", stream.getvalue()).splitlines()[-3:]
    assert "PPO" in last[0] and "2/2" in last[0]
    assert last[1].split() == ["reward/mean", "1", "▁█"]
    assert last[2].split() == ["eval/exact_match", "-"]


def test_the_display_ends_when_the_run_fails():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with pytest.raises(KeyboardInterrupt), Progress(2, "PPO", ["loss"], console=console):
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, math.nan, 1.0, math.inf]) == "▁·█·"


def test_before_and_after():
    stream = io.StringIO()
    Console(file=stream, width=80).print(before_after_table([Example("[1]+2=", "3", "5", "3", 0.0, 1.0)]))
    assert [line.split() for line in stream.getvalue().splitlines() if "[1]" in line] == [["[1]+2=", "3", "✗", "5", "✓", "3"]]
