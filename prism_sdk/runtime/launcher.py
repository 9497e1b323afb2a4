"""Carries out a `LaunchConfig`: builds the rank specifications, runs them, merges their shards into the output.

Responsible for the order of things in one launch; processes are host.py's, scheduling is the policies'.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import prismtrace
from prism_sdk.errors import OutputError, PrismError, ScriptNotFoundError, UnsupportedError
from prism_sdk.nccl.library import profiler_environment
from prism_sdk.plugins import PluginManager
from prism_sdk.runtime.arena import create_arena
from prism_sdk.runtime.config import LaunchConfig, LaunchMode, LaunchResult, PayloadMode, StepRange
from prism_sdk.runtime.cpus import cpu_share, num_cpus, sandbox_cpus
from prism_sdk.runtime.fidelity import report_broken, report_lowered
from prism_sdk.runtime.host import Policy
from prism_sdk.runtime.imports import made_ahead
from prism_sdk.runtime.interrupts import Interrupted, Interrupts
from prism_sdk.runtime.ncclrecords import join_records, prepare_records
from prism_sdk.runtime.oncuda.paging.setup import plan_paging
from prism_sdk.runtime.progress import Progress, Report, Snapshot
from prism_sdk.runtime.ranks import EmulateSpec, RankSpec
from prism_sdk.runtime.rendezvous import check_port, master_of, waiting_for
from prism_sdk.runtime.shards import merge_shards, parts_directory
from prism_sdk.runtime.stepboard import StepBoard
from prism_sdk.wording import counted


def launch(config: LaunchConfig) -> LaunchResult:
    """Run `config`; progress goes to stderr.

    Raises PrismError as its parts do; whatever was recorded until then is in the output already.
    """
    with Progress(config.mode, quiet=config.quiet, environ=os.environ) as progress:
        result = _launch(config, progress)
        if result.output is not None:
            size = counted(result.output.stat().st_size, "byte")
            progress.say(f"done in {progress.elapsed_s:.1f} s: {result.output} ({size})")
        return replace(result, wall_ns=round(progress.elapsed_s * 1e9))


def _launch(config: LaunchConfig, progress: Progress) -> LaunchResult:
    if config.mode is LaunchMode.CALIBRATE:
        from prism_sdk.runtime.calibrating import calibrate

        return calibrate(config, progress)
    if config.mode is LaunchMode.EMULATE:
        from prism_sdk.runtime.emulating import emulate

        return emulate(config, progress)
    if config.engine is not None:
        from prism_sdk.runtime.spread.onray import record_on_cluster as record
    elif config.roles is not None:
        from prism_sdk.runtime.roles.recording import record_by_roles as record
    else:
        return run_job(config, _policy(config), progress)
    return record(config, progress)


def _policy(config: LaunchConfig) -> Policy:
    if config.mode is LaunchMode.RECORD:
        from prism_sdk.runtime.coordinator import Coordinator

        return Coordinator(config.num_slots or num_cpus(), pin=config.pin)
    return AllAtOnce()


class AllAtOnce(Policy):
    """Every rank runs from the start (observe, emulate)."""

    def __init__(self, *, end_step: int | None = None) -> None:
        self._end_step = end_step
        self._connected: set[int] = set()
        self._ended: set[int] = set()
        self.board: StepBoard | None = None
        self._num_ranks = self._num_virtual = 0

    def start(self) -> None:
        self._num_ranks = len(self.host.specs)
        if any(spec.emulate for spec in self.host.specs.values()):
            self._num_virtual = next(iter(self.host.specs.values())).world_size - self._num_ranks
        for rank in self.host.specs:
            self.host.spawn(rank)

    def connected(self, rank: int) -> None:
        self._connected.add(rank)

    def ended(self, rank: int) -> None:
        self._ended.add(rank)

    def snapshot(self) -> Snapshot | None:
        if not self._num_ranks:
            return None
        steps, num_done = [] if self.board is None else self.board.steps(), len(self._ended)
        num_running = len(self._connected - self._ended)
        return Snapshot(
            num_running=num_running, num_done=num_done, num_new=max(self._num_ranks - num_running - num_done, 0),
            num_virtual=self._num_virtual, first_step=min(steps, default=None), last_step=max(steps, default=None),
            end_step=self._end_step,
        )  # fmt: skip


def run_job(
    config: LaunchConfig, policy: Policy, progress: Progress, *, ranks: Sequence[int] | None = None,
    emulate: EmulateSpec | None = None, metadata: Mapping[str, str] | None = None, descriptors: Sequence[int] = (),
    adjust: Callable[[RankSpec], RankSpec] = lambda spec: spec,
    write: Callable[[Path, Path, Mapping[str, str]], bool] | None = None,
) -> LaunchResult:  # fmt: skip
    """Run `ranks` (absent: all of this node) of the job under `policy`, and merge what they traced.

    `adjust` changes what each rank is told, and `write` makes the output from the shards in place of a merge.
    """
    check_target(config)
    report = progress.say
    recorded = _recorded(config)
    skew = recorded.get("job.moe_skew") if config.moe_skew is None else config.moe_skew
    config = replace(
        config, adapters=_adapters(config, recorded), device=config.device or recorded.get("job.device"),
        moe_skew=float(skew) if skew else None,
    )  # fmt: skip
    world_size = config.world_size
    token = secrets.token_hex(16)
    if ranks is None:
        first = config.node_rank * config.nproc_per_node
        ranks = range(first, first + config.nproc_per_node)
    if config.mode is LaunchMode.RECORD and config.num_nodes > 1:
        raise UnsupportedError("record runs all ranks on this machine", hint="give the whole size as --nproc-per-node")
    master = master_of(config)
    if config.mode is LaunchMode.OBSERVE:
        check_port(config, *master)
    if config.num_nodes > 1:
        report(waiting_for(config, *master))
    arena_fd = create_arena(world_size) if config.mode is LaunchMode.RECORD else -1
    board_fd = -1
    if isinstance(policy, AllAtOnce):
        policy.board = StepBoard(len(ranks))
        board_fd = policy.board.fd
    facts, imports = {**_metadata(config), **(metadata or {})}, made_ahead(recorded)
    with Interrupts() as interrupts, _parts(config.output, report) as shards:
        parts = shards.folder

        def make_spec(rank: int, position: int = 0) -> RankSpec:
            return adjust(
                replace(
                    _rank_spec(config, rank, position, parts, token, arena_fd, board_fd, emulate, facts, len(ranks),
                               master), paging=paging.spec, imports=imports,
                )
            )  # fmt: skip

        paging = plan_paging(config, num_ranks=len(ranks), environ=os.environ, report=report)
        policy.moves = paging.moves
        specs = [make_spec(rank, position) for position, rank in enumerate(ranks)]
        policy.make_spec = make_spec
        environment = _environment(config)
        if config.nccl_profiler:
            environment |= profiler_environment(prepare_records(config.output))
        error: PrismError | None = None
        host = policy.make_host(
            specs, token=token, policy=policy, environment=environment, report=report, interrupts=interrupts,
            descriptors=[*descriptors, *(fd for fd in (arena_fd, board_fd, paging.moves.pool.fd) if fd >= 0)],
            library=paging.library,
        )  # fmt: skip
        try:
            report(f"{len(ranks)} of {counted(world_size, 'rank')}, torch is being loaded")
            with progress.watch(policy, after=f"writing {config.output.name}"):
                host.run()
        except PrismError as failure:
            error = failure
        finally:
            for fd in (arena_fd, board_fd):
                if fd >= 0:
                    os.close(fd)
            paging.moves.pool.close()
        report_lowered([process.summary for process in host.ranks.values()])
        closing = {"job.status": "complete" if error is None else "aborted", "job.error": str(error or "")}
        for process in host.ranks.values():
            for key, value in process.summary.items():
                closing[f"rank.{process.rank}.{key}"] = str(value)
        kept = None
        try:
            # a recording keeps the units of all steps: an emulation starts at the first
            steps = None if config.mode is LaunchMode.RECORD else config.steps
            if _merge(parts, config.output, {k: v for k, v in closing.items() if v}, steps=steps, write=write):
                kept = f"what was recorded until then is in {config.output}"
        except OutputError as failure:
            error = error or failure  # the first failure is the one to name
            if any(parts.glob("rank-*.prism")):
                shards.keep = True
                kept = f"the shards of the ranks are kept: prism merge {parts}/rank-*.prism -o FILE joins them"
        if error is None and interrupts.number is not None:
            error = Interrupted(interrupts.number)
    if config.nccl_profiler and kept:  # also of a job that failed: that is when one wants to know
        join_records(config.output, report)
    if error is not None:
        if kept:
            error.hint = f"{error.hint}\n  {kept}" if error.hint else kept
        raise error
    summary = {str(p.rank): dict(p.summary) for p in host.ranks.values() if p.summary}
    return LaunchResult(0, config.output, world_size, round(progress.elapsed_s * 1e9), summary)


def check_target(config: LaunchConfig) -> None:
    """Raise ScriptNotFoundError before anything is started."""
    if config.is_module:
        import importlib.util

        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(config.target)
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found is None:
            raise ScriptNotFoundError(config.target, is_module=True)
    elif not Path(config.target).is_file():
        raise ScriptNotFoundError(config.target, hint="the path is relative to the current folder")


def _merge(
    parts: Path, output: Path, metadata: Mapping[str, str], *, steps: StepRange | None = None,
    write: Callable[[Path, Path, Mapping[str, str]], bool] | None = None,
) -> bool:  # fmt: skip
    try:
        if write is not None:
            return write(parts, output, metadata)
        return merge_shards(parts, output, metadata, steps=steps) > 0
    except (OSError, prismtrace.PrismTraceError) as error:
        raise OutputError(str(output), reason=str(error).removeprefix(f"{output}: ")) from error


@dataclass
class Shards:
    """The folder for shards, and whether it outlives the launch because nothing else holds what was recorded."""

    folder: Path
    keep: bool = False


@contextlib.contextmanager
def _parts(output: Path, report: Report) -> Iterator[Shards]:
    """The folder for shards, held by a lock; what a killed run left there is saved beside the output first."""
    parts = parts_directory(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        parts.mkdir(exist_ok=True)
        lock = (parts / "lock").open("w")
    except OSError as error:
        raise OutputError(str(output), reason=error.strerror or str(error)) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(str(output), reason="another run is writing it now") from None
        if any(parts.glob("rank-*.prism")):
            saved = output.with_name(output.name + ".recovered")
            stale = parts.with_name(parts.name + ".stale")
            stale.mkdir(exist_ok=True)
            for shard in parts.glob("rank-*"):
                shard.rename(stale / shard.name)
            if not _merge(stale, saved, {"job.status": "aborted"}):
                report(f"a killed run had left shards of {output} that hold nothing that can be read: removed")
            else:
                with prismtrace.TraceReader(saved) as reader:
                    num_units = sum(map(reader.num_units, reader.ranks))
                why = "" if num_units else ": it was killed before the first of them were written"
                report(f"a killed run had left shards of {output}: saved as {saved} "
                       f"({counted(num_units, 'unit')}{why})")  # fmt: skip
        shards = Shards(parts)
        try:
            yield shards
        finally:
            if not shards.keep:
                shutil.rmtree(parts, ignore_errors=True)


def _rank_spec(
    config: LaunchConfig, rank: int, position: int, parts: Path, token: str, arena_fd: int,
    board_fd: int, emulate: EmulateSpec | None, metadata: Mapping[str, str], num_here: int,
    master: tuple[str, int],
) -> RankSpec:  # fmt: skip
    local_rank = rank % config.nproc_per_node
    address, port = master
    environment = {
        "RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": config.world_size,
        "LOCAL_WORLD_SIZE": config.nproc_per_node, "GROUP_RANK": rank // config.nproc_per_node,
        "GROUP_WORLD_SIZE": config.num_nodes, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": config.world_size,
        "ROLE_NAME": "default", "MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": config.rdzv_id or "none",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }  # fmt: skip
    shown = config.local_ranks_filter
    return RankSpec(
        mode=config.mode, rank=rank, world_size=config.world_size, local_rank=local_rank, target=config.target,
        is_module=config.is_module, arguments=config.arguments, parts_dir=parts.absolute(), token=token,
        environment={key: str(value) for key, value in environment.items()}, metadata=metadata,
        cpus=_cpus(config, position, num_here), payloads=config.payloads or PayloadMode.FULL,
        steps=config.steps or StepRange(), kernels=config.kernels, arena_fd=arena_fd,
        step_board=(board_fd, position), emulate=emulate, plugins=config.plugins, adapters=config.adapters,
        stdout_to_stderr=config.json,
        unset=() if "PYTHONHASHSEED" in os.environ else ("PYTHONHASHSEED",),
        silent=shown is not None and local_rank not in shown, device=config.device, num_devices=config.nproc_per_node,
        adapter_options={} if config.moe_skew is None else {"moe_skew": str(config.moe_skew)},
    )  # fmt: skip


def _cpus(config: LaunchConfig, position: int, num_here: int) -> tuple[int, ...] | None:
    """An equal share of the CPUs for each rank where there is at least one; else the system decides.

    A recording pins by slot.
    """
    if not config.pin or config.mode is LaunchMode.RECORD:
        return None
    if config.mode is LaunchMode.EMULATE:
        return sandbox_cpus(position, num_sandbox=num_here, world_size=config.world_size)
    return cpu_share(position, num_here)


def _environment(config: LaunchConfig) -> dict[str, str]:
    """Environment of the fork server: the user's, and one computing thread a rank as torchrun sets it.

    Hashes of texts are repeatable but where the job is only looked at, not for a calibration.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PRISM_MODE"}
    if config.nproc_per_node > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    if config.mode is not LaunchMode.OBSERVE or config.graph is not None:
        environment.setdefault("PYTHONHASHSEED", "0")
    return environment


