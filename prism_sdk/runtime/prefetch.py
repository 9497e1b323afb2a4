"""Brings the values that virtual ranks contribute into memory before a sandbox rank asks for them.

Responsible for the pool shared by one sandbox rank and its assistant process, at both ends.

The assistant (`python -m prism_sdk.runtime.prefetch`) walks the rank's operations in order and copies payloads from the
trace into a ring in shared memory, as far ahead as the ring allows.  What a job repeats that goes on beyond the
recording stays there, so that it is read once.  The assistant runs on CPUs that no sandbox rank uses where there are
any, and outside the rank's own memory.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from pathlib import Path

import prismtrace
from prism_sdk.runtime.parents import die_with_parent

_HEADER = struct.Struct("<qqqq")  # produced, consumed, reserved, reserved
_HEADER_BYTES = 4096
_TABLE_ENTRIES = 1 << 16
_ENTRY = struct.Struct("<qq")  # offset in the data area, size; offset -1: too large for the ring, or skipped
_DATA_START = _HEADER_BYTES + _TABLE_ENTRIES * _ENTRY.size
_IDLE_S = 0.0005
_MOST_READERS = 8
_SMALL_BYTES = 1 << 16


@dataclass(frozen=True)
class Item:
    """One payload to bring in."""

    digest: bytes
    num_bytes: int


@dataclass(frozen=True)
class PayloadSequence:
    """The payloads of one rank in order; after the last one it goes on from `repeat_from`."""

    items: tuple[Item, ...]
    repeat_from: int

    def from_index(self, index: int) -> Item | None:
        """Item number `index`, counted on through the repetitions; None when there is nothing to repeat."""
        if index < len(self.items):
            return self.items[index]
        span = len(self.items) - self.repeat_from
        return None if span <= 0 else self.items[self.repeat_from + (index - len(self.items)) % span]


def create_ring(capacity_bytes: int) -> int:
    """Create the shared ring; returns its descriptor."""
    fd = os.memfd_create("prism-prefetch", 0)
    os.ftruncate(fd, _DATA_START + capacity_bytes)
    return fd


class Ring:
    """The shared pool: a table of entries and a circular data area. One producer, one consumer."""

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        self.capacity = self.size - _DATA_START
        self.map = mmap(fd, self.size, MAP_SHARED, PROT_READ | PROT_WRITE)
        self.view = memoryview(self.map)
        self._counters = self.view[:16].cast("q")

    @property
    def produced(self) -> int:
        return self._counters[0]

    @produced.setter
    def produced(self, value: int) -> None:
        self._counters[0] = value

    @property
    def consumed(self) -> int:
        return self._counters[1]

    @consumed.setter
    def consumed(self, value: int) -> None:
        self._counters[1] = value

    def set_entry(self, index: int, offset: int, num_bytes: int) -> None:
        _ENTRY.pack_into(self.map, _HEADER_BYTES + (index % _TABLE_ENTRIES) * _ENTRY.size, offset, num_bytes)

    def entry(self, index: int) -> tuple[int, int]:
        return _ENTRY.unpack_from(self.map, _HEADER_BYTES + (index % _TABLE_ENTRIES) * _ENTRY.size)

    def data(self, offset: int, num_bytes: int) -> memoryview:
        return self.view[_DATA_START + offset : _DATA_START + offset + num_bytes]


@dataclass
class PrefetchCounts:
    """How well the pool served: operations found ready, operations read on demand, and bytes of each."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    miss_bytes: int = 0


