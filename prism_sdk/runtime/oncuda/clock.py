"""Dates points of a rank's program by CUDA events, on the clock of the host, without ever waiting for the GPU.

Responsible for recording events and for their times once the GPU has passed them; what lies between is the tracer's.

An event is recorded on the stream that is current and looked at later.  Its time is the distance from an event near it
(distances are 32-bit floats, so far ones are coarse), and the GPU's clock is laid on the host's by causality: the GPU
passes no event before the host recorded it, and an idle stream passes it at once.  So in each period the greatest
"recorded after" is the offset, unless the host was ahead all the time, which shows as more than clocks drift.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

PERIOD_NS = 200_000_000  # after which a new event serves as the near one
_DRIFT_PPM = 50  # by which two clocks may part
_JITTER_NS = 5_000  # between recording an event and an idle stream's passing it


class Mark(int):
    """A point of the program: as a number the host's time when it came there, in ns; `time_ns` the device's, later."""

    event: Any
    time_ns: int | None


class Period:
    """Marks that are dated by one event."""

    def __init__(self, first: Mark) -> None:
        self.first = first
        self.marks = [first]
        self.start_ns = 0  # device time of `first`, in ns after that of the first period


class DeviceClock:
    """Makes marks, and finds their times."""

    def __init__(self) -> None:
        self._periods: deque[Period] = deque()  # with marks that have no times yet, oldest first
        self._dated: Period | None = None  # the last one that is done
        self._spare: list[Any] = []
        self._offset_ns: int | None = None
        self._offset_at = 0
        self.first_host_ns = 0  # from there on marks are dated by the device

    def mark(self, stream: Any = None) -> int:
        """This point of the program on a stream (the current one): a Mark, or a host time where there are no events."""
        now = time.monotonic_ns()
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return now
        mark = Mark(now)
        mark.event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        mark.event.record(stream)
        mark.time_ns = None
        if self._periods and now - self._periods[-1].first < PERIOD_NS:
            self._periods[-1].marks.append(mark)
        else:
            self._periods.append(Period(mark))
            self.first_host_ns = self.first_host_ns or now
        return mark

    def settle(self, *, wait: bool = False) -> None:
        """Date the marks of all periods that the GPU has passed; with `wait` of all, after everything is done."""
        if wait and self._periods:
            torch.cuda.synchronize()
        while self._periods and (wait or len(self._periods) > 1):
            period = self._periods[0]
            if not all(mark.event.query() for mark in period.marks):
                return
            self._date(period)
            self._periods.popleft()

    def _date(self, period: Period) -> None:
        first = period.first.event
        if self._dated is not None:
            period.start_ns = self._dated.start_ns + _elapsed_ns(self._dated.first.event, first)
        times = [period.start_ns + _elapsed_ns(first, mark.event) for mark in period.marks]
        self._set_offset(max(int(mark) - at for mark, at in zip(period.marks, times, strict=True)), period.start_ns)
        assert self._offset_ns is not None
        for mark, at in zip(period.marks, times, strict=True):
            mark.time_ns = at + self._offset_ns
            if mark is not period.first:
                self._spare.append(mark.event)
                mark.event = None
        period.marks = []
        if self._dated is not None:
            self._spare.append(self._dated.first.event)
        self._dated = period

    def _set_offset(self, at_least_ns: int, device_ns: int) -> None:
        """The host's clock less the device's, which is no less than this, and no more than drift allows."""
        if self._offset_ns is not None:
            drift = (device_ns - self._offset_at) * _DRIFT_PPM // 1_000_000 + _JITTER_NS
            if at_least_ns < self._offset_ns - drift:
                return  # the host was ahead all the time
        self._offset_ns, self._offset_at = at_least_ns, device_ns


def _elapsed_ns(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)
