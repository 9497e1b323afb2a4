"""Reads what a writer must know to go on with a file that exists: where records end, and what they hold.

Does not write, and does not decide to cut anything off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismtrace import metas
from prismtrace.columns import normalise
from prismtrace.container import RecordKind
from prismtrace.entries import RankRange, ranks_of
from prismtrace.errors import TraceUsageError
from prismtrace.index import Collected, Index, read_header, read_meta
from prismtrace.model import COLUMNS, FORMAT_VERSION, ROLE_RANK, ColumnType, TableKind
from prismtrace.reader import TraceReader
from prismtrace.roles import Template


@dataclass
class Resumed:
    """The state of a file: its records end at `end`."""

    end: int
    collected: Collected
    features: int = 0
    num_rows: dict[tuple[int, int, int], int] = field(default_factory=dict)
    templates: dict[tuple[TableKind, int, int], Template] = field(default_factory=dict)
    types: dict[TableKind, dict[str, ColumnType]] = field(default_factory=lambda: {kind: {} for kind in COLUMNS})


def resume(path: str, *, allow_unfinished: bool) -> Resumed:
    """What a file holds.

    Raises:
        TraceUsageError: going on with the file would change what it says.
        TraceFormatError: the file is broken.
    """
    with TraceReader(path, allow_unfinished=allow_unfinished) as reader:
        index = reader._index
        header = index.header
        if (
            header.version > FORMAT_VERSION
            or header.required_features & ~metas.KNOWN_FEATURES
            or header.optional_features
        ):
            message = f"format {reader.format_version} with features that this library cannot keep; merge it instead"
            raise TraceUsageError(f"{path}: {message}")
        collected, end = _records(reader, index)
        resumed = Resumed(end, collected, header.required_features)
        for table, rank, role in index.owners():
            last = index.entries(table, rank, role=role)[-1]
            resumed.num_rows[table, rank, role] = int(last["first_row"]) + int(last["num_rows"])
        _read_types(reader, resumed)
        _read_templates(reader, resumed)
        return resumed


def _records(reader: TraceReader, index: Index) -> tuple[Collected, int]:
    """The records that count, and where the last record ends; refuses a file with others, which would come back."""
    source = reader._source
    _, offset = read_header(source)
    found = Collected()
    end = source.size if index.end is None else index.end
    while offset < end:
        frame, meta = read_meta(source, offset, limit=1 << 30)
        if frame.kind == RecordKind.FOOTER:
            break
        found.add(frame, meta, offset, source.name)
        offset += frame.length
    chunks, payloads, ranges = found.arrays()
    same = np.array_equal(np.sort(chunks["offset"]), np.sort(index.chunk_entries["offset"]))
    same = same and len(_all_ranks(ranges)) == len(_all_ranks(index.ranges))
    if not same or len(payloads) != len(index.payload_entries):
        message = "it holds records that its index leaves out; merge it into a new file, then append to that"
        raise TraceUsageError(f"{source.name}: {message}")
    found.groups, found.metadata = dict(index.groups), dict(index.metadata)
    return found, offset


def _all_ranks(ranges: NDArray[Any]) -> list[int]:
    """The ranks of all ranges of an index, back to back."""
    found: list[int] = ranks_of(RankRange(*row) for row in ranges.tolist()).tolist()
    return found


def _read_types(reader: TraceReader, resumed: Resumed) -> None:
    """The types that named columns have."""
    entries = reader._index.chunk_entries
    for offset, table in zip(entries["offset"].tolist(), entries["table"].tolist(), strict=True):
        if table in resumed.types:
            meta = metas.parse_chunk(read_meta(reader._source, offset)[1], path=reader.path, offset=offset)
            resumed.types[TableKind(table)].update((spec.name, spec.type) for spec in meta.named)


def _read_templates(reader: TraceReader, resumed: Resumed) -> None:
    """The rows of roles, which rows to come may refer to."""
    for table, rank, role in reader._index.owners():
        if rank != ROLE_RANK or table not in resumed.types:
            continue
        kind = TableKind(table)
        rows = normalise(kind, reader.role_table(role, kind))
        entries = reader._index.entries(kind, ROLE_RANK, role=role)
        start = 0
        for first, count in zip(entries["first_row"].tolist(), entries["num_rows"].tolist(), strict=True):
            resumed.templates[kind, role, first] = Template(rows.part(start, start + count), first_row=first)
            start += count
