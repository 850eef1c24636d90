"""The Ray executor on a real cluster: one executor for all that leaves it running, another for each test that ends it."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from hybridrl.controller import LocalExecutor, Pool, Role
from hybridrl.controller.ray import RayConfig, RayExecutor
from hybridrl.protocol.batch import batch, padded, ragged, unpadded, values_of
from hybridrl.protocol.errors import DataError, DeadlineError, HybridRLError, WiringError, WorkerError
from hybridrl.protocol.layout import Layout
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import ALL_TO_ALL, DP_PROTO, ONE_TO_ALL, THREE_D, TransferProtocol
from hybridrl.workers.base import Worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

DEAL = TransferProtocol(
    "DEAL",
    lambda layout, rows, weights: [np.arange(rank, rows, layout.world) for rank in range(layout.world)],
    lambda layout: list(range(layout.world)),
)


@dataclass
class Note:
    """A class that only this module knows."""

    text: str


class Model(Worker):
    def __init__(self, config, context):
        super().__init__(config, context)
        if config == "broken":
            raise ValueError("no such model")
        self.weight = config or 1

    @register(DP_PROTO, reads=("tokens",), writes=("scaled", "sums"), rowwise=True)
    def scale(self, data):
        if not len(data):
            return {"scaled": ragged([]), "sums": torch.zeros(0)}
        scaled = padded(data["tokens"]) * self.weight
        return {"scaled": unpadded(scaled, data["tokens"]), "sums": scaled.sum(1)}

    @register(THREE_D, reads=("scaled", "sums"), writes=("total",))
    def normalise(self, data):
        total = self.context.all_reduce(data["sums"].sum().double())
        return {"total": padded(data["scaled"]).sum(1) / total}

    @register(THREE_D, reads=("tokens",), updates_weights=True, balance="tokens")
    def update(self, data):
        self.weight += int(self.context.all_reduce(torch.tensor(float(len(data)))))
        return {"weight": self.weight, "tokens": len(values_of(data["tokens"]))}

    @register(DP_PROTO, reads=("x",), writes=("x",), rowwise=True)
    def echo(self, data):
        return {"x": data["x"]}

    @register(DEAL, reads=("x",), writes=("rank",))
    def dealt(self, data):
        return {"rank": torch.full((len(data),), self.context.rank)}

    @register(ONE_TO_ALL, reads=("x",), writes=("vote",))
    def vote(self, data):
        return {"vote": data["x"] * 10 + self.context.rank}

    @register(ALL_TO_ALL, reads=("x",), writes=("y",))
    def by_hand(self, data):
        return {"y": data["x"] + 100 * self.context.rank}

    @register(THREE_D, reads=("x",))
    def listed(self, data):
        return data["x"].tolist()

    @register(DP_PROTO, reads=("x",), balance="x")
    def balanced_by_dense(self, data):
        return None

    @register(ONE_TO_ALL)
    def nap(self, seconds):
        start = time.time()
        time.sleep(seconds)
        return start, time.time(), os.getpid()

    @register(DP_PROTO, reads=("x",), writes=("x",), rowwise=True)
    def slow(self, data):
        time.sleep(float(data["x"].sum()))
        return {"x": data["x"]}

    @register(ONE_TO_ALL)
    def told(self, what=None):
        return what

    @register(THREE_D, reads=("x",), writes=("x",))
    def fails(self, data, error):
        raise error

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def meet(self, data, alone):
        """All ranks but `alone` wait for it in a collective."""
        if self.context.rank == alone:
            time.sleep(60)
        self.context.all_reduce(torch.ones(1))
        return {"x": data["x"]}


TOKENS = [[1, 2], [], [3, 4, 5], [6], [7, 8]]
MAIN, SECOND = Pool("main", 2), Pool("second", 1)


def ranks_alive() -> set[int]:
    """The processes of ranks on a cluster that this process started: their parent is its raylet."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(pid), int(parent), line) for pid, parent, line in (row.split(None, 2) for row in table.splitlines())]
    parents = {pid: parent for pid, parent, _ in rows}
    return {pid for pid, parent, line in rows if "ray::RankProcess" in line and parents.get(parent) == os.getpid()}


