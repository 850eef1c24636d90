import copy

import pytest

from hybridrl.controller import LocalExecutor, Pool, Result, Role
from hybridrl.protocol.errors import WiringError
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import ONE_TO_ALL
from hybridrl.workers.base import Worker


class Teller(Worker):
    @register(ONE_TO_ALL)
    def told(self, value):
        return value

    def hidden(self):
        return None


@pytest.fixture
def m():
    with LocalExecutor() as executor:
        yield executor.start({"critic": Role(Teller, pool=Pool("second")), "actor": Role(Teller)})


def test_groups_show_what_they_have(m):
    assert list(m) == ["critic", "actor"] and dir(m) == ["actor", "critic"]
    assert dir(m.actor) == ["told"]
    assert repr(m).splitlines() == [
        "WorkerGroup(critic: Teller on second, pp1dp1tp1)",
        "WorkerGroup(actor: Teller on main, pp1dp1tp1)",
    ]


def test_a_method_that_is_not_registered_is_not_there(m):
    with pytest.raises(WiringError, match="Teller has no registered method 'hidden'; it has told"):
        _ = m.actor.hidden


def test_groups_can_be_copied_and_asked_for_special_names(m):
    assert copy.copy(m).actor.told(value=1).get() == 1
    assert not hasattr(m, "__len__") and not callable(m.actor)


def test_a_result_is_one_value_per_collected_rank():
    result = Result(lambda handles: [h * 10 for h in handles], [1, 2])
    assert result.all() == [10, 20] and result.get() == 10


def test_a_result_waits_only_when_looked_at():
    waits = []

    def values(handles):
        waits.append(handles)
        return [{"loss": 1.0}]

    merged = Result(values, [1]) | Result(values, [2])
    assert waits == []
    merged.get()
    assert waits == [[1], [2]]


def test_merged_results_are_one_dictionary(m):
    merged = m.critic.told(value={"a": 1, "b": 2}) | m.actor.told(value={"b": 3}) | m.actor.told(value={})
    assert merged.get() == {"a": 1, "b": 3} and merged.all() == [{"a": 1, "b": 3}]


def test_merging_leaves_the_parts_as_they_were(m):
    left, right = m.critic.told(value={"a": 1}), m.actor.told(value={"b": 2})
    (left | right).get()["c"] = 3
    assert left.get() == {"a": 1} and right.get() == {"b": 2}


def test_only_results_that_are_dictionaries_merge(m):
    with pytest.raises(WiringError, match="both are dictionaries, not dict and NoneType"):
        (m.critic.told(value={"a": 1}) | m.actor.told(value=None)).get()
    with pytest.raises(TypeError):
        m.actor.told(value={}) | {"a": 1}
