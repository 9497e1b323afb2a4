"""Finds units that wait for each other in a circle, over all ranks of a trace.

Does not look at times: it lets every rank run as far as the order of its units allows, and looks at who is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.members import OfRanks
from prismtrace.model import ABSENT, ABSENT32, UnitKind
from prismtrace.structure import mixed
from prismtrace.tables import UnitTable

_KEY: Final = np.dtype(
    [("kind", "u1"), ("group", "<u8"), ("src", "<i4"), ("dst", "<i4"), ("tag", "<i8"), ("seq", "<i8")]
)
_MAX_SHOWN: Final = 8
_COLLECTIVE, _MESSAGE = 1, 2


@dataclass(frozen=True)
class Cycle:
    """Ranks that wait for each other; `text` spells the circle out. `num_blocked`: ranks that cannot go on."""

    ranks: tuple[int, ...]
    text: str
    num_blocked: int


@dataclass
class _Rank:
    """What one rank posts (`key` at `row`), and where it waits for one of its posts (`target`, at row `wait_row`)."""

    rank: int
    row: NDArray[np.int64]
    key: NDArray[Any]
    wait_row: NDArray[np.int64]
    target: NDArray[np.int64]


class WaitGraph:
    """Collects what each rank posts and waits for."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    def add(self, ranks: Sequence[int], units: UnitTable, group: OfRanks, peer: OfRanks) -> None:
        """Takes in the units of ranks that differ in group and peer alone."""
        collective = units.kind == UnitKind.COLLECTIVE
        send, receive = units.kind == UnitKind.SEND, units.kind == UnitKind.RECV
        joined = (collective | ((send | receive) & (units.peer != ABSENT32))) & (units.seq != ABSENT)
        rows = np.flatnonzero(joined)
        key = np.zeros((len(ranks), len(rows)), _KEY)
        key["kind"] = np.where(collective[rows], _COLLECTIVE, _MESSAGE)
        key["group"], key["seq"] = group.values[group.codes[rows]].view(np.uint64).T, units.seq[rows]
        p2p = ~collective[rows]
        key["tag"] = np.where(p2p, units.tag[rows], 0)
        mine, theirs = np.array(ranks)[:, None], peer.values[peer.codes[rows]].T
        key["src"] = np.where(p2p, np.where(send[rows], mine, theirs), 0)
        key["dst"] = np.where(p2p, np.where(send[rows], theirs, mine), 0)
        waits = np.flatnonzero((units.kind == UnitKind.WAIT) & (units.awaits != ABSENT))
        index = units.row_index
        place = np.searchsorted(index[rows], units.awaits[waits]).clip(0, max(0, len(rows) - 1))
        if len(rows):
            # a wait for a send never blocks: sends are buffered
            good = (index[rows][place] == units.awaits[waits]) & (units.awaits[waits] < index[waits])
            good &= ~send[rows][place]
            waits, place = waits[good], place[good]
        else:
            waits, place = waits[:0], place[:0]
        posts, wait_row, target = index[rows], index[waits], place.astype(np.int64)
        self._ranks += [_Rank(rank, posts, key[at], wait_row, target) for at, rank in enumerate(ranks)]

    def cycles(self) -> Iterator[Cycle]:
        """Circles, one for each set of ranks that hold each other up."""
        ranks = sorted(self._ranks, key=lambda one: one.rank)
        if not any(len(one.wait_row) for one in ranks):
            return
        run = _Run(ranks)
        run.advance()
        yield from run.circles()


