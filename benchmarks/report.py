"""What the benchmarks share: medians, and a result written as JSON and shown as a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def output_file(description: str) -> Path:
    """The file named by `--out` on the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return Path(parser.parse_args().out)


def alternate_ms(runs: Mapping[str, Callable[[], object]], times: int, warm_up: int = 2) -> dict[str, float]:
    """Median milliseconds of each, taken in turn so that a change of the machine's pace meets all of them."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warm_up + times):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= warm_up:
                taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(statistics.median(values), 3) for name, values in taken.items()}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def publish(result: Mapping[str, Any], out: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write the result, with the machine, and show the table."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**result, "machine": machine()}, indent=2) + "\n")
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=120).print(table)
