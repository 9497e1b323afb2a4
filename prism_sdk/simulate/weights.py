"""Finds the weights of a job: from the columns of a calibrated graph, or from the times of an observed one.

What the two weights of a row mean is written in ``job``. The rules for observed times are those of
``prism_sdk.graph.calibrate.measure``; here every row gets a weight, so that the times come out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.errors import MissingTimingError
from prism_sdk.simulate import kernel
from prism_sdk.simulate.compiling import call
from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.recalled import Recalled
from prismtrace import ABSENT, UnitKind

__all__ = ["CALIBRATED_COLUMNS", "LEAD", "MEASURED", "PROVENANCE", "UNKNOWN_TRANSFER", "calibrated_weights",
           "observed_weights"]  # fmt: skip

Int64Array = npt.NDArray[np.int64]
MEASURED = 1
PROVENANCE = "prism.provenance"
LEAD = "prism.lead_ns"
#: What the weights of a calibrated graph follow from.
CALIBRATED_COLUMNS = ("kind", "start_ns", "end_ns", "transfer_ns", "gap_ns", LEAD, PROVENANCE)
#: In ``main`` of communication rows until a cluster profile gives the transfer.
UNKNOWN_TRANSFER = np.int64(-(2**62))
_LOW = np.iinfo(np.int64).min


def calibrated_weights(
    c: Mapping[str, npt.NDArray[Any]], *, rank: int, first_index: int, source: str, transfers_needed: bool = True,
    recalled: Recalled | None = None,
) -> tuple[Int64Array, Int64Array]:  # fmt: skip
    """Main and side weights of one rank of a calibrated graph; raises MissingTimingError where one is absent."""
    recalled = Recalled() if recalled is None else recalled
    kind, transfer, start, end = c["kind"], c["transfer_ns"], c["start_ns"], c["end_ns"]
    is_compute, is_moving = recalled.of(_kinds, kind)
    side, is_side_wrong = recalled.of(_calibrated_side, kind, c["gap_ns"], c[LEAD])
    lacks_time = is_compute & ((start == ABSENT) | (end == ABSENT))
    is_known = transfer != ABSENT
    lacks_transfer = is_moving & ~is_known
    main = np.where(is_compute, end - start, np.where(is_known, transfer, 0))
    if not transfers_needed:
        main[lacks_transfer] = UNKNOWN_TRANSFER
        lacks_transfer = np.zeros_like(lacks_transfer)
    wrong = lacks_time | lacks_transfer | is_side_wrong
    if len(main) and (int(main.min()) < 0 or wrong.any()):
        wrong = wrong | ((main < 0) & (main != UNKNOWN_TRANSFER))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        what = ("lacks its start or end" if lacks_time[row] else "lacks its transfer time" if lacks_transfer[row]
                else "has a negative time")  # fmt: skip
        raise MissingTimingError(
            f"{source}: rank {rank} unit {first_index + row} ({UnitKind(int(kind[row])).name.lower()}) {what}; so do "
            f"{int(wrong.sum()) - 1} other units of this rank",
            hint="calibrate the graph (prism calibrate), or give transfers with --cluster",
        )
    return main, side


def _kinds(kind: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which units compute, and which communicate."""
    is_compute = kind == UnitKind.COMPUTE
    return is_compute, ~is_compute & (kind != UnitKind.WAIT)


