"""What runs inside a rank process: sets the rank up, runs the user's program, reports how it ended.

Responsible for the life of a rank; what its communication does is the business of the seam of the mode.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import os
import random
import signal
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prism_sdk.errors import OutputError, PrismError
from prism_sdk.runtime import wire
from prism_sdk.runtime.activating import activate_adapters
from prism_sdk.runtime.adapters import Naming
from prism_sdk.runtime.config import LaunchMode
from prism_sdk.runtime.ending import KILLED, Once, end_on_sigterm
from prism_sdk.runtime.fidelity import report_lowered
from prism_sdk.runtime.imports import settings_of, slow_imports
from prism_sdk.runtime.intercept import Interceptor, Seam
from prism_sdk.runtime.ncclrecords import flush_profiler
from prism_sdk.runtime.oncuda import devices, streams
from prism_sdk.runtime.program import exit_code_of, program_traceback, run_excepthook, run_exit_handlers, run_program
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.shards import output_of
from prism_sdk.runtime.stepboard import step_cell
from prism_sdk.runtime.tracer import Tracer, open_shard
from prismtrace import GraphKind, PrismTraceError, TraceWriteError, TraceWriter

if TYPE_CHECKING:
    from prism_sdk.runtime.oncuda.kernels import KernelRecorder

_GRAPH_KINDS = {
    LaunchMode.OBSERVE: GraphKind.OBSERVED,
    LaunchMode.RECORD: GraphKind.BARE,
    LaunchMode.EMULATE: GraphKind.EMULATED,
}


class Agent:
    """The parts of Prism inside one rank process."""

    def __init__(self, spec: RankSpec, channel: wire.Channel | None) -> None:
        self.spec = spec
        self.channel = channel
        writer = open_shard(spec.parts_dir, spec.rank, _GRAPH_KINDS[spec.mode], spec.world_size, dict(spec.metadata))
        self.tracer = self._make_tracer(writer)
        self.tracer.step_cell = step_cell(*spec.step_board)
        self.seam = self._make_seam()
        self.interceptor = Interceptor(self.seam)
        self._adapters = contextlib.ExitStack()
        self._naming: Naming | None = None
        self._kernels: KernelRecorder | None = None
        self._written = Once()
        self._settings = settings_of(os.environ)

    def _make_tracer(self, writer: TraceWriter) -> Tracer:
        if self.spec.device == "cpu" or not devices.num_real_devices():
            return Tracer(self.spec.rank, writer)
        if self.spec.mode is not LaunchMode.RECORD:
            from prism_sdk.runtime.oncuda import durations, holdtable
            from prism_sdk.runtime.oncuda.tracing import DeviceTracer

            is_held = self.spec.emulate is not None and not self.spec.emulate.is_slice
            needed = holdtable if is_held else durations
            for name, value in needed.ENVIRONMENT.items():  # before the program makes a group or opens the device
                os.environ.setdefault(name, value)
            return DeviceTracer(self.spec.rank, writer, is_real=self.spec.mode is LaunchMode.OBSERVE)
        from prism_sdk.runtime.oncuda.metering import MeteredTracer

        return MeteredTracer(self.spec.rank, writer)

    def _make_seam(self) -> Seam:
        if self.spec.mode is LaunchMode.OBSERVE:
            from prism_sdk.runtime.observe import ObserveSeam

            return ObserveSeam(self.tracer)
        assert self.channel is not None
        if self.spec.by_roles:
            from prism_sdk.runtime.roles.seam import RoleSeam

            return RoleSeam(self.spec, self.tracer, self.channel)
        if self.spec.mode is LaunchMode.RECORD:
            from prism_sdk.runtime.record import RecordSeam

            return RecordSeam(self.spec, self.tracer, self.channel)
        if self.spec.emulate is not None and self.spec.emulate.is_slice:
            from prism_sdk.runtime.oncuda.slicing import SliceSeam

            return SliceSeam(self.spec, self.tracer, self.channel)
        from prism_sdk.runtime.emulate import EmulateSeam

        return EmulateSeam(self.spec, self.tracer, self.channel)

    def install(self) -> None:
        from prism_sdk.runtime.hooks import follow_training

        if self.spec.paging is not None:
            from prism_sdk.runtime.oncuda.serving import serve_memory

            serve_memory(self.spec.paging, rank=self.spec.rank, token=self.spec.token)
        if self.spec.device == "cpu":
            from prism_sdk.runtime import oncpu

            oncpu.install(num_devices=self.spec.num_devices)
        elif self.seam.replaces_backend and 0 < devices.num_real_devices() < self.spec.num_devices:
            devices.install(num_logical=self.spec.num_devices, num_real=devices.num_real_devices())
        if self.spec.device != "cpu" and devices.num_real_devices():
            streams.follow_streams(self.tracer)
        self.interceptor.install()
        self.seam.install()
        if self.spec.kernels is not None:
            from prism_sdk.runtime.oncuda.kernels import KernelRecorder

            self._kernels = KernelRecorder(self.spec.rank, self.spec.kernels)
        follow_training(
            self.tracer, lambda: self.interceptor.active, self._kernels.at_boundary if self._kernels else None
        )
        self._naming = activate_adapters(
            self.spec.adapters or (), self.spec.plugins, self.tracer, self._adapters, self.spec.adapter_options
        )
        os.register_at_fork(after_in_child=self._naming.close)  # a data loader's workers have no trace

    def explain(self, error: BaseException) -> tuple[PrismError | None, str]:
        """What is to be said of the end of a program that ran out of device memory."""
        from prism_sdk.runtime.oncuda.footprint import out_of_memory
        from prism_sdk.runtime.oncuda.serving import describe_limit

        note = describe_limit(error, self.spec.paging, tracer=self.tracer)
        if note or self.spec.mode is not LaunchMode.RECORD:
            return None, f"\n{note}" if note else ""
        return out_of_memory(error, self.spec.rank), ""

    def summary(self) -> dict[str, Any]:
        """What the launcher is told of this rank when it has ended."""
        names = self._naming.facts() if self._naming is not None else {}
        imports = slow_imports(self._settings, settings_of(os.environ))
        return {**self.seam.summary(), **names, **({"imports": ",".join(imports)} if imports else {})}

    def finish(self, status: str) -> None:
        """Write out what was traced, once; only in the rank itself, not in processes it forked."""
        if self.interceptor.active:
            with contextlib.suppress(Exception):
                self._adapters.close()
            flush_profiler(os.environ.get("NCCL_PROFILER_PLUGIN", ""))
            self.seam.finish(status)  # may wait for other ranks
            self._written.run(partial(self._write_out, status))

    def _write_out(self, status: str) -> None:
        if self._naming is not None:
            self._naming.write()
        if self._kernels is not None:
            with contextlib.suppress(RuntimeError):  # of a GPU that has failed
                self._kernels.write(self.tracer.writer, is_complete=status == "complete")
        self.tracer.finish(status)


def run_rank(spec: RankSpec) -> NoReturn:
    """Run the user's program as one rank in this freshly forked process, and end the process."""
    channel: wire.Channel | None = None
    code = 1
    try:
        if spec.cpus:
            os.sched_setaffinity(0, spec.cpus)
        os.environ.update(spec.environment)
        for variable in spec.unset:
            os.environ.pop(variable, None)
        if spec.silent or spec.stdout_to_stderr:
            os.dup2(os.open(os.devnull, os.O_WRONLY) if spec.silent else 2, 1)
        _separate_random_state(spec)
        _renew_thread_pool()
        channel = wire.connect(spec.token)
        channel.send(("hello", spec.rank, os.getpid()))
        agent = Agent(spec, channel)
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a crash in native code shows where in the program it was
        waits_in_native_code = not agent.seam.replaces_backend
        end_on_sigterm(
            partial(agent.finish, "aborted"), lambda: os._exit(KILLED), waits_in_native_code=waits_in_native_code
        )
        agent.install()
        code = _run_program(spec, agent, channel)
    except BaseException as error:
        _tell(channel, ("finished", spec.rank, 1, traceback.format_exc(), {}, _cause(error)))
    finally:
        _leave(code)


