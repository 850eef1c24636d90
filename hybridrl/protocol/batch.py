"""Batch: named columns over B rows, as a TensorDict whose ragged columns are jagged nested tensors.

Rows are kept at their own length: nothing here pads. A batch is read-only by contract, because on Ray its tensors are views of
memory that other processes share.
"""

from __future__ import annotations

import itertools
import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.protocol.errors import WiringError

Batch = TensorDict

# Making a jagged tensor warns once about a function that torch itself calls there.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def batch(columns: Mapping[str, Tensor]) -> Batch:
    """A batch of these columns, which must agree on the number of rows."""
    counts = {name: len(column) if not column.is_nested else column.size(0) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise WiringError(f"the columns of a batch must have one number of rows, not {counts}")
    return TensorDict(dict(columns), batch_size=[next(iter(counts.values()), 0)])


def columns_of(data: Batch) -> dict[str, Tensor]:
    """The columns of a batch by name."""
    return {str(name): data.get(name) for name in data.keys()}  # noqa: SIM118  # a TensorDict iterates rows


def ragged(rows: Sequence[Tensor] | Sequence[Sequence[float]], dtype: torch.dtype | None = None) -> Tensor:
    """A ragged column from its rows, each a 1-D tensor or a list of numbers. An empty list takes the type of the other rows."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    values = torch.cat([t for t in tensors if len(t)] or tensors) if tensors else torch.empty(0, dtype=dtype)
    return from_values(values, torch.tensor([len(t) for t in tensors], dtype=torch.int64))


def from_values(values: Tensor, lengths: Tensor) -> Tensor:
    """A ragged column from its rows laid end to end, (sum of lengths, ...), and their lengths (B,)."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    if int(offsets[-1]) != len(values):
        raise WiringError(f"a ragged column of {len(values)} values cannot have rows of {int(offsets[-1])} values in all")
    return torch.nested.nested_tensor_from_jagged(values, offsets.to(values.device))


def values_of(column: Tensor) -> Tensor:
    """The rows of a ragged column laid end to end."""
    return column.values()


def offsets_of(column: Tensor) -> Tensor:
    """(B + 1,) int64: where the rows of a ragged column begin and end in `values_of`."""
    return column.offsets()  # type: ignore[attr-defined]  # a method of nested tensors only


def lengths_of(column: Tensor) -> Tensor:
    """(B,) int64 lengths of a ragged column's rows, on the CPU."""
    return offsets_of(column).diff().cpu()


def padded(column: Tensor, fill: float = 0.0) -> Tensor:
    """(B, longest) dense form of a ragged column, `fill` behind the end of each row."""
    lengths = lengths_of(column)
    width = int(lengths.max()) if len(lengths) else 0
    out = column.values().new_full((len(lengths), width), fill)
    out[torch.arange(width) < lengths[:, None]] = column.values()
    return out


def unpadded(dense_BT: Tensor, like: Tensor) -> Tensor:
    """The ragged column with the row lengths of `like`, from its padded form (B, longest)."""
    lengths = lengths_of(like)
    return from_values(dense_BT[torch.arange(dense_BT.shape[1]) < lengths[:, None]], lengths)


def take(column: Tensor, rows: np.ndarray) -> Tensor:
    """These rows of a column, in this order. Adjacent ascending rows are a view, not a copy."""
    start, count = (int(rows[0]), len(rows)) if len(rows) else (0, 0)
    adjacent = bool(np.array_equal(rows, np.arange(start, start + count)))
    if not column.is_nested:
        return column[start : start + count] if adjacent else column[torch.from_numpy(np.ascontiguousarray(rows))]
    offsets = offsets_of(column)
    values, lengths = column.values(), lengths_of(column)
    if adjacent:
        return from_values(values[int(offsets[start]) : int(offsets[start + count])], lengths[start : start + count])
    index = torch.from_numpy(np.ascontiguousarray(rows)).to(torch.int64)
    chosen = lengths[index]
    starts = torch.repeat_interleave(offsets.cpu()[index], chosen)
    within = torch.arange(int(chosen.sum())) - torch.repeat_interleave(chosen.cumsum(0) - chosen, chosen)
    return from_values(values[(starts + within).to(values.device)], chosen)


def concatenate(columns: Sequence[Tensor]) -> Tensor:
    """The rows of several columns of one kind, one after the other."""
    if len(columns) == 1:
        return columns[0]
    if not columns[0].is_nested:
        return _joined(columns)
    return from_values(_joined([c.values() for c in columns]), torch.cat([lengths_of(c) for c in columns]))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat`; on the CPU by numpy, whose large buffers come in huge pages and cost a fraction of the page faults."""
    if any(part.device.type != "cpu" or part.dtype is torch.bfloat16 for part in parts):
        return torch.cat(list(parts))
    return torch.from_numpy(np.concatenate([part.detach().numpy() for part in parts]))


def gather(columns: Sequence[Tensor], which: np.ndarray, row: np.ndarray) -> Tensor:
    """Row i of the result is row `row[i]` of `columns[which[i]]`.

    A column of which no row is taken has no say in the type: a rank without rows may have made an empty column of another.
    """
    used = np.unique(which) if len(which) else [0]
    together = concatenate([take(columns[k], row[which == k]) for k in used])
    if len(used) == 1 or np.all(np.diff(which) >= 0):
        return together
    order = np.argsort(which, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return take(together, inverse)


def objects(items: Iterable[Any]) -> Tensor:
    """A ragged uint8 column that holds one JSON value a row."""
    encoded = [json.dumps(item, ensure_ascii=False).encode("utf-8", "surrogatepass") for item in items]
    values = torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy())
    return from_values(values, torch.tensor([len(e) for e in encoded], dtype=torch.int64))


def objects_of(column: Tensor) -> list[Any]:
    """The Python values of a column made by `objects`."""
    data, offsets = column.values().cpu().numpy().tobytes(), offsets_of(column).tolist()
    return [json.loads(data[a:b]) for a, b in itertools.pairwise(offsets)]


class Wire(NamedTuple):
    """A column as numpy arrays, which pickle out of band and are read without a copy. Torch-only types travel as raw bytes."""

    dtype: str
    values: np.ndarray
    lengths: np.ndarray | None


def to_wire(column: Tensor) -> Wire:
    values = (column.values() if column.is_nested else column).detach().cpu().contiguous()
    dtype = str(values.dtype).removeprefix("torch.")
    array = (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy()
    return Wire(dtype, array, lengths_of(column).numpy() if column.is_nested else None)


def from_wire(wire: Wire) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        values = torch.from_numpy(wire.values)
        lengths = None if wire.lengths is None else torch.from_numpy(wire.lengths)
    if wire.dtype == "bfloat16":
        values = values.view(torch.bfloat16)
    return values if lengths is None else from_values(values, lengths)
