"""What every worker is given, and the few collectives that workers need of their data ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.protocol.layout import Layout


@dataclass(frozen=True, slots=True)
class RankContext:
    """Where a worker runs. One process per rank; `layout.world` ranks share the worker group's pool and process group."""

    rank: int = 0
    layout: Layout = field(default_factory=Layout)
    device: str = "cpu"
    seed: int = 0

    @property
    def data_ranks(self) -> int:
        return self.layout.dp

    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        """`values` summed ("sum") or maximised ("max") over the data ranks, elementwise."""
        if self.data_ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return values

    def barrier(self) -> None:
        if self.layout.world > 1:
            dist.barrier()


class Worker:
    """One rank's object of a role. Subclasses register methods; each gets its own config and where it runs."""

    def __init__(self, config: Any, context: RankContext) -> None:
        self.config, self.context = config, context


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
