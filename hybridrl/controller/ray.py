"""The Ray executor: one SPMD process per rank, columns in Ray's object store, metadata alone through the controller.

Every column that a call writes is an object of its own, so a consumer is sent just those it reads, by reference; on one
node it reads them in place. Each call also returns a small receipt (row lengths, metrics), which is all that the controller
fetches.

Invariant: every wait watches *all* calls under way, not only the one waited for. Waiting for one rank's answer alone looks
simpler and hangs: when a rank dies, the ranks that wait for it in a collective never answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import Tensor

from hybridrl.controller.executor import Call, Executor, RankInput, RankOutput
from hybridrl.controller.rank_process import Order, Placed, RankProcess, Receipt
from hybridrl.controller.roles import Pool
from hybridrl.environment import apply
from hybridrl.protocol.batch import from_wire, lengths_of, to_wire
from hybridrl.protocol.errors import DeadlineError, HybridRLError, WiringError, WorkerError

_POLL_S = 0.5
_GRACE_S = 3.0
"""After a failure, how long other ranks' ends are waited for: a rank that died explains those that lost a connection to it."""


@dataclass(frozen=True, slots=True)
class RayConfig:
    """address: of a running cluster ("auto" finds it), "" starts one on this machine. deadline_s: how long any one call may
    run, and starting the workers may take."""

    address: str = ""
    deadline_s: float = 1800.0
    seed: int = 0


