"""The critic's loss per token: half the squared error, clipped as in PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybridrl.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ValueClip:
    """`max((V - R)^2, (V_clipped - R)^2) / 2`, with V held within `clip` of the value before the update; 0 is off.

    The clipping is that of the reference implementation of PPO (Dhariwal et al., 2017, OpenAI Baselines), not of the paper.
    Called like a `PolicyLoss`, with the new values (T,) in the place of log-probs.
    """

    reads: ClassVar[tuple[str, ...]] = ("values", "returns")

    clip: float = 0.2
    """How far from the old value the new one counts; 0 is off."""

    def __post_init__(self) -> None:
        if not self.clip >= 0:
            raise ConfigError(f"clip must be 0 (off) or more, not {self.clip}")

    def __call__(self, values_T: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Metrics: `clip_fraction` (1 where the clipped error decides) and `squared_error` (of the new value, unclipped)."""
        old_values_T, returns_T = columns["values"], columns["returns"]
        error_T = (values_T - returns_T).square()
        worst_T = error_T
        if self.clip:
            held_T = values_T.clamp(old_values_T - self.clip, old_values_T + self.clip)
            worst_T = torch.maximum(error_T, (held_T - returns_T).square())
        metrics = {"clip_fraction": (worst_T > error_T).to(error_T.dtype), "squared_error": error_T.detach()}
        return worst_T / 2, metrics
