"""Runs the rank processes of one launch: starts them, hears them, ends them.

Responsible for the fork server, the sockets, exits and signals.  Who may run when is decided by a `Policy`; the trace
is none of its business.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from prism_sdk.errors import PrismError, RankFailedError, RankKilledError, RunError
from prism_sdk.runtime import wire
from prism_sdk.runtime.cpus import cpu_ticks, set_affinity
from prism_sdk.runtime.forkserver import descendants_of
from prism_sdk.runtime.gauges import count_oom_kills
from prism_sdk.runtime.gpus import num_gpus
from prism_sdk.runtime.interrupts import Interrupted, Interrupts
from prism_sdk.runtime.oncuda.residence import MoveOptions
from prism_sdk.runtime.peers import Peer
from prism_sdk.runtime.processes import (
    GRACE_S,
    ForkServer,
    HelperKilledError,
    Preparation,
    allow_descriptors,
    forkserver_ended,
    kill_group,
    start_forkserver,
    wait_or_kill,
)
from prism_sdk.runtime.progress import Snapshot
from prism_sdk.runtime.ranks import RankSpec

_TICK_S = 0.1
_GREETING_S = 30.0  # connecting and greeting follow each other at once, but the machine may be busy


@dataclass
class RankProcess(Peer):
    """One rank as the launcher sees it."""

    rank: int
    pid: int = 0
    finished: bool = False  # said how its program ended
    exited: bool = False
    exit_code: int | None = None
    signal_number: int | None = None
    error: str = ""
    summary: Mapping[str, object] = field(default_factory=dict)


StartServer = Callable[..., tuple[ForkServer, wire.Channel]]


class Policy(ABC):
    """Decides which ranks are started and answers their messages."""

    host: RankHost
    make_spec: Callable[[int], RankSpec]  # for a rank that is added while others run
    moves = MoveOptions()  # whether device memory of ranks may be moved
    make_host: Callable[..., RankHost]  # what runs the processes; by default on this machine

    @abstractmethod
    def start(self) -> None:
        """The fork server is ready."""

    def connected(self, rank: int) -> None:  # noqa: B027 - optional
        """The rank's process is there and about to run the program."""

    def message(self, rank: int, message: tuple[Any, ...]) -> None:
        """A message of a rank other than those the host handles."""
        raise RunError(f"rank {rank} sent {message[0]!r}, which this mode does not know")

    def ended(self, rank: int) -> None:  # noqa: B027 - optional
        """The rank's process is gone (well or not)."""

    def attach(self, rank: int, sock: socket.socket, begun: bytes) -> None:
        """A rank has made a second connection, of which `begun` was read already."""
        sock.close()

    def close(self) -> None:  # noqa: B027 - optional
        """Nobody is to run any more."""

    def tick(self) -> None:  # noqa: B027 - optional
        """Called at least ten times a second."""

    def snapshot(self) -> Snapshot | None:
        """Where the ranks stand, for the progress display, which asks from a thread of its own; None: not there yet."""
        return None


