"""Advantages of padded rows: generalised advantage estimation, and whitening.

Generalised advantage estimation (Schulman et al., 2016, eqs. 11-16): with `delta_t = r_t + gamma V_{t+1} - V_t`,
`A_t = sum_k (gamma lam)^k delta_{t+k}`. A row's states are its masked tokens in order: what lies between them (a tool's output)
is part of the environment, costs no discount, and the state after the last one is terminal, of value 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.protocol.errors import ConfigError

_BLOCK = 128
"""States per matrix product: the coefficients take `_BLOCK ** 2` numbers whatever T is, in T / _BLOCK steps."""

_VARIANCE_FLOOR = 1e-8
"""Added to the variance in `whiten`, so that equal values become 0 and not amplified rounding."""


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantage + value), each (B, T), zero outside the mask.

    `rewards_BT` and `values_BT` are floating point, read inside `mask_BT` (bool) alone; `gamma` and `lam` lie in [0, 1].
    The sums are in float64 and the result has the dtype of `values_BT`: what a row is batched with stays below its rounding.
    Raises ConfigError for a `gamma` or `lam` out of range.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} must be from 0 to 1, not {value}")
    width = mask_BT.shape[1]
    # Masked tokens move to the front of their row, where neighbours are successive states; the others go to a spare last slot.
    slots_BT = torch.where(mask_BT, mask_BT.cumsum(1) - 1, width)
    rewards_BS, states_BS = _to_slots(rewards_BT, slots_BT), _to_slots(values_BT, slots_BT)
    deltas_BS = rewards_BS[:, :-1] + gamma * states_BS[:, 1:] - states_BS[:, :-1]
    sums_BS = _discounted_sums(deltas_BS, gamma * lam)
    advantages_BT = torch.where(mask_BT, torch.cat([sums_BS, sums_BS.new_zeros(len(sums_BS), 1)], dim=1).gather(1, slots_BT), 0)
    returns_BT = torch.where(mask_BT, advantages_BT + values_BT, 0)
    return advantages_BT.to(values_BT.dtype), returns_BT.to(values_BT.dtype)


def _to_slots(values_BT: Tensor, slots_BT: Tensor) -> Tensor:
    """(B, T + 1) in float64: `values_BT` in its slots; 0 in free slots and the spare one, so that the terminal value is 0."""
    rows, width = values_BT.shape
    slotted_BS = torch.zeros(rows, width + 1, dtype=torch.float64, device=values_BT.device)
    slotted_BS.scatter_(1, slots_BT, values_BT.double())
    slotted_BS[:, width] = 0
    return slotted_BS


def _discounted_sums(deltas_BS: Tensor, discount: float) -> Tensor:
    """`sum_k discount^k delta_{s+k}`, (B, S): per block, a product with a triangular matrix (Zhong et al., 2024, RLHFuse)."""
    steps = torch.arange(_BLOCK, device=deltas_BS.device)
    powers = torch.full((_BLOCK + 1,), discount, dtype=torch.float64, device=deltas_BS.device)
    powers = powers ** torch.arange(_BLOCK + 1, device=deltas_BS.device)
    lags = steps[:, None] - steps[None, :]
    coefficients = torch.where(lags >= 0, powers[lags.clamp(min=0)], 0)
    sums_BS = torch.empty_like(deltas_BS)
    carry_B1 = deltas_BS.new_zeros(len(deltas_BS), 1)
    for block_BS, out_BS in zip(reversed(deltas_BS.split(_BLOCK, 1)), reversed(sums_BS.split(_BLOCK, 1)), strict=True):
        size = block_BS.shape[1]
        out_BS.copy_(block_BS @ coefficients[:size, :size] + carry_B1 * powers[1 : size + 1].flip(0))
        carry_B1 = out_BS[:, :1]
    return sums_BS


def whiten(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T): shifted and scaled to mean 0 and (population) standard deviation 1 over the mask, zero outside it.

    The moments are over all rows given, so give the whole batch. One value, or equal ones, become 0; an empty mask gives zeros.
    """
    count = mask_BT.sum().clamp(min=1)
    values = torch.where(mask_BT, values_BT.double(), 0)
    centred = torch.where(mask_BT, values - values.sum() / count, 0)
    variance = centred.square().sum() / count
    return (centred * (variance + _VARIANCE_FLOOR).rsqrt()).to(values_BT.dtype)
