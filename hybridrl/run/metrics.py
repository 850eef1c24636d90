"""What a step's samples and updates come to, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybridrl.algorithms.kl import kl_estimate
from hybridrl.controller import computes
from hybridrl.protocol.batch import Batch, lengths_of


@computes(reads=("response_mask", "scores", "old_log_probs", "rollout_log_probs"), optional=("ref_log_probs",))
def rollout_metrics(data: Batch) -> dict[str, float]:
    """What a step's samples were like, and how far the engine's log-probabilities are from the trainer's."""
    mask = data["response_mask"].values()
    trainer, engine = data["old_log_probs"].values()[mask], data["rollout_log_probs"].values()[mask]
    gap = (trainer - engine).abs()
    row = torch.repeat_interleave(torch.arange(len(data)), lengths_of(data["response_mask"]))[mask]
    lengths = torch.bincount(row, minlength=len(data)).double()
    metrics = {
        "reward/mean": float(data["scores"].mean()),
        "reward/std": float(data["scores"].std(correction=0)),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/log_prob_gap_mean": _mean(gap),
        "rollout/log_prob_gap_max": float(gap.max()) if len(gap) else 0.0,
        "actor/kl_rollout": _mean(kl_estimate(engine, trainer, "k3")),
    }
    if "ref_log_probs" in data.keys():  # noqa: SIM118  # a TensorDict iterates rows
        reference = data["ref_log_probs"].values()[mask]
        metrics["actor/kl_reference"] = _mean(kl_estimate(trainer, reference, "k3"))
        metrics["actor/kl_sequence"] = float(kl_estimate(trainer, reference, "k1").sum()) / len(data)
    return metrics


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


def combined(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several updates as one: the mean of each, the maximum of names that end in "_max"."""
    names = dict.fromkeys(name for part in parts for name in part)
    values = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: max(v) if name.endswith("_max") else sum(v) / len(v) for name, v in values.items()}
