import itertools

import pytest

from hybridrl.protocol.errors import ConfigError
from hybridrl.protocol.layout import Layout


def groups(layout: Layout, key) -> list[list[int]]:
    """The ranks that agree on `key(rank)`, by first rank."""
    found: dict = {}
    for rank in range(layout.world):
        found.setdefault(key(rank), []).append(rank)
    return list(found.values())


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 4))))
def test_ranks_and_coordinates_undo_each_other(sizes):
    layout = Layout(*sizes)
    assert layout.world == sizes[0] * sizes[1] * sizes[2]
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    assert places == list(itertools.product(*map(range, sizes)))
    assert [layout.rank(*place) for place in places] == list(range(layout.world))


def test_figure_8_of_hybridflow():
    """Training 1-4-2 (pp, tp, dp) on eight ranks, generation with two tensor-parallel ranks: groups at intervals of two."""
    layout = Layout(pp=1, dp=2, tp=4, gen_pp=1, gen_tp=2)
    assert layout.micro_dp == 2
    replica = lambda rank: (layout.coordinates(rank)[1], layout.micro_dp_index(rank))  # noqa: E731
    assert groups(layout, replica) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    shard = lambda rank: (layout.coordinates(rank)[1], layout.coordinates(rank)[2] // 2)  # noqa: E731
    micro_dp_groups = groups(layout, shard)
    assert micro_dp_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for group in micro_dp_groups:
        assert [layout.micro_dp_index(rank) for rank in group] == [0, 1]


@pytest.mark.parametrize(
    "layout",
    [Layout(4, 2, 4, 2, 2), Layout(2, 1, 4, 1, 4), Layout(2, 2, 2, 2, 1), Layout(1, 3, 8, 1, 2), Layout(4, 1, 1, 2, 1)],
)
def test_every_generation_replica_holds_the_whole_model(layout):
    """Each replica has gen_pp * gen_tp ranks, whose training shards lie one in each of its generation shards."""
    for d in range(layout.dp):
        ranks = [rank for rank in range(layout.world) if layout.coordinates(rank)[1] == d]
        assert {layout.micro_dp_index(rank) for rank in ranks} == set(range(layout.micro_dp))
        for micro in range(layout.micro_dp):
            places = [layout.coordinates(rank) for rank in ranks if layout.micro_dp_index(rank) == micro]
            shards = {(p * layout.gen_pp // layout.pp, t * layout.gen_tp // layout.tp) for p, _, t in places}
            assert shards == set(itertools.product(range(layout.gen_pp), range(layout.gen_tp)))
            assert len(places) == layout.gen_pp * layout.gen_tp


def test_generation_sizes_equal_to_training_sizes_make_one_replica():
    layout = Layout(2, 3, 4, 2, 4)
    assert layout.micro_dp == 1 and {layout.micro_dp_index(rank) for rank in range(layout.world)} == {0}


@pytest.mark.parametrize("name", ["pp", "dp", "tp", "gen_pp", "gen_tp"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_positive(name, size):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not {size}"):
        Layout(**{name: size})


@pytest.mark.parametrize("sizes", [{"tp": 4, "gen_tp": 3}, {"pp": 2, "gen_pp": 4}])
def test_generation_sizes_divide(sizes):
    with pytest.raises(ConfigError, match="must divide"):
        Layout(**sizes)


def test_layouts_are_values():
    assert Layout(dp=2) == Layout(dp=2) and len({Layout(dp=2), Layout(dp=2), Layout(tp=2)}) == 2
    assert str(Layout(2, 3, 4)) == "pp2dp3tp4"
