"""One rank of a pool as a Ray actor: it hosts the workers of every role on the pool and runs their calls one at a time."""

from __future__ import annotations

import datetime
import os
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray import cloudpickle

from hybridrl.controller.executor import Call, run_method
from hybridrl.controller.roles import Role
from hybridrl.protocol.batch import Wire, from_wire, gather, lengths_of, to_wire
from hybridrl.protocol.errors import UserError, WorkerError
from hybridrl.workers.base import RankContext, default_device


@dataclass(frozen=True, slots=True)
class Placed:
    """Which of the arrays sent along make up one column: row i is row `row[i]` of array `first + which[i]`."""

    first: int
    count: int
    which: np.ndarray
    row: np.ndarray


@dataclass(frozen=True, slots=True)
class Order:
    """A call as it is sent to a rank: what to run, and where in the arrays beside it the columns are."""

    call: Call
    columns: Mapping[str, Placed]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the controller learns of a finished call: row lengths of the ragged columns it wrote, or its value."""

    lengths: Mapping[str, np.ndarray]
    value: Any


class RankProcess:
    """Calls run in the order in which the controller made them: roles of one pool take turns, and SPMD collectives match."""

    def __init__(self, pool: str, rank: int, world: int, seed: int) -> None:
        self.pool, self.rank, self.world, self.seed = pool, rank, world, seed
        self.workers: dict[str, Any] = {}

    def pid(self) -> int:
        return os.getpid()

    def host_rendezvous(self) -> tuple[str, int]:
        """Rank 0 opens the store at which its pool's ranks meet, on a port that the system chooses."""
        address = ray.util.get_node_ip_address()
        self._rendezvous = dist.TCPStore(address, 0, self.world, is_master=True, wait_for_workers=False)
        return address, self._rendezvous.port

    def join(self, address: str, port: int, timeout_s: float) -> None:
        store = self._rendezvous if self.rank == 0 else dist.TCPStore(address, port, self.world, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=timeout)

    def build(self, name: str, role: Role) -> None:
        context = RankContext(self.rank, role.ranks_layout, default_device(), self.seed)
        self._guarded(name, "start", lambda: self.workers.update({name: role.worker(role.config, context)}))

    def run(self, order: bytes, *wires: Wire) -> Any:
        """(receipt, one `Wire` per column written), or the receipt alone."""
        sent: Order = pickle.loads(order)
        call = sent.call
        return self._guarded(call.role, call.method, lambda: self._run(sent, wires))

    def _run(self, order: Order, wires: tuple[Wire, ...]) -> Any:
        arrived = [from_wire(wire) for wire in wires]
        columns = {name: gather(arrived[p.first : p.first + p.count], p.which, p.row) for name, p in order.columns.items()}
        rows = len(next(iter(order.columns.values())).which) if order.columns else 0
        made, value = run_method(self.workers[order.call.role], order.call, columns, rows)
        lengths = {name: lengths_of(column).numpy() for name, column in made.items() if column.is_nested}
        receipt = cloudpickle.dumps(Receipt(lengths, value))
        return (receipt, *(to_wire(made[name]) for name in order.call.contract.writes)) if made else receipt

    def _guarded(self, role: str, method: str, run: Any) -> Any:
        """The boundary of the process: what is the user's passes as it is, everything else with its rank, call and
        traceback.
        """
        try:
            return run()
        except UserError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            raise WorkerError(role, self.rank, method, cause, traceback.format_exc()) from None

    def close(self) -> None:
        """Engines first, the process group after them: they use it when they end."""
        for worker in self.workers.values():
            if hasattr(worker, "close"):
                worker.close()
        self.workers = {}
        if dist.is_initialized():
            dist.destroy_process_group()
