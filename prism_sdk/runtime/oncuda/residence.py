"""Keeps track of which ranks' memory is on which device, for the coordinator of a recording.

Responsible for bringing together what ranks report (ledger.py) and what can be moved (paging/pager.py), and for the
errors when there is no room; it schedules nobody.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prism_sdk.errors import PrismError
from prism_sdk.runtime.gauges import DeviceGauge, host_memory
from prism_sdk.runtime.oncuda.checkpoint import Checkpointer
from prism_sdk.runtime.oncuda.ledger import DeviceMemoryError, Footprint, Ledger, gib
from prism_sdk.runtime.oncuda.paging.hostpool import HostPool
from prism_sdk.runtime.oncuda.paging.links import Link
from prism_sdk.runtime.oncuda.paging.pager import Pager
from prism_sdk.runtime.oncuda.paging.tenants import Request, Suspension, Want

__all__ = ["MoveOptions", "Residence"]

_LEFT_FREE_SHARE, _LEFT_FREE_BYTES = 0.05, 2 << 30  # of the host's memory


@dataclass(frozen=True)
class MoveOptions:
    """Whether and where the memory of parked ranks may go."""

    can_move: bool = False
    host_bytes: int | None = None
    """What parked ranks may take of the host's memory; absent: all but a twentieth of it."""
    has_disk: bool = False
    ahead_bytes: int = 0
    """What of the host's memory may be taken before it is needed."""
    pool: HostPool = field(default_factory=HostPool, compare=False)
    """Of that memory."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES, as ranks have it."""


class HasPid(Protocol):
    """A rank's process."""

    pid: int


class Watching(Protocol):
    """What is needed of the host of the ranks."""

    @property
    def ranks(self) -> Mapping[int, HasPid]: ...

    def watch(self, sock: socket.socket, call: Callable[[], None]) -> None: ...

    def unwatch(self, sock: socket.socket) -> None: ...

    def fail(self, error: PrismError) -> None: ...


