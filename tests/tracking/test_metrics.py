"""Metric lines are exact, valid JSON, and continue after a resume as if never interrupted."""

import json
import math
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridrl.tracking.metrics import Metrics, read_metrics, without_time
from hybridrl.tracking.run_directory import RunDirectory


def test_a_line_is_readable_at_once_sorted_and_exact(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as metrics:
        metrics.log(1, {"reward/mean": 1 / 3, "actor/loss": -1e-17})
        assert (tmp_path / "metrics.jsonl").read_text() == f'{{"step": 1, "actor/loss": -1e-17, "reward/mean": {1 / 3!r}}}\n'
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "actor/loss": -1e-17, "reward/mean": 1 / 3}]


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as metrics:
        metrics.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(line["a"]) and line["b"] == math.inf and line["c"] == -math.inf


def test_a_step_is_logged_once_in_order(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as metrics:
        metrics.log(2, {"loss": 1.0})
        with pytest.raises(ValueError, match="step 2 was logged after step 2"):
            metrics.log(2, {"loss": 1.0})


def test_a_resumed_run_has_the_lines_of_an_uninterrupted_one(tmp_path):
    def train(run: RunDirectory, steps: range, after: int | None) -> None:
        with Metrics(run.metrics, run.tensorboard, after) as metrics:
            for step in steps:
                metrics.log(step, {"loss": 1 / step, "time/step": float(len(steps))})

    whole, resumed = RunDirectory.create(tmp_path / "whole", ""), RunDirectory.create(tmp_path / "resumed", "")
    train(whole, range(1, 9), None)
    train(resumed, range(1, 7), None)
    time.sleep(1.1)  # TensorBoard orders the files of a run by the second they were opened in
    train(RunDirectory.reopen(resumed.path, "", 4), range(5, 9), 4)
    one, other = read_metrics(whole.metrics), read_metrics(resumed.metrics)
    assert [without_time(line) for line in one] == [without_time(line) for line in other]
    assert one != other
    board = EventAccumulator(str(resumed.tensorboard))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == list(range(1, 9))
