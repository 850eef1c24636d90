"""Checkpoint directories that are whole or absent.

Invariant: a directory named `step_000120` is complete. What is being written or removed carries another name, and a name
changes by one `rename`, which the file system does at once or not at all; so a process killed at any moment leaves the old
checkpoints, or the old ones and the new one. Writing straight into `step_000120` and marking it with a "done" file would not
do: a reader that forgets the marker, or a marker that reaches the disk before the data, takes half a checkpoint for a whole
one. For the same reason data are forced to the disk before the rename, and the parent directory after it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from hybridrl.protocol.errors import UserError

_WRITING = ".writing-"
_REMOVING = ".removing-"
_COMPLETE = re.compile(r"step_(\d{6,})")


def write_atomic(directory: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Publish what `write` puts into the directory it is given, as the checkpoint of `step`; keep the `keep` latest."""
    writing = prepare(directory, step)
    write(writing)
    return publish(writing, keep)


def prepare(directory: Path, step: int) -> Path:
    """An empty directory to write the checkpoint of `step` into; remains of interrupted writes are removed.

    One process calls this and tells the path to every rank that writes: a second call would remove what the first rank wrote.
    """
    final = directory / f"step_{step:06d}"
    if final.exists():
        raise UserError(f"{final} exists already: resume from it, or use another run directory")
    directory.mkdir(parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if entry.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(entry)
    writing = directory / (_WRITING + final.name)
    writing.mkdir()
    return writing


def publish(writing: Path, keep: int) -> Path:
    """Turn a prepared directory into a checkpoint, then remove all but the `keep` latest.

    Called once, after every rank has closed its files.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    _sync_tree(writing)
    final = writing.with_name(writing.name.removeprefix(_WRITING))
    writing.rename(final)
    _sync(final.parent)
    for old in checkpoints(final.parent)[:-keep]:
        _remove(old)
    return final


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory`, earliest step first; none when it does not exist."""
    if not directory.is_dir():
        return []
    return sorted((entry for entry in directory.iterdir() if _COMPLETE.fullmatch(entry.name)), key=step_of)


def latest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step in `directory`."""
    found = checkpoints(directory)
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    """120 for `.../step_000120`."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    if match is None:
        raise UserError(f"{checkpoint} is not a checkpoint: its name must be like step_000120")
    return int(match[1])


def resolve_resume(resume: str, directory: Path) -> Path | None:
    """The checkpoint to start from: None to start at the beginning.

    `resume` is "auto" (the latest in `directory`, if there is one), "never", or the path of a checkpoint or of a directory of
    checkpoints. A checkpoint of this same `directory` must be its latest: two continuations in one place cannot be told apart.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return latest(directory)
    given = Path(resume)
    if given.is_dir() and _COMPLETE.fullmatch(given.name):
        chosen: Path | None = given
    else:
        chosen = latest(given) or latest(given / "checkpoints")
    if chosen is None:
        raise UserError(
            f"resume={resume} holds no checkpoint: give a directory like runs/first/checkpoints/step_000120, "
            f"resume=auto for the latest of this run, or resume=never to start afresh"
        )
    newest = latest(directory)
    if newest is not None and chosen.resolve().parent == directory.resolve() and chosen.name != newest.name:
        raise UserError(
            f"resume={resume} is not the latest checkpoint of this run, {newest.name} is: "
            f"resume into another run directory, or remove the later checkpoints"
        )
    return chosen


def _remove(checkpoint: Path) -> None:
    removing = checkpoint.with_name(_REMOVING + checkpoint.name)
    checkpoint.rename(removing)
    shutil.rmtree(removing)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
