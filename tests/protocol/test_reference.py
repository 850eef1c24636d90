import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.protocol.batch import batch, lengths_of, ragged, take
from hybridrl.protocol.errors import WiringError
from hybridrl.protocol.reference import Reference, Source, concatenate_references, new_ids

quick = settings(max_examples=60, deadline=None)


class Shards:
    """A store whose handles are the columns themselves; they become ready in the order of `finished`."""

    def __init__(self):
        self.gets, self.finished = 0, None

    def put(self, column):
        return column

    def get(self, handles):
        self.gets += 1
        return list(handles)

    def row_lengths(self, handle):
        return lengths_of(handle).numpy() if handle.is_nested else None

    def ready(self, handles):
        yield from (h for h in self.finished if any(h is handle for handle in handles)) if self.finished else handles


def cut(store: Shards, ids: np.ndarray, name: str, column: torch.Tensor, parts: list[list[int]]) -> Reference:
    """A reference whose rows come in the order and the shards of `parts`, as a call on several ranks would leave it."""
    order = [row for part in parts for row in part]
    which = np.array([k for k, part in enumerate(parts) for _ in part], dtype=np.int32)
    row = np.array([i for part in parts for i in range(len(part))], dtype=np.int32)
    handles = tuple(take(column, np.array(part, dtype=np.int64)) for part in parts)
    return Reference(store, ids[np.array(order, dtype=np.int64)], {name: Source(handles, which, row)})


def numbers(rows: int, store: Shards | None = None) -> Reference:
    return Reference.of(store or Shards(), batch({"x": torch.arange(rows)}))


@st.composite
def cuts(draw, rows: int) -> list[list[int]]:
    order = draw(st.permutations(range(rows)))
    edges = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    return [order[a:b] for a, b in itertools.pairwise([0, *edges, rows])]


def test_identities_are_new_every_time():
    ids = np.concatenate([new_ids(3), new_ids(0), new_ids(2)])
    assert len(set(ids.tolist())) == 5
    assert not set(numbers(2).ids) & set(numbers(2).ids)


def test_a_batch_goes_in_and_comes_out():
    data = batch({"x": torch.arange(3), "y": ragged([[1], [], [2, 3]], dtype=torch.int64)})
    reference = Reference.of(Shards(), data)
    assert len(reference) == 3 and reference.columns == ("x", "y")
    assert repr(reference) == "Reference(3 rows: x, y)"
    back = reference.fetch()
    assert back["x"].tolist() == [0, 1, 2] and [r.tolist() for r in back["y"].unbind()] == [[1], [], [2, 3]]
    assert list(reference.fetch("y").keys()) == ["y"]


def test_an_unknown_column_is_named_with_the_nearest():
    for use in (lambda r: r.fetch("z"), lambda r: r.select("z"), lambda r: r.lengths("z"), lambda r: list(r.stream("z"))):
        with pytest.raises(WiringError, match="nobody wrote column 'z'; this batch has x"):
            use(numbers(1))
    with pytest.raises(WiringError, match="did you mean 'tokens'"):
        Reference.of(Shards(), batch({"tokens": torch.zeros(1)})).fetch("tokenz")


@quick
@given(st.integers(0, 7).flatmap(lambda rows: st.tuples(st.just(rows), cuts(rows), cuts(rows))))
def test_columns_cut_and_ordered_differently_merge_by_identity(case):
    rows, one, two = case
    store, ids = Shards(), new_ids(rows)
    left = cut(store, ids, "x", torch.arange(rows), one)
    right = cut(store, ids, "y", torch.arange(rows) * 10, two)
    merged = left | right
    assert np.array_equal(merged.ids, left.ids)
    data = merged.fetch()
    assert data["x"].tolist() == [row for part in one for row in part]
    assert data["y"].tolist() == [10 * x for x in data["x"].tolist()]


def test_a_column_of_the_right_replaces_that_of_the_left():
    left = numbers(3)
    right = Reference(left.store, left.ids[::-1].copy(), {"x": Source.whole(torch.tensor([7, 8, 9]), 3)})
    assert (left | right).fetch()["x"].tolist() == [9, 8, 7]
    assert left.fetch()["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        lambda r: numbers(4, r.store),
        lambda r: r[:3],
        lambda r: r[[]],
        lambda r: r.repeat(1),
        lambda r: r.repeat(2),
        lambda r: Reference(r.store, r.ids[[0, 1, 2, 2]], {}),
        lambda r: concatenate_references([r[:2], numbers(2, r.store)]),
    ],
)
def test_other_rows_are_refused(other):
    reference = numbers(4)
    for left, right in ((reference, other(reference)), (other(reference), reference)):
        with pytest.raises(WiringError, match="they hold different rows"):
            left | right


def test_rows_that_are_there_twice_are_told_apart_by_how_often():
    """Two references with the identities a, a, b and a, b, b hold different rows, though every row of one is in the other."""
    store, ids = Shards(), new_ids(2)
    left, right = (Reference(store, ids[index], {}) for index in ([0, 0, 1], [0, 1, 1]))
    with pytest.raises(WiringError, match="different rows"):
        left | right


def test_only_references_merge():
    with pytest.raises(TypeError):
        numbers(1) | {"x": 1}


def test_references_without_rows_merge():
    empty = numbers(0)
    assert len(empty | empty[:0]) == 0
    assert (empty | numbers(3, empty.store)[:0]).fetch()["x"].shape == (0,)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        ([3, 0], [3, 0]),
        ([-1], [4]),
        (2, [2]),
        ([], []),
        (np.array([True, False, False, True, False]), [0, 3]),
        (np.array([4, 2], dtype=np.int32), [4, 2]),
    ],
)
def test_slices_keep_identities(rows, expected):
    reference = numbers(5)
    part = reference[rows]
    assert part.fetch()["x"].tolist() == expected
    assert np.array_equal(part.ids, reference.ids[np.array(expected, dtype=np.int64)])


