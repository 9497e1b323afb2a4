"""Carries out `prism calibrate`: gives a calibration strategy what it needs and reports what it found.

Responsible for the context a strategy sees; how to calibrate is the strategy's (prism_sdk.builtin.slices).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from prism_sdk.abc import CalibrationContext, CalibrationResult
from prism_sdk.errors import PrismError, UnreadableError, UsageError
from prism_sdk.plugins import PluginManager
from prism_sdk.runtime.config import DEFAULT_STRATEGY, LaunchConfig, LaunchMode, LaunchResult, PayloadMode
from prism_sdk.runtime.cpus import num_cpus
from prism_sdk.runtime.emulating import run_sandbox
from prism_sdk.runtime.engines import RayEngine, SliceTask, kept_slices
from prism_sdk.runtime.gpus import num_gpus, uses_gpus
from prism_sdk.runtime.host import RankHost
from prism_sdk.runtime.interrupts import ending_by_exception
from prism_sdk.runtime.launcher import AllAtOnce, check_target, run_job
from prism_sdk.runtime.processes import KeptForkServer
from prism_sdk.runtime.progress import Progress
from prism_sdk.runtime.shards import parts_directory
from prism_sdk.wording import counted
from prism_sdk.workfolders import work_folder
from prismtrace import TraceReader


class SliceContext(CalibrationContext):
    """Runs slices of the job that `config` describes; torch is loaded once for all. A context manager."""

    make_forkserver: ClassVar[Callable[[], KeptForkServer]] = KeptForkServer

    def __init__(
        self, config: LaunchConfig, graph: Path, work_dir: Path, world_size: int, progress: Progress,
        engine: RayEngine | None = None, *, num_devices: int = 0,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._config = config
        self._num_devices = num_devices
        self._graph = graph
        self._work_dir = work_dir
        self._world_size = world_size
        self._progress = progress
        self._forkserver = type(self).make_forkserver()
        self._make_host = partial(RankHost, start_server=self._forkserver.start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forkserver.close()

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
        if self._num_devices:
            return min(self._config.num_slots or self._num_devices, self._num_devices, self._world_size)
        here = num_cpus() if self._engine is None else self._engine.num_cpus
        return min(self._config.num_slots or here, self._world_size)

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
                self._run_all(whole)
                return output
            run_sandbox(
                config, self._graph, tuple(sorted(ranks)), self._progress, times=graph_path,
                on_devices=self._num_devices > 0, make_host=self._make_host,
            )  # fmt: skip
        return output

    def run_slices(self, slices: Sequence[Sequence[int]], *, graph_path: Path, label: str) -> list[Path]:
        if self._engine is None:
            return super().run_slices(slices, graph_path=graph_path, label=label)
        self.report(f"{label}: {len(slices)} slices over {self._engine.num_nodes} machines")
        config = replace(self._config, quiet=True, local_ranks_filter=(), num_slots=None)
        tasks = [
            SliceTask(
                config, self._graph, tuple(sorted(ranks)), graph_path,
                self._work_dir / f"{label.replace(' ', '')}-slice{position}.prism",
            )
            for position, ranks in enumerate(slices)
        ]  # fmt: skip
        done = self._engine.run(tasks, lambda done: self.progress(done, len(tasks), doing=label))
        if done < len(tasks):
            self.report(f"{label}: {len(tasks) - done} of {len(tasks)} slices were finished before")
        return [task.output for task in tasks]

    def run_module(self, module: str, arguments: Sequence[str], *, num_ranks: int, label: str) -> Path:
        output = self._work_dir / f"{label}.prism"
        config = replace(
            self._config, mode=LaunchMode.OBSERVE, target=module, is_module=True, arguments=tuple(arguments),
            nproc_per_node=num_ranks, num_nodes=1, master_port=None, output=output, quiet=True,
            local_ranks_filter=(), payloads=PayloadMode.NONE,
        )  # fmt: skip
        with self._progress.muted():
            self._run_all(config)
        return output

    def _run_all(self, config: LaunchConfig) -> None:
        policy = AllAtOnce()
        policy.make_host = self._make_host
        run_job(config, policy, self._progress)

    def report(self, message: str) -> None:
        self._progress.say(message)

    def progress(self, done: int, total: int, *, doing: str) -> None:
        self._progress.stage(done, total, doing)


@ending_by_exception()
def calibrate(config: LaunchConfig, progress: Progress) -> LaunchResult:
    """Run the chosen strategy on the graph of `config`."""
    check_target(config)
    if config.graph is None:
        raise UsageError("no graph was given", hint="prism calibrate --graph bare.prism -o calibrated.prism -- SCRIPT")
    try:
        with TraceReader(config.graph) as reader:
            world_size, wants_gpus = reader.world_size, uses_gpus(reader, device=config.device)
            recorded = reader.metadata
    except OSError as error:
        raise UnreadableError(str(config.graph), reason=str(error)) from error
    _check_adapters(config, recorded)
    num_devices = num_gpus() if wants_gpus else 0
    if num_devices and config.engine is not None:
        raise UsageError("slices on GPUs run on this machine alone", hint="leave --engine out")
    strategy = PluginManager(named=config.plugins, only=("strategy",)).strategy(config.strategy or DEFAULT_STRATEGY)
    parts_directory(config.output).parent.mkdir(parents=True, exist_ok=True)
    if config.engine is None:
        with work_folder("prism-calibrate-", beside=config.output) as work_dir:
            try:
                with SliceContext(
                    config, config.graph.absolute(), work_dir, world_size, progress, num_devices=num_devices
                ) as context:
                    result = strategy.calibrate(context)
            except PrismError as error:  # what a slice left goes with the folder: nobody is to look for it
                lines = [line for line in (error.hint or "").splitlines() if work_dir.name not in line]
                error.hint = "\n".join(lines).strip() or None
                raise
    else:
        work_dir = kept_slices(config)
        with (
            RayEngine(config.address, num_slots=config.num_slots) as engine,
            SliceContext(config, config.graph.absolute(), work_dir, world_size, progress, engine) as context,
        ):
            result = strategy.calibrate(context)
        shutil.rmtree(work_dir, ignore_errors=True)  # not after a failure: what is finished counts next time
    progress.say(_sentence(result))
    summary = asdict(result) | {"output": str(result.output)}
    return LaunchResult(0, result.output, world_size, round(progress.elapsed_s * 1e9), summary)


def _check_adapters(config: LaunchConfig, recorded: Mapping[str, str]) -> None:
    """Refuse a graph whose names cannot be given again: no slice would have its units."""
    if config.adapters is not None:
        return
    of_ranks = [names for key, names in recorded.items() if key.startswith("rank.") and key.endswith(".adapters")]
    manager = PluginManager(named=config.plugins, only=("adapter",))
    for name in sorted({name for names in of_ranks for name in names.split(",") if name} - set(manager.adapters())):
        try:
            manager.adapter(name)
        except PrismError as error:
            error.hint = (
                f"units of {config.graph} have names of that adapter: install or load its plugin (--plugin), or record "
                f"without it\n  {error.hint}"
            )
            raise


def _sentence(result: CalibrationResult) -> str:
    low, high = result.step_low_ns / 1e6, result.step_high_ns / 1e6
    state = "converged" if result.converged else "not converged: more passes (-O passes=N) or a quieter machine"
    return (
        f"predicted step {result.predicted_step_ns / 1e6:.3f} ms, 95 % interval {low:.3f} to {high:.3f} ms "
        f"({counted(len(result.passes), 'pass', 'passes')}, {state})"
    )
