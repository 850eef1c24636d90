"""Pools and roles: which worker class plays a role, with which configuration, on which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridrl.protocol.errors import ConfigError
from hybridrl.protocol.layout import Layout


@dataclass(frozen=True, slots=True)
class Pool:
    """A set of devices with one process each. Roles given the same pool share its processes and take turns."""

    name: str = "main"
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"pool '{self.name}': ranks must be at least 1, not {self.ranks}")


@dataclass(frozen=True, slots=True)
class Role:
    """`worker(config, context)` on every rank of `pool`, laid out as `layout` (data parallel over the pool if None)."""

    worker: type
    config: Any = None
    pool: Pool = Pool()
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.layout is not None and self.layout.world != self.pool.ranks:
            raise ConfigError(
                f"layout {self.layout} needs {self.layout.world} ranks, but pool '{self.pool.name}' has {self.pool.ranks}; "
                "make pp * dp * tp equal to the pool's ranks"
            )

    @property
    def ranks_layout(self) -> Layout:
        return self.layout or Layout(dp=self.pool.ranks)
