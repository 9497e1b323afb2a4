"""The memory that a rank, its GPU and the process that releases its streams share: one slot for each held operation.

Responsible for the layout and for who writes what; it knows neither CUDA nor when anything is due.

A slot takes 64 bytes. The GPU writes that the program's stream has arrived and that the operation is done, and waits
for the release; the rank writes which operation it is, before the GPU can come to it; the releaser the rest.  What
marks a state is the operation's ticket, never a bare flag: an old mark of a slot used again cannot be taken for a new.
"""

from __future__ import annotations

import os
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE, mmap

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""For a rank whose streams are held: streams that share a connection to the device wait for one another. At most 32."""

NUM_SLOTS = 1 << 14
_HEADER_BYTES = 4096
_SLOT_BYTES = 64
TRIAL = 256
"""A 32-bit word that belongs to no slot: whether the device can wait and write is tried on it."""

TABLE_BYTES = _HEADER_BYTES + NUM_SLOTS * _SLOT_BYTES

# kinds of entries
HELD, HOST_POST, STAND_IN = 1, 2, 3

# 32-bit words of a slot
ARRIVED, RELEASE, DONE, TICKET, INDEX, SHIFT, DIFFERS, KIND = 0, 1, 2, 3, 12, 13, 14, 15
_LANE_BIT, _LIKE_BIT = 4, 20  # of KIND, behind the kind itself
MOST_ALIKE = 1 << 12
# 64-bit words of a slot
POSTED, DUE, RELEASED, DONE_AT = 2, 3, 4, 5
# 64-bit words of the header
_ORIGIN, _ISSUED, _READY, _CLOSED, _TAKEN = 0, 1, 2, 3, 4


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU; asks no driver."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/nvidia0")))


def create_table() -> int:
    """Create the shared memory; returns its descriptor."""
    fd = os.memfd_create("prism-hold", 0)
    os.ftruncate(fd, TABLE_BYTES)
    return fd


class HoldTable:
    """One end of the table. Entries are numbered in the order of their issue; ticket = number + 1, in 31 bits."""

    def __init__(self, fd: int) -> None:
        self.map = mmap(fd, TABLE_BYTES, MAP_SHARED, PROT_READ | PROT_WRITE)
        view = memoryview(self.map)
        self.words = view.cast("I")
        self.longs = view.cast("q")

    @staticmethod
    def word(number: int, field: int) -> int:
        """Where a 32-bit field of entry `number` is among the words."""
        return (_HEADER_BYTES + number % NUM_SLOTS * _SLOT_BYTES) // 4 + field

    @staticmethod
    def long(number: int, field: int) -> int:
        """Where a 64-bit field of entry `number` is among the longs."""
        return (_HEADER_BYTES + number % NUM_SLOTS * _SLOT_BYTES) // 8 + field

    @staticmethod
    def ticket(number: int) -> int:
        """What marks the states of entry `number`; never 0."""
        return (number + 1) & 0x7FFFFFFF or 1

    @property
    def origin_ns(self) -> int:
        """The origin of the job's clock; 0: not known yet."""
        return self.longs[_ORIGIN]

    @origin_ns.setter
    def origin_ns(self, value: int) -> None:
        self.longs[_ORIGIN] = value

    @property
    def issued(self) -> int:
        """How many entries there are."""
        return self.longs[_ISSUED]

    @property
    def taken(self) -> int:
        """How many entries the releaser has read."""
        return self.longs[_TAKEN]

    @taken.setter
    def taken(self, value: int) -> None:
        self.longs[_TAKEN] = value

    @property
    def is_ready(self) -> bool:
        """Whether the releaser is at work."""
        return self.longs[_READY] != 0

    def set_ready(self) -> None:
        self.longs[_READY] = 1

    @property
    def is_closed(self) -> bool:
        """Whether the rank has ended: nothing more will come."""
        return self.longs[_CLOSED] != 0

    def close(self) -> None:
        self.longs[_CLOSED] = 1

    def append(self, kind: int, handle: tuple[int, int], *, lane: int = 0, like: int = 0, posted_ns: int = 0) -> int:
        """Add an entry; returns its number. The slot must be free (`is_free`).

        Args:
            kind: HELD; HOST_POST, a post that the host made; STAND_IN, whose `posted_ns` is the row of what was met.
            handle: the operation's index in the boundary plan, and by how many rounds of steps it is moved.
            lane: number of the stream that arrives: arrivals of one lane come in order.
            like: operations of one number, less than MOST_ALIKE, take as long from their release to their end; 0: no
                longer than a bare wait takes.
        """
        number = self.issued
        words, longs = self.words, self.longs
        first, double = self.word(number, 0), self.long(number, 0)
        longs[double + POSTED] = posted_ns
        longs[double + DUE] = longs[double + RELEASED] = longs[double + DONE_AT] = 0
        words[first + INDEX], words[first + SHIFT] = handle
        words[first + KIND] = like << _LIKE_BIT | lane << _LANE_BIT | kind
        words[first + TICKET] = self.ticket(number)
        longs[_ISSUED] = number + 1
        return number

    def is_free(self, number: int) -> bool:
        """Whether the slot that entry `number` would take is not in use any more."""
        before = number - NUM_SLOTS
        if before < 0:
            return True
        return before < self.taken and (self.kind(before) != HELD or self.done_at(before) != 0)

    def kind(self, number: int) -> int:
        """What entry `number` is."""
        return self.words[self.word(number, KIND)] & ((1 << _LANE_BIT) - 1)

    def lane(self, number: int) -> int:
        """The number of the stream that arrives at it."""
        return self.words[self.word(number, KIND)] >> _LANE_BIT & ((1 << _LIKE_BIT - _LANE_BIT) - 1)

    def like(self, number: int) -> int:
        """The number of the operations that take as long from their release to their end."""
        return self.words[self.word(number, KIND)] >> _LIKE_BIT

    def differs(self, number: int) -> bool:
        """Whether the rank contributed something else than recorded, as far as the device looks."""
        return self.words[self.word(number, DIFFERS)] == self.ticket(number)

    def posted(self, number: int) -> int:
        """When the program's stream arrived at a held operation; 0: not yet."""
        return self.longs[self.long(number, POSTED)]

    def done_at(self, number: int) -> int:
        """When a held operation was done on its stream; 0: not yet."""
        return self.longs[self.long(number, DONE_AT)]

    def is_done(self, number: int) -> bool:
        """Whether the GPU has passed the end of a held operation."""
        return self.words[self.word(number, DONE)] == self.ticket(number)

    def abandon(self) -> None:
        """Release whatever is held: the rank ends before its time."""
        for number in range(max(self.issued - NUM_SLOTS, 0), self.issued):
            if self.kind(number) == HELD:
                self.words[self.word(number, RELEASE)] = self.ticket(number)
