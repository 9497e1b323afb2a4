"""Finds the critical path through the times of a job, and how much later everything else could have been.

It computes no times: it explains those it is given, measured or simulated. The dependencies are those of
``prism_sdk.graph.timing``: host order, post, join of all members, wait.

**Path.** From the end of the last rank backwards: a COMPUTE unit depends on what its host did before; a WAIT that
ended because its communication was complete depends on the last arrival, that is on the rank that posted last; a
pause of the host at the end of a blocking communication (on ranks without WAIT units) depends on that one. The
segments follow each other without holes, so their lengths add up to the length of the path.

**Slack** ("total float" of the critical path method, Kelley and Walker 1959): by how much a unit could end later, all
else equal, without the job's end moving. 0 on the critical path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.frames import ResultFrames
from prism_sdk.analysis.job import Job
from prism_sdk.graph import JobGraph, Schedule
from prismtrace import ABSENT, Phase, UnitKind

__all__ = ["CriticalPath", "PathSegment", "Times", "critical_path", "slack_ns"]

Int64Array = npt.NDArray[np.int64]

Key = TypeVar("Key", int, str)
_MAX = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, kw_only=True)
class Times:
    """When the rows of a graph were, (N,) each; ABSENT where unknown."""

    graph: JobGraph
    #: For communication rows the post.
    start_ns: Int64Array
    end_ns: Int64Array
    #: Communication rows: when complete, and the last arrival.
    completion_ns: Int64Array
    arrival_ns: Int64Array
    #: Communication that holds up its host until it is complete, with no WAIT for it.
    is_blocking: npt.NDArray[np.bool_]

    @classmethod
    def measured(cls, job: Job) -> Times:
        """The times in a trace."""
        c = job.graph.columns
        return cls(graph=job.graph, start_ns=c["start_ns"], end_ns=c["end_ns"], completion_ns=job.completion_ns,
                   arrival_ns=job.arrival_ns, is_blocking=job.is_blocking)  # fmt: skip

    @classmethod
    def scheduled(cls, schedule: Schedule) -> Times:
        """The times of a calculated timeline."""
        graph = schedule.graph
        communicates = graph.event_of_row >= 0
        arrival = np.where(communicates, schedule.arrival_ns[graph.event_of_row], ABSENT) if graph.num_events else (
            np.full(len(graph), ABSENT, dtype=np.int64))  # fmt: skip
        sends = graph.columns["kind"] == UnitKind.SEND
        return cls(graph=graph, start_ns=schedule.start_ns, end_ns=schedule.end_ns,
                   completion_ns=np.where(communicates, schedule.end_ns, ABSENT),
                   arrival_ns=np.where(sends, schedule.start_ns, arrival),
                   is_blocking=np.zeros(len(graph), dtype=np.bool_))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PathSegment:
    """A stretch of the critical path. ``row`` is the graph's row that it belongs to."""

    rank: int
    row: int
    unit_index: int
    #: compute, communication, launch_gap (a pause of the host, or waking up).
    part: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class CriticalPath(ResultFrames):
    """The segments in order of time, without holes, and the slack of every row (-1 where it has no times)."""

    segments: tuple[PathSegment, ...]
    slack_ns: Int64Array

    def columns(self) -> dict[str, Any]:
        """One row a segment, for data frames."""
        names = ("rank", "unit_index", "part", "start_ns", "end_ns")
        return {name: [getattr(segment, name) for segment in self.segments] for name in names}

    @property
    def length_ns(self) -> int:
        """From the start of the first segment to the end of the last: the sum of all."""
        return self.segments[-1].end_ns - self.segments[0].start_ns if self.segments else 0

    @property
    def parts_ns(self) -> dict[str, int]:
        """The length by part; adds up to ``length_ns``."""
        return _summed((segment.part, segment) for segment in self.segments)

    @property
    def ranks_ns(self) -> dict[int, int]:
        """The length by rank; adds up to ``length_ns``."""
        return _summed((segment.rank, segment) for segment in self.segments)

    @property
    def rows(self) -> Int64Array:
        """The rows on the path, each once, in order of time."""
        return np.array(list(dict.fromkeys(segment.row for segment in self.segments)), dtype=np.int64)

    def phases_ns(self, graph: JobGraph) -> dict[str, int]:
        """The computing on the path by phase."""
        names = {int(phase): phase.name.lower() for phase in Phase}
        return _summed((names.get(int(graph.columns["phase"][s.row]), "unspecified"), s)
                       for s in self.segments if s.part == "compute")  # fmt: skip


