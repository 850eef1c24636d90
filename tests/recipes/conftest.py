"""A tiny model and task for whole runs, and the command line of a recipe as a user types it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.data.arithmetic import write_task
from hybridrl.data.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """The arguments that every run of these tests needs, as a dictionary of keys."""
    folder = tmp_path_factory.mktemp("inputs")
    train, test = write_task(folder, smallest=0, largest=9, held_out=16)
    model = make_tiny_model(folder / "model", hidden=64, layers=2)
    return {
        "model.path": model,
        "data.path": train,
        "eval_path": test,
        "reward.function": "hybridrl.rewards.math:exact_match",
        "rollout.max_new_tokens": 4,
        "rollout.max_length": 32,
        "rollout.precision": "float32",
        "data.batch_size": 8,
        "ppo.minibatch_size": 4,
        "steps": 2,
    }


def arguments(keys, **changes):
    return [f"{key}={value}" for key, value in (keys | changes).items()]


def command(recipe, keys, **changes):
    return [sys.executable, "-m", f"recipes.{recipe}", *arguments(keys, **changes)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(recipe, keys, timeout=100, **changes):
    return subprocess.run(
        command(recipe, keys, **changes), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout
    )