class _Run:
    """Lets all ranks run until none can go on."""

    def __init__(self, ranks: list[_Rank]) -> None:
        self._ranks = ranks
        _, self._event = np.unique(_key_numbers(np.concatenate([one.key for one in ranks])), return_inverse=True)
        self._post_start = np.concatenate([[0], np.cumsum([len(one.key) for one in ranks])]).astype(np.int64)
        self._missing = np.bincount(self._event).astype(np.int64)
        waits = [len(one.wait_row) for one in ranks]
        self._wait_start = np.concatenate([[0], np.cumsum(waits)]).astype(np.int64)
        self._target = np.concatenate(
            [one.target + start for one, start in zip(ranks, self._post_start[:-1].tolist(), strict=True)]
        )
        # how many posts precede each wait, and all of a rank
        before = [np.searchsorted(one.row, one.wait_row) for one in ranks]
        self._posts_before = np.concatenate(
            [part + start for part, start in zip(before, self._post_start[:-1].tolist(), strict=True)]
        ).astype(np.int64)
        self.posted = self._post_start[:-1].copy()
        self.wait = self._wait_start[:-1].copy()
        self.blocked: list[int] = []

    def advance(self) -> None:
        """Each round posts what lies before the next wait of every rank, and passes the waits that are complete."""
        active = np.arange(len(self._ranks))
        last_wait, last_post = self._wait_start[1:], self._post_start[1:]
        while len(active):
            waiting = self.wait[active] < last_wait[active]
            upto = last_post[active].copy()
            upto[waiting] = self._posts_before[self.wait[active[waiting]]]
            np.subtract.at(self._missing, self._event[_ranges(self.posted[active], upto)], 1)
            self.posted[active] = upto
            active = active[waiting]
            # what other ranks posted in this round may have freed any of the waiting ones
            active = self._held(active)
            free = self._missing[self._event[self._target[self.wait[active]]]] == 0
            self.blocked = active[~free].tolist()
            active = active[free]
            self.wait[active] += 1

    def _held(self, active: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(np.union1d(active, np.array(self.blocked, np.int64)))

    def circles(self) -> Iterator[Cycle]:
        """Follows from each blocked rank who holds it up, until a rank comes again."""
        if not self.blocked:
            return
        holders = self._first_holder()
        seen: dict[int, int] = {}
        for walk, start in enumerate(self.blocked):
            path = []
            rank: int | None = start
            while rank is not None and rank not in seen:
                seen[rank] = walk
                path.append(rank)
                rank = holders.get(rank, (None, 0))[0]
            if rank is not None and seen[rank] == walk:
                circle = path[path.index(rank) :]
                low = circle.index(min(circle))
                yield self._spelt(circle[low:] + circle[:low], holders)

    def _first_holder(self) -> dict[int, tuple[int, int]]:
        """Blocked rank -> (a blocked rank that has yet to post what it waits for, the post)."""
        wanted = {int(self._event[self._target[self.wait[rank]]]): rank for rank in self.blocked}
        owners: dict[int, tuple[int, int]] = {}
        for rank in self.blocked:
            first, last = int(self.posted[rank]), int(self._post_start[rank + 1])
            later = self._event[first:last]
            for place in np.flatnonzero(np.isin(later, np.fromiter(wanted, np.int64))).tolist():
                owners.setdefault(int(later[place]), (rank, first + place))
        return {
            rank: owners[event]
            for rank in self.blocked
            if (event := int(self._event[self._target[self.wait[rank]]])) in owners
        }

    def _spelt(self, circle: list[int], holders: dict[int, tuple[int, int]]) -> Cycle:
        parts = []
        for rank in circle[:_MAX_SHOWN]:
            one = self._ranks[rank]
            wait = int(self.wait[rank] - self._wait_start[rank])
            post = int(self._target[self.wait[rank]] - self._post_start[rank])
            holder, place = holders[rank]
            other = self._ranks[holder]
            posts_at = int(other.row[place - int(self._post_start[holder])])
            stands = int(other.wait_row[int(self.wait[holder] - self._wait_start[holder])])
            parts.append(
                f"rank {one.rank} waits at unit {int(one.wait_row[wait])} for {_key_text(one.key[post])}, "
                f"which rank {other.rank} posts at unit {posts_at}, after its wait at unit {stands}"
            )
        if len(circle) > _MAX_SHOWN:
            parts.append(f"... and {len(circle) - _MAX_SHOWN} more ranks")
        ranks = tuple(self._ranks[rank].rank for rank in circle)
        return Cycle(ranks, "; ".join(parts), len(self.blocked))


def _ranges(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """All integers of many ranges, back to back."""
    lengths = last - first
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) - np.repeat(ends - lengths - first, lengths))


def _key_numbers(key: NDArray[Any]) -> NDArray[np.uint64]:
    """64-bit digests of keys, which sort much faster than the keys."""
    result = np.zeros(len(key), np.uint64)
    for name in _KEY.names or ():
        result = mixed(result, key[name].astype(np.int64))
    return result


def _key_text(key: Any) -> str:
    if key["kind"] == _COLLECTIVE:
        return f"seq {key['seq']} of group {key['group']}"
    tag = "" if key["tag"] == ABSENT else f", tag {key['tag']}"
    return f"message {key['src']} -> {key['dst']} (group {key['group']}{tag}, seq {key['seq']})"
