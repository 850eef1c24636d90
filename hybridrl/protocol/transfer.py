"""Transfer protocols: how the rows of a call reach the ranks of a layout, and whose results are kept (HybridFlow, Table 3).

A protocol is a pair of pure functions over a layout. `distribute(layout, num_rows, weights)` says which rows each rank
receives; `collect(layout)` says which ranks' results are kept, in the order in which they are laid end to end. Neither sees
data. Users make their own with `TransferProtocol(name, distribute, collect)`.

Batches that do not divide are cut into parts whose sizes differ by one at most; a part may be empty. No padding rows are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.protocol.errors import WiringError
from hybridrl.protocol.layout import Layout

Rows = np.ndarray
"""(n,) int64 row numbers."""


@dataclass(frozen=True, slots=True)
class TransferProtocol:
    """`distribute(layout, num_rows, weights) -> rows of every rank`; `collect(layout) -> ranks kept, in order`.

    `weights` is (num_rows,) token counts to balance by, or None to keep the rows in order.
    `by_hand`: the caller gives one input per rank itself, and nothing is distributed.
    """

    name: str
    distribute: Callable[[Layout, int, np.ndarray | None], list[Rows]]
    collect: Callable[[Layout], list[int]]
    by_hand: bool = False

    def __str__(self) -> str:
        return self.name


def split_evenly(num_rows: int, parts: int) -> list[Rows]:
    """Consecutive parts whose sizes differ by one at most."""
    return [part.astype(np.int64) for part in np.array_split(np.arange(num_rows), parts)]


def split_balanced(weights: np.ndarray, parts: int) -> list[Rows]:
    """Parts of nearly equal total weight: the heaviest row goes to the lightest part (longest processing time first).

    Ties go to the part with fewer rows, then to the first, so the cut is a function of the weights alone.
    """
    loads, rows = [0] * parts, [[] for _ in range(parts)]  # type: list[int], list[list[int]]
    for row in np.argsort(-weights, kind="stable"):
        part = min(range(parts), key=lambda k: (loads[k], len(rows[k]), k))
        loads[part] += int(weights[row])
        rows[part].append(int(row))
    return [np.array(sorted(part), dtype=np.int64) for part in rows]


def split(num_rows: int, parts: int, weights: np.ndarray | None) -> list[Rows]:
    return split_evenly(num_rows, parts) if weights is None else split_balanced(weights, parts)


def _everything(layout: Layout, num_rows: int, weights: np.ndarray | None) -> list[Rows]:
    return [np.arange(num_rows, dtype=np.int64)] * layout.world


def _by_data_rank(layout: Layout, num_rows: int, weights: np.ndarray | None) -> list[Rows]:
    parts = split(num_rows, layout.dp, weights)
    return [parts[layout.coordinates(rank)[1]] for rank in range(layout.world)]


def _by_micro_data_rank(layout: Layout, num_rows: int, weights: np.ndarray | None) -> list[Rows]:
    parts = split(num_rows, layout.dp * layout.micro_dp, weights)
    return [parts[layout.coordinates(rank)[1] * layout.micro_dp + layout.micro_dp_index(rank)] for rank in range(layout.world)]


def _by_rank(layout: Layout, num_rows: int, weights: np.ndarray | None) -> list[Rows]:
    if layout.pp * layout.tp > 1:
        raise WiringError(f"DP_PROTO needs a purely data-parallel layout, not {layout}; use THREE_D")
    return split(num_rows, layout.world, weights)


def _nothing(layout: Layout, num_rows: int, weights: np.ndarray | None) -> list[Rows]:
    raise WiringError("ALL_TO_ALL distributes nothing: give a list with one input per rank")


def _all_ranks(layout: Layout) -> list[int]:
    return list(range(layout.world))


def _last_stage_heads(layout: Layout) -> list[int]:
    return [layout.rank(layout.pp - 1, d, 0) for d in range(layout.dp)]


def _stage_heads(layout: Layout) -> list[int]:
    return [layout.rank(p, 0, 0) for p in range(layout.pp)]


def _micro_heads(layout: Layout) -> list[int]:
    """The first rank of every generation replica, in the order in which `_by_micro_data_rank` numbers its parts."""
    heads: dict[tuple[int, int], int] = {}
    for rank in range(layout.world):
        heads.setdefault((layout.coordinates(rank)[1], layout.micro_dp_index(rank)), rank)
    return [heads[key] for key in sorted(heads)]


ONE_TO_ALL = TransferProtocol("ONE_TO_ALL", _everything, _all_ranks)
THREE_D = TransferProtocol("3D_PROTO", _by_data_rank, _last_stage_heads)
THREE_D_ALL_MICRO_DP = TransferProtocol("3D_ALL_MICRO_DP", _by_micro_data_rank, _micro_heads)
THREE_D_PP_ONLY = TransferProtocol("3D_PP_ONLY", _everything, _stage_heads)
DP_PROTO = TransferProtocol("DP_PROTO", _by_rank, _all_ranks)
ALL_TO_ALL = TransferProtocol("ALL_TO_ALL", _nothing, _all_ranks, by_hand=True)

PROTOCOLS: Sequence[TransferProtocol] = (ONE_TO_ALL, THREE_D, THREE_D_ALL_MICRO_DP, THREE_D_PP_ONLY, DP_PROTO, ALL_TO_ALL)
