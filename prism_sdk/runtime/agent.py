"""What runs inside a rank process: sets the rank up, runs the user's program, reports how it ended.

Responsible for the life of a rank; what its communication does is the business of the seam of the mode.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

from prism_sdk.runtime import wire
from prism_sdk.runtime.config import LaunchMode
from prism_sdk.runtime.intercept import Interceptor, Seam
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.tracer import Tracer, open_shard
from prismtrace import GraphKind

_GRAPH_KINDS = {
    LaunchMode.OBSERVE: GraphKind.OBSERVED,
    LaunchMode.RECORD: GraphKind.BARE,
    LaunchMode.EMULATE: GraphKind.EMULATED,
}
_KILLED_BY_LAUNCHER = 143  # 128 + SIGTERM, as a shell reports it


class Agent:
    """The parts of Prism inside one rank process."""

    def __init__(self, spec: RankSpec, channel: wire.Channel | None) -> None:
        self.spec = spec
        self.channel = channel
        writer = open_shard(
            spec.parts_dir, spec.rank, _GRAPH_KINDS[spec.mode], spec.world_size, dict(spec.metadata)
        )
        self.tracer = Tracer(spec.rank, writer)
        self.seam = self._make_seam()
        self.interceptor = Interceptor(self.seam)

    def _make_seam(self) -> Seam:
        if self.spec.mode is LaunchMode.OBSERVE:
            from prism_sdk.runtime.observe import ObserveSeam

            return ObserveSeam(self.tracer)
        assert self.channel is not None
        if self.spec.mode is LaunchMode.RECORD:
            from prism_sdk.runtime.record import RecordSeam

            return RecordSeam(self.spec, self.tracer, self.channel)
        from prism_sdk.runtime.emulate import EmulateSeam

        return EmulateSeam(self.spec, self.tracer, self.channel)

    def install(self) -> None:
        from prism_sdk.runtime.hooks import follow_training

        self.interceptor.install()
        self.seam.install()
        follow_training(self.tracer, lambda: self.interceptor.active)

    def finish(self, status: str) -> None:
        """Write out what was traced; only in the rank itself, not in processes it forked."""
        if self.interceptor.active:
            self.seam.finish(status)
            self.tracer.finish(status)


def run_rank(spec: RankSpec) -> NoReturn:
    """Run the user's program as one rank in this freshly forked process, and end the process."""
    agent: Agent | None = None
    code = 1
    try:
        if spec.cpus:
            os.sched_setaffinity(0, spec.cpus)
        os.environ.update(spec.environment)
        if spec.silent or spec.stdout_to_stderr:
            os.dup2(os.open(os.devnull, os.O_WRONLY) if spec.silent else 2, 1)
        _separate_random_state(spec)
        channel = wire.connect(spec.token)
        channel.send(("hello", spec.rank, os.getpid()))
        agent = Agent(spec, channel)
        _die_tidily(agent)
        agent.install()
        code = _run_program(spec, agent, channel)
    except BaseException:
        _report(spec, agent, traceback.format_exc())
    finally:
        _leave(code)


def _run_program(spec: RankSpec, agent: Agent, channel: wire.Channel) -> int:
    code, status, error = 0, "complete", ""
    try:
        run_target(spec)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else (0 if exit_.code is None else 1)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        status, error = ("complete", "") if code == 0 else ("failed", f"the program exited with code {code}")
    except BaseException:
        code, status, error = 1, "failed", traceback.format_exc()
    _run_exit_handlers()
    agent.finish(status)
    with contextlib.suppress(wire.ChannelClosed):
        channel.send(("finished", spec.rank, code, error, agent.seam.summary()))
    return code


def run_target(spec: RankSpec) -> None:
    """Run the script or module as `python script.py ARGS` would."""
    sys.argv = [spec.target, *spec.arguments]
    if spec.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(spec.target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(spec.target).resolve().parent)
        runpy.run_path(spec.target, run_name="__main__")


def _separate_random_state(spec: RankSpec) -> None:
    """Forked ranks must not share Python's and numpy's random state, as separately started processes do not.

    A real run seeds them from the system.  A recording must be repeatable, so there the seed is the rank.
    """
    import numpy as np

    seed = None if spec.mode is LaunchMode.OBSERVE else spec.rank
    random.seed(seed)
    np.random.seed(seed)


def _die_tidily(agent: Agent) -> None:
    """On SIGTERM write out what was traced and end. A script that installs its own handler keeps it."""

    def handler(*_: Any) -> None:
        agent.finish("aborted")
        os._exit(_KILLED_BY_LAUNCHER)

    signal.signal(signal.SIGTERM, handler)


def _report(spec: RankSpec, agent: Agent | None, text: str) -> None:
    """Tell the launcher of a failure of our own; stderr serves when the launcher cannot be reached."""
    if agent is not None and agent.channel is not None:
        with contextlib.suppress(Exception):
            agent.channel.send(("finished", spec.rank, 1, text, {}))
            return
    print(f"prism: rank {spec.rank} could not start:\n{text}", file=sys.stderr)


def _run_exit_handlers() -> None:
    """What the interpreter does at its end, in its order: threads, then atexit (data loaders clean up there)."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# -- under a foreign launcher ---------------------------------------------------------------------------------------


def start_under_foreign_launcher(spec: RankSpec) -> Agent:
    """Observe this process, which torchrun, Slurm or another launcher started. The last rank to end merges the shards."""
    agent = Agent(spec, None)
    agent.install()
    status = "complete"

    def note_failure(*details: Any) -> None:
        nonlocal status
        status = "failed"
        previous(*details)

    def at_exit() -> None:
        if agent.interceptor.active:
            agent.finish(status)
            merge_when_last(spec)

    previous, sys.excepthook = sys.excepthook, note_failure
    atexit.register(at_exit)
    return agent


def merge_when_last(spec: RankSpec) -> None:
    """Merge all shards into the output once every rank has finished its own; an exclusive lock makes one rank do it."""
    from prism_sdk.runtime.shards import merge_shards

    output = spec.parts_dir.with_suffix("")  # less ".parts"
    (spec.parts_dir / f"rank-{spec.rank:05d}.done").touch()
    with (spec.parts_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = sorted(spec.parts_dir.glob("rank-*.done"))
        if len(done) == spec.world_size:
            merge_shards(spec.parts_dir, output, {"job.status": "complete"})
