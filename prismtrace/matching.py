"""Matches communication units across ranks by group and seq, and names what does not match.

Does not compute times; it holds a few numbers for each collective, not the units.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.model import ABSENT, ABSENT32, ProcessGroup, UnitKind
from prismtrace.tables import UnitTable

Problem = tuple[str, str, str]
_MAX_PROBLEMS_PER_GROUP: Final = 4
_LANE: Final = np.dtype([("group", "<u8"), ("src", "<i4"), ("dst", "<i4"), ("tag", "<i8"), ("seq", "<i8")])


class Matching:
    """Collects the communication of rank after rank. `incomplete`: some rank could not be read."""

    def __init__(self, groups: Mapping[int, ProcessGroup]) -> None:
        self.incomplete = False
        self._groups = groups
        self._collectives: dict[int, list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]] = {}
        self._lanes: dict[bool, list[NDArray[np.void]]] = {True: [], False: []}

    def add(self, rank: int, units: UnitTable) -> list[Problem]:
        """Takes in the units of one rank; returns what is wrong with them by themselves."""
        problems: list[Problem] = []
        known = units.seq != ABSENT
        rows = np.flatnonzero((units.kind == UnitKind.COLLECTIVE) & known)
        for group_id in np.unique(units.group_id[rows]).tolist():
            mine = rows[units.group_id[rows] == group_id]
            seq = units.seq[mine]
            if not (seq[1:] > seq[:-1]).all():
                seq, first, count = np.unique(seq, return_index=True, return_counts=True)
                twice = np.flatnonzero(count > 1)
                if len(twice):
                    message = f"seq {seq[twice[0]]} of group {group_id} occurs {count[twice[0]]} times"
                    problems.append(("PT030", message, f"rank {rank}"))
                mine = mine[first]
            what = units.op[mine].astype(np.int64) << 8 | units.reduce_op[mine]
            self._collectives.setdefault(group_id, []).append((rank, seq, what))
        for is_send, kind in ((True, UnitKind.SEND), (False, UnitKind.RECV)):
            rows = np.flatnonzero((units.kind == kind) & known & (units.peer != ABSENT32))
            if len(rows):
                problems += self._add_lanes(rank, units, rows, is_send=is_send)
        return problems

    def _add_lanes(self, rank: int, units: UnitTable, rows: NDArray[np.intp], *, is_send: bool) -> list[Problem]:
        lane = np.zeros(len(rows), _LANE)
        lane["group"], lane["tag"], lane["seq"] = units.group_id[rows], units.tag[rows], units.seq[rows]
        lane["src"], lane["dst"] = (rank, units.peer[rows]) if is_send else (units.peer[rows], rank)
        distinct, count = np.unique(lane, return_counts=True)
        self._lanes[is_send].append(distinct)
        if not (count > 1).any():
            return []
        what = "send" if is_send else "receive"
        return [("PT030", f"{what} {_lane_text(distinct[count > 1][0])} occurs twice", f"rank {rank}")]

    def problems(self, ranks: Collection[int]) -> Iterator[Problem]:
        """What does not match, among the ranks that have data."""
        present = set(ranks)
        for group_id, parts in self._collectives.items():
            group = self._groups.get(group_id)
            members = set(group.ranks) & present if group else {rank for rank, _, _ in parts}
            yield from islice(self._group_problems(group_id, parts, len(members)), _MAX_PROBLEMS_PER_GROUP)
        if not self.incomplete:
            yield from self._lane_problems(present)

    def _group_problems(
        self, group_id: int, parts: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]], num_members: int
    ) -> Iterator[Problem]:
        seqs = np.concatenate([seq for _, seq, _ in parts])
        what = np.concatenate([kind for _, _, kind in parts])
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
        both = [np.concatenate(parts) if parts else np.zeros(0, _LANE) for parts in self._lanes.values()]
        here = [part[np.isin(part["src"], list(present)) & np.isin(part["dst"], list(present))] for part in both]
        for what, mine, other in (("send", here[0], here[1]), ("receive", here[1], here[0])):
            alone = mine[~_contains(other, mine)]
            if len(alone):
                more = f" (and {len(alone) - 1} more)" if len(alone) > 1 else ""
                yield "PT033", f"a {what} has no other side{more}", _lane_text(alone[0])


def _contains(sorted_or_not: NDArray[np.void], wanted: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which of `wanted` are among the others; both have distinct elements."""
    joined = np.concatenate([np.unique(sorted_or_not), wanted])
    _, inverse, count = np.unique(joined, return_inverse=True, return_counts=True)
    return np.asarray(count[inverse[len(joined) - len(wanted) :]] > 1)


def _lane_text(lane: np.void) -> str:
    tag = "none" if lane["tag"] == ABSENT else str(lane["tag"])
    return f"{lane['src']} -> {lane['dst']}, group {lane['group']}, tag {tag}, seq {lane['seq']}"
