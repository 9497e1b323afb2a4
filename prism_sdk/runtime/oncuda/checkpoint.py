"""Takes whole processes off their devices by the driver's own checkpoint, and puts them back.

Responsible for a helper process that has the driver open and for the talk with it: opening the driver takes seconds,
and the launcher has no business with it.  Which process leaves when is paging/pager.py's.

A process that waits is locked, its device memory goes to memory of its own on the host, and its context with it.  It
needs a driver of 570 or later.  A restoration that finds no room on the device never ends, so the caller looks first.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
import sys
from collections.abc import Callable

from prism_sdk.runtime.oncuda.driver import libcuda

__all__ = ["Checkpointer", "main"]

_CODE = "import sys; from prism_sdk.runtime.oncuda.checkpoint import main; sys.exit(main(int(sys.argv[1])))"
_LOCK_TIMEOUT_MS = 10_000
_NO_DRIVER = -1


class Checkpointer:
    """The launcher's end. Orders are answered in their order; the helper is started with the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._waiting: list[Callable[[int], None]] = []
        self._buffer = b""

    def order(self, what: str, pid: int, then: Callable[[int], None]) -> socket.socket | None:
        """Say `out` or `in` of a process; `then` gets 0 or the driver's error. Returns a new socket to watch."""
        started = None
        if self._sock is None:
            ours, theirs = socket.socketpair()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            theirs.close()
            self._sock = started = ours
        self._waiting.append(then)
        with contextlib.suppress(OSError):
            self._sock.sendall(f"{what} {pid}\n".encode())
        return started

    def hear(self) -> None:
        """There is something to read."""
        assert self._sock is not None
        try:
            data = self._sock.recv(4096)
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        codes = [int(line) for line in lines] if data else [_NO_DRIVER] * len(self._waiting)
        for code in codes:
            self._waiting.pop(0)(code)
        if not data:
            self.close()

    @property
    def sock(self) -> socket.socket | None:
        """What is watched, once there is a helper."""
        return self._sock

    def close(self) -> None:
        """End the helper."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


class _LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs: 64 bytes."""

    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_ubyte * 60)]


def main(fd: int) -> int:
    """The helper: one line an order, one line an answer, until the launcher closes the connection."""
    with socket.socket(fileno=fd) as sock, sock.makefile("r") as orders:
        driver = _driver()
        for line in orders:
            what, pid = line.split()
            code = _NO_DRIVER if driver is None else _carry_out(driver, what, int(pid))
            sock.sendall(f"{code}\n".encode())
    return 0


def _driver() -> ctypes.CDLL | None:
    with contextlib.suppress(OSError, AttributeError):
        driver = libcuda()
        driver.cuCheckpointProcessLock  # noqa: B018 - older drivers do not have it
        if driver.cuInit(0) == 0:
            return driver
    return None


def _carry_out(driver: ctypes.CDLL, what: str, pid: int) -> int:
    arguments = (ctypes.c_ubyte * 64)()  # of the other calls: reserved
    if what == "in":
        return int(
            driver.cuCheckpointProcessRestore(pid, arguments) or driver.cuCheckpointProcessUnlock(pid, arguments)
        )
    lock = _LockArguments(_LOCK_TIMEOUT_MS)
    code = int(driver.cuCheckpointProcessLock(pid, ctypes.byref(lock)))
    if code:
        return code
    code = int(driver.cuCheckpointProcessCheckpoint(pid, arguments))
    if code:
        driver.cuCheckpointProcessUnlock(pid, arguments)
    return code
