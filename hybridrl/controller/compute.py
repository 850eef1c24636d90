"""Controller functions: what the step function computes itself, with the same declaration as a worker method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hybridrl.protocol.batch import Batch
from hybridrl.protocol.reference import Reference
from hybridrl.protocol.register import Contract
from hybridrl.protocol.transfer import ONE_TO_ALL


def computes(
    *, reads: tuple[str, ...], writes: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function `f(batch, **options)` that the controller runs itself.

    Called with a reference, it fetches just the columns it reads and answers a reference to what it writes (a mapping of
    columns, one row per row), or a `Result` when it writes nothing. Called with a batch, it is the plain function.
    """
    contract = Contract(ONE_TO_ALL, reads=reads, writes=writes, optional=optional)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(data: Reference | Batch, **options: Any) -> Any:
            if isinstance(data, Reference):
                return data.store.compute(function, contract, data, options)
            return function(data, **options)

        return run

    return wrap
