"""The order in which the assistant of backend `nccl` puts calls on its device, and how many at a time.

Responsible for lines and streams; what a call is, neighbours.py knows.

The assistant's thread may never wait for a stream: what lets that go on may be an operation that a sandbox rank tells
of next. So calls that would be too many for the device wait on the host, each in the line of its communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")

MOST_STREAMS = 28
"""Each needs a connection to the device of its own, of 32 (holdtable.py)."""

_MOST_UNDER_WAY = 64  # of one line; the device takes some thousand commands before the host has to wait
_LOOK_S = 0.0002  # between looks at what is over, while calls wait on the host


@dataclass
class _Line(Generic[T]):
    """Calls that come one after the other."""

    stream: Any = None
    """Where the last ones are."""
    under_way: deque[tuple[Any, object]] = field(default_factory=deque)
    """The event behind each call on the device, and what it reads, which lives as long."""
    waiting: deque[T] = field(default_factory=deque)

    def let_go(self) -> None:
        """Of what is over."""
        while self.under_way and self.under_way[0][0].query():
            self.under_way.popleft()


class Lines(Generic[K, T]):
    """A line of calls for each communicator, on streams that those share which have none under way."""

    def __init__(
        self, streams: Iterable[Any], issue: Callable[[K, Any, T], tuple[Any, object]], *,
        most_under_way: int = _MOST_UNDER_WAY,
    ) -> None:  # fmt: skip
        """`issue` puts a call on a stream; it returns the event behind it, and what has to live until then."""
        self._free, self._issue, self._most = list(streams), issue, most_under_way
        self._lines: dict[K, _Line[T]] = {}

    def add(self, key: K, call: T) -> None:
        """A call comes next in the line of `key`."""
        line = self._lines.setdefault(key, _Line())
        line.waiting.append(call)
        self._advance(key, line)

    def look(self) -> float | None:
        """Put calls that wait on the device where there is room now; returns in how many seconds to look again."""
        waiting = [(key, line) for key, line in self._lines.items() if line.waiting]
        for key, line in waiting:
            self._advance(key, line)
        return _LOOK_S if any(line.waiting for _, line in waiting) else None

    def _advance(self, key: K, line: _Line[T]) -> None:
        line.let_go()
        while line.waiting and len(line.under_way) < self._most and self._has_stream(line):
            line.under_way.append(self._issue(key, line.stream, line.waiting.popleft()))

    def _has_stream(self, line: _Line[T]) -> bool:
        """Whether a line has a stream by now: one that is free, or of a line that has nothing under way."""
        if line.stream is None and self._free:
            line.stream = self._free.pop()
        elif line.stream is None:
            for other in self._lines.values():
                other.let_go()
                if other.stream is not None and not other.under_way:
                    line.stream, other.stream = other.stream, None
                    break
        return line.stream is not None
