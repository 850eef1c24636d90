"""A run directory refuses to be overwritten, and is cut back to the step that a run resumes from."""

import json

import pytest

from hybridrl.protocol.errors import UserError
from hybridrl.tracking.run_directory import RunDirectory


def finished_run(path, steps):
    run = RunDirectory.create(path, "seed: 1\n")
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": step / 2}) + "\n" for step in range(steps + 1)))
    for step in range(1, steps + 1):
        run.write_samples(run.rollouts, step, [{"response": "é", "reward": 1.0}])
        run.write_samples(run.held_out, step, [{"response": str(step)}])
    return run


def test_lays_out_a_new_run(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "first", "seed: 1\n")
    assert run.config.read_text() == "seed: 1\n"
    assert sorted(entry.name for entry in run.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "held_out",
        "rollouts",
        "tensorboard",
    ]


def test_refuses_a_directory_in_use(tmp_path):
    finished_run(tmp_path, 1)
    with pytest.raises(UserError, match=r"is not empty: continue the run in it with resume=auto, or choose another with dir="):
        RunDirectory.create(tmp_path, "seed: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"


def test_reopening_drops_what_came_after(tmp_path):
    run = finished_run(tmp_path, 5)
    with run.metrics.open("a") as file:
        file.write('{"step": 6, "lo')  # cut by a kill
    reopened = RunDirectory.reopen(tmp_path, "seed: 1\nsteps: 9\n", step=3)
    assert [json.loads(line)["step"] for line in reopened.metrics.read_text().splitlines()] == [0, 1, 2, 3]
    for folder in (reopened.rollouts, reopened.held_out):
        assert sorted(file.name for file in folder.iterdir()) == [f"step_00000{step}.jsonl" for step in (1, 2, 3)]
    assert reopened.config.read_text() == "seed: 1\nsteps: 9\n"


def test_reopening_without_a_checkpoint_starts_over(tmp_path):
    finished_run(tmp_path, 2)
    reopened = RunDirectory.reopen(tmp_path, "seed: 1\n", step=None)
    assert reopened.metrics.read_text() == ""
    assert not any((*reopened.rollouts.iterdir(), *reopened.held_out.iterdir()))


def test_reopening_nothing_makes_a_new_run(tmp_path):
    assert RunDirectory.reopen(tmp_path / "new", "seed: 1\n", step=None).config.exists()


def test_reopening_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(UserError, match="is not empty"):
        RunDirectory.reopen(tmp_path, "seed: 1\n", step=None)


def test_samples_are_json_lines_and_come_back(tmp_path):
    run = RunDirectory.create(tmp_path, "")
    assert run.read_samples(run.held_out, -1) == []
    first, last = [{"response": "né\nle", "reward": 0.5}, {"response": "", "reward": 0.0}], [{"response": "x", "reward": 1.0}]
    assert run.write_samples(run.held_out, 0, first).name == "step_000000.jsonl"
    run.write_samples(run.held_out, 10, last)
    assert run.read_samples(run.held_out, 0) == first
    assert run.read_samples(run.held_out, -1) == last
