"""Contracts a calibrated graph to the boundary of a sandbox: the plan by which virtual ranks arrive without running.

It does not run anything; the plan's meaning is in ``plan``, the timing model in ``timing``.

Between boundary operations the virtual ranks are a max-plus linear system. So the clock of a virtual host is kept as
a maximum of *terms*, (operation i, weight), in place of a number, and the units are walked once in causal order.

A term is dropped only where another is provably never smaller, whatever the sandbox does: (i, a) next to (k, b) goes
if ``A(k) >= A(i) + a - b`` follows from what A(k) contains (its own terms, and for a sandbox member k's post, that
the member has waited for, or itself posted, i before). Nothing is assumed of the time that sandbox ranks compute.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.plan import START, BoundaryPlan
from prism_sdk.graph.timing import Timing, schedule
from prism_sdk.graph.turns import turns_of
from prismtrace import ABSENT, ABSENT32, UnitKind

__all__ = ["contract"]

#: How many operations the proofs of what lies before one operation may look at; what is not proven is kept.
_PROOF_BUDGET = 128
#: Of how many operations the proofs are kept in memory.
_MAX_PROVEN = 4096


class _Clock(NamedTuple):
    """max over (source, weight) of A(source) + weight + offset_ns. The dict is shared and never changed."""

    terms: dict[int, int]
    offset_ns: int

    def later(self, ns: int) -> _Clock:
        return _Clock(self.terms, self.offset_ns + ns)


class _Algebra:
    """Maxima of clocks, pruned by what is known of each boundary operation."""

    def __init__(self, *, prune: bool) -> None:
        self.prune = prune
        #: For each operation terms that its arrival is never below.
        self.lower: list[dict[int, int]] = []
        #: The same in relation to START, as one number.
        self.floor: list[int] = []
        self._proven: dict[int, dict[int, int]] = {}

    def add(self, below: _Clock) -> int:
        """A new operation that is known to arrive no earlier than ``below``; its index."""
        terms = {source: weight + below.offset_ns for source, weight in below.terms.items()}
        floor = [w if source == START else self.floor[source] + w for source, w in terms.items()]
        self.lower.append(terms)
        self.floor.append(max(floor))
        return len(self.lower) - 1

    def latest(self, a: _Clock | None, b: _Clock) -> _Clock:
        """The maximum of two clocks; one of them itself where it is never the smaller."""
        if a is None:
            return b
        if a.terms is b.terms:
            return a if a.offset_ns >= b.offset_ns else b
        ahead = b.offset_ns - a.offset_ns
        mine, others = a.terms, b.terms
        if len(others) <= len(mine) and all(s in mine and mine[s] >= w + ahead for s, w in others.items()):
            return a
        if len(mine) <= len(others) and all(s in others and others[s] + ahead >= w for s, w in mine.items()):
            return b
        merged = dict(mine)
        for source, weight in others.items():
            if source not in merged or merged[source] < weight + ahead:
                merged[source] = weight + ahead
        if self.prune:
            self._drop_dominated(merged)
            if len(merged) == len(others) and all(merged.get(s) == w + ahead for s, w in others.items()):
                return b
            if merged == mine:
                return a
        return _Clock(merged, a.offset_ns)

    def _drop_dominated(self, terms: dict[int, int]) -> None:
        others = sorted(terms, reverse=True)
        if others[-1] == START:
            weight = terms[START]
            if any(self.floor[other] + terms[other] >= weight for other in others[:-1]):
                del terms[START]
            others.pop()
        alive = others[::-1]
        for other in others:
            if len(alive) < 2:
                return
            if other != alive[-1]:
                continue  # it was dropped itself, by one that also drops what it would drop
            alive.pop()
            bounds, at = self._bounds(other), terms[other]
            kept = []
            for source in alive:
                bound = bounds.get(source)
                if bound is not None and bound + at >= terms[source]:
                    del terms[source]
                else:
                    kept.append(source)
            alive = kept

    def _bounds(self, operation: int) -> dict[int, int]:
        """For operations before this one a number of ns that it provably arrives later by at least."""
        known = self._proven.get(operation)
        if known is not None:
            return known
        best = {operation: 0}
        heap = [-operation]
        budget = _PROOF_BUDGET
        # from the latest operation down, so that the bound of each is final when its turn comes
        while heap and budget:
            budget -= 1
            at = -heappop(heap)
            so_far = best[at]
            for below, weight in self.lower[at].items():
                if below == START:
                    continue
                if below not in best:
                    best[below] = so_far + weight
                    heappush(heap, -below)
                elif best[below] < so_far + weight:
                    best[below] = so_far + weight
        if len(self._proven) >= _MAX_PROVEN:
            self._proven.clear()
        self._proven[operation] = best
        return best


class _Contraction:
    """The state of one walk over the units of a job."""

    def __init__(
        self, graph: JobGraph, *, sandbox: frozenset[int], timing: Timing, prune: bool, initial_ns: Mapping[int, int]
    ) -> None:
        self.graph = graph
        self.timing = timing
        self.algebra = _Algebra(prune=prune)
        self.is_sandbox = np.array([rank in sandbox for rank in graph.ranks], dtype=np.bool_)
        start = {START: 0}
        busy = np.where(graph.columns["kind"] == UnitKind.COMPUTE, timing.gap_ns + timing.duration_ns, 0)
        #: Compute time summed along the rows; the clock of a virtual host is kept less this sum.
        self.summed = np.cumsum(busy)
        before = np.concatenate([[0], self.summed])[graph.offsets[:-1]].tolist()
        #: Of a virtual rank its clock, of a sandbox rank what its clock is never below.
        self.host = [
            _Clock(start, initial_ns.get(rank, 0) - (0 if rank in sandbox else before[position]))
            for position, rank in enumerate(graph.ranks)
        ]
        self.start = list(self.host)
        counts = np.diff(graph.event_offsets)
        in_sandbox = np.repeat(self.is_sandbox, np.diff(graph.offsets))[graph.event_rows]
        inside = np.add.reduceat(in_sandbox.astype(np.int64), graph.event_offsets[:-1]) if len(counts) else counts
        is_message = graph.columns["kind"][graph.event_rows[graph.event_offsets[:-1]]] != UnitKind.COLLECTIVE
        self.is_message = is_message.tolist()
        self.is_boundary = ((inside > 0) & (inside < counts)).tolist()
        self.sends_out = (is_message & (inside > 0) & (inside < counts) & in_sandbox[graph.event_offsets[:-1]]).tolist()
        moved = timing.transfer_ns[graph.event_rows]
        self.slowest = (np.maximum.reduceat(moved, graph.event_offsets[:-1]) if len(counts) else counts).tolist()
        self.previous = graph.event_previous.tolist()
        self.missing = counts.tolist()
        #: What is known of the arrival of an event: from all its members, and from its virtual members alone.
        self.arrival: list[_Clock | None] = [None] * len(counts)
        self.virtual: list[_Clock | None] = [None] * len(counts)
        #: The index of an event as boundary operation, and the events in that order.
        self.index_of: dict[int, int] = {}
        self.operations: list[int] = []
        self.posted: dict[int, _Clock] = {}

    def run(self) -> None:
        """Walk all communication and WAIT rows in causal order."""
        graph, timing = self.graph, self.timing
        order = graph.linear_order
        kind = graph.columns["kind"]
        positions = (np.searchsorted(graph.offsets, order, side="right") - 1).tolist()
        sums = self.summed[order].tolist()
        events = graph.event_of_row[order].tolist()
        is_send = (kind[order] == UnitKind.SEND).tolist()
        awaited = graph.awaited_row[order]
        awaited_event = np.where(awaited >= 0, graph.event_of_row[awaited], -1).tolist()
        delay = np.where(awaited >= 0, timing.transfer_ns[awaited], 0).tolist()
        awaits_send = ((awaited >= 0) & (kind[awaited] == UnitKind.SEND)).tolist()
        gap, least = timing.gap_ns[order].tolist(), timing.duration_ns[order].tolist()
        sandbox = self.is_sandbox.tolist()
        targets = awaited.tolist()
        for i, row in enumerate(order.tolist()):
            position, event = positions[i], events[i]
            if sandbox[position]:
                if event >= 0:
                    # a stream beside the host's rows may have been ahead of all that they waited for
                    known = self.host[position] if gap[i] >= 0 else self.start[position]
                    self._post(event, known, position=position, in_sandbox=True, is_send=is_send[i])
                elif awaited_event[i] >= 0 and not awaits_send[i]:
                    # transfers among sandbox ranks are real, so their length is not known
                    length = delay[i] if self.is_boundary[awaited_event[i]] else 0
                    done = self._arrived(awaited_event[i]).later(length)
                    self.host[position] = self.algebra.latest(self.host[position], done)
                continue
            clock = self.host[position].later(sums[i])
            if event >= 0:
                clock = clock.later(gap[i])
                if is_send[i]:
                    self.posted[row] = clock
                self._post(event, clock, position=position, in_sandbox=False, is_send=is_send[i])
                continue
            until = clock.later(least[i])
            if awaited_event[i] >= 0:
                begun = self.posted[targets[i]] if awaits_send[i] else self._arrived(awaited_event[i])
                until = self.algebra.latest(until, begun.later(delay[i] + gap[i]))
            self.host[position] = until.later(-sums[i])

    def _arrived(self, event: int) -> _Clock:
        clock = self.arrival[event]
        assert clock is not None  # the causal order puts all members before a wait
        return clock

    def _post(self, event: int, clock: _Clock, *, position: int, in_sandbox: bool, is_send: bool) -> None:
        algebra = self.algebra
        self.missing[event] -= 1
        if self.sends_out[event]:
            # the operation is the post of the sender; the receiver goes on from the later of both
            if is_send:
                self._number(event)
                clock = self.host[position] = _Clock({algebra.add(clock): 0}, 0)
            self.arrival[event] = algebra.latest(self.arrival[event], clock)
            return
        self.arrival[event] = algebra.latest(self.arrival[event], clock)
        if not in_sandbox:
            self.virtual[event] = algebra.latest(self.virtual[event], clock)
        if self.missing[event]:
            return
        before = self.previous[event]
        if before >= 0 and (self.is_boundary[event] or not in_sandbox):
            done = self._arrived(before).later(self.slowest[before])
            self.arrival[event] = algebra.latest(self.arrival[event], done)
            if self.is_boundary[event]:
                self.virtual[event] = algebra.latest(self.virtual[event], done)
        if self.is_boundary[event]:
            self._number(event)
            index = algebra.add(self._arrived(event))
            if not self.is_message[event]:
                self.arrival[event] = _Clock({index: 0}, 0)

    def _number(self, event: int) -> None:
        self.index_of[event] = len(self.operations)
        self.operations.append(event)


def contract(
    graph: JobGraph,
    *,
    sandbox_ranks: Collection[int],
    timing: Timing | None = None,
    initial_ns: Mapping[int, int] | None = None,
    prune: bool = True,
    last_step: int | None = None,
) -> BoundaryPlan:
    """The boundary plan of a sandbox in a job.

    Args:
        graph: a graph of all ranks with times.
        sandbox_ranks: the ranks that will run the program; all others are virtual.
        timing: the weights; without it those of the graph's own columns.
        initial_ns: the clock at which a rank begins, after the job's origin (0 where not given).
        last_step: the step that stands for those beyond the recording; absent: the last that has boundary operations.
        prune: drop dominated terms; the plan's results are the same without, only more terms are kept.

    Raises:
        GraphError: the sandbox is empty or names unknown ranks, or the graph lacks ranks or times.
    """
    sandbox = frozenset(sandbox_ranks)
    unknown = sorted(sandbox - set(graph.ranks))
    if unknown or not sandbox:
        raise GraphError(f"the sandbox {sorted(sandbox)} must name ranks of {graph.source}"
                         + (f", which has no rank {unknown[0]}" if unknown else ""))  # fmt: skip
    if timing is None:
        timing = Timing.from_graph(graph)
    timeline = schedule(graph, timing=timing, initial_ns=initial_ns)
    walk = _Contraction(graph, sandbox=sandbox, timing=timing, prune=prune, initial_ns=initial_ns or {})
    walk.run()
    c = graph.columns
    terms: list[dict[int, int]] = []
    member_rows: list[npt.NDArray[np.int64]] = []
    keys: dict[str, list[int]] = {name: [] for name in ("kind", "source_rank", "destination_rank", "tag", "step")}
    in_sandbox = np.repeat(walk.is_sandbox, np.diff(graph.offsets))
    for event in walk.operations:
        rows = graph.event_rows[graph.event_offsets[event] : graph.event_offsets[event + 1]]
        own = rows[in_sandbox[rows]]
        member_rows.append(own)
        kind = UnitKind(int(c["kind"][own[0]]))
        clock = walk.virtual[event]
        terms.append({} if clock is None else {s: w + clock.offset_ns for s, w in clock.terms.items()})
        is_message = kind is not UnitKind.COLLECTIVE
        keys["kind"].append(int(kind))
        keys["source_rank"].append(int(graph.rank_of_row[rows[0]]) if is_message else ABSENT32)
        keys["destination_rank"].append(int(graph.rank_of_row[rows[1]]) if is_message else ABSENT32)
        keys["tag"].append(int(c["tag"][own[0]]) if is_message else ABSENT)
        keys["step"].append(int(c["step"][own].min()))
    members = np.concatenate([np.zeros(0, dtype=np.int64), *member_rows])
    times = np.concatenate([timeline.step_times_ns(rank)[1] for rank in sorted(sandbox)])
    period = int(np.median(times)) if len(times) else timeline.end_of_job_ns
    first_rows = np.array([rows[0] for rows in member_rows], dtype=np.int64)
    arrays = {
        "kind": np.array(keys["kind"], dtype=np.uint8),
        "group_id": c["group_id"][first_rows],
        "source_rank": np.array(keys["source_rank"], dtype=np.int32),
        "destination_rank": np.array(keys["destination_rank"], dtype=np.int32),
        "tag": np.array(keys["tag"], dtype=np.int64),
        "seq": c["seq"][first_rows],
        "step": np.array(keys["step"], dtype=np.int32),
        "term_offsets": np.cumsum([0, *(len(t) for t in terms)], dtype=np.int64),
        "term_source": np.array([s for t in terms for s in sorted(t)], dtype=np.int32),
        "term_weight_ns": np.array([t[s] for t in terms for s in sorted(t)], dtype=np.int64),
        "member_offsets": np.cumsum([0, *(len(rows) for rows in member_rows)], dtype=np.int64),
        "member_rank": graph.rank_of_row[members],
        "member_transfer_ns": timing.transfer_ns[members],
    }
    for array in arrays.values():
        array.setflags(write=False)
    if last_step is None:
        last_step = int(arrays["step"].max()) if len(arrays["step"]) else -1
    return BoundaryPlan(
        world_size=graph.world_size, sandbox_ranks=tuple(sorted(sandbox)), period_ns=period, last_step=last_step,
        turns=turns_of([graph]), **arrays,
    )  # fmt: skip
