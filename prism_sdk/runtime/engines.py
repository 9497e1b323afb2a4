"""Spreads tasks over the machines of a Ray cluster, and keeps what is finished.

Responsible for tasks, retries and processes on one machine; what follows from a slice or a variant is not decided here.
Machines share the file system of the output, and have the same Python environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prism_sdk.errors import OutputError, RunError, UsageError
from prism_sdk.runtime.config import LaunchConfig
from prism_sdk.runtime.host import RankHost
from prism_sdk.runtime.servants import REFUSED, Servant, Task
from prismtrace import PrismTraceError, TraceReader

_MAX_RETRIES = 8  # of a slice whose machine went away
_LOOK_S = 1.0
_CONNECT_S = 5.0
_MOST_STDERR = 4000


@dataclass(frozen=True)
class SliceTask:
    """One slice: the ranks that run for real, against `graph`, with the times of `times`."""

    config: LaunchConfig
    graph: Path
    ranks: tuple[int, ...]
    times: Path
    output: Path

    @property
    def label(self) -> str:
        return f"the slice of ranks {','.join(map(str, self.ranks))}"

    @property
    def is_finished(self) -> bool:
        """Whether its trace is there, and whole."""
        try:
            with TraceReader(self.output) as reader:
                return reader.metadata.get("job.status") == "complete"
        except (PrismTraceError, OSError):
            return False

    def run(self, make_host: Callable[..., RankHost]) -> None:
        """Run the slice on this machine; its trace appears when it is whole."""
        from prism_sdk.runtime.emulating import run_sandbox
        from prism_sdk.runtime.progress import Progress

        mine = self.output.with_name(f"{self.output.name}.{socket.gethostname()}-{os.getpid()}")
        config = replace(self.config, output=mine)
        with Progress(config.mode, quiet=True, environ=os.environ) as progress:
            run_sandbox(config, self.graph, self.ranks, progress, times=self.times, make_host=make_host)
        mine.replace(self.output)


@dataclass(frozen=True)
class ClusterMachine:
    """One machine of a cluster."""

    name: str
    address: str
    num_cpus: int
    node_id: str


class RayEngine:
    """A connection to a Ray cluster. A context manager.

    Raises UsageError where Ray is not installed, or the cluster cannot be reached or has no CPUs.
    """

    def __init__(self, address: str | None, *, num_slots: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("--engine ray needs Ray, which is not installed",
                             hint="pip install 'prismtrace[ray]'") from None  # fmt: skip
        self._ray: Any = ray
        try:
            _check_reachable(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except Exception as error:  # Ray raises just that where a machine of its own does not start
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise UsageError(f"the Ray cluster at {address or 'this machine'} cannot be used: {reason}",
                             hint="`ray status` says what is there") from error  # fmt: skip
        _keep_quiet()
        self.machines = tuple(
            ClusterMachine(
                f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}", node["NodeManagerAddress"],
                int(node["Resources"]["CPU"]), node["NodeID"],
            )
            for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
        )  # fmt: skip
        if not self.machines:
            ray.shutdown()
            raise UsageError(f"the Ray cluster at {address} has no machine with a CPU")
        self.num_nodes = len(self.machines)
        self.num_cpus = min(machine.num_cpus for machine in self.machines)
        self._needed = min(num_slots or self.num_cpus, self.num_cpus)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()

    def run(self, tasks: Sequence[Task], progress: Callable[[int], None]) -> int:
        """Run the tasks that are not finished; how many these were. A machine that goes away costs a retry.

        Raises RunError with what the task said where one fails by itself. Tasks that have not ended by then, or at an
        interrupt, end with the connection (cancelling them here makes Ray itself abort where one ends just then).
        """
        remote = self._ray.remote(num_cpus=self._needed, max_retries=_MAX_RETRIES)(_do_there)
        left = [task for task in tasks if not task.is_finished]
        pending: dict[Any, Task] = {}
        for task in left:
            path = task.output.with_suffix(".task")
            path.write_bytes(pickle.dumps(task))
            pending[remote.remote(str(path), os.getcwd(), _environ())] = task
        while pending:
            progress(len(tasks) - len(pending))
            ready, _ = self._ray.wait(list(pending), timeout=_LOOK_S)
            for reference in ready:
                self._check(pending.pop(reference), reference)
        return len(left)

    def _check(self, task: Task, reference: Any) -> None:
        try:
            code, said = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise RunError(f"{task.label} was lost {_MAX_RETRIES + 1} times: {error}",
                           hint="give the command again: what is finished is kept") from error  # fmt: skip
        if code or not task.is_finished:
            again = None if code == REFUSED else "give the command again: what is finished is kept"
            raise RunError(f"{task.label} failed (exit status {code}):\n{said[-_MOST_STDERR:].rstrip()}", hint=again)

    def start_on(self, name: str, argv: Sequence[str], *, text: str, num_cpus: int) -> Any:
        """Start a process on one machine, with `text` on its stdin; it is not tried again. Returns what it is known by.

        It may have to wait until `num_cpus` CPUs of that machine are free.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        machine = next(machine for machine in self.machines if machine.name == name)
        there = NodeAffinitySchedulingStrategy(node_id=machine.node_id, soft=False)
        remote = self._ray.remote(num_cpus=num_cpus, max_retries=0, scheduling_strategy=there)(_run_there)
        return remote.remote(list(argv), os.getcwd(), _environ(), text)

    def why_ended(self, reference: Any) -> str | None:
        """What such a process said at its end; None while it runs or waits."""
        if not self._ray.wait([reference], timeout=0)[0]:
            return None
        try:
            code, said = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return f"the machine has gone ({type(error).__name__})"
        return str(said[-_MOST_STDERR:]).strip() or f"its process ended with status {code}"

    def cancel(self, reference: Any) -> None:
        """End a task or process if it has not ended yet."""
        self._ray.cancel(reference, force=True)


