"""Checks what one rank says by itself: rows, times, groups, payloads.

Does not look across ranks (`matching` and `cycles` do), and does not choose the ranks; `validate` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.extents import rows_outside
from prismtrace.findings import CODES, Finding
from prismtrace.members import OfRanks
from prismtrace.model import (
    ABSENT,
    ABSENT32,
    COLUMNS,
    UNIT_COLUMNS,
    EventKind,
    Op,
    TableKind,
    TrackKind,
    UnitKind,
)
from prismtrace.reader import TraceReader
from prismtrace.rewriting import read_table
from prismtrace.tables import EventTable, StepTable, Table, TrackTable, UnitTable
from prismtrace.unchanged import Unchanged
from prismtrace.wording import counted

_COMMUNICATION: Final = (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV)
_EXTENTS: Final = ("step", "start_ns", "end_ns")
_OF_STEPS: Final = ("step", "start_ns", "end_ns")
_PAYLOADS: Final = ("payload_in", "payload_out")
_QUANTITIES: Final = ("transfer_ns", "gap_ns", "memory_bytes", "num_elements_in", "num_elements_out", "seq")


def finding(code: str, message: str, where: str) -> Finding:
    """A finding with the severity and section of its code."""
    kind = CODES[code]
    return Finding(code, kind.severity, message, where, kind.spec_section)


class Members:
    """The members of groups, sorted, as many checks need them."""

    def __init__(self, reader: TraceReader) -> None:
        self._groups = reader.groups
        self._known: dict[int, NDArray[np.int64] | None] = {}

    def of(self, group_id: int) -> NDArray[np.int64] | None:
        """The members of a group, rising; None where the group is unknown."""
        if group_id not in self._known:
            group = self._groups.get(group_id)
            self._known[group_id] = None if group is None else np.sort(np.array(group.ranks, np.int64))
        return self._known[group_id]

    @cached_property
    def _all(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The ids of all groups, rising, and all pairs of a group's place among them and a member, rising."""
        ids = sorted(self._groups)
        pairs = [_pair(np.int64(place), np.array(self._groups[key].ranks, np.int64)) for place, key in enumerate(ids)]
        return np.array(ids, np.uint64), np.sort(np.concatenate(pairs)) if pairs else np.zeros(0, np.int64)

    def have(self, ranks: NDArray[np.int64], group: OfRanks, peer: OfRanks, *, world: int) -> bool:
        """Whether all groups of ranks are known and theirs, and all peers in these groups and in the world."""
        both = np.unique(np.stack([group.codes, peer.codes]), axis=1)
        ids, others = group.values[both[0]].view(np.uint64), peer.values[both[1]]
        there = others != ABSENT32
        if world and (there & ((others < 0) | (others >= world))).any():
            return False
        known, pairs = self._all
        place = np.searchsorted(known, ids).clip(0, max(0, len(known) - 1))
        for member, matters in ((np.broadcast_to(ranks, ids.shape), ids != 0), (others, (ids != 0) & there)):
            if matters.any() and not len(known):
                return False
            right = _among(_pair(place[matters], member[matters]), pairs) & (known[place[matters]] == ids[matters])
            if not right.all():
                return False
        return True


