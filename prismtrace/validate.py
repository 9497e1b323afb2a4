"""Checks what a trace says for contradictions that no checksum finds.

Does not repair or judge performance; a trace with no finding can be replayed and analysed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.container import TRAILER_BYTES, RecordKind
from prismtrace.cycles import WaitGraph
from prismtrace.errors import PrismTraceError, TraceFormatError, TraceUnfinishedError, TraceVersionError
from prismtrace.extents import rows_outside
from prismtrace.findings import CODES, Finding
from prismtrace.index import Collected, read_header
from prismtrace.matching import Matching
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, UNIT_COLUMNS, EventKind, GraphKind, Op, TrackKind, UnitKind
from prismtrace.reader import TraceReader
from prismtrace.records import LostRange, bytes_after_end, whole_records
from prismtrace.source import TraceInput
from prismtrace.tables import EventTable, StepTable, Table, TrackTable, UnitTable
from prismtrace.unchanged import Unchanged
from prismtrace.wording import counted
from prismtrace.writer import payload_digest

_COMMUNICATION: Final = (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV)
_EXTENTS: Final = ("step", "start_ns", "end_ns")
_OF_STEPS: Final = ("step", "start_ns", "end_ns")
_PAYLOADS: Final = ("payload_in", "payload_out")
_QUANTITIES: Final = ("transfer_ns", "gap_ns", "memory_bytes", "num_elements_in", "num_elements_out", "seq")


def validate(
    source: TraceInput, *, deep: bool = True, max_findings: int = 1000,
    progress: Callable[[int, int], None] | None = None,
) -> list[Finding]:  # fmt: skip
    """Everything that is wrong with a trace file, the worst first; an empty list when nothing is.

    Args:
        source: a path, a binary file object or a memory map.
        deep: also reads every payload and compares it with its digest, and checks every record's checksums.
        max_findings: stops looking after that many; repetitions in one rank are one finding with a count.
        progress: is told how many ranks of how many were looked at.
    """
    found: list[Finding] = []
    try:
        reader = TraceReader(source)
    except TraceUnfinishedError as error:
        found.append(finding("PT002", error.message, f"byte {error.offset}"))
        try:
            reader = TraceReader(source, allow_unfinished=True)
            if after := bytes_after_end(reader._source):
                message = f"{counted(after, 'byte')} after the end of a finished file (`prism recover` leaves them out)"
                found = [finding("PT002", message, f"byte {reader._source.size - after}")]
        except PrismTraceError as again:
            return [_unreadable(again)]
    except PrismTraceError as error:
        return [_unreadable(error)]
    with reader:
        checks = _checks(reader, deep=deep, progress=progress or (lambda done, total: None))
        found.extend(islice(checks, max(0, max_findings - len(found))))  # one by one: a small file names many ranks
        if deep and not reader.unfinished:
            is_damaged = any(item.code in ("PT003", "PT004") for item in found)
            damaged = _records(reader, skip_indexed=is_damaged)
            found.extend(islice(damaged, max(0, max_findings - len(found))))
    found.sort(key=lambda item: (item.severity, item.code))
    return found[:max_findings]


def finding(code: str, message: str, where: str) -> Finding:
    """A finding with the severity and section of its code."""
    kind = CODES[code]
    return Finding(code, kind.severity, message, where, kind.spec_section)


def _unreadable(error: PrismTraceError) -> Finding:
    offset = getattr(error, "offset", None)
    message = error.message if isinstance(error, TraceFormatError) else str(error)
    message = message.removeprefix(f"{getattr(error, 'path', '')}: ")  # `where` has the offset; who asks knows the file
    return finding("PT001", message, "file" if offset is None else f"byte {offset}")


def _checks(reader: TraceReader, *, deep: bool, progress: Callable[[int, int], None]) -> Iterator[Finding]:
    yield from _groups(reader)
    yield from _roles(reader)
    matching = Matching(reader.groups)
    waits = WaitGraph()
    missing: Counter[bytes] = Counter()
    same, members = Unchanged(), _Members(reader)
    for number, rank in enumerate(reader.ranks):
        progress(number, len(reader.ranks))
        try:
            yield from _rank(reader, rank, matching, waits, missing, same, members)
        except TraceFormatError as error:
            where = f"rank {rank}" if error.offset is None else f"rank {rank}, byte {error.offset}"
            yield finding("PT003", error.message, where)
            matching.incomplete = True
    for code, message, where in matching.problems(reader.ranks):
        yield finding(code, message, where)
    if not matching.incomplete:
        for cycle in waits.cycles():
            yield finding("PT034", cycle.text, counted(len(cycle.ranks), "rank"))
    for digest, count in missing.items():
        yield finding("PT050", f"payload {digest.hex()} is not in the file", counted(count, "unit"))
    for name, digest in reader.attachments.items():
        if not reader.has_payload(digest):
            yield finding("PT051", f"payload {digest.hex()} is not in the file", f"attachment {name}")
    if deep:
        yield from _payloads(reader)


def _records(reader: TraceReader, *, skip_indexed: bool) -> Iterator[Finding]:
    """Records that a reader of the index does without, and that are lost where the index is."""
    source, index = reader._source, reader._index
    lost: list[LostRange] = []
    start, meant = read_header(source)[1], Collected()
    try:
        for offset, frame, meta in whole_records(source, start, lost, end=source.size - TRAILER_BYTES):
            try:
                if frame.kind in (RecordKind.GROUP, RecordKind.METADATA):
                    meant.add(frame, meta, offset, source.name)
            except TraceFormatError as error:
                lost.append(LostRange(offset, offset + frame.length, error.message))
    except TraceVersionError as error:
        lost.append(LostRange(error.offset or 0, error.offset or 0, error.message))
    indexed = {*index.chunk_entries["offset"].tolist(), *index.payload_entries["offset"].tolist()} if lost else set()
    for part in lost:
        if not (skip_indexed and part.start in indexed):
            size = part.end - part.start
            text = f"{part.reason}: {counted(size, 'byte')} that the index does without" if size else part.reason
            yield finding("PT007", text, f"byte {part.start}")


def _groups(reader: TraceReader) -> Iterator[Finding]:
    world = reader.world_size
    for group in reader.groups.values():
        where = f"group {group.group_id} ({group.name})"
        if group.group_id == 0:
            yield finding("PT015", "0 says that a unit has no group", where)
        if not group.ranks or len(set(group.ranks)) != len(group.ranks):
            yield finding("PT011", f"members {group.ranks[:8]}", where)
        outside = next((rank for rank in group.ranks if rank < 0 or (world and rank >= world)), None)
        if outside is not None:
            yield finding("PT010", f"member {outside} in a world of {world}", where)
    for rank in reader.ranks:
        if world and rank >= world:
            yield finding("PT010", f"the world has {counted(world, 'rank')}", f"rank {rank}")


def _roles(reader: TraceReader) -> Iterator[Finding]:
    """What roles hold: a rank that has a column of its own does not show what is wrong in that of its role."""
    if reader.graph_kind not in set(GraphKind):
        yield finding("PT026", f"unknown kind of graph {reader.graph_kind}", "header")
    for role in reader.roles:
        try:
            for kind in COLUMNS:
                table = reader.role_table(role, kind)
                for row, message in rows_outside(reader, table, role=role):
                    yield finding("PT006", message, f"role {role}, row {row}")
        except TraceFormatError as error:
            yield finding("PT003", error.message, f"role {role}, byte {error.offset}")


class _Members:
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


def _rank(
    reader: TraceReader, rank: int, matching: Matching, waits: WaitGraph, missing: Counter[bytes], same: Unchanged,
    members: _Members,
) -> Iterator[Finding]:  # fmt: skip
    for kind in COLUMNS:
        if gap := reader.missing_rows(kind, rank):
            yield finding("PT005", f"{kind.name.lower()} {gap[0]} .. {gap[1] - 1} are missing", f"rank {rank}")
    units, steps, scalars = reader.units(rank), reader.steps(rank), reader.scalars(rank)
    events, tracks = reader.events(rank), reader.tracks(rank)
    yield from _extents(reader, (units, steps, scalars, events, tracks), same)
    if not same.is_known("steps", steps, _OF_STEPS):
        wrong = _steps(steps, rank)
        yield from wrong
        if not wrong:
            same.keep("steps", steps, _OF_STEPS)
    if len(events) or len(tracks):
        yield from _events(events, tracks, units)
    yield from _UnitChecks(units, rank).run(reader.world_size, members, same)
    for code, message, where in matching.add(rank, units):
        yield finding(code, message, where)
    waits.add(rank, units)
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

    def run(self, world: int, members: _Members, same: Unchanged) -> list[Finding]:
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

    def groups(self, world: int, members: _Members) -> None:
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


def _payloads(reader: TraceReader) -> Iterator[Finding]:
    for digest in reader.payload_digests:
        try:
            right = payload_digest(reader.payload(digest)) == digest
            message = "the bytes have another digest"
        except TraceFormatError as error:
            right, message = False, error.message
        if not right:
            yield finding("PT004", message, f"payload {digest.hex()}")


def has_errors(findings: Iterable[Any]) -> bool:
    """Whether some finding is more than a warning."""
    return any(item.severity == "error" for item in findings)
