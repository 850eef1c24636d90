"""A recipe as small as can be, for the tests of its command line: `name` chooses how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hybridrl.config import launch, to_yaml
from hybridrl.protocol.errors import ConfigError, DataError, DeadlineError, WorkerError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts, and how they are dealt.

    `batch_size` is counted
    in rows.
    """

    path: Path
    """A JSON-lines file of prompts."""
    batch_size: int = 32
    """Prompts in a step."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {self.batch_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""

    def __post_init__(self) -> None:
        if self.betas[0] > self.betas[1]:
            raise ConfigError("the first moment must not decay slower than the second")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """The policy."""

    adam: AdamConfig = field(default_factory=AdamConfig)
    loss: Literal["ppo", "gspo"] = "ppo"
    """The clipped objective,
    by token or by sequence.

    More of this is in the documentation.
    """
    layers: tuple[int, ...] = ()
    checkpoint_every: int | Literal["never"] = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyConfig:
    """A penalty on the divergence from the reference."""

    coefficient: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig:
    """The engine written in torch."""

    temperature: float = 1.0
    """0 is greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig(NativeConfig):
    """vLLM in the worker's own process."""

    memory_share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleConfig:
    """An example."""

    seed: int = 1
    """Of everything that is drawn."""
    name: str | None = None
    amp: bool = False
    reward_weights: dict[str, float] = field(default_factory=dict)
    penalty: PenaltyConfig | None = None
    data: DataConfig
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: NativeConfig = field(default_factory=lambda: NativeConfig(temperature=0.9))


GROUPS = {"rollout": {"native": NativeConfig, "vllm": VLLMConfig}}


def run(config: ExampleConfig) -> None:
    match config.name:
        case "data":
            raise DataError("prompts.jsonl line 3 has no 'prompt'")
        case "worker":
            raise WorkerError("actor", 1, "update", "out of memory", "Traceback (most recent call last):\n  in the worker")
        case "deadline":
            raise DeadlineError("actor.update: rank 1 has not answered for 60 s")
        case "interrupt":
            raise KeyboardInterrupt
        case "bug":
            raise ZeroDivisionError("a bug")
    print(to_yaml(config, GROUPS))


if __name__ == "__main__":
    launch(ExampleConfig, run, GROUPS)
