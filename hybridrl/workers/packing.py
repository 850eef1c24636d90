"""Micro-batches: whole rows packed end to end, up to a number of tokens.

Cutting changes nothing but the order of sums: rows are never split, padding never computed on, and weights of tokens are
known before the first cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridrl.parallel.attention import PackedRows
from hybridrl.protocol.batch import Batch, columns_of, from_values, lengths_of, offsets_of, take, values_of
from hybridrl.protocol.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B rows of T tokens in all, of which the S in `response_mask` are the ones asked about.

    tokens_T: all tokens; rows: how they attend; index_S: where the masked ones are; row_S: the row of each; columns: the other
    per-token columns at those S places, and per-row columns (B, ...) as they are.
    """

    tokens_T: Tensor
    rows: PackedRows
    index_S: Tensor
    row_S: Tensor
    columns: dict[str, Tensor]

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows


def cut(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Row numbers of each micro-batch: rows in order of length, so that neighbours are alike, while they fit in `max_tokens`.

    A row longer than `max_tokens` is a micro-batch of its own.
    """
    parts: list[list[int]] = []
    total = max_tokens + 1
    for row in np.argsort(-lengths, kind="stable"):
        length = int(lengths[row])
        if total + length > max_tokens:
            parts.append([])
            total = 0
        parts[-1].append(int(row))
        total += length
    return [np.array(part) for part in parts]


def pack(data: Batch, rows: np.ndarray, device: str) -> MicroBatch:
    """The micro-batch of these rows of a batch with columns `tokens`, `response_mask` and any others.

    Raises DataError on a row whose first token is in the mask: there is no state before it.
    """
    lengths = lengths_of(data["tokens"])[torch.from_numpy(rows)]
    taken = {name: take(column, rows).to(device) for name, column in columns_of(data).items()}
    packed = PackedRows.of(lengths.tolist(), device)
    index_S = taken["response_mask"].values().nonzero().squeeze(-1)
    if bool((packed.positions_T[index_S] == 0).any()):
        raise DataError("response_mask marks the first token of a row, which nothing predicts; begin rows with a prompt")
    row_T = torch.repeat_interleave(torch.arange(len(rows)), lengths).to(device)
    columns = {
        name: column.values()[index_S] if column.is_nested else column
        for name, column in taken.items()
        if name not in ("tokens", "response_mask")
    }
    return MicroBatch(taken["tokens"].values(), packed, index_S, row_T[index_S], columns)


def filler(like: Batch, device: str) -> MicroBatch:
    """A micro-batch of one token that nobody asks about: what a rank without rows left computes, so that collectives match."""
    nowhere = torch.zeros(0, dtype=torch.int64, device=device)
    columns = {
        name: column.values()[:0].to(device) if column.is_nested else column[:1].to(device)
        for name, column in columns_of(like).items()
        if name not in ("tokens", "response_mask")
    }
    return MicroBatch(nowhere.new_zeros(1), PackedRows.of([1], device), nowhere, nowhere, columns)


def scattered(parts: Sequence[Tensor], cuts: Sequence[np.ndarray], data: Batch) -> Tensor:
    """The ragged column aligned with `tokens` from the values at masked tokens of each micro-batch; 0 elsewhere."""
    lengths = lengths_of(data["tokens"])
    mask = values_of(data["response_mask"])
    offsets = offsets_of(data["tokens"]).cpu()
    out = torch.zeros(len(mask), dtype=parts[0].dtype if parts else torch.float32)
    for values_S, rows in zip(parts, cuts, strict=True):
        chosen = torch.cat([torch.arange(int(offsets[r]), int(offsets[r + 1])) for r in rows])
        out[chosen[mask[chosen]]] = values_S.cpu()
    return from_values(out, lengths)
