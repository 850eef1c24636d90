"""Executor: turns a call on a worker group into calls on ranks, and their outputs into a reference.

Everything here is the same for every executor. One of them differs only in how a rank's call is submitted, where a column is kept and
how it is waited for. Invariant: a call looks at metadata alone (row numbers, column names, row lengths where a method asks to be
balanced by them), so its cost on the controller does not grow with the bytes of the batch.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from torch import Tensor

from hybridrl.controller.groups import Groups, Result, WorkerGroup
from hybridrl.controller.roles import Pool, Role
from hybridrl.protocol.batch import Batch, batch
from hybridrl.protocol.errors import HybridRLError, WiringError, nearest
from hybridrl.protocol.reference import Handle, Reference, Source
from hybridrl.protocol.register import Contract, contract_of


@dataclass(frozen=True, slots=True)
class Call:
    """One method of one role, as every rank is to run it."""

    role: str
    method: str
    contract: Contract
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True, slots=True)
class RankOutput:
    """Handles on what one rank made: its columns, or its value when the method writes none."""

    columns: Mapping[str, Handle]
    value: Any


RankInput = Mapping[str, Source]


class Executor(abc.ABC):
    """Starts roles, runs calls, holds rows. A context manager: leaving it stops every worker."""

    def __init__(self) -> None:
        self.roles: dict[str, Role] = {}

    def start(self, roles: Mapping[str, Role]) -> Groups:
        """Start the workers of these roles and return their groups. One call per executor."""
        if self.roles:
            raise HybridRLError("this executor has started its roles already; make another executor")
        by_name: dict[str, Pool] = {}
        for name, role in roles.items():
            if by_name.setdefault(role.pool.name, role.pool) != role.pool:
                raise WiringError(f"role '{name}': pool '{role.pool.name}' is given with two sizes; use one Pool for both roles")
        self.roles = dict(roles)
        self._launch(by_name)
        return Groups({name: WorkerGroup(self, name, role) for name, role in roles.items()})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, data: Batch) -> Reference:
        """Rows of the controller's own, as a reference."""
        return Reference.of(self, data)

    def call(
        self, role_name: str, method: str, data: Reference | Sequence[Reference] | None, options: Mapping[str, Any]
    ) -> Reference | Result:
        """Run `method` on every rank of a role. See `Method.__call__`."""
        role = self.roles[role_name]
        call = Call(role_name, method, contract_of(role.worker, method, role.config), options)
        parts = self._distribute(call, role, data)
        outputs = self._submit(call, [self._columns_read(call, part) for part in parts])
        kept = call.contract.protocol.collect(role.ranks_layout)
        if not call.contract.writes:
            return Result(self, [outputs[rank].value for rank in kept])
        return self._assembled(call, [parts[rank] for rank in kept], [outputs[rank] for rank in kept])

    def _distribute(self, call: Call, role: Role, data: Reference | Sequence[Reference] | None) -> list[Reference]:
        layout, protocol = role.ranks_layout, call.contract.protocol
        if isinstance(data, Reference):
            balance = call.contract.balance
            weights = data.lengths(balance) if balance and layout.dp > 1 and balance in data.columns else None
            return [data[rows] for rows in protocol.distribute(layout, len(data), weights)]
        if data is None:
            if call.contract.reads:
                raise WiringError(f"{call} reads {', '.join(call.contract.reads)}, but was called without a batch")
            return [Reference(self, np.empty(0, dtype=np.int64), {})] * layout.world
        if not protocol.by_hand:
            raise WiringError(f"{call} takes one reference: only ALL_TO_ALL takes one per rank")
        if len(data) != layout.world:
            raise WiringError(f"{call} takes one reference per rank: {layout.world}, not {len(data)}")
        return list(data)

    def _columns_read(self, call: Call, part: Reference) -> RankInput:
        missing = [name for name in call.contract.reads if name not in part.columns]
        if missing:
            raise WiringError(
                f"{call} reads column '{missing[0]}', which nobody wrote{nearest(missing[0], part.columns)}; "
                f"the batch has {', '.join(part.columns)}. Call the method that writes it first and merge with |"
            )
        names = (*call.contract.reads, *(name for name in call.contract.optional if name in part.columns))
        return {name: part.source(name) for name in names}

    def _assembled(self, call: Call, parts: Sequence[Reference], outputs: Sequence[RankOutput]) -> Reference:
        which = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        row = np.concatenate([np.arange(len(part), dtype=np.int32) for part in parts])
        sources = {name: Source(tuple(o.columns[name] for o in outputs), which, row) for name in call.contract.writes}
        return Reference(self, np.concatenate([part.ids for part in parts]), sources)

    def compute(
        self, function: Callable[..., Any], contract: Contract, data: Reference, options: Mapping[str, Any]
    ) -> Reference | Result:
        """Run a controller function here, on just the columns it reads. See `compute.computes`."""
        call = Call("controller", function.__name__, contract, options)
        made = function(data.fetch(*self._columns_read(call, data)), **options)
        if not contract.writes:
            return Result(_Known(), [made])
        columns = checked_columns(call, made, len(data))
        return Reference(self, data.ids, {name: Source.whole(self.put(c), len(data)) for name, c in columns.items()})

    @abc.abstractmethod
    def _launch(self, pools: Mapping[str, Pool]) -> None:
        """Start one process per rank of every pool and build its roles' workers."""

    @abc.abstractmethod
    def _submit(self, call: Call, inputs: Sequence[RankInput]) -> list[RankOutput]:
        """Have every rank of the call's role run it, each on its own input; do not wait."""

    @abc.abstractmethod
    def values(self, handles: Sequence[Any]) -> list[Any]:
        """The values behind `RankOutput.value` handles, waiting for them."""

    @abc.abstractmethod
    def put(self, column: Tensor) -> Handle:
        """See `Store`."""

    @abc.abstractmethod
    def get(self, handles: Sequence[Handle]) -> list[Tensor]:
        """See `Store`."""

    @abc.abstractmethod
    def row_lengths(self, handle: Handle) -> np.ndarray:
        """See `Store`."""

    @abc.abstractmethod
    def ready(self, handles: Sequence[Handle]) -> Iterator[Handle]:
        """See `Store`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop every worker. Safe to call twice."""


class _Known:
    """Values that are here already."""

    def values(self, handles: Sequence[Any]) -> list[Any]:
        return list(handles)


def checked_columns(call: Call, made: Any, rows: int) -> dict[str, Tensor]:
    """The columns that a method returned, if they are just those it declares, with a row for every row of its input."""
    columns = dict(made.items()) if hasattr(made, "items") else {}
    if set(columns) != set(call.contract.writes):
        raise WiringError(f"{call} declares that it writes {sorted(call.contract.writes)}, but returned {sorted(columns)}")
    for name, column in columns.items():
        if column.size(0) != rows:
            raise WiringError(f"{call} returned {column.size(0)} rows of '{name}' for {rows} rows of input")
    return columns


def run_method(worker: Any, call: Call, columns: Mapping[str, Tensor], rows: int) -> tuple[dict[str, Tensor], Any]:
    """Run a call on one rank's worker: (columns it wrote, {}) or ({}, its value)."""
    made = getattr(worker, call.method)(*([batch(columns)] if columns else []), **call.options)
    return (checked_columns(call, made, rows), None) if call.contract.writes else ({}, made)
