"""Carries out `prism calibrate`: gives a calibration strategy what it needs and reports what it found.

Responsible for the context a strategy sees; how to calibrate is the strategy's (prism_sdk.builtin.slices).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from prism_sdk.abc import CalibrationContext, CalibrationResult
from prism_sdk.errors import UnreadableError, UsageError
from prism_sdk.plugins import PluginManager
from prism_sdk.runtime.config import DEFAULT_STRATEGY, LaunchConfig, LaunchMode, LaunchResult, PayloadMode
from prism_sdk.runtime.cpus import num_cpus
from prism_sdk.runtime.emulating import run_sandbox
from prism_sdk.runtime.gpus import num_gpus, uses_gpus
from prism_sdk.runtime.launcher import AllAtOnce, check_target, run_job
from prism_sdk.runtime.progress import Progress
from prism_sdk.runtime.shards import parts_directory
from prism_sdk.wording import counted
from prismtrace import TraceReader


class SliceContext(CalibrationContext):
    """Runs slices of the job that `config` describes."""

    def __init__(
        self, config: LaunchConfig, graph: Path, work_dir: Path, world_size: int, progress: Progress, *,
        num_devices: int = 0,
    ) -> None:  # fmt: skip
        self._config = config
        self._num_devices = num_devices
        self._graph = graph
        self._work_dir = work_dir
        self._world_size = world_size
        self._progress = progress

    @property
    def graph_path(self) -> Path:
        return self._graph

    @property
    def output(self) -> Path:
        return self._config.output

    @property
    def work_dir(self) -> Path:
        return self._work_dir

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def num_slots(self) -> int:
        most = self._num_devices or num_cpus()
        wanted = self._config.num_slots or most
        return min(wanted, most if self._num_devices else wanted, self._world_size)

    @property
    def num_devices(self) -> int:
        return self._num_devices

    @property
    def options(self) -> Mapping[str, str]:
        return self._config.options

    def run_slice(self, ranks: Sequence[int], *, graph_path: Path, label: str) -> Path:
        output = self._work_dir / f"{label}.prism"
        config = replace(self._config, output=output, quiet=True, local_ranks_filter=(), num_slots=None)
        with self._progress.muted():
            if self._num_devices and len(ranks) == self._world_size:  # nobody is virtual
                whole = replace(config, mode=LaunchMode.OBSERVE, graph=self._graph, payloads=PayloadMode.NONE)
                run_job(whole, AllAtOnce(), self._progress)
                return output
            run_sandbox(
                config, self._graph, tuple(sorted(ranks)), self._progress, times=graph_path,
                on_devices=self._num_devices > 0,
            )  # fmt: skip
        return output

    def run_module(self, module: str, arguments: Sequence[str], *, num_ranks: int, label: str) -> Path:
        output = self._work_dir / f"{label}.prism"
        config = replace(
            self._config, mode=LaunchMode.OBSERVE, target=module, is_module=True, arguments=tuple(arguments),
            nproc_per_node=num_ranks, num_nodes=1, master_port=None, output=output, quiet=True,
            local_ranks_filter=(), payloads=PayloadMode.NONE,
        )  # fmt: skip
        with self._progress.muted():
            run_job(config, AllAtOnce(), self._progress)
        return output

    def report(self, message: str) -> None:
        self._progress.say(message)

    def progress(self, done: int, total: int, *, doing: str) -> None:
        self._progress.stage(done, total, doing)


def calibrate(config: LaunchConfig, progress: Progress) -> LaunchResult:
    """Run the chosen strategy on the graph of `config`."""
    check_target(config)
    if config.graph is None:
        raise UsageError("no graph was given", hint="prism calibrate --graph bare.prism -o calibrated.prism -- SCRIPT")
    try:
        with TraceReader(config.graph) as reader:
            world_size, wants_gpus = reader.world_size, uses_gpus(reader, device=config.device)
    except OSError as error:
        raise UnreadableError(str(config.graph), reason=str(error)) from error
    num_devices = num_gpus() if wants_gpus else 0
    strategy = PluginManager(named=config.plugins, only=("strategy",)).strategy(config.strategy or DEFAULT_STRATEGY)
    parts_directory(config.output).parent.mkdir(parents=True, exist_ok=True)
    work_dir = Path(tempfile.mkdtemp(prefix="prism-calibrate-", dir=config.output.absolute().parent))
    try:
        result = strategy.calibrate(SliceContext(
            config, config.graph.absolute(), work_dir, world_size, progress, num_devices=num_devices
        ))  # fmt: skip
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    progress.say(_sentence(result))
    summary = asdict(result) | {"output": str(result.output)}
    return LaunchResult(0, result.output, world_size, round(progress.elapsed_s * 1e9), summary)


def _sentence(result: CalibrationResult) -> str:
    low, high = result.step_low_ns / 1e6, result.step_high_ns / 1e6
    state = "converged" if result.converged else "not converged: more passes (-O passes=N) or a quieter machine"
    return (
        f"predicted step {result.predicted_step_ns / 1e6:.3f} ms, 95 % interval {low:.3f} to {high:.3f} ms "
        f"({counted(len(result.passes), 'pass', 'passes')}, {state})"
    )