def _summed(pairs: Iterator[tuple[Key, PathSegment]]) -> dict[Key, int]:
    total: dict[Key, int] = {}
    for key, segment in pairs:
        total[key] = total.get(key, 0) + segment.end_ns - segment.start_ns
    return total


def critical_path(times: Times) -> CriticalPath:
    """The critical path to the end of the job, and the slack of every row.

    Where several dependencies end at once the path takes the communication.

    Raises:
        GraphDeadlockError: the units wait for each other in a circle.
        ValueError: nothing has a time.
    """
    walk = _Walk(times)
    return CriticalPath(segments=tuple(reversed(list(walk.backwards()))), slack_ns=slack_ns(times))


class _Walk:
    """The walk from the end of the job back to its start."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.graph = times.graph
        kind = self.graph.columns["kind"]
        timed = (times.start_ns != ABSENT) & (times.end_ns != ABSENT)
        self.is_host = timed & ((kind == UnitKind.COMPUTE) | (kind == UnitKind.WAIT))
        self.kind = kind
        # the last host row at or before each row, of the same rank
        marked = np.where(self.is_host, np.arange(len(kind)), -1)
        latest = np.maximum.accumulate(marked)
        begins = np.repeat(self.graph.offsets[:-1], np.diff(self.graph.offsets))
        self.latest_host = np.where(latest >= begins, latest, -1)
        self.is_alone = times.is_blocking & (times.completion_ns != ABSENT) & (times.start_ns != ABSENT)

    def position(self, row: int) -> int:
        return int(np.searchsorted(self.graph.offsets, row, side="right")) - 1

    def segment(self, row: int, part: str, start: int, end: int) -> Iterator[PathSegment]:
        if end > start:
            yield PathSegment(rank=self.graph.ranks[self.position(row)], row=row, part=part, start_ns=start, end_ns=end,
                              unit_index=self.graph.unit_index(row))  # fmt: skip

    def last_row(self) -> int:
        ends = np.where(self.is_host, self.times.end_ns, ABSENT)
        ends = np.maximum(ends, self.times.completion_ns)
        row = int(np.argmax(ends)) if len(ends) else -1
        if row < 0 or ends[row] == ABSENT:
            raise ValueError(f"{self.graph.source}: no unit has a time")
        return row

    def backwards(self) -> Iterator[PathSegment]:
        row, now = self.last_row(), _MAX
        for _ in range(4 * len(self.graph) + 4):
            if self.kind[row] == UnitKind.COMPUTE:
                now = min(now, int(self.times.end_ns[row]))
                begin = min(int(self.times.start_ns[row]), now)
                yield from self.segment(row, "compute", begin, now)
                found = self.before(row, row - 1, begin)
            elif self.kind[row] == UnitKind.WAIT:
                now = min(now, int(self.times.end_ns[row]))
                awaited = int(self.graph.awaited_row[row])
                done = int(self.times.completion_ns[awaited]) if awaited >= 0 else ABSENT
                begin = min(int(self.times.start_ns[row]), now)
                if done != ABSENT and begin < done:
                    done = min(done, now)
                    yield from self.segment(row, "launch_gap", done, now)
                    row, now = awaited, done
                    continue
                known = done != ABSENT
                yield from self.segment(row, "launch_gap" if known else "communication", begin, now)
                found = self.before(row, row - 1, begin)
            else:
                now = min(now, int(self.times.completion_ns[row]))
                bound, begin = self.arrived_last(row, now)
                yield from self.segment(row, "communication", begin, now)
                if bound != row and self.times.start_ns[bound] != begin:
                    row, now = bound, begin  # the group's stream was busy with the collective before
                    continue
                found = self.before(bound, bound - 1, begin)
            if found is None:
                return
            before, end = found
            yield from self.segment(row if self.position(before) == self.position(row) else before, "launch_gap", end,
                                    begin)  # fmt: skip
            row, now = before, end
        raise AssertionError("the walk along the critical path does not end")

    def before(self, row: int, latest: int, now: int) -> tuple[int, int] | None:
        """What the host of a row's rank did last until ``now``, and when that ended."""
        first = int(self.graph.offsets[self.position(row)])
        host = int(self.latest_host[latest]) if latest >= first else -1
        end = min(int(self.times.end_ns[host]), now) if host >= 0 else ABSENT
        # blocking communication since then: the one that ended last; of a batch the one that became ready last
        alone = np.arange(max(host + 1, first), latest + 1)
        alone = alone[self.is_alone[alone]]
        alone = alone[self.times.start_ns[alone] < now]
        if len(alone):
            done = np.minimum(self.times.completion_ns[alone], now)
            found = int(alone[np.lexsort((self.times.arrival_ns[alone], done))[-1]])
            if min(int(self.times.completion_ns[found]), now) > end:
                return found, min(int(self.times.completion_ns[found]), now)
        return (host, end) if host >= 0 else None

    def arrived_last(self, row: int, now: int) -> tuple[int, int]:
        """The row that a communication waited for, and when that was: a post, or the end of the collective before."""
        arrival, post = int(self.times.arrival_ns[row]), int(self.times.start_ns[row])
        event = int(self.graph.event_of_row[row])
        if event < 0 or arrival == ABSENT or (self.kind[row] == UnitKind.SEND and not self.is_alone[row]):
            return row, min(post, now)
        members = self.graph.event_rows[self.graph.event_offsets[event] : self.graph.event_offsets[event + 1]]
        posts = self.times.start_ns[members]
        last = int(members[np.argmax(posts)])
        previous = int(self.graph.event_previous[event])
        if previous >= 0 and int(posts.max()) < arrival:
            earlier = self.graph.event_rows[self.graph.event_offsets[previous] : self.graph.event_offsets[previous + 1]]
            ends = self.times.completion_ns[earlier]
            if int(ends.max()) == arrival:
                return int(earlier[np.argmax(ends)]), min(arrival, now)
        return last, min(int(posts.max()), now)