class RankHost:
    """Event loop over the fork server and the ranks of one launch."""

    start_server: ClassVar[StartServer] = staticmethod(start_forkserver)  # where a launch names no other way

    def __init__(
        self, specs: Sequence[RankSpec], *, token: str, policy: Policy, environment: Mapping[str, str],
        descriptors: Sequence[int] = (), report: Callable[[str], None] = lambda text: None,
        interrupts: Interrupts | None = None, library: Path | None = None, adapters: Sequence[str] | None = None,
        start_server: StartServer | None = None,
    ) -> None:  # fmt: skip
        self.interrupts = interrupts or Interrupts()
        self.specs = {spec.rank: spec for spec in specs}
        self.ranks = {spec.rank: RankProcess(spec.rank) for spec in specs}
        self.policy = policy
        policy.host = self
        self.report = report
        self._selector = selectors.DefaultSelector()
        self._server = wire.listen(token)
        self._failure: PrismError | None = None
        self._num_exited = 0
        self._ooms_before = count_oom_kills()
        preparation = Preparation(
            library, tuple(adapters_of(specs) if adapters is None else adapters), specs[0].imports if specs else ()
        )
        start_server = start_server or self.start_server
        self._forkserver, self._control = start_server(environment, descriptors, preparation)
        allow_descriptors(len(specs))

    # -- for policies -----------------------------------------------------------------------------------------------

    def spawn(self, rank: int) -> None:
        """Fork the process of `rank`."""
        self._control.send(("fork", self.specs[rank]))

    def add(self, spec: RankSpec) -> None:
        """One more rank, to be spawned like the others."""
        self.specs[spec.rank] = spec
        self.ranks[spec.rank] = RankProcess(spec.rank)

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        """Send to a rank without ever blocking on it."""
        self.ranks[rank].tell(self._selector, message)

    def cpu_ticks(self, rank: int) -> int:
        """User and system time of a rank's process in clock ticks; -1 when it is gone."""
        return cpu_ticks(self.ranks[rank].pid)

    def set_affinity(self, rank: int, cpus: tuple[int, ...] | None) -> None:
        """Bind a rank to `cpus`; None: to all that this process may use."""
        set_affinity(self.ranks[rank].pid, tuple(os.sched_getaffinity(0)) if cpus is None else cpus)

    def watch(self, sock: socket.socket, call: Callable[[], None]) -> None:
        """Call `call` when there is something to read."""
        self._selector.register(sock, selectors.EVENT_READ, call)

    def unwatch(self, sock: socket.socket) -> None:
        """No longer."""
        self._selector.unregister(sock)

    def fail(self, error: PrismError) -> None:
        """End the launch because of `error`; the first failure counts."""
        if self._failure is None:
            self._failure = error

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every rank has ended. Raises the first failure after all processes are gone."""
        self._open()
        with self.interrupts if not self.interrupts.active else contextlib.nullcontext():
            try:
                while self._failure is None and self.interrupts.number is None and not self._all_ended():
                    self._turn(_TICK_S)
                self._settle_failure()
            finally:
                self._end_processes()
        if self.interrupts.number is not None:
            raise Interrupted(self.interrupts.number)
        if self._failure is not None:
            raise self._failure

    def _open(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._control, selectors.EVENT_READ, self._from_forkserver)

    def _all_ended(self) -> bool:
        return self._num_exited == len(self.ranks)

    def _turn(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.data, RankProcess):
                self._from_rank(key.data, events)
            else:
                key.data()
        self.policy.tick()

    def _accept(self) -> None:
        sock = wire.accept(self._server)
        if sock is None:
            return
        channel = wire.Channel(sock)
        try:
            if not wire.wait_readable(sock, _GREETING_S):
                raise wire.ChannelClosed("no greeting")
            kind, rank, pid = channel.receive()
        except (wire.ChannelClosed, ValueError):
            sock.close()
            return
        process = self.ranks.get(rank)
        if kind == "pages" and process is not None:
            self.policy.attach(rank, sock, channel.rest())
            return
        if kind != "hello" or process is None or process.channel is not None:
            sock.close()
            return
        process.pid = pid
        process.meet(self._selector, channel)
        self.policy.connected(rank)
        for message in channel.take_ready():  # what came along with the greeting: nothing else would announce it
            self._heard(process, message)

    def _from_rank(self, process: RankProcess, events: int) -> None:
        for message in process.hear(self._selector, events) or ():
            self._heard(process, message)

    def _heard(self, process: RankProcess, message: tuple[Any, ...]) -> None:
        if message[0] != "finished":
            self.policy.message(process.rank, message)
            return
        _, _, process.exit_code, process.error, process.summary, cause = message
        process.finished = True
        if process.exit_code:
            self.fail(cause or self._rank_failed(process))

    def _from_forkserver(self) -> None:
        try:
            messages = self._control.receive_ready()
        except wire.ChannelClosed:
            self._selector.unregister(self._control)
            if not self._all_ended():
                self.fail(forkserver_ended(self._forkserver))
            return
        for kind, *details in messages:
            if kind == "ready":
                self.policy.start()
            elif kind == "failed":
                self.fail(RunError(f"torch cannot be imported: {details[0]}", hint="run `prism doctor`"))
            elif kind == "fork_failed":
                self.fail(RunError(f"rank {details[0]} could not be forked: {details[1]}"))
            elif kind == "forked":
                self.ranks[details[0]].pid = details[1]
            elif kind == "exited":
                self._exited(*details)

    def _exited(self, rank: int, status: int) -> None:
        process = self.ranks[rank]
        while process.channel is not None and wire.wait_readable(process.channel.sock, 0.0):
            self._from_rank(process, selectors.EVENT_READ)  # what it said last
        process.exited = True
        self._num_exited += 1
        if os.WIFSIGNALED(status):
            process.signal_number = os.WTERMSIG(status)
            self.fail(_rank_killed(process, count_oom_kills() - self._ooms_before))
        elif not process.finished:
            process.exit_code = os.WEXITSTATUS(status)
            # os._exit(0) in the script is its right; any other silent end is a failure
            if process.exit_code:
                self.fail(self._rank_failed(process))
        self.policy.ended(rank)

    def _settle_failure(self) -> None:
        """Give others a moment: a rank or helper that was killed explains better than its peers' broken connections."""
        if self._failure is None or self._was_killed():
            return
        deadline = time.monotonic() + 0.5
        first = self._failure
        while time.monotonic() < deadline and self.interrupts.number is None:
            self._failure = None
            self._turn(0.05)
            if self._was_killed():
                return
        self._failure = first

    def _was_killed(self) -> bool:
        return isinstance(self._failure, RankKilledError | HelperKilledError)

    def _end_processes(self) -> None:
        """SIGTERM, a while to write out what was traced, SIGKILL; then whatever the ranks had started themselves."""
        self.policy.close()
        alive = [process for process in self.ranks.values() if process.pid and not process.exited]
        if alive:  # ranks may reap what dies with them before anybody else sees it
            with contextlib.suppress(wire.ChannelClosed):
                self._control.send(("known", descendants_of(self._forkserver.pid)))
        for process in alive:
            kill_group(process.pid, signal.SIGTERM)
        presses, num_exited = self.interrupts.count, self._num_exited
        deadline = time.monotonic() + GRACE_S
        while not self._all_gone(alive) and time.monotonic() < deadline and self.interrupts.count == presses:
            with contextlib.suppress(PrismError):
                for key, events in self._selector.select(0.05):
                    if isinstance(key.data, RankProcess):
                        self._drain(key.data, events)
                    elif key.data == self._from_forkserver:
                        self._from_forkserver()
            if self._num_exited > num_exited:
                num_exited, deadline = self._num_exited, time.monotonic() + GRACE_S
        for process in alive:
            if not process.exited:  # the fork server does the same to what it has started, in the right order
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
        if not alive:
            with contextlib.suppress(wire.ChannelClosed):
                self._control.send(("leave",))  # a program that ended well may leave processes behind
        self._control.close()
        wait_or_kill(self._forkserver)
        for process in self.ranks.values():
            if process.channel is not None:
                process.channel.close()
        self._selector.close()
        self._server.close()

    def _all_gone(self, alive: Sequence[RankProcess]) -> bool:
        return all(process.exited for process in alive)

    def _rank_failed(self, process: RankProcess) -> PrismError:
        error = RankFailedError(process.rank, exit_code=process.exit_code or 1, traceback_text=process.error)
        last = process.error.rstrip().rpartition("\n")[2].lower()
        wants_gpus = any(word in last for word in ("cuda", "nccl", "nvidia"))
        if wants_gpus and self.specs[process.rank].device != "cpu" and not num_gpus():
            error.hint = "no GPU is here: --device cpu runs a script for GPUs on CPUs, for structure and numbers"
        return error

    def _drain(self, process: RankProcess, events: int) -> None:
        """Read and drop: a rank that is ending must not block on a full socket."""
        process.hear(self._selector, events & selectors.EVENT_READ)


def adapters_of(specs: Sequence[RankSpec]) -> tuple[str, ...]:
    """What can be prepared for all ranks; plugins that the user named are loaded in the ranks only."""
    return () if not specs or specs[0].plugins else specs[0].adapters or ()


def _rank_killed(process: RankProcess, num_ooms: int) -> PrismError:
    error = RankKilledError(process.rank, signal_number=process.signal_number or 0)
    if process.signal_number == signal.SIGKILL and num_ooms > 0:
        error.hint = "memory ran out: the kernel counts a process that it ended for that. Run fewer ranks at once"
    return error


Policy.make_host = RankHost
