"""Environment variables: the one module of the library that touches `os.environ`.

The functions say, as plain dicts, what a process has to find in its environment; `apply` puts it there, or a launcher hands it
to the process that it starts. torch reads `OMP_NUM_THREADS` when it is imported, vLLM most of its variables: they come first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def vllm_environment() -> dict[str, str]:
    """What vLLM has to find before it is imported, to run inside a process that is also a trainer's."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where load_weights can reach it
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer shares the threads: vLLM must not pin them to cores
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings at boot are about defaults and change nothing here
        "VLLM_NO_USAGE_STATS": "1",
    }


def rank_environment(rank: int, world: int, local_rank: int, address: str, port: int, threads: int) -> dict[str, str]:
    """What rank `rank` of `world` has to find: for `init_process_group` by `env://`, and for its kernels' threads.

    `local_rank` is the index of its device among those that the process can see; `address` and `port` are rank 0's.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
    }


def apply(variables: Mapping[str, str]) -> None:
    """Put `variables` into this process's environment, over what is there."""
    os.environ.update(variables)
