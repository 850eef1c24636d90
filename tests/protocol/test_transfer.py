import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.protocol.errors import WiringError
from hybridrl.protocol.layout import Layout
from hybridrl.protocol.transfer import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    PROTOCOLS,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    TransferProtocol,
    split_balanced,
    split_evenly,
)

LAYOUTS = [
    Layout(),
    Layout(dp=4),
    Layout(tp=4),
    Layout(pp=4),
    Layout(dp=2, tp=4, gen_tp=2),
    Layout(2, 3, 4, 1, 2),
    Layout(4, 2, 2, 2, 1),
    Layout(2, 2, 2, 2, 2),
]
ROWS = [0, 1, 3, 8, 13]
CASES = list(itertools.product(LAYOUTS, ROWS))


def received(protocol: TransferProtocol, layout: Layout, rows: int, weights: np.ndarray | None = None) -> list[list[int]]:
    parts = protocol.distribute(layout, rows, weights)
    assert len(parts) == layout.world and all(part.dtype == np.int64 for part in parts)
    return [part.tolist() for part in parts]


def collected(protocol: TransferProtocol, layout: Layout, rows: int, weights: np.ndarray | None = None) -> list[int]:
    """Row numbers as they lie end to end when every rank answers with what it received."""
    parts = received(protocol, layout, rows, weights)
    return [row for rank in protocol.collect(layout) for row in parts[rank]]


def test_table_3_of_hybridflow_is_all_there():
    assert [str(p) for p in PROTOCOLS] == [
        "ONE_TO_ALL", "3D_PROTO", "3D_ALL_MICRO_DP", "3D_PP_ONLY", "DP_PROTO", "ALL_TO_ALL",
    ]  # fmt: skip


@pytest.mark.parametrize(("layout", "rows"), CASES, ids=str)
def test_one_to_all_sends_everything_everywhere_and_keeps_all(layout, rows):
    assert received(ONE_TO_ALL, layout, rows) == [list(range(rows))] * layout.world
    assert ONE_TO_ALL.collect(layout) == list(range(layout.world))


@pytest.mark.parametrize(("layout", "rows"), CASES, ids=str)
def test_pp_only_keeps_the_first_rank_of_every_stage(layout, rows):
    assert received(THREE_D_PP_ONLY, layout, rows) == [list(range(rows))] * layout.world
    assert [layout.coordinates(rank) for rank in THREE_D_PP_ONLY.collect(layout)] == [(p, 0, 0) for p in range(layout.pp)]


@pytest.mark.parametrize(("layout", "rows"), CASES, ids=str)
def test_3d_splits_by_data_rank_and_keeps_the_last_stage(layout, rows):
    parts = received(THREE_D, layout, rows)
    for one, two in itertools.combinations(range(layout.world), 2):
        if layout.coordinates(one)[1] == layout.coordinates(two)[1]:
            assert parts[one] == parts[two]
    heads = THREE_D.collect(layout)
    assert [layout.coordinates(rank) for rank in heads] == [(layout.pp - 1, d, 0) for d in range(layout.dp)]
    sizes = [len(parts[rank]) for rank in heads]
    assert max(sizes) - min(sizes) <= 1
    assert collected(THREE_D, layout, rows) == list(range(rows))


@pytest.mark.parametrize(("layout", "rows"), CASES, ids=str)
def test_all_micro_dp_splits_by_generation_replica_and_keeps_one_rank_of_each(layout, rows):
    parts = received(THREE_D_ALL_MICRO_DP, layout, rows)
    replica = [(layout.coordinates(rank)[1], layout.micro_dp_index(rank)) for rank in range(layout.world)]
    for one, two in itertools.combinations(range(layout.world), 2):
        if replica[one] == replica[two]:
            assert parts[one] == parts[two]
    heads = THREE_D_ALL_MICRO_DP.collect(layout)
    assert [replica[rank] for rank in heads] == list(itertools.product(range(layout.dp), range(layout.micro_dp)))
    assert heads == [replica.index(replica[rank]) for rank in heads]
    assert collected(THREE_D_ALL_MICRO_DP, layout, rows) == list(range(rows))


