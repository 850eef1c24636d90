"""Rewards of tokens, from the score of a whole response and its divergence from the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(scores_B: Tensor, mask_BT: Tensor, kl_BT: Tensor, coef: float) -> Tensor:
    """(B, T): `-coef * kl` on every masked token, plus the row's score on its last one; zero outside the mask.

    Stiennon et al., 2020, section 3.4, and Ouyang et al., 2022, eq. 2, spread over tokens. `mask_BT` is bool; `scores_B` and
    `kl_BT` are floating point, `kl_BT` read inside the mask alone. A row whose mask is empty has no rewards, and its score is
    not read. The result has the dtype of `kl_BT`.
    """
    seen_BT = mask_BT.cumsum(1)
    last_BT = mask_BT & (seen_BT == seen_BT[:, -1:])
    penalties_BT = torch.where(mask_BT, -coef * kl_BT, 0)
    return torch.where(last_BT, penalties_BT + scores_B[:, None].to(kl_BT.dtype), penalties_BT)
