"""Matches communication units across ranks by group and seq, and names what does not match.

Does not compute times; it holds a few numbers for each collective, not the units.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.members import OfRanks
from prismtrace.model import ABSENT, ABSENT32, ProcessGroup, UnitKind
from prismtrace.structure import mixed
from prismtrace.tables import UnitTable

Problem = tuple[str, str, str]
_Collectives = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Of one group: seq, rising, and a number for the operation."""
_MAX_PROBLEMS_PER_GROUP: Final = 4
_LANE: Final = np.dtype([("group", "<u8"), ("src", "<i4"), ("dst", "<i4"), ("tag", "<i8"), ("seq", "<i8")])


class Matching:
    """Collects the communication of rank after rank. `incomplete`: some rank could not be read."""

    def __init__(self, groups: Mapping[int, ProcessGroup]) -> None:
        self.incomplete = False
        self._groups = groups
        self._collectives: dict[int, list[tuple[int, _Collectives]]] = {}
        self._right: set[tuple[int, ...]] = set()
        self._lanes: dict[bool, list[NDArray[np.void]]] = {True: [], False: []}

    def add(self, ranks: Sequence[int], units: UnitTable, group: OfRanks, peer: OfRanks) -> list[Problem]:
        """Takes in the units of ranks that differ in group and peer alone; returns what is wrong in one of them.

        Of several ranks of which one has a problem none is taken in.
        """
        problems: list[Problem] = []
        known = units.seq != ABSENT
        rows = np.flatnonzero((units.kind == UnitKind.COLLECTIVE) & known)
        used = np.unique(group.codes[rows])
        ids = group.values[used].view(np.uint64)
        if len(used) > 1 and len(ranks) > 1 and (np.diff(np.sort(ids, axis=0), axis=0) == 0).any():
            return [("PT030", "groups that differ in one rank are the same in another", f"rank {ranks[0]}")]
        parts = []
        for code, group_ids in zip(used.tolist(), ids.tolist(), strict=True):
            mine = rows[group.codes[rows] == code]
            seq = units.seq[mine]
            if not (seq[1:] > seq[:-1]).all():
                seq, first, count = np.unique(seq, return_index=True, return_counts=True)
                twice = np.flatnonzero(count > 1)
                if len(twice):
                    message = f"seq {seq[twice[0]]} of group {group_ids[0]} occurs {count[twice[0]]} times"
                    problems.append(("PT030", message, f"rank {ranks[0]}"))
                mine = mine[first]
            parts.append((group_ids, (seq, units.op[mine].astype(np.int64) << 8 | units.reduce_op[mine])))
        lanes = []
        for is_send, kind in ((True, UnitKind.SEND), (False, UnitKind.RECV)):
            rows = np.flatnonzero((units.kind == kind) & known & (units.peer != ABSENT32))
            if len(rows):
                lane = _lanes(ranks, units, rows, group, peer, is_send=is_send)
                numbers = np.sort(_numbers(lane), axis=1)
                if (numbers[:, 1:] == numbers[:, :-1]).any():
                    problems.append(_twice(ranks[0], lane[0], is_send=is_send))
                lanes.append((is_send, lane.reshape(-1)))
        if len(ranks) == 1 or not problems:
            for group_ids, part in sorted(parts, key=lambda item: item[0][0]):
                for rank, group_id in zip(ranks, group_ids, strict=True):
                    self._collectives.setdefault(group_id, []).append((rank, part))
            for is_send, lane in lanes:
                self._lanes[is_send].append(lane)
        return problems

    def problems(self, ranks: Collection[int]) -> Iterator[Problem]:
        """What does not match, among the ranks that have data."""
        present = set(ranks)
        for group_id, parts in sorted(
            self._collectives.items(), key=lambda item: (min(p[0] for p in item[1]), item[0])
        ):
            group = self._groups.get(group_id)
            members = set(group.ranks) & present if group else {rank for rank, _ in parts}
            alike = (len(members), *sorted(id(part) for _, part in parts))  # groups of ranks that do the same
            if alike not in self._right:
                problems = list(islice(self._group_problems(group_id, parts, len(members)), _MAX_PROBLEMS_PER_GROUP))
                yield from problems
                if not problems:
                    self._right.add(alike)
        if not self.incomplete:
            yield from self._lane_problems(present)

    def _group_problems(
        self, group_id: int, parts: list[tuple[int, _Collectives]], num_members: int
    ) -> Iterator[Problem]:
        seqs = np.concatenate([part[0] for _, part in parts])
        what = np.concatenate([part[1] for _, part in parts])
        seq, inverse, count = np.unique(seqs, return_inverse=True, return_counts=True)
        low, high = np.full(len(seq), np.iinfo(np.int64).max), np.zeros(len(seq), np.int64)
        np.minimum.at(low, inverse, what)
        np.maximum.at(high, inverse, what)
        for place in np.flatnonzero(low != high).tolist():
            message = f"members call different operations (codes {low[place] >> 8} and {high[place] >> 8})"
            yield "PT031", message, f"group {group_id}, seq {seq[place]}"
        short = np.flatnonzero(count < num_members)
        if len(short) and not self.incomplete:
            message = f"{count[short[0]]} of {num_members} recorded members have it (and {len(short) - 1} more like it)"
            yield "PT032", message, f"group {group_id}, seq {seq[short[0]]}"

    def _lane_problems(self, present: set[int]) -> Iterator[Problem]:
        ranks = np.array(sorted(present))
        both = [np.concatenate(parts) if parts else np.zeros(0, _LANE) for parts in self._lanes.values()]
        here = [part[np.isin(part["src"], ranks) & np.isin(part["dst"], ranks)] for part in both]
        for what, owner, mine, other in (("send", "src", here[0], here[1]), ("receive", "dst", here[1], here[0])):
            alone = np.unique(mine[~np.isin(_numbers(mine), _numbers(other))])
            if len(alone):
                more = f" (and {len(alone) - 1} more)" if len(alone) > 1 else ""
                first = alone[np.argsort(alone[owner], kind="stable")[0]]
                yield "PT033", f"a {what} has no other side{more}", _lane_text(first)


