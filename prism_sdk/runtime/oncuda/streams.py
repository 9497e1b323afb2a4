"""Follows which stream has seen which communication, so that waits of a program between its streams become WAIT units.

Responsible for the order that events make between streams; it times nothing and moves no data.

The rows of a rank are those of its *main* stream, the device's default one.  FSDP2 asks for its collectives on streams
of its own, where a synchronous call holds up that stream alone; the main stream goes on until it waits for an event
that was recorded behind the collective.  There the WAIT unit belongs, else nothing would run beside anything.

    collective on S  ->  event recorded on S  ->  the main stream waits for the event:  WAIT

What C++ does between streams (the autograd engine) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from prism_sdk.runtime.tracer import Tracer

_KEPT = 65_536  # communications that the main stream has not waited for, before the oldest are given up

Waited = Callable[[list[int], Callable[[], None]], None]


class StreamFollower:
    """The communications that each stream beside the main one has seen, and the main one has not waited for."""

    def __init__(self, waits: Waited) -> None:
        """`waits(units, wait)`: the main stream is about to wait for these units; `wait` makes it wait."""
        self._waits = waits
        self.main: Any = None  # the stream whose rows are written; None before the first communication on a GPU
        self._open: dict[int, None] = {}  # units that the main stream has not waited for, in order
        self._seen: dict[int, dict[int, None]] = {}  # stream -> units that it comes after

    def is_beside(self) -> bool:
        """Whether another stream than the main one is current where the program communicates."""
        if self.main is None:
            if not torch.cuda.is_initialized():
                return False
            self.main = torch.cuda.default_stream()
        return bool(torch.cuda.current_stream() != self.main)

    def takes(self, unit: int) -> bool:
        """The stream that is current waits for a unit. True where that is not the main stream: it is no row then."""
        if not self.is_beside():
            self._open.pop(unit, None)
            return False
        self._open[unit] = None
        self._seen.setdefault(_key(torch.cuda.current_stream()), {})[unit] = None
        while len(self._open) > _KEPT:
            del self._open[next(iter(self._open))]
        return True

    # -- what the program does with events --------------------------------------------------------------------------

    def recorded(self, event: Any, stream: Any) -> None:
        """An event was recorded on a stream."""
        seen = self._seen.get(_key(stream)) if self._seen else None
        if seen:
            for unit in [unit for unit in seen if unit not in self._open]:
                del seen[unit]
        if seen or hasattr(event, "prism_units"):
            event.prism_units = tuple(seen or ())

    def waited(self, event: Any, stream: Any, wait: Callable[[], None]) -> None:
        """A stream (None: the host) is about to wait for an event; `wait` makes it."""
        units = [unit for unit in getattr(event, "prism_units", ()) if unit in self._open]
        if not units:
            wait()
        elif stream is None or stream == self.main:
            for unit in units:
                del self._open[unit]
            self._waits(units, wait)
        else:
            wait()
            self._seen.setdefault(_key(stream), {}).update(dict.fromkeys(units))


def _key(stream: Any) -> int:
    return int(getattr(stream, "cuda_stream", 0) or getattr(stream, "stream_id", 0))


def follow(tracer: Tracer) -> None:
    """From now on waits of streams beside the main one are no rows of `tracer`; the main one's waits for them are."""

    def waits(units: list[int], wait: Callable[[], None]) -> None:
        start = tracer.now()
        wait()
        end = tracer.now()
        for unit in units:
            tracer.wait(unit, start, end, blocked=False, is_of_main=True)
            start = end

    tracer.streams = StreamFollower(waits)
    follow_events(tracer.streams)


def follow_events(follower: StreamFollower, event_class: Any = None) -> None:
    """Have `follower` told of all events that Python code records and waits for, as long as the process lives."""
    event_class = event_class or torch.cuda.Event
    record, wait, synchronize = event_class.record, event_class.wait, event_class.synchronize

    def followed_record(self: Any, stream: Any = None) -> None:
        if stream is None:
            stream = torch.cuda.current_stream()
        record(self, stream)
        follower.recorded(self, stream)

    def followed_wait(self: Any, stream: Any = None) -> None:
        if not hasattr(self, "prism_units"):
            wait(self, stream)
            return
        there = torch.cuda.current_stream() if stream is None else stream
        follower.waited(self, there, lambda: wait(self, there))

    def followed_synchronize(self: Any) -> None:
        follower.waited(self, None, lambda: synchronize(self))

    event_class.record, event_class.wait, event_class.synchronize = followed_record, followed_wait, followed_synchronize
