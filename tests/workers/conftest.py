from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybridrl.workers import RankContext
from tests.workers.ranks import everything, run_ranks, save_models


@dataclass(frozen=True)
class Worlds:
    """What one process, and two and four gloo ranks, made of the same work: `of[world][rank]`."""

    models: Path
    out: Path
    of: dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture(scope="session")
def worlds(models, tmp_path_factory) -> Worlds:
    out = tmp_path_factory.mktemp("worlds")
    of = {1: [everything(RankContext(), models, out)]}
    for world in (2, 4):
        of[world] = run_ranks(world, everything, out / f"ranks-{world}", models, out)
    return Worlds(models, out, of)
