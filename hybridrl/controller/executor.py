"""Executor: turns a call on a worker group into calls on ranks, and their outputs into a reference.

Everything here is the same for every executor. One of them differs only in how a rank's call is submitted, where a column
is kept and how it is waited for. Invariant: a call looks at metadata alone (row numbers, column names, row lengths where a
method asks to be balanced by them), so its cost on the controller does not grow with the bytes of the batch.
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
from hybridrl.protocol.layout import Layout
from hybridrl.protocol.reference import Handle, Reference, Source, new_ids
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
        self.running = False
        self.failure: HybridRLError | None = None

    def start(self, roles: Mapping[str, Role]) -> Groups:
        """Start the workers of these roles and return their groups. One call per executor."""
        if self.roles:
            raise HybridRLError("this executor has started its roles already; make another executor")
        if not roles:
            raise WiringError("there is no role to start; give at least one")
        by_name: dict[str, Pool] = {}
        for name, role in roles.items():
            if by_name.setdefault(role.pool.name, role.pool) != role.pool:
                raise WiringError(
                    f"role '{name}': pool '{role.pool.name}' is given with two sizes; use one Pool for both roles"
                )
        self.roles = dict(roles)
        self._launch(by_name)
        self.running = True
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
        self._check_running()
        role = self.roles[role_name]
        call = Call(role_name, method, contract_of(role.worker, method, role.config), options)
        parts, kept = self._distribute(call, role, data), call.contract.protocol.collect(role.ranks_layout)
        _check_protocol(call, role, parts, kept)
        outputs = self._submit(call, [self._columns_read(call, part) for part in parts])
        if not call.contract.writes:
            return Result(self.values, [outputs[rank].value for rank in kept])
        return self._assembled(call, [parts[rank] for rank in kept], [outputs[rank] for rank in kept])

    def _check_running(self) -> None:
        if not self.running:
            raise HybridRLError(
                "the workers are not running: calls come after start(), and before close() or the first failed call"
            ) from self.failure

    def _distribute(self, call: Call, role: Role, data: Reference | Sequence[Reference] | None) -> list[Reference]:
        layout, protocol = role.ranks_layout, call.contract.protocol
        if isinstance(data, Reference):
            return [data[rows] for rows in protocol.distribute(layout, len(data), self._weights(call, layout, data))]
        if data is None:
            if call.contract.reads:
                raise WiringError(f"{call} reads {', '.join(call.contract.reads)}, but was called without a batch")
            return [Reference(self, np.empty(0, dtype=np.int64), {})] * layout.world
        if not protocol.by_hand:
            raise WiringError(
                f"{call} takes one reference, not a {type(data).__name__}: executor.rows(batch) makes one of a batch, and "
                "options are given by name. Only ALL_TO_ALL takes a list, with one reference per rank"
            )
        if len(data) != layout.world:
            raise WiringError(f"{call} takes one reference per rank: {layout.world}, not {len(data)}")
        return list(data)

    def _weights(self, call: Call, layout: Layout, data: Reference) -> np.ndarray | None:
        """What the rows are balanced by over data ranks, if the method asks for it and there is more than one."""
        balance = call.contract.balance
        return data.lengths(balance) if balance in data.columns and layout.dp > 1 else None

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
        """What the collected ranks made of their parts. Ranks that answer for the same row each make a row of their own."""
        which = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        row = np.concatenate([np.arange(len(part), dtype=np.int32) for part in parts])
        sources = {name: Source(tuple(o.columns[name] for o in outputs), which, row) for name in call.contract.writes}
        ids = np.concatenate([part.ids for part in parts])
        return Reference(self, ids if len(np.unique(ids)) == len(ids) else new_ids(len(ids)), sources)

    def compute(
        self, function: Callable[..., Any], contract: Contract, data: Reference, options: Mapping[str, Any]
    ) -> Reference | Result:
        """Run a controller function here, on just the columns it reads. See `compute.computes`."""
        call = Call("controller", function.__name__, contract, options)
        made = function(data.select(*self._columns_read(call, data)).fetch(), **options)
        if not contract.writes:
            return Result(list, [made])
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
    def row_lengths(self, handle: Handle) -> np.ndarray | None:
        """See `Store`."""

    @abc.abstractmethod
    def ready(self, handles: Sequence[Handle]) -> Iterator[Handle]:
        """See `Store`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop every worker. Safe to call twice."""


def _check_protocol(call: Call, role: Role, parts: Sequence[Reference], kept: Sequence[int]) -> None:
    """A rank that is left out never joins the others' collectives: a user's protocol is checked before anything is sent."""
    name, world = call.contract.protocol, role.ranks_layout.world
    if len(parts) != world:
        raise WiringError(f"{call}: {name} distributes to {len(parts)} ranks, but {role.ranks_layout} has {world}")
    if not kept or not all(0 <= rank < world for rank in kept):
        raise WiringError(f"{call}: {name} collects from ranks {list(kept)}; it must name some of the {world} ranks from 0")


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
