"""Joins the lanes of all ranks: which operations of which ranks are one event.

It looks at each lane of a rank once, not at each unit; it explains faults in few words (``prism_sdk.graph`` in many).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.errors import GraphError, UnmatchedUnitError
from prism_sdk.simulate.job import Lanes
from prismtrace import ABSENT, ABSENT32, ProcessGroup, UnitKind

__all__ = ["LaneTable", "RankLanes"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RankLanes:
    """The lanes of a rank but for groups and peers, which differ among ranks that do the same."""

    #: The first row of each lane.
    rows: Int64Array
    is_collective: npt.NDArray[np.bool_]
    is_send: npt.NDArray[np.bool_]
    #: The keys of ``LaneTable``, without groups and ranks.
    keys: Int64Array

    @classmethod
    def of(cls, rank: int, c: Mapping[str, npt.NDArray[Any]], made: Mapping[str, npt.NDArray[Any]], num: int) -> Self:
        """The ``num`` lanes of the columns of a rank: ``made`` is what ``kernel.localise`` gave."""
        rows = made["lane_row"][:num].copy()
        kind, seq = c["kind"][rows], c["seq"][rows]
        is_collective = kind == UnitKind.COLLECTIVE
        if (seq == ABSENT).any():
            raise _lacks_key(rank, int(rows[seq == ABSENT][0]))
        keys = np.zeros((9, num), dtype=np.int64)
        keys[0], keys[4] = ~is_collective, np.where(is_collective, 0, c["tag"][rows])
        keys[5:] = kind, made["lane_count"][:num], made["lane_check"][:num], seq
        return cls(rows=rows, is_collective=is_collective, is_send=kind == UnitKind.SEND, keys=keys)

    def are_distinct(self, group: npt.NDArray[Any], peer: npt.NDArray[Any]) -> bool:
        """Whether these are different lanes with other groups and peers."""
        peers = np.where(self.is_collective, 0, peer[self.rows]).tolist()
        keys = zip(self.keys[5].tolist(), group[self.rows].tolist(), peers, self.keys[4].tolist(), strict=True)
        return len(set(keys)) == len(self.rows)


def _lacks_key(rank: int, row: int) -> UnmatchedUnitError:
    return UnmatchedUnitError(f"rank {rank} has communication without a peer or a sequence number: row {row}",
                              hint="record the job with Prism")  # fmt: skip


class LaneTable:
    """Collects the lanes of ranks, in the order in which the ranks come."""

    def __init__(self) -> None:
        self._keys: list[Int64Array] = []
        self._counts: list[int] = []

    def add(self, rank: int, lanes: RankLanes, group: npt.NDArray[Any], peer: npt.NDArray[Any]) -> None:
        """Take up the lanes of a rank, whose rows have these groups and peers."""
        peers = np.where(lanes.is_collective, -1, peer[lanes.rows])
        if len(peers) and int(peers.min()) == ABSENT32:
            raise _lacks_key(rank, int(lanes.rows[peers == ABSENT32][0]))
        ends = np.where(lanes.is_collective, -1, rank)
        keys = lanes.keys.copy()
        keys[1] = group[lanes.rows]
        keys[2], keys[3] = np.where(lanes.is_send, (ends, peers), (peers, ends))
        self._keys.append(keys)
        self._counts.append(len(lanes.rows))

    def match(self, ranks: Int64Array, groups: Mapping[int, ProcessGroup], *, source: str) -> Lanes:
        """The lanes of the job; raises UnmatchedUnitError where members of a lane differ in what they did."""
        offsets = np.concatenate([[0], np.cumsum(self._counts)]).astype(np.int64)
        keys = np.concatenate(self._keys, axis=1) if self._keys else np.zeros((9, 0), dtype=np.int64)
        position = np.repeat(np.arange(len(ranks)), self._counts)
        order = np.lexsort((keys[5], keys[4], keys[3], keys[2], keys[1], keys[0]))
        keys, position = keys[:, order].astype(np.int64), position[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (keys[:5, 1:] != keys[:5, :-1]).any(axis=0)
        first = np.flatnonzero(is_first)
        which = np.cumsum(is_first) - 1
        num_members = np.diff(np.append(first, len(order)))
        # all members have done the same operations: as many, with the same numbers
        for at in np.flatnonzero((keys[6:9] != keys[6:9, first[which]]).any(axis=0)):
            _fail(source, keys[:, at], ranks[position[at]], groups, "does other operations than another member")
        self._check_members(keys, first, position, num_members, ranks, groups, source)
        num_events = keys[6, first]
        first_event = np.cumsum(num_events) - num_events
        lane = np.empty(len(order), dtype=np.int64)
        lane[order] = which
        return Lanes(
            offsets=offsets, lane=lane, event=first_event[lane] if len(lane) else lane,
            group_id=keys[1, first].view(np.uint64), source=keys[2, first], destination=keys[3, first],
            tag=keys[4, first], num_members=num_members.astype(np.int64), num_events=num_events,
            first_event=first_event, first_seq=keys[8, first],
        )  # fmt: skip

    @staticmethod
    def _check_members(
        keys: Int64Array, first: Int64Array, position: Int64Array, num_members: Int64Array, ranks: Int64Array,
        groups: Mapping[int, ProcessGroup], source: str,
    ) -> None:  # fmt: skip
        loaded = set(ranks.tolist())
        present: dict[int, set[int]] = {}
        for at, number in zip(first.tolist(), num_members.tolist(), strict=True):
            group_id = int(keys[1, at]) % 2**64
            if group_id not in present:
                if group_id not in groups:
                    raise GraphError(f"{source}: rank {ranks[position[at]]} is in group {group_id:#x}, which the "
                                     "trace lacks", hint="the trace was merged without its groups")  # fmt: skip
                present[group_id] = loaded & set(groups[group_id].ranks)
            if keys[0, at]:
                ends = {int(keys[2, at]), int(keys[3, at])}
                if number != (2 if ends <= loaded else 1):
                    _fail(source, keys[:, at], ranks[position[at]], groups, "has no partner")
            elif number != len(present[group_id]):
                _fail(source, keys[:, at], ranks[position[at]], groups, "has members that lack the operation")


def _fail(source: str, key: Int64Array, rank: int, groups: Mapping[int, ProcessGroup], what: str) -> None:
    group = groups.get(int(key[1]) % 2**64)
    name = group.name if group is not None and group.name else f"{int(key[1]) % 2**64:#x}"
    kind = "communication" if not key[0] else f"message from rank {key[2]} to rank {key[3]} tag {key[4]}"
    raise UnmatchedUnitError(f"{source}: {kind} of rank {rank} in group {name} {what}",
                             hint="an aborted recording ends in the middle: choose fewer steps")  # fmt: skip
