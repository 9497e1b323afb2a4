"""The launcher's end of the talk with the thread of a rank that moves its device memory (service.c).

Responsible for messages as bytes; what is said when is pager.py's.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass

__all__ = ["IN", "Link", "MOVED", "Message", "NEED", "OUT", "ROOM"]

OUT, IN, NEED, MOVED, ROOM = 1, 2, 3, 4, 5
_MESSAGE = struct.Struct("=IIIIQQQ")


@dataclass(frozen=True)
class Message:
    """One message of pages.h's `Message`: what, of what, how it ended, bytes moved or missing, nanoseconds."""

    kind: int
    argument: int = 0
    status: int = 0
    code: int = 0
    num_bytes: int = 0
    copy_ns: int = 0
    total_ns: int = 0


class Link:
    """A connection to one rank. Messages are few and small: sending never blocks for long."""

    def __init__(self, sock: socket.socket, begun: bytes = b"") -> None:
        self.sock = sock
        self._buffer = bytearray(begun)

    def send(self, kind: int, argument: int = 0) -> None:
        """Say it; a rank that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.sock.sendall(_MESSAGE.pack(kind, argument, 0, 0, 0, 0, 0))

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
