"""Framed messages between a rank and the launcher over a local socket.

Responsible for connecting, framing and peer checks; it knows nothing of what the messages mean.

A frame is a little-endian u32 length followed by a pickled tuple.  Both ends are processes of one user on one machine
(the listening side checks the peer's uid), so pickle is safe here and is the fastest codec for small tuples.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from collections import deque
from typing import Any

from prism_sdk.errors import PrismError

_LENGTH = struct.Struct("<I")
_PEER_CREDENTIALS = struct.Struct("3i")
MAX_FRAME_BYTES = 1 << 30


class ChannelClosed(PrismError):
    """The other end of a channel is gone."""


class Channel:
    """Blocking, framed connection; one reader and any number of serialised writers."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send one message. Raises ChannelClosed when the peer is gone."""
        body = pickle.dumps(message, protocol=5)
        try:
            self.sock.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed(f"cannot send {message[0]!r}: {error}") from None

    def receive(self) -> tuple[Any, ...]:
        """Block until one message is there."""
        while True:
            message = self._take()
            if message is not None:
                return message
            self._fill()

    def receive_ready(self) -> list[tuple[Any, ...]]:
        """Read once (the socket must be readable); returns every whole message. Raises ChannelClosed at end of file."""
        self._fill()
        return self.take_ready()

    def take_ready(self) -> list[tuple[Any, ...]]:
        """Every whole message that was read already."""
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def _fill(self) -> None:
        try:
            data = self.sock.recv(1 << 18)
        except OSError as error:
            raise ChannelClosed(f"cannot receive: {error}") from None
        if not data:
            raise ChannelClosed("the other end closed the connection")
        self._buffer += data

    def _take(self) -> tuple[Any, ...] | None:
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if length > MAX_FRAME_BYTES:
            raise ChannelClosed(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        if len(buffer) < 4 + length:
            return None
        message: tuple[Any, ...] = pickle.loads(memoryview(buffer)[4 : 4 + length])
        del buffer[: 4 + length]
        return message

    def rest(self) -> bytes:
        """What has been read and is no whole message, for somebody who reads on in another way."""
        return bytes(self._buffer)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()


class OutboundQueue:
    """Non-blocking sending side for the coordinator: what a slow peer cannot take yet is kept, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending: deque[memoryview] = deque()

    def send(self, message: tuple[Any, ...]) -> bool:
        """Queue one message and push what fits. Returns True when everything is out."""
        body = pickle.dumps(message, protocol=5)
        self._pending.append(memoryview(_LENGTH.pack(len(body)) + body))
        return self.flush()

    def flush(self) -> bool:
        while self._pending:
            head = self._pending[0]
            try:
                sent = self.sock.send(head, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._pending.clear()  # the reading side reports the loss of the peer
                return True
            if sent == len(head):
                self._pending.popleft()
            else:
                self._pending[0] = head[sent:]
        return True


def listen(token: str) -> socket.socket:
    """Listen on an abstract address: it leaves no file behind, however the process ends."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0prism-{token}")
    server.listen(4096)
    return server


def accept(server: socket.socket) -> socket.socket | None:
    """Accept one connection; None when the peer belongs to another user."""
    sock, _ = server.accept()
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _pid, uid, _gid = _PEER_CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        sock.close()
        return None
    return sock


def connect(token: str) -> Channel:
    """Connect to the launcher that listens under `token`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0prism-{token}")
    except OSError as error:
        sock.close()
        raise ChannelClosed(f"cannot reach the launcher: {error}") from None
    return Channel(sock)


def wait_readable(sock: socket.socket, timeout_s: float) -> bool:
    """True when `sock` has something to read within `timeout_s` seconds."""
    poll = select.poll()  # select() refuses descriptors from 1,024 up
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
