"""Drawing tokens: every row with its own temperature, top-k and top-p, and a random number that depends on its seed alone.

Token i of a sample is drawn by inverting the cumulative distribution at one uniform number, output i of the splitmix64
generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) started from the sample's
seed. A `torch.Generator` shared by the batch would make a sample depend on which rows are drawn beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.rollout.engine import SamplingParams


def _signed(x: int) -> int:
    """x modulo 2^64, as the int64 with the same bits."""
    return (x + 2**63) % 2**64 - 2**63


_GOLDEN, _MIX_1, _MIX_2 = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
# 48 bits: the largest number, times a cumulative total, stays below that total in float64 arithmetic.
_BITS = 48


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (`>>` repeats the sign bit)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def uniforms(seeds: list[int], draw_NM: Tensor) -> Tensor:
    """Numbers in (0, 1), float64 (N, M): of the sequence that starts from seed n, the one for draw `draw_NM[n, m]`."""
    # Seeds are mixed first: outputs of neighbouring seeds would otherwise be neighbours in one sequence.
    state_N = _mixed(torch.tensor([_signed(seed) for seed in seeds], device=draw_NM.device) + _GOLDEN)
    mixed_NM = _mixed(state_N[:, None] + (draw_NM + 1) * _GOLDEN)
    return (_shifted(mixed_NM, 64 - _BITS).double() + 0.5) * 2.0**-_BITS


class SamplingTable:
    """The sampling parameters of every row, and the draw."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.temperature_B = torch.ones(rows, device=device, dtype=torch.float64)
        self.greedy_B = torch.zeros(rows, device=device, dtype=torch.bool)
        self.top_k_B = torch.zeros(rows, device=device, dtype=torch.int64)
        self.top_p_B = torch.ones(rows, device=device, dtype=torch.float64)
        self._truncates = False

    def tensors(self) -> list[Tensor]:
        return [self.temperature_B, self.greedy_B, self.top_k_B, self.top_p_B]

    def put(self, row_N: Tensor, params: list[SamplingParams]) -> None:
        """Set rows. A greedy row is one of temperature 1 and nothing cut off: its log-probability is the model's own."""
        rows = [(1.0, True, 0, 1.0) if p.temperature == 0 else (p.temperature, False, p.top_k, p.top_p) for p in params]
        for tensor, column in zip(self.tensors(), zip(*rows, strict=True), strict=True):
            tensor[row_N] = torch.tensor(column, dtype=tensor.dtype, device=tensor.device)
        self._truncates |= any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params)

    def draw(self, logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B,) and their log-probabilities (B,) for the first B rows; of NaN logits, NaN."""
        rows = len(logits_BV)
        logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        # The largest becomes 0 before the division, so that a tiny temperature does not overflow.
        scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / self.temperature_B[:rows, None].to(logits_BV.dtype)
        if self._truncates:
            scaled_BV = truncated(scaled_BV, self.top_k_B[:rows], self.top_p_B[:rows])
        log_probs_BV = scaled_BV.log_softmax(-1)
        drawn_B1 = _inverse_cdf(log_probs_BV, uniform_B)
        token_B1 = torch.where(self.greedy_B[:rows, None], scaled_BV.argmax(-1, keepdim=True), drawn_B1)
        return token_B1[:, 0], log_probs_BV.gather(1, token_B1)[:, 0]


def _inverse_cdf(log_probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """(B, 1): the first token whose cumulative probability exceeds the uniform. One of probability 0 is never it."""
    cumulative_BV = log_probs_BV.exp().cumsum(-1, dtype=torch.float64)
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    # The bound is for NaN alone, which compares with nothing.
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).clamp_(max=log_probs_BV.shape[1] - 1)


def truncated(logits_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Logits with -inf outside the top-k tokens (0: all) and, of those renormalised, outside the smallest set of mass top-p.

    Tokens that tie with the last one kept are kept. A row with top_k 0 and top_p 1 comes back unchanged, bit by bit.
    """
    vocabulary = logits_BV.shape[1]
    sorted_BV = logits_BV.sort(-1, descending=True).values
    rank_V = torch.arange(vocabulary, device=logits_BV.device)
    beyond_k_BV = (rank_V >= top_k_B[:, None]) & (top_k_B > 0)[:, None]
    mass_BV = sorted_BV.masked_fill(beyond_k_BV, -torch.inf).softmax(-1).cumsum(-1, dtype=torch.float64)
    before_BV = mass_BV.roll(1, -1)
    before_BV[:, 0] = 0
    beyond_p_BV = (before_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]
    kept_B = (~(beyond_k_BV | beyond_p_BV)).sum(-1)
    smallest_B1 = sorted_BV.gather(1, kept_B[:, None] - 1)
    return logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