def slack_ns(times: Times) -> Int64Array:
    """(N,) by how much each row could end later without the end of the job moving; -1 where it has no times.

    For communication rows: by how much the operation could complete later on the members together.

    Raises:
        GraphDeadlockError: the units wait for each other in a circle.
    """
    graph = times.graph
    kind = graph.columns["kind"]
    timed = (times.start_ns != ABSENT) & (times.end_ns != ABSENT)
    hosts = timed & ((kind == UnitKind.COMPUTE) | (kind == UnitKind.WAIT))
    order = _order(times)
    slack = np.full(len(graph), -1, dtype=np.int64)
    if not hosts.any():
        return slack
    final = int(max(times.end_ns[hosts].max(), times.completion_ns.max()))
    low = int(np.iinfo(np.int64).min)
    last_end = [
        max(int(np.where(hosts[a:b], times.end_ns[a:b], low).max()) if b > a else low, low)
        for a, b in zip(graph.offsets[:-1].tolist(), graph.offsets[1:].tolist(), strict=True)
    ]
    host = [final - end if end != low else final for end in last_end]
    completion_slack = np.where(times.completion_ns == ABSENT, _MAX, final - times.completion_ns).tolist()
    event_slack = _EventSlack(graph, times, completion_slack)
    positions = (np.searchsorted(graph.offsets, np.where(order < 0, ~order, order), side="right") - 1).tolist()
    before = [-1] * len(graph)  # slack of the host when it reaches the row
    found = [-1] * len(graph)
    start = times.start_ns.tolist()
    done, arrival = times.completion_ns.tolist(), times.arrival_ns.tolist()
    awaited, event_of = graph.awaited_row.tolist(), graph.event_of_row.tolist()
    sends, waits, is_host = (kind == UnitKind.SEND).tolist(), (kind == UnitKind.WAIT).tolist(), hosts.tolist()
    for row, position in zip(reversed(order.tolist()), reversed(positions), strict=True):
        own = host[position]
        if row < 0:
            room = done[~row] - start[~row]
            completion_slack[~row] = min(completion_slack[~row], own)
            host[position] = own + max(room, 0)
            continue
        event = event_of[row]
        if event < 0 and waits[row]:
            found[row] = own if is_host[row] else -1
            target = awaited[row]
            if target >= 0 and done[target] != ABSENT and is_host[row]:
                room = done[target] - start[row]
                completion_slack[target] = min(completion_slack[target], own if room > 0 else own - room)
                own += max(room, 0)
        elif event < 0 or sends[row]:
            together = event_slack.of(event) if event >= 0 else 0
            found[row] = completion_slack[row]
            own = min(own, completion_slack[row])
            if event >= 0 and start[row] != ABSENT:
                partner = event_slack.last_member(event)
                if arrival[partner] != ABSENT:
                    own = min(own, together + arrival[partner] - start[row])
        else:
            found[row] = together = event_slack.of(event)
            if arrival[row] != ABSENT and start[row] != ABSENT:
                own = min(own, together + arrival[row] - start[row])
        host[position] = before[row] = own
    return _of_computes(
        graph, times, np.array(found, dtype=np.int64), np.array(before, dtype=np.int64), hosts, final, last_end, kind
    )


