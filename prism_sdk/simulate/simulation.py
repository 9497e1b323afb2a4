"""Runs a ``SimJob``: an exact longest path over all units, and what follows from it for each rank.

It prints nothing and explains nothing; ``report`` sums up for people, ``critical`` follows the longest path back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_sdk.bounds import MAX_TIME_NS
from prism_sdk.graph.errors import GraphDeadlockError, GraphError
from prism_sdk.simulate import kernel
from prism_sdk.simulate.compiling import call
from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.links import SharedRun, run_shared
from prismtrace import Op, UnitKind

__all__ = ["RankTimes", "Timeline", "simulate"]

Int64Array = npt.NDArray[np.int64]
_LOW = np.iinfo(np.int64).min
_KEPT_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Start and end of the units of one rank, ns; of communication: its post and its completion."""

    start_ns: Int64Array
    end_ns: Int64Array


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When everything of a job happens. Times of units are computed when they are asked for, a rank at a time."""

    job: SimJob
    #: By event: its last arrival, ns; and the position of the rank that arrived last (-2: the operation before it in
    #: the group was not complete).
    arrival_ns: Int64Array = field(repr=False)
    last: npt.NDArray[np.int32] = field(repr=False)
    #: The host clock behind each step of each rank: rank position p has ``step_offsets[p]:step_offsets[p + 1]``.
    step_end_ns: Int64Array = field(repr=False)
    step_offsets: Int64Array = field(repr=False)
    #: The host clock of each rank behind its last unit.
    end_ns: Int64Array = field(repr=False)
    _slow: tuple[Int64Array, Int64Array, npt.NDArray[np.float64]] = field(repr=False)
    #: Where links were shared: completions of all communication units.
    shared: SharedRun | None = field(default=None, repr=False)
    _cache: OrderedDict[int, RankTimes] = field(default_factory=OrderedDict, repr=False, compare=False)

    def steps(self, position: int) -> tuple[npt.NDArray[np.int32], Int64Array, npt.NDArray[np.bool_]]:
        """The steps of a rank position but the first, their times in ns, and which of them are whole."""
        bounds = self.job.programs.bounds_of(int(self.job.program[position]))
        ends = self.step_end_ns[self.step_offsets[position] : self.step_offsets[position + 1]]
        return (self.job.programs.bound_step[bounds][1:], np.diff(ends),
                self.job.programs.bound_is_whole[bounds][1:])  # fmt: skip

    def step_times_ns(self) -> Int64Array:
        """The times of whole steps but the first, of all ranks; empty where no rank has two steps."""
        found = []
        for position in range(self.job.num_ranks):
            _, times, whole = self.steps(position)
            found.append(times[whole])
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def job_steps_ns(self) -> Int64Array:
        """The times of the job's whole steps but the first, each from the last rank's end to the last rank's end."""
        return self.job.steps_ns(self.step_end_ns[: self.step_offsets[-1]])

    @property
    def step_time_ns(self) -> float:
        """The mean of `job_steps_ns`; the length of the job where it has one step."""
        times = self.job_steps_ns()
        return float(times.mean()) if len(times) else float(self.length_ns)

    @property
    def length_ns(self) -> int:
        """From the first clock to the end of the last rank."""
        return int(self.end_ns.max()) - int(self.job.origin_ns.min())

    @property
    def sharing(self) -> tuple[int, int] | None:
        """How many transfers take longer because they share links, and how much longer together, ns."""
        if self.shared is None:
            return None
        longer = self.shared.longer_ns
        return int((longer > 0).sum()), int(longer.sum())

    def times(self, position: int) -> RankTimes:
        """When the units of a rank position start and end."""
        if position in self._cache:
            self._cache.move_to_end(position)
            return self._cache[position]
        size = int(self.job.sizes[position])
        start, end = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        self._walk(position, start, end, 0, 0, np.zeros(kernel.NUM_TOTALS, np.int64), np.zeros(1, np.int64), keep=1)
        found = RankTimes(start_ns=start, end_ns=end)
        self._cache[position] = found
        if len(self._cache) > _KEPT_RANKS:
            self._cache.popitem(last=False)
        return found

    def totals(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Where the time of the counted steps goes.

        Returns an array of ranks by ``kernel.NUM_TOTALS`` in ns, the idle time that each rank caused by arriving last,
        and the time that was counted for each rank. Counted are the whole steps but the first, or all of a single step.
        """
        job = self.job
        totals = np.zeros((job.num_ranks, kernel.NUM_TOTALS), dtype=np.int64)
        blame = np.zeros(job.num_ranks, dtype=np.int64)
        counted = np.zeros(job.num_ranks, dtype=np.int64)
        nothing = np.zeros(1, dtype=np.int64)
        for position in range(job.num_ranks):
            begin, end, counted[position] = self.window(position)
            self._walk(position, nothing, nothing, begin, end, totals[position], blame, keep=0)
        return totals, blame, counted

    def window(self, position: int) -> tuple[int, int, int]:
        """The rows of a rank position that count, begin and end, and how long they take in ns."""
        p = self.job.programs
        bounds = p.bounds_of(int(self.job.program[position]))
        whole = np.flatnonzero(p.bound_is_whole[bounds])
        ends = self.step_end_ns[self.step_offsets[position] : self.step_offsets[position + 1]]
        whole = whole[whole > 0]
        if not len(whole):
            length = int(self.end_ns[position] - self.job.origin_ns[position])
            return 0, int(self.job.sizes[position]), length
        first, last = int(whole[0]) - 1, int(whole[-1])
        return int(p.bounds[bounds][first]), int(p.bounds[bounds][last]), int(ends[last] - ends[first])

    def _walk(
        self, position: int, start: Int64Array, end: Int64Array, count_from: int, count_to: int, totals: Int64Array,
        blame: Int64Array, *, keep: int,
    ) -> None:  # fmt: skip
        job, p = self.job, self.job.programs
        rows = p.rows(int(job.program[position]))
        slow_begin, slow_from, slow_factor = self._slow
        held = np.zeros(int(p.num_holds[job.program[position]]) + 1, dtype=np.int64)
        complete = held
        if self.shared is not None:
            first = int(self.shared.unit_begin[position])
            complete = self.shared.complete_ns[first : first + rows.stop - rows.start]
        arguments = (
            p.kind, p.phase, p.lane_of, p.ordinal, p.awaited, p.hold, job.main, job.side, rows.start, rows.stop,
            int(job.weight_base[position]), int(job.lanes.offsets[position]), job.lanes.event,
            int(slow_begin[position]), int(slow_begin[position + 1]), slow_from, slow_factor,
            float(job.scale[position]), int(job.origin_ns[position]), self.arrival_ns, self.last, held, complete,
            int(self.shared is not None), start, end, count_from, count_to, totals, blame, keep,
        )  # fmt: skip
        call(kernel.walk_rank, *arguments, num_units=len(job))


def _slow_segments(job: SimJob) -> tuple[Int64Array, Int64Array, npt.NDArray[np.float64]]:
    counts = [len(job.slowdowns[r].from_ns) if r in job.slowdowns else 0 for r in job.ranks.tolist()]
    begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    chosen = [job.slowdowns[r] for r in job.ranks.tolist() if r in job.slowdowns]
    origin = int(job.origin_ns.min()) if len(job.origin_ns) else 0
    from_ns = np.array([t + origin for s in chosen for t in s.from_ns], dtype=np.int64)
    return begin, from_ns, np.array([f for s in chosen for f in s.factor], dtype=np.float64)


def _check_length(job: SimJob) -> None:
    """Raise where times may leave 64 bits: no clock goes beyond the sum of all weights of all ranks."""
    slowest = job.scale * max([1.0, *(factor for slow in job.slowdowns.values() for factor in slow.factor)])
    limit = 2 * MAX_TIME_NS - float(np.ptp(job.origin_ns) if job.num_ranks else 0)
    longest = [max(abs(float(w.min(initial=0))), float(w.max(initial=0))) for w in (job.main, job.side)]
    if (longest[0] * float(np.max(slowest, initial=1.0)) + longest[1]) * len(job) < limit:
        return  # so it is in all but damaged traces
    length = np.append(0.0, np.cumsum(np.abs(job.main.astype(np.float64))))
    gaps = np.append(0.0, np.cumsum(np.abs(job.side.astype(np.float64))))
    begin, end = job.weight_base, job.weight_base + job.sizes
    total = ((length[end] - length[begin]) * np.maximum(slowest, 1.0) + gaps[end] - gaps[begin]).sum()
    if not total < limit:
        raise _too_long(job, total)


def _too_long(job: SimJob, total_ns: float) -> GraphError:
    return GraphError(f"{job.source}: the times of all ranks together are {total_ns / 1e9:.3g} s: too long to add up",
                      hint="are its times and the factors of the changes right?")  # fmt: skip


def simulate(job: SimJob) -> Timeline:
    """When every unit of the job starts and ends, to the nanosecond; the cost is linear in units.

    Where the job has links (``SimJob.links``), transfers that overlap share them, and the cost grows with the overlap.

    Raises:
        GraphDeadlockError: units of several ranks wait for each other in a circle.
        GraphError: times are so long that their sum leaves 64 bits.
    """
    _check_length(job)
    p, lanes = job.programs, job.lanes
    total, num_collectives, num_ranks = lanes.total_events, lanes.num_collectives, job.num_ranks
    remaining = np.repeat(lanes.num_members, lanes.num_events).astype(np.int32)
    remaining = np.append(remaining, np.int32(0))
    arrival = np.full(total + 1, _LOW)
    last = np.full(total + 1, -1, dtype=np.int32)
    head = np.full(total + 1, -1, dtype=np.int32)
    done = np.zeros(num_collectives + 1, dtype=np.int64)
    holds = p.num_holds[job.program]
    hold_begin = np.cumsum(holds) - holds
    num_bounds = np.diff(p.bound_offsets)[job.program]
    step_offsets = np.concatenate([[0], np.cumsum(num_bounds)]).astype(np.int64)
    bound_begin = p.bound_offsets[:-1][job.program]
    slow = _slow_segments(job)
    clock = job.origin_ns.copy()
    cursor = p.offsets[:-1][job.program].copy()
    step_end = np.zeros(int(step_offsets[-1]) + 1, dtype=np.int64)
    shared = None
    if job.links is not None:
        shared = run_shared(job, job.links, remaining=remaining, arrival=arrival, last=last, clock=clock, cursor=cursor,
                            step_offsets=step_offsets, step_end=step_end, slow=slow)  # fmt: skip
    finished = shared.num_finished if shared is not None else call(
        kernel.run, p.kind, p.lane_of, p.ordinal, p.awaited, p.hold, p.bounds, job.main, job.side,
        p.offsets[:-1][job.program], p.offsets[1:][job.program], bound_begin, p.bound_offsets[1:][job.program],
        job.weight_base, lanes.offsets, lanes.event, hold_begin, step_offsets, job.scale, slow[0], slow[1], slow[2],
        remaining, arrival, last, done, job.chained, clock, cursor,
        np.zeros(int(holds.sum()) + 1, dtype=np.int64), head, np.full(num_ranks, -1, dtype=np.int64),
        np.zeros(num_ranks + 1, dtype=np.int64), bound_begin.copy(), step_end, num_collectives, num_units=len(job),
    )  # fmt: skip
    if finished < num_ranks:
        _raise_deadlock(job, cursor)
    timeline = Timeline(job=job, arrival_ns=arrival, last=last, step_end_ns=step_end, step_offsets=step_offsets,
                        end_ns=clock, shared=shared, _slow=slow)  # fmt: skip
    if num_ranks and timeline.length_ns * num_ranks >= MAX_TIME_NS:  # what all ranks wait for one is added up
        raise _too_long(job, timeline.length_ns * num_ranks)
    return timeline


def _raise_deadlock(job: SimJob, cursor: Int64Array) -> None:
    problems = []
    p = job.programs
    ends = p.offsets[1:][job.program]
    stuck = np.flatnonzero(cursor < ends)
    for at in stuck[:8].tolist():
        row = int(cursor[at])
        begin = int(p.offsets[job.program[at]])
        awaited = begin + int(p.awaited[row])
        lane = int(job.lanes.lane[job.lanes.offsets[at] + p.lane_of[awaited]])
        group = job.groups.get(int(job.lanes.group_id[lane]))
        members = [
            int(job.ranks[r])
            for r in stuck.tolist()
            if lane in job.lanes.lane[job.lanes.offsets[r] : job.lanes.offsets[r + 1]]
        ]
        kind = UnitKind(int(p.kind[awaited]))
        name = Op(int(p.op[awaited])).name.lower() if kind is UnitKind.COLLECTIVE else kind.name.lower()
        where = f"number {p.ordinal[awaited]} in group {group.name if group is not None else '?'}"
        stopped = f"members that do not go on: {members[:8]}"
        problems.append(f"rank {job.ranks[at]} unit {row - begin}: waits for {name} {where}; {stopped}")
    raise GraphDeadlockError(
        f"{job.source}: {len(stuck)} ranks wait for each other and none can go on", problems=problems,
        hint="the ranks call the operations of their groups in different orders; `prism validate` names the circle",
    )  # fmt: skip