def _run_program(spec: RankSpec, agent: Agent, channel: wire.Channel) -> int:
    code, status, text = 0, "complete", ""
    cause: PrismError | None = None
    try:
        run_program(spec.target, spec.arguments, is_module=spec.is_module)
    except SystemExit as exit_:
        code = exit_code_of(exit_)
        if code:
            status, text = "failed", f"the program called sys.exit({exit_.code!r})"
    except BaseException as error:
        code, status, text, cause = 1, "failed", program_traceback(error), _cause(error)
        if cause is None:
            cause, note = agent.explain(error)
            text += note
        run_excepthook(error)
    run_exit_handlers()
    try:
        agent.finish(status)
    except PrismTraceError as error:
        code, cause = code or 1, cause or _cause(error)
    _tell(channel, ("finished", spec.rank, code, text, agent.summary(), cause))
    return code


def _cause(error: BaseException | None) -> PrismError | None:
    """Prism's own error among what led to `error`: it explains more than the program's traceback."""
    for _ in range(16):
        if isinstance(error, TraceWriteError):
            return OutputError(output_of(error.path), reason=str(error))
        if isinstance(error, PrismError) and not isinstance(error, wire.ChannelClosed):
            return error
        if error is None:
            return None
        error = error.__cause__ or error.__context__
    return None