def test_all_micro_dp_on_figure_8():
    layout = Layout(pp=1, dp=2, tp=4, gen_tp=2)
    assert THREE_D_ALL_MICRO_DP.collect(layout) == [0, 1, 4, 5]
    assert received(THREE_D_ALL_MICRO_DP, layout, 8) == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [6, 7], [4, 5], [6, 7]]
    assert received(THREE_D_ALL_MICRO_DP, layout, 3) == [[0], [1], [0], [1], [2], [], [2], []]


@pytest.mark.parametrize("rows", ROWS)
def test_dp_splits_by_rank_and_keeps_all(rows):
    layout = Layout(dp=4)
    assert received(DP_PROTO, layout, rows) == [part.tolist() for part in np.array_split(np.arange(rows), 4)]
    assert DP_PROTO.collect(layout) == [0, 1, 2, 3] and collected(DP_PROTO, layout, rows) == list(range(rows))


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2, tp=2)], ids=str)
def test_dp_refuses_sharded_models(layout):
    with pytest.raises(WiringError, match=f"needs a purely data-parallel layout, not {layout}; use THREE_D"):
        DP_PROTO.distribute(layout, 4, None)


def test_all_to_all_leaves_the_distribution_to_the_caller():
    assert ALL_TO_ALL.by_hand and not any(p.by_hand for p in PROTOCOLS if p is not ALL_TO_ALL)
    assert ALL_TO_ALL.collect(Layout(2, 2, 2)) == list(range(8))
    with pytest.raises(WiringError, match="give a list with one input per rank"):
        ALL_TO_ALL.distribute(Layout(dp=2), 4, None)


@pytest.mark.parametrize("protocol", [THREE_D, THREE_D_ALL_MICRO_DP, DP_PROTO], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_balanced_rows_come_back_once_each(protocol, rows):
    layout = Layout(dp=4) if protocol is DP_PROTO else Layout(2, 3, 2)
    weights = np.random.default_rng(rows).integers(0, 50, rows)
    assert sorted(collected(protocol, layout, rows, weights)) == list(range(rows))


def test_fewer_rows_than_ranks_leave_ranks_empty():
    assert [part.tolist() for part in split_evenly(2, 4)] == [[0], [1], [], []]
    assert [part.tolist() for part in split_balanced(np.array([3, 9]), 4)] == [[1], [0], [], []]
    assert [part.tolist() for part in split_balanced(np.array([], dtype=np.int64), 2)] == [[], []]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_balanced_parts(weights, parts):
    weights = np.array(weights, dtype=np.int64)
    cut = split_balanced(weights, parts)
    assert len(cut) == parts and sorted(np.concatenate(cut).tolist()) == list(range(len(weights)))
    assert all(np.array_equal(part, np.sort(part)) for part in cut)
    loads = [int(weights[part].sum()) for part in cut]
    assert max(loads) - min(loads) <= max(weights, default=0)
    again = split_balanced(weights.astype(np.float64), parts)
    assert all(np.array_equal(one, two) for one, two in zip(cut, again, strict=True))


def test_rows_without_weight_are_spread_out():
    assert [len(part) for part in split_balanced(np.zeros(6, dtype=np.int64), 3)] == [2, 2, 2]


def test_balancing_beats_cutting_in_order():
    weights = np.array([100, 90, 80, 1, 1, 1])
    loads = [int(weights[part].sum()) for part in split_balanced(weights, 3)]
    assert max(loads) <= 100 and max(int(weights[part].sum()) for part in split_evenly(6, 3)) == 190


def test_a_protocol_of_ones_own():
    """Rows dealt like cards, and every rank's answer kept."""
    deal = TransferProtocol(
        "DEAL",
        lambda layout, rows, weights: [np.arange(rank, rows, layout.world) for rank in range(layout.world)],
        lambda layout: list(range(layout.world)),
    )
    assert str(deal) == "DEAL" and received(deal, Layout(dp=2), 5) == [[0, 2, 4], [1, 3]]
    assert collected(deal, Layout(dp=2), 5) == [0, 2, 4, 1, 3]
