"""Knows which communications lie ahead of a stream of the program, and notices when the main stream waits for them.

Responsible for following `torch.cuda.Event` and what is built on it (`wait_stream`, `wait_event`, `record_event`); what
a wait means for the trace is the tracer's.  Waits that C++ makes by itself pass unseen.

A program overlaps communication by asking for it on a stream of its own and letting the main stream wait for an event
of that stream later, as FSDP2 does.  That wait is the program's wait for the communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from prism_sdk.runtime.oncuda.clock import DeviceClock
    from prism_sdk.runtime.tracer import Tracer

_MOST = 1024  # units of one stream that nobody waits for, before the oldest are given up
Waited = Callable[[list[int], Callable[[], None]], None]


class StreamFollower:
    """Units on streams beside the main one that the main stream has not waited for."""

    def __init__(self, main: Callable[[], int], waited: Waited) -> None:
        """`main()` is the address of the main stream; `waited(units, wait)` is to call `wait` and to note it."""
        self._main, self._waited = main, waited
        self._ahead: dict[int, list[int]] = {}  # address of a stream -> units that what comes on it is behind of
        self._is_installed = False

    def add(self, stream: int, unit: int) -> None:
        """What comes next on `stream` is behind `unit`."""
        if not self._is_installed:
            self._install()
        ahead = self._ahead.setdefault(stream, [])
        ahead.append(unit)
        if len(ahead) > _MOST:
            del ahead[: -_MOST // 2]

    def _install(self) -> None:
        self._is_installed = True
        event_class: Any = torch.cuda.Event
        record, wait = event_class.record, event_class.wait

        def followed_record(event: Any, stream: Any = None) -> None:
            record(event, stream)
            if self._ahead:
                self._recorded(event, stream)

        def followed_wait(event: Any, stream: Any = None) -> None:
            units = event.__dict__.get("prism_units")
            if units:
                self._waits(units, stream, lambda: wait(event, stream))
            else:
                wait(event, stream)

        event_class.record, event_class.wait = followed_record, followed_wait

    def _recorded(self, event: Any, stream: Any) -> None:
        units = self._ahead.get(_address(stream))
        if units:
            event.prism_units = tuple(units)
        else:
            event.__dict__.pop("prism_units", None)

    def _waits(self, units: tuple[int, ...], stream: Any, wait: Callable[[], None]) -> None:
        address = _address(stream)
        if address != self._main():  # who waits for this stream waits for them
            wait()
            known = self._ahead.setdefault(address, [])
            known += [unit for unit in units if unit not in known]
            return
        open_units = {unit for ahead in self._ahead.values() for unit in ahead}
        mine = [unit for unit in units if unit in open_units]
        if not mine:
            wait()
            return
        self._waited(mine, wait)
        done = set(mine)
        self._ahead = {
            other: left for other, ahead in self._ahead.items() if (left := [u for u in ahead if u not in done])
        }


class SideWaits:
    """Keeps waits of streams beside the main one out of the rows of a tracer, and puts the main one's in."""

    def __init__(self, tracer: Tracer, clock: DeviceClock) -> None:
        self._tracer, self._clock = tracer, clock
        self._follower = StreamFollower(lambda: clock.main, self._main_waits)

    def takes(self, unit: int) -> bool:
        """The stream that is current waits for a unit. True where it is not the main one: then it is no row."""
        stream = self._clock.stream_beside()
        if stream is None:
            return False
        self._follower.add(stream, unit)
        return True

    def add(self, stream: int, unit: int) -> None:
        """What comes next on `stream`, one beside the main one, is behind `unit`."""
        self._follower.add(stream, unit)

    def follow(self) -> None:
        """The stream that is current here is the program's main one from now on."""
        self._clock.follow()

    def _main_waits(self, units: list[int], wait: Callable[[], None]) -> None:
        start = self._tracer.now()
        wait()
        end = self._tracer.now()
        for unit in units:
            self._tracer.wait(unit, start, end, blocked=False, is_of_main=True)
            start = end


def follow_streams(tracer: Tracer) -> None:
    """Have a tracer with the times of the host keep streams apart; one with those of the device does so by itself."""
    from prism_sdk.runtime.oncuda.clock import DeviceClock

    if tracer.streams is None:
        tracer.streams = SideWaits(tracer, DeviceClock())


def _address(stream: Any) -> int:
    return int((torch.cuda.current_stream() if stream is None else stream).cuda_stream)
