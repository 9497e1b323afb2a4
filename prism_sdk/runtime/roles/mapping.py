"""Group ids, peers and a root's counts of ranks that did not run, from those of the rank that stands for them.

Responsible for the columns in which ranks of one role differ; it neither writes nor compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.roles.layout import Families, Family
from prismtrace.model import ABSENT32, Op, UnitKind

Int64Array = NDArray[np.int64]
Codes = tuple[Int64Array, Int64Array]

DIFFERING = ("group_id", "peer", "num_elements_in", "num_elements_out")
"""The columns in which ranks of one role differ."""

_ROOTED = (int(Op.BROADCAST), int(Op.SCATTER), int(Op.GATHER), int(Op.REDUCE))
_MESSAGES = (int(UnitKind.SEND), int(UnitKind.RECV))


class Mapper:
    """Translates what a rank's units refer to into what those of other ranks of its role do."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._ids: dict[int, Int64Array] = {}
        self._members: dict[int, NDArray[np.int32]] = {}

    def columns(self, units: Any, rank: int, others: Sequence[int]) -> dict[str, Codes]:
        """Of each column that differs: numbers of replacements by row (-1: none), and [number, other rank]."""
        ranks = np.array(others, np.int64)
        return self._groups_and_peers(units, rank, ranks) | self._counts(units, ranks)

    def _groups_and_peers(self, units: Any, rank: int, ranks: Int64Array) -> dict[str, Codes]:
        is_message = np.isin(units.kind, _MESSAGES)
        has_peer = (units.peer != ABSENT32) & (units.group_id != 0)
        keys = np.stack([units.group_id.view(np.int64), np.where(has_peer, units.peer, -1), is_message & has_peer])
        found, inverse = np.unique(keys, axis=1, return_inverse=True)
        groups: list[Int64Array] = []
        peers: list[Int64Array] = []
        group_code, peer_code = np.full(found.shape[1], -1), np.full(found.shape[1], -1)
        for number, (raw, peer, message) in enumerate(found.T.tolist()):
            if raw == 0:
                continue
            known = self._families.find(raw & (1 << 64) - 1)
            if known is None:
                raise UnsupportedError(f"a process group of rank {rank} that rank 0 does not know of (id {raw:#x})")
            family = known[0]
            index = self._group_of(family, rank, ranks)
            group_code[number], peer_code[number] = len(groups), len(peers) if peer >= 0 else -1
            groups.append(self._ids_of(family)[index])
            if peer >= 0:
                peers.append(self._peers(family, rank, ranks, index, peer, is_message=bool(message)))
        inverse = inverse.reshape(-1)
        result: dict[str, Codes] = {}
        if groups:
            result["group_id"] = group_code[inverse], np.stack(groups)
        if peers:
            result["peer"] = peer_code[inverse], np.stack(peers)
        return result

    def _counts(self, units: Any, ranks: Int64Array) -> dict[str, Codes]:
        """Element counts of rooted collectives: one rank of a role may be the root and another one not."""
        rows = np.flatnonzero(np.isin(units.op, _ROOTED) & (units.peer != ABSENT32) & (units.group_id != 0))
        if not len(rows):
            return {}
        names = ("num_elements_in", "num_elements_out")
        keys = np.stack([units.group_id.view(np.int64), units.peer, units.op, *(units[name] for name in names)])
        found, inverse = np.unique(keys[:, rows], axis=1, return_inverse=True)
        values: dict[str, list[Int64Array]] = {name: [] for name in names}
        for raw, peer, op, num_in, num_out in found.T.tolist():
            known = self._families.find(raw & (1 << 64) - 1)
            assert known is not None  # or its groups could not be named
            family = known[0]
            is_root = family.position_of[ranks] == family.position_of[peer]
            for name, count in _root_counts(op, num_in, num_out, family.size).items():
                values[name].append(np.where(is_root, *count))
        codes = np.full(len(units), -1, np.int64)
        codes[rows] = inverse.reshape(-1)
        return {name: (codes, np.stack(columns)) for name, columns in values.items()}

    def _group_of(self, family: Family, rank: int, ranks: Int64Array) -> Int64Array:
        index = family.group_of[ranks].astype(np.int64)
        outside = ranks[index < 0]
        if len(outside):
            raise UnsupportedError(
                f"rank {rank} is in a group {family.label}, and rank {outside[0]}, for which it stands, is in "
                "no group of that kind", hint="state the roles so that these ranks have different ones: --roles",
            )  # fmt: skip
        return index

    def _ids_of(self, family: Family) -> Int64Array:
        ids = self._ids.get(id(family))
        if ids is None:
            ids = np.array([fact.group_id for fact in family.groups], np.uint64).view(np.int64)
            self._ids[id(family)] = ids
        return ids

    def _members_of(self, family: Family) -> NDArray[np.int32]:
        members = self._members.get(id(family))
        if members is None:
            members = np.array([fact.ranks for fact in family.groups], np.int32)
            self._members[id(family)] = members
        return members

    def _peers(
        self, family: Family, rank: int, ranks: Int64Array, index: Int64Array, peer: int, *, is_message: bool
    ) -> Int64Array:
        """The peer of each rank: at the same place of its group, or of a message as far away around the group."""
        place = np.full(len(ranks), family.position_of[peer], np.int64)
        if is_message:
            mine = family.position_of[ranks].astype(np.int64)
            away = int(family.position_of[peer]) - int(family.position_of[rank])
            place = np.where(mine == family.position_of[rank], place, (mine + away) % family.size)
        return self._members_of(family)[index, place].astype(np.int64)


def _root_counts(op: int, num_in: int, num_out: int, size: int) -> dict[str, tuple[int, int]]:
    """Elements in and out of a rooted collective: (of the root, of the others), from those of any member."""
    if op == Op.BROADCAST:
        return {"num_elements_in": (num_out, 0), "num_elements_out": (num_out, num_out)}
    if op == Op.SCATTER:
        return {"num_elements_in": (num_out * size, 0), "num_elements_out": (num_out, num_out)}
    received = num_in * size if op == Op.GATHER else num_in
    return {"num_elements_in": (num_in, num_in), "num_elements_out": (received, 0)}
