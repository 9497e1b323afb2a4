"""Carries out `prism emulate`: contracts the graph to the boundary, starts assistants, runs the sandbox ranks.

Responsible for the launcher's side of an emulation; what happens inside a sandbox rank is emulate.py's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prism_sdk.abc import Assistance, AssistContext, ReplayBackend
from prism_sdk.errors import TraceMismatchError, UnreadableError, UsageError
from prism_sdk.graph.contract import contract
from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.folding import folded_graph
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.rounds import steps_per_round
from prism_sdk.graph.timing import Timing
from prism_sdk.graph.turns import turns_of
from prism_sdk.interop.options import at_least
from prism_sdk.runtime.config import DEFAULT_BACKEND, LaunchConfig, LaunchMode, LaunchResult
from prism_sdk.runtime.cpus import sandbox_cpus
from prism_sdk.runtime.host import RankHost
from prism_sdk.runtime.keyvalue import KeyValues
from prism_sdk.runtime.launcher import AllAtOnce, check_target, run_job
from prism_sdk.runtime.manifest import Script, is_by_roles, is_grown, read_scripts
from prism_sdk.runtime.oncuda.holdtable import create_table, has_gpu
from prism_sdk.runtime.prefetch import create_ring, save_sequence
from prism_sdk.runtime.processes import ended_early, wait_or_kill
from prism_sdk.runtime.progress import Progress, Report
from prism_sdk.runtime.ranks import EmulateSpec
from prism_sdk.runtime.roles.recorded import RecordedRoles
from prism_sdk.wording import counted
from prism_sdk.workfolders import work_folder
from prismtrace import GraphKind, Op, TraceReader

_RING_BYTES = 256 << 20
_DEVICE_RING_BYTES = 2 << 30  # where a GPU may empty it
_LARGE_JOB = 32  # ranks from which on looking for equal ones is worth its time
_DEFAULT_TRANSFER_NS = 100_000  # bare graphs only; a calibrated graph has all of them


class SandboxPolicy(AllAtOnce):
    """All sandbox ranks run from the start; the launcher holds their rendezvous store."""

    def __init__(self, watched: Sequence[tuple[str, subprocess.Popen[bytes]]] = (), *, end_step: int) -> None:
        """`watched`: processes that must outlive the ranks, by what to call them."""
        super().__init__(end_step=end_step)
        self._watched = watched
        self._store = KeyValues()
        self._waiting: dict[int, tuple[Any, ...]] = {}  # store requests without an answer yet
        self._asked_ns: dict[int, int] = {}

    def message(self, rank: int, message: tuple[Any, ...]) -> None:
        if message[0] == "store":
            self._waiting[rank] = message
            self._asked_ns[rank] = time.monotonic_ns()
            while any([self._answer(other) for other in list(self._waiting)]):  # noqa: C419 - all of them, not only up to the first
                pass  # what one rank set may be what another one waits for
        elif message[0] not in ("group", "step"):
            super().message(rank, message)

    def _answer(self, rank: int) -> bool:
        """Answer the rank's store request if it can be; whether it was."""
        reply = self._store.run(self._waiting[rank])
        if reply is None:
            return False
        del self._waiting[rank]
        self.host.send(rank, (*reply, []))
        return True

    def tick(self) -> None:
        """Virtual ranks set no keys: a wait for one of theirs ends with the program's own timeout."""
        super().tick()
        for name, process in self._watched:
            if process.poll() is not None:
                self.host.fail(ended_early(name, process.returncode))
        now = time.monotonic_ns()
        for rank, request in list(self._waiting.items()):
            if now - self._asked_ns[rank] > request[-1] * 1e9:
                del self._waiting[rank]
                keys = request[2] if len(request) > 3 else request[1]
                text = f"wait timeout after {request[-1] * 1000:.0f}ms, keys: {keys!r}"
                self.host.send(rank, ("store", None, text, []))


def emulate(config: LaunchConfig, progress: Progress) -> LaunchResult:
    """Run the sandbox ranks of `config` against its graph."""
    check_target(config)
    if config.graph is None:
        raise UsageError("no graph was given", hint="prism emulate --graph calibrated.prism -- train.py ARGS")
    sandbox = tuple(sorted(set(config.sandbox))) or (0,)
    return run_sandbox(config, config.graph, sandbox, progress)