def _calibrated_side(
    kind: npt.NDArray[np.uint8], gap: Int64Array, lead: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Side weights, and where they are wrong. A lead is that of a post by a stream that was ahead of its rows'."""
    _, is_moving = _kinds(kind)
    side = np.where(gap == ABSENT, 0, gap) - np.where(is_moving & (lead != ABSENT), lead, 0)
    return side, ~is_moving & (side < 0)


def observed_weights(
    job: SimJob, times: list[tuple[Int64Array, Int64Array]], *, has_streams: bool = False
) -> SimJob:
    """The job with the weights that its times show; ``times`` has start and end of the rows of each rank.

    An operation starts at its last post, and not before the one before it in its group is complete on all members.
    Where the times contradict the second (the program waited for them in another order) it is given up for that
    operation; members that were complete before the last post are detached. ``has_streams``: times are those of a GPU,
    where a stream may ask for an operation ahead of the one whose rows these are.
    """
    p, lanes = job.programs, job.lanes
    total, num_collectives = lanes.total_events, lanes.num_collectives
    arrival, completed = np.full(total + 1, _LOW), np.full(total + 1, _LOW)
    untimed = np.zeros(total + 1, dtype=np.uint8)
    num_units = len(job)
    for at, (start, end) in enumerate(times):
        rows = p.rows(int(job.program[at]))
        call(kernel.arrivals, p.kind, p.lane_of, p.ordinal, rows.start, rows.stop, int(lanes.offsets[at]), lanes.event,
             start, end, 0, ABSENT, arrival, completed, untimed, num_units=num_units)  # fmt: skip
    previous = np.full(total + 1, _LOW)
    inner = np.ones(total, dtype=np.bool_)
    inner[lanes.first_event] = False
    inner[num_collectives:] = False
    chained = np.flatnonzero(inner)
    previous[chained] = completed[chained - 1]
    ready = np.maximum(arrival, previous)
    # a collective that some member completed before the one before it: no chain
    early = np.zeros(total + 1, dtype=np.bool_)
    for at, (_, end) in enumerate(times):
        event, row = _events(job, at)
        is_late = (end[row] != ABSENT) & (end[row] < ready[event]) & (end[row] >= arrival[event])
        early[event[is_late]] = True
    ready = np.where(early, arrival, ready)
    main: list[Int64Array] = []
    side: list[Int64Array] = []
    ends: list[Int64Array] = []
    detached, untimed_rows = 0, 0
    for at, (start, end) in enumerate(times):
        m, s, num, num_lacking, bound_ends = _of_rank(job, at, start, end, ready, completed, untimed, has_streams)
        main.append(m)
        side.append(s)
        detached += num
        untimed_rows += num_lacking
        ends.append(bound_ends)
    notes = []
    if detached:
        notes.append(f"{detached} communication units were complete before the last arrival: they wait for nobody")
    if early[:num_collectives].any():
        notes.append(f"{int(early[:num_collectives].sum())} collectives do not wait for the one before them")
    if untimed_rows:
        notes.append(f"{untimed_rows} communication units have no times of their own: their transfer counts as 0")
    flags = np.ones(max(num_collectives, 1), dtype=np.uint8)
    flags[:num_collectives] = ~early[:num_collectives]
    joined = np.concatenate(main)
    return replace(
        job, main=joined, side=np.concatenate(side), chained=flags, num_detached=detached, notes=(*job.notes, *notes),
        provenance=np.full(len(joined), MEASURED, dtype=np.uint8), recorded_step_ns=_recorded(job, ends),
        origin_ns=job.origin_ns - int(job.origin_ns.min()),
    )  # fmt: skip


def _events(job: SimJob, at: int) -> tuple[Int64Array, Int64Array]:
    """The events of the communication rows of a rank position, and these rows."""
    p = job.programs
    rows = p.rows(int(job.program[at]))
    row = np.flatnonzero(p.lane_of[rows] >= 0)
    base = job.lanes.event[job.lanes.offsets[at] : job.lanes.offsets[at + 1]]
    return base[p.lane_of[rows][row]] + p.ordinal[rows][row], row


def _of_rank(
    job: SimJob,
    at: int,
    start: Int64Array,
    end: Int64Array,
    ready: Int64Array,
    completed: Int64Array,
    untimed: npt.NDArray[np.uint8],
    has_streams: bool,
) -> tuple[Int64Array, Int64Array, int, int, Int64Array]:
    p = job.programs
    rows = p.rows(int(job.program[at]))
    kind, awaited = p.kind[rows], p.awaited[rows]
    is_host = (kind == UnitKind.COMPUTE) | (kind == UnitKind.WAIT)
    timed = (start != ABSENT) & (end != ABSENT)
    if (is_host & ~timed).any():
        at_row = int(np.flatnonzero(is_host & ~timed)[0])
        raise MissingTimingError(f"{job.source}: rank {job.ranks[at]} has {int((is_host & ~timed).sum())} units of "
                                 f"computing or waiting without times, the first is unit {at_row}",
                                 hint="observe the job again, or calibrate the graph")  # fmt: skip
    # the end of the host row before each row
    known = start[start != ABSENT]
    begun = int(known[0]) if len(known) else 0
    carried = np.concatenate([[begun], np.where(is_host, end, _LOW)])[:-1]
    before: Int64Array = np.maximum.accumulate(carried)
    main, side = np.zeros(len(kind), dtype=np.int64), np.zeros(len(kind), dtype=np.int64)
    is_compute = kind == UnitKind.COMPUTE
    # units of the host that overlap take what they add
    side[is_compute] = np.maximum(start - before, 0)[is_compute]
    main[is_compute] = (end - np.maximum(start, before))[is_compute]
    np.maximum(main, 0, out=main)
    event, row = _events(job, at)
    # an operation that nobody waited for has a post and no end: it takes as long as for those who did
    no_earlier = np.full(len(row), _LOW) if has_streams else before[row]
    posted = np.where(start[row] != ABSENT, np.maximum(start[row], no_earlier), before[row])
    side[row] = posted - before[row]
    is_send = kind[row] == UnitKind.SEND
    # and one that a wait found complete was complete by the end of that wait, whatever it took for the others
    waits = np.flatnonzero(kind == UnitKind.WAIT)
    found = np.full(len(kind), completed.max(initial=_LOW))
    backwards = waits[awaited[waits] >= 0][::-1]
    found[awaited[backwards]] = end[backwards]  # the first wait for it counts
    ended = np.where(end[row] == ABSENT, np.minimum(completed[event], found[row]), end[row])
    moved = np.where(is_send, end[row] - posted, ended - ready[event])
    lacking = (ended == _LOW) | (untimed[event] > 0) | (is_send & (end[row] == ABSENT))
    is_detached = (moved < 0) & ~is_send & ~lacking & (timed[row] | (found[row] == ended))
    moved = np.where(is_detached, -1 - np.maximum(ended - posted, 0), np.maximum(moved, 0))
    main[row] = np.where(lacking, 0, moved)
    target = awaited[waits]
    complete = np.where((target >= 0) & timed[target], end[target], ABSENT)
    waited = (complete != ABSENT) & (complete > before[waits])
    waited &= end[waits] >= complete
    side[waits[waited]] = (end[waits] - complete)[waited]
    idle = waits[~waited]
    main[idle] = np.maximum(end[idle] - before[idle], 0)
    bounds = p.bounds[p.bounds_of(int(job.program[at]))]
    after = np.maximum.accumulate(np.append(carried[1:], end[-1] if is_host[-1] else _LOW)) if len(kind) else carried
    # before the first unit of the host its clock stands where the rank began
    after = np.maximum(after, begun)
    return main, side, int(is_detached.sum()), int(lacking.sum()), after[bounds - 1]


def _recorded(job: SimJob, ends: list[Int64Array]) -> float | None:
    """The mean over ranks of the times of whole steps but the first, as the trace shows them."""
    p = job.programs
    found = []
    for at, bound_ends in enumerate(ends):
        whole = p.bound_is_whole[p.bounds_of(int(job.program[at]))]
        if len(bound_ends) > 1:
            found.append(np.diff(bound_ends)[whole[1:]])
    times = np.concatenate(found) if found else np.zeros(0)
    return float(times.mean()) if len(times) else None


def find_rows(job: SimJob, at: int) -> tuple[slice, slice]:
    """The rows of a rank position in the arrays of programs and of weights."""
    rows = job.programs.rows(int(job.program[at]))
    base = int(job.weight_base[at])
    return rows, slice(base, base + rows.stop - rows.start)
