"""Policy losses per token. PPO's clipped surrogate is one; to add another, write a class with the shape of `PolicyLoss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from hybridrl.protocol.errors import ConfigError


class PolicyLoss(Protocol):
    """What a policy loss is: the columns it reads, and a function of packed tokens.

    A call gets the new log-probs (T,), with a gradient, and the packed columns named in `reads`, each (T,) or (T, ...) and
    aligned with them. It returns the loss of each token (T,), and metrics of each token (T,), detached. It neither masks nor
    averages: the caller multiplies both by the weights of `aggregation` and sums, so every entry has to be finite, in the mask
    or not.
    """

    reads: ClassVar[tuple[str, ...]]

    def __call__(self, log_probs_T: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class PPOClip:
    """The clipped surrogate (Schulman et al., 2017, eq. 7), with the ratio held in [1 - clip_low, 1 + clip_high].

    Two bounds as in Yu et al., 2025 (DAPO). `dual_clip` c > 1 also bounds the loss of a negative advantage by -c A (Ye et al.,
    2020, dual-clip PPO); 0 is off. The log-ratio is clamped to +-`MAX_LOG_RATIO`, where no gradient passes.
    """

    reads: ClassVar[tuple[str, ...]] = ("old_log_probs", "advantages")

    clip_low: float = 0.2
    """How far under 1 the ratio of new to old probability counts."""
    clip_high: float = 0.2
    """How far over 1 it counts."""
    dual_clip: float = 0.0
    """Bound of the loss of a negative advantage, as a multiple of it (over 1); 0 is off."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"clip_low must be from 0 to 1, not {self.clip_low}")
        if not self.clip_high >= 0:
            raise ConfigError(f"clip_high must be 0 or more, not {self.clip_high}")
        if not (self.dual_clip == 0 or self.dual_clip > 1):
            raise ConfigError(f"dual_clip must be 0 (off) or over 1, not {self.dual_clip}")

    def __call__(self, log_probs_T: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Metrics: `clip_fraction` (1 where a bound decides the loss), `approx_kl` (k3 of old || new), `ratio` (new / old)."""
        old_log_probs_T, advantages_T = columns["old_log_probs"], columns["advantages"]
        ratio_T = (log_probs_T - old_log_probs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        plain_T = -ratio_T * advantages_T
        loss_T = torch.maximum(plain_T, -ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages_T)
        if self.dual_clip:
            bounded_T = torch.minimum(loss_T, -self.dual_clip * advantages_T)
            loss_T = torch.where(advantages_T < 0, bounded_T, loss_T)
        metrics = {
            "clip_fraction": (loss_T != plain_T).to(loss_T.dtype),
            "approx_kl": kl_estimate(old_log_probs_T, log_probs_T.detach(), "k3"),
            "ratio": ratio_T.detach(),
        }
        return loss_T, metrics