def run_sandbox(
    config: LaunchConfig, graph_path: Path, sandbox: Sequence[int], progress: Progress, *, times: Path | None = None,
    on_devices: bool = False, make_host: Callable[..., RankHost] = RankHost,
) -> LaunchResult:  # fmt: skip
    """Run `sandbox` for real against the graph, with the times of another trace of the job where `times` is given.

    `on_devices`: it is a slice of a calibration on GPUs, where communication with virtual ranks is stood in for.
    """
    with work_folder("prism-emulate-") as work:
        progress.doing("contracting the graph")
        backend = _backend(config)
        scripts, facts = _prepare(
            config, graph_path.absolute(), tuple(sandbox), work, times, progress.say,
            needs_board=backend is not None and backend.needs_board, is_slice=on_devices,
        )  # fmt: skip
        end_step = max(script.last_step for script in scripts.values()) + 1
        fds = [*facts.ring_fds, *facts.hold_fds, *([facts.board_fd] if facts.board_fd >= 0 else [])]
        spare = _spare_cpus(config, len(facts.sandbox))
        try:
            context = _AssistContext(facts, work, spare, progress.say)
            with _assistants(facts, scripts, work, context, cpus=spare), _assist(backend, context) as assistance:
                policy = SandboxPolicy(context.watched, end_step=end_step)
                policy.make_host = make_host
                result = run_job(
                    replace(config, mode=LaunchMode.EMULATE), policy, progress, ranks=sandbox,
                    emulate=replace(facts, assistance=assistance),
                    metadata={"emulate.graph": graph_path.name, "emulate.sandbox": ",".join(map(str, sandbox)),
                              "emulate.backend": facts.backend},
                    descriptors=[*fds, *assistance.descriptors],
                )  # fmt: skip
            _check_the_rest(result, scripts, graph_path, progress.say)
            return result
        finally:
            for fd in fds:
                os.close(fd)


def _backend(config: LaunchConfig) -> ReplayBackend | None:
    """The backend that the user named; absent for the default one, which needs nobody beside the ranks."""
    if config.backend in (None, DEFAULT_BACKEND):
        return None
    from prism_sdk.plugins import PluginManager

    return PluginManager(named=config.plugins, only=("backend",)).backend(config.backend)


@dataclass(frozen=True)
class _AssistContext:
    """What a backend may see in the launcher (implements prism_sdk.abc.AssistContext)."""

    facts: EmulateSpec
    work_dir: Path
    cpus: Sequence[int]
    report: Report
    watched: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def watch(self, process: subprocess.Popen[bytes], name: str) -> None:
        self.watched.append((name, process))

    @property
    def graph_path(self) -> Path:
        return self.facts.graph

    @property
    def sandbox(self) -> Sequence[int]:
        return self.facts.sandbox

    @property
    def board_fd(self) -> int:
        return self.facts.board_fd

    @property
    def options(self) -> Mapping[str, str]:
        return self.facts.options

    @property
    def hold_fds(self) -> Sequence[int]:
        return self.facts.hold_fds


def _assist(backend: ReplayBackend | None, context: AssistContext) -> AbstractContextManager[Assistance]:
    return contextlib.nullcontext(Assistance()) if backend is None else backend.assist(context)


def _spare_cpus(config: LaunchConfig, num_sandbox: int) -> list[int]:
    """The CPUs that no sandbox rank uses; none where the user asked for no binding."""
    if not config.pin:
        return []
    shares = [sandbox_cpus(i, num_sandbox=num_sandbox, world_size=config.world_size) or () for i in range(num_sandbox)]
    return sorted(os.sched_getaffinity(0) - {cpu for share in shares for cpu in share})


def _check_the_rest(result: LaunchResult, scripts: dict[int, Script], graph: Path, report: Report) -> None:
    """A program that ends before its graph does may have been given fewer steps; one that did nothing is another one.

    Raises:
        TraceMismatchError: a rank came to none of its recorded operations.
    """
    for rank, script in scripts.items():
        facts = result.summary.get(str(rank))
        left = facts.get("operations_not_reached", 0) if isinstance(facts, dict) else 0
        if left and left == len(script.expected):
            raise TraceMismatchError(
                rank, unit_index=None, expected=counted(left, "operation"), found="none of them", file=str(graph)
            )
        if isinstance(facts, dict):
            _report_resized(script, facts, report)
        if left:
            report(
                f"rank {rank} ended before the graph does: {left} of its "
                f"{counted(len(script.expected), 'recorded operation')} were not reached "
                "(fewer steps than recorded, or another program)"
            )


