"""Log-probs of tokens and entropies of their distributions, from logits, without a full-precision copy of the logits.

Plain autograd keeps two or three float32 tensors the size of the logits for the backward pass; at a vocabulary of 150 k these,
not the layers, decide how many tokens fit. Here the forward pass keeps the logits as they came and one number per token, and
both passes work on a few rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridrl.protocol.errors import ConfigError

_CHUNK_ELEMENTS = 1 << 24
"""Logits worked on at once: 64 MiB in float32."""


def log_probs_and_entropy(logits_TV: Tensor, targets_T: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets_T` (int64) under softmax(logits / temperature), and that distribution's entropy in nats.

    Both are (T,) in float32, or float64 for float64 logits, which have to be finite. Gradients (first order) flow to the
    logits from both, in the logits' dtype. Raises ConfigError for a temperature of 0 or less.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature must be over 0, not {temperature}: score greedy samples at temperature 1")
    return _LogProbsAndEntropy.apply(logits_TV, targets_T, temperature)


class _LogProbsAndEntropy(torch.autograd.Function):
    """d log p(y) / dz = 1[y] - p and d H / dz = -p (log p + H), each over the temperature."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = _work_dtype(logits_TV)
        log_probs_T, entropy_T = logits_TV.new_empty(2, len(logits_TV), dtype=dtype).unbind()
        for rows in _chunks(logits_TV):
            scaled = logits_TV[rows].to(dtype, copy=True).div_(temperature)
            # From the row's maximum, so that the entropy is no difference of two large numbers.
            scaled -= scaled.amax(-1, keepdim=True)
            unnormalised = scaled.exp()
            total = unnormalised.sum(-1)
            log_probs_T[rows] = scaled.gather(-1, targets_T[rows, None]).squeeze(-1) - total.log()
            entropy_T[rows] = total.log() - unnormalised.mul_(scaled).sum(-1) / total
        ctx.save_for_backward(logits_TV, targets_T, entropy_T)
        ctx.temperature = temperature
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, targets_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for rows in _chunks(logits_TV):
            scaled = logits_TV[rows].to(_work_dtype(logits_TV), copy=True).div_(ctx.temperature)
            log_p = scaled.log_softmax(-1)
            p = torch.exp(log_p, out=scaled)
            grad_log_p, grad_h, h = (x[rows, None] for x in (grad_log_probs_T, grad_entropy_T, entropy_T))
            grad = log_p.add_(h).mul_(grad_h).add_(grad_log_p).mul_(p).neg_()
            grad.scatter_add_(-1, targets_T[rows, None], grad_log_p)
            grad_TV[rows] = grad.div_(ctx.temperature)
        return grad_TV, None, None


def _work_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits_TV: Tensor) -> list[slice]:
    """Runs of rows that hold at most `_CHUNK_ELEMENTS` logits (or one row)."""
    size = max(1, _CHUNK_ELEMENTS // max(1, logits_TV.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits_TV), size)]
