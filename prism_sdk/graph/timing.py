"""Computes when every unit of a job starts and ends: an exact longest path over the whole graph.

It knows nothing of files, sandboxes or statistics.

The model, from the design's rule ``start(u) = max over predecessors p of (end(p) + gap(p, u))``, where a collective
starts at its last arrival. For the rows of a rank in order, with H the end of the host row before (or the origin):

- COMPUTE: ``start = H + gap``, ``end = start + duration``; the host is busy until ``end``.
- COLLECTIVE, SEND, RECV are *posted* at ``H + gap`` and take no host time. Only a GPU has a gap here, above 0 where
  the stream that asks is behind the one whose rows these are, below 0 where it is ahead; below, H is with the gap.
  - A collective e of group g is *ready* at its last arrival ``A(e) = max over members m of max(H_m, C_m(e - 1))``:
    each rank has one communication stream a group, so a collective cannot start before the one before it in that
    group has completed on that rank. It completes for member m at ``C_m(e) = A(e) + transfer_m``.
  - A SEND is buffered: ``C = H + transfer``. A RECV completes at ``max(H_send, H_recv) + transfer``.
- WAIT: ``start = H``, ``end = max(start + duration, C(awaited unit) + gap)``. Here ``gap`` is the *wake overhead*, the
  time from the completion to the host running again, and ``duration`` the least time that a wait takes.

In a trace, a COMPUTE row's duration is ``end_ns - start_ns``. A WAIT row's measured length contains waiting, so its
least duration is kept in its ``transfer_ns`` (a column without other meaning there), absent = 0; absent gaps are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.errors import GraphError, MissingTimingError
from prism_sdk.graph.job import JobGraph
from prismtrace import ABSENT, Phase, UnitKind

__all__ = ["Schedule", "Timing", "schedule"]

Int64Array = npt.NDArray[np.int64]

# above every step, so that rank and step are one number; absent steps are below 0
_NUM_STEPS = 2**33


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The weights of a graph, one entry a row: see the module for what each means for which kind of row."""

    gap_ns: Int64Array
    duration_ns: Int64Array
    transfer_ns: Int64Array

    @classmethod
    def from_graph(cls, graph: JobGraph, *, default_transfer_ns: int | None = None) -> Timing:
        """Take the weights from a graph's columns.

        Absent compute durations raise MissingTimingError, and so do absent transfers unless a default is given.
        """
        c = graph.columns
        kind = c["kind"]
        is_compute, is_wait = kind == UnitKind.COMPUTE, kind == UnitKind.WAIT
        lacking = np.flatnonzero(is_compute & ((c["start_ns"] == ABSENT) | (c["end_ns"] == ABSENT)))
        if len(lacking):
            _raise_missing(graph, lacking, "start or end of compute units is absent")
        transfer = c["transfer_ns"]
        lacking = np.flatnonzero(~is_compute & ~is_wait & (transfer == ABSENT))
        if len(lacking) and default_transfer_ns is None:
            _raise_missing(graph, lacking, "the transfer time of communication units is absent")
        present = np.where(transfer == ABSENT, 0, transfer)
        duration = np.where(is_compute, c["end_ns"] - c["start_ns"], np.where(is_wait, present, 0))
        moved = np.where(transfer == ABSENT, default_transfer_ns or 0, transfer)
        lead = c["prism.lead_ns"]
        timing = cls(
            gap_ns=np.where(c["gap_ns"] == ABSENT, 0, c["gap_ns"]) - np.where(lead == ABSENT, 0, lead),
            duration_ns=duration,
            transfer_ns=np.where(is_compute | is_wait, 0, moved),
        )
        timing.check(graph)
        return timing

    def check(self, graph: JobGraph) -> None:
        """Raise MissingTimingError where a weight is negative, GraphError where the sizes do not fit."""
        for name in ("gap_ns", "duration_ns", "transfer_ns"):
            values = getattr(self, name)
            if len(values) != len(graph):
                raise GraphError(f"{name} has {len(values)} entries for the {len(graph)} rows of {graph.source}")
            may_be_negative = (graph.event_of_row >= 0) & (name == "gap_ns")
            negative = np.flatnonzero((values < 0) & ~may_be_negative)
            if len(negative):
                _raise_missing(graph, negative, f"{name} is negative ({values[negative[0]]})")


