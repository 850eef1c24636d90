"""`register` declares, where a worker method is defined, what it reads and writes and how data reaches its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hybridrl.protocol.errors import WiringError, nearest
from hybridrl.protocol.transfer import TransferProtocol

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__hybridrl_contract__"


@dataclass(frozen=True, slots=True)
class Contract:
    """What a method touches.

    reads: columns that must be there, and the only ones that travel, with those of `optional` that happen to be there.
    writes: columns of the batch it returns; with none it returns a small picklable value instead (metrics).
    rowwise: a row of the output depends on that row of the input alone, so rows may be processed as they arrive.
    updates_weights: calls after this one see other weights of the role.
    balance: the ragged column whose row lengths the rows are balanced by over data ranks, or "" to keep them in order.
    """

    protocol: TransferProtocol
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rowwise: bool = False
    updates_weights: bool = False
    balance: str = ""

    def __post_init__(self) -> None:
        for name in ("reads", "writes", "optional"):
            if isinstance(getattr(self, name), str):
                raise WiringError(
                    f"{name}='{getattr(self, name)}' is one text: give a tuple of columns, ('{getattr(self, name)}',)"
                )
        if self.writes and not self.reads:
            raise WiringError("a method that writes columns must read one: its output has as many rows as what it reads")
        if self.rowwise and not self.writes:
            raise WiringError("a rowwise method must write columns: its output has a row for every row of its input")
        if self.balance and self.balance not in self.reads:
            raise WiringError(f"a method balanced by '{self.balance}' must read it; it reads {self.reads}")


def register(
    protocol: TransferProtocol,
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    rowwise: bool = False,
    updates_weights: bool = False,
    balance: str = "",
) -> Callable[[F], F]:
    """Declare a worker method's `Contract`. The method takes a batch of the columns it reads, and keyword arguments."""
    contract = Contract(protocol, reads, writes, optional, rowwise, updates_weights, balance)

    def mark(function: F) -> F:
        setattr(function, _MARK, contract)
        return function

    return mark


def contract_of(worker: type, method: str, config: Any = None) -> Contract:
    """The contract of a worker class's method; WiringError with the nearest registered name if it has none.

    A worker class whose configuration decides what it reads (a loss that needs its own columns) has a static method
    `also_reads(config, method) -> tuple[str, ...]`.
    """
    contract = getattr(getattr(worker, method, None), _MARK, None)
    if contract is None:
        known = registered(worker)
        raise WiringError(
            f"{worker.__name__} has no registered method '{method}'{nearest(method, known)}; it has {', '.join(known)}. "
            "Declare one with @register(protocol, reads=..., writes=...)."
        )
    also = worker.also_reads(config, method) if hasattr(worker, "also_reads") else ()
    return replace(contract, reads=(*contract.reads, *(c for c in also if c not in contract.reads)))


def registered(worker: type) -> list[str]:
    """Names of the methods of a worker class that have a contract."""
    return sorted(name for name in dir(worker) if hasattr(getattr(worker, name, None), _MARK))
