"""Attention over an explicit view of the rows, for unpatched transformers models.

A model loaded with `attn_implementation=ATTENTION` and called with `view=...` hands every layer's projected query, key and
value to `view.attend`. Packed training rows and a rollout engine's key-value cache are two views of the same model. The
model builds no mask: a view knows which tokens may see which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from hybridrl.protocol.errors import ModelError

ATTENTION = "hybridrl"


class AttentionView(Protocol):
    """Which tokens attend to which."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query (N, H, T, D), key and value (N, H_kv, T, D) of this call's tokens -> (N, H, T, D)."""


_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""What transformers' architectures hand to their attention beside the usual, and what would be wrong to leave out: a cap on
scores, sinks, biases, chosen keys."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    view: AttentionView,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    changed = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if changed or is_causal is False:
        raise ModelError(
            f"{type(module).__name__} asks for attention with {', '.join(changed) or 'is_causal=False'}, "
            "which is not supported; use an architecture with plain causal attention (Llama, Qwen2, Qwen3, Mistral, ...)"
        )
    attended = view.attend(module.layer_idx, query, key, value, scaling)  # type: ignore[arg-type]  # an int on every layer
    return attended.transpose(1, 2).contiguous(), None


def _no_mask(*_: object, **__: object) -> None:
    return None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """B rows laid end to end in one sequence of T tokens; a token sees the tokens of its own row up to itself.

    Linear layers run over the T tokens alone. Attention runs over (B, longest row) with the rows left-aligned, where a
    plain causal mask is exact: what follows a row's end is never seen by it.
    """

    positions_T: Tensor
    index_T: Tensor
    num_rows: int
    longest: int

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu") -> PackedRows:
        longest = max(lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return PackedRows(positions.to(device), (row * longest + positions).to(device), len(lengths), longest)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        query, key, value = (self._unpack(x) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        flat_THD = attended.transpose(1, 2).flatten(0, 1)[self.index_T]
        return flat_THD.transpose(0, 1)[None]

    def _unpack(self, x_1HTD: Tensor) -> Tensor:
        x_THD = x_1HTD[0].transpose(0, 1)
        rows = x_THD.new_zeros(self.num_rows * self.longest, *x_THD.shape[1:]).index_copy(0, self.index_T, x_THD)
        return rows.view(self.num_rows, self.longest, *x_THD.shape[1:]).transpose(1, 2)
