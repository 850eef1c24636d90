"""The directory of a run: what is in it, and how a resumed run continues it.

    config.yaml                 the resolved configuration, which `--config-dir RUN --config-name config` takes back
    metrics.jsonl               one line per step
    tensorboard/                the same numbers for TensorBoard
    rollouts/step_000010.jsonl  samples of a step, one per line
    held_out/step_000010.jsonl  the answers to the held-out prompts after a step, one per line
    checkpoints/                see `hybridrl.checkpoint.atomic`
    curve.png                   the learning curve

Invariant: a step's line in `metrics.jsonl` is written before its checkpoint. So a run resumed at step k finds every line up to
k, drops those after it (they are of steps that will be run again), and ends with the file of a run that was never interrupted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridrl.protocol.errors import UserError

_ROLLOUTS = re.compile(r"step_(\d+)\.jsonl")


class RunDirectory:
    """The paths of a run. Make one with `create` or `reopen`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.rollouts = path / "rollouts"
        self.held_out = path / "held_out"
        self.checkpoints = path / "checkpoints"
        self.curve = path / "curve.png"

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> RunDirectory:
        """A new run. Raises UserError when the directory holds anything."""
        cls.refuse_if_taken(path)
        run = cls(path)
        run._lay_out(config_yaml)
        return run

    @staticmethod
    def refuse_if_taken(path: Path) -> None:
        """Raises UserError when the directory holds anything."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} is not empty: continue the run in it with resume=auto, or choose another with dir=...")

    @classmethod
    def reopen(cls, path: Path, config_yaml: str, step: int | None) -> RunDirectory:
        """The run that `path` holds, as it was after `step`; None (no checkpoint yet) keeps nothing of it. May not exist yet.

        Raises UserError when the directory holds something else than a run.
        """
        run = cls(path)
        if not run.config.exists():
            return cls.create(path, config_yaml)
        run._lay_out(config_yaml)
        kept = -1 if step is None else step
        write_text_atomic(run.metrics, "".join(_lines_until(run.metrics, kept)))
        for file in (*run.rollouts.iterdir(), *run.held_out.iterdir()):
            match = _ROLLOUTS.fullmatch(file.name)
            if match and int(match[1]) > kept:
                file.unlink()
        return run

    def write_samples(self, folder: Path, step: int, samples: Iterable[Mapping[str, object]]) -> Path:
        """Write the samples of a step, one JSON object per line, to `rollouts` or `held_out`; returns the file."""
        file = folder / f"step_{step:06d}.jsonl"
        write_text_atomic(file, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
        return file

    def read_samples(self, folder: Path, which: int) -> list[dict[str, Any]]:
        """The samples of one of a folder's steps, in order of step: 0 is the first, -1 the last. Empty if there are none."""
        files = sorted(folder.glob("step_*.jsonl"))
        return [json.loads(line) for line in files[which].read_text(encoding="utf-8").splitlines()] if files else []

    def _lay_out(self, config_yaml: str) -> None:
        for folder in (self.tensorboard, self.rollouts, self.held_out, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.config, config_yaml)


def write_text_atomic(file: Path, text: str) -> None:
    """Replace the file at once: whoever reads it, and whenever we are killed, it holds the old text or the new."""
    writing = file.with_name(f".{file.name}.writing")
    with writing.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    writing.replace(file)


def _lines_until(file: Path, step: int) -> list[str]:
    """The lines of the steps up to `step`. A last line without its end was cut by a kill, and is dropped."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as stream:
        return [line for line in stream if line.endswith("\n") and json.loads(line)["step"] <= step]