@dataclass(slots=True)
class Traffic:
    """Bytes of calls and receipts through the controller, the data that it puts or fetches itself apart."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """One call on one rank. `number` counts calls in the order made, `inputs` are the flights whose columns it waits for, and
    `landed` is when its receipt was taken in (then it has an outcome, and forgets its inputs)."""

    number: int
    call: Call
    pool: str
    rank: int
    receipt: ray.ObjectRef
    inputs: Sequence[_Flight]
    outcome: Receipt | None = None
    landed: float = 0.0


@dataclass(slots=True)
class _Rank:
    """`queue` holds the calls that have not landed, in order; `since` is when the first of them could begin for all that
    its own process knows."""

    actor: Any
    pid: int = 0
    queue: deque[_Flight] = field(default_factory=deque)
    since: float = 0.0

    def running_since(self) -> float | None:
        """When the first call could begin: not before the calls whose columns it reads, whose time is not its own."""
        if not self.queue or any(flight.outcome is None for flight in self.queue[0].inputs):
            return None
        return max([self.since, *(flight.landed for flight in self.queue[0].inputs)])


@dataclass(frozen=True, slots=True, eq=False)
class RayHandle:
    """A column in the object store. `flight` made it; the controller put it there itself when None."""

    column: ray.ObjectRef
    name: str
    flight: _Flight | None
    lengths: np.ndarray | None = None


class RayExecutor(Executor):
    """Runs roles on a Ray cluster. The same script runs on several machines: start Ray on them and pass `address="auto"`."""

    def __init__(self, config: RayConfig | None = None) -> None:
        super().__init__()
        self.config = config or RayConfig()
        self.traffic = Traffic()
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._connected = False
        self._numbers = itertools.count()

    def _launch(self, pools: Mapping[str, Pool]) -> None:
        total = sum(pool.ranks for pool in pools.values())
        if not ray.is_initialized():
            self._connect(total)
        threads = max(1, (os.cpu_count() or 1) // total)
        device = {"num_gpus": 1} if ray.cluster_resources().get("GPU", 0) >= total else {"num_cpus": 1}
        actor = ray.remote(RankProcess).options(runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}}, **device)
        for pool in pools.values():
            for rank in range(pool.ranks):
                process = actor.remote(pool.name, rank, pool.ranks, self.config.seed)
                self._ranks[pool.name, rank] = _Rank(process)
        self._answers("start", {key: rank.actor.pid.remote() for key, rank in self._ranks.items()}, keep_pids=True)
        for pool in pools.values():
            if pool.ranks > 1:
                self._rendezvous(pool)
        for name, role in self.roles.items():
            keys = [(role.pool.name, rank) for rank in range(role.pool.ranks)]
            self._answers(f"{name}.start", {key: self._ranks[key].actor.build.remote(name, role) for key in keys})

    def _connect(self, total: int) -> None:
        """Join the cluster at `address`, or start one on this machine with room for `total` ranks."""
        self._connected = True
        apply({"RAY_IGNORE_UNHANDLED_ERRORS": "1"})  # a failed call is raised once, here; Ray would print each rank's as well
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self.config.address:
            ray.init(address=self.config.address, **quiet)
        else:
            ray.init(address="local", num_cpus=max(total, os.cpu_count() or 1), include_dashboard=False, **quiet)

    def _rendezvous(self, pool: Pool) -> None:
        keys = [(pool.name, rank) for rank in range(pool.ranks)]
        head = self._ranks[keys[0]].actor.host_rendezvous.remote()
        address, port = self._answers("rendezvous", {keys[0]: head})[keys[0]]
        joins = {key: self._ranks[key].actor.join.remote(address, port, self.config.deadline_s) for key in keys}
        self._answers("rendezvous", joins)

    def _answers(self, what: str, refs: dict[tuple[str, int], Any], keep_pids: bool = False) -> dict[tuple[str, int], Any]:
        """Every rank's answer to a step of starting up, by the deadline."""
        start, answers = time.monotonic(), {}
        waiting = {ref: key for key, ref in refs.items()}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_POLL_S)
            for ref in done:
                key = waiting.pop(ref)
                try:
                    answers[key] = ray.get(ref)
                except RayError as error:
                    self._fail(_start_failure(what, key, error))
            if waiting and time.monotonic() - start > self.config.deadline_s:
                ranks = ", ".join(f"{pool} rank {rank}" for pool, rank in waiting.values())
                self._fail(
                    DeadlineError(
                        f"{what}: {ranks} did not answer within {self.config.deadline_s:.0f} s. "
                        f"Does the cluster have room for them? It has {ray.cluster_resources().get('CPU', 0):.0f} CPUs."
                    )
                )
        if keep_pids:
            for key, pid in answers.items():
                self._ranks[key].pid = pid
        return answers

    def pids(self) -> dict[tuple[str, int], int]:
        """The process id of every (pool, rank)."""
        return {key: rank.pid for key, rank in self._ranks.items()}

    def _submit(self, call: Call, inputs: Sequence[RankInput]) -> list[RankOutput]:
        self._take_in_finished()
        pool, number = self.roles[call.role].pool.name, next(self._numbers)
        return [self._submit_to(call, number, pool, rank, columns) for rank, columns in enumerate(inputs)]

    def _submit_to(self, call: Call, number: int, pool: str, rank: int, columns: RankInput) -> RankOutput:
        placed, objects = {}, []  # type: dict[str, Placed], list[ray.ObjectRef]
        for name, source in columns.items():
            placed[name] = Placed(len(objects), len(source.handles), source.which, source.row)
            objects += [handle.column for handle in source.handles]
        order = _pickled(Order(call, placed))
        self.traffic.sent += len(order)
        member = self._ranks[pool, rank]
        writes = call.contract.writes
        made = member.actor.run.options(num_returns=1 + len(writes)).remote(order, *objects)
        receipt, *refs = made if writes else [made]
        handles = (handle for source in columns.values() for handle in source.handles)
        waits_for = {h.flight for h in handles if h.flight is not None and h.flight.outcome is None}
        flight = _Flight(number, call, pool, rank, receipt, tuple(waits_for))
        if not member.queue:
            member.since = time.monotonic()
        member.queue.append(flight)
        return RankOutput({name: RayHandle(ref, name, flight) for name, ref in zip(writes, refs, strict=True)}, flight)

    def _heads(self) -> dict[ray.ObjectRef, _Flight]:
        """The first call of every rank's queue, by its receipt. Ranks finish calls in order, so no other can be next."""
        return {member.queue[0].receipt: member.queue[0] for member in self._ranks.values() if member.queue}

    def _take_in_finished(self) -> None:
        """Take in the receipts that have come, and stop the run at the first failure among them."""
        while heads := self._heads():
            done, _ = ray.wait(list(heads), num_returns=len(heads), timeout=0, fetch_local=False)
            for ref in done:
                self._land(heads[ref])
            if not done:
                return

    def _land(self, flight: _Flight) -> None:
        try:
            receipt = ray.get(flight.receipt)
        except RayError as error:
            self._fail(self._root_cause(flight, error))
        self.traffic.received += len(receipt)
        member = self._ranks[flight.pool, flight.rank]
        member.queue.popleft()
        member.since = flight.landed = time.monotonic()
        flight.outcome, flight.inputs = pickle.loads(receipt), ()

    def _await(self, flights: Sequence[_Flight]) -> None:
        """Until these calls have finished. Fails if any call does, or if a rank is at one for longer than the deadline."""
        while any(flight.outcome is None for flight in flights):
            self._wait_a_little()

    def _wait_a_little(self) -> None:
        self._check_running()
        ray.wait(list(self._heads()), num_returns=1, timeout=_POLL_S, fetch_local=False)
        self._take_in_finished()
        self._check_deadline()

    def _check_deadline(self) -> None:
        now = time.monotonic()
        begun = [(member, member.running_since()) for member in self._ranks.values()]
        late = [(m, now - since) for m, since in begun if since is not None and now - since > self.config.deadline_s]
        if late:
            stuck = "; ".join(
                f"{m.queue[0].call} on rank {m.queue[0].rank} of pool '{m.queue[0].pool}' (process {m.pid}) for {seconds:.0f} s"
                for m, seconds in late
            )
            self._fail(DeadlineError(f"no answer within the deadline of {self.config.deadline_s:.0f} s from {stuck}"))

    def _root_cause(self, flight: _Flight, error: RayError) -> HybridRLError:
        """The failure to report: a rank that died, else the error of the call made first."""
        failures = [(flight, error)]
        end = time.monotonic() + _GRACE_S
        others = {f.receipt: f for member in self._ranks.values() for f in member.queue if f is not flight}
        while others and (left := end - time.monotonic()) > 0 and not any(_died(e) for _, e in failures):
            done, _ = ray.wait(list(others), timeout=left, fetch_local=False)
            for ref in done:
                other = others.pop(ref)
                try:
                    ray.get(ref, timeout=_POLL_S)
                except GetTimeoutError:
                    continue
                except RayError as found:
                    failures.append((other, found))
        dead = [(f, e) for f, e in failures if _died(e)]
        guilty, cause = min(dead or failures, key=lambda failure: failure[0].number)
        return self._explained(guilty, cause)

    def _explained(self, flight: _Flight, error: RayError) -> HybridRLError:
        call, rank = flight.call, flight.rank
        if _died(error):
            pid = self._ranks[flight.pool, rank].pid
            return WorkerError(call.role, rank, call.method, f"its process {pid} died (killed, out of memory, or crashed)")
        return _carried(error) or WorkerError(call.role, rank, call.method, _last_line(error))

    def _fail(self, error: HybridRLError) -> None:
        """Stop every worker, then raise: the ranks that are left may be waiting in a collective for ever."""
        self.failure = error
        self.close(force=True)
        raise error

    def values(self, handles: Sequence[_Flight]) -> list[Any]:
        self._await(handles)
        return [flight.outcome.value for flight in handles if flight.outcome is not None]

    def put(self, column: Tensor) -> RayHandle:
        self._check_running()
        lengths = lengths_of(column).numpy() if column.is_nested else None
        return RayHandle(ray.put(to_wire(column)), "", None, lengths)

    def get(self, handles: Sequence[RayHandle]) -> list[Tensor]:
        self._check_running()
        self._await([h.flight for h in handles if h.flight is not None])
        return [from_wire(wire) for wire in ray.get([h.column for h in handles])]

    def row_lengths(self, handle: RayHandle) -> np.ndarray | None:
        if handle.flight is None:
            return handle.lengths
        self._await([handle.flight])
        assert handle.flight.outcome is not None
        return handle.flight.outcome.lengths.get(handle.name)

    def ready(self, handles: Sequence[RayHandle]) -> Iterator[RayHandle]:
        waiting = list(handles)
        while waiting:
            done = [h for h in waiting if h.flight is None or h.flight.outcome is not None]
            yield from done
            waiting = [h for h in waiting if h not in done]
            if waiting and not done:
                self._wait_a_little()

    def close(self, force: bool = False) -> None:
        """End the workers: in order, engines and process groups closed; with `force` at once.

        A call that failed and was never waited for fails here.
        """
        if not force and self._ranks:
            ray.wait([r.actor.close.remote() for r in self._ranks.values()], num_returns=len(self._ranks), timeout=10)
            self._take_in_finished()
        self.running = False
        for member in self._ranks.values():
            ray.kill(member.actor)
        self._ranks = {}
        if self._connected:
            ray.shutdown()
            self._connected = False


def _carried(error: RayError) -> HybridRLError | None:
    """The hybridrl error that a rank raised, out of Ray's wrapping."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, HybridRLError) else None


def _died(error: RayError) -> bool:
    """Whether the rank's own process is gone: a rank that was to read a dead one's columns fails with both types at once."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def _last_line(error: RayError) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _start_failure(what: str, key: tuple[str, int], error: RayError) -> HybridRLError:
    return _carried(error) or WorkerError(what.partition(".")[0], key[1], "start", _last_line(error))


def _pickled(order: Order) -> bytes:
    """By cloudpickle: a notebook's classes and functions travel with the call, as its worker classes do."""
    try:
        return cloudpickle.dumps(order)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        names = ", ".join(order.call.options) or "none"
        raise WiringError(f"the options of {order.call} ({names}) must be values that pickle: {error}") from error
