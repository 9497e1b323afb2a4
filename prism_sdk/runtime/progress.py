"""Tells the user of a launch how far it is: a live area on a terminal, a line now and then elsewhere.

It only looks, from a thread of the launcher: ranks and the coordinator do nothing for it. Where the live area is drawn
is livearea.py's business.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from prism_sdk.runtime.gauges import DeviceGauge, Memory, host_memory
from prism_sdk.wording import counted

_LIVE_S = 0.25  # at most four looks a second
_MAX_SHARE = 0.005  # of the launcher's time: with thousands of ranks a look takes longer, and there are fewer of them
_FIRST_LINE_S, _LAST_LINE_S = 2.0, 60.0  # between lines; they become rarer as the run becomes longer
_GIB = float(1 << 30)

Report = Callable[[str], None]
"""Says one line."""


@dataclass(frozen=True)
class Snapshot:
    """Where the ranks of a job stand at one moment. What does not exist in a mode is None."""

    num_running: int
    num_done: int
    num_parked: int | None = None
    num_new: int = 0
    num_virtual: int = 0
    first_step: int | None = None  # the step of the rank that is behind all others
    last_step: int | None = None
    end_step: int | None = None  # the job ends before this one
    num_switches: int | None = None
    num_away: int = 0  # parked ranks whose device memory is elsewhere
    away_bytes: int = 0  # of it

    @property
    def num_ranks(self) -> int:
        """Ranks that are processes."""
        return self.num_running + self.num_done + (self.num_parked or 0) + self.num_new


class Watched(Protocol):
    """What can be looked at from another thread, at any time."""

    def snapshot(self) -> Snapshot | None:
        """Where its ranks stand; None before there are any."""


@dataclass(frozen=True)
class Sample:
    """What is shown at one moment."""

    verb: str
    doing: str
    elapsed_s: float
    ranks: Snapshot | None
    switches_per_s: float | None
    fraction: float | None  # of the run, or of the pass that `doing` names; None: nobody knows
    remaining_s: float | None
    host: Memory | None
    device: Memory | None


class Display(Protocol):
    """Something that shows samples again and again, and goes away."""

    def show(self, sample: Sample) -> None: ...

    def close(self) -> None: ...


class Progress:
    """What one launch says on stderr. Made on entering a ``with`` block; on leaving it the terminal is as before."""

    def __init__(self, verb: str, *, quiet: bool = False, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._verb, self._quiet, self._is_muted = verb, quiet, False
        self._started = time.monotonic()
        self._doing = "starting"
        self._watched: Watched | None = None
        self._pace = _Pace()
        self._stage: tuple[int, int] | None = None  # slices done, slices in all
        self._stage_pace = _Pace()
        self._switches = (0, self._started)
        self._devices: DeviceGauge | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="prism-progress", daemon=True)
        self._display: Display | None = None

    def __enter__(self) -> Self:
        if not self._quiet:
            self._display = _live_area(self._environ.get("TERM", ""))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2.0)  # a terminal that takes no output (Ctrl-S) must not hold up the end
        if self._display is not None:
            self._display.close()

    @property
    def elapsed_s(self) -> float:
        """How long the launch takes so far; what is shown while it runs, and what it says at its end."""
        return time.monotonic() - self._started

    # -- what the launcher says ---------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line, now."""
        if not self._quiet and not self._is_muted:
            _write(f"prism {self._verb}: {text}\n")

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Meanwhile nothing is said: the user does not need the lines of every part of the work."""
        before, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = before

    def doing(self, text: str) -> None:
        """What is going on while no rank runs; of a work in stages the stage says it."""
        if self._stage is None:
            self._doing = text

    def stage(self, done: int, total: int, text: str) -> None:
        """`done` of `total` equal parts of the work, or of the pass that `text` names, are behind us."""
        if done == 0:
            self._stage_pace = _Pace()
        self._stage, self._doing = (done, total), text

    @contextlib.contextmanager
    def watch(self, watched: Watched, after: str) -> Iterator[None]:
        """Show the ranks of `watched` meanwhile, and that we are doing `after` behind that."""
        self._pace, self._watched = _Pace(), watched
        self._switches = (0, time.monotonic())
        try:
            yield
        finally:
            self._watched = None
            self.doing(after)

    # -- looking ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        interval_s = _LIVE_S if self._display is not None else _FIRST_LINE_S
        while not self._ended.wait(interval_s):
            before = time.thread_time()
            sample = self._sample()
            if self._display is not None:
                self._display.show(sample)
                interval_s = max(_LIVE_S, (time.thread_time() - before) / _MAX_SHARE)
            else:
                _write(f"prism {self._verb}: {sample.elapsed_s:6.1f} s  {one_line(sample)}\n")
                interval_s = min(max(_FIRST_LINE_S, sample.elapsed_s / 10), _LAST_LINE_S)

    def _sample(self) -> Sample:
        now = time.monotonic()
        watched, stage, doing = self._watched, self._stage, self._doing
        ranks = None if watched is None else watched.snapshot()
        if watched is not None and ranks is None and stage is None:
            doing = "loading torch"
        if self._devices is None:  # here and not before: the driver takes its time
            self._devices = DeviceGauge(self._environ.get("CUDA_VISIBLE_DEVICES"))
        fraction, remaining = self._how_far(ranks, stage, now)
        return Sample(
            self._verb, doing if ranks is None or stage is not None else "", self.elapsed_s, ranks,
            self._rate(ranks, now), fraction, remaining, host_memory(), self._devices.memory(),
        )  # fmt: skip

    def _rate(self, ranks: Snapshot | None, now: float) -> float | None:
        if ranks is None or ranks.num_switches is None:
            return None
        number, since = self._switches
        self._switches = (ranks.num_switches, now)
        return max(ranks.num_switches - number, 0) / max(now - since, 1e-9)

    def _how_far(self, ranks: Snapshot | None, stage: tuple[int, int] | None, now: float) -> tuple[float | None, ...]:
        inside = None
        if ranks is not None and ranks.end_step and ranks.first_step is not None:
            inside = min(ranks.first_step / ranks.end_step, 1.0)
            remaining = self._pace.remaining_s(ranks.first_step, ranks.end_step, now)
        if stage is None:
            return (None, None) if inside is None else (inside, remaining)
        done, total = stage
        # a slice of which nothing is known counts when it is over
        position = done + (inside or 0.0)
        return min(position / max(total, 1), 1.0), self._stage_pace.remaining_s(position, total, now)


class _Pace:
    """When the rest is done, from how fast it went until the last step forward."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None  # position and time
        self._last = (0.0, 0.0)

    def remaining_s(self, position: float, end: float, now: float) -> float | None:
        """None before there was a step forward, and at the end."""
        if self._first is None or position < self._last[0]:
            self._first = self._last = (position, now)
        if position > self._last[0]:
            self._last = (position, now)
        (start, since), (reached, then) = self._first, self._last
        if reached <= start or reached >= end:
            return None
        return max((end - reached) * (then - since) / (reached - start) - (now - then), 0.0)


