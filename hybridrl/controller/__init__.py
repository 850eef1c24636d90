"""The controller: roles on pools, worker groups, and the executors that run a step function."""

from hybridrl.controller.compute import computes
from hybridrl.controller.executor import Executor
from hybridrl.controller.groups import Groups, Result, WorkerGroup
from hybridrl.controller.local import LocalExecutor
from hybridrl.controller.roles import Pool, Role
from hybridrl.controller.trace import Graph, trace

__all__ = ["Executor", "Graph", "Groups", "LocalExecutor", "Pool", "Result", "Role", "WorkerGroup", "computes", "trace"]
