"""Decides whose device memory leaves the device, where it goes and when it comes back.

Responsible for the requests of all ranks and for the account of the host's memory; it opens no GPU, and the copying is
done in the ranks, which answer.  Who may run is the coordinator's.

Nothing moves before somebody needs the room: a rank that allocates, one that is to go on and is away, or one that is to
start.  Requests of a device are served one after the other.  The ranks ask the driver, and say what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prism_sdk.errors import PrismError, RunError
from prism_sdk.runtime.oncuda.paging.ahead import Ahead
from prism_sdk.runtime.oncuda.paging.choosing import victim, will_park
from prism_sdk.runtime.oncuda.paging.hostpool import HostPool
from prism_sdk.runtime.oncuda.paging.links import IN, MOVED, NEED, NO_DEVICE_MEMORY, OUT, READY, ROOM, Link, Message
from prism_sdk.runtime.oncuda.paging.placing import find_place, find_room_beside
from prism_sdk.runtime.oncuda.paging.tenants import (
    IN_HOST_MEMORY,
    ON_DISK,
    RESIDENT,
    Request,
    Suspension,
    Tally,
    Tenant,
    Want,
)  # fmt: skip

__all__ = ["Pager"]

_PATIENCE_NS = 1_000_000_000  # a rank that is out waits so long for others that could run without it
_SLACK_BYTES = 1 << 28  # more than a restoration of a process needs beside what it had
_MAX_TRIES = 64  # of one request, each with something moved away before
_NO_HOST_MEMORY = "the host has no memory for it"


class Pager:
    """All ranks and devices of one recording."""

    def __init__(
        self, *, fail: Callable[[PrismError], None], resumed: Callable[[], None],
        refused: Callable[[Request, str], PrismError], pool: Callable[[], HostPool], room_in_host: Callable[[], int],
        has_disk: Callable[[], bool] = lambda: False, suspension: Suspension | None = None,
        ahead_bytes: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """`fail` ends the launch, with what `refused` makes of a request and of why nothing more could be moved.

        `resumed` is called when somebody can run now, `room_in_host` says how many bytes `pool` may grow,
        `has_disk` whether there is one beside; `ahead_bytes` how much of it may be taken before it is needed;
        `suspension` takes whole processes off, once no pages are left to move.
        """
        self._fail, self._resumed, self._refused = fail, resumed, refused
        self._pool, self._room_in_host, self._has_disk = pool, room_in_host, has_disk
        self._tenants: dict[int, Tenant] = {}
        self._requests: dict[int, list[Request]] = {}  # device -> served first to last
        self._busy: dict[int, int] = {}  # device -> the rank whose memory is moving
        self._moving_for: dict[int, Request] = {}  # device -> on whose behalf
        self._started: set[int] = set()  # ranks for which there is room to start
        self._counter = 0
        self.out_bytes = {IN_HOST_MEMORY: 0, ON_DISK: 0}
        """What is away from the devices now."""
        self.tally = Tally()
        self.why_not = ""
        self._suspension = suspension
        self._ahead = Ahead(
            ahead_bytes, pool=pool, room_in_host=room_in_host,
            free_bytes=lambda device: None if suspension is None else suspension.free_bytes(device),
        )  # fmt: skip

    # -- what ranks do ------------------------------------------------------------------------------------------------

    def attach(self, rank: int, link: Link) -> None:
        """The rank's thread for moves is there."""
        self._tenant(rank).link = link
        for message in link.whole():
            self.heard(rank, message)

    def holds(self, rank: int, device: int, num_bytes: int, *, stays: bool = False) -> None:
        """The rank says how much of its memory can be moved, and whether its threads forbid it for now."""
        tenant = self._tenant(rank)
        tenant.device, tenant.stays = device, stays
        if tenant.where == RESIDENT:
            tenant.num_bytes = num_bytes

    def parked(self, rank: int) -> None:
        """The rank waits and uses its device no more."""
        tenant = self._tenant(rank)
        self._counter += 1
        tenant.parked_as, tenant.ready_as = self._counter, 0
        self._advance(tenant.device)
        self._ahead.look(tenant.device, self._tenants.values())

    def ready(self, rank: int) -> None:
        """The rank could go on."""
        self._counter += 1
        self._tenant(rank).ready_as = self._counter

    def runs(self, rank: int) -> None:
        """The rank goes on."""
        tenant = self._tenant(rank)
        tenant.parked_as = tenant.ready_as = 0

    def ended(self, rank: int) -> None:
        """The rank's process is gone, and what it held with it."""
        tenant = self._tenants.pop(rank, None)
        self._ahead.ended(rank)
        if tenant is None:
            return
        self._pool().free(rank)
        if tenant.where in self.out_bytes:
            self.out_bytes[tenant.where] -= tenant.num_bytes
        if tenant.is_suspended:
            self.out_bytes[IN_HOST_MEMORY] -= tenant.kept_bytes
        for device in list(self._requests):
            self._requests[device] = [request for request in self._requests[device] if request.rank != rank]
        if self._busy.get(tenant.device) == rank:
            del self._busy[tenant.device]
        self._advance(tenant.device)

    def detach(self, rank: int) -> None:
        """The connection is gone; the process will be."""
        if rank in self._tenants:
            self._tenants[rank].link = None

    # -- what the coordinator wants -----------------------------------------------------------------------------------

    def is_in(self, rank: int) -> bool:
        """Whether the rank could go on at once."""
        tenant = self._tenants.get(rank)
        return tenant is None or tenant.is_there

    def bring(self, ranks: Iterable[int]) -> None:
        """These are to go on, the first of a device first; one of each device is on its way at a time."""
        for rank in ranks:
            tenant = self._tenants.get(rank)
            if tenant is None or tenant.is_there:
                continue
            waiting = self._requests.get(tenant.device, [])
            if not any(request.want is Want.RETURN for request in waiting):
                self._queue(Request(rank, Want.RETURN, tenant.device, 0))

    def may_start(self, rank: int, device: int, missing_bytes: int) -> bool:
        """Whether a rank that is not there yet may start; else room is made first, and `resumed` called."""
        if missing_bytes <= 0 or rank in self._started:
            return True
        if not any(request.rank == rank for request in self._requests.get(device, [])):
            self._queue(Request(rank, Want.START, device, missing_bytes))
        return rank in self._started

    def away_bytes(self, device: int) -> int:
        """What ranks of a device have elsewhere."""
        return sum(t.num_bytes for t in list(self._tenants.values()) if t.device == device and t.where != RESIDENT)

    def movable_bytes(self, rank: int) -> int:
        """What of a rank's memory can be moved, wherever it is."""
        tenant = self._tenants.get(rank)
        return 0 if tenant is None else tenant.num_bytes

    def num_away(self) -> int:
        """Ranks whose memory is elsewhere."""
        return sum(tenant.where != RESIDENT or tenant.is_suspended for tenant in list(self._tenants.values()))

    def tick(self) -> None:
        """Time has passed: requests that were patient may not be any more."""
        for device in list(self._requests):
            self._advance(device)

    # -- messages -----------------------------------------------------------------------------------------------------

    def heard(self, rank: int, message: Message) -> None:
        """The rank's thread for moves has said something."""
        tenant = self._tenant(rank)
        if message.kind == NEED:
            if tenant.where == RESIDENT:
                tenant.num_bytes = message.copy_ns
            self._queue(Request(rank, Want.ALLOCATE, tenant.device, message.num_bytes))
        elif message.kind == MOVED:
            tenant.is_moving = False
            self._busy.pop(tenant.device, None)
            (self._left if message.argument == OUT else self._came)(tenant, message)
            self._advance(tenant.device)
        elif message.kind == READY:
            self.tally.ahead_bytes += message.fresh_bytes
            self._ahead.ended(rank)
            self._ahead.look(tenant.device, self._tenants.values())

    def _left(self, tenant: Tenant, message: Message) -> None:
        if why := message.why_it_stays:
            self._pool().free(tenant.rank)
            tenant.stays, self.why_not = message.num_bytes <= tenant.num_bytes, why  # else it has more than it had said
            tenant.num_bytes = max(tenant.num_bytes, message.num_bytes)
            return
        if message.status:
            self._fail(message.error(tenant.rank))
            return
        tenant.num_bytes = message.num_bytes
        if not message.num_bytes:
            return  # there was nothing
        tenant.where = tenant.goes_to
        self.out_bytes[tenant.where] += message.num_bytes
        self.tally.add("out", message)
        self._moving_for[tenant.device].missing_bytes -= message.num_bytes

    def _came(self, tenant: Tenant, message: Message) -> None:
        waiting = self._requests.get(tenant.device, [])
        request = next((request for request in waiting if request.rank == tenant.rank), None)
        if message.status == NO_DEVICE_MEMORY:
            if request is not None:
                request.missing_bytes = message.num_bytes
            return
        if message.status:
            self._fail(message.error(tenant.rank))
            return
        self.out_bytes[tenant.where] -= message.num_bytes
        self._pool().free(tenant.rank)
        tenant.where = RESIDENT
        self.tally.add("back", message)
        if request is not None and request.want is Want.RETURN:
            waiting.remove(request)
            self._resumed()

    # -- serving requests ---------------------------------------------------------------------------------------------

    def _tenant(self, rank: int) -> Tenant:
        return self._tenants.setdefault(rank, Tenant(rank))

    def _queue(self, request: Request) -> None:
        """Those that run come first: what is to return may be waiting for them to park."""
        waiting = self._requests.setdefault(request.device, [])
        waiting.append(request)
        waiting.sort(key=lambda one: one.want is Want.RETURN)
        self._advance(request.device)

    def _advance(self, device: int) -> None:
        """Do the next thing for the first request of a device, until something has to be waited for."""
        while device not in self._busy and self._requests.get(device):
            request = self._requests[device][0]
            if not self._step(request):
                return

    def _step(self, request: Request) -> bool:
        """Whether anything was done without waiting."""
        if request.missing_bytes <= 0:
            return self._grant(request)
        request.num_tries += 1
        self._ahead.is_short(request.device)
        leaving = self._victim(request) if request.num_tries <= _MAX_TRIES else None
        if leaving is not None:
            return self._move(leaving, OUT, leaving.goes_to, request)
        if self._somebody_will_park(request):
            request.num_tries -= 1
            return False
        tenant = self._tenants.get(request.rank)
        if tenant is not None and tenant.where != RESIDENT and not request.takes_reserve and not tenant.is_suspended:
            request.takes_reserve = True
            return self._move(tenant, IN, 1, request)
        if self._suspend_one(request):
            return True
        self._requests[request.device].remove(request)
        if request.want is Want.ALLOCATE and tenant is not None and tenant.where == RESIDENT:
            assert tenant.link is not None
            tenant.link.send(ROOM, 0)  # the program gets its error
        else:
            self._fail(self._refused(request, self.why_not))
        return True

    def _grant(self, request: Request) -> bool:
        tenant = self._tenants.get(request.rank)
        if request.want is Want.START:
            self._requests[request.device].remove(request)
            self._started.add(request.rank)
            self._resumed()
            return True
        assert tenant is not None
        if tenant.is_suspended:
            return self._resume(tenant, request)
        if tenant.where != RESIDENT:
            return self._move(tenant, IN, int(request.takes_reserve), request)
        self._requests[request.device].remove(request)
        if request.want is Want.RETURN:
            self._resumed()
        elif tenant.link is not None:
            tenant.link.send(ROOM, 1)
        return True

    def _move(self, tenant: Tenant, kind: int, argument: int, request: Request) -> bool:
        if tenant.link is None:
            return False  # it is ending
        tenant.is_moving = True
        self._moving_for[tenant.device] = request
        self._busy[tenant.device] = tenant.rank
        tenant.link.send(kind, argument)
        return True

    # -- whole processes ----------------------------------------------------------------------------------------------

    def _suspend_one(self, request: Request) -> bool:
        """Begin to take a process that waits off the device; False: there is none, or it cannot be done here."""
        way = self._suspension
        if way is None or way.free_bytes(request.device) is None or request.num_tries > _MAX_TRIES:
            return False
        others = [
            tenant for tenant in self._tenants.values()
            if tenant.device == request.device and tenant.rank != request.rank and tenant.parked_as
            and not tenant.is_suspended and not tenant.is_moving and way.kept_bytes(tenant.rank) > 0
        ]  # fmt: skip
        tenant = min(others, key=lambda one: (one.ready_as > 0, one.parked_as), default=None)
        if tenant is None:
            return False
        on_device = tenant.num_bytes if tenant.where == RESIDENT else 0  # what stays goes along
        tenant.kept_bytes = way.kept_bytes(tenant.rank) + on_device
        if not find_room_beside(
            tenant.kept_bytes, self._tenants.values(), pool=self._pool(), room_in_host=self._room_in_host
        ):
            self.why_not = _NO_HOST_MEMORY
            return False

        def done(code: int) -> None:
            if not self._settle(tenant):
                return
            if code:
                self.why_not = f"the driver cannot suspend a process (error {code})"
                self._suspension = None
            else:
                tenant.is_suspended = True
                self.tally.num_suspended += 1
                self.out_bytes[IN_HOST_MEMORY] += tenant.kept_bytes
                request.missing_bytes -= tenant.kept_bytes
            self._advance(tenant.device)

        self._order(tenant, "out", done)
        return True

    def _resume(self, tenant: Tenant, request: Request) -> bool:
        """A restoration that finds no room never ends: so look first."""
        way = self._suspension
        assert way is not None
        free, needed = way.free_bytes(tenant.device), tenant.kept_bytes + min(tenant.kept_bytes, _SLACK_BYTES)
        if free is not None and free < needed:
            request.missing_bytes = needed - free
            return True

        def done(code: int) -> None:
            if not self._settle(tenant):
                return
            if code:
                text = f"rank {tenant.rank}: its process cannot be brought back to the device (driver's error {code})"
                self._fail(RunError(text, rank=tenant.rank, hint="record on more GPUs, or fewer ranks"))
                return
            tenant.is_suspended = False
            self.out_bytes[IN_HOST_MEMORY] -= tenant.kept_bytes
            self._advance(tenant.device)

        self._order(tenant, "in", done)
        return True

    def _order(self, tenant: Tenant, what: str, done: Callable[[int], None]) -> None:
        assert self._suspension is not None
        tenant.is_moving = True
        self._busy[tenant.device] = tenant.rank
        self._suspension.order(what, tenant.rank, done)

    def _settle(self, tenant: Tenant) -> bool:
        """Whether the rank is still there."""
        tenant.is_moving = False
        is_there = self._tenants.get(tenant.rank) is tenant
        return is_there and self._busy.pop(tenant.device, None) is not None

    def _victim(self, request: Request) -> Tenant | None:
        """Whose memory goes, with where it goes decided; None: nobody's, or there is no room for it anywhere."""
        found = victim(request, self._tenants.values(), self._stuck(request), patience_ns=_PATIENCE_NS)
        return None if found is None else self._placed(found)

    def _somebody_will_park(self, request: Request) -> bool:
        return will_park(request, self._tenants.values(), self._stuck(request), patience_ns=_PATIENCE_NS)

    def _stuck(self, request: Request) -> set[int]:
        """Ranks of the device that are blocked in an allocation."""
        return {other.rank for other in self._requests[request.device] if other.want is Want.ALLOCATE}

    def _placed(self, tenant: Tenant) -> Tenant | None:
        """The same, after it was decided where it goes; None: there is no room for it anywhere."""
        if find_place(tenant, self._tenants.values(), pool=self._pool(), room_in_host=self._room_in_host):
            tenant.goes_to = IN_HOST_MEMORY
            return tenant
        self.why_not, tenant.goes_to = _NO_HOST_MEMORY, ON_DISK
        return tenant if self._has_disk() else None

    @property
    def host_bytes(self) -> int:
        """Host memory that is taken: by the pool, and by processes that are away as a whole."""
        suspended = sum(tenant.kept_bytes for tenant in list(self._tenants.values()) if tenant.is_suspended)
        return self._pool().held_bytes + suspended
