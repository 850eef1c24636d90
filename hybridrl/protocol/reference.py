"""Reference: rows that live where they were made, and what can be done with them without moving them.

A reference has row identities, and for every column a `Source`: the handles of the shards that hold it and, for each row,
which shard and which row of it. Columns of one reference may be cut differently (the actor had four data ranks, the critic
two). Merging, slicing, repeating and cutting into mini-batches only edit these small arrays; a consumer is told which rows
of which shards are its own. Handles belong to a `Store`, the executor, which alone can turn them into tensors.

Invariant: `source.which[i], source.row[i]` locate row `ids[i]` for every column, whatever order shards arrive in. Keeping
rows in "arrival order" instead would be simpler and wrong: two columns of one batch finish in different orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from hybridrl.protocol.batch import Batch, batch, columns_of, gather
from hybridrl.protocol.errors import WiringError, nearest
from hybridrl.protocol.register import Contract

Handle = Any
"""One column of one shard, as its store knows it."""

_identities = itertools.count()


def new_ids(count: int) -> np.ndarray:
    """`count` row identities that no other row of this process has."""
    return np.fromiter(itertools.islice(_identities, count), dtype=np.int64, count=count)


class Store(Protocol):
    """What a reference asks of the executor that holds its rows."""

    def put(self, column: Tensor) -> Handle:
        """Keep a column of the controller's own."""

    def get(self, handles: Sequence[Handle]) -> list[Tensor]:
        """Bring columns here, waiting for them."""

    def row_lengths(self, handle: Handle) -> np.ndarray | None:
        """Row lengths of a ragged column, None of a dense one: metadata, the data stays where it is."""

    def ready(self, handles: Sequence[Handle]) -> Iterator[Handle]:
        """The handles, each as its column comes into being."""

    def compute(self, function: Callable[..., Any], contract: Contract, data: Reference, options: Mapping[str, Any]) -> Any:
        """Run a controller function on the columns that it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where the rows of one column are: row i is row `row[i]` of the shard `handles[which[i]]`."""

    handles: tuple[Handle, ...]
    which: np.ndarray
    row: np.ndarray

    @staticmethod
    def whole(handle: Handle, rows: int) -> Source:
        return Source((handle,), np.zeros(rows, dtype=np.int32), np.arange(rows, dtype=np.int32))

    def take(self, rows: np.ndarray) -> Source:
        """The source of these rows; shards that hold none of them are dropped (one is kept when there are no rows)."""
        which, row = self.which[rows], self.row[rows]
        used = np.unique(which) if len(which) else np.zeros(1, dtype=np.int32)
        renumber = np.zeros(len(self.handles), dtype=np.int32)
        renumber[used] = np.arange(len(used), dtype=np.int32)
        return Source(tuple(self.handles[k] for k in used), renumber[which], row)

    @staticmethod
    def join(sources: Sequence[Source]) -> Source:
        """The rows of several sources, one after the other."""
        starts = np.cumsum([0, *(len(s.handles) for s in sources)])
        return Source(
            tuple(h for s in sources for h in s.handles),
            np.concatenate([s.which + start for s, start in zip(sources, starts, strict=False)]).astype(np.int32),
            np.concatenate([s.row for s in sources]),
        )