class Residence:
    """The devices that ranks share, as the coordinator asks for them."""

    def __init__(
        self, options: Callable[[], MoveOptions], *, host: Callable[[], Watching], resumed: Callable[[], None]
    ) -> None:
        self._options, self._host = options, host
        self._is_asking = False
        self._resumed = resumed
        self._checkpointer = Checkpointer()
        self._gauge: DeviceGauge | None = None
        self._ledger = Ledger(lambda device: self.pager.away_bytes(device))
        self._links: dict[int, Link] = {}
        self.pager = Pager(
            fail=lambda error: self._host().fail(error), resumed=self._may_go_on, refused=self._error,
            pool=lambda: self._options().pool, room_in_host=self._room_in_host,
            has_disk=lambda: self._options().has_disk, ahead_bytes=lambda: self._options().ahead_bytes,
            suspension=Suspension(self._order, self._kept_bytes, self._free_bytes),
        )  # fmt: skip

    # -- what ranks say -----------------------------------------------------------------------------------------------

    def note(self, rank: int, footprint: Footprint) -> None:
        """A rank that is about to wait has said what it holds."""
        self._ledger.note(rank, footprint)

    def attach(self, rank: int, sock: socket.socket, begun: bytes) -> None:
        """The connection about moves."""
        link = self._links[rank] = Link(sock, begun)
        self._host().watch(sock, lambda: self._hear(rank, link))
        self.pager.attach(rank, link)

    def _hear(self, rank: int, link: Link) -> None:
        messages = link.receive()
        if messages is None:
            self._drop(rank)
            self.pager.detach(rank)
            return
        for message in messages:
            self.pager.heard(rank, message)

    def _drop(self, rank: int) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            self._unwatch(link.sock)
            link.sock.close()

    def ended(self, rank: int) -> None:
        """The rank's process is gone."""
        self._drop(rank)
        self._ledger.ended(rank)
        self.pager.ended(rank)

    def close(self) -> None:
        """The launch is over."""
        for rank in list(self._links):
            self._drop(rank)
        if self._checkpointer.sock is not None:
            self._unwatch(self._checkpointer.sock)
        self._checkpointer.close()

    @property
    def is_used(self) -> bool:
        """Whether memory may be away, and ranks have to be sent for before they run."""
        return bool(self._links)

    # -- who may run --------------------------------------------------------------------------------------------------

    def first_in(self, ranks: Iterable[int]) -> int | None:
        """The first of `ranks`, which could go on, whose memory is there; if none of them, they are sent for."""
        away = []
        for rank in ranks:
            if self.pager.is_in(rank):
                found: int | None = rank
                break
            away.append(rank)
        else:
            found = None
        if away:
            self._is_asking = True
            self.pager.bring(away)
            self._is_asking = False
        return found

    def _may_go_on(self) -> None:
        if not self._is_asking:  # who asks looks at the answer
            self._resumed()

    def may_start(self, rank: int) -> bool:
        """Whether there is room for the context of a rank that has not started. Ends the launch where there cannot be.

        False: not yet; the coordinator is told when.
        """
        if not self._options().can_move:
            refusal = self._ledger.refusal(rank)
            if refusal is not None:
                self._host().fail(refusal)
            return refusal is None
        needs = self._ledger.needs_to_start(rank, self._kept_bytes)
        if needs is None:
            return True
        device, num_bytes = needs
        free = self._free_bytes(device)
        self._is_asking = True
        answer = self.pager.may_start(
            rank, device, num_bytes - (self._ledger.known(device)[0] if free is None else free)
        )
        self._is_asking = False
        return answer

    # -- whole processes ----------------------------------------------------------------------------------------------

    def _order(self, what: str, rank: int, done: Callable[[int], None]) -> None:
        host = self._host()
        started = self._checkpointer.order(what, host.ranks[rank].pid, done)
        if started is not None:
            host.watch(started, self._hear_checkpointer)

    def _hear_checkpointer(self) -> None:
        sock = self._checkpointer.sock
        self._checkpointer.hear()
        if sock is not None and self._checkpointer.sock is None:
            self._unwatch(sock)

    def _unwatch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._host().unwatch(sock)

    def _kept_bytes(self, rank: int) -> int:
        return self._ledger.kept_bytes(rank, self.pager.movable_bytes(rank))

    def _free_bytes(self, device: int) -> int | None:
        if self._gauge is None:
            self._gauge = DeviceGauge(self._options().visible_devices)
        return self._gauge.free_bytes(device)

    # -- room ---------------------------------------------------------------------------------------------------------

    def _room_in_host(self) -> int:
        budget = self._options().host_bytes
        if budget is not None:
            return budget - self.pager.host_bytes
        memory = host_memory()
        if memory is None:
            return 1 << 62
        left_free = max(_LEFT_FREE_BYTES, int(memory.total_bytes * _LEFT_FREE_SHARE))
        return memory.total_bytes - memory.used_bytes - left_free - self._options().pool.promised_bytes

    def _error(self, request: Request, why_not: str) -> PrismError:
        holders = self._ledger.ranks_on(request.device)
        beyond = self._ledger.beyond_bytes(request.device)
        reason = (
            f"{len(holders)} ranks are on it, contexts, libraries and other programs take {gib(beyond)}, "
            f"{gib(self.pager.out_bytes[1])} of the ranks' memory are in host memory and "
            f"{gib(self.pager.out_bytes[2])} on disk, and nothing more can be moved"
        )
        if why_not:
            reason += f" ({why_not})"
        free, total = self._ledger.known(request.device)
        what = {Want.START: "start", Want.RETURN: "go on", Want.ALLOCATE: "allocate"}[request.want]
        return DeviceMemoryError(
            request.rank, device=request.device, total_bytes=total, free_bytes=free,
            reason=f"to {what} it needs {gib(request.missing_bytes)} more; {reason}",
            hint="record on more GPUs, with --slots 1, by --roles, or with more room for parked ranks: "
            "--parked-memory, --parked-disk",
        )  # fmt: skip

    def report(self) -> str | None:
        """What was moved, in one line; None: nothing."""
        text = str(self.pager.tally)
        return f"device memory of parked ranks: {text}" if text else None
