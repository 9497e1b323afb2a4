"""Brings recorded values from the host's ring into device memory before the stream that needs them comes there.

Responsible for where each payload lies in the pool and for when its place is free again; the copying is the copier's,
what becomes of the values filling.py's.

The pool is one block outside torch's allocator, used round and round in the order of the script.  A payload is copied
as soon as it is in the ring and the pool has room, by whoever calls `pump`; its place is free when the operation that
takes it is done on the device.  So a late payload delays its operation, and nothing is written over while in use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from prism_sdk.errors import RunError
from prism_sdk.runtime.manifest import OWN, Script
from prism_sdk.runtime.prefetch import Consumer, place_in_circle
from prismtrace import Op

ALIGNMENT = 512
_PAUSE_S = 0.00002
_TIMEOUT_S = 600.0


class Copier(Protocol):
    """Copies host memory into the pool on a stream of its own."""

    def copy(self, offset: int, source: memoryview) -> Any:
        """Start to copy `source` to `offset` of the pool; returns a token of the copy."""

    def is_done(self, token: Any) -> bool:
        """Whether the host memory of a copy is free again."""

    def let_wait(self, token: Any, stream: Any) -> None:
        """Make a stream wait for a copy."""


@dataclass(frozen=True, slots=True)
class Want:
    """What of a payload an operation needs on the device: a part of it, and room to compare (`scratch_bytes`)."""

    start: int
    num_bytes: int
    scratch_bytes: int


@dataclass(slots=True)
class Placed:
    """A payload, or the part of it that is needed, in the pool."""

    want: Want
    offset: int
    end: int
    token: Any
    is_free: bool = False


def wants_of(script: Script) -> list[Want]:
    """For each payload of a script what of it must be on the device.

    Of a rank's own contribution to a reduction only what is returned to it is compared: in a scatter its shard, which
    is not told where shards differ in size.
    """
    wants = [Want(0, item.num_bytes, 0) for item in script.sequence.items]
    for one in script.expected:
        for position, source in enumerate(one.sources):
            if source != OWN:
                continue
            index = one.first_item + position
            start, size = 0, script.sequence.items[index].num_bytes
            is_even = one.num_elements_in == one.num_elements_out * len(one.group_ranks)
            if one.op is Op.REDUCE_SCATTER and is_even:
                size //= len(one.group_ranks)
                start = size * one.group_ranks.index(script.rank)
            wants[index] = Want(start, size, size // max(one.dtype.itemsize_bytes, 1))
    return wants


def pool_bytes_for(script: Script, *, limit: int) -> int:
    """How large the pool is: what the whole script needs, up to `limit`, but twice what the largest operation takes."""
    wants = wants_of(script)
    sizes = [_aligned(want.num_bytes) + _aligned(want.scratch_bytes) for want in wants]
    spans = (slice(one.first_item, one.first_item + len(one.sources)) for one in script.expected)
    largest = max((sum(sizes[span]) for span in spans), default=0)
    return max(min(2 * sum(sizes), limit), 2 * largest + 4 * ALIGNMENT)


class DevicePool:
    """The payloads of one rank on their way, and on the device."""

    def __init__(
        self, memory: torch.Tensor, script: Script, source: Consumer, copier: Copier, *, reap: Callable[[], None]
    ) -> None:
        """`memory`: the pool, flat bytes. `reap` hands back what operations took that are done by now."""
        self.memory = memory
        self._capacity, self._address = memory.numel(), memory.data_ptr()
        self._source, self._copier, self._reap = source, copier, reap
        self._sequence = script.sequence
        self._wants = wants_of(script)
        self._placed: dict[int, Placed] = {}
        self._circle: deque[Placed] = deque()  # oldest first
        self._head = 0
        self._ahead = 0  # the payload to place next
        self._copying: deque[tuple[int, Any, memoryview | None]] = deque()  # with what is copied, so that it stays
        self._skipped: set[int] = set()  # that the host takes
        self.hits = self.misses = self.hit_bytes = self.miss_bytes = 0
        source.copied_until(0)

    # -- ahead ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Copy what is in the ring and fits into the pool; let the ring have back what was copied."""
        while self._copying and (self._copying[0][1] is None or self._copier.is_done(self._copying[0][1])):
            self._copying.popleft()
        self._source.copied_until(self._copying[0][0] if self._copying else self._ahead)
        while self._place_next():
            pass

    def _place_next(self) -> bool:
        index = self._ahead
        item = self._sequence.from_index(index)
        if item is None:
            return False
        if index in self._skipped:
            self._skipped.discard(index)
            self._ahead += 1
            self._copying.append((index, None, None))
            return True
        if not self._source.has(index):
            return False
        want = self._want(index)
        size = _aligned(want.num_bytes) + _aligned(want.scratch_bytes)
        while self._circle and self._circle[0].is_free:
            self._circle.popleft()
        oldest = [(0, self._circle[0].offset, 0)] if self._circle else []
        offset = place_in_circle(size, self._capacity, self._head, oldest) if size else 0
        if offset is None:
            return False
        token = view = None
        if want.num_bytes:
            view = self._source.view(index)
            token = self._copier.copy(offset, view[want.start : want.start + want.num_bytes])
        placed = self._placed[index] = Placed(want, offset, offset + size, token)
        if size:
            self._circle.append(placed)
            self._head = placed.end
        self._copying.append((index, token, view))
        self._ahead = index + 1
        return True

    def _want(self, index: int) -> Want:
        num = len(self._wants)
        if index >= num:
            repeat = self._sequence.repeat_from
            index = repeat + (index - num) % (num - repeat)
        return self._wants[index]

    # -- one operation ----------------------------------------------------------------------------------------------

    def take(self, first: int, count: int) -> list[Placed]:
        """The payloads `first` to `first + count`, on the device or on their way there (`let_wait`); waits for room."""
        self._pass_by(first)
        self.pump()
        found = []
        for index in range(first, first + count):
            placed = self._placed.pop(index, None)
            is_hit = placed is not None or self._source.has(index)  # else the pool is full of what is under way
            if placed is None:
                placed = self._wait_for(index)
            self.hits += is_hit
            self.misses += not is_hit
            self.hit_bytes += placed.want.num_bytes if is_hit else 0
            self.miss_bytes += 0 if is_hit else placed.want.num_bytes
            found.append(placed)
        return found

    def _pass_by(self, first: int) -> None:
        """Payloads before `first` that nobody took: of operations that end the job, where it goes on instead."""
        while self._placed and (index := next(iter(self._placed))) < first:
            self._placed.pop(index).is_free = True
        self._skipped.update(range(self._ahead, first))

    def _wait_for(self, index: int) -> Placed:
        until = time.monotonic() + _TIMEOUT_S
        while (placed := self._placed.pop(index, None)) is None:
            if time.monotonic() > until:
                raise RunError(f"waited {_TIMEOUT_S:.0f} s for recorded payload {index} to come to the device",
                               hint="is the process that reads them ahead still there?")  # fmt: skip
            time.sleep(_PAUSE_S)
            self._reap()
            self.pump()
        return placed

    def let_wait(self, placed: Sequence[Placed], stream: Any) -> None:
        """Make a stream wait until these payloads are there."""
        for one in placed:
            if one.token is not None:
                self._copier.let_wait(one.token, stream)

    def span_of(self, placed: Placed) -> tuple[int, int]:
        """Where what was copied lies: address and size."""
        return self._address + placed.offset, placed.want.num_bytes

    def bytes_of(self, placed: Placed) -> torch.Tensor:
        """What was copied, flat."""
        return self.memory[placed.offset : placed.offset + placed.want.num_bytes]

    def scratch_of(self, placed: Placed) -> torch.Tensor:
        """The room beside it, flat."""
        start = placed.offset + _aligned(placed.want.num_bytes)
        return self.memory[start : start + placed.want.scratch_bytes]

    def hand_back(self, placed: Sequence[Placed]) -> None:
        """The operation that took these is done on the device."""
        for one in placed:
            one.is_free = True

    def skip(self, first: int, count: int) -> None:
        """An operation of the host takes these payloads: they are no business of the device."""
        for index in range(first, first + count):
            placed = self._placed.pop(index, None)
            if placed is not None:
                placed.is_free = True
            elif index >= self._ahead:
                self._skipped.add(index)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