def eventually(true, seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def gone(pids) -> bool:
    return eventually(lambda: not set(pids) & ranks_alive())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Six CPUs: three for the shared executor, three for the ranks of one that a test ends."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("ray")
    os.chdir(folder)
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    yield folder
    ray.shutdown()
    os.chdir(before)
    assert not list(folder.iterdir()), "the cluster wrote into the working directory"


@pytest.fixture(scope="module")
def executor(cluster):
    with RayExecutor(RayConfig(deadline_s=40)) as executor:
        executor.groups = executor.start(
            {
                "model": Role(Model, 3, MAIN),
                "twin": Role(Model, 5, MAIN),
                "sharded": Role(Model, 1, MAIN, Layout(tp=2)),
                "other": Role(Model, 7, SECOND),
            }
        )
        pids = executor.pids().values()
        yield executor
    assert gone(pids)


@pytest.fixture
def m(executor):
    return executor.groups


@pytest.fixture
def own(cluster):
    """Starts roles on an executor of the test's own, which the test may end; nothing of it may stay behind."""
    made: list[RayExecutor] = []
    started: list[int] = []

    def start(**roles):
        made.append(RayExecutor(RayConfig(deadline_s=40)))
        groups = made[-1].start(roles)
        started.extend(made[-1].pids().values())
        return made[-1], groups

    yield start
    for executor in made:
        executor.close()
    assert gone(started)


def xs(executor, values):
    return executor.rows(batch({"x": torch.tensor(values)}))


def test_an_executor_starts_a_cluster_and_takes_it_along(tmp_path, monkeypatch, capfd):
    """First in this file, while there is no cluster. A failure nobody looked at is raised by close(), once, and not printed;
    afterwards nothing comes back to life."""
    assert not ray.is_initialized()
    monkeypatch.chdir(tmp_path)
    executor = RayExecutor()
    with pytest.raises(HybridRLError, match="not running"):
        xs(executor, [1])
    assert not ray.is_initialized()
    m = executor.start({"model": Role(Model, 1)})
    rows, pids = xs(executor, [1, 2]), list(executor.pids().values())
    rows |= m.model.fails(rows, error=DataError("line 3 of train.jsonl ü"))
    with pytest.raises(DataError) as caught:
        executor.close()
    assert str(caught.value) == "line 3 of train.jsonl ü"
    executor.close()
    assert not ray.is_initialized() and gone(pids)
    for use in (rows.fetch, lambda: xs(executor, [1]), lambda: m.model.told(what=1)):
        with pytest.raises(HybridRLError, match="not running"):
            use()
    assert not ray.is_initialized()
    assert not list(tmp_path.iterdir())
    del rows
    gc.collect()
    assert "DataError" not in capfd.readouterr().err


def test_results_equal_those_of_the_local_executor(executor, m):
    def step(m, rows):
        rows |= m.model.scale(rows)
        rows |= m.model.normalise(rows[[4, 2, 0, 1, 3]])
        weights = [m.model.update(mini).get()["weight"] for mini in rows.minibatches(3, 2, seed=1)]
        return rows.fetch(), weights

    data = batch({"tokens": ragged(TOKENS, dtype=torch.int64)})
    with LocalExecutor() as local:
        expected, weights = step(local.start({"model": Role(Model, 3)}), local.rows(data))
    found, found_weights = step(m, executor.rows(data))
    assert found_weights == weights
    for name in ("tokens", "scaled", "sums", "total"):
        one, two = ([c.tolist() for c in d[name].unbind()] for d in (found, expected))
        assert one == two and found[name].dtype == expected[name].dtype


def test_ranks_without_rows_take_part(executor, m):
    rows = executor.rows(batch({"tokens": ragged(TOKENS[2:3], dtype=torch.int64)}))
    rows |= m.other.scale(rows) | m.twin.normalise(m.twin.scale(rows))
    data = rows.fetch()
    assert data["scaled"].unbind()[0].tolist() == [21, 28, 35] and values_of(data["scaled"]).dtype == torch.int64
    assert data["total"].tolist() == [1.0]
    assert m.twin.scale(rows[:0]).fetch()["sums"].tolist() == []


def test_rows_are_balanced_by_their_lengths(executor, m):
    rows = executor.rows(batch({"tokens": ragged([[0] * n for n in (9, 8, 1, 1, 1)], dtype=torch.int64)}))
    assert sorted(value["tokens"] for value in m.twin.update(rows).all()) == [10, 10]
    with pytest.raises(WiringError, match="column 'x' is dense"):
        m.model.balanced_by_dense(xs(executor, [1, 2]))
    with pytest.raises(WiringError, match="column 'x' is dense"):
        m.model.balanced_by_dense(m.model.echo(xs(executor, [1, 2])))


def test_each_protocol_reaches_its_ranks(executor, m):
    rows = xs(executor, [0, 1, 2])
    assert m.sharded.listed(rows).all() == [[0, 1, 2]]
    assert m.model.told(what=1).all() == [1, 1]
    assert (rows | m.model.dealt(rows)).fetch()["rank"].tolist() == [0, 1, 0]
    assert m.model.by_hand([rows[[2]], rows[:2]]).fetch()["y"].tolist() == [2, 100, 101]
    assert (rows | m.other.echo(m.model.echo(rows)[[2, 0, 1]])).fetch()["x"].tolist() == [0, 1, 2]
    votes = m.model.vote(rows)
    assert votes.fetch()["vote"].tolist() == [0, 10, 20, 1, 11, 21]
    with pytest.raises(WiringError, match="different rows"):
        rows | votes


def test_a_call_returns_at_once_and_pools_run_side_by_side(executor, m):
    m.model.nap(seconds=0).all(), m.other.nap(seconds=0).all()
    start = time.monotonic()
    naps = [m.model.nap(seconds=1), m.other.nap(seconds=1)]
    assert time.monotonic() - start < 0.2
    many = [m.model.told(what=k) for k in range(200)]
    assert time.monotonic() - start < 1.0
    for nap in naps:
        nap.all()
    assert time.monotonic() - start < 1.8
    assert [result.get() for result in many] == list(range(200))


def test_roles_of_one_pool_take_turns(m):
    naps = m.model.nap(seconds=0.3).all() + m.twin.nap(seconds=0.3).all()
    for rank in (0, 1):
        (_, end, pid), (start, _, other) = naps[rank], naps[2 + rank]
        assert pid == other and end <= start


def test_a_rank_runs_its_calls_in_the_order_made(executor, m):
    """Also when the first waits for another pool: collectives would not match otherwise."""
    late = m.model.slow(m.other.slow(xs(executor, [0.5, 0.0])))
    before = time.time()
    start, _, _ = m.model.nap(seconds=0).get()
    assert start - before > 0.3
    assert late.fetch()["x"].tolist() == [0.5, 0.0]


def test_a_stream_yields_what_is_there_first(executor, m):
    rows = m.model.slow(xs(executor, [1.0, 0.0]))
    start, parts, moments = time.monotonic(), [], []
    for part in rows.stream():
        parts.append(part.fetch()["x"].tolist())
        moments.append(time.monotonic() - start)
    assert parts == [[0.0], [1.0]] and moments[0] < 0.7 < moments[1]


def test_a_chain_moves_no_payload_through_the_controller(executor, m):
    spent = []
    for megabytes in (1, 16):
        rows = executor.rows(batch({"x": torch.zeros(1024, megabytes * 256)}))
        before = executor.traffic.sent + executor.traffic.received
        made = m.model.echo(m.other.echo(m.model.echo(rows)))
        m.model.told().all(), m.other.told().all()
        spent.append(executor.traffic.sent + executor.traffic.received - before)
        assert made.fetch()["x"].shape == (1024, megabytes * 256)
    assert spent[0] == spent[1] < 100_000


def test_notebook_classes_travel_and_what_cannot_is_named(executor, m):
    assert m.model.told(what=Note("ü")).get() == Note("ü")
    with pytest.raises(WiringError, match=r"the options of model\.told \(what\) must be values that pickle"):
        m.model.told(what=threading.Lock())


def test_time_spent_waiting_for_another_call_is_not_a_calls_own(executor, m):
    config, executor.config = executor.config, replace(executor.config, deadline_s=1.5)
    try:
        rows = m.model.slow(m.other.slow(m.model.slow(xs(executor, [0.9]))))
        assert rows.fetch()["x"].tolist() == pytest.approx([0.9])
    finally:
        executor.config = config


def test_finished_calls_are_not_kept(executor, m):
    rows = xs(executor, [1, 2])
    for _ in range(30):
        rows = m.model.echo(rows)
    rows.fetch()
    flight = rows.source("x").handles[0].flight
    assert flight.outcome is not None and not flight.inputs


def test_a_killed_rank_is_the_one_named_within_seconds(own):
    """Not the rank that waits for it in a collective, and not the one in another pool that waits for its columns."""
    executor, m = own(other=Role(Model, 1, Pool("a", 1)), model=Role(Model, 1, Pool("z", 2)))
    pid = executor.pids()["z", 1]
    end = m.other.echo(m.model.meet(xs(executor, [1, 2]), alone=1))
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"model\.meet failed on rank 1: its process {pid} died") as caught:
        end.fetch()
    assert time.monotonic() - start < 8 and executor.pids() == {}
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("model", 1, "meet")


