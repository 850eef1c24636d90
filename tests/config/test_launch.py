"""The command line: exit statuses, what goes to which stream, and no traceback for what the user can mend."""

import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parent / "example_recipe.py"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RECIPE), *arguments], capture_output=True, text=True, check=False)


def test_runs_with_overrides_and_a_preset_beside_the_recipe():
    done = command("--config-name", "small", "seed=5", "rollout.temperature=0.7")
    assert (done.returncode, done.stderr) == (0, "")
    assert "seed: 5\n" in done.stdout
    assert done.stdout.rstrip().endswith("temperature: 0.7\n  memory_share: 0.5")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["seed=1"], 2, "data.path has no value: add data.path=... to the command or the preset"),
        (["data.path=x", "data.batch_size=-4"], 2, "data.batch_size must be at least 1, not -4"),
        (["--sed", "1"], 2, "unrecognized arguments: --sed; see --help"),
        (["--config-name"], 2, "argument --config-name: expected one argument; see --help"),
        (["data.path=x", "name=data"], 2, "prompts.jsonl line 3 has no 'prompt'"),
        (
            ["data.path=x", "name=worker"],
            1,
            "actor.update failed on rank 1: out of memory\n\nTraceback (most recent call last):\n  in the worker",
        ),
        (["data.path=x", "name=deadline"], 1, "actor.update: rank 1 has not answered for 60 s"),
        (["data.path=x", "name=interrupt"], 130, "interrupted"),
    ],
)
def test_failures(arguments, status, message):
    done = command(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"error: {message}\n")


def test_a_bug_keeps_its_traceback():
    done = command("data.path=x", "name=bug")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("ZeroDivisionError: a bug\n")


def test_print_config_does_not_run():
    done = command("data.path=x", "name=bug", "--print-config", "rollout=vllm")
    assert done.returncode == 0
    assert done.stdout.startswith("defaults:\n- base\n- override rollout: vllm\n- _self_\nseed: 1\nname: bug\n")
