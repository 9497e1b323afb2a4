"""The launcher's end of the talk with the thread of a rank that moves its device memory (service.c).

Responsible for messages as bytes; what is said when is pager.py's.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass

from prism_sdk.errors import RunError

__all__ = ["IN", "Link", "MOVED", "Message", "NEED", "NO_DEVICE_MEMORY", "OUT", "PREPARE", "READY", "ROOM"]

OUT, IN, NEED, MOVED, ROOM, PREPARE, READY = range(1, 8)
NO_DEVICE_MEMORY, _NO_HOST_MEMORY, _NO_DISK, _NOT_NOW = 1, 2, 3, 5  # how moves end: pages.h
_MESSAGE = struct.Struct("=IIIIQQQQ")


@dataclass(frozen=True)
class Message:
    """One message of pages.h's `Message`: what, of what, how it ended, bytes moved or missing, times, fresh bytes."""

    kind: int
    argument: int = 0
    status: int = 0
    code: int = 0
    num_bytes: int = 0
    copy_ns: int = 0
    total_ns: int = 0
    fresh_bytes: int = 0

    @property
    def why_it_stays(self) -> str:
        """Of a move away that could not begin: the reason; else empty."""
        return {
            _NO_HOST_MEMORY: "the host has no memory for it",
            _NO_DISK: f"the disk has no room for it (error {self.code})",
            _NOT_NOW: "threads of the program may use it",
        }.get(self.status, "")

    def error(self, rank: int) -> RunError:
        """Of a move that broke."""
        what = "moving its device memory away" if self.argument == OUT else "bringing its device memory back"
        return RunError(
            f"rank {rank}: {what} failed with error {self.code} (status {self.status})", rank=rank,
            hint="an error of the program's own on the device shows here first; else record with --parked-memory 0",
        )  # fmt: skip


class Link:
    """A connection to one rank. Messages are few and small: sending never blocks for long."""

    def __init__(self, sock: socket.socket, begun: bytes = b"") -> None:
        self.sock = sock
        self._buffer = bytearray(begun)

    def send(self, kind: int, argument: int = 0) -> None:
        """Say it; a rank that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.sock.sendall(_MESSAGE.pack(kind, argument, 0, 0, 0, 0, 0, 0))

    def receive(self) -> list[Message] | None:
        """What has come; None: the other end is gone."""
        try:
            data = self.sock.recv(1 << 12)
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        return self.whole()

    def whole(self) -> list[Message]:
        """The whole messages among what has come."""
        found = []
        while len(self._buffer) >= _MESSAGE.size:
            found.append(Message(*_MESSAGE.unpack_from(self._buffer)))
            del self._buffer[: _MESSAGE.size]
        return found
