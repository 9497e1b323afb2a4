"""Saves every whole record of a file that was cut off or damaged.

Does not guess: a record is kept only when its checksums and its contents are right.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismtrace import metas
from prismtrace.container import TRAILER_BYTES, RecordKind
from prismtrace.errors import TraceFormatError
from prismtrace.index import Collected, read_header
from prismtrace.merge import InputPart, write_merged
from prismtrace.model import ROLE_RANK
from prismtrace.records import LostRange, end_of_trace, whole_records
from prismtrace.source import PathSource


@dataclass(frozen=True)
class RecoverReport:
    """What was saved and what was not. `was_finished`: the file had a good index all along."""

    num_chunks: int
    num_rows: int
    num_payloads: int
    was_finished: bool
    lost: tuple[LostRange, ...]

    @property
    def lost_bytes(self) -> int:
        """Size of all lost ranges."""
        return sum(part.end - part.start for part in self.lost)


def recover(path: str | os.PathLike[str], out: str | os.PathLike[str], *, overwrite: bool = False) -> RecoverReport:
    """Writes the whole records of `path` to the new, finished file `out`.

    Args:
        path: the damaged or unfinished file; it is not changed.
        out: the file to create; it appears only when it is complete.
        overwrite: replaces `out` when it exists.

    Raises:
        TraceFormatError: or a subclass: not even the header can be read.
        TraceWriteError: the result cannot be written, or exists.
    """
    source = PathSource(os.fspath(path))
    try:
        header, start = read_header(source)
        collected = Collected()
        lost: list[LostRange] = []
        finished = False
        end = end_of_trace(source, start)
        behind = None if end is None else end - TRAILER_BYTES  # the trailer is no record, and is not lost
        for offset, frame, meta in whole_records(source, start, lost, end=behind):
            try:
                if frame.kind == RecordKind.FOOTER:
                    metas.parse_footer(meta, path=source.name, offset=offset)
                    finished = offset + frame.length + TRAILER_BYTES == end
                collected.add(frame, meta, offset, source.name)
            except TraceFormatError as error:
                lost.append(LostRange(offset, offset + frame.length, error.message))
    finally:
        source.close()
    if end is not None and end < source.size:
        lost.append(LostRange(end, source.size, "it stands behind the end of the trace"))
    for start, size in collected.drop_repeated_rows(source.name):
        lost.append(LostRange(start, start + size, "a later chunk has the same rows"))
    chunks, payloads, ranges = collected.arrays()
    chunks = _with_roles(chunks, lost)
    part = InputPart(source.name, header, chunks, payloads, ranges)
    pairs = dict(collected.metadata)
    if lost:
        pairs["recover.lost_bytes"] = str(sum(item.end - item.start for item in lost))
    write_merged(os.fspath(out), header, [part], collected.groups, pairs, overwrite=overwrite)
    num_rows = int(part.chunks["num_rows"].sum(dtype=np.int64))
    return RecoverReport(len(chunks), num_rows, len(payloads), finished, tuple(lost))


def _with_roles(chunks: NDArray[Any], lost: list[LostRange]) -> NDArray[Any]:
    """The chunks without those whose role was lost: they say only what differs from it."""
    names = ("table", "role", "first_row", "num_rows")
    keys = list(zip(*(chunks[name].tolist() for name in names), strict=True))
    is_role = (chunks["rank"] == ROLE_RANK).tolist()
    there = {key for key, mine in zip(keys, is_role, strict=True) if mine}
    kept = np.array([mine or not key[1] or key in there for key, mine in zip(keys, is_role, strict=True)], np.bool_)
    for entry in chunks[~kept]:
        start, role = int(entry["offset"]), int(entry["role"])
        lost.append(LostRange(start, start + int(entry["length"]), f"the rows of role {role} that it needs are lost"))
    lost.sort(key=lambda part: part.start)
    return chunks[kept]
