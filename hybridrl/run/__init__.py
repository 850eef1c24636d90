"""The frame around a step function: configuration, input, evaluation, logging, checkpoints.

The loop itself stands in each recipe.
"""

from hybridrl.run.config import ROLLOUT, RecipeConfig
from hybridrl.run.frame import Run
from hybridrl.run.metrics import combined, rollout_metrics

__all__ = ["ROLLOUT", "RecipeConfig", "Run", "combined", "rollout_metrics"]
