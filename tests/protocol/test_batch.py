import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.protocol.batch import (
    batch,
    columns_of,
    concatenate,
    from_values,
    from_wire,
    gather,
    lengths_of,
    objects,
    objects_of,
    padded,
    ragged,
    take,
    to_wire,
    unpadded,
    values_of,
)
from hybridrl.protocol.errors import WiringError

rows_of_numbers = st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=6)
quick = settings(max_examples=60, deadline=None)


def lists(column: torch.Tensor) -> list:
    """The rows of a column, ragged or dense, as lists."""
    if not column.is_nested:
        return column.tolist()
    return [part.tolist() for part in values_of(column).split(lengths_of(column).tolist())]


def integers(rows: list[list[int]]) -> torch.Tensor:
    return ragged(rows, dtype=torch.int64)


def test_a_batch_knows_its_rows_and_columns():
    data = batch({"x": torch.zeros(2, 3), "y": integers([[1], []])})
    assert data.batch_size == torch.Size([2])
    assert list(columns_of(data)) == ["x", "y"]
    assert lists(columns_of(data)["y"]) == [[1], []]
    assert batch({}).batch_size == torch.Size([0])
    assert batch({"x": torch.zeros(0, 3), "y": integers([])}).batch_size == torch.Size([0])


def test_columns_of_a_batch_have_one_number_of_rows():
    with pytest.raises(WiringError, match=r"one number of rows, not \{'x': 2, 'y': 1\}"):
        batch({"x": torch.zeros(2), "y": integers([[1, 2]])})


@pytest.mark.parametrize("rows", [[], [[]], [[], [1, 2], []], [[1], [2], [3]]])
def test_ragged_keeps_empty_rows_and_zero_rows(rows):
    column = integers(rows)
    assert lists(column) == rows
    assert lengths_of(column).tolist() == [len(row) for row in rows]
    assert lengths_of(column).dtype == torch.int64


def test_an_empty_list_does_not_change_the_type_of_other_rows():
    assert values_of(ragged([[], [1, 2], []])).dtype == torch.int64
    assert values_of(ragged([[], [True]])).dtype == torch.bool
    assert values_of(ragged([torch.empty(0, dtype=torch.bfloat16)])).dtype == torch.bfloat16


def test_rows_may_have_more_axes():
    column = from_values(torch.arange(12.0).view(6, 2), torch.tensor([1, 0, 5]))
    assert lists(take(column, np.array([2, 0]))) == [[[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]], [[0, 1]]]


@quick
@given(rows_of_numbers, st.data())
def test_take_is_indexing(rows, draw):
    index = draw.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    chosen = take(integers(rows), np.array(index, dtype=np.int64))
    assert lists(chosen) == [rows[i] for i in index]
    assert values_of(chosen).dtype == torch.int64
    dense = torch.arange(len(rows) * 2).view(-1, 2)
    assert torch.equal(take(dense, np.array(index, dtype=np.int64)), dense[index])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_take_of_adjacent_rows_is_a_view(dtype):
    ragged_column, dense = integers([[1, 2], [3], [4, 5, 6]]), torch.arange(6).view(3, 2)
    index = np.array([1, 2], dtype=dtype)
    assert values_of(take(ragged_column, index)).data_ptr() == values_of(ragged_column)[2:].data_ptr()
    assert take(dense, index).data_ptr() == dense[1:].data_ptr()
    assert lists(take(ragged_column, index[::-1])) == [[4, 5, 6], [3]]
    assert lists(take(ragged_column, index[:0])) == []


@quick
@given(st.lists(rows_of_numbers, min_size=1, max_size=4))
def test_concatenate_lays_rows_end_to_end(shards):
    assert lists(concatenate([integers(rows) for rows in shards])) == [row for rows in shards for row in rows]


@quick
@given(st.lists(rows_of_numbers, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_gather_finds_every_row(shards, random):
    places = [(k, i) for k, rows in enumerate(shards) for i in range(len(rows))]
    random.shuffle(places)
    which, row = (np.array([p[axis] for p in places], dtype=np.int32) for axis in (0, 1))
    expected = [shards[k][i] for k, i in places]
    assert lists(gather([integers(rows) for rows in shards], which, row)) == expected
    sums = [torch.tensor([sum(r) for r in rows], dtype=torch.int64) for rows in shards]
    assert gather(sums, which, row).tolist() == [sum(r) for r in expected]


def test_a_shard_without_rows_has_no_say_in_the_type():
    nothing = np.zeros(0, dtype=np.int32)
    which, row = np.array([1, 1], dtype=np.int32), np.array([1, 0], dtype=np.int32)
    column = gather([ragged([]), integers([[1, 2], [3]])], which, row)
    assert lists(column) == [[3], [1, 2]] and values_of(column).dtype == torch.int64
    assert gather([torch.zeros(0), torch.tensor([1, 2])], which, row).dtype == torch.int64
    assert gather([torch.zeros(0, 3), torch.zeros(2, 3)], nothing, nothing).shape == (0, 3)


@quick
@given(rows_of_numbers, st.integers(-9, 9))
def test_padded_and_unpadded_undo_each_other(rows, fill):
    column = integers(rows)
    dense = padded(column, fill)
    width = max(map(len, rows), default=0)
    assert dense.tolist() == [row + [fill] * (width - len(row)) for row in rows]
    assert dense.shape == (len(rows), width) and dense.dtype == torch.int64
    assert lists(unpadded(dense, like=column)) == rows


def test_row_lengths_must_add_up_to_the_values():
    with pytest.raises(WiringError, match="3 values cannot have rows of 4 values in all"):
        from_values(torch.arange(3), torch.tensor([1, 3]))
    with pytest.raises(WiringError, match="2 values cannot have rows of 3"):
        unpadded(torch.zeros(2, 1), like=integers([[1, 2], [3]]))


def test_objects_round_trip():
    items = [{"answer": "42", "π": [1, None, True, 2.5]}, "日本語 🦊 \u0000 \n", [], {}, "", None, 10**30]
    assert objects_of(objects(items)) == items
    assert objects_of(objects([])) == []
    assert values_of(objects(["é"])).dtype == torch.uint8


def test_objects_keep_half_a_surrogate_pair():
    """JSON files may hold \\ud800 by itself, which is no text that UTF-8 can write."""
    assert objects_of(objects(["\ud800", "a"])) == ["\ud800", "a"]


def test_objects_can_be_taken_and_gathered():
    parts = [objects(["a", {"b": 1}]), objects([[3], "ü"])]
    mixed = gather(parts, np.array([1, 0, 1, 0]), np.array([1, 1, 0, 0]))
    assert objects_of(mixed) == ["ü", {"b": 1}, [3], "a"]


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[2, 0, 3], [0, 0], []], ids=str)
def test_columns_cross_the_wire_unchanged(dtype, lengths):
    values = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])[: sum(lengths)].to(dtype)
    for column in (from_values(values, torch.tensor(lengths, dtype=torch.int64)), values, values[:, None].repeat(1, 3)):
        back = from_wire(to_wire(column))
        assert back.dtype == dtype and back.is_nested == column.is_nested
        assert lists(back) == lists(column)


def test_the_wire_takes_any_memory_layout_and_no_gradient():
    column = torch.arange(6.0, requires_grad=True).view(2, 3).T
    assert from_wire(to_wire(column)).tolist() == column.tolist()


def test_read_only_arrays_come_in_without_a_warning(recwarn):
    wire = to_wire(integers([[1, 2]]))
    wire.values.setflags(write=False)
    wire.lengths.setflags(write=False)
    assert lists(from_wire(wire)) == [[1, 2]]
    assert not recwarn.list
