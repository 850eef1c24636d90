"""hybridrl: reinforcement learning of language models, one step function over worker groups.

Importing it imports neither ray nor vllm; the Ray executor is `hybridrl.controller.ray.RayExecutor`.
"""

from hybridrl.controller import (
    Executor,
    Graph,
    Groups,
    LocalExecutor,
    Pool,
    Result,
    Role,
    WorkerGroup,
    computes,
    trace,
)
from hybridrl.protocol.errors import HybridRLError, UserError
from hybridrl.protocol.layout import Layout
from hybridrl.protocol.reference import Reference
from hybridrl.protocol.register import register

__all__ = [
    "Executor",
    "Graph",
    "Groups",
    "HybridRLError",
    "Layout",
    "LocalExecutor",
    "Pool",
    "Reference",
    "Result",
    "Role",
    "UserError",
    "WorkerGroup",
    "computes",
    "register",
    "trace",
]