def _metadata(config: LaunchConfig) -> dict[str, str]:
    return {
        "job.argv": json.dumps([config.target, *config.arguments]),
        "job.status": "running",
        "job.adapters": ",".join(config.adapters or ()),
        "job.device": config.device or "",
        "job.moe_skew": "" if config.moe_skew is None else str(config.moe_skew),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "record.steps": str(config.steps or StepRange()),
        "record.slots": str(config.num_slots or num_cpus()) if config.mode is LaunchMode.RECORD else "",
    }


def _recorded(config: LaunchConfig) -> Mapping[str, str]:
    """The metadata of the graph that is followed; empty without one."""
    if config.graph is None:
        return {}
    with prismtrace.TraceReader(config.graph) as reader:
        return reader.metadata


def _adapters(config: LaunchConfig, recorded: Mapping[str, str]) -> tuple[str, ...]:
    """The adapters to activate in the ranks: those the user named, else those of the graph, else all installed.

    Names cut computing into units, so a graph can only be followed with the adapters that it was recorded with.
    """
    manager = PluginManager(named=config.plugins, only=("adapter",))
    if config.adapters is None:
        if (names := recorded.get("job.adapters")) is not None:
            return tuple(filter(None, names.split(",")))
        report_broken(manager.records())
        return tuple(manager.adapters())
    for name in config.adapters:
        manager.adapter(name)  # raises for a name that nobody registered
    return config.adapters
