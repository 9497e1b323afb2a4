"""Dates points of a rank's program by CUDA events, on the clock of the host, without ever waiting for the GPU.

Responsible for recording events and for their times once the GPU has passed them; what lies between is the tracer's.

An event is recorded on a stream and looked at later.  Its time is the distance from an event near it
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
_SEEN_NS = 1_500  # between the GPU's passing a point and a look that sees it, at best
_JITTER_NS = 5_000  # between recording an event and an idle stream's passing it
_MAX_SPARE = 4096
_POLL_S = 0.005


class Mark(int):
    """A point of the program: as a number the host's time when it came there, in ns; `time_ns` the device's, later."""

    event: Any
    stream: int
    time_ns: int | None = None
    seen_ns: int = 0
    """When somebody who polls saw the GPU just behind this point, if anybody does."""


class Period:
    """Marks that are dated by one event."""

    def __init__(self, first: Mark) -> None:
        self.first = first
        self.marks = [first]
        self.start_ns = 0  # device time of `first`, in ns after that of the first period

    def is_passed(self) -> bool:
        """Whether the GPU has passed all marks: of each stream the last one."""
        last = {mark.stream: mark for mark in self.marks}
        return all(mark.event.query() for mark in last.values())


class DeviceClock:
    """Makes marks, and finds their times.

    Marks are recorded on the program's *main* stream, whichever stream is current: the one that was current at the
    first mark or when `follow` was last called.  `beside` makes marks on other streams.
    """

    def __init__(self) -> None:
        self._periods: deque[Period] = deque()  # with marks that have no times yet, oldest first
        self._dated: Period | None = None  # the last one that is done
        self._spare: list[Any] = []
        self._offset_ns: int | None = None
        self._offset_at = 0
        self._device = -1
        self._streams: dict[int, Any] = {}  # address -> what to record an event on
        self.main = -1  # the main stream's address
        self.first_host_ns = 0  # from there on marks are dated by the device
        self._is_stopped = False

    def mark(self) -> int:
        """This point of the program: a Mark, or a plain host time where no event can be recorded."""
        now = time.monotonic_ns()
        return self._mark(now, self.main) if self._is_ready() else now

    def points(self) -> tuple[int, Mark | None]:
        """What `mark` and `beside` give one after the other, with one look at device and stream."""
        now = time.monotonic_ns()
        if not self._is_ready():
            return now, None
        mark, stream = self._mark(now, self.main), current_stream(self._device)
        return mark, None if stream == self.main else self._mark_beside(stream)

    def again(self, mark: Mark) -> Mark:
        """The point that the stream of `mark` has got to now."""
        return self._mark(time.monotonic_ns(), mark.stream)

    def beside(self) -> Mark | None:
        """This point on the current stream, where that is another than the main one; None where it is not."""
        if not self._is_ready():
            return None
        stream = current_stream(self._device)
        return None if stream == self.main else self._mark_beside(stream)

    def _mark_beside(self, stream: int) -> Mark:
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.current_stream()
        return self._mark(time.monotonic_ns(), stream)

    def stream_beside(self) -> int | None:
        """The address of the current stream, where that is another than the main one."""
        if not self._is_ready():
            return None
        stream = current_stream(self._device)
        return None if stream == self.main else stream

    def follow(self) -> None:
        """The stream that is current here is the program's main one from now on."""
        if torch.cuda.is_initialized() and (self._device < 0 or current_device() == self._device):
            self._device = current_device()
            stream = current_stream(self._device)
            if stream != self.main:
                self._streams[stream], self.main = torch.cuda.current_stream(), stream

    def stop(self) -> None:
        """The GPU is not asked for anything any more, and points are those of the host: it may have failed, or hang."""
        self._is_stopped = True

    def _is_ready(self) -> bool:
        if self._is_stopped:
            return False
        if self._device < 0:
            self.follow()
        # events of two devices have no distance; one that is captured has no time
        return self._device >= 0 and current_device() == self._device and not torch.cuda.is_current_stream_capturing()

    def _mark(self, now: int, stream: int) -> Mark:
        mark = Mark(now)
        mark.event = event = self._spare.pop() if self._spare else Event(enable_timing=True)
        event.record(self._streams[stream])
        mark.stream = stream
        periods = self._periods
        if periods and now - (period := periods[-1]).first < PERIOD_NS:
            period.marks.append(mark)
        else:
            self._periods.append(Period(mark))
            self.first_host_ns = self.first_host_ns or now
        return mark

    def settle(self, *, wait: bool = False, patience_s: float | None = None) -> None:
        """Date the marks of all periods that the GPU has passed; with `wait` of all, after everything is done.

        With `patience_s` no longer is waited than that: a GPU may wait for ever for another rank.
        """
        if self._is_stopped:
            return
        if wait and self._periods and patience_s is None:
            torch.cuda.synchronize()
        until = time.monotonic() + (patience_s or 0)
        while self._periods and (wait or len(self._periods) > 1):
            period = self._periods[0]
            while wait and not period.is_passed() and time.monotonic() < until:
                time.sleep(_POLL_S)
            if not period.is_passed():
                if patience_s is None or not period.first.event.query():
                    return
                period.marks = [mark for mark in period.marks if mark.event.query()]
            self._date(period)
            self._periods.popleft()

    def _date(self, period: Period) -> None:
        first = period.first.event
        if self._dated is not None:
            period.start_ns = self._dated.start_ns + _elapsed_ns(self._dated.first.event, first)
        times = [period.start_ns + _elapsed_ns(first, mark.event) for mark in period.marks]
        at_least = max(int(mark) - at for mark, at in zip(period.marks, times, strict=True))
        seen = [mark.seen_ns - at for mark, at in zip(period.marks, times, strict=True) if mark.seen_ns]
        if seen:
            at_least = max(at_least, min(seen) - _SEEN_NS)
        self._set_offset(at_least, period.start_ns)
        if seen:
            self._offset_ns, self._offset_at = at_least, period.start_ns
        assert self._offset_ns is not None
        for mark, at in zip(period.marks, times, strict=True):
            mark.time_ns = at + self._offset_ns
            if mark is not period.first:
                self._keep(mark)
        period.marks = []
        if self._dated is not None:
            self._keep(self._dated.first)
        self._dated = period

    def _keep(self, mark: Mark) -> None:
        if len(self._spare) < _MAX_SPARE:
            self._spare.append(mark.event)
        mark.event = None

    def _set_offset(self, at_least_ns: int, device_ns: int) -> None:
        """The host's clock less the device's, which is no less than this, and no more than drift allows."""
        if self._offset_ns is not None:
            drift = (device_ns - self._offset_at) * _DRIFT_PPM // 1_000_000 + _JITTER_NS
            if at_least_ns < self._offset_ns - drift:
                return  # the host was ahead all the time
        self._offset_ns, self._offset_at = at_least_ns, device_ns


# the C classes and functions under torch.cuda: a mark is made some hundred times a step
_bindings: Any = torch._C
Event: Any = _bindings._CudaEventBase


def current_device() -> int:
    """The index of the device that is current in this thread; CUDA is initialised."""
    return int(_bindings._cuda_getDevice())


def current_stream(device: int) -> int:
    """The address of the stream that is current on a device."""
    return int(_bindings._cuda_getCurrentRawStream(device))


def _elapsed_ns(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)
