"""Says how much later each unit of a job could have been. It does not find the path of those that could not.

*Slack* is the "total float" of the critical path method (Kelley and Walker 1959); the dependencies are those of
``prism_sdk.graph.timing``: host order, post, join of all members, wait.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.times import Times
from prism_sdk.graph import JobGraph
from prismtrace import ABSENT, UnitKind

__all__ = ["slack_ns"]

Int64Array = npt.NDArray[np.int64]
_MAX = int(np.iinfo(np.int64).max)


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
