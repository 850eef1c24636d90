"""The divergence of the policy from a reference: estimators per token, and what its coefficient does over a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from hybridrl.protocol.errors import ConfigError, nearest

Estimator = Literal["k1", "k2", "k3", "abs"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: past it a float32 may overflow, and infinity times a weight of 0 is not 0."""

_MAX_ERROR = 0.2
"""The relative error that `AdaptiveKL` reacts to, at most (Ziegler et al., 2019)."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: Estimator) -> Tensor:
    """KL(policy || reference) per token, from the log-probs of tokens that the policy drew; any shape, both alike.

    With `r = reference / policy` (Schulman, 2020, "Approximating KL divergence"): k1 = -log r, unbiased; k2 = (log r)^2 / 2,
    low variance; k3 = r - 1 - log r, unbiased and never negative, with `log r` clamped to +-`MAX_LOG_RATIO`; abs = |log r|.
    Gradients are those of the expressions: the expected gradient of k1 is 0, that of k2 the divergence's own, and that of k3
    the gradient of KL(reference || policy). Raises ConfigError for an unknown kind.
    """
    log_ratio = ref_log_probs - log_probs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return log_ratio.expm1() - log_ratio
    if kind == "abs":
        return log_ratio.abs()
    raise _unknown("estimator", kind, get_args(Estimator))


@dataclass(frozen=True, slots=True)
class FixedKL:
    """A coefficient that stays. The same methods as `AdaptiveKL`; `coef` is all there is to save."""

    coef: float

    def update(self, kl: float, n: int) -> FixedKL:
        """Itself."""
        return self


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """A coefficient steered so that the divergence seen stays near `target` (Ziegler et al., 2019, section 2.2).

    `target` is in the unit of the `kl` given to `update` (the paper's: nats per row), `horizon` in that of `n` (rows): how many
    it takes to change the coefficient by the relative error. `coef` is all the state there is.
    """

    coef: float
    target: float
    horizon: float

    def update(self, kl: float, n: int) -> AdaptiveKL:
        """The value after `n` rows of mean divergence `kl`. Raises ConfigError for an `n` that could take `coef` to 0."""
        if n * _MAX_ERROR >= self.horizon:
            raise ConfigError(f"horizon must be over {n * _MAX_ERROR:g} for steps of {n} rows, not {self.horizon:g}")
        error = min(max((kl - self.target) / self.target, -_MAX_ERROR), _MAX_ERROR)
        return replace(self, coef=self.coef * (1 + error * n / self.horizon))


@dataclass(frozen=True, slots=True)
class KLConfig:
    """The penalty that keeps the policy near its reference.

    `placement`: "reward" takes it off each token's reward (no gradient flows), "loss" adds it to the policy's loss, "off" asks
    for no reference at all. `coef` is the (first) coefficient; `target` and `horizon` are `AdaptiveKL`'s.
    """

    placement: Literal["reward", "loss", "off"] = "reward"
    """Taken off each token's reward, added to the policy's loss, or off."""
    estimator: Estimator = "k1"
    """k1, k2, k3 or abs (Schulman, 2020)."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether the coefficient stays, or is steered towards the target."""
    coef: float = 0.05
    """The (first) coefficient."""
    target: float = 6.0
    """Adaptive: the divergence to hold, in nats per row."""
    horizon: float = 10_000.0
    """Adaptive: rows over which the coefficient reacts."""

    def __post_init__(self) -> None:
        _one_of("placement", self.placement, ("reward", "loss", "off"))
        _one_of("estimator", self.estimator, get_args(Estimator))
        _one_of("controller", self.controller, ("fixed", "adaptive"))
        if not self.coef >= 0:
            raise ConfigError(f"coef must be 0 or more, not {self.coef}")
        if not self.target > 0:
            raise ConfigError(f"target must be over 0, not {self.target}")
        if not self.horizon > 0:
            raise ConfigError(f"horizon must be over 0, not {self.horizon}")
        if self.placement == "loss" and self.estimator == "k1":
            raise ConfigError("estimator 'k1' has an expected gradient of 0 as a loss: use 'k2' or 'k3', or placement 'reward'")

    def first(self) -> FixedKL | AdaptiveKL:
        """The controller a run begins with."""
        if self.controller == "adaptive":
            return AdaptiveKL(self.coef, self.target, self.horizon)
        return FixedKL(self.coef)


def _one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _unknown(field, value, known)


def _unknown(field: str, value: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(f"{field} must be one of {', '.join(known)}, not {value!r}{nearest(str(value), known)}")