def _raise_missing(graph: JobGraph, rows: Int64Array, what: str) -> None:
    listing = [graph.describe(int(row)) for row in rows[:8]]
    if len(rows) > 8:
        listing.append(f"... and {len(rows) - 8} more")
    raise MissingTimingError(
        f"{graph.source}: {what}", problems=listing,
        hint="a bare graph has no usable times: calibrate it first (prism calibrate), or observe the job",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When each row starts and ends. For communication rows: when it is posted and when it completes."""

    graph: JobGraph
    start_ns: Int64Array
    end_ns: Int64Array
    #: The last arrival of each event of the graph.
    arrival_ns: Int64Array
    #: The host clock of the row's rank after the row.
    host_ns: Int64Array

    def step_ends_ns(self, rank: int) -> tuple[Int64Array, Int64Array]:
        """The steps of a rank and the host clock after the last row of each."""
        rows = self.graph.rows(rank)
        step = np.maximum.accumulate(self.graph.columns["step"][rows].astype(np.int64))
        last = np.flatnonzero(np.append(step[1:] != step[:-1], True)) if len(step) else np.zeros(0, dtype=np.int64)
        return step[last], self.host_ns[rows][last]

    def step_times_ns(self, rank: int) -> tuple[Int64Array, Int64Array]:
        """The steps of a rank but the first, and the time of each: its end minus the end of the step before."""
        steps, ends = self.step_ends_ns(rank)
        return steps[1:], np.diff(ends)

    @property
    def end_of_job_ns(self) -> int:
        """When the last host ends its last row."""
        last = self.graph.offsets[1:][np.diff(self.graph.offsets) > 0] - 1
        return int(self.host_ns[last].max())


def step_bounds(
    step: npt.NDArray[np.integer[Any]], phase: npt.NDArray[np.integer[Any]], offsets: npt.NDArray[np.integer[Any]]
) -> tuple[Int64Array, Int64Array, Int64Array, npt.NDArray[np.bool_]]:
    """The steps of ranks: place of the rank, which step, the row behind its last one, and whether it is whole.

    A step is whole where the optimizer ran behind a backward pass. What an optimizer still does behind the end of its
    step (clearing gradients, gathering parameters) are the first rows of the next one, which may be no more than the
    end of the job. Of a rank that has no such step those with any row of an optimizer count, or else all.

    Args:
        step, phase: (N,) the columns of the rows of all ranks, in order.
        offsets: (R + 1,) where the rows of each rank begin.
    """
    if not len(step):
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, np.zeros(0, dtype=np.bool_)
    running = np.maximum.accumulate(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) * _NUM_STEPS + step)
    ends = np.append(np.flatnonzero(running[1:] != running[:-1]) + 1, len(step))
    begins, row = np.append(0, ends[:-1]), np.arange(len(step))
    place = np.searchsorted(offsets, begins, side="right") - 1
    optimizer = np.maximum.reduceat(np.where(phase == Phase.OPTIMIZER, row, -1), begins)
    backward = np.minimum.reduceat(np.where(phase == Phase.BACKWARD, row, len(step)), begins)
    is_whole = optimizer > backward
    for fallback in (optimizer >= 0, np.ones(len(ends), dtype=np.bool_)):
        is_whole |= fallback & ~np.isin(place, place[is_whole])
    return place, running[begins] - place * _NUM_STEPS, ends, is_whole


def whole_steps(
    graph: JobGraph, place: npt.NDArray[np.integer[Any]], step: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.bool_]:
    """(N,) which steps are whole, as `step_bounds` has it.

    Args:
        graph: the job.
        place, step: (N,) places of ranks in the graph, and steps of theirs.
    """
    of_rank, which, _, is_whole = step_bounds(graph.columns["step"], graph.columns["phase"], graph.offsets)
    return np.isin(place * _NUM_STEPS + step, (of_rank * _NUM_STEPS + which)[is_whole])


def job_steps_ns(
    step: npt.NDArray[np.integer[Any]], end_ns: Int64Array, is_whole: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.integer[Any]], Int64Array]:
    """A job's whole steps but the first, and the time of each: from its last rank's end of the step before to its end.

    A rank that waits in a step for one that was late in the step before would count that time again: means over ranks
    are too long, the more so the fewer steps there are behind an uneven first one.

    Args:
        step, end_ns, is_whole: (N,) steps of ranks, when they ended, and whether they are whole.
    """
    steps, place = np.unique(step, return_inverse=True)
    latest = np.full(len(steps), np.iinfo(np.int64).min)
    np.maximum.at(latest, place, end_ns)
    counts = np.isin(steps[1:], step[is_whole])
    return steps[1:][counts], np.diff(np.maximum.accumulate(latest))[counts]


def schedule(
    graph: JobGraph,
    *,
    timing: Timing | None = None,
    initial_ns: Mapping[int, int] | None = None,
    allow_absent_ranks: bool = False,
) -> Schedule:
    """The timeline of a graph: start and end of every row, to the nanosecond.

    Args:
        graph: a graph of all ranks.
        timing: the weights; without it those of the graph's own columns.
        initial_ns: the clock at which a rank begins (0 where not given).
        allow_absent_ranks: join events over the loaded ranks alone, as if absent ones were never late.

    Raises:
        GraphDeadlockError: the units wait for each other in a circle.
        MissingTimingError: a weight is absent or negative.
    """
    if not allow_absent_ranks and not graph.event_is_whole.all():
        first = int(graph.event_rows[graph.event_offsets[np.flatnonzero(~graph.event_is_whole)[0]]])
        raise GraphError(f"{graph.source}: {graph.describe(first)} involves ranks that are not in the graph",
                         hint="load all ranks, or say that absent ranks are never late")  # fmt: skip
    if timing is None:
        timing = Timing.from_graph(graph)
    else:
        timing.check(graph)
    kind = graph.columns["kind"]
    # host time of compute rows, summed along each rank; the loop below needs to look at no compute row
    busy = np.where(kind == UnitKind.COMPUTE, timing.gap_ns + timing.duration_ns, 0)
    summed = np.cumsum(busy)
    order = graph.linear_order
    base, arrival = _walk(graph, timing=timing, order=order, summed=summed, initial_ns=initial_ns)
    host = base + summed
    end = host.copy()
    start = end - np.where(kind == UnitKind.COMPUTE, timing.duration_ns, 0)
    communicates = graph.event_of_row >= 0
    sends = kind == UnitKind.SEND
    received = communicates & ~sends
    start[communicates] += timing.gap_ns[communicates]
    end[received] = arrival[graph.event_of_row[received]] + timing.transfer_ns[received]
    end[sends] = start[sends] + timing.transfer_ns[sends]
    waits = np.flatnonzero(kind == UnitKind.WAIT)
    # a wait starts where the row before it left the host
    is_first = np.isin(waits, graph.offsets[:-1])
    begun = host[waits - 1]
    if is_first.any():
        origin = _origins(graph, initial_ns)
        begun[is_first] = origin[np.searchsorted(graph.offsets, waits[is_first], side="right") - 1]
    start[waits] = begun
    for array in (start, end, arrival, host):
        array.setflags(write=False)
    return Schedule(graph=graph, start_ns=start, end_ns=end, arrival_ns=arrival, host_ns=host)


def _origins(graph: JobGraph, initial_ns: Mapping[int, int] | None) -> Int64Array:
    given = initial_ns or {}
    return np.array([given.get(rank, 0) for rank in graph.ranks], dtype=np.int64)


def _walk(
    graph: JobGraph, *, timing: Timing, order: Int64Array, summed: Int64Array, initial_ns: Mapping[int, int] | None
) -> tuple[Int64Array, Int64Array]:
    """The host clock less the summed compute time after each row, and the last arrival of each event.

    That difference changes at WAIT rows only. The loop visits communication and WAIT rows in causal order.
    """
    kind = graph.columns["kind"]
    before = np.concatenate([[0], summed])[graph.offsets[:-1]]
    offset_of_rank = (_origins(graph, initial_ns) - before).tolist()
    positions = (np.searchsorted(graph.offsets, order, side="right") - 1).tolist()
    summed_at = summed[order].tolist()
    events = graph.event_of_row[order].tolist()
    awaited = graph.awaited_row[order]
    awaits_send = (awaited >= 0) & (kind[awaited] == UnitKind.SEND)
    transfer_of_awaited = np.where(awaited >= 0, timing.transfer_ns[awaited], 0) + timing.gap_ns[order]
    # the event waited for; a SEND completes by itself, so for it -2 - row, and its post is remembered
    least = timing.duration_ns[order].tolist()
    target = np.where(awaits_send, -2 - awaited, np.where(awaited >= 0, graph.event_of_row[awaited], -1)).tolist()
    is_send = (kind[order] == UnitKind.SEND).tolist()
    delay = transfer_of_awaited.tolist()
    rows = order.tolist()
    post_gap = np.where(graph.event_of_row[order] >= 0, timing.gap_ns[order], 0).tolist()
    # what an event waits for beside its members: the slowest member of the one before it in its group
    slowest = (
        np.maximum.reduceat(timing.transfer_ns[graph.event_rows], graph.event_offsets[:-1])
        if graph.num_events
        else np.zeros(0, dtype=np.int64)
    ).tolist()
    previous = graph.event_previous.tolist()
    low = int(np.iinfo(np.int64).min)
    arrival = [low] * graph.num_events
    posted: dict[int, int] = {}
    wait_rows: list[int] = []
    wait_offsets: list[int] = []
    for i, position in enumerate(positions):
        at = summed_at[i]
        clock = offset_of_rank[position] + at
        joined = events[i]
        if joined >= 0:
            clock += post_gap[i]
            if is_send[i]:
                posted[rows[i]] = clock
            if clock > arrival[joined]:
                arrival[joined] = clock
            before_it = previous[joined]
            # final once the last member is here, because all its members have posted the one before it by then
            if before_it >= 0 and arrival[before_it] + slowest[before_it] > arrival[joined]:
                arrival[joined] = arrival[before_it] + slowest[before_it]
            continue
        until = clock + least[i]
        awaits = target[i]
        if awaits != -1:
            done = (arrival[awaits] if awaits >= 0 else posted[-2 - awaits]) + delay[i]
            if done > until:
                until = done
        offset_of_rank[position] = until - at
        wait_rows.append(rows[i])
        wait_offsets.append(until - at)
    return _spread(graph, rows=wait_rows, offsets=wait_offsets, initial=_origins(graph, initial_ns) - before), np.array(
        arrival, dtype=np.int64
    )


def _spread(graph: JobGraph, *, rows: list[int], offsets: list[int], initial: Int64Array) -> Int64Array:
    """Carry the value of each WAIT row (or the initial one of a rank) forward to the rows after it."""
    mark = np.zeros(len(graph), dtype=np.int64)
    value = np.zeros(len(graph), dtype=np.int64)
    nonempty = np.diff(graph.offsets) > 0
    firsts = graph.offsets[:-1][nonempty]
    value[firsts] = initial[nonempty]
    mark[firsts] = firsts
    if rows:
        at = np.array(rows, dtype=np.int64)
        value[at] = offsets
        mark[at] = at
    return value[np.maximum.accumulate(mark)]
