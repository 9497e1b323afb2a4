"""Joins the communication units of all ranks into events, checks them, and puts the units in a causal order.

It gives no times. Collectives are joined by (group, seq), messages by (group, source, destination, tag, seq).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.errors import GraphDeadlockError, GraphError, InconsistentUnitError, UnmatchedUnitError
from prismtrace import ABSENT, ABSENT32, DType, Op, ProcessGroup, ReduceOp, UnitKind

if TYPE_CHECKING:
    from prism_sdk.graph.job import JobGraph

__all__ = ["linearize", "match"]

Columns = Mapping[str, npt.NDArray[Any]]
Int64Array = npt.NDArray[np.int64]

_MAX_PROBLEMS = 8
_ROOTED = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
_REDUCING = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)
#: Columns in which the members of one operation must agree, and for which operations (None: all).
_AGREE: tuple[tuple[str, int, tuple[Op, ...] | None], ...] = (
    ("op", 0, None),
    ("dtype", 0, None),
    ("reduce_op", 0, _REDUCING),
    ("peer", ABSENT32, _ROOTED),
    ("num_elements_in", ABSENT, _REDUCING),
    ("num_elements_out", ABSENT, (Op.ALL_REDUCE, Op.ALL_GATHER, Op.BROADCAST)),
)
_ENUMS: dict[str, Any] = {"op": Op, "dtype": DType, "reduce_op": ReduceOp}


class _Matcher:
    """The working state of ``match``: columns, and words for a row."""

    def __init__(
        self, *, columns: Columns, offsets: Int64Array, first_index: Int64Array, ranks: Sequence[int],
        groups: Mapping[int, ProcessGroup], source: str,
    ) -> None:  # fmt: skip
        self.columns = columns
        self.offsets = offsets
        self.first_index = first_index
        self.ranks = np.array(ranks, dtype=np.int64)
        self.rank_of_row = np.repeat(self.ranks, np.diff(offsets))
        self.groups = groups
        self.source = source
        self.loaded = set(ranks)

    def where(self, row: int) -> str:
        position = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return f"rank {self.ranks[position]} unit {row - self.offsets[position] + self.first_index[position]}"

    def group(self, group_id: int) -> str:
        group = self.groups[group_id]
        return f"group {group.name or hex(group_id)} {list(group.ranks[:8])}{'...' if len(group.ranks) > 8 else ''}"

    def fail(self, kind: type[GraphError], what: str, rows: Sequence[str], *, hint: str, num_more: int = 0) -> None:
        more = [f"... and {num_more} more"] if num_more > 0 else []
        raise kind(f"{self.source}: {what}", problems=[*rows, *more], hint=hint)


def match(
    *, columns: Columns, offsets: Int64Array, first_index: Int64Array, ranks: Sequence[int],
    groups: Mapping[int, ProcessGroup], source: str,
) -> dict[str, npt.NDArray[Any]]:  # fmt: skip
    """The event fields of JobGraph for these columns; raises UnmatchedUnitError or InconsistentUnitError."""
    matcher = _Matcher(
        columns=columns, offsets=offsets, first_index=first_index, ranks=ranks, groups=groups, source=source
    )
    kind = columns["kind"]
    bad = np.flatnonzero((kind < UnitKind.COMPUTE) | (kind > UnitKind.WAIT))
    if len(bad):
        raise InconsistentUnitError(f"{source}: {matcher.where(int(bad[0]))} has the unknown kind {kind[bad[0]]}")
    _check_groups(matcher)
    starts_c, rows_c, whole_c, previous_c = _match_collectives(matcher)
    starts_m, rows_m, whole_m = _match_messages(matcher)
    event_offsets = np.concatenate([starts_c, starts_m + len(rows_c), [len(rows_c) + len(rows_m)]]).astype(np.int64)
    event_rows = np.concatenate([rows_c, rows_m]).astype(np.int64)
    event_of_row = np.full(len(kind), -1, dtype=np.int64)
    event_of_row[event_rows] = np.repeat(np.arange(len(event_offsets) - 1), np.diff(event_offsets))
    return {
        "awaited_row": _match_waits(matcher),
        "event_of_row": event_of_row,
        "event_offsets": event_offsets,
        "event_rows": event_rows,
        "event_previous": np.concatenate([previous_c, np.full(len(starts_m), -1)]).astype(np.int64),
        "event_is_whole": np.concatenate([whole_c, whole_m]).astype(np.bool_),
    }


def _check_groups(m: _Matcher) -> None:
    """Every communication row names a known group that its rank (and the peer of a message) belongs to, and a seq."""
    rows = np.flatnonzero((m.columns["kind"] >= UnitKind.COLLECTIVE) & (m.columns["kind"] <= UnitKind.RECV))
    group_ids = m.columns["group_id"][rows]
    order = np.argsort(group_ids, kind="stable")
    distinct, starts = np.unique(group_ids[order], return_index=True)
    for group_id, part in zip(distinct, np.split(order, starts[1:]), strict=False):
        selected = rows[part]
        if int(group_id) not in m.groups:
            m.fail(GraphError, f"{m.where(int(selected[0]))} is in group {int(group_id):#x}, which the trace lacks", [],
                   hint="the trace is damaged or was merged without its groups: record it again")  # fmt: skip
        members = np.array(m.groups[int(group_id)].ranks, dtype=np.int64)
        outside = selected[~np.isin(m.rank_of_row[selected], members)]
        if len(outside):
            m.fail(InconsistentUnitError, f"{m.where(int(outside[0]))} is no member of {m.group(int(group_id))}", [],
                   hint="the trace mixes different jobs: record it again")  # fmt: skip
    lacking = rows[m.columns["seq"][rows] == ABSENT]
    if len(lacking):
        m.fail(UnmatchedUnitError, "communication without a sequence number cannot be matched",
               [m.where(int(row)) for row in lacking[:_MAX_PROBLEMS]], hint="record the job with Prism",
               num_more=len(lacking) - _MAX_PROBLEMS)  # fmt: skip


def _match_collectives(m: _Matcher) -> tuple[Int64Array, Int64Array, npt.NDArray[np.bool_], Int64Array]:
    rows = np.flatnonzero(m.columns["kind"] == UnitKind.COLLECTIVE)
    group_id, seq = m.columns["group_id"][rows], m.columns["seq"][rows]
    by_rank = np.lexsort((np.arange(len(rows)), group_id, m.rank_of_row[rows]))
    same = (group_id[by_rank][1:] == group_id[by_rank][:-1]) & (
        m.rank_of_row[rows][by_rank][1:] == m.rank_of_row[rows][by_rank][:-1]
    )
    unordered = np.flatnonzero(same & (seq[by_rank][1:] <= seq[by_rank][:-1]))
    if len(unordered):
        row = int(rows[by_rank[unordered[0] + 1]])
        m.fail(InconsistentUnitError, f"{m.where(row)} has seq {m.columns['seq'][row]}, not above the one before it "
               f"in {m.group(int(m.columns['group_id'][row]))}", [],
               hint="the trace is damaged: record it again")  # fmt: skip
    order = np.lexsort((m.rank_of_row[rows], seq, group_id))
    rows, group_id, seq = rows[order], group_id[order], seq[order]
    is_first = np.ones(len(rows), dtype=np.bool_)
    is_first[1:] = (group_id[1:] != group_id[:-1]) | (seq[1:] != seq[:-1])
    starts = np.flatnonzero(is_first)
    counts = np.diff(np.append(starts, len(rows)))
    sizes = {g: len(set(m.groups[g].ranks)) for g in {int(g) for g in np.unique(group_id)}}
    present = {g: len(set(m.groups[g].ranks) & m.loaded) for g in sizes}
    event_groups = group_id[starts]
    expected = np.array([present[int(g)] for g in event_groups], dtype=np.int64)
    lacking = np.flatnonzero(counts != expected)
    if len(lacking):
        problems = []
        for event in lacking[:_MAX_PROBLEMS]:
            start, row = starts[event], int(rows[starts[event]])
            have = set(m.rank_of_row[rows[start : start + counts[event]]].tolist())
            want = set(m.groups[int(event_groups[event])].ranks) & m.loaded
            problems.append(f"{Op(int(m.columns['op'][row])).name.lower()} seq {seq[start]} in "
                            f"{m.group(int(event_groups[event]))}: ranks {sorted(have)} have it ({m.where(row)}), "
                            f"missing ranks {sorted(want - have)}")  # fmt: skip
        m.fail(UnmatchedUnitError, f"{len(lacking)} collectives lack members", problems,
               num_more=len(lacking) - _MAX_PROBLEMS,
               hint="an aborted recording ends in the middle: choose fewer steps, or record again")  # fmt: skip
    _check_agreement(m, rows=rows, starts=starts, counts=counts)
    previous = np.full(len(starts), -1, dtype=np.int64)
    if len(starts):
        previous[1:] = np.where(event_groups[1:] == event_groups[:-1], np.arange(len(starts) - 1), -1)
    whole = counts == np.array([sizes[int(g)] for g in event_groups], dtype=np.int64)
    return starts.astype(np.int64), rows, whole, previous


def _check_agreement(m: _Matcher, *, rows: Int64Array, starts: Int64Array, counts: Int64Array) -> None:
    if not len(rows):
        return
    first_row = np.repeat(rows[starts], counts)
    for name, absent, ops in _AGREE:
        values = m.columns[name][rows].astype(np.int64)
        # absent values say nothing: compare the smallest and the largest of the known ones
        known = values != absent
        if ops is not None:
            known &= np.isin(m.columns["op"][first_row], ops)
        lowest = np.minimum.reduceat(np.where(known, values, np.iinfo(np.int64).max), starts)
        highest = np.maximum.reduceat(np.where(known, values, np.iinfo(np.int64).min), starts)
        wrong = np.flatnonzero(lowest < highest)
        if len(wrong):
            problems = []
            for event in wrong[:_MAX_PROBLEMS]:
                members = rows[starts[event] : starts[event] + counts[event]]
                listing = "; ".join(f"{m.where(int(r))}: {_show(name, m.columns[name][r])}" for r in members[:6])
                problems.append(f"{m.group(int(m.columns['group_id'][members[0]]))} seq "
                                f"{m.columns['seq'][members[0]]}: {listing}")  # fmt: skip
            m.fail(InconsistentUnitError, f"the members of {len(wrong)} collectives disagree in {name}", problems,
                   num_more=len(wrong) - _MAX_PROBLEMS,
                   hint="all members must call the same operation with matching tensors")  # fmt: skip


def _show(name: str, value: Any) -> str:
    if name in _ENUMS:
        try:
            return str(_ENUMS[name](int(value)).name.lower())
        except ValueError:
            pass
    return "absent" if int(value) in (ABSENT, ABSENT32) else str(int(value))


def _match_messages(m: _Matcher) -> tuple[Int64Array, Int64Array, npt.NDArray[np.bool_]]:
    c = m.columns
    rows = np.flatnonzero((c["kind"] == UnitKind.SEND) | (c["kind"] == UnitKind.RECV))
    is_recv = c["kind"][rows] == UnitKind.RECV
    own, peer = m.rank_of_row[rows], c["peer"][rows].astype(np.int64)
    lacking = rows[peer == ABSENT32]
    if len(lacking):
        m.fail(UnmatchedUnitError, "messages without a peer cannot be matched",
               [m.where(int(row)) for row in lacking[:_MAX_PROBLEMS]], hint="record the job again",
               num_more=len(lacking) - _MAX_PROBLEMS)  # fmt: skip
    source, destination = np.where(is_recv, peer, own), np.where(is_recv, own, peer)
    keys = (c["seq"][rows], c["tag"][rows], destination, source, c["group_id"][rows])
    order = np.lexsort((is_recv, *keys))
    rows, is_recv, peer = rows[order], is_recv[order], peer[order]
    changed = np.ones(len(rows), dtype=np.bool_)
    changed[1:] = np.logical_or.reduce([key[order][1:] != key[order][:-1] for key in keys])
    starts = np.flatnonzero(changed)
    counts = np.diff(np.append(starts, len(rows)))
    if not len(rows):
        return starts.astype(np.int64), rows, np.zeros(0, dtype=np.bool_)
    num_recvs = np.add.reduceat(is_recv.astype(np.int64), starts)
    paired = (counts == 2) & (num_recvs == 1)
    partner_absent = ~np.isin(peer[starts], m.ranks)
    wrong = np.flatnonzero(~paired & ~((counts == 1) & partner_absent))
    if len(wrong):
        problems = []
        for event in wrong[:_MAX_PROBLEMS]:
            row = int(rows[starts[event]])
            kind = UnitKind(int(c["kind"][row])).name.lower()
            what = f"{kind} of rank {m.rank_of_row[row]} with rank {c['peer'][row]}, tag {c['tag'][row]}"
            fault = "appears more than once" if counts[event] > 1 else "has no partner"
            group = m.group(int(c["group_id"][row]))
            problems.append(f"{what}, seq {c['seq'][row]} in {group} {fault} ({m.where(row)})")
        m.fail(UnmatchedUnitError, f"{len(wrong)} messages are not one send and one receive", problems,
               num_more=len(wrong) - _MAX_PROBLEMS,
               hint="an aborted recording ends in the middle: choose fewer steps, or record again")  # fmt: skip
    for name, absent in (("dtype", 0), ("num_elements", ABSENT)):
        send = rows[starts[paired]]
        recv = rows[starts[paired] + 1]
        sent = c["num_elements_in" if name == "num_elements" else name][send].astype(np.int64)
        received = c["num_elements_out" if name == "num_elements" else name][recv].astype(np.int64)
        differing = np.flatnonzero((sent != received) & (sent != absent) & (received != absent))
        if len(differing):
            m.fail(InconsistentUnitError, f"sender and receiver of {len(differing)} messages disagree in {name}",
                   [f"{m.where(int(send[i]))}: {_show(name, sent[i])}; {m.where(int(recv[i]))}: "
                    f"{_show(name, received[i])}" for i in differing[:_MAX_PROBLEMS]],
                   hint="both sides must use matching tensors", num_more=len(differing) - _MAX_PROBLEMS)  # fmt: skip
    return starts.astype(np.int64), rows, paired


def _match_waits(m: _Matcher) -> Int64Array:
    awaited = np.full(len(m.columns["kind"]), -1, dtype=np.int64)
    for position in range(len(m.ranks)):
        begin, end = int(m.offsets[position]), int(m.offsets[position + 1])
        local = np.flatnonzero(
            (m.columns["kind"][begin:end] == UnitKind.WAIT) & (m.columns["awaits"][begin:end] != ABSENT)
        )
        target = m.columns["awaits"][begin:end][local] - m.first_index[position]
        wrong = (target >= local) | (target + m.first_index[position] < 0)
        inside = ~wrong & (target >= 0)
        kinds = m.columns["kind"][begin:end][target[inside]]
        wrong[inside] |= (kinds < UnitKind.COLLECTIVE) | (kinds > UnitKind.RECV)
        if wrong.any():
            row = int(begin + local[np.flatnonzero(wrong)[0]])
            m.fail(InconsistentUnitError, f"{m.where(row)} waits for unit {m.columns['awaits'][row]}, which is no "
                   "communication unit before it", [], hint="the trace is damaged: record it again")  # fmt: skip
        awaited[begin + local[inside]] = begin + target[inside]
    return awaited


def linearize(graph: JobGraph) -> Int64Array:
    """A causal order of all communication and WAIT rows, by running a cursor per rank until it must wait.

    The cost is linear in the rows: a rank is taken up again only by the event that it waits for.
    """
    kind = graph.columns["kind"]
    synced = np.flatnonzero(kind != UnitKind.COMPUTE)
    bounds = np.searchsorted(synced, graph.offsets).tolist()
    rows = synced.tolist()
    event = graph.event_of_row[synced].tolist()
    awaited = graph.awaited_row[synced]
    awaited_event = np.where(awaited >= 0, graph.event_of_row[awaited], -1)
    # a send is buffered: waiting for it waits for nobody
    awaited_event[(awaited >= 0) & (kind[awaited] == UnitKind.SEND)] = -1
    blocks_on = awaited_event.tolist()
    missing = np.diff(graph.event_offsets).tolist()
    cursor, ends = bounds[:-1], bounds[1:]
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(graph.ranks) - 1, -1, -1))
    order: list[int] = []
    while runnable:
        position = runnable.pop()
        at, end = cursor[position], ends[position]
        while at < end:
            joined = event[at]
            if joined >= 0:
                missing[joined] -= 1
                if not missing[joined] and joined in waiting:
                    runnable.extend(waiting.pop(joined))
            else:
                needed = blocks_on[at]
                if needed >= 0 and missing[needed]:
                    waiting.setdefault(needed, []).append(position)
                    break
            order.append(rows[at])
            at += 1
        cursor[position] = at
    if len(order) != len(rows):
        _raise_deadlock(graph, waiting=waiting, rows=rows, cursor=cursor)
    return np.array(order, dtype=np.int64)


def _raise_deadlock(graph: JobGraph, *, waiting: Mapping[int, list[int]], rows: list[int], cursor: list[int]) -> None:
    # a rank that has ended stands behind its last row
    bounds = np.searchsorted(np.array(rows), graph.offsets)
    reached = [rows[at] if at < bounds[p + 1] else int(graph.offsets[p + 1]) for p, at in enumerate(cursor)]
    problems = []
    for event, positions in sorted(waiting.items()):
        members = graph.event_rows[graph.event_offsets[event] : graph.event_offsets[event + 1]]
        at_rank = np.searchsorted(graph.offsets, members, side="right") - 1
        missing = sorted({graph.ranks[p] for p, row in zip(at_rank, members, strict=True) if row >= reached[p]})
        for position in positions:
            awaited = int(graph.awaited_row[rows[cursor[position]]])
            problems.append(f"{graph.describe(awaited)} waits for ranks {missing}")
    shown = problems[: 4 * _MAX_PROBLEMS]
    raise GraphDeadlockError(
        f"{graph.source}: the order of the units is cyclic, {len(problems)} ranks wait and none can go on",
        problems=shown + ([f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []),
        hint="the ranks call the operations of their groups in different orders; a recording of a program that "
        "ran to its end has no such circle",
    )