def _tell(channel: wire.Channel | None, message: tuple[Any, ...]) -> None:
    if channel is None:
        sys.stderr.write(f"prism: rank {message[1]} could not start:\n{message[3]}\n")
        return
    with contextlib.suppress(wire.ChannelClosed):
        channel.send(message)


def _renew_thread_pool() -> None:
    """Let torch replace the thread pool that did not survive the fork while this process has one thread.

    It would do so at the next use, without a lock: the autograd engine's device threads start all at once and then fail
    with "Invalid thread pool" (seen with torch 2.11 built for CUDA).
    """
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _separate_random_state(spec: RankSpec) -> None:
    """Forked ranks must not share Python's and numpy's random state, as separately started processes do not.

    A real run seeds them from the system.  A recording must be repeatable, so there the seed is the rank.
    """
    import numpy as np

    seed = None if spec.mode is LaunchMode.OBSERVE else spec.rank
    random.seed(seed)
    np.random.seed(seed)


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# -- under a foreign launcher ---------------------------------------------------------------------------------------


def start_under_foreign_launcher(spec: RankSpec) -> Agent:
    """Observe this process, which torchrun, Slurm or another launcher started. The last rank to end merges."""
    for left in (_shard_of(spec), _mark_of(spec)):  # of a run that was killed, or of this one before a restart
        left.unlink(missing_ok=True)
    agent = Agent(spec, None)
    agent.install()
    status = "complete"

    def note_failure(*details: Any) -> None:
        nonlocal status
        status = "failed"
        previous(*details)

    def write_out(status: str) -> None:
        try:
            agent.finish(status)
            if spec.rank == 0:
                report_lowered([agent.summary()])
            merge_when_last(spec, status)
        except (PrismError, PrismTraceError, OSError) as error:
            sys.stderr.write(f"prism: rank {spec.rank}: the trace could not be written: {error}\n")

    def end(status: str) -> None:
        if agent.interceptor.active:
            ended.run(partial(write_out, status))

    def leave() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    ended = Once()
    previous, sys.excepthook = sys.excepthook, note_failure
    atexit.register(lambda: end(status))
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        end_on_sigterm(partial(end, "aborted"), leave, waits_in_native_code=True)
    return agent


def _shard_of(spec: RankSpec) -> Path:
    return spec.parts_dir / f"rank-{spec.rank:05d}.prism"


def _mark_of(spec: RankSpec) -> Path:
    return spec.parts_dir / f"rank-{spec.rank:05d}.done"


def merge_when_last(spec: RankSpec, status: str) -> None:
    """Merge all shards into the output once every rank has finished its own; an exclusive lock makes one rank do it."""
    from prism_sdk.runtime.shards import merge_shards

    output = spec.parts_dir.with_suffix("")  # less ".parts"
    _mark_of(spec).write_text(status)
    with (spec.parts_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = {mark.read_text() for mark in spec.parts_dir.glob("rank-*.done")}
        if len(list(spec.parts_dir.glob("rank-*.done"))) == spec.world_size:
            merge_shards(spec.parts_dir, output, {"job.status": "complete" if done == {"complete"} else "aborted"},
                         steps=spec.steps)  # fmt: skip
