"""Rewards as plain Python functions: finding one by name, calling it, and checking what it gives back.

A reward has TRL's signature, `f(prompts: list[str], completions: list[str], **columns: list) -> list[float]`, sync or async,
where a column is a field of the data lines, one entry a completion. It is called by keyword, with just the arguments that it
takes.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import pkgutil
import reprlib
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from numbers import Real
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hybridrl.protocol.errors import ConfigError, HybridRLError, RewardError, UserError, nearest

RewardFunction = Callable[..., Any]

FLOAT32_MAX = 3.4028234663852886e38  # rewards become float32 tensors; beyond this they would be infinite there


def load_reward(spec: str) -> RewardFunction:
    """The function that "package.module:name" or "path/to/file.py:name" names. Raises `ConfigError`."""
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"reward '{spec}' must be 'package.module:name' or 'path/to/file.py:name'")
    with _Blame(
        lambda error: ConfigError(f"reward '{spec}': {source} fails on import: {_described(error, source)}; mend it there")
    ):
        module = _load_file(spec, Path(source).expanduser()) if source.endswith(".py") else _load_module(spec, source)
    public = [known for known, value in vars(module).items() if inspect.isfunction(value) and not known.startswith("_")]
    if not hasattr(module, name):
        held = f"it has {', '.join(public)}" if public else "it has no functions"
        raise ConfigError(f"reward '{spec}': {source} has no '{name}'{nearest(name, public)}; {held}")
    function = getattr(module, name)
    if not callable(function) or isinstance(function, type):
        kind = "class" if isinstance(function, type) else type(function).__name__
        raise ConfigError(f"reward '{spec}': '{name}' is a {kind}; name a function f(prompts, completions, **columns)")
    try:
        inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"reward '{spec}': the arguments of '{name}' cannot be read; wrap it in a Python function") from error
    return function


def check_columns(function: RewardFunction, name: str, columns: Collection[str]) -> None:
    """Refuse, before anything is generated, a reward that needs a column which is not there. Raises `RewardError`."""
    _taken(function, name, columns)


def score(
    function: RewardFunction, name: str, prompts: list[str], completions: list[str], columns: Mapping[str, list[Any]]
) -> list[float]:
    """One finite float a completion. The prompts, the completions and every column have B entries; `name` is for messages.

    Raises `RewardError` when the function needs a column that is not there, raises (an error of hybridrl's own passes as it
    is), or returns anything but one finite number a completion.
    """
    available: dict[str, Any] = {"prompts": prompts, "completions": completions, **columns}
    arguments = {key: available[key] for key in _taken(function, name, columns)}
    with _Blame(lambda error: RewardError(f"reward '{name}' raised {_described(error, _file(function))}; mend the function")):
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run_coroutine_threadsafe(_awaited(result), _event_loop()).result()
    return _checked(name, result, prompts, completions)


class _Blame:
    """Turns any exception of the user's code into the `UserError` that `make` makes of it, chained to the original.

    It stands around the user's code alone, so that a mistake of ours is never reported as theirs.
    """

    def __init__(self, make: Callable[[Exception], UserError]) -> None:
        self._make = make

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, HybridRLError):
            raise self._make(error) from error


def _load_module(spec: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{source}.".startswith(f"{missing}."):
            raise  # the module is there, and something that it imports is not
        parent = missing.rpartition(".")[0]
        places = getattr(sys.modules[parent], "__path__", ()) if parent else None
        siblings = [f"{parent}.{found.name}".lstrip(".") for found in pkgutil.iter_modules(places)]
        raise ConfigError(
            f"reward '{spec}': no module '{missing}'{nearest(missing, siblings)}; install it, or name a file: path/file.py:name"
        ) from error


def _load_file(spec: str, file: Path) -> ModuleType:
    if not file.is_file():
        siblings = [other.name for other in file.parent.glob("*.py")]
        raise ConfigError(f"reward '{spec}': no file {file}{nearest(file.name, siblings)}; give the path of a Python file")
    # A name of its own: a file called math.py must not stand for the standard library's. Dataclasses look it up in sys.modules.
    module = ModuleType(f"hybridrl_reward:{file.resolve()}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    SourceFileLoader(module.__name__, str(file)).exec_module(module)
    return module


def _described(error: Exception, file: str) -> str:
    """The error in one line, with its place: the innermost line in `file`, the user's, or else the innermost in any file."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (at {error.filename}:{error.lineno})"
    frames = [
        frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if not frame.filename.startswith("<frozen")
    ]
    frame = next((frame for frame in frames if frame.filename == file), frames[0])
    return f"{type(error).__name__}: {error} (at {frame.filename}:{frame.lineno})"


def _file(function: RewardFunction) -> str:
    """The file that a function is written in, or "" for one written in no file."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    return code.co_filename if code else ""


def _taken(function: RewardFunction, name: str, columns: Collection[str]) -> list[str]:
    """Which of prompts, completions and the columns to call with: those that the function names, or all for **kwargs."""
    own = ("prompts", "completions")
    for clash in set(own) & set(columns):
        raise RewardError(
            f"reward '{name}': the data's column '{clash}' has the name of an argument; rename the field in the data"
        )
    available = [*own, *columns]
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in available:
            held = ", ".join(f"'{column}'" for column in columns) or "none"
            raise RewardError(
                f"reward '{name}' needs the column '{parameter.name}'{nearest(parameter.name, columns)}, and the data has "
                f"{held}; rename the argument, or add the field to the data"
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return available
    return [p.name for p in named if p.name in available]


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop in a thread of its own for all async rewards.

    `asyncio.run` would not do: it refuses to run inside a notebook's loop, and a client that a reward keeps between calls would
    find its loop closed.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="hybridrl-rewards", daemon=True).start()
    return loop


def _checked(name: str, result: Any, prompts: list[str], completions: list[str]) -> list[float]:
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardError(f"reward '{name}' returned a {type(result).__name__}; return a list with one number per completion")
    if len(values) != len(completions):
        raise RewardError(
            f"reward '{name}' returned {len(values)} rewards for {len(completions)} completions; return one for each"
        )
    for row, value in enumerate(values):
        if not _is_finite(value):
            raise RewardError(
                f"reward '{name}' returned {reprlib.repr(value)} for row {row} (prompt {_short(prompts[row])}, completion "
                f"{_short(completions[row])}); return a finite number, such as 0.0 for a completion that earns nothing"
            )
    return [float(value) for value in values]


def _is_finite(value: Any) -> bool:
    return issubclass(type(value), Real) and bool(abs(value) <= FLOAT32_MAX)


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else f"{text[: limit - 23]}...{text[-20:]}")