class Consumer:
    """The sandbox rank's end."""

    def __init__(self, fd: int, reader: prismtrace.TraceReader, sequence: PayloadSequence) -> None:
        self._ring = Ring(fd)
        self._reader = reader
        self._sequence = sequence
        self._open: dict[int, None] = {}  # first payloads of operations that were announced and not released, ascending
        self._released = 0
        self._copied: int | None = None  # with a pool on a device: payloads before it are copied there, or not wanted
        self._beside = threading.Lock()
        self.counts = PrefetchCounts()

    def announce(self, first: int) -> None:
        """An operation was issued that takes payloads from `first` on; operations may take theirs in any order."""
        self._open[first] = None

    def take(self, first: int, count: int) -> list[memoryview]:
        """The payloads `first` to `first + count`; valid until `release`. What is not there yet is read now."""
        views = []
        for index in range(first, first + count):
            item = self._sequence.from_index(index)
            assert item is not None
            offset = -1
            if self._ring.consumed <= index < self._ring.produced:
                offset, num_bytes = self._ring.entry(index)
            if offset >= 0:
                views.append(self._ring.data(offset, num_bytes))
                self.counts.hits += 1
                self.counts.hit_bytes += num_bytes
                continue
            buffer = bytearray(item.num_bytes)
            if item.num_bytes:
                self._reader.read_payload_into(item.digest, buffer)
            views.append(memoryview(buffer))
            self.counts.misses += 1
            self.counts.miss_bytes += item.num_bytes
        return views

    def peek(self, index: int, reader: prismtrace.TraceReader) -> memoryview:
        """Payload `index` of an operation that was announced, for a thread beside the rank's own; counts nothing.

        What is not there yet is read with `reader`, which other threads may share.
        """
        if self._ring.consumed <= index < self._ring.produced:
            offset, num_bytes = self._ring.entry(index)
            if offset >= 0:
                return self._ring.data(offset, num_bytes)
        item = self._sequence.from_index(index)
        assert item is not None
        buffer = bytearray(item.num_bytes)
        if item.num_bytes:
            with self._beside:
                reader.read_payload_into(item.digest, buffer)
        return memoryview(buffer)

    def release(self, first: int, count: int) -> None:
        """The operation has what it took. The pool keeps everything from the oldest operation on that has not."""
        self._open.pop(first, None)
        self._released = max(self._released, first + count)
        self._free()

    def _free(self) -> None:
        oldest = next(iter(self._open), None)
        done = self._released if self._copied is None else self._copied
        self._ring.consumed = max(self._ring.consumed, done if oldest is None else min(oldest, done))

    # -- for a pool on a device, which takes payloads out of the ring as they come ----------------------------------

    def memory(self) -> memoryview:
        """The whole shared memory, for pinning it."""
        return self._ring.view

    def has(self, index: int) -> bool:
        """Whether payload `index` can be had: it is in the ring, or never will be."""
        return index < self._ring.produced

    def view(self, index: int) -> memoryview:
        """Payload `index`, which `has` says is there; valid until `copied_until` passes it. Counts nothing."""
        return self.peek(index, self._reader)

    def copied_until(self, index: int) -> None:
        """The device needs nothing before payload `index` any more."""
        self._copied = index
        self._free()


def places_to_stay(sequence: PayloadSequence, capacity: int) -> dict[bytes, int]:
    """Offsets in the data area of payloads that are repeated and keep their place, so that they are read only once.

    They do if everything fits, or if they leave half of the area to what goes round: an operation may take many of
    those at once.
    """
    span = {item.digest: item.num_bytes for item in sequence.items[sequence.repeat_from :]}
    every = {item.digest: item.num_bytes for item in sequence.items}
    if sum(every.values()) > capacity and sum(span.values()) > capacity // 2:
        return {}
    places: dict[bytes, int] = {}
    end = capacity
    for digest, num_bytes in span.items():
        end -= num_bytes
        places[digest] = end
    return places


