"""Checks what a trace says for contradictions that no checksum finds.

Does not repair or judge performance; a trace with no finding can be replayed and analysed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np

from prismtrace.alike import Alike, alike_ranks
from prismtrace.container import TRAILER_BYTES, RecordKind
from prismtrace.cycles import WaitGraph
from prismtrace.errors import PrismTraceError, TraceFormatError, TraceUnfinishedError, TraceVersionError
from prismtrace.extents import rows_outside
from prismtrace.findings import Finding
from prismtrace.index import Collected, read_header
from prismtrace.matching import Matching
from prismtrace.members import OfRanks
from prismtrace.model import COLUMNS, GraphKind, TableKind
from prismtrace.rankchecks import Members, RankTables, finding, gaps
from prismtrace.reader import TraceReader
from prismtrace.records import LostRange, end_of_trace, whole_records
from prismtrace.sharing import Replaced
from prismtrace.source import TraceInput
from prismtrace.unchanged import Unchanged
from prismtrace.wording import counted
from prismtrace.writer import payload_digest

_AMOUNTS: Final = frozenset({"num_elements_in", "num_elements_out", "memory_bytes"})
_OWN: Final = frozenset({"group_id", "peer", "stage", "microbatch", "model_chunk"}) | _AMOUNTS
_SAME: Final = frozenset(spec.name for columns in COLUMNS.values() for spec in columns) - _OWN
"""Columns that are the same for all ranks of a role where these are looked at together."""


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
            end = end_of_trace(reader._source, read_header(reader._source)[1])
            if end is not None:
                after = counted(reader._source.size - end, "byte")
                message = f"{after} after the end of a finished file (`prism recover` leaves them out)"
                found = [finding("PT002", message, f"byte {end}")]
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
    same, members = Unchanged(), Members(reader)
    together, alone = alike_ranks(reader, reader.ranks)
    num_done = 0
    for alike in together:
        progress(num_done, len(reader.ranks))
        num_done += len(alike.ranks)
        if not _are_right(alike, matching, waits, same, members):
            alone += alike.ranks
            num_done -= len(alike.ranks)
    for number, rank in enumerate(sorted(alone), num_done):
        progress(number, len(reader.ranks))
        try:
            yield from gaps(reader, rank)
            tables = RankTables(reader, rank)
            yield from tables.checks(reader, missing, same, members)
            group, peer = OfRanks.of(tables.units.group_id, 1, None), OfRanks.of(tables.units.peer, 1, None)
            for code, message, where in matching.add((rank,), tables.units, group, peer):
                yield finding(code, message, where)
            waits.add((rank,), tables.units, group, peer)
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


def _are_right(
    alike: Alike, matching: Matching, waits: WaitGraph, same: Unchanged, members: Members
) -> bool:  # fmt: skip
    """Whether ranks that are stored by one role have no finding of their own: if so, they are taken in to be matched.

    Only columns of `_OWN` may differ; else, or if something is wrong, nothing is taken in, and each is looked at.
    """
    reader, first = alike.reader, alike.ranks[0]
    try:
        if not alike.have(_SAME) or any(gaps(reader, first)):
            return False
        tables = RankTables(reader, first)
        changes: dict[str, Replaced] = {}
        for kind, table in tables.all.items():
            found = alike.replaced(kind, table.row_index, table.columns())
            if found is None:
                return False
            changes = found[1] if kind is TableKind.UNITS else changes
        missing: Counter[bytes] = Counter()
        if any(tables.checks(reader, missing, same, members)) or missing:
            return False
    except TraceFormatError:
        return False
    if any((changes[name][1] < 0).any() for name in _AMOUNTS & changes.keys()):
        return False
    units, num = tables.units, len(alike.ranks)
    group = OfRanks.of(units.group_id, num, changes.get("group_id"))
    peer = OfRanks.of(units.peer, num, changes.get("peer"))
    if not members.have(np.array(alike.ranks), group, peer, world=reader.world_size):
        return False
    if matching.add(alike.ranks, units, group, peer):
        return False
    waits.add(alike.ranks, units, group, peer)
    return True


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
