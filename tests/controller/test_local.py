import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from hybridrl.controller import Groups, LocalExecutor, Pool, Role
from hybridrl.protocol.batch import batch, padded, ragged, unpadded
from hybridrl.protocol.errors import ConfigError, DataError, HybridRLError, WiringError
from hybridrl.protocol.layout import Layout
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import ALL_TO_ALL, DP_PROTO, ONE_TO_ALL, THREE_D, TransferProtocol
from hybridrl.workers.base import Worker

NOBODY = TransferProtocol("NOBODY", ONE_TO_ALL.distribute, lambda layout: [])
BEYOND = TransferProtocol("BEYOND", ONE_TO_ALL.distribute, lambda layout: [1])
TOO_MANY = TransferProtocol("TOO_MANY", lambda layout, rows, weights: [np.arange(rows)] * 2, lambda layout: [0])


class Model(Worker):
    """Scales numbers by a weight that its updates grow; `config` is the first weight."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.weight, self.closed = config, 0

    @register(THREE_D, reads=("tokens",), writes=("scaled",), rowwise=True)
    def scale(self, data):
        assert set(data.keys()) == {"tokens"}
        return {"scaled": unpadded(padded(data["tokens"]) * self.weight, data["tokens"])}

    @register(DP_PROTO, reads=("scaled",), optional=("bonus",), writes=("total",), rowwise=True)
    def add_up(self, data):
        totals = padded(data["scaled"]).sum(1)
        return batch({"total": totals + data["bonus"] if "bonus" in set(data.keys()) else totals})

    @register(THREE_D, reads=("tokens", "total"), updates_weights=True, balance="tokens")
    def update(self, data, by=1):
        self.weight += by
        return {"rows": len(data), "weight": self.weight}

    @register(ONE_TO_ALL)
    def weight_now(self):
        return self.weight

    @register(THREE_D, reads=("x",), writes=("y",))
    def answers(self, data, made):
        return made

    @register(THREE_D, reads=("x",), writes=("y",))
    def fails(self, data, error):
        raise error

    @register(ALL_TO_ALL, reads=("x",), writes=("y",))
    def by_hand(self, data):
        return {"y": data["x"] * 2}

    @register(NOBODY, reads=("x",))
    def kept_by_nobody(self, data):
        return None

    @register(BEYOND, reads=("x",))
    def kept_beyond(self, data):
        return None

    @register(TOO_MANY, reads=("x",))
    def too_many(self, data):
        return None

    def close(self):
        self.closed += 1


TOKENS = [[1, 2], [], [3, 4, 5], [6]]


@pytest.fixture
def executor():
    with LocalExecutor() as executor:
        yield executor


@pytest.fixture
def m(executor):
    return executor.start({"model": Role(Model, 3), "other": Role(Model, 10)})


def tokens(executor, **more):
    return executor.rows(batch({"tokens": ragged(TOKENS, dtype=torch.int64), **more}))


def xs(executor, rows=2):
    return executor.rows(batch({"x": torch.arange(rows)}))


def test_calls_equal_direct_computation(executor, m):
    rows = tokens(executor)
    rows |= m.model.scale(rows)
    rows |= m.other.add_up(rows)
    assert [row.tolist() for row in rows.fetch("scaled")["scaled"].unbind()] == [[3, 6], [], [9, 12, 15], [18]]
    assert rows.fetch("total")["total"].tolist() == [9, 0, 36, 18]
    assert set(rows.columns) == {"tokens", "scaled", "total"}


def test_roles_keep_their_own_state(executor, m):
    rows = tokens(executor, total=torch.zeros(4))
    assert m.model.update(rows, by=2).get() == {"rows": 4, "weight": 5}
    assert m.model.weight_now().all() == [5] and m.other.weight_now().get() == 10
    assert m.model.scale(rows[[3]]).fetch()["scaled"].unbind()[0].tolist() == [30]


def test_optional_columns_travel_when_they_are_there(executor, m):
    scaled = ragged(TOKENS, dtype=torch.int64)
    plain = executor.rows(batch({"scaled": scaled}))
    generous = executor.rows(batch({"scaled": scaled, "bonus": torch.full((4,), 100)}))
    assert m.model.add_up(plain).fetch()["total"].tolist() == [3, 0, 12, 6]
    assert m.model.add_up(generous).fetch()["total"].tolist() == [103, 100, 112, 106]


def test_merged_sliced_and_reordered_rows_arrive_as_asked(executor, m):
    rows = tokens(executor)
    backwards = m.model.scale(rows[[3, 2, 1, 0]])
    merged = rows | backwards
    assert m.model.add_up(merged[[2, 0]]).fetch()["total"].tolist() == [36, 9]
    totals = [m.model.add_up(mini) for mini in merged.minibatches(3, seed=1)]
    assert sorted(t for part in totals for t in part.fetch()["total"].tolist()) == [0, 9, 18, 36]


def test_rows_of_two_calls_stand_side_by_side_in_one_batch(executor, m):
    rows = tokens(executor)
    halves = [m.model.scale(rows[2:]), m.other.scale(rows[:2])]
    joined = rows[2:] | halves[0]
    assert m.model.add_up(joined).fetch()["total"].tolist() == [36, 18]
    with pytest.raises(WiringError, match="different rows"):
        rows | halves[0]


def test_no_rows_at_all(executor, m):
    nothing = tokens(executor)[:0]
    nothing |= m.model.scale(nothing)
    nothing |= m.model.add_up(nothing)
    assert nothing.fetch()["total"].tolist() == []
    assert m.model.update(nothing).get()["rows"] == 0


def test_a_stream_is_there_at_once(executor, m):
    rows = tokens(executor)
    rows |= m.model.scale(rows)
    assert [len(part) for part in rows.stream()] == [4]


def test_one_reference_per_rank_by_hand(executor, m):
    assert m.model.by_hand([xs(executor)]).fetch()["y"].tolist() == [0, 2]
    with pytest.raises(WiringError, match="takes one reference per rank: 1, not 2"):
        m.model.by_hand([xs(executor), xs(executor)])
    with pytest.raises(WiringError, match="give a list with one input per rank"):
        m.model.by_hand(xs(executor))
    with pytest.raises(WiringError, match=r"takes one reference, not a list.*Only ALL_TO_ALL takes a list"):
        m.model.fails([xs(executor)])
    with pytest.raises(WiringError, match=r"takes one reference, not a TensorDict: executor\.rows\(batch\) makes one"):
        m.model.scale(batch({"tokens": ragged(TOKENS)}))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"y": torch.zeros(3)}, "returned 3 rows of 'y' for 2 rows of input"),
        ({"y": torch.zeros(2), "z": torch.zeros(2)}, r"writes \['y'\], but returned \['y', 'z'\]"),
        ({}, r"writes \['y'\], but returned \[\]"),
        (None, r"writes \['y'\], but returned \[\]"),
        (torch.zeros(2), r"writes \['y'\], but returned \[\]"),
    ],
    ids=["rows", "undeclared", "missing", "nothing", "bare"],
)
def test_a_method_returns_what_it_declares(executor, m, made, message):
    with pytest.raises(WiringError, match=f"model.answers.*{message}"):
        m.model.answers(xs(executor), made=made)


def test_wiring_errors_name_what_there_is(executor, m):
    rows = xs(executor)
    with pytest.raises(WiringError, match=r"model\.scale reads column 'tokens', which nobody wrote; the batch has x"):
        m.model.scale(rows)
    with pytest.raises(WiringError, match=r"nobody wrote \(did you mean 'tokenz'\?\)"):
        m.model.scale(executor.rows(batch({"tokenz": torch.zeros(1)})))
    with pytest.raises(WiringError, match=r"model\.scale reads tokens, but was called without a batch"):
        m.model.scale()
    with pytest.raises(WiringError, match=r"no registered method 'scael' \(did you mean 'scale'\?\)"):
        _ = m.model.scael
    with pytest.raises(WiringError, match=r"no role 'modle' \(did you mean 'model'\?\); this run has model, other"):
        _ = m.modle


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("kept_by_nobody", r"NOBODY collects from ranks \[\]"),
        ("kept_beyond", r"BEYOND collects from ranks \[1\]; it must name some of the 1 ranks"),
        ("too_many", "TOO_MANY distributes to 2 ranks, but pp1dp1tp1 has 1"),
    ],
)
def test_a_protocol_that_does_not_fit_is_refused_before_the_call(executor, m, method, message):
    with pytest.raises(WiringError, match=f"model.{method}: {message}"):
        getattr(m.model, method)(xs(executor))


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), DataError("line 3"), KeyboardInterrupt()], ids=repr)
def test_an_exception_surfaces_as_itself_where_the_call_stands(executor, m, error):
    with pytest.raises(type(error)) as caught:
        m.model.fails(xs(executor), error=error)
    assert caught.value is error
    assert any(entry.name == "fails" for entry in caught.traceback)
    assert m.other.weight_now().get() == 10


def test_options_need_not_pickle_here(executor, m):
    lock = threading.Lock()
    with pytest.raises(WiringError):
        m.model.answers(xs(executor), made=lock)


def test_closing_twice_closes_workers_once():
    executor = LocalExecutor()
    groups = executor.start({"model": Role(Model, 1)})
    worker = executor.workers["model"]
    executor.close()
    executor.close()
    assert worker.closed == 1
    with pytest.raises(HybridRLError, match="not running"):
        groups.model.weight_now()


def test_an_executor_starts_once_and_something():
    with LocalExecutor() as executor:
        with pytest.raises(WiringError, match="no role to start"):
            executor.start({})
        assert isinstance(executor.start({"model": Role(Model, 1)}), Groups)
        with pytest.raises(HybridRLError, match="started its roles already"):
            executor.start({"model": Role(Model, 1)})


def test_several_ranks_need_ray():
    with LocalExecutor() as executor, pytest.raises(ConfigError, match="ranks must be 1 with executor=local, not 2"):
        executor.start({"model": Role(Model, 1, Pool("main", 2))})


def test_a_pool_has_one_size_and_a_layout_fits_it():
    with LocalExecutor() as executor, pytest.raises(WiringError, match="role 'b': pool 'main' is given with two sizes"):
        executor.start({"a": Role(Model, 1, Pool("main", 1)), "b": Role(Model, 1, Pool("main", 2))})
    with pytest.raises(ConfigError, match="layout pp1dp2tp2 needs 4 ranks, but pool 'main' has 2"):
        Role(Model, 1, Pool("main", 2), Layout(dp=2, tp=2))
    with pytest.raises(ConfigError, match="ranks must be at least 1, not 0"):
        Pool("main", 0)
    assert Role(Model, 1, Pool("main", 3)).ranks_layout == Layout(dp=3)


def test_the_cost_of_a_call_does_not_grow_with_the_calls_before(executor, m):
    def best_of(times: int) -> float:
        took = []
        for _ in range(times):
            start = time.perf_counter()
            m.model.weight_now()
            took.append(time.perf_counter() - start)
        return min(took)

    first = best_of(20)
    best_of(2000)
    assert best_of(20) < 3 * first + 1e-4


def test_importing_brings_neither_ray_nor_vllm():
    """Nor the rooms by themselves: importing one of them imports the package around it."""
    code = "import sys, hybridrl.protocol, hybridrl.controller; print([m for m in ('ray', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr
