"""Supervised fine-tuning: the mean negative log-likelihood of given responses.

python -m recipes.sft model.path=MODEL data.path=train.jsonl data.response_field=response
python -m recipes.sft --help
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hybridrl.config import launch
from hybridrl.controller import Groups, Result, Role
from hybridrl.protocol.batch import Batch, batch, ragged
from hybridrl.protocol.errors import ConfigError
from hybridrl.protocol.reference import Reference
from hybridrl.run import RecipeConfig, Run
from hybridrl.workers import Learner, LearnerConfig, OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig(RecipeConfig):
    """Supervised fine-tuning on prompts and responses."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    stop_loss: float = 0.0
    """Stop once the mean loss of the last 5 steps is under this; 0 is off."""


def sft_step(m: Groups, batch: Reference) -> Result:
    return m.learner.update(batch)


def examples(run: Run, step: int) -> Batch:
    """Prompt and response of the rows of a step, the response masked in."""
    pairs = [(run.rows.prompts[i], run.rows.responses[i]) for i in run.order.rows(step - 1)]
    masks = [[False] * len(prompt) + [True] * len(response) for prompt, response in pairs]
    tokens = [prompt + response for prompt, response in pairs]
    return batch({"tokens": ragged(tokens, torch.int64), "response_mask": ragged(masks, torch.bool)})


def sft(config: SFTConfig) -> None:
    if not config.data.response_field:
        raise ConfigError("data.response_field has no value: name the field of the data lines that holds the text to learn")
    roles = {"learner": Role(Learner, LearnerConfig(config.model, config.optimizer), config.pools()[0])}
    run = Run(config, {}, roles, saved=("learner",))
    run.check(sft_step, columns=("tokens", "response_mask"))
    with run:
        recent: list[float] = run.state.get("recent", [])
        for step in run.steps():
            metrics = sft_step(run.m, run.executor.rows(examples(run, step))).get()
            recent = [*recent, metrics["learner/loss"]][-5:]
            enough = len(recent) == 5 and sum(recent) / 5 < config.stop_loss
            run.finish_step(step, None, metrics, last=enough, recent=recent)
            if enough:
                break
        run.finish()


if __name__ == "__main__":
    launch(SFTConfig, sft)