def _check_reachable(address: str | None) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray itself tries for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _keep_quiet() -> None:
    """Ray prints on stdout that a machine has gone, in the middle of what the job prints; Prism says so by itself."""
    with contextlib.suppress(ImportError, AttributeError):  # there is no public way
        from ray._private import worker

        global_worker: Any = worker.global_worker
        global_worker.threads_stopped.set()
        global_worker.gcs_error_subscriber.close()


def _run_there(argv: list[str], folder: str, environ: dict[str, str], text: str) -> tuple[int, str]:
    done = subprocess.run(
        argv, cwd=folder, env=environ, input=text, capture_output=True, text=True, errors="replace", check=False
    )
    return done.returncode, done.stderr


_servants: list[Servant] = []  # of this process of Ray, which does many tasks: none or one


def _do_there(path: str, folder: str, environ: dict[str, str]) -> tuple[int, str]:
    if not _servants or _servants[0].has_ended:
        _servants[:] = [Servant(folder, environ)]
    return _servants[0].do(path)


def kept_folder(folder: Path, facts: Sequence[object], *, label: str) -> Path:
    """The folder of what is finished; made, and emptied where it belongs to work of which other `facts` are true.

    Raises OutputError where it cannot be written.
    """
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    try:
        if not (folder / label).is_file() or (folder / label).read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / label).write_text(digest)
    except OSError as error:
        raise OutputError(str(folder), reason=error.strerror or type(error).__name__) from error
    return folder


def kept_slices(config: LaunchConfig) -> Path:
    """Where finished slices of a calibration are, beside its output."""
    assert config.graph is not None
    state = config.graph.stat()
    facts = (
        config.target, config.is_module, config.arguments, str(config.graph.absolute()), state.st_size,
        state.st_mtime_ns, config.num_slots, config.backend, config.device, sorted(config.options.items()),
    )  # fmt: skip
    folder = config.output.absolute().with_name(f"{config.output.name}.slices")
    return kept_folder(folder, facts, label="calibration")


def _environ() -> dict[str, str]:
    """What a slice needs of this process's environment, on another machine; Ray's own is left out."""
    kept: Mapping[str, str] = os.environ
    return {k: v for k, v in kept.items() if not k.startswith("RAY_")} | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)
    }
