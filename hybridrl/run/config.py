"""What every recipe is told, whatever its algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config import Groups
from hybridrl.controller import Executor, LocalExecutor, Pool
from hybridrl.data.prompts import DataConfig
from hybridrl.protocol.errors import ConfigError, at_least
from hybridrl.workers.packed_model import ModelConfig
from hybridrl.workers.rollout import NativeRollout, VLLMRollout

ROLLOUT: Groups = {"rollout": {"native": NativeRollout, "vllm": VLLMRollout}}
"""The choice of engine, `rollout=native` or `rollout=vllm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeConfig:
    """What every recipe is told: where it runs, how long, and what it leaves behind."""

    dir: str = "runs/latest"
    """Folder of the run: configuration, metrics, samples, checkpoints."""
    steps: int = 100
    """Steps of the step function."""
    seed: int = 0
    """Draws samples, mini-batches and untrained heads."""
    executor: Literal["local", "ray"] = "local"
    """local: in this process; ray: one process per rank."""
    ranks: int = 1
    """Ranks of each pool."""
    placement: Literal["colocated", "split"] = "colocated"
    """colocated: all roles share one pool; split: critic and reference have a pool of their own."""
    ray_address: str = ""
    """Of a running Ray cluster, or auto; empty starts one on this machine."""
    deadline_s: float = 1800.0
    """Seconds that any one call may take before the run stops and names it."""
    eval_every: int = 10
    """Steps between held-out evaluations; 0 is never."""
    eval_path: str = ""
    """JSON-lines file of held-out prompts, read like data.path."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 is at the end only."""
    keep_checkpoints: int = 2
    """How many of the latest checkpoints stay."""
    resume: str = "never"
    """auto: go on from this folder's latest checkpoint; or the path of one."""
    samples_written: int = 8
    """Rows of each step whose text is written to the folder."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """The prompts."""

    def __post_init__(self) -> None:
        at_least(self, steps=1, ranks=1, eval_every=0, checkpoint_every=0, keep_checkpoints=1, seed=0, samples_written=0)
        if not self.deadline_s > 0:
            raise ConfigError(f"deadline_s must be over 0, not {self.deadline_s}")
        if self.executor == "local" and self.ranks > 1:
            raise ConfigError(f"ranks must be 1 with executor=local, not {self.ranks}; add executor=ray")

    def pools(self) -> tuple[Pool, Pool]:
        """(of the actor and the reward, of the critic and the reference)."""
        main = Pool("main", self.ranks)
        return main, main if self.placement == "colocated" else Pool("second", self.ranks)

    def make_executor(self) -> Executor:
        if self.executor == "local":
            return LocalExecutor(self.seed)
        from hybridrl.controller.ray import RayConfig, RayExecutor

        return RayExecutor(RayConfig(self.ray_address, self.deadline_s, self.seed))