def test_a_row_is_not_taken_twice():
    for rows in ([1, 1], [0, -3]):
        with pytest.raises(WiringError, match=r"a row can be taken once: use repeat\(\)"):
            numbers(3)[rows]


def test_rows_beyond_the_end_are_an_index_error():
    with pytest.raises(IndexError):
        numbers(3)[[3]]


def test_iterating_gives_single_rows():
    assert [row.fetch()["x"].tolist() for row in numbers(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("times", [1, 3])
def test_repeat_makes_new_rows_side_by_side(times):
    reference = numbers(2)
    repeated = reference.repeat(times)
    assert repeated.fetch()["x"].tolist() == [0] * times + [1] * times
    assert len(set(repeated.ids) | set(reference.ids)) == 2 * times + 2
    with pytest.raises(WiringError, match="repeat needs at least 1, not 0"):
        reference.repeat(0)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_minibatches_cover_every_row_once_an_epoch(size):
    reference = numbers(7)
    minis = [mini.fetch()["x"].tolist() for mini in reference.minibatches(size, epochs=3, seed=5)]
    per_epoch = -(-7 // size)
    assert len(minis) == 3 * per_epoch and all(len(mini) <= size for mini in minis)
    orders = [list(itertools.chain(*minis[e * per_epoch : (e + 1) * per_epoch])) for e in range(3)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_minibatches_depend_on_rows_and_seed_and_not_on_the_cut():
    store, ids = Shards(), new_ids(6)
    whole = cut(store, ids, "x", torch.arange(6), [list(range(6))])
    thirds = cut(store, ids, "x", torch.arange(6), [[0, 1], [2, 3], [], [4, 5]])
    drawn = [[m.fetch()["x"].tolist() for m in r.minibatches(4, 2, seed)] for r, seed in ((whole, 1), (thirds, 1), (whole, 2))]
    assert drawn[0] == drawn[1] != drawn[2]


def test_minibatches_move_nothing_and_refuse_nonsense():
    reference = numbers(4)
    list(reference.minibatches(2))
    assert reference.store.gets == 0
    assert list(numbers(0).minibatches(2)) == []
    for size, epochs in ((0, 1), (1, 0)):
        with pytest.raises(WiringError, match="at least 1"):
            next(reference.minibatches(size, epochs))


def test_lengths_are_found_through_every_cut():
    store, ids = Shards(), new_ids(4)
    column = ragged([[1], [], [1, 2, 3], [1, 2]], dtype=torch.int64)
    reference = cut(store, ids, "tokens", column, [[3, 0], [], [2, 1]])
    assert reference.lengths("tokens").tolist() == [2, 1, 3, 0]
    assert reference[[1, 2]].lengths("tokens").tolist() == [1, 3]
    assert reference[:0].lengths("tokens").tolist() == [] and store.gets == 0


def test_a_dense_column_has_no_lengths():
    with pytest.raises(WiringError, match="column 'x' is dense"):
        numbers(2).lengths("x")


def test_a_slice_asks_for_its_own_shards_only():
    reference = cut(Shards(), new_ids(4), "x", torch.arange(4), [[0, 1], [2], [3]])
    assert [h.tolist() for h in reference[[3, 2]].source("x").handles] == [[2], [3]]
    assert len(reference[:0].source("x").handles) == 1


@quick
@given(st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), cuts(n), cuts(n))), st.randoms(use_true_random=False))
def test_a_stream_yields_each_row_once_and_as_soon_as_it_is_whole(case, random):
    rows, one, two = case
    store, ids = Shards(), new_ids(rows)
    reference = cut(store, ids, "x", torch.arange(rows), one) | cut(store, ids, "y", torch.arange(rows), two)
    store.finished = [h for name in ("x", "y") for h in reference.source(name).handles]
    random.shuffle(store.finished)
    there = {id(h): moment for moment, h in enumerate(store.finished)}

    def whole_at(row: int) -> int:
        return max(there[id(reference.source(n).handles[reference.source(n).which[row]])] for n in ("x", "y"))

    parts = list(reference.stream())
    assert sorted(np.concatenate([part.ids for part in parts]).tolist() if parts else []) == sorted(ids.tolist())
    moments = [{whole_at(int(np.flatnonzero(reference.ids == i)[0])) for i in part.ids} for part in parts]
    assert all(len(moment) == 1 for moment in moments)
    assert [max(m) for m in moments] == sorted(max(m) for m in moments)
    for part in parts:
        assert part.fetch()["x"].tolist() == part.fetch()["y"].tolist()


def test_a_stream_waits_for_the_columns_named_only():
    store, ids = Shards(), new_ids(4)
    reference = cut(store, ids, "x", torch.arange(4), [[0, 1], [2, 3]]) | cut(store, ids, "y", torch.arange(4), [[0, 1, 2, 3]])
    x0, x1 = reference.source("x").handles
    store.finished = [x1, x0]
    assert [part.fetch("x")["x"].tolist() for part in reference.stream("x")] == [[2, 3], [0, 1]]


def test_concatenated_references_keep_rows_and_shared_columns():
    store = Shards()
    left = Reference.of(store, batch({"x": torch.arange(3), "y": torch.zeros(3)}))
    right = Reference.of(store, batch({"x": torch.arange(10, 12)}))
    both = concatenate_references([left[[2, 0]], right])
    assert both.columns == ("x",) and both.fetch()["x"].tolist() == [2, 0, 10, 11]
    assert np.array_equal(both.ids, np.concatenate([left.ids[[2, 0]], right.ids]))
    assert both[[3, 0]].fetch()["x"].tolist() == [11, 2]
