"""A run that is killed and resumed ends with the metrics of one that never stopped, to the bit."""

import os
import signal
import subprocess
import time

import pytest

from hybridrl.tracking.metrics import read_metrics, without_time

from .conftest import ROOT, command, environment, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def metrics(folder):
    return [without_time(line) for line in read_metrics(folder / "metrics.jsonl")]


def kill_after(arguments, file, lines):
    """Start a run and kill -9 it once its metrics have so many lines."""
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 100
    while not (file.exists() and file.read_text().count("\n") >= lines):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_resume_after_kill_is_bitwise(inputs, tmp_path):
    keys = inputs | {"steps": 8, "checkpoint_every": 2, "eval_every": 3, "kl.controller": "adaptive", "kl.horizon": 100}
    assert run("ppo", keys, dir=tmp_path / "whole").returncode == 0
    kill_after(command("ppo", keys, dir=tmp_path / "cut"), tmp_path / "cut" / "metrics.jsonl", lines=6)
    done = run("ppo", keys, dir=tmp_path / "cut", resume="auto")
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert len(metrics(tmp_path / "whole")) == 9
