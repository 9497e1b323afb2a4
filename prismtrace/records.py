"""Goes from record to record through a whole file, also past damage, and checks all checksums.

Does not look into what records say.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prismtrace import container
from prismtrace.container import FRAME_BYTES, TRAILER_BYTES, Frame
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


def bytes_after_end(source: Source) -> int:
    """How many bytes follow the trailer of a finished file; 0 where none do, or no trailer is near the end."""
    start = max(0, source.size - _READ_BYTES)
    window = bytes(source.read_at(start, source.size - start))
    at = window.rfind(container.MAGIC, TRAILER_BYTES - len(container.MAGIC))
    while at >= 0:
        end = at + len(container.MAGIC)
        raw = window[end - TRAILER_BYTES : end]
        try:
            container.parse_trailer(raw, path=source.name, offset=start + end - TRAILER_BYTES)
        except TraceFormatError:
            at = window.rfind(container.MAGIC, TRAILER_BYTES - len(container.MAGIC), end - 1)
        else:
            return len(window) - end
    return 0


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
