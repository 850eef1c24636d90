"""The trace executor: runs nothing, and reads a step function into its dataflow graph.

Calls become nodes, columns and weight versions become edges. A column that nobody wrote, an unknown method or role, or rows
that do not fit are found here, before a process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hybridrl.controller.executor import Call, Executor, RankInput, RankOutput
from hybridrl.controller.groups import Groups, Result
from hybridrl.controller.roles import Pool, Role
from hybridrl.protocol.errors import WiringError
from hybridrl.protocol.layout import Layout
from hybridrl.protocol.reference import Reference, Source, new_ids
from hybridrl.protocol.register import Contract


@dataclass(frozen=True, slots=True)
class Node:
    """One call. `version` is the number of updates its role has had before it; `inputs` says which node wrote each column
    it reads (-1: the step's own input), `after` is the node whose update made that version (-1: the initial weights)."""

    index: int
    call: Call
    rows: int
    inputs: Mapping[str, tuple[int, ...]]
    version: int = 0
    after: int = -1


@dataclass(frozen=True, slots=True)
class Graph:
    """The dataflow graph of one step."""

    nodes: tuple[Node, ...]

    def edges(self) -> Iterator[tuple[int, int, str]]:
        """(from, to, label): the label is a column, or "weights vN"."""
        for node in self.nodes:
            for column, writers in node.inputs.items():
                yield from ((writer, node.index, column) for writer in writers)
            if node.after >= 0:
                yield node.after, node.index, f"weights v{node.version}"

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart, which documentation sites and editors draw."""
        lines = ["flowchart TD", '    n_1(["input"])']
        lines += [f'    n{node.index}["{node.call}<br/>{node.rows} rows"]' for node in self.nodes]
        merged: dict[tuple[int, int], list[str]] = {}
        for source, target, label in self.edges():
            merged.setdefault((source, target), []).append(label)
        for (source, target), labels in merged.items():
            name = "n_1" if source < 0 else f"n{source}"
            lines.append(f'    {name} -->|"{", ".join(labels)}"| n{target}')
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = [
            (f"{n.index}", str(n.call), f"{n.rows}", f"v{n.version}", self._inputs(n), ", ".join(n.call.contract.writes))
            for n in self.nodes
        ]
        header = ("node", "call", "rows", "weights", "reads (from node)", "writes")
        widths = [max(len(r[k]) for r in [header, *rows]) for k in range(len(header))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
        )

    def _inputs(self, node: Node) -> str:
        names = {-1: "input"}
        return ", ".join(f"{c}({'/'.join(names.get(w, str(w)) for w in writers)})" for c, writers in node.inputs.items())


@dataclass(frozen=True, slots=True)
class _Written:
    """A column that node `node` would have made."""

    node: int


@dataclass(slots=True)
class _Role:
    version: int = 0
    updated_by: int = -1


class TraceExecutor(Executor):
    """Records calls as nodes. What a step function would look at (fetched columns, row lengths) does not exist and is refused;
    results of calls without columns are empty dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: list[Node] = []
        self._state: dict[str, _Role] = {}

    def graph(self) -> Graph:
        return Graph(tuple(self._nodes))

    def inputs(self, columns: Sequence[str], rows: int) -> Reference:
        """A reference to the step's input: these columns, that many rows."""
        return Reference(self, new_ids(rows), {name: Source.whole(_Written(-1), rows) for name in columns})

    def _launch(self, pools: Mapping[str, Pool]) -> None:
        self._state = {name: _Role() for name in self.roles}

    def _distribute(self, call: Call, role: Role, data: Reference | Sequence[Reference] | None) -> list[Reference]:
        """Recorded once, whatever the layout: a graph shows calls, not ranks."""
        given = [data] if isinstance(data, Reference) else data or ()
        inputs = [self._columns_read(call, part) for part in given]
        parts = super()._distribute(call, role, data)
        self._record(call, inputs, sum(map(len, given)))
        return parts

    def _weights(self, call: Call, layout: Layout, data: Reference) -> None:
        """Row lengths do not exist; who gets which rows makes no difference to the graph."""

    def _record(self, call: Call, inputs: Sequence[RankInput], rows: int) -> None:
        state = self._state.get(call.role, _Role())
        writers = {
            name: tuple(sorted({handle.node for columns in inputs if name in columns for handle in columns[name].handles}))
            for name in dict.fromkeys(name for columns in inputs for name in columns)
        }
        self._nodes.append(Node(len(self._nodes), call, rows, writers, state.version, state.updated_by))
        if call.contract.updates_weights:
            state.version, state.updated_by = state.version + 1, len(self._nodes) - 1

    def _submit(self, call: Call, inputs: Sequence[RankInput]) -> list[RankOutput]:
        written = _Written(len(self._nodes) - 1)
        return [RankOutput(dict.fromkeys(call.contract.writes, written), {}) for _ in inputs]

    def compute(
        self, function: Callable[..., Any], contract: Contract, data: Reference, options: Mapping[str, Any]
    ) -> Reference | Result:
        call = Call("controller", function.__name__, contract, options)
        self._record(call, [self._columns_read(call, data)], len(data))
        written = _Written(len(self._nodes) - 1)
        if not contract.writes:
            return Result(list, [{}])
        return Reference(self, data.ids, {name: Source.whole(written, len(data)) for name in contract.writes})

    def values(self, handles: Sequence[Any]) -> list[Any]:
        return list(handles)

    def put(self, column: Tensor) -> _Written:
        return _Written(-1)

    def get(self, handles: Sequence[_Written]) -> list[Tensor]:
        raise WiringError("a traced step has no data to fetch: do what needs it in a function declared with @computes")

    def row_lengths(self, handle: _Written) -> np.ndarray:
        raise WiringError("a traced step has no row lengths: do what needs them in a function declared with @computes")

    def ready(self, handles: Sequence[_Written]) -> Iterator[_Written]:
        yield from handles

    def close(self) -> None:
        pass


def trace(step: Callable[..., Any], roles: Mapping[str, Role], columns: Sequence[str], rows: int) -> Graph:
    """The dataflow graph of `step(groups, reference)` on an input with these columns and rows.

    Raises WiringError where the step function does not fit its roles' contracts.
    """
    with TraceExecutor() as executor:
        groups: Groups = executor.start(roles)
        step(groups, executor.inputs(columns, rows))
        return executor.graph()
