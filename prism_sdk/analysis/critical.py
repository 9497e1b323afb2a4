"""Finds the critical path through the times of a job.

It computes no times, and no slack (``slack`` does): it explains what it is given. The dependencies are those of
``prism_sdk.graph.timing``: host order, post, join of all members, wait.

**Path.** From the end of the last rank backwards: a COMPUTE unit depends on what its host did before; a WAIT that
ended because its communication was complete depends on the last arrival, that is on the rank that posted last; a
pause of the host at the end of a blocking communication (on ranks without WAIT units) depends on that one. The
segments follow each other without holes, so their lengths add up to the length of the path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.frames import ResultFrames
from prism_sdk.analysis.slack import slack_ns
from prism_sdk.analysis.times import Times
from prism_sdk.graph import JobGraph
from prismtrace import ABSENT, Phase, UnitKind

__all__ = ["CriticalPath", "PathSegment", "critical_path"]

Int64Array = npt.NDArray[np.int64]

Key = TypeVar("Key", int, str)
_MAX = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, kw_only=True)
class PathSegment:
    """A stretch of the critical path. ``row`` is the row that it belongs to, in a graph of all ranks."""

    rank: int
    row: int
    unit_index: int
    #: compute, communication, launch_gap (a pause of the host, or waking up).
    part: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class CriticalPath(ResultFrames):
    """The segments in order of time, without holes, and the slack of every row of all ranks (-1: it has no times)."""

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
    segments, slack = tuple(reversed(list(walk.backwards()))), slack_ns(times)
    return CriticalPath(segments=segments, slack_ns=slack if times.fold is None else times.fold.all_rows(slack))


class _Walk:
    """The walk from the end of the job back to its start.

    Of a folded job rows are those of its graph; ``at`` is the position, among all ranks, of the rank that it is at.
    """

    def __init__(self, times: Times) -> None:
        self.times = times
        self.graph = times.graph
        self.fold, self.at = times.fold, 0
        self._members: dict[int, tuple[Int64Array, Int64Array]] = {}
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
            rank, shown = self.graph.ranks[self.at] if self.fold is None else self.fold.ranks[self.at], row
            if self.fold is not None:
                shown = int(row - self.graph.offsets[self.fold.place[self.at]] + self.fold.offsets[self.at])
            yield PathSegment(rank=rank, row=shown, part=part, start_ns=start, end_ns=end,
                              unit_index=self.graph.unit_index(row))  # fmt: skip

    def members(self, event: int, lane: int) -> tuple[Int64Array, Int64Array]:
        """The rows of all members of an event, in order, and the positions of their ranks."""
        graph, fold = self.graph, self.fold
        rows = graph.event_rows[graph.event_offsets[event] : graph.event_offsets[event + 1]]
        if fold is None:
            return rows, np.searchsorted(graph.offsets, rows, side="right") - 1
        if lane not in self._members:
            # a row stands for those pairs that are alike: of the same place, and of the same lane of its program
            pairs = fold.pairs(lane)
            position = fold.pair_position[pairs]
            first = fold.pair_offsets[fold.first_position[fold.place[position]]]
            alike = pairs - fold.pair_offsets[position] + first
            order = np.argsort(fold.pair_of_row[rows], kind="stable")
            slot = order[np.searchsorted(fold.pair_of_row[rows][order], alike)]
            self._members[lane] = slot, position
        slot, position = self._members[lane]
        return rows[slot], position

    def last_row(self) -> int:
        ends = np.where(self.is_host, self.times.end_ns, ABSENT)
        ends = np.maximum(ends, self.times.completion_ns)
        row = int(np.argmax(ends)) if len(ends) else -1
        if row < 0 or ends[row] == ABSENT:
            raise ValueError(f"{self.graph.source}: no unit has a time")
        place = self.position(row)
        self.at = place if self.fold is None else int(self.fold.first_position[place])
        return row

    def backwards(self) -> Iterator[PathSegment]:
        row, now = self.last_row(), _MAX
        num_rows = len(self.graph) if self.fold is None else int(self.fold.offsets[-1])
        for _ in range(4 * num_rows + 4):
            own = self.at
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
                bound, begin, position = self.arrived_last(row, now)
                yield from self.segment(row, "communication", begin, now)
                is_other, self.at = (bound, position) != (row, own), position
                if is_other and self.times.start_ns[bound] != begin:
                    row, now = bound, begin  # the group's stream was busy with the collective before
                    continue
                found = self.before(bound, bound - 1, begin)
            if found is None:
                return
            before, end = found
            yield from self.segment(row if self.at == own else before, "launch_gap", end, begin)
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

    def arrived_last(self, row: int, now: int) -> tuple[int, int, int]:
        """What a communication waited for: a post, or the end of the collective before.

        Returns: the row, when that was, and the position of its rank.
        """
        arrival, post = int(self.times.arrival_ns[row]), int(self.times.start_ns[row])
        event = int(self.graph.event_of_row[row])
        if event < 0 or arrival == ABSENT or (self.kind[row] == UnitKind.SEND and not self.is_alone[row]):
            return row, min(post, now), self.at
        lane = self.fold.lane(self.at, row) if self.fold is not None else -1
        members, positions = self.members(event, lane)
        posts = self.times.start_ns[members]
        last = int(np.argmax(posts))
        previous = int(self.graph.event_previous[event])
        if previous >= 0 and int(posts.max()) < arrival:
            earlier, at = self.members(previous, lane)
            ends = self.times.completion_ns[earlier]
            if int(ends.max()) == arrival:
                return int(earlier[np.argmax(ends)]), min(arrival, now), int(at[np.argmax(ends)])
        return int(members[last]), min(int(posts.max()), now), int(positions[last])
