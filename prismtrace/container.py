"""Frames records: magic bytes, record frames, checksums and the trailer.

Does not know what is inside a record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

from prismtrace.errors import (
    TraceChecksumError,
    TraceFormatError,
    TraceLimitError,
    TraceUnfinishedError,
    TraceVersionError,
)
from prismtrace.model import FORMAT_VERSION

MAGIC: Final = b"\x89PRSM" + bytes([FORMAT_VERSION[0]]) + b"\r\n"
MARKER: Final = b"\xf6PRc"
FRAME: Final = struct.Struct("<4sBBHIIQII")
TRAILER: Final = struct.Struct("<QQII8s")
FRAME_BYTES: Final = 32
TRAILER_BYTES: Final = 32

MAX_META_BYTES: Final = 1 << 30
MAX_CHUNK_META_BYTES: Final = 1 << 22
MAX_DATA_BYTES: Final = 1 << 46


class RecordKind(IntEnum):
    """Record kinds; readers skip kinds from 128 on and those they do not know."""

    UNSPECIFIED = 0
    HEADER = 1
    CHUNK = 2
    PAYLOAD = 3
    GROUP = 4
    METADATA = 5
    FOOTER = 6


class Frame(NamedTuple):
    """What the 32 bytes in front of a record say."""

    kind: int
    meta_length: int
    meta_crc: int
    data_length: int
    data_crc: int

    @property
    def data_start(self) -> int:
        """Where the data section starts, counted from the start of the frame."""
        return FRAME_BYTES + align(self.meta_length)

    @property
    def length(self) -> int:
        """Bytes of the whole record with its padding."""
        return self.data_start + align(self.data_length)


def align(length: int) -> int:
    """`length` rounded up to a multiple of 8."""
    return (length + 7) & ~7


def pack_record(kind: int, meta: bytes, data: Sequence[bytes | memoryview] = ()) -> tuple[Frame, list[Any]]:
    """The buffers of one record: frame, meta, padding, data, padding."""
    crc, length = 0, 0
    for part in data:
        crc = zlib.crc32(part, crc)
        length += len(part)
    frame = Frame(kind, len(meta), zlib.crc32(meta), length, crc)
    head = FRAME.pack(MARKER, kind, 0, 0, frame.meta_length, frame.meta_crc, length, crc, 0)
    head = head[:28] + struct.pack("<I", zlib.crc32(head[:28]))
    return frame, [head, meta, bytes(-len(meta) % 8), *data, bytes(-length % 8)]


def parse_frame(raw: bytes | memoryview, *, path: str, offset: int) -> Frame:
    """The frame at `offset`, of which `raw` holds the first bytes."""
    if len(raw) < FRAME_BYTES:
        raise TraceFormatError(f"{len(raw)} bytes are no record", path=path, offset=offset)
    marker, kind, flags, reserved, meta_length, meta_crc, data_length, data_crc, crc = FRAME.unpack_from(raw)
    if marker != MARKER:
        raise TraceFormatError("no record starts here", path=path, offset=offset)
    if crc != zlib.crc32(raw[:28]):
        raise TraceChecksumError("checksum of a record frame", path=path, offset=offset)
    if flags or reserved:
        raise TraceVersionError("record flags of a later format version", path=path, offset=offset)
    if meta_length > MAX_META_BYTES or data_length > MAX_DATA_BYTES:
        raise TraceLimitError(f"record of {meta_length} + {data_length} bytes", path=path, offset=offset)
    if kind == RecordKind.CHUNK and meta_length > MAX_CHUNK_META_BYTES:
        raise TraceLimitError(f"chunk header of {meta_length} bytes", path=path, offset=offset)
    return Frame(kind, meta_length, meta_crc, data_length, data_crc)


PACKED: Final = {
    b"\x1f\x8b": ("gzip", "gzip -d"),
    b"PK\x03\x04": ("a zip archive", "unzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bzip2 -d"),
    b"\xfd7zXZ": ("xz", "xz -d"),
    b"\x04\x22\x4d\x18": ("lz4", "lz4 -d"),
}
"""How packed files begin -> what packed them, and the command that unpacks them."""


def check_magic(raw: bytes, *, path: str) -> None:
    """Tells a PrismTrace file of this major version from everything else."""
    if len(raw) >= 8 and raw[:5] == MAGIC[:5] and raw[6:8] == MAGIC[6:]:
        if raw[5] != FORMAT_VERSION[0]:
            message = f"format {raw[5]}.x, this library reads {FORMAT_VERSION[0]}.x: "
            message += (
                "install a later prismtrace" if raw[5] else "a draft; write it anew, or read it with prismtrace 0.1"
            )
            raise TraceVersionError(message, path=path, offset=5)
        return
    if MAGIC.startswith(raw):
        message = "shorter than the magic bytes" if raw else "the file is empty"
        raise TraceUnfinishedError(message, path=path, offset=0)
    for begins, (what, command) in PACKED.items():
        if raw.startswith(begins):
            message = f"not a PrismTrace file, but {what}: unpack it first ({command})"
            raise TraceFormatError(message, path=path, offset=0)
    raise TraceFormatError("not a PrismTrace file (`prism convert` reads other formats)", path=path, offset=0)


def pack_trailer(footer_offset: int, footer_length: int) -> bytes:
    """The 32 bytes at the end of a finished file."""
    head = struct.pack("<QQI", footer_offset, footer_length, 0)
    return head + struct.pack("<I8s", zlib.crc32(head), MAGIC)


def parse_trailer(raw: bytes, *, path: str, offset: int) -> tuple[int, int]:
    """Offset and length of the footer record."""
    footer_offset, footer_length, reserved, crc, magic = TRAILER.unpack(raw)
    if magic != MAGIC:
        message = "no footer: the writer did not finish, or the end is cut off (`prism recover` saves what is whole)"
        raise TraceUnfinishedError(message, path=path, offset=offset)
    if zlib.crc32(raw[:20]) != crc:
        raise TraceChecksumError("checksum of the trailer", path=path, offset=offset)
    if reserved or footer_length < FRAME_BYTES or footer_offset + footer_length != offset:
        raise TraceFormatError("the trailer does not point to a footer", path=path, offset=offset)
    return footer_offset, footer_length