def one_line(sample: Sample) -> str:
    """A sample as text, most important first."""
    parts = [sample.doing] if sample.doing else []
    if sample.ranks is not None:
        parts += [ranks_text(sample.ranks), steps_text(sample.ranks)]
    if sample.switches_per_s is not None:
        parts.append(f"{sample.switches_per_s:.0f} switches/s")
    parts.append(memory_text(sample))
    if sample.remaining_s is not None:
        parts.append(f"{clock(sample.remaining_s)} left")
    return "; ".join(part for part in parts if part)


def ranks_text(ranks: Snapshot) -> str:
    """`running 2, parked 6, done 0 of 8 ranks`."""
    parts = [f"running {ranks.num_running}"]
    if ranks.num_parked is not None:
        away = f" ({ranks.num_away} off the device: {ranks.away_bytes / _GIB:.1f} GiB)" if ranks.num_away else ""
        parts.append(f"parked {ranks.num_parked}{away}")
    if ranks.num_new:
        parts.append(f"not started {ranks.num_new}")
    text = ", ".join([*parts, f"done {ranks.num_done}"])
    virtual = f", {ranks.num_virtual} virtual" if ranks.num_virtual else ""
    return f"{text} of {counted(ranks.num_ranks, 'rank')}{virtual}"


def steps_text(ranks: Snapshot) -> str:
    """`step 3..4 of 10`; empty where ranks do not tell."""
    if ranks.first_step is None:
        return ""
    steps = f"{ranks.first_step}" if ranks.first_step == ranks.last_step else f"{ranks.first_step}..{ranks.last_step}"
    return f"step {steps}" + (f" of {ranks.end_step}" if ranks.end_step else "")


def memory_text(sample: Sample) -> str:
    """`host memory 3.2 of 15.6 GiB, device memory 20.1 of 139.8 GiB`; what is unknown is left out."""
    return ", ".join(
        f"{name} memory {memory.used_bytes / _GIB:.1f} of {memory.total_bytes / _GIB:.1f} GiB"
        for name, memory in (("host", sample.host), ("device", sample.device))
        if memory is not None
    )


def clock(seconds: float) -> str:
    """`0:42`, `12:05`, `3:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _live_area(term: str) -> Display | None:
    """One at the bottom of the terminal; None where stderr is no terminal, or one that cannot do that."""
    try:
        if not sys.stderr.isatty():
            return None
        fd = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something without a descriptor
        return None
    from prism_sdk.runtime.livearea import LiveArea

    return LiveArea.at(fd, term=term)


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone must not end the job
        sys.stderr.write(line)
        sys.stderr.flush()
