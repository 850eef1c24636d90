"""Worker groups: the controller's handles on the ranks of each role, and the results of their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.protocol.errors import WiringError, nearest
from hybridrl.protocol.reference import Reference
from hybridrl.protocol.register import contract_of, registered

if TYPE_CHECKING:
    from hybridrl.controller.executor import Executor
    from hybridrl.controller.roles import Role


class Result:
    """What a method that writes no columns returned: one small value per collected rank, not waited for until looked at."""

    def __init__(self, values: Callable[[Sequence[Any]], list[Any]], handles: Sequence[Any]) -> None:
        self._values, self._handles = values, handles

    def all(self) -> list[Any]:
        """Every collected rank's value, in the transfer protocol's order. Waits."""
        return self._values(self._handles)

    def get(self) -> Any:
        """The first collected rank's value: for metrics, which all ranks agree on. Waits."""
        return self.all()[0]

    def __or__(self, other: Result) -> Result:
        if not isinstance(other, Result):
            return NotImplemented
        return MergedResult(self, other)


class MergedResult(Result):
    """Two results that are dictionaries, as one."""

    def __init__(self, left: Result, right: Result) -> None:
        self._both = (left, right)

    def all(self) -> list[Any]:
        left, right = (result.get() for result in self._both)
        if not (isinstance(left, Mapping) and isinstance(right, Mapping)):
            raise WiringError(f"results merge when both are dictionaries, not {type(left).__name__} and {type(right).__name__}")
        return [{**left, **right}]


class Method:
    """A registered method of a worker group: `method(reference, **options)`."""

    def __init__(self, executor: Executor, role: str, name: str) -> None:
        self._executor, self._role, self._name = executor, role, name

    def __call__(self, data: Reference | Sequence[Reference] | None = None, **options: Any) -> Any:
        """A `Reference` if the method writes columns, else a `Result`; at once. Options are small picklable values."""
        return self._executor.call(self._role, self._name, data, options)


class WorkerGroup:
    """All ranks of one role. Its attributes are the registered methods of the worker class."""

    def __init__(self, executor: Executor, name: str, role: Role) -> None:
        self._executor, self._name, self._role = executor, name, role

    def __getattr__(self, method: str) -> Method:
        if method.startswith("__"):
            raise AttributeError(method)
        contract_of(self._role.worker, method, self._role.config)
        return Method(self._executor, self._name, method)

    def __dir__(self) -> list[str]:
        return registered(self._role.worker)

    def __repr__(self) -> str:
        return f"WorkerGroup({self._name}: {self._role.worker.__name__} on {self._role.pool.name}, {self._role.ranks_layout})"


class Groups:
    """The worker groups of a run, by role: `m.actor`, `m.critic`."""

    def __init__(self, groups: Mapping[str, WorkerGroup]) -> None:
        self._groups = dict(groups)

    def __getattr__(self, role: str) -> WorkerGroup:
        if role.startswith("__"):
            raise AttributeError(role)
        if role not in self._groups:
            raise WiringError(f"there is no role '{role}'{nearest(role, self._groups)}; this run has {', '.join(self._groups)}")
        return self._groups[role]

    def __dir__(self) -> list[str]:
        return list(self._groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._groups.values()))