class _Producer:
    """Fills the ring. Payloads are read by some threads at once; the rank is told of them in their order."""

    def __init__(self, ring: Ring, reader: prismtrace.TraceReader, sequence: PayloadSequence, num_readers: int) -> None:
        self._ring, self._reader, self._sequence = ring, reader, sequence
        self._stays = places_to_stay(sequence, ring.capacity)
        self._filled: dict[bytes, Future[int] | None] = {}  # what stays: who reads it, or read it
        self._round = min(self._stays.values(), default=ring.capacity)  # what goes round lies before it
        self._held: deque[tuple[int, int, int]] = deque()  # (index, offset, end) of what goes round, oldest first
        self._head = 0
        self._reads: deque[tuple[int, Future[int] | None]] = deque()  # (index, who reads it), not told of yet
        self._most = 2 * num_readers
        self._pool = ThreadPoolExecutor(num_readers)

    def run(self) -> None:
        """Until there is nothing to repeat, or for ever."""
        index = 0
        while (item := self._sequence.from_index(index)) is not None:
            consumed = self._ring.consumed
            if consumed > index:  # the rank was faster and read for itself
                self._tell(all_of_them=True)
                self._ring.produced = index = consumed
                continue
            self._tell()
            is_full = index - consumed >= _TABLE_ENTRIES or len(self._reads) >= self._most
            if is_full or not self._place(index, item, consumed):
                self._pause()
                continue
            index += 1
        self._tell(all_of_them=True)

    def _pause(self) -> None:
        """Until something has been read, or a moment."""
        first = self._reads[0][1] if self._reads else None
        if first is None:
            time.sleep(_IDLE_S)
        else:
            wait([first], timeout=_IDLE_S)

    def _tell(self, *, all_of_them: bool = False) -> None:
        """Tell the rank of what has been read."""
        while self._reads and (all_of_them or (first := self._reads[0][1]) is None or first.done()):
            index, read = self._reads.popleft()
            if read is not None:
                read.result()
            self._ring.produced = index + 1

    def _place(self, index: int, item: Item, consumed: int) -> bool:
        """Give a payload a place and have it read, if there is room."""
        read: Future[int] | None = None
        offset = self._stays.get(item.digest)
        if not item.num_bytes:
            offset = 0  # takes no place, and none of what goes round waits for it
        elif offset is not None:
            if item.digest not in self._filled:
                self._filled[item.digest] = self._read(item, offset)
            read = self._filled[item.digest]
        else:
            told = self._reads[0][0] if self._reads else index  # from there on somebody may be writing still
            while self._held and self._held[0][0] < min(consumed, told):
                self._held.popleft()
            offset = place_in_circle(item.num_bytes, self._round, self._head, self._held)
            if offset is not None:
                read = self._read(item, offset)
                self._head = offset + item.num_bytes
                self._held.append((index, offset, self._head))
            elif item.num_bytes <= self._round:
                return False
            else:
                offset = -1
        self._ring.set_entry(index, offset, item.num_bytes)
        self._reads.append((index, read))
        return True

    def _read(self, item: Item, offset: int) -> Future[int] | None:
        """Have a payload read; None: it has been."""
        target = self._ring.data(offset, item.num_bytes)
        if item.num_bytes > _SMALL_BYTES:
            return self._pool.submit(self._reader.read_payload_into, item.digest, target)
        self._reader.read_payload_into(item.digest, target)  # a thread would take longer
        return None


def place_in_circle(num_bytes: int, capacity: int, head: int, held: Sequence[tuple[int, int, int]]) -> int | None:
    """Where `num_bytes` fit in the circular area, or None while it is full."""
    if not held:
        return 0 if num_bytes <= capacity else None
    tail = held[0][1]
    if head > tail or (head == tail and len(held) == 0):
        if head + num_bytes <= capacity:
            return head
        return 0 if num_bytes < tail else None
    return head if head + num_bytes < tail else None


def save_sequence(path: Path, sequence: PayloadSequence) -> None:
    path.write_bytes(pickle.dumps(([(item.digest, item.num_bytes) for item in sequence.items], sequence.repeat_from)))


def load_sequence(path: Path) -> PayloadSequence:
    items, repeat_from = pickle.loads(path.read_bytes())
    return PayloadSequence(tuple(Item(*item) for item in items), repeat_from)


def main(argv: Sequence[str]) -> int:
    """Assistant process: parent's id, ring descriptor, trace, sequence file, CPUs (comma separated, may be empty)."""
    parent_id, fd, trace, path, listed = argv
    die_with_parent(int(parent_id))
    cpus = [int(cpu) for cpu in listed.split(",") if cpu]
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        with prismtrace.TraceReader(trace) as reader:
            num_readers = min(len(cpus), _MOST_READERS) or 1  # where no CPU is free the rank has to share its own
            _Producer(Ring(int(fd)), reader, load_sequence(Path(path)), num_readers).run()
    except (prismtrace.PrismTraceError, OSError) as error:
        sys.stderr.write(f"prism: values of other ranks cannot be read: {error}\n")
        return 1
    while True:  # until it is ended: who ends before the rank does is missed
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
