"""Spreads slices of a calibration over the machines of a Ray cluster, and keeps what is finished.

Responsible for tasks, retries and the folder that they share; what a slice is, and what follows from it, is not decided
here.  Machines share the file system of the output, and have the same Python environment.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prism_sdk.errors import RunError, UsageError
from prism_sdk.runtime.config import LaunchConfig
from prismtrace import PrismTraceError, TraceReader

_MAX_RETRIES = 8  # of a slice whose machine went away
_LOOK_S = 1.0
_MOST_STDERR = 4000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SliceTask:
    """One slice: the ranks that run for real, against `graph`, with the times of `times`."""

    config: LaunchConfig
    graph: Path
    ranks: tuple[int, ...]
    times: Path
    output: Path

    @property
    def is_finished(self) -> bool:
        """Whether its trace is there, and whole."""
        try:
            with TraceReader(self.output) as reader:
                return reader.metadata.get("job.status") == "complete"
        except (PrismTraceError, OSError):
            return False

    def run(self) -> None:
        """Run the slice on this machine; its trace appears when it is whole."""
        from prism_sdk.runtime.emulating import run_sandbox
        from prism_sdk.runtime.progress import Progress

        mine = self.output.with_name(f"{self.output.name}.{socket.gethostname()}-{os.getpid()}")
        config = replace(self.config, output=mine)
        with Progress(config.mode, quiet=True, environ=os.environ) as progress:
            run_sandbox(config, self.graph, self.ranks, progress, times=self.times)
        mine.replace(self.output)


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
            ray.init(address=address, log_to_driver=False, logging_level="error", include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"the Ray cluster at {address or 'this machine'} cannot be used: {error}",
                             hint="`ray status` says what is there") from error  # fmt: skip
        alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if not alive:
            ray.shutdown()
            raise UsageError(f"the Ray cluster at {address} has no machine with a CPU")
        self.num_nodes = len(alive)
        self.num_cpus = int(min(node["Resources"]["CPU"] for node in alive))
        self._needed = min(num_slots or self.num_cpus, self.num_cpus)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()

    def run(self, tasks: Sequence[SliceTask], progress: Callable[[int], None]) -> int:
        """Run the tasks that are not finished; how many these were. A machine that goes away costs a retry.

        Raises RunError with what the slice said where one fails by itself.
        """
        ray = self._ray

        def run_there(argv: list[str], folder: str, environ: dict[str, str]) -> tuple[int, str]:
            done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, errors="replace")
            return done.returncode, done.stderr

        remote = ray.remote(num_cpus=self._needed, max_retries=_MAX_RETRIES)(run_there)
        left = [task for task in tasks if not task.is_finished]
        pending: dict[Any, SliceTask] = {}
        for task in left:
            path = task.output.with_suffix(".task")
            path.write_bytes(pickle.dumps(task))
            argv = [sys.executable, "-m", "prism_sdk.runtime.engines", str(path)]
            pending[remote.remote(argv, os.getcwd(), _environ())] = task
        try:
            while pending:
                progress(len(tasks) - len(pending))
                ready, _ = ray.wait(list(pending), timeout=_LOOK_S)
                for reference in ready:
                    self._check(pending.pop(reference), reference)
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)
        return len(left)

    def _check(self, task: SliceTask, reference: Any) -> None:
        ranks = ",".join(map(str, task.ranks))
        try:
            code, said = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise RunError(f"the slice of ranks {ranks} was lost {_MAX_RETRIES + 1} times: {error}",
                           hint="give the command again: finished slices are kept") from error  # fmt: skip
        if code or not task.is_finished:
            raise RunError(f"the slice of ranks {ranks} failed (exit status {code}):\n{said[-_MOST_STDERR:]}",
                           hint="give the command again: finished slices are kept")  # fmt: skip


def kept_folder(config: LaunchConfig) -> Path:
    """The folder of a calibration's finished slices, beside its output; emptied where it is of another calibration."""
    assert config.graph is not None
    folder = config.output.absolute().with_name(f"{config.output.name}.slices")
    state = config.graph.stat()
    facts = (
        config.target, config.is_module, config.arguments, str(config.graph.absolute()), state.st_size,
        state.st_mtime_ns, config.num_slots, config.backend, config.device, sorted(config.options.items()),
    )  # fmt: skip
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    label = folder / "calibration"
    if not label.is_file() or label.read_text() != digest:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        label.write_text(digest)
    return folder


def _environ() -> dict[str, str]:
    """What a slice needs of this process's environment, on another machine; Ray's own is left out."""
    kept: Mapping[str, str] = os.environ
    return {k: v for k, v in kept.items() if not k.startswith("RAY_")} | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)
    }


def main(argv: Sequence[str]) -> int:
    """Run the slice that a file describes. It ends with the task that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    task = pickle.loads(Path(argv[0]).read_bytes())
    assert isinstance(task, SliceTask)
    task.run()
    return 0


if __name__ == "__main__":
    from prism_sdk.runtime import engines  # the task was pickled under this name

    sys.exit(engines.main(sys.argv[1:]))
