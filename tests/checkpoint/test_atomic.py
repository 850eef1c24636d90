"""Checkpoints are whole or absent, even when the writer is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.checkpoint.atomic import checkpoints, latest, prepare, publish, resolve_resume, step_of, write_atomic
from hybridrl.protocol.errors import UserError

# Writes checkpoints without end, each a nest of files that all hold the step, as fast as it can.
WRITER = """
import sys
from pathlib import Path
from hybridrl.checkpoint.atomic import latest, step_of, write_atomic

directory = Path(sys.argv[1])
found = latest(directory)
step = step_of(found) if found else 0
while True:
    step += 1
    def write(into):
        for rank in range(4):
            shard = into / f"rank_{rank}"
            shard.mkdir()
            (shard / "weights").write_bytes(step.to_bytes(4, "little") * 20_000)
    write_atomic(directory, step, write, keep=2)
    print(step, flush=True)
"""


def put(step: int):
    return lambda into: (into / "state").write_text(str(step))


def assert_whole(checkpoint: Path) -> None:
    expected = step_of(checkpoint).to_bytes(4, "little") * 20_000
    assert sorted(shard.name for shard in checkpoint.iterdir()) == [f"rank_{rank}" for rank in range(4)]
    assert all((shard / "weights").read_bytes() == expected for shard in checkpoint.iterdir())


def test_keeps_the_latest(tmp_path):
    for step in (5, 10, 15, 1_000_000):
        published = write_atomic(tmp_path / "checkpoints", step, put(step), keep=2)
    assert published == tmp_path / "checkpoints" / "step_1000000"
    assert [entry.name for entry in checkpoints(tmp_path / "checkpoints")] == ["step_000015", "step_1000000"]
    assert latest(tmp_path / "checkpoints") == published
    assert (published / "state").read_text() == "1000000"


def test_a_failed_write_publishes_nothing_and_its_remains_go_at_the_next(tmp_path):
    def fail(into: Path) -> None:
        (into / "state").write_text("half")
        raise OSError("disk full")

    write_atomic(tmp_path, 1, put(1), keep=1)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path, 2, fail, keep=1)
    assert step_of(latest(tmp_path)) == 1
    assert len(list(tmp_path.iterdir())) == 2
    write_atomic(tmp_path, 3, put(3), keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000003"]


def test_several_writers_share_one_prepared_directory(tmp_path):
    writing = prepare(tmp_path, 7)
    for rank in range(3):
        (writing / f"rank_{rank}").write_text(str(rank))
    assert latest(tmp_path) is None
    assert sorted(entry.name for entry in publish(writing, keep=1).iterdir()) == ["rank_0", "rank_1", "rank_2"]


def test_a_step_is_written_once(tmp_path):
    write_atomic(tmp_path, 4, put(4), keep=1)
    with pytest.raises(UserError, match="exists already"):
        prepare(tmp_path, 4)


@pytest.mark.parametrize("attempt", range(6))
def test_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path, attempt):
    moments = random.Random(attempt)
    published = 0
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        first = int(writer.stdout.readline())
        assert first == published + 1
        time.sleep(moments.uniform(0, 0.1))
        os.kill(writer.pid, signal.SIGKILL)
        printed = [first, *(int(line) for line in writer.stdout)]
        writer.wait()
        found = checkpoints(tmp_path)
        for checkpoint in found:
            assert_whole(checkpoint)
        published = step_of(found[-1])
        assert published in (printed[-1], printed[-1] + 1)  # the kill may have come between the rename and the print
        assert len(found) <= 3  # two kept, and at most one that was about to be removed


def test_resume(tmp_path):
    mine, other = tmp_path / "mine" / "checkpoints", tmp_path / "other" / "checkpoints"
    assert resolve_resume("auto", mine) is None
    for directory in (mine, other):
        for step in (1, 2):
            write_atomic(directory, step, put(step), keep=2)
    assert resolve_resume("never", mine) is None
    assert resolve_resume("auto", mine) == mine / "step_000002"
    assert resolve_resume(str(other / "step_000001"), mine) == other / "step_000001"
    assert resolve_resume(str(other), mine) == other / "step_000002"
    assert resolve_resume(str(tmp_path / "other"), mine) == other / "step_000002"
    assert resolve_resume(str(mine / "step_000002"), mine) == mine / "step_000002"


def test_resume_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(UserError, match=r"resume=nowhere holds no checkpoint: give .* resume=auto .* resume=never"):
        resolve_resume("nowhere", tmp_path)
    for step in (1, 2):
        write_atomic(tmp_path, step, put(step), keep=2)
    with pytest.raises(UserError, match="not the latest checkpoint of this run, step_000002 is"):
        resolve_resume(str(tmp_path / "step_000001"), tmp_path)


def test_a_name_that_is_no_checkpoint():
    with pytest.raises(UserError, match="like step_000120"):
        step_of(Path("model"))