def _pair(place: Any, member: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray((place << 32) + member + (1 << 31))


def _extents(reader: TraceReader, tables: Iterable[Table], same: Unchanged) -> Iterator[Finding]:
    """Rows that are not where the index says: a search by step or time would miss them."""
    for table in tables:
        what = reader.chunk_ranges(table.table, table.rank).tobytes()
        if same.is_known(what, table, _EXTENTS):
            continue
        right = True
        for row, message in rows_outside(reader, table):
            right = False
            yield finding("PT006", message, f"rank {table.rank}, row {row} of {table.table.name.lower()}")
        if right:
            same.keep(what, table, _EXTENTS)


def gaps(reader: TraceReader, rank: int) -> Iterator[Finding]:
    """Rows that are missing between chunks."""
    for kind in COLUMNS:
        if gap := reader.missing_rows(kind, rank):
            yield finding("PT005", f"{kind.name.lower()} {gap[0]} .. {gap[1] - 1} are missing", f"rank {rank}")


class RankTables:
    """All tables of one rank."""

    def __init__(self, reader: TraceReader, rank: int) -> None:
        self.rank = rank
        self.all: dict[TableKind, Any] = {kind: read_table(reader, kind, rank) for kind in COLUMNS}
        self.units: UnitTable = self.all[TableKind.UNITS]

    def checks(
        self, reader: TraceReader, missing: Counter[bytes], same: Unchanged, members: Members
    ) -> Iterator[Finding]:
        """What contradicts itself, and (in `missing`) the payloads that the file lacks, with how many units name them.

        What was in order with the very same columns of another rank is not looked at again.
        """
        units, steps = self.units, self.all[TableKind.STEPS]
        events, tracks = self.all[TableKind.EVENTS], self.all[TableKind.TRACKS]
        yield from _extents(reader, self.all.values(), same)
        if not same.is_known("steps", steps, _OF_STEPS):
            wrong = _steps(steps, self.rank)
            yield from wrong
            if not wrong:
                same.keep("steps", steps, _OF_STEPS)
        if len(events) or len(tracks):
            yield from _events(events, tracks, units)
        yield from _UnitChecks(units, self.rank).run(reader.world_size, members, same)
        if same.is_known("payloads", units, _PAYLOADS):
            return
        complete = True
        for column in (units.payload_in, units.payload_out):
            used = np.bincount(column.codes[column.codes >= 0], minlength=len(column.values))
            for digest, count in zip(column.values, used.tolist(), strict=True):
                if count and not reader.has_payload(digest):
                    missing[digest] += count
                    complete = False
        if complete:
            same.keep("payloads", units, _PAYLOADS)


def _steps(steps: StepTable, rank: int) -> list[Finding]:
    found = []
    back = np.flatnonzero(np.diff(steps.step.astype(np.int64)) <= 0)
    if len(back):
        row = int(back[0]) + 1
        found.append(finding("PT040", f"step {steps.step[row]} after step {steps.step[row - 1]}", f"rank {rank}"))
    short = np.flatnonzero((steps.start_ns != ABSENT) & (steps.end_ns < steps.start_ns))
    if len(short):
        found.append(finding("PT040", f"step {steps.step[short[0]]} ends before it starts", f"rank {rank}"))
    return found


def _events(events: EventTable, tracks: TrackTable, units: UnitTable) -> Iterator[Finding]:
    """Events that end before they start, or that name a track or unit that is not there."""
    rank = units.rank
    timed = (events.start_ns != ABSENT) & (events.end_ns != ABSENT)
    strays = (events.track != ABSENT32) & ~np.isin(events.track, tracks.row_index)
    lost = (events.unit != ABSENT) & ~np.isin(events.unit, units.row_index)
    for bad, code, message in (
        (events.kind > max(EventKind), "PT026", "unknown kind of event"),
        (timed & (events.end_ns < events.start_ns), "PT041", "ends before it starts"),
        (strays, "PT042", f"the rank has {len(tracks)} tracks"),
        (lost, "PT043", f"the rank has {counted(len(units), 'unit')}"),
    ):
        rows = np.flatnonzero(bad)
        if len(rows):
            more = f" (and {len(rows) - 1} more events)" if len(rows) > 1 else ""
            yield finding(code, message + more, f"rank {rank}, event {int(events.row_index[rows[0]])}")
    bad_tracks = np.flatnonzero(tracks.kind > max(TrackKind))
    if len(bad_tracks):
        yield finding("PT026", "unknown kind of track", f"rank {rank}, track {int(tracks.row_index[bad_tracks[0]])}")


class _UnitChecks:
    """The checks of the units of one rank that need no other rank."""

    def __init__(self, units: UnitTable, rank: int) -> None:
        self.found: list[Finding] = []
        self._units, self._rank = units, rank
        self._is_communication = np.isin(units.kind, _COMMUNICATION)

    def run(self, world: int, members: Members, same: Unchanged) -> list[Finding]:
        """All of them; what was in order with the same columns is not looked at again."""
        enums = tuple(spec.name for spec in UNIT_COLUMNS if spec.enum is not None)
        for check, columns in (
            (self.enumerations, enums), (self.times, ("kind", "start_ns", "end_ns", *_QUANTITIES)),
            (self.awaits, ("kind", "awaits")),
        ):  # fmt: skip
            if not same.is_known(check.__name__, self._units, columns):
                before = len(self.found)
                check()
                if len(self.found) == before:
                    same.keep(check.__name__, self._units, columns)
        self.groups(world, members)
        return self.found

    def _report(self, code: str, bad: NDArray[np.bool_], message: str) -> None:
        rows = np.flatnonzero(bad)
        if len(rows):
            more = f" (and {len(rows) - 1} more units)" if len(rows) > 1 else ""
            where = f"rank {self._rank}, unit {int(self._units.row_index[rows[0]])}"
            self.found.append(finding(code, message.format(row=int(rows[0])) + more, where))

    def enumerations(self) -> None:
        """Values without a name, and operations that do not fit the kind."""
        units = self._units
        for spec in UNIT_COLUMNS:
            if spec.enum is not None:
                self._report("PT026", getattr(units, spec.name) > max(spec.enum), f"unknown {spec.name}")
        kind, op = units.kind, units.op
        p2p = (op == Op.SEND) | (op == Op.RECV)
        bad = ((kind == UnitKind.SEND) & (op != Op.SEND)) | ((kind == UnitKind.RECV) & (op != Op.RECV))
        bad |= (kind == UnitKind.COLLECTIVE) & p2p
        self._report("PT025", bad & (op != Op.UNSPECIFIED), "op and kind contradict each other")

    def groups(self, world: int, members: Members) -> None:
        """Dangling groups, strangers in groups, peers outside them."""
        units, rank = self._units, self._rank
        has_peer = np.flatnonzero(units.peer != ABSENT32)
        peer = units.peer[has_peer]
        for group_id in np.unique(units.group_id).tolist():
            if group_id == 0:
                continue
            ranks = members.of(group_id)
            if ranks is None:
                self._report("PT012", units.group_id == group_id, f"group {group_id} is unknown")
                continue
            if not _among(np.array([rank]), ranks).all():
                self._report("PT013", units.group_id == group_id, f"rank {rank} is no member of group {group_id}")
            strangers = has_peer[(units.group_id[has_peer] == group_id) & ~_among(peer, ranks)]
            if len(strangers):
                self._report("PT014", self._at(strangers), f"a peer is no member of group {group_id}")
        if world:
            stray = has_peer[(peer < 0) | (peer >= world)]
            if len(stray):
                self._report("PT014", self._at(stray), f"a peer is outside the world of {world}")

    def _at(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self._units), np.bool_)
        mask[rows] = True
        return mask

    def times(self) -> None:
        """Negative durations and quantities, and a host that does two things at once."""
        units = self._units
        timed = (units.start_ns != ABSENT) & (units.end_ns != ABSENT)
        self._report("PT020", timed & (units.end_ns < units.start_ns), "ends before it starts")
        for name in _QUANTITIES:
            values = getattr(units, name)
            self._report("PT021", (values < 0) & (values != ABSENT), f"{name} is negative")
        host = np.flatnonzero(timed & ((units.kind == UnitKind.COMPUTE) | (units.kind == UnitKind.WAIT)))
        overlap = np.zeros(len(units), np.bool_)
        overlap[host[1:]] = units.start_ns[host[1:]] < units.end_ns[host[:-1]]
        self._report("PT022", overlap, "starts before the host unit before it has ended")

    def awaits(self) -> None:
        """WAIT units that wait for nothing, for something later, or for a unit that is no communication."""
        units = self._units
        if not len(units):
            return
        waits, target = units.kind == UnitKind.WAIT, units.awaits
        self._report("PT024", waits & (target == ABSENT), "awaits is absent")
        named = target != ABSENT
        place = np.searchsorted(units.row_index, np.where(named, target, 0)).clip(0, len(units) - 1)
        known = units.row_index[place] == target
        bad = named & ((target >= units.row_index) | (target < 0) | (known & ~self._is_communication[place]) | ~waits)
        self._report("PT023", bad, "awaits does not name an earlier communication unit, or the unit is no WAIT")


def _among(values: NDArray[Any], rising: NDArray[np.int64]) -> NDArray[np.bool_]:
    if not len(rising):
        return np.zeros(len(values), np.bool_)
    place = np.searchsorted(rising, values).clip(0, len(rising) - 1)
    return np.asarray(rising[place] == values)
