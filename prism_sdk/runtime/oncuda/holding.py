"""The rank's side of holding its communication streams: issues an operation on the device and never blocks the host.

Responsible for streams, events and the order of what they do; values are filling.py's, their way to the device
devicepool.py's, and the time of each release the releaser's, in a process of its own.

An operation is, on the program's stream: "arrived" written to the shared table.  On the communicator's stream (on the
program's own where the program asked for no handle, as NCCL's backend does): wait for the outputs to be filled, wait
for the release (or make a call of NCCL that ends with the release, joining.py), write "done".  A kernel that waits
writes it itself: a write behind it would hold up all streams that share its connection.  Filling comes before the
release, so that it takes none of the operation's time; nobody may look at the outputs before the end.  It has a stream
of the highest priority: its kernels would else wait for the products that the program computes meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from prism_sdk.errors import RunError, UnsupportedError
from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.engine import BoundaryEngine
from prism_sdk.runtime.manifest import Expected, Script
from prism_sdk.runtime.oncuda import holdtable as fields
from prism_sdk.runtime.oncuda.clock import Mark
from prism_sdk.runtime.oncuda.compensating import Compensator
from prism_sdk.runtime.oncuda.copying import DeviceCopier
from prism_sdk.runtime.oncuda.devicepool import DevicePool, Placed, pool_bytes_for
from prism_sdk.runtime.oncuda.driver import DeviceMemory, Driver, DriverError
from prism_sdk.runtime.oncuda.filling import (
    Compensate,
    Recorded,
    can_fill,
    fill_from,
    needs_filling,
    plain_copies,
    warm_up,
)
from prism_sdk.runtime.oncuda.holdtable import HoldTable
from prism_sdk.runtime.oncuda.joining import Joining
from prism_sdk.runtime.oncuda.occupying import MEMORY_BYTES, hold_kernel
from prism_sdk.runtime.oncuda.scratch import nccl_scratch, place_scratch
from prism_sdk.runtime.prefetch import Consumer
from prismtrace import Op

LATE_NS = 20_000
"""A release that reached its stream so much after its time counts as late."""

_NUM_LATEST = 8  # of them that are named
_POOL_BYTES = 4 << 30
_GATES_BYTES = 4 * fields.NUM_SLOTS  # a word for each operation that may be held
_READY_S = 60.0
_LAST_S = 5.0
_NOTHING = contextlib.nullcontext()


class Held:
    """An operation on its way on the device."""

    def __init__(
        self, number: int, handle: tuple[int, int], call: Call, scratch: list[torch.Tensor], posted: int
    ) -> None:
        self.number, self.handle, self.op = number, handle, call.op
        self.scratch = scratch  # what NCCL would hold until the wait
        self.placed: list[Placed] = []
        self.posted = posted
        self.end = Mark(posted)  # dated by the releaser
        self.end.event = self.end.time_ns = None
        self.is_done_event: Any = None
        self.ties = False  # the tracer's mark is right before the arrival, on the same stream


@dataclass
class HoldCounts:
    """How the operations on the device went."""

    errors_ns: array[int] = field(default_factory=lambda: array("q"))  # done less due
    issue_ns: array[int] = field(default_factory=lambda: array("q"))  # what the host took for each
    num_late: int = 0
    latest: list[tuple[int, str]] = field(default_factory=list)  # ascending
    num_differing: int = 0
    num_unpinned: int = 0
    num_on_host: int = 0


class StreamHold:
    """Holds the communication streams of one rank on one device."""

    def __init__(
        self, table: HoldTable, engine: BoundaryEngine, script: Script, source: Consumer, device: torch.device,
        options: Mapping[str, str], *, joining: Joining | None = None,
    ) -> None:  # fmt: skip
        """`joining`: makes calls of a library in place of waits. Raises RunError where the device cannot be held so."""
        self.device = device
        self._joining = joining
        self.counts = HoldCounts()
        self._table, self._engine = table, engine
        self._lock = threading.RLock()
        self._driver = driver = Driver()
        torch.cuda.current_stream(device).query()  # the context is there and current
        self._flags = driver.register(ctypes.addressof(ctypes.c_char.from_buffer(table.map)), fields.TABLE_BYTES)
        self._try_device()
        ring = source.memory()
        try:
            driver.register(ctypes.addressof(ctypes.c_char.from_buffer(ring)), len(ring))
        except DriverError:
            self.counts.num_unpinned = 1  # copies then go through the driver's own buffers
        beside = _GATES_BYTES + MEMORY_BYTES
        wanted = pool_bytes_for(script, limit=int(options.get("device_pool_bytes", _POOL_BYTES))) + beside
        try:
            address = driver.allocate(wanted)
        except DriverError:  # of a device that is nearly full
            wanted = pool_bytes_for(script, limit=0) + beside
            address = driver.allocate(wanted)
        self.pool_bytes = wanted
        whole = torch.as_tensor(DeviceMemory(address, wanted), device=device)
        gates, moved, memory = torch.split(whole, [_GATES_BYTES, MEMORY_BYTES, wanted - beside])
        gates = gates.view(torch.int32).zero_()
        warm_up(memory)
        torch.cuda.synchronize(device)  # before anything is copied there
        copier = DeviceCopier(driver, memory.data_ptr(), device)
        self.pool = DevicePool(memory, script, source, copier, reap=self.reap)
        words = torch.as_tensor(DeviceMemory(self._flags, fields.TABLE_BYTES), device=device)
        self._words = words.view(torch.int32)
        self._compensator: Compensator | None = None
        with contextlib.suppress(Exception):  # a torch that compiles no kernels: filling takes five steps then
            self._compensator = Compensator()
        is_alone = joining is None
        self._hold_kernel = hold_kernel(self._words, gates, moved, options.get("occupy")) if is_alone else None
        self._sides: dict[tuple[int, ...], tuple[Any, Any]] = {}  # of communicators
        self._seen: dict[tuple[int, int, int], Any] = {}  # the program's streams, by torch's names for them
        self._lanes: dict[int, int] = {}  # streams that arrive -> number
        self._open: deque[Held] = deque()
        self._await_releaser()

    def _try_device(self) -> None:
        """Raise RunError where a stream cannot wait for and write to the shared table."""
        address = self._flags + 4 * fields.TRIAL
        for stream in (torch.cuda.current_stream(self.device), self._stream(is_urgent=True)):
            before = self._table.words[fields.TRIAL]
            self._driver.stream_wait(stream.cuda_stream, address, before)
            self._driver.stream_write(stream.cuda_stream, address, before + 1)
            torch.cuda.synchronize(self.device)
            if self._table.words[fields.TRIAL] != before + 1:
                raise RunError("what a stream writes to memory that the host shares with it does not arrive there")

    def _await_releaser(self) -> None:
        until = time.monotonic() + _READY_S
        while not self._table.is_ready:
            if time.monotonic() > until:
                raise RunError(f"the process that releases the rank's streams did not start within {_READY_S:.0f} s")
            time.sleep(0.001)

    # -- one operation ----------------------------------------------------------------------------------------------

    def takes(self, call: Call, device: torch.device) -> bool:
        """Whether this operation is held here; else the host holds it."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{call.op.name.lower()} of a group with virtual members is captured into a CUDA graph",
                hint="a release belongs to one moment, a graph is replayed: emulate without capturing communication",
            )
        is_taken = device == self.device and can_fill(call)
        self.counts.num_on_host += not is_taken
        return is_taken

    def issue(self, call: Call, one: Expected, first: int, handle: tuple[int, int], *, posted: int) -> Held:
        """Put an operation on the device; `first` is its first payload, `posted` the tracer's mark of the call."""
        started = time.monotonic_ns()
        with self._lock, torch.no_grad(), self._current():
            held = self._issue(call, one, first, handle, posted)
        self.counts.issue_ns.append(time.monotonic_ns() - started)
        return held

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the device current in this thread: a program need not call `set_device` to communicate from it."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return _NOTHING
        return torch.cuda.device(self.device)

    def _issue(self, call: Call, one: Expected, first: int, handle: tuple[int, int], posted: int) -> Held:
        table, driver = self._table, self._driver
        current = self._current_stream()
        stream, fill = self._side(call, current)
        scratch = nccl_scratch(call, self.device)
        self.make_room()
        lane = self._lanes.setdefault(current.cuda_stream, len(self._lanes))
        joint = self._joining.begin(call, one, handle) if self._joining is not None else None
        number = table.append(fields.HELD, handle, lane=lane, like=0 if joint is None else joint.like)
        if joint is not None and self._joining is not None:
            self._joining.announce(joint, number)
        ticket = table.ticket(number)
        held = Held(number, handle, call, scratch, posted)
        self._engine.post_later(handle, lambda: table.posted(number))
        driver.stream_write(current.cuda_stream, self._at(number, fields.ARRIVED), ticket)
        held.ties = isinstance(posted, Mark) and getattr(posted, "stream", current.cuda_stream) == current.cuda_stream
        arrived = current.record_event()
        if one.sources:
            held.placed = self.pool.take(first, len(one.sources))
        stream.wait_event(self._fill(call, one, held, joint, fill, arrived) or arrived)
        if call.is_p2p:  # as NCCL's backend does: it holds no tensor of a message, the allocator waits for the stream
            for tensor in (*call.contribution, *call.outputs):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        if joint is None and self._hold_kernel is not None:
            release, done = (HoldTable.word(number, word) for word in (fields.RELEASE, fields.DONE))
            self._hold_kernel.hold(call, stream, ticket, release=release, done=done)
        else:
            if joint is not None and self._joining is not None:
                with torch.cuda.stream(stream):
                    self._joining.join(joint, call, stream)
            else:
                driver.stream_wait(stream.cuda_stream, self._at(number, fields.RELEASE), ticket)
            driver.stream_write(stream.cuda_stream, self._at(number, fields.DONE), ticket)
        held.is_done_event = stream.record_event()
        self._open.append(held)
        self.pool.pump()
        return held

    def _fill(self, call: Call, one: Expected, held: Held, joint: Any, fill: Any, arrived: Any) -> Any:
        """Fill the outputs on the stream `fill`, after `arrived`; returns the event of its end; None: nothing to do."""
        is_live = joint is not None and joint.is_live
        if not (is_live or held.scratch):
            spans = [self.pool.span_of(placed) for placed in held.placed]
            copies = plain_copies(call, one, dict(zip(one.sources, spans, strict=True)))
            if copies is not None:
                if not copies:
                    return None
                fill.wait_event(arrived)
                self.pool.let_wait(held.placed, fill)
                for target, source, num_bytes in copies:
                    self._driver.copy(fill.cuda_stream, target, source, num_bytes)
                return fill.record_event()
            if not needs_filling(call, one):
                return None
        fill.wait_event(arrived)
        with torch.cuda.stream(fill):
            if is_live and self._joining is not None:
                self._joining.take_in(joint, call, fill)
            self.pool.let_wait(held.placed, fill)
            recorded = map(self._recorded, held.placed)
            fill_from(call, one, dict(zip(one.sources, recorded, strict=True)), self._compensate_for(held.number))
            place_scratch(call, held.scratch)
        return fill.record_event()

    def _current_stream(self) -> Any:
        """As torch.cuda.current_stream of the device, which takes the host ten times as long to make its object."""
        if self.device.type != "cuda":
            return torch.cuda.current_stream(self.device)
        names: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self.device.index)
        stream = self._seen.get(names)
        if stream is None:
            stream = self._seen[names] = torch.cuda.current_stream(self.device)
        return stream

    def _compensate_for(self, number: int) -> Compensate | None:
        compensator, ticket = self._compensator, HoldTable.ticket(number)
        if compensator is None:
            return None
        word = HoldTable.word(number, fields.DIFFERS)
        differs = self._words[word : word + 1]
        return lambda output, result, live, then, op, num: compensator(
            output, result, live, then, op, num, differs, ticket
        )

    def _recorded(self, placed: Placed) -> Recorded:
        return Recorded(placed.want.start, self.pool.bytes_of(placed), self.pool.scratch_of(placed))

    def _at(self, number: int, word: int) -> int:
        return self._flags + 4 * HoldTable.word(number, word)

    def _side(self, call: Call, current: Any) -> tuple[Any, Any]:
        """The stream that an operation holds, and the one that fills.

        There is a pair for each group, and for each direction between two ranks. An operation without a handle holds
        the current stream.
        """
        key: tuple[int, ...] = (call.group.group_id,)
        if call.is_p2p:
            key = (*key, call.peer if call.peer is not None else -1, call.op is Op.SEND)
        known = self._sides.get(key)
        if known is None:
            known = self._sides[key] = self._stream(is_urgent=self._is_urgent(call)), self._stream(is_urgent=True)
        return known if call.is_async else (current, known[1])

    def _is_urgent(self, call: Call) -> bool:
        """A kernel of a collective competes for SMs as NCCL's does, which torch gives an ordinary stream by itself."""
        has_kernel = self._joining is not None or self._hold_kernel is not None
        return not has_kernel or call.group.is_urgent

    def _stream(self, *, is_urgent: bool) -> Any:
        return torch.cuda.ExternalStream(self._driver.create_stream(is_urgent=is_urgent), device=self.device)

    def wait(self, held: Held, call: Call) -> None:
        """The current stream goes on behind the operation; for a barrier so does the host, as with NCCL."""
        held.scratch = []
        self._current_stream().wait_event(held.is_done_event)
        if call.op is Op.BARRIER:
            held.is_done_event.synchronize()

    def see(self, held: Held) -> None:
        """A further wait, which may come from another stream."""
        self._current_stream().wait_event(held.is_done_event)

    def is_done(self, held: Held) -> bool:
        """Whether the device has passed the operation's end."""
        return self._table.is_done(held.number) or held.number < self._oldest

    @property
    def _oldest(self) -> int:
        return self._open[0].number if self._open else self._table.issued

    # -- what is over -----------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Wait until the table has a slot for one entry more."""
        self.reap()
        while not self._table.is_free(self._table.issued):
            time.sleep(0.00002)
            self.reap()

    def reap(self) -> None:
        """Take note of operations that are done: their places in the pool are free, and they get their times."""
        with self._lock:
            while self._open and (ended := self._table.done_at(self._open[0].number)):
                held = self._open.popleft()
                self.pool.hand_back(held.placed)
                longs, at = self._table.longs, self._table.long(held.number, 0)
                due = longs[at + fields.DUE]
                error = ended - due
                self._engine.know(held.handle, due_ns=due)
                self.counts.errors_ns.append(error)
                if error > LATE_NS:
                    self._note_late(held, error, longs[at + fields.RELEASED] - due)
                self.counts.num_differing += self._table.differs(held.number)
                held.end.time_ns = ended
                if held.ties and isinstance(held.posted, Mark):
                    held.posted.seen_ns = longs[at + fields.POSTED]
                held.placed = []

    def _note_late(self, held: Held, error_ns: int, released_ns: int) -> None:
        counts = self.counts
        counts.num_late += 1
        said = f"{held.number} {held.op.name.lower()} {error_ns / 1e3:.0f} us ({released_ns / 1e3:.0f} released)"
        counts.latest = sorted([*counts.latest, (error_ns, said)])[-_NUM_LATEST:]

    def finish(self, *, is_complete: bool) -> None:
        """The program has ended: see the last operations through, or let go of whatever is held."""
        if is_complete:
            torch.cuda.synchronize(self.device)
            until = time.monotonic() + _LAST_S
            while self._open and time.monotonic() < until:
                self.reap()
        else:
            self._table.abandon()
        self._table.close()
        for held in self._open:
            if held.end.time_ns is None:
                held.end.time_ns = time.monotonic_ns()

    def summary(self, on_host: int) -> dict[str, object]:
        """Facts for the trace's metadata; `on_host`: reductions that the host compensated."""
        errors = sorted(self.counts.errors_ns)
        sizes = sorted(map(abs, errors))
        last = len(sizes) - 1
        return {
            "reductions_compensated": self.counts.num_differing + on_host,
            "held_operations": len(errors), "held_on_host": self.counts.num_on_host,
            "release_error_median_ns": errors[last // 2] if errors else 0,
            "release_error_p99_ns": sizes[last * 99 // 100] if sizes else 0,
            "release_error_max_ns": sizes[-1] if sizes else 0, "releases_late": self.counts.num_late,
            "releases_latest": "; ".join(said for _, said in reversed(self.counts.latest)),
            "hold_issue_median_ns": sorted(self.counts.issue_ns)[last // 2] if errors else 0,
            "hold_blocks": 0 if self._hold_kernel is None else self._hold_kernel.num_blocks,
            "device_pool_bytes": self.pool_bytes, "ring_is_pinned": int(not self.counts.num_unpinned),
            "prefetch_hits": self.pool.hits, "prefetch_misses": self.pool.misses,
            "prefetch_hit_bytes": self.pool.hit_bytes, "prefetch_miss_bytes": self.pool.miss_bytes,
            **({} if self._joining is None else self._joining.summary()),
        }  # fmt: skip
