"""Starts the fork server of a launch, or of several launches, and ends what it has started.

Responsible for processes as the operating system sees them; what ranks say to each other is host.py's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prism_sdk.errors import PrismError, RunError
from prism_sdk.runtime import wire
from prism_sdk.runtime.forkserver import descendants_of

GRACE_S = 5.0  # between SIGTERM and SIGKILL, as long as no rank ends; each rank that ends renews it
_SPARE_PLACES = 64  # for descriptors of later launches with higher numbers than the first has
_FORKSERVER = """
import sys
if sys.path[0] == "":
    sys.path.pop(0)
from prism_sdk.runtime.forkserver import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Preparation:
    """What the fork server has ready for the ranks."""

    library: Path | None = None  # loaded before all else
    adapters: tuple[str, ...] = ()  # those that each rank will activate
    imports: tuple[str, ...] = ()  # modules beside those that all ranks need


def kill_group(pid: int, number: int) -> None:
    """Signal a rank's process group: data loader workers go with it."""
    for call in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            call(pid, number)
            return  # the group has the rank in it, unless the rank was not far enough yet to have one


def allow_descriptors(num_ranks: int) -> None:
    """One socket a rank; the fork server and the ranks keep the limit that the user set."""
    needed = num_ranks + 128
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def start_forkserver(
    environment: Mapping[str, str], descriptors: Sequence[int], preparation: Preparation
) -> tuple[subprocess.Popen[bytes], wire.Channel]:
    """Start the process that forks ranks; it and the ranks inherit `descriptors` under their numbers."""
    ours, theirs = socket.socketpair()
    process = _start(theirs, environment, descriptors, preparation, num_places=0)
    return process, wire.Channel(ours)


def _start(
    sock: socket.socket, environment: Mapping[str, str], descriptors: Sequence[int], preparation: Preparation,
    *, num_places: int,
) -> subprocess.Popen[bytes]:  # fmt: skip
    # -u: torchrun starts ranks so. -c and not -m: the current folder is no place to import from
    ready = [str(preparation.library or ""), ",".join(preparation.imports), *preparation.adapters]
    arguments = [str(sock.fileno()), str(num_places), *ready]
    with sock:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", _FORKSERVER, *arguments], pass_fds=[sock.fileno(), *descriptors],
            env=dict(environment), start_new_session=True,
        )  # fmt: skip


class KeptForkServer:
    """Loads torch once for launches that follow each other: each gets a fork server that is forked.

    A launch that needs it prepared in another way, or finds it dead, gets a new one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._desk: socket.socket
        self._prepared: tuple[object, ...] = ()
        self._num_places = 0

    def start(
        self, environment: Mapping[str, str], descriptors: Sequence[int], preparation: Preparation
    ) -> tuple[ForkedServer, wire.Channel]:
        """As `start_forkserver`."""
        ours, theirs = socket.socketpair()
        numbers = [*descriptors, theirs.fileno()]
        wanted = (dict(environment), preparation, os.getcwd())
        if self._process is None or self._process.poll() is not None or (
            self._prepared != wanted or self._num_places <= max(numbers)
        ):  # fmt: skip
            self.close()
            self._prepared, self._num_places = wanted, max(numbers) + _SPARE_PLACES
            self._desk, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = _start(its, environment, (), preparation, num_places=self._num_places)
        with theirs, contextlib.suppress(OSError):  # it is dying: the launch will see that nobody is at `ours`
            for position, number in enumerate(numbers, 1):
                socket.send_fds(self._desk, [f"{number} {len(numbers) - position}".encode()], [number])
        return ForkedServer(self._process, self._desk), wire.Channel(ours)

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._desk.close()
            wait_or_kill(self._process)
            self._process = None


class ForkedServer:
    """The fork server of one launch that a kept one has forked; what it has in common with a Popen."""

    def __init__(self, parent: subprocess.Popen[bytes], desk: socket.socket) -> None:
        self.pid = parent.pid
        """Of its parent: whoever descends from the one descends from the other."""
        self.returncode: int | None = None
        self._parent = parent
        self._desk = desk

    def wait(self, timeout: float = -1.0) -> int:
        """How it ended, or where nobody knows how its parent did. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not wire.wait_readable(self._desk, timeout):
                raise subprocess.TimeoutExpired("the fork server", timeout)
            said = b""
            with contextlib.suppress(OSError):
                said = self._desk.recv(16)
            self.returncode = int(said) if said else self._parent.wait()
        return self.returncode

    def kill(self) -> None:
        """Kill it, its parent and whatever they have started."""
        for pid in (self.pid, *descendants_of(self.pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


ForkServer = subprocess.Popen[bytes] | ForkedServer


def wait_or_kill(process: ForkServer) -> None:
    """Wait for the end of a process whose socket was closed, and kill it if it takes too long."""
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def forkserver_ended(process: ForkServer) -> PrismError:
    """Its socket closes a little before its end can be seen."""
    how, hint = "but still runs", None
    with contextlib.suppress(subprocess.TimeoutExpired):
        how, hint = _how_ended(process.wait(GRACE_S))
    return RunError(f"the fork server, the process that starts ranks, ended unexpectedly ({how})", hint=hint)


class HelperKilledError(RunError):
    """A process that ranks depend on was killed: that explains what breaks off in ranks."""


def ended_early(name: str, code: int) -> PrismError:
    """A process that ranks depend on is gone."""
    how, hint = _how_ended(code)
    return (HelperKilledError if code < 0 else RunError)(f"{name} ended before the ranks did ({how})", hint=hint)


def _how_ended(code: int) -> tuple[str, str | None]:
    """How, and what to do about it."""
    how = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return how, "memory may have run out: run fewer ranks at once" if code == -signal.SIGKILL else None
