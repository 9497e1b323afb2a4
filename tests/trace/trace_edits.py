"""Takes a trace apart into records, changes what they say, and makes every checksum right again.

Does not read traces: it stands for a writer that is hostile or wrong, which checksums do not stop.
"""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass, field, replace

import zstandard
from trace_faults import FRAME, MARKER

MAGIC_BYTES = 8
CHUNK, FOOTER = 2, 6
STRING_LENGTHS = 4
STREAM_BYTES = 40
STREAMS_SLOT = 4 + 2 * 8
NONE, ZSTD = 1, 2
# offset and struct code of the fields of a stream
STREAM_FIELDS = {
    "base": (0, "q"),
    "num_values": (8, "I"),
    "stored_length": (12, "I"),
    "raw_length": (16, "I"),
    "crc": (20, "I"),
    "scale": (24, "I"),
    "column": (28, "H"),
    "reference": (30, "H"),
    "part": (32, "B"),
    "encoding": (33, "B"),
    "compression": (34, "B"),
    "width": (35, "B"),
    "shift": (36, "B"),
    "reserved_0": (37, "B"),
    "reserved_1": (38, "H"),
}
INTERESTING = (0, 1, 2, 3, 4, 5, 7, 8, 16, 32, 127, 128, 255, 256, 32767, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 1,
               2**62, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip


@dataclass
class Record:
    """One record, taken apart."""

    kind: int
    meta: bytearray
    data: bytearray
    streams: list[int] = field(default_factory=list)
    """Where the stream descriptors of a chunk lie in its meta section."""


def _streams_of(meta: bytes) -> list[int]:
    root = struct.unpack_from("<I", meta, 0)[0]
    vtable = root - struct.unpack_from("<i", meta, root)[0]
    if struct.unpack_from("<H", meta, vtable)[0] <= STREAMS_SLOT:
        return []
    offset = struct.unpack_from("<H", meta, vtable + STREAMS_SLOT)[0]
    if not offset:
        return []
    vector = root + offset + struct.unpack_from("<I", meta, root + offset)[0]
    return [vector + 4 + STREAM_BYTES * i for i in range(struct.unpack_from("<I", meta, vector)[0])]


def take_apart(raw: bytes) -> list[Record]:
    """The records of a good file."""
    records, offset = [], MAGIC_BYTES
    while raw[offset : offset + 4] == MARKER:
        _, kind, _, _, meta_length, _, data_length, _, _ = FRAME.unpack_from(raw, offset)
        start = offset + 32 + (meta_length + 7) // 8 * 8
        meta = bytearray(raw[offset + 32 : offset + 32 + meta_length])
        data = bytearray(raw[start : start + data_length])
        records.append(Record(kind, meta, data, _streams_of(meta) if kind == CHUNK else []))
        offset = start + (data_length + 7) // 8 * 8
    return records


def put_together(records: list[Record], magic: bytes, *, finished: bool) -> bytes:
    """A file of these records with right checksums; without footer and trailer when it is not to be finished."""
    raw = bytearray(magic)
    footer = (0, 0)
    for record in records:
        if record.kind == FOOTER:
            if not finished:
                continue
            footer = (len(raw), 32 + (len(record.meta) + 7) // 8 * 8 + (len(record.data) + 7) // 8 * 8)
        head = FRAME.pack(
            MARKER, record.kind, 0, 0, len(record.meta), zlib.crc32(record.meta), len(record.data),
            zlib.crc32(record.data), 0,
        )  # fmt: skip
        raw += head[:28] + struct.pack("<I", zlib.crc32(head[:28]))
        raw += record.meta + bytes(-len(record.meta) % 8) + record.data + bytes(-len(record.data) % 8)
    if finished:
        tail = struct.pack("<QQI", *footer, 0)
        raw += tail + struct.pack("<I", zlib.crc32(tail)) + magic
    return bytes(raw)


def get_field(record: Record, place: int, name: str) -> int:
    """A field of the stream descriptor at `place`."""
    offset, code = STREAM_FIELDS[name]
    value: int = struct.unpack_from("<" + code, record.meta, place + offset)[0]
    return value


def set_field(record: Record, place: int, name: str, value: int) -> None:
    """Changes a field of the stream descriptor at `place`."""
    offset, code = STREAM_FIELDS[name]
    size = struct.calcsize("<" + code)
    record.meta[place + offset : place + offset + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")


def _number(rng: random.Random) -> int:
    return rng.choice(INTERESTING) if rng.random() < 0.8 else rng.randrange(1 << 64)


def _edit_meta(record: Record, rng: random.Random) -> None:
    width = rng.choice((1, 2, 4, 8))
    if len(record.meta) >= width:
        place = rng.randrange(len(record.meta) - width + 1)
        place -= place % width if rng.random() < 0.7 else 0
        record.meta[place : place + width] = (_number(rng) & (1 << 8 * width) - 1).to_bytes(width, "little")


def _edit_descriptor(record: Record, rng: random.Random) -> None:
    place = rng.choice(record.streams)
    name = rng.choice(list(STREAM_FIELDS))
    value = _number(rng) if rng.random() < 0.6 else get_field(record, place, name) + rng.choice((-1, 1))
    set_field(record, place, name, value)


def _edit_values(record: Record, rng: random.Random) -> None:
    """Other bytes in a stream, sometimes more or fewer of them; its lengths and its checksum are right."""
    number = rng.randrange(len(record.streams))
    start = sum(get_field(record, place, "stored_length") for place in record.streams[:number])
    place = record.streams[number]
    stored_length, compression = get_field(record, place, "stored_length"), get_field(record, place, "compression")
    if not 0 < stored_length <= len(record.data) - start:
        return
    raw = bytearray(record.data[start : start + stored_length])
    if compression == ZSTD:
        try:
            raw = bytearray(zstandard.ZstdDecompressor().decompress(raw, max_output_size=1 << 20))
        except zstandard.ZstdError:
            return
    for _ in range(rng.choice((1, 1, 3, 20))):
        raw[rng.randrange(len(raw))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    if rng.random() < 0.2:
        raw = raw[: rng.randrange(len(raw))] if rng.random() < 0.5 else raw + bytes(rng.choice((1, 8, 1000)))
    stored = zstandard.ZstdCompressor().compress(raw) if compression == ZSTD else bytes(raw)
    record.data[start : start + stored_length] = stored
    set_field(record, place, "raw_length", len(raw))
    set_field(record, place, "stored_length", len(stored))
    set_field(record, place, "crc", zlib.crc32(stored))


def edited(records: list[Record], rng: random.Random) -> list[Record]:
    """A copy with one to four changes."""
    result = [replace(r, meta=bytearray(r.meta), data=bytearray(r.data)) for r in records]
    for _ in range(rng.choice((1, 1, 2, 4))):
        record = rng.choice(result)
        way = rng.random()
        if way < 0.06:
            result.insert(rng.randrange(len(result)), record)
        elif way < 0.1 and len(result) > 1:
            result.remove(record)
        elif way < 0.35 or not record.streams:
            _edit_meta(record, rng)
        elif way < 0.65:
            _edit_descriptor(record, rng)
        else:
            _edit_values(record, rng)
    return result


def repaired(raw: bytes) -> bytes:
    """Any bytes, with the checksums of records and trailer made right where there are any."""
    fixed, offset = bytearray(raw), MAGIC_BYTES
    while offset + 32 <= len(fixed) and fixed[offset : offset + 4] == MARKER:
        _, _, _, _, meta_length, _, data_length, _, _ = FRAME.unpack_from(fixed, offset)
        start = offset + 32 + (meta_length + 7) // 8 * 8
        if start + data_length > len(fixed):
            break
        struct.pack_into("<I", fixed, offset + 12, zlib.crc32(fixed[offset + 32 : offset + 32 + meta_length]))
        struct.pack_into("<I", fixed, offset + 24, zlib.crc32(fixed[start : start + data_length]))
        struct.pack_into("<I", fixed, offset + 28, zlib.crc32(fixed[offset : offset + 28]))
        offset = start + (data_length + 7) // 8 * 8
    if len(fixed) >= 40:
        struct.pack_into("<I", fixed, len(fixed) - 12, zlib.crc32(fixed[-32:-12]))
    return bytes(fixed)
