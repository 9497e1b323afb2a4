"""Machines of a spread recording that belong to a Ray cluster.

Responsible for starting and ending one process on each machine; what the process does is branch.py's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from prism_sdk.errors import UsageError
from prism_sdk.runtime.config import LaunchConfig, LaunchResult
from prism_sdk.runtime.engines import RayEngine
from prism_sdk.runtime.gpus import num_gpus
from prism_sdk.runtime.launcher import check_target
from prism_sdk.runtime.progress import Progress
from prism_sdk.runtime.spread.host import Starter, address_towards
from prism_sdk.runtime.spread.recording import record_spread


class RayStarter(Starter):
    """Starts processes as Ray tasks, each on its machine."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._cpus = {machine.name: machine.num_cpus for machine in engine.machines}
        self._running: dict[str, Any] = {}
        self.address = address_towards(engine.machines[0].address)

    def start(self, name: str, arguments: Sequence[str], key: bytes) -> None:
        argv = [sys.executable, "-m", "prism_sdk.runtime.spread.branch", *arguments]
        self._running[name] = self._engine.start_on(name, argv, text=key.hex(), num_cpus=self._cpus[name])

    def why_ended(self, name: str) -> str | None:
        return self._engine.why_ended(self._running[name])

    def stop(self, name: str) -> None:
        reference = self._running.pop(name, None)
        if reference is not None:
            self._engine.cancel(reference)


def record_on_cluster(config: LaunchConfig, progress: Progress) -> LaunchResult:
    """Record the job of `config` on the machines of a Ray cluster, whose CPUs are the slots."""
    check_target(config)
    if num_gpus() and config.device != "cpu":
        raise UsageError("a recording over several machines uses their CPUs, and this machine has GPUs",
                         hint="leave --engine out, or add --device cpu")  # fmt: skip
    with RayEngine(config.address) as engine:
        machines = [(machine.name, machine.num_cpus) for machine in engine.machines]
        return record_spread(config, progress, starter=RayStarter(engine), machines=machines)