class Reference:
    """B rows of some columns, living elsewhere.

    All methods but `fetch`, `lengths` and `stream` return at once and move nothing.
    """

    def __init__(self, store: Store, ids: np.ndarray, columns: Mapping[str, Source]) -> None:
        self.store, self.ids, self._columns = store, ids, dict(columns)

    @classmethod
    def of(cls, store: Store, data: Batch) -> Reference:
        """New rows from a batch of the controller's own."""
        rows = data.batch_size[0]
        sources = {name: Source.whole(store.put(column), rows) for name, column in columns_of(data).items()}
        return cls(store, new_ids(rows), sources)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Reference({len(self)} rows: {', '.join(self._columns)})"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def source(self, column: str) -> Source:
        if column not in self._columns:
            raise WiringError(
                f"nobody wrote column '{column}'{nearest(column, self._columns)}; this batch has {', '.join(self._columns)}"
            )
        return self._columns[column]

    def __or__(self, other: Reference) -> Reference:
        """The columns of both; rows are matched by identity, and a column of `other` replaces one of the same name."""
        if not isinstance(other, Reference):
            return NotImplemented
        order = self._order_of(other)
        theirs = other._columns if order is None else {name: s.take(order) for name, s in other._columns.items()}
        return Reference(self.store, self.ids, self._columns | theirs)

    def _order_of(self, other: Reference) -> np.ndarray | None:
        """Positions in `other` of this reference's rows, or None when they already agree."""
        if np.array_equal(self.ids, other.ids):
            return None
        mine, theirs = np.argsort(self.ids), np.argsort(other.ids)
        if not np.array_equal(self.ids[mine], other.ids[theirs]):
            raise WiringError(
                f"cannot merge {self!r} with {other!r}: they hold different rows. Merge references made from the same rows; "
                "repeat() makes new ones, and so does a call whose ranks each answer for the same rows."
            )
        order = np.empty_like(theirs)
        order[mine] = theirs
        return order

    def __getitem__(self, rows: int | slice | Sequence[int] | np.ndarray) -> Reference:
        """Some of the rows, in this order. None twice: two rows of one identity could not be told apart when merged."""
        index = np.atleast_1d(np.arange(len(self))[rows])
        if not isinstance(rows, slice) and len(np.unique(index)) < len(index):
            raise WiringError("a row can be taken once: use repeat(), which makes copies as new rows")
        return Reference(self.store, self.ids[index], {name: s.take(index) for name, s in self._columns.items()})

    def select(self, *columns: str) -> Reference:
        """The same rows with these columns only."""
        return Reference(self.store, self.ids, {name: self.source(name) for name in columns})

    def repeat(self, times: int) -> Reference:
        """Every row `times` times, copies adjacent, as new rows."""
        if times < 1:
            raise WiringError(f"repeat needs at least 1, not {times}")
        index = np.repeat(np.arange(len(self)), times)
        return Reference(self.store, new_ids(len(index)), {name: s.take(index) for name, s in self._columns.items()})

    def minibatches(self, size: int, epochs: int = 1, seed: int = 0) -> Iterator[Reference]:
        """The rows in random order in parts of `size` (the last may be smaller), `epochs` times, each in an order of its own.

        The cut is a function of (rows, size, epoch, seed): it does not depend on how many ranks share a mini-batch.
        """
        if size < 1 or epochs < 1:
            raise WiringError(f"minibatches needs size and epochs of at least 1, not {size} and {epochs}")
        for epoch in range(epochs):
            order = np.random.default_rng((seed, epoch)).permutation(len(self))
            for start in range(0, len(self), size):
                yield self[order[start : start + size]]

    def fetch(self, *columns: str) -> Batch:
        """Bring columns here (all of them when none is named), in row order."""
        names = columns or self.columns
        sources = [self.source(name) for name in names]
        fetched = iter(self.store.get([handle for s in sources for handle in s.handles]))
        return batch(
            {name: gather([next(fetched) for _ in s.handles], s.which, s.row) for name, s in zip(names, sources, strict=True)}
        )

    def lengths(self, column: str) -> np.ndarray:
        """(B,) row lengths of a ragged column. Waits until its rows exist, and moves none of them."""
        source = self.source(column)
        out = np.empty(len(self), dtype=np.int64)
        for k, handle in enumerate(source.handles):
            shard, mine = self.store.row_lengths(handle), source.which == k
            if shard is None:
                raise WiringError(f"column '{column}' is dense: it has no row lengths to balance by; name a ragged column")
            out[mine] = shard[source.row[mine]]
        return out

    def stream(self, *columns: str) -> Iterator[Reference]:
        """Parts of this reference, each as soon as these columns (all when none is named) of its rows exist.

        Every row comes exactly once. Parts follow the shards, so they are as fine as the calls that made them.
        """
        names = columns or self.columns
        waiting = {id(h): h for name in names for h in self.source(name).handles}
        needs = [
            {(name, int(k)) for name, k in zip(names, row, strict=True)}
            for row in zip(*(self._columns[n].which for n in names), strict=True)
        ]
        left = np.ones(len(self), dtype=bool)
        done: set[tuple[str, int]] = set()
        for handle in self.store.ready(list(waiting.values())):
            done |= {(name, k) for name in names for k, h in enumerate(self._columns[name].handles) if h is handle}
            rows = np.array([i for i in np.flatnonzero(left) if needs[i] <= done], dtype=np.int64)
            if len(rows):
                left[rows] = False
                yield self[rows]


def concatenate_references(parts: Sequence[Reference]) -> Reference:
    """The rows of several references, one after the other, with the columns that all of them have."""
    names = [name for name in parts[0].columns if all(name in part.columns for part in parts)]
    return Reference(
        parts[0].store,
        np.concatenate([part.ids for part in parts]),
        {name: Source.join([part.source(name) for part in parts]) for name in names},
    )