def _order(times: Times) -> Int64Array:
    """Communication and WAIT rows in a causal order; ``~row`` is where the host goes on after a blocking one.

    The order of the graph knows no blocking communication: where there is some the order is that of the times.
    """
    graph = times.graph
    blocking = np.flatnonzero(times.is_blocking & (times.completion_ns != ABSENT) & (times.start_ns != ABSENT))
    if not len(blocking):
        return graph.linear_order
    kind = graph.columns["kind"]
    rows = np.flatnonzero((kind != UnitKind.COMPUTE) & (times.start_ns != ABSENT))
    waits = kind[rows] == UnitKind.WAIT
    when = np.concatenate([np.where(waits, times.end_ns[rows], times.start_ns[rows]), times.completion_ns[blocking]])
    last = np.concatenate([waits, np.ones(len(blocking), dtype=np.bool_)])
    order: Int64Array = np.concatenate([rows, ~blocking])[np.lexsort((np.concatenate([rows, blocking]), last, when))]
    return order


class _EventSlack:
    """By how much each event could complete later; worked out when its last member is met, from the end backwards."""

    def __init__(self, graph: JobGraph, times: Times, completion_slack: list[int]) -> None:
        """`completion_slack`: of each row, as it is known so far; others go on changing it."""
        self._completion_slack = completion_slack
        self._members: list[int] = graph.event_rows.tolist()
        self._offsets: list[int] = graph.event_offsets.tolist()
        self._previous: list[int] = graph.event_previous.tolist()
        receives = graph.columns["kind"][graph.event_rows] != UnitKind.SEND
        self._receives = receives.tolist()
        begins = graph.event_offsets[:-1]
        self._done, self._begin = list[int](), list[int]()
        if graph.num_events:
            self._done = np.maximum.reduceat(times.completion_ns[graph.event_rows], begins).tolist()
            self._begin = np.maximum.reduceat(times.arrival_ns[graph.event_rows], begins).tolist()
        self._later = [_MAX] * graph.num_events
        self._found: list[int | None] = [None] * graph.num_events

    def last_member(self, event: int) -> int:
        """The last row of an event: of a message the one that receives it, where it is there."""
        return self._members[self._offsets[event + 1] - 1]

    def of(self, event: int) -> int:
        found = self._found[event]
        if found is None:
            slack = self._completion_slack
            places = range(self._offsets[event], self._offsets[event + 1])
            found = min((slack[self._members[at]] for at in places if self._receives[at]), default=_MAX)
            found = self._found[event] = min(found, self._later[event])
            previous = self._previous[event]
            if previous >= 0 and self._done[previous] != ABSENT and self._begin[event] != ABSENT:
                room = max(self._begin[event] - self._done[previous], 0)
                self._later[previous] = min(self._later[previous], found + room)
        return found


def _of_computes(
    graph: JobGraph, times: Times, slack: Int64Array, before: Int64Array, hosts: npt.NDArray[np.bool_], final: int,
    last_end: list[int], kind: npt.NDArray[np.uint8],
) -> Int64Array:  # fmt: skip
    """COMPUTE rows have the slack of their host at the next row that is none, or at the end of the rank."""
    synced = np.flatnonzero(kind != UnitKind.COMPUTE)
    rows = np.flatnonzero(hosts & (kind == UnitKind.COMPUTE))
    at = np.searchsorted(synced, rows)
    position = np.searchsorted(graph.offsets, rows, side="right") - 1
    following = np.where(at < len(synced), synced[np.minimum(at, max(len(synced) - 1, 0))] if len(synced) else -1, -1)
    inside = (following >= 0) & (following < graph.offsets[position + 1])
    rest = final - np.array(last_end, dtype=np.int64)[position]
    slack[rows] = np.where(inside, before[np.maximum(following, 0)], rest)
    return slack