def _lanes(
    ranks: Sequence[int], units: UnitTable, rows: NDArray[np.intp], group: OfRanks, peer: OfRanks, *, is_send: bool
) -> NDArray[np.void]:
    """The lanes of messages, of shape (ranks, rows)."""
    lane = np.zeros((len(ranks), len(rows)), _LANE)
    mine, theirs = ("src", "dst") if is_send else ("dst", "src")
    lane["group"] = group.values[group.codes[rows]].view(np.uint64).T
    lane["tag"], lane["seq"] = units.tag[rows], units.seq[rows]
    lane[mine], lane[theirs] = np.array(ranks)[:, None], peer.values[peer.codes[rows]].T
    return lane


def _numbers(lanes: NDArray[np.void]) -> NDArray[np.uint64]:
    """64-bit digests of lanes, which are compared much faster."""
    result = np.zeros(lanes.shape, np.uint64)
    for name in _LANE.names or ():
        result = mixed(result, lanes[name].astype(np.int64))
    return result


def _twice(rank: int, lane: NDArray[np.void], *, is_send: bool) -> Problem:
    distinct, count = np.unique(lane, return_counts=True)
    what = "send" if is_send else "receive"
    text = _lane_text(distinct[np.argmax(count > 1)])
    return "PT030", f"{what} {text} occurs twice", f"rank {rank}"


def _lane_text(lane: np.void) -> str:
    tag = "none" if lane["tag"] == ABSENT else str(lane["tag"])
    return f"{lane['src']} -> {lane['dst']}, group {lane['group']}, tag {tag}, seq {lane['seq']}"
