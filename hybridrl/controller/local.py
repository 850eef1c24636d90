"""The local executor: workers live in this process, calls run when they are made.

For notebooks, debuggers and one-device runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hybridrl.controller.executor import Call, Executor, RankInput, RankOutput, run_method
from hybridrl.controller.roles import Pool
from hybridrl.protocol.batch import gather, lengths_of
from hybridrl.protocol.errors import ConfigError
from hybridrl.workers.base import RankContext, default_device


class LocalExecutor(Executor):
    """One rank per pool, no processes, no Ray. An exception surfaces where the call stands, with its own traceback."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed
        self.workers: dict[str, Any] = {}

    def _launch(self, pools: Mapping[str, Pool]) -> None:
        for pool in pools.values():
            if pool.ranks != 1:
                raise ConfigError(f"ranks must be 1 with executor=local, not {pool.ranks}; use executor=ray")
        for name, role in self.roles.items():
            context = RankContext(0, role.ranks_layout, default_device(), self._seed)
            self.workers[name] = role.worker(role.config, context)

    def _submit(self, call: Call, inputs: Sequence[RankInput]) -> list[RankOutput]:
        columns = {name: gather(s.handles, s.which, s.row) for name, s in inputs[0].items()}
        rows = len(next(iter(inputs[0].values())).which) if inputs[0] else 0
        made, value = run_method(self.workers[call.role], call, columns, rows)
        return [RankOutput(made, value)]

    def values(self, handles: Sequence[Any]) -> list[Any]:
        return list(handles)

    def put(self, column: Tensor) -> Tensor:
        return column

    def get(self, handles: Sequence[Tensor]) -> list[Tensor]:
        return list(handles)

    def row_lengths(self, handle: Tensor) -> np.ndarray | None:
        return lengths_of(handle).numpy() if handle.is_nested else None

    def ready(self, handles: Sequence[Tensor]) -> Iterator[Tensor]:
        yield from handles

    def close(self) -> None:
        for worker in self.workers.values():
            if hasattr(worker, "close"):
                worker.close()
        self.workers, self.running = {}, False
