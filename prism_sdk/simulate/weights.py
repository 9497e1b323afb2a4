"""Finds the weights of a job: from the columns of a calibrated graph, or from the times of an observed one.

What the two weights of a row mean is written in ``job``. The rules for observed times are those of
``prism_sdk.graph.calibrate.measure``; here every row gets a weight, so that the times come out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.bounds import MAX_TIME_NS
from prism_sdk.graph.errors import GraphError, MissingTimingError
from prism_sdk.simulate import kernel
from prism_sdk.simulate.compiling import call
from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.recalled import Recalled
from prismtrace import ABSENT, UnitKind

__all__ = ["CALIBRATED_COLUMNS", "FREE_OF", "FreeOf", "LEAD", "MEASURED", "PROVENANCE",
           "UNKNOWN_TRANSFER", "begin_of", "calibrated_weights", "events_of", "find_rows",
           "observed_weights"]  # fmt: skip

Int64Array = npt.NDArray[np.int64]
MEASURED = 1
PROVENANCE = "prism.provenance"
LEAD = "prism.lead_ns"
FREE_OF = "prism.free_of"
#: What the weights of a calibrated graph follow from.
CALIBRATED_COLUMNS = ("kind", "start_ns", "end_ns", "transfer_ns", "gap_ns", LEAD, PROVENANCE, FREE_OF)
#: In ``main`` of communication rows until a cluster profile gives the transfer.
UNKNOWN_TRANSFER = np.int64(-(2**62))
_LOW, _HIGH = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class FreeOf(IntFlag):
    """What communication did not wait for in a measured run, as ``prism.free_of`` says it."""

    #: The operation: for the one before it in its group.
    BEFORE = 1
    #: This member of it: for the others.
    OTHERS = 2


def calibrated_weights(
    c: Mapping[str, npt.NDArray[Any]], *, rank: int, first_index: int, source: str, transfers_needed: bool = True,
    recalled: Recalled | None = None,
) -> tuple[Int64Array, Int64Array]:  # fmt: skip
    """Main and side weights of one rank of a calibrated graph; raises MissingTimingError where one is absent."""
    recalled = Recalled() if recalled is None else recalled
    kind, transfer, start, end = c["kind"], c["transfer_ns"], c["start_ns"], c["end_ns"]
    is_compute, is_moving = recalled.of(_kinds, kind)
    side, is_side_wrong = recalled.of(_calibrated_side, kind, c["gap_ns"], c[LEAD])
    is_detached = is_moving & ((c[FREE_OF] & FreeOf.OTHERS) > 0)
    has_times = is_compute | is_detached
    lacks_time = has_times & ((start == ABSENT) | (end == ABSENT))
    is_known = transfer != ABSENT
    lacks_transfer = is_moving & ~is_known & ~is_detached
    main = np.where(has_times, end - start, np.where(is_known, transfer, 0))
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
    main[is_detached] = -1 - main[is_detached]
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


def observed_weights(job: SimJob, times: list[tuple[Int64Array, Int64Array]], *, has_streams: bool = False) -> SimJob:
    """The job with the weights that its times show; ``times`` has start and end of the rows of each rank.

    An operation starts at its last post, and not before the one before it in its group is complete on all members.
    Where the times contradict the second (the program waited for them in another order) it is given up for that
    operation; members that were complete before the last post are detached. ``has_streams``: times are those of a GPU,
    where a stream may ask for an operation ahead of the one whose rows these are.
    """
    lanes = job.lanes
    total, num_collectives = lanes.total_events, lanes.num_collectives
    arrival, completed = np.full(total + 1, _LOW), np.full(total + 1, _LOW)
    dated = [_dated(job, at, start, end, has_streams=has_streams) for at, (start, end) in enumerate(times)]
    for at, rank in enumerate(dated):
        event, _ = events_of(job, at)
        np.maximum.at(arrival, event, rank.posted_ns)
        has_end = rank.ended_ns != ABSENT
        np.maximum.at(completed, event[has_end], rank.ended_ns[has_end])
    flags = job.chained.copy()
    flags[lanes.first_event[lanes.source < 0]] = 0
    ready = arrival.copy()
    call(kernel.chain, arrival, completed, flags, ready, num_collectives, num_units=len(job))
    # a collective that some member completed before the one before it: no chain
    early = np.zeros(total + 1, dtype=np.bool_)
    for at, rank in enumerate(dated):
        event, _ = events_of(job, at)
        ended = np.minimum(np.where(rank.ended_ns == ABSENT, rank.found_ns, rank.ended_ns), rank.found_ns)
        early[event[(ended < ready[event]) & (ended >= arrival[event])]] = True
    if early.any():
        flags[:num_collectives][early[:num_collectives]] = 0
        call(kernel.chain, arrival, completed, flags, ready, num_collectives, num_units=len(job))
    main: list[Int64Array] = []
    side: list[Int64Array] = []
    ends: list[Int64Array] = []
    detached, untimed_rows = 0, 0
    for at, (start, end) in enumerate(times):
        m, s, num, num_lacking, bound_ends = _of_rank(job, at, start, end, dated[at], ready, completed)
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
    joined = np.concatenate(main)
    return replace(
        job, main=joined, side=np.concatenate(side), chained=flags, num_detached=detached, notes=(*job.notes, *notes),
        provenance=np.full(len(joined), MEASURED, dtype=np.uint8), recorded_step_ns=_recorded(job, ends),
    )  # fmt: skip


def begin_of(kind: npt.NDArray[np.uint8], start: Int64Array) -> int:
    """The host clock where a rank begins: at its first time, which is not behind its first unit of the host."""
    known = start[start != ABSENT][:1]
    host = start[(kind == UnitKind.COMPUTE) | (kind == UnitKind.WAIT)][:1]
    return int(min([*known.tolist(), *host[host != ABSENT].tolist()], default=0))


def events_of(job: SimJob, at: int) -> tuple[Int64Array, Int64Array]:
    """The events of the communication rows of a rank position, and these rows."""
    p = job.programs
    rows = p.rows(int(job.program[at]))
    row = np.flatnonzero(p.lane_of[rows] >= 0)
    base = job.lanes.event[job.lanes.offsets[at] : job.lanes.offsets[at + 1]]
    return base[p.lane_of[rows][row]] + p.ordinal[rows][row], row


@dataclass(frozen=True, kw_only=True)
class _Dated:
    """What the times of one rank say of its rows: the host clock before each, and of its communication in order."""

    before_ns: Int64Array
    #: When the operation was asked for: at the host clock where the row does not say.
    posted_ns: Int64Array
    #: When it was complete, ABSENT where the row does not say. Neither is later than the end of a wait for it, which
    #: may be dated earlier, where a thread was put aside between the two.
    ended_ns: Int64Array
    #: When a wait for it had ended, so that it was complete; the largest number where nobody waited.
    found_ns: Int64Array


def _dated(job: SimJob, at: int, start: Int64Array, end: Int64Array, *, has_streams: bool) -> _Dated:
    p = job.programs
    rows = p.rows(int(job.program[at]))
    kind, awaited = p.kind[rows], p.awaited[rows]
    for times in (start, end):
        if (beyond := (times != ABSENT) & ((times <= -MAX_TIME_NS) | (times >= MAX_TIME_NS))).any():
            raise GraphError(f"{job.source}: rank {job.ranks[at]} unit {int(beyond.argmax())} is at "
                             f"{times[beyond][0]} ns: times are within 146 years",
                             hint="the trace is damaged: observe the job again")  # fmt: skip
    is_host = (kind == UnitKind.COMPUTE) | (kind == UnitKind.WAIT)
    if (lacks := is_host & ((start == ABSENT) | (end == ABSENT))).any():
        raise MissingTimingError(f"{job.source}: rank {job.ranks[at]} has {int(lacks.sum())} units of "
                                 f"computing or waiting without times, the first is unit {int(lacks.argmax())}",
                                 hint="observe the job again, or calibrate the graph")  # fmt: skip
    begun = begin_of(kind, start)
    carried = np.concatenate([[begun], np.where(is_host, end, _LOW)])[:-1]
    before: Int64Array = np.maximum.accumulate(carried)
    row = np.flatnonzero(p.lane_of[rows] >= 0)
    found = np.full(len(kind), _HIGH)
    waits = np.flatnonzero((kind == UnitKind.WAIT) & (awaited >= 0))[::-1]
    found[awaited[waits]] = np.maximum(end[waits], before[waits])  # the first wait for it counts
    no_earlier = np.full(len(row), _LOW) if has_streams else before[row]
    posted = np.where(start[row] != ABSENT, np.maximum(start[row], no_earlier), before[row])
    posted = np.minimum(posted, found[row])
    ended = np.where(end[row] == ABSENT, ABSENT, np.minimum(end[row], found[row]))
    return _Dated(before_ns=before, posted_ns=posted, ended_ns=ended, found_ns=found[row])


def _of_rank(
    job: SimJob, at: int, start: Int64Array, end: Int64Array, dated: _Dated, ready: Int64Array, completed: Int64Array
) -> tuple[Int64Array, Int64Array, int, int, Int64Array]:
    p = job.programs
    rows = p.rows(int(job.program[at]))
    kind, awaited = p.kind[rows], p.awaited[rows]
    before, posted, found = dated.before_ns, dated.posted_ns, dated.found_ns
    main, side = np.zeros(len(kind), dtype=np.int64), np.zeros(len(kind), dtype=np.int64)
    is_compute = kind == UnitKind.COMPUTE
    # units of the host that overlap take what they add
    side[is_compute] = np.maximum(start - before, 0)[is_compute]
    main[is_compute] = (end - np.maximum(start, before))[is_compute]
    np.maximum(main, 0, out=main)
    event, row = events_of(job, at)
    side[row] = posted - before[row]
    is_send = kind[row] == UnitKind.SEND
    has_end = dated.ended_ns != ABSENT
    # an operation that nobody waited for has a post and no end: it takes as long as for those who did; and one that a
    # wait found complete was complete by the end of that wait, whatever it took for the others
    of_others = np.where(completed[event] == _LOW, ready[event], completed[event])
    ended = np.where(has_end, dated.ended_ns, np.minimum(of_others, found))
    lacking = ~has_end & (is_send | (completed[event] == _LOW))
    moved = np.where(is_send, np.where(has_end, ended - posted, 0), ended - ready[event])
    is_detached = (moved < 0) & ~is_send
    main[row] = np.where(is_detached, -1 - np.maximum(ended - posted, 0), np.maximum(moved, 0))
    waits = np.flatnonzero(kind == UnitKind.WAIT)
    complete = np.full(len(kind), ABSENT)
    complete[row] = dated.ended_ns
    complete = np.where(awaited[waits] >= 0, complete[awaited[waits]], ABSENT)
    waited = (complete != ABSENT) & (complete > before[waits])
    side[waits[waited]] = np.maximum(end[waits] - complete, 0)[waited]
    idle = waits[~waited]
    main[idle] = np.maximum(end[idle] - before[idle], 0)
    bounds = p.bounds[p.bounds_of(int(job.program[at]))]
    is_host = is_compute | (kind == UnitKind.WAIT)
    last = end[-1] if len(kind) and is_host[-1] else _LOW
    # before the first unit of the host its clock stands where the rank began
    after = np.maximum(np.append(before[1:], last), before) if len(kind) else before
    return main, side, int(is_detached.sum()), int(lacking.sum()), after[bounds - 1]


def _recorded(job: SimJob, ends: list[Int64Array]) -> float | None:
    """The mean time of whole steps but the first, as the trace shows them."""
    times = job.steps_ns(np.concatenate(ends))
    return float(times.mean()) if len(times) else None


def find_rows(job: SimJob, at: int) -> tuple[slice, slice]:
    """The rows of a rank position in the arrays of programs and of weights."""
    rows = job.programs.rows(int(job.program[at]))
    base = int(job.weight_base[at])
    return rows, slice(base, base + rows.stop - rows.start)
