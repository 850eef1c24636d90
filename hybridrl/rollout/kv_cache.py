"""The native engine's key-value cache, and the two views of it that a model attends through.

A layer's keys (and values) are one tensor (H_kv, rows, length, D). Heads come first so that a token's cell,
`row * length + position`, is one index for every head, and each head of a row is contiguous for the attention that reads it.

Invariant: every cell that a view reads holds finite numbers, also beyond a row's end and in rows that nobody uses. A masked
cell gets weight 0, and 0 times NaN is NaN, so the cache starts as zeros rather than as uninitialised memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.parallel.attention import PackedRows


def round_up(n: int, step: int) -> int:
    """The smallest multiple of `step` that is at least n."""
    return -(-n // step) * step


def bucket(n: int) -> int:
    """n rounded up to three significant bits: few distinct sizes, each at most a quarter over."""
    return round_up(n, 1 << max(n.bit_length() - 3, 0))


class KeyValueCache:
    """Cached keys and values of `rows` rows of up to `length` tokens. A layer is allocated when it first writes."""

    def __init__(self) -> None:
        self.rows = 0
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens and keep what is there. Layer by layer: the peak is one layer's copy."""
        if rows <= self.rows and length <= self.length:
            return
        self.rows, self.length = max(rows, self.rows), max(length, self.length)
        for layer, (key, value) in self._layers.items():
            self._layers[layer] = self._grown(key), self._grown(value)

    def _grown(self, old: Tensor) -> Tensor:
        heads, rows, length, size = old.shape
        new = old.new_zeros(heads, self.rows, self.length, size)
        new[:, :rows, :length] = old
        return new

    def write(self, layer: int, cell_N: Tensor, key_HND: Tensor, value_HND: Tensor) -> None:
        """Put N tokens into their cells."""
        if layer not in self._layers:
            self._layers[layer] = self._empty(key_HND), self._empty(value_HND)
        key, value = self._layers[layer]
        key.flatten(1, 2).index_copy_(1, cell_N, key_HND)
        value.flatten(1, 2).index_copy_(1, cell_N, value_HND)

    def _empty(self, like_HND: Tensor) -> Tensor:
        return like_HND.new_zeros(like_HND.shape[0], self.rows, self.length, like_HND.shape[2])

    def read(self, layer: int, rows: slice, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, H_kv, length, D) of a range of rows, as views."""
        key, value = self._layers[layer]
        return key[:, rows, :length].transpose(0, 1), value[:, rows, :length].transpose(0, 1)

    def move(self, source_N: Tensor, target_N: Tensor, length: int) -> None:
        """Copy the first `length` tokens of rows to other rows."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[:, target_N, :length] = tensor[:, source_N, :length]


class DecodeView:
    """One token a row: B rows, the token of row b at `position_B[b]`, attending to its row up to itself.

    `segments` are ranges of rows, all B in order, each with the length that it attends to: a row that is short costs what the
    longest of its segment does.
    """

    def __init__(self, cache: KeyValueCache, position_B: Tensor, segments: list[tuple[slice, int]], dtype: torch.dtype) -> None:
        rows, device = len(position_B), position_B.device
        self._cache, self._segments = cache, segments
        self._cell_B = torch.arange(rows, device=device) * cache.length + position_B
        longest = max(length for _, length in segments)
        hidden_BL = torch.arange(longest, device=device) > position_B[:, None]
        mask_BL = torch.zeros(rows, longest, dtype=dtype, device=device).masked_fill_(hidden_BL, -torch.inf)
        self._mask_B11L = mask_BL[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        rows, heads, _, size = query.shape
        self._cache.write(layer, self._cell_B, key[:, :, 0].transpose(0, 1), value[:, :, 0].transpose(0, 1))
        # The query heads that share a key head stand as that head's queries: nothing is repeated for grouped queries.
        grouped = query.reshape(rows, key.shape[1], -1, size)
        parts = [self._attend_segment(layer, grouped, scaling, *segment) for segment in self._segments]
        return torch.cat(parts).view(rows, heads, 1, -1)

    def _attend_segment(self, layer: int, grouped: Tensor, scaling: float, rows: slice, length: int) -> Tensor:
        keys, values = self._cache.read(layer, rows, length)
        mask = self._mask_B11L[rows, ..., :length]
        return F.scaled_dot_product_attention(grouped[rows], keys, values, attn_mask=mask, scale=scaling)


class PrefillView:
    """Contexts packed end to end, each written to every row that starts with it: a prompt drawn n times is computed once.

    `contexts` is a list of token lists, `rows[i]` the cache rows of context i. The tokens are padded to a bucket of sizes; the
    padding runs through the linear layers, is not attended and not written.
    """

    def __init__(
        self, cache: KeyValueCache, contexts: list[tuple[int, ...]], rows: list[list[int]], device: torch.device
    ) -> None:
        lengths = [len(context) for context in contexts]
        self._cache, self._size = cache, sum(lengths)
        self._packed = PackedRows.of(lengths, device)
        self._padding = bucket(self._size) - self._size
        tokens_T = torch.tensor([token for context in contexts for token in context], device=device)
        self.tokens_1T = F.pad(tokens_T, (0, self._padding))[None]
        self.positions_1T = F.pad(self._packed.positions_T, (0, self._padding))[None]
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        copies = torch.tensor([len(r) for r in rows])
        spans = torch.tensor(lengths).repeat_interleave(copies)
        targets = torch.tensor([row * cache.length for r in rows for row in r])
        self._source_N = _ranges(starts.repeat_interleave(copies), spans).to(device)
        self._cell_N = _ranges(targets, spans).to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        query, key, value = (x[:, :, : self._size] for x in (query, key, value))
        self._cache.write(layer, self._cell_N, key[0][:, self._source_N], value[0][:, self._source_N])
        return F.pad(self._packed.attend(layer, query, key, value, scaling), (0, 0, 0, self._padding))


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """start_0, start_0 + 1, ... (length_0 of them), start_1, ...: ranges laid end to end."""
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)
