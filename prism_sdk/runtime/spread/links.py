"""Connections between the machines of one recording.

Responsible for listening, for both ends proving that they know the launch's key, and for noticing a dead peer; messages
are framed by wire.py.

Messages are pickled, so nothing is read as one before the peer has proved that it knows the key. The key travels by
Ray. What follows is neither encrypted nor signed: as with Ray itself, the network between the machines is trusted.
"""

from __future__ import annotations

import hmac
import secrets
import socket

from prism_sdk.runtime.wire import Channel, ChannelClosed

KEY_BYTES = 32
_NONCE_BYTES = 32
_DIGEST = "sha256"
_ANSWER_BYTES = 32
_PATIENCE_S = 10.0  # for each step of the greeting
_CONNECT_S = 30.0
_IDLE_S, _PROBE_S, _NUM_PROBES = 10, 5, 4  # a machine without power says no goodbye


def listen(address: str) -> socket.socket:
    """Listen on a free port of `address`."""
    server = socket.create_server((address, 0), backlog=128)
    server.setblocking(False)
    return server


def accept(server: socket.socket, key: bytes) -> Channel | None:
    """Accept one connection; None when the peer does not know the key, or does not say so in time."""
    try:
        sock, _ = server.accept()
    except (BlockingIOError, ConnectionError):
        return None
    try:
        sock.settimeout(_PATIENCE_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(nonce)
        said = _exactly(sock, _ANSWER_BYTES + _NONCE_BYTES)
        if not hmac.compare_digest(said[:_ANSWER_BYTES], _proof(key, b"branch", nonce)):
            raise ChannelClosed("the peer does not know the key")
        sock.sendall(_proof(key, b"launcher", said[_ANSWER_BYTES:]))
    except (OSError, ChannelClosed):
        sock.close()
        return None
    return _ready(sock)


def connect(address: str, port: int, key: bytes) -> Channel:
    """Connect to a launcher. Raises ChannelClosed where it is not there, or does not know the key either."""
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((address, port), timeout=_CONNECT_S)
        sock.settimeout(_PATIENCE_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(_proof(key, b"branch", _exactly(sock, _NONCE_BYTES)) + nonce)
        if not hmac.compare_digest(_exactly(sock, _ANSWER_BYTES), _proof(key, b"launcher", nonce)):
            raise ChannelClosed("it does not know the key")
    except (OSError, ChannelClosed) as error:
        if sock is not None:
            sock.close()
        raise ChannelClosed(f"the launcher at {address} port {port} cannot be reached: {error}") from None
    return _ready(sock)


def _proof(key: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, side + nonce, _DIGEST)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise ChannelClosed("the other end closed the connection")
        data += more
    return data


def _ready(sock: socket.socket) -> Channel:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
    return Channel(sock)
