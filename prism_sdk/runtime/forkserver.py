"""Forks rank processes from a process that has torch loaded.

Responsible for forking on request and reporting exits; what is ready before a fork is preload.py's, what runs inside a
rank agent.py's.

A forked rank shares the pages of the imported libraries: 11 MiB of private memory in place of 214, and no import time.
It ends when the launcher's end of the socket closes, and takes along whatever the ranks had started, unless it is told
that the program has ended well.

Where launches follow each other, the process that has loaded torch stays, and forks the server of each launch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time

from prism_sdk.runtime import preload
from prism_sdk.runtime.leftovers import Descendants
from prism_sdk.runtime.parents import adopt_orphans, die_with_parent
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.wire import Channel, ChannelClosed

_CLEANERS_S = 2.0  # what the cleaners get; they need milliseconds

# processes that remove the semaphores and the shared memory of others once these are gone; killed, they leave them
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def main(argv: list[str]) -> int:
    """Serve the launch at the socket argv[0]; with argv[1] not 0 all launches that are sent there, one after another.

    Descriptors of those have numbers below argv[1] in the launcher, and here.
    """
    sock, num_places = socket.socket(fileno=int(argv[0])), int(argv[1])
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    places = []
    while (place := os.dup(sock.fileno())) < num_places:  # what imports open stays above
        places.append(place)
    os.close(place)
    failure = ""
    try:
        if argv[2]:
            from prism_sdk.runtime.oncuda.paging import library

            library.preload(argv[2])
        preload.prepare(argv[4:], [name for name in argv[3].split(",") if name])
    except Exception as error:  # reported as a message, because the launcher must name it
        failure = f"{type(error).__name__}: {error}"
    for place in places:
        os.close(place)
    if num_places:
        launch = _next_launch(sock)
        if launch is not None:
            if not failure:
                preload.reseed()
            os._exit(_serve_launch(launch, failure))
    elif _serve_launch(sock, failure):
        return 1
    preload.undo()
    return 0


def _next_launch(desk: socket.socket) -> socket.socket | None:
    """Fork a process for each launch that is sent. Returns the launch's socket there; None here, after the last one."""
    while descriptors := _receive(desk):
        pid = os.fork()
        if not pid:
            desk.close()
            return _place(descriptors)
        for fd in descriptors.values():
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            desk.send(str(os.waitstatus_to_exitcode(status)).encode())
    return None


def _receive(desk: socket.socket) -> dict[int, int]:
    """The descriptors of a launch, the last of them its socket: number there -> number here; none: no launch comes."""
    found, left = {}, 1
    while left:
        try:
            said, (fd,), _, _ = socket.recv_fds(desk, 32, 1)
        except (OSError, ValueError):
            return {}
        number, left = map(int, said.split())
        found[number] = fd
    return found


def _place(descriptors: dict[int, int]) -> socket.socket:
    """Give the descriptors the numbers that they have in the launcher; the last is returned as a socket."""
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, max(descriptors) + 1) for number, fd in descriptors.items()}
    for fd in descriptors.values():
        os.close(fd)
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)
    return socket.socket(fileno=number)


def _serve_launch(sock: socket.socket, failure: str) -> int:
    """Serve one launch to its end, and clean up after it. Returns the exit status."""
    channel = Channel(sock)
    if failure:
        channel.send(("failed", failure))
        return 1
    descendants = Descendants()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    adopt_orphans()
    descendants.follow_forks()
    die_with_parent(signal_number=0)  # from here on the closed socket tells, and there is something to clean up
    try:
        channel.send(("ready", os.getpid()))
        _serve(channel, wake_read, wake_write, descendants)
    except ChannelClosed:
        kill_descendants(descendants)
    if _is_alone(channel, descendants):  # else they may still open what another has left for them
        descendants.remove_shared_memory()
    return 0


def _serve(channel: Channel, wake_read: int, wake_write: int, known: Descendants) -> None:
    """Fork and reap until told to leave. Raises ChannelClosed when the launcher is gone or has given up."""
    ranks: dict[int, int] = {}  # pid -> rank
    while True:
        readable = select.select([channel.fileno(), wake_read], [], [])[0]
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(channel, ranks, known)
        if channel.fileno() not in readable:
            continue
        for message in channel.receive_ready():
            if message[0] == "leave":
                return
            if message[0] == "known":
                known.add(message[1])
                continue
            _fork(channel, message[1], ranks, (wake_read, wake_write))


def _fork(channel: Channel, spec: RankSpec, ranks: dict[int, int], wake: tuple[int, int]) -> None:
    """Fork one rank. In the child it does not return."""
    try:
        pid = os.fork()
    except OSError as error:
        channel.send(("fork_failed", spec.rank, str(error)))
        return
    if pid:
        ranks[pid] = spec.rank
        channel.send(("forked", spec.rank, pid))
        return
    die_with_parent()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the launcher alone
    channel.close()
    for fd in wake:
        os.close(fd)
    from prism_sdk.runtime import agent

    agent.run_rank(spec)


def kill_descendants(known: Descendants) -> None:
    """Kill every process that descends from this one, and wait until they are gone; the cleaners last."""
    patience = time.monotonic() + _CLEANERS_S
    for _ in range(1000):  # a process may fork while we look
        found = descendants_of(os.getpid())
        if not found:
            return
        known.add(found)
        spared = [pid for pid in found if time.monotonic() < patience and _is_leaving(pid)]
        for pid in found:
            if pid not in spared:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _is_alone(channel: Channel, known: Descendants) -> bool:
    """Whether no process of the launch is left; cleaners and what has just died get the time to go."""
    patience = time.monotonic() + _CLEANERS_S
    while True:
        _reap(channel, {}, known)
        found = descendants_of(os.getpid())
        if not found or time.monotonic() > patience or not all(_is_leaving(pid) for pid in found):
            return not found
        time.sleep(0.01)


def _is_leaving(pid: int) -> bool:
    """Whether a process is dead, or a cleaner, which ends once it has nobody left to clean up after."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
    except OSError:
        return True
    return not line or any(name in line for name in _CLEANERS)


def descendants_of(pid: int) -> list[int]:
    """The processes that descend from `pid` now, dead ones that nobody has reaped included."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found + [deeper for child in found for deeper in descendants_of(child)]


def _reap(channel: Channel, ranks: dict[int, int], known: Descendants) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        known.add([pid])
        rank = ranks.pop(pid, None)
        if rank is not None:
            with contextlib.suppress(ChannelClosed):
                channel.send(("exited", rank, status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
