"""What the pager knows of a rank's device memory, and what it is asked for.

Values only: pager.py decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from prism_sdk.runtime.oncuda.paging.links import Link, Message

__all__ = ["IN_HOST_MEMORY", "ON_DISK", "RESIDENT", "Request", "Suspension", "Tally", "Tenant", "Want"]

RESIDENT, IN_HOST_MEMORY, ON_DISK = 0, 1, 2


class Want(Enum):
    """What room is wanted for."""

    ALLOCATE = "allocate"
    RETURN = "return"
    START = "start"


@dataclass
class Tenant:
    """A rank's device memory, as far as the launcher knows."""

    rank: int
    device: int = 0
    link: Link | None = None
    num_bytes: int = 0  # that can be moved
    where: int = RESIDENT
    goes_to: int = IN_HOST_MEMORY  # where the next move takes it
    is_moving: bool = False
    is_suspended: bool = False  # the whole process is off the device, and what could not be moved with it
    kept_bytes: int = 0  # of that process on the device, beside what can be moved
    parked_as: int = 0  # when it parked, as a number that grows; 0: it is not parked
    ready_as: int = 0  # when it became ready to go on; 0: it waits
    stays: bool = False  # its memory cannot be moved just now

    @property
    def is_there(self) -> bool:
        """Whether the rank could use its device at once."""
        return self.where == RESIDENT and not self.is_moving and not self.is_suspended


@dataclass
class Request:
    """Somebody waits for room."""

    rank: int
    want: Want
    device: int
    missing_bytes: int
    since_ns: int = field(default_factory=time.monotonic_ns)
    num_tries: int = 0
    takes_reserve: bool = False  # nothing else can be moved: what is kept free for others is used


@dataclass(frozen=True)
class Suspension:
    """How whole processes leave a device: for what cannot be moved otherwise, and for their contexts."""

    order: Callable[[str, int, Callable[[int], None]], None]
    """Carries out `out` or `in` for a rank, and calls back with 0 or an error of the driver."""
    kept_bytes: Callable[[int], int]
    """What a rank has on its device beside what can be moved, context included."""
    free_bytes: Callable[[int], int | None]
    """What a device has free, asked of the machine; None: nobody can tell, and then nothing is suspended."""


@dataclass
class Tally:
    """How much was moved, and how fast."""

    num_moves: dict[str, int] = field(default_factory=lambda: {"out": 0, "back": 0})
    moved_bytes: dict[str, int] = field(default_factory=lambda: {"out": 0, "back": 0})
    total_ns: dict[str, int] = field(default_factory=lambda: {"out": 0, "back": 0})
    copy_ns: dict[str, int] = field(default_factory=lambda: {"out": 0, "back": 0})
    num_suspended: int = 0
    fresh_bytes: int = 0  # host memory that the system handed out for moves, in them
    ahead_bytes: int = 0  # and before them
    reused_bytes: int = 0  # what went out into memory that was all there
    reused_ns: int = 0

    def add(self, way: str, message: Message) -> None:
        """One more move, `out` or `back`."""
        self.num_moves[way] += 1
        self.moved_bytes[way] += message.num_bytes
        self.total_ns[way] += message.total_ns
        self.copy_ns[way] += message.copy_ns
        self.fresh_bytes += message.fresh_bytes
        if way == "out" and not message.fresh_bytes:
            self.reused_bytes += message.num_bytes
            self.reused_ns += message.total_ns

    def __str__(self) -> str:
        """`out 84.0 GB in 7 moves at 40.1 GB/s, back ...`; empty where nothing was moved."""
        parts = [
            f"{way} {self.moved_bytes[way] / 1e9:.1f} GB in {number} moves at "
            f"{self.moved_bytes[way] / max(self.total_ns[way], 1):.1f} GB/s "
            f"(copies alone {self.moved_bytes[way] / max(self.copy_ns[way], 1):.1f})"
            for way, number in self.num_moves.items()
            if number
        ]
        if fresh_bytes := self.fresh_bytes + self.ahead_bytes:
            ahead = f", {self.ahead_bytes / 1e9:.1f} GB of it ahead" if self.ahead_bytes else ""
            parts.append(f"{fresh_bytes / 1e9:.1f} GB of host memory taken{ahead}")
        if self.reused_bytes:
            speed = self.reused_bytes / max(self.reused_ns, 1)
            parts.append(f"out into what was taken {self.reused_bytes / 1e9:.1f} GB at {speed:.1f} GB/s")
        if self.num_suspended:
            parts.append(f"whole processes {self.num_suspended} times")
        return ", ".join(parts)
