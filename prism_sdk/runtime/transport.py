"""Moves bytes between the sandbox ranks of a group and the assistant that plays its virtual members.

Responsible for the transport behind a small interface: whoever can send and receive tensors in order can take gloo's
place. What is sent when is prism_sdk.pruning's.

A *reduced communicator* has the k sandbox members of a group at positions 0 to k - 1, and the assistant at k. Only
groups that overlap the sandbox get one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from prism_sdk.pruning import Pending

_kept: list[object] = []  # their destructors join threads, which may wait for the interpreter's lock that we hold
_TIMEOUT = timedelta(minutes=30)


class Transport(ABC):
    """A reduced communicator. Messages between two positions keep their order on each lane."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, position: int, lane: int) -> Pending:
        """Start to send a contiguous tensor."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, position: int, lane: int) -> Pending:
        """Start to receive into a contiguous tensor."""


class GlooTransport(Transport):
    """Point-to-point messages of a gloo process group over the loopback interface; a lane is a gloo tag."""

    def __init__(self, folder: Path, name: str, *, position: int, size: int) -> None:
        """Connect with the other positions, which do the same; they meet in a file in `folder`."""
        from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo

        gloo: Any = ProcessGroupGloo  # torch's stubs lack most of it
        store = PrefixStore(name, FileStore(str(folder / f"meet-{name}"), -1))
        store.set_timeout(_TIMEOUT)
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout, options._threads = _TIMEOUT, 1
        self._group = gloo(store, position, size, options)
        _kept.append(self._group)

    def send(self, tensor: torch.Tensor, position: int, lane: int) -> Pending:
        return self._group.send([tensor], position, lane)

    def receive(self, tensor: torch.Tensor, position: int, lane: int) -> Pending:
        return self._group.recv([tensor], position, lane)


class Communicator:
    """The lanes of one group over a transport (implements prism_sdk.pruning.Lanes), with a count of what passes."""

    def __init__(self, transport: Transport, ranks: Sequence[int], sandbox: Sequence[int]) -> None:
        """`ranks`: global ranks of the whole group; `sandbox`: all sandbox ranks."""
        self.transport = transport
        self.size = len(ranks)
        self.members = tuple(member for member, rank in enumerate(ranks) if rank in sandbox)
        self._lock = threading.Lock()
        self.num_sent = self.num_received = self.sent_bytes = self.received_bytes = 0

    def send(self, source: int, destination: int, buffer: torch.Tensor) -> Pending:
        return self.send_on(source * self.size + destination, destination, buffer)

    def receive(self, source: int, destination: int, buffer: torch.Tensor) -> Pending:
        return self.receive_on(source * self.size + destination, source, buffer)

    def send_on(self, lane: int, destination: int, buffer: torch.Tensor) -> Pending:
        """Send to a member on a lane of the caller's choice."""
        with self._lock:
            self.num_sent += 1
            self.sent_bytes += buffer.nbytes
        return self.transport.send(buffer, self._position(destination), lane)

    def receive_on(self, lane: int, source: int, buffer: torch.Tensor) -> Pending:
        """Receive from a member on a lane of the caller's choice."""
        with self._lock:
            self.num_received += 1
            self.received_bytes += buffer.nbytes
        return self.transport.receive(buffer, self._position(source), lane)

    def message_lane(self, number: int) -> int:
        """The lane of the messages that a sandbox rank gave `number`; apart from those of collectives."""
        return self.size * self.size + number

    def _position(self, member: int) -> int:
        return self.members.index(member) if member in self.members else len(self.members)
