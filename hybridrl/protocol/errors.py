"""The errors of hybridrl: one base, and a subclass where a caller would act differently.

`UserError` and its subclasses mean "what you gave cannot be used": the message says what, where and how to mend it, and a
recipe ends with exit status 2 and no traceback. `WorkerError` carries a failure out of a worker process; its fields are plain
strings and integers, so that it crosses process boundaries. To add one: subclass, keep `__init__` arguments equal to `args`
(so that it pickles), and name the fix in the message.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HybridRLError(Exception):
    """Base of every error that hybridrl raises on purpose."""


class UserError(HybridRLError):
    """The user's input cannot be used. The message says what, where and how to fix it."""


class ConfigError(UserError):
    """A configuration key or value is wrong."""


class DataError(UserError):
    """A data file is missing, unreadable, or has a line that does not fit."""


class ModelError(UserError):
    """A path holds no model, or not one that can be used."""


class WiringError(UserError):
    """A step function does not fit the contracts of the methods that it calls."""


class RewardError(UserError):
    """A reward function raised, or returned something that is not one finite number per completion."""


class WorkerError(HybridRLError):
    """A call failed in a worker, or its process died.

    `cause` is one line; `remote_traceback` is the worker's own, "" when the process left none.
    """

    def __init__(self, role: str, rank: int, method: str, cause: str, remote_traceback: str = "") -> None:
        super().__init__(role, rank, method, cause, remote_traceback)
        self.role, self.rank, self.method = role, rank, method
        self.cause, self.remote_traceback = cause, remote_traceback

    def __str__(self) -> str:
        text = f"{self.role}.{self.method} failed on rank {self.rank}: {self.cause}"
        return f"{text}\n\n{self.remote_traceback}" if self.remote_traceback else text


class DeadlineError(HybridRLError):
    """A wait went past its deadline. The message names the call, the ranks that have not answered and the seconds."""


def at_least(config: object, **least: float) -> None:
    """ConfigError, naming the field, if one of these fields of a configuration is under its least value."""
    for field, value in least.items():
        if getattr(config, field) < value:
            raise ConfigError(f"{field} must be at least {value}, not {getattr(config, field)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """For the end of an error message: which known name resembles `name`, as " (did you mean 'x'?)", or "" when none does."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""
