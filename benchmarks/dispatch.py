"""What a call on a Ray worker group costs, beside the same traffic in bare Ray.

Two workers, one float32 column of 1, 64 and 256 MB. "in": a batch in, a number out; "echo": the batch comes back and is put
together; "chain": a column made by one call is read by the next, with only its reference in the controller's hands. Bare
Ray sends numpy halves to two actors. Claims: at most 1.5 times bare Ray for "in" and "chain" at 64 and 256 MB, and the same
bytes of calls and receipts through the controller for a chained call at every size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
import torch

from benchmarks.report import alternate_ms, output_file, publish
from hybridrl.controller import Pool, Role
from hybridrl.controller.ray import RayConfig, RayExecutor
from hybridrl.protocol.batch import Batch, batch
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import DP_PROTO, ONE_TO_ALL
from hybridrl.workers import Worker

SIZES_MB = (1, 64, 256)
ROWS = 1024
TIMES = 11


class Peer(Worker):
    """Sends back, or looks at, the column it is given."""

    @register(DP_PROTO, reads=("x",), writes=("x",), rowwise=True)
    def echo(self, data: Batch) -> dict[str, torch.Tensor]:
        return {"x": data["x"]}

    @register(DP_PROTO, reads=("x",))
    def look(self, data: Batch) -> float:
        return float(data["x"][0, 0])

    @register(ONE_TO_ALL)
    def nothing(self) -> None:
        return None


@ray.remote(num_cpus=1)
class BarePeer:
    def echo(self, x: np.ndarray) -> np.ndarray:
        return x

    def look(self, x: np.ndarray) -> float:
        return float(x[0, 0])


def measure(executor: RayExecutor, peer: Any, bare: list[Any], megabytes: int) -> tuple[dict[str, float], int]:
    """(median ms of ours and bare for each pattern, controller bytes of one chained call)."""
    array = np.random.default_rng(0).random((ROWS, megabytes * 2**20 // 4 // ROWS), dtype=np.float32)
    data, halves = batch({"x": torch.from_numpy(array)}), np.array_split(array, 2)
    held = executor.rows(data)
    held_bare = [ray.put(half) for half in halves]

    def bare_in() -> None:
        ray.get([actor.look.remote(half) for actor, half in zip(bare, halves, strict=True)])

    def bare_echo() -> None:
        np.concatenate(ray.get([actor.echo.remote(half) for actor, half in zip(bare, halves, strict=True)]))

    def bare_chain() -> None:
        made = [actor.echo.remote(half) for actor, half in zip(bare, held_bare, strict=True)]
        ray.get([actor.look.remote(ref) for actor, ref in zip(bare, made, strict=True)])

    def chain() -> None:
        peer.look(peer.echo(held)).all()

    times = alternate_ms(
        {
            "in": lambda: peer.look(executor.rows(data)).all(),
            "in bare": bare_in,
            "echo": lambda: peer.echo(executor.rows(data)).fetch(),
            "echo bare": bare_echo,
            "chain": chain,
            "chain bare": bare_chain,
        },
        TIMES,
    )
    before = executor.traffic.sent + executor.traffic.received
    chain()
    return times, executor.traffic.sent + executor.traffic.received - before


def main() -> None:
    out = output_file(__doc__ or "")
    patterns = ("in", "echo", "chain")
    result: dict[str, Any] = {f"{p}_ms": {} for p in patterns} | {
        "bare": {f"{p}_ms": {} for p in patterns},
        "controller_bytes": {},
    }
    rows = []
    with RayExecutor(RayConfig(deadline_s=120)) as executor:
        peer = executor.start({"peer": Role(Peer, pool=Pool("main", 2))}).peer
        bare = [BarePeer.options(num_cpus=0).remote() for _ in range(2)]  # type: ignore[attr-defined]
        result["noop_ms"] = alternate_ms({"noop": lambda: peer.nothing().all()}, 50)["noop"]
        for size in SIZES_MB:
            times, traffic = measure(executor, peer, bare, size)
            result["controller_bytes"][str(size)] = traffic
            for p in patterns:
                result[f"{p}_ms"][str(size)], result["bare"][f"{p}_ms"][str(size)] = times[p], times[f"{p} bare"]
                rows.append(
                    (size, p, times[p], times[f"{p} bare"], times[p] / times[f"{p} bare"], traffic if p == "chain" else "")
                )
    publish(
        result,
        out,
        f"Dispatch to 2 workers (no-op {result['noop_ms']:.2f} ms)",
        ("MB", "call", "ms", "bare Ray ms", "ratio", "controller bytes"),
        rows,
    )


if __name__ == "__main__":
    main()