def _report_resized(script: Script, facts: dict[str, Any], report: Report) -> None:
    """What it means that an all-to-all had other sizes than recorded."""
    num = facts.get("all_to_alls_resized", 0)
    if not num or script.stood_for_by is None:
        return
    report(
        f"rank {script.rank}: {counted(num, 'all-to-all')} had other sizes than those of rank {script.stood_for_by}, "
        f"the first at {facts.get('first_all_to_all_resized')}: rows that the others gave were cut or repeated, and "
        f"its losses mean nothing. For its own, record it too: prism record --roles auto --sample-ranks {script.rank}"
    )


def _prepare(
    config: LaunchConfig, graph_path: Path, sandbox: tuple[int, ...], work: Path, times: Path | None, report: Report,
    *, needs_board: bool, is_slice: bool,
) -> tuple[dict[int, Script], EmulateSpec]:  # fmt: skip
    """Everything that can be worked out before the ranks start."""
    try:
        reader = TraceReader(graph_path)
    except OSError as error:
        raise UnreadableError(str(graph_path), reason=str(error)) from error
    with reader:
        outside = [rank for rank in sandbox if rank >= reader.world_size]
        if outside:
            raise UsageError(
                f"rank {outside[0]} is not in {graph_path}, which has ranks 0 to {reader.world_size - 1}",
                hint="choose with --sandbox",
            )
        scripts, by_roles = read_scripts(reader, sandbox), is_by_roles(reader)
        for rank, other in _stood_for(reader, sandbox) if by_roles else ():
            scripts[rank] = replace(scripts[rank], stood_for_by=other)
            if is_grown(reader):
                continue
            report(f"rank {rank} did not run when {graph_path.name} was recorded, rank {other} stood for it: what "
                   "the others give, and how long that takes, follows from the data of that rank")  # fmt: skip
        if is_grown(reader) and times is None:
            report(
                f"{graph_path} was given another number of replicas by prism expand: times and sizes are those of "
                "that job; what replicas give is as recorded with fewer or more of them, so losses mean nothing"
            )
        if reader.graph_kind is not GraphKind.CALIBRATED and times is None:
            report(f"{graph_path} is {reader.graph_kind.name.lower()}, not calibrated: values are right, times are not")
    graph = boundary_graph(times or graph_path, sandbox)
    kinds = list(zip(*(script.kinds() for script in scripts.values()), strict=False))
    num_repeated = steps_per_round(kinds, turns=turns_of([graph]))
    if num_repeated > 1:
        scripts = {rank: script.repeating(num_repeated) for rank, script in scripts.items()}
    if num_repeated > 1 and times is None:
        report(f"steps are of several kinds: those beyond the recording repeat the last {num_repeated} ones")
    if len(graph.ranks) < graph.world_size:
        report(f"{graph.world_size:,} ranks are planned by {len(graph.ranks)} that differ")
    timing = Timing.from_graph(graph, default_transfer_ns=_DEFAULT_TRANSFER_NS)
    plan = contract(
        graph, sandbox_ranks=sandbox, timing=timing, last_step=scripts[sandbox[0]].last_step,
        steps_per_round=num_repeated,
    )  # fmt: skip
    plan.save(work / "plan")
    report(f"{counted(len(plan), 'boundary operation')}, {counted(int(plan.term_offsets[-1]), 'term')}")
    for rank, script in scripts.items():
        script.save(work / f"script-{rank}")
        if not script.has_values:
            report(f"rank {rank}: some values were not recorded; what it computes from them is not right")
    rings = tuple(create_ring(_ring_bytes(config, script)) for script in scripts.values())
    board = os.memfd_create("prism-board", 0) if len(sandbox) > 1 or needs_board else -1
    if board >= 0:
        os.ftruncate(board, 1 << 42)
    is_held = config.device != "cpu" and not is_slice and has_gpu()
    holds = tuple(create_table() for _ in scripts) if is_held else ()
    facts = EmulateSpec(
        graph=graph_path, plan=work / "plan", sandbox=sandbox, backend=config.backend or DEFAULT_BACKEND,
        ring_fds=rings, board_fd=board, needs_mesh=any(_needs_mesh(script, sandbox) for script in scripts.values()),
        options=dict(config.options), hold_fds=holds, is_slice=is_slice, by_roles=by_roles,
        times=times,
    )  # fmt: skip
    return scripts, facts


