"""From losses of tokens to the loss of a mini-batch: `sum_t w_t * l_t`.

Invariant: a token's weight depends on its own row and on two totals of the whole mini-batch over all ranks, both known before
the first micro-batch. So micro-batches, packing and ranks only choose the order of the sum. The tempting alternative, a mean
per micro-batch and then a mean of those, weighs a token by the company it keeps, and the gradient changes with the micro-batch
size. What the weights ask in return: a row is never split between two packs, since its token count is read off its pack.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hybridrl.protocol.errors import ConfigError, nearest

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How tokens weigh: all alike; summed in rows, rows averaged; averaged in rows, rows averaged; summed in rows and divided by a
fixed length, rows averaged (Liu et al., 2025, Dr. GRPO)."""

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def totals(mask_T: Tensor, row_T: Tensor, num_rows: int) -> tuple[int, int]:
    """Tokens in the mask, and rows with at least one such token: this rank's, for the caller to sum over ranks.

    `mask_T` is bool, `row_T` int64 in [0, num_rows): the row of each of the T packed tokens.
    """
    counts_B = _tokens_per_row(mask_T, row_T, num_rows)
    return int(counts_B.sum()), int((counts_B > 0).sum())


def token_weights(
    mask_T: Tensor,
    row_T: Tensor,
    num_rows_local: int,
    mode: Aggregation,
    total_tokens: int,
    total_rows: int,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight (T,) of each token of one pack of `num_rows_local` rows; 0 outside the mask.

    `total_tokens` and `total_rows` are `totals` summed over every micro-batch and rank of the mini-batch. A row without a
    masked token weighs nothing and is not counted among the rows; a mini-batch of such rows alone has loss 0. `max_tokens` is
    the fixed length of "seq-mean-token-sum-norm". Raises ConfigError for an unknown mode or a missing `max_tokens`.
    """
    # A total is 0 only where every mask is empty: any divisor does then.
    tokens, rows = max(total_tokens, 1), max(total_rows, 1)
    weights_T = mask_T.to(dtype)
    if mode == "token-mean":
        return weights_T / tokens
    if mode == "seq-mean-token-sum":
        return weights_T / rows
    if mode == "seq-mean-token-mean":
        counts_B = _tokens_per_row(mask_T, row_T, num_rows_local).clamp(min=1)
        return weights_T / (counts_B[row_T] * rows)
    if mode == "seq-mean-token-sum-norm":
        if max_tokens is None or max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1 for aggregation {mode!r}, not {max_tokens}")
        return weights_T / (rows * max_tokens)
    raise ConfigError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {mode!r}{nearest(mode, AGGREGATIONS)}")


def _tokens_per_row(mask_T: Tensor, row_T: Tensor, num_rows: int) -> Tensor:
    """(B,) int64: the masked tokens of each row."""
    counts_B = torch.zeros(num_rows, dtype=torch.int64, device=mask_T.device)
    return counts_B.index_add_(0, row_T, mask_T.to(torch.int64))
