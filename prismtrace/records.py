"""Goes from record to record through a whole file, also past damage, and checks all checksums.

Does not look into what records say.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prismtrace import container
from prismtrace.container import FRAME_BYTES, TRAILER_BYTES, Frame, RecordKind
from prismtrace.errors import TraceChecksumError, TraceFormatError, TraceVersionError
from prismtrace.index import read_meta
from prismtrace.source import Source

_READ_BYTES: Final = 1 << 23


@dataclass(frozen=True)
class LostRange:
    """Bytes `start` .. `end` (exclusive) of the damaged file that could not be used, and why."""

    start: int
    end: int
    reason: str


def end_of_trace(source: Source, offset: int) -> int | None:
    """Where a finished trace ends, with the trailer behind its footer; None where neither is found.

    It goes through the frames of records from `offset` on, and reads no data.
    """
    while offset < source.size:
        try:
            frame, _ = read_meta(source, offset)
        except TraceVersionError:
            raise
        except TraceFormatError:
            offset = _next_record(source, offset + 8)
            continue
        offset += frame.length
        if frame.kind == RecordKind.FOOTER and _is_trailer(source, offset):
            return offset + TRAILER_BYTES
    return None


def _is_trailer(source: Source, offset: int) -> bool:
    try:
        container.parse_trailer(bytes(source.read_at(offset, TRAILER_BYTES)), path=source.name, offset=offset)
    except TraceFormatError:
        return False
    return True


def whole_records(
    source: Source, offset: int, lost: list[LostRange], *, end: int | None = None
) -> Iterator[tuple[int, Frame, bytes]]:
    """All records from `offset` to `end` whose checksums are right; what lies between them is added to `lost`."""
    end = source.size if end is None else end
    while offset < end:
        try:
            frame, meta = read_meta(source, offset)
        except TraceVersionError:
            raise
        except TraceFormatError as error:
            following = _next_record(source, offset + 8)
            lost.append(LostRange(offset, following, error.message))
            offset = following
            continue
        following = offset + frame.length
        try:
            _check_data(source, frame, offset)
        except TraceChecksumError as error:
            if following < source.size and not _is_record(source, following):
                following = _next_record(source, offset + 8)  # bytes are missing: the next record starts earlier
            lost.append(LostRange(offset, following, error.message))
        else:
            yield offset, frame, meta
        offset = following


def _next_record(source: Source, offset: int) -> int:
    """Where the next good record starts; the end of the file when there is none."""
    while offset < source.size:
        window = bytes(source.read_at(offset, min(_READ_BYTES, source.size - offset)))
        found = window.find(container.MARKER)
        while found >= 0:
            if (offset + found) % 8 == 0 and _is_record(source, offset + found):
                return offset + found
            found = window.find(container.MARKER, found + 1)
        if len(window) < _READ_BYTES:
            break
        offset += len(window) - 8
    return source.size


def _is_record(source: Source, offset: int) -> bool:
    if offset + FRAME_BYTES > source.size:
        return False
    try:
        read_meta(source, offset)
    except TraceFormatError:
        return False
    return True


def _check_data(source: Source, frame: Frame, offset: int) -> None:
    start, crc = offset + frame.data_start, 0
    for position in range(start, start + frame.data_length, _READ_BYTES):
        crc = zlib.crc32(source.read_at(position, min(_READ_BYTES, start + frame.data_length - position)), crc)
    if crc != frame.data_crc:
        raise TraceChecksumError("checksum of a data section", path=source.name, offset=offset)