def _stood_for(reader: TraceReader, sandbox: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The sandbox ranks that did not run in a recording by roles, and the ranks whose rows they have.

    Of a job that was given more replicas afterwards no rank ran.
    """
    roles = RecordedRoles.of(reader)
    for rank in sandbox:
        if roles is not None and (is_grown(reader) or roles.stands_for[rank] != rank):
            yield rank, int(roles.stands_for[rank])


def boundary_graph(path: Path, sandbox: tuple[int, ...]) -> JobGraph:
    """The graph to plan from: of a large job only ranks that differ, so that memory and time follow its roles."""
    with TraceReader(path) as reader:
        is_sane = reader.graph_kind is GraphKind.CALIBRATED and set(sandbox) <= set(reader.ranks)
        if is_sane and len(reader.ranks) >= _LARGE_JOB:
            from prism_sdk.simulate.loading import load

            with contextlib.suppress(GraphError):  # loaded as a whole it says what is wrong
                folded = folded_graph(reader, load(reader, with_sizes=False), sandbox_ranks=sandbox)
                if folded is not None:
                    return folded
    return JobGraph.load(path)


def _needs_mesh(script: Script, sandbox: tuple[int, ...]) -> bool:
    messages = (one for one in script.expected if one.stream is None and one.op in (Op.SEND, Op.RECV))
    return any(not frozenset(sandbox).issuperset(one.group_ranks) for one in messages)


def _ring_bytes(config: LaunchConfig, script: Script) -> int:
    """Size of the pool: what the whole run needs, up to `-O prefetch_bytes=N`."""
    default = _DEVICE_RING_BYTES if has_gpu() else _RING_BYTES
    limit = at_least(config.options, "prefetch_bytes", default=default, low=0)
    largest = max((item.num_bytes for item in script.sequence.items), default=0)
    return min(max(sum(item.num_bytes for item in script.sequence.items) * 2, largest, 1 << 20), max(limit, 1 << 16))


@contextlib.contextmanager
def _assistants(
    facts: EmulateSpec, scripts: dict[int, Script], work: Path, context: _AssistContext, *, cpus: Sequence[int]
) -> Iterator[None]:
    """One prefetching process for each sandbox rank, on `cpus` where there are any, and one that releases its streams.

    The latter polls, so it has a CPU to itself where possible.
    """
    processes = []
    parent_id = str(os.getpid())
    num_alone = len(facts.hold_fds) if len(cpus) > len(facts.hold_fds) else 0
    alone, cpus = cpus[len(cpus) - num_alone :], cpus[: len(cpus) - num_alone]
    try:
        for ring_fd, (rank, script) in zip(facts.ring_fds, scripts.items(), strict=True):
            save_sequence(work / f"sequence-{rank}", script.sequence)
            paths = [str(facts.graph), str(work / f"sequence-{rank}")]
            arguments = [parent_id, str(ring_fd), *paths, ",".join(map(str, cpus))]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "prism_sdk.runtime.prefetch", *arguments], pass_fds=[ring_fd],
                    start_new_session=True,
                )
            )  # fmt: skip
            context.watch(processes[-1], f"the process that reads values ahead of rank {rank}")
        for position, (hold_fd, rank) in enumerate(zip(facts.hold_fds, scripts, strict=False)):
            cpu = str(alone[position]) if alone else ""
            arguments = [parent_id, str(hold_fd), str(facts.plan), str(rank), str(facts.board_fd), cpu]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "prism_sdk.runtime.oncuda.releaser", *arguments], start_new_session=True,
                    pass_fds=[hold_fd, *([facts.board_fd] if facts.board_fd >= 0 else [])],
                )
            )  # fmt: skip
            context.watch(processes[-1], f"the process that releases the streams of rank {rank}")
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            wait_or_kill(process)
