"""What the recipes share around their step functions: reading input, the executor, evaluation, logging, checkpoints.

The loop itself stands in each recipe. Everything that can be wrong with the input is found by `Run.check` and the
constructor, before a process starts or a file is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from hybridrl.checkpoint.atomic import resolve_resume, write_atomic
from hybridrl.config import Groups, to_yaml
from hybridrl.controller import Role, trace
from hybridrl.data.prompts import PromptOrder, PromptRows, read_rows
from hybridrl.protocol.batch import Batch, batch, objects, objects_of, ragged
from hybridrl.protocol.errors import ConfigError
from hybridrl.protocol.reference import Reference
from hybridrl.rewards.function import check_columns, load_reward
from hybridrl.tracking.metrics import Metrics, read_metrics
from hybridrl.tracking.plots import learning_curve
from hybridrl.tracking.progress import Example, Progress, before_after_table
from hybridrl.tracking.run_directory import RunDirectory
from hybridrl.workers.packed_model import check_model
from hybridrl.workers.reward import RewardConfig, texts
from hybridrl.workers.rollout import RolloutConfig

_SHOWN = (
    "reward/mean",
    "eval/score",
    "learner/loss",
    "actor/kl_reference",
    "rollout/log_prob_gap_max",
    "rollout/length_mean",
)
"""The metrics in the progress display, where a step has them."""


class Run:
    """One run of a recipe, from its checked input to its last picture. A context manager around the loop.

    `roles` as for `Executor.start`; `saved` names those whose `save` and `load` make a checkpoint; `goal` is what a
    held-out score means to the user.
    """

    def __init__(
        self, config: Any, groups: Groups, roles: Mapping[str, Role], saved: Sequence[str], goal: str = "score"
    ) -> None:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self.config, self.roles, self.saved, self.goal = config, dict(roles), saved, goal
        self._title = type(config).__name__.removesuffix("Config")
        self._yaml = to_yaml(config, groups)
        check_model(config.model.path)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self.rows = read_rows(config.data, self.tokenizer)
        self.held_out = read_rows(replace(config.data, path=config.eval_path), self.tokenizer) if config.eval_path else None
        self.order = PromptOrder(len(self.rows), config.data.batch_size, config.data.shuffle, config.data.seed)
        directory = Path(config.dir)
        self._checkpoint = resolve_resume(config.resume, directory / "checkpoints")
        self._goes_on = config.resume == "auto" or (
            self._checkpoint is not None and self._checkpoint.resolve().parent == (directory / "checkpoints").resolve()
        )
        if not self._goes_on:
            RunDirectory.refuse_if_taken(directory)
        self.state: dict[str, Any] = {"step": 0}

    def check(self, step: Callable[..., Any], columns: Sequence[str] = ("prompts", "fields", "seed")) -> None:
        """WiringError where the step function does not fit its roles; nothing is started for it."""
        trace(step, self.roles, columns, self.config.data.batch_size)

    def check_rollouts(self, rollout: RolloutConfig, reward: RewardConfig) -> None:
        """UserError where a prompt leaves no room for its response, or the reward needs what the data lines do not have."""
        for data in filter(None, (self.rows, self.held_out)):
            need = max(map(len, data.prompts)) + rollout.max_new_tokens
            if need > rollout.max_length:
                raise ConfigError(
                    f"rollout.max_length must be at least {need} (the longest prompt and rollout.max_new_tokens="
                    f"{rollout.max_new_tokens}), not {rollout.max_length}; "
                    "or lower data.max_prompt_tokens, with data.over_length=skip"
                )
            if reward.function:
                check_columns(load_reward(reward.function), reward.function, {name for line in data.fields for name in line})

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            self.executor = stack.enter_context(self.config.make_executor())
            self.m = self.executor.start(self.roles)
            self._load_checkpoint()
            path, after = Path(self.config.dir), self.state["step"] if self._checkpoint else None
            make = RunDirectory.create if not self._goes_on else partial(RunDirectory.reopen, step=after)
            self.directory = make(path, self._yaml)
            self._metrics = stack.enter_context(Metrics(self.directory.metrics, self.directory.tensorboard, after))
            self._progress = stack.enter_context(Progress(self.config.steps, self._title, _SHOWN, self.state["step"]))
            self._stack = stack.pop_all()
        for data in filter(None, (self.rows, self.held_out)):
            if data.skipped:
                self._progress.note(f"{data.skipped} lines skipped, {len(data)} rows left")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def _load_checkpoint(self) -> None:
        if self._checkpoint is not None:
            self.state = json.loads((self._checkpoint / "state.json").read_text())
            for role in self.saved:
                getattr(self.m, role).load(folder=(self._checkpoint / role).resolve()).get()

    def prompts(self, step: int) -> Reference:
        """The rows of a step: prompt tokens, data lines, and a seed for each.

        A function of the configuration and `step` alone.
        """
        rows = self.order.rows(step - 1)
        seeds = np.random.default_rng((self.config.seed, step)).integers(0, 2**62, len(rows))
        return self.executor.rows(_prompt_batch(self.rows, rows, seeds))

    def steps(self) -> Iterator[int]:
        """The steps that are left, counted from 1; measures each."""
        if self.state["step"] == 0 and self.held_out is not None and self.config.eval_every:
            self._log(0, self._evaluate(0))
        for step in range(self.state["step"] + 1, self.config.steps + 1):
            self._began = time.monotonic()
            yield step

    def finish_step(
        self, step: int, batch: Reference | None, metrics: Mapping[str, float], last: bool = False, **state: Any
    ) -> None:
        """Evaluate, write and checkpoint where it is time to; `last` makes this step the last one.

        `state` comes back in `self.state` after a resume.
        """
        last = last or step == self.config.steps
        every, whole = self.config.eval_every, dict(metrics)
        whole["time/step_s"] = time.monotonic() - self._began
        if batch is not None:
            samples = self._samples(batch[: self.config.samples_written])
            self.directory.write_samples(self.directory.rollouts, step, samples)
        if self.held_out is not None and every and (step % every == 0 or last):
            whole |= self._evaluate(step)
        self.state = {**state, "step": step}
        self._log(step, whole)
        if last or (self.config.checkpoint_every and step % self.config.checkpoint_every == 0):
            write_atomic(self.directory.checkpoints, step, self._save, self.config.keep_checkpoints)

    def finish(self) -> None:
        """The table, the picture and the last line."""
        learning_curve(self.directory.metrics, self.directory.curve, self._title)
        scores = [line["eval/score"] for line in read_metrics(self.directory.metrics) if "eval/score" in line]
        self._progress.stop()
        if scores:
            self._progress.note(before_after_table(self._examples()))
            self._progress.note(f"held-out {self.goal}: {scores[0]:.2f} -> {scores[-1]:.2f}  {self.directory.path}")

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.log(step, metrics)
        self._progress.update(step, metrics)

    def _save(self, folder: Path) -> None:
        for role in self.saved:
            getattr(self.m, role).save(folder=(folder / role).resolve()).get()
        (folder / "state.json").write_text(json.dumps(self.state))

    def _evaluate(self, step: int) -> dict[str, float]:
        assert self.held_out is not None
        count = len(self.held_out)
        prompts = self.executor.rows(_prompt_batch(self.held_out, range(count), np.zeros(count, dtype=np.int64)))
        batch = prompts | self.m.actor.generate(prompts, temperature=0.0)
        batch |= self.m.reward.score(batch)
        self.directory.write_samples(self.directory.held_out, step, self._samples(batch))
        return {"eval/score": float(batch.fetch("scores")["scores"].mean())}

    def _samples(self, batch: Reference) -> list[dict[str, Any]]:
        data = batch.fetch("tokens", "response_mask", "fields", "scores")
        prompts, completions = texts(data, self.tokenizer)
        return [
            {"prompt": prompt, "completion": completion, "score": score, "fields": fields}
            for prompt, completion, score, fields in zip(
                prompts, completions, data["scores"].tolist(), objects_of(data["fields"]), strict=True
            )
        ]

    def _examples(self, most: int = 8) -> list[Example]:
        before, after = (self.directory.read_samples(self.directory.held_out, which) for which in (0, -1))
        return [
            Example(b["prompt"], str(b["fields"].get("answer", "")), b["completion"], a["completion"], b["score"], a["score"])
            for b, a in zip(before[:most], after[:most], strict=True)
        ]


def _prompt_batch(rows: PromptRows, index: Iterable[int], seeds: np.ndarray) -> Batch:
    chosen = list(index)
    return batch(
        {
            "prompts": ragged([rows.prompts[i] for i in chosen], torch.int64),
            "fields": objects(rows.fields[i] for i in chosen),
            "seed": torch.from_numpy(seeds),
        }
    )
