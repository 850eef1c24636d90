"""The main job in minutes on a laptop CPU: a tiny model learns two-digit addition by PPO with a rule reward.

    python -m recipes.quickstart [seed=1] [dir=runs/mine]

Writes the task and an untrained model, warms the model up with `recipes.sft`, trains it with `recipes.ppo`; all in one folder.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.checkpoint.atomic import latest
from hybridrl.config import launch, load
from hybridrl.data.arithmetic import write_task
from hybridrl.data.tiny_model import make_tiny_model
from recipes.ppo import ROLLOUT, PPOConfig, ppo
from recipes.sft import SFTConfig, sft

PRESETS = Path(__file__).parent / "config"


def _fresh_folder() -> str:
    return time.strftime("runs/quickstart-%Y%m%d-%H%M%S")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartConfig:
    """Where to put the run, and what it draws on.

    The recipes' own keys stand in config/arithmetic.yaml and arithmetic_sft.yaml.
    """

    dir: str = field(default_factory=_fresh_folder)
    """Folder of the run."""
    seed: int = 0
    """Draws the model, the task's split, the order of the data and the samples."""


def quickstart(config: QuickstartConfig) -> None:
    folder = Path(config.dir)
    train, test = write_task(folder / "task", seed=config.seed)
    model = make_tiny_model(folder / "model", layers=2, seed=config.seed)
    common = [f"seed={config.seed}", f"data.seed={config.seed}", f"data.path={train}"]
    warm_up = load(
        SFTConfig, [*common, f"model.path={model}", f"dir={folder / 'sft'}"], config_name="arithmetic_sft", config_dir=PRESETS
    )
    sft(warm_up)
    start = latest(folder / "sft" / "checkpoints")
    settings = [*common, f"model.path={start}/learner", f"eval_path={test}", f"dir={folder / 'ppo'}"]
    ppo(load(PPOConfig, settings, ROLLOUT, config_name="arithmetic", config_dir=PRESETS))


if __name__ == "__main__":
    launch(QuickstartConfig, quickstart)