def test_a_failure_nobody_looked_at_stops_the_next_call_and_is_reported_as_upstreams(own):
    executor, m = own(other=Role(Model, 1, Pool("a", 1)), model=Role(Model, 1, Pool("z", 1)))
    known = m.other.told(what=1)
    known.get()
    pending = m.other.echo(m.model.fails(xs(executor, [1]), error=ZeroDivisionError("by zero\nand more")))
    with pytest.raises(WorkerError, match=r"model\.fails failed on rank 0: ZeroDivisionError: by zero") as caught:
        while True:
            m.other.told()
            time.sleep(0.05)
    assert "in fails" in caught.value.remote_traceback and "raise error" in str(caught.value)
    for use in (pending.fetch, m.other.told, lambda: xs(executor, [1])):
        with pytest.raises(HybridRLError, match="the workers are not running") as after:
            use()
        assert after.value.__cause__ is caught.value
    assert known.get() == 1


def test_a_call_past_the_deadline_is_named_and_not_those_behind_it(own):
    executor, m = own(first=Role(Model, 1, Pool("one", 1)), second=Role(Model, 1, Pool("one", 1)))
    executor.config = replace(executor.config, deadline_s=1.0)
    end = m.second.echo(m.first.slow(xs(executor, [60.0])))
    start = time.monotonic()
    with pytest.raises(
        DeadlineError, match=r"deadline of 1 s from first\.slow on rank 0 of pool 'one' \(process \d+\) for 1 s$"
    ):
        end.fetch()
    assert 0.9 < time.monotonic() - start < 4


def test_a_worker_that_cannot_start_is_named(own):
    with pytest.raises(WorkerError, match=r"model\.start failed on rank 0: ValueError: no such model"):
        own(model=Role(Model, "broken"))


def test_more_ranks_than_the_cluster_has_cpus_are_named(executor):
    stuck, before = RayExecutor(RayConfig(deadline_s=1)), ranks_alive()
    with pytest.raises(DeadlineError, match=r"start: .*many rank 3 did not answer within 1 s\. .*It has 6 CPUs"):
        stuck.start({"model": Role(Model, 1, Pool("many", 4))})
    stuck.close()
    assert eventually(lambda: ranks_alive() == before)
