"""A second reader of PrismTrace 1.0, written from spec/trace-format.md with struct and zstandard only.

Does not import prismtrace, numpy or flatbuffers, and is not fast: it exists to prove that the specification is enough.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import zstandard

MAGIC = b"\x89PRSM\x01\r\n"
FRAME = struct.Struct("<4sBBHIIQII")
STREAM = struct.Struct("<qIIIIIHHBBBBI")
CHUNK_ENTRY = struct.Struct("<QQQqqQIiiiIIIIBBHI")
RANGE = struct.Struct("<iIi")
PAYLOAD_ENTRY = struct.Struct("<16sQQQQIBBH")
MASK = (1 << 64) - 1
GRAPH_KINDS = ("UNSPECIFIED", "OBSERVED", "BARE", "CALIBRATED", "EMULATED")
DEFAULTS = {"u8": 0, "u64": "0", "bool": False, "i32": 0, "i64": "0", "f64": 0.0}
TABLES = {1: "units", 2: "steps", 3: "scalars", 4: "events", 5: "tracks"}
TYPES = ("", "u8", "i32", "i64", "u64", "f64", "bool", "string", "digest", "list")
TYPE_NAMES = ("", "UINT8", "INT32", "INT64", "UINT64", "FLOAT64", "BOOL", "STRING", "DIGEST", "LIST_INT64")
# table -> column id -> (name, type, optional)
COLUMNS: dict[int, dict[int, tuple[str, str, bool]]] = {
    1: {
        1: ("kind", "u8", False), 2: ("phase", "u8", False), 3: ("step", "i32", True), 4: ("start_ns", "i64", True),
        5: ("end_ns", "i64", True), 6: ("group_id", "u64", False), 7: ("seq", "i64", True), 8: ("op", "u8", False),
        9: ("reduce_op", "u8", False), 10: ("dtype", "u8", False), 11: ("num_elements_in", "i64", True),
        12: ("num_elements_out", "i64", True), 13: ("peer", "i32", True), 14: ("tag", "i64", True),
        15: ("is_async", "bool", False), 16: ("awaits", "i64", True), 17: ("transfer_ns", "i64", True),
        18: ("gap_ns", "i64", True), 19: ("memory_bytes", "i64", True), 20: ("microbatch", "i32", True),
        21: ("stage", "i32", True), 22: ("model_chunk", "i32", True), 23: ("label", "string", True),
        24: ("payload_in", "digest", True), 25: ("payload_out", "digest", True), 26: ("splits_in", "list", True),
        27: ("splits_out", "list", True),
    },
    2: {
        1: ("step", "i32", False), 2: ("start_ns", "i64", True), 3: ("end_ns", "i64", False),
        4: ("loss", "f64", True), 5: ("num_losses", "i32", False), 6: ("memory_peak_bytes", "i64", True),
        7: ("cpu_time_ns", "i64", True),
    },
    3: {1: ("step", "i32", False), 2: ("name", "string", True), 3: ("value", "f64", False)},
    4: {
        1: ("name", "string", True), 2: ("category", "string", True), 3: ("kind", "u8", False),
        4: ("track", "i32", True), 5: ("start_ns", "i64", True), 6: ("end_ns", "i64", True),
        7: ("correlation_id", "i64", True),
        8: ("flow_id", "i64", True), 9: ("unit", "i64", True),
    },
    5: {
        1: ("name", "string", True), 2: ("process", "string", True), 3: ("kind", "u8", False),
        4: ("process_id", "i64", True), 5: ("thread_id", "i64", True), 6: ("device", "i32", True),
        7: ("stream", "i64", True),
    },
}  # fmt: skip


class Refused(Exception):
    """The bytes are not a trace that this reader reads."""


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


class _Table:
    """A flatbuffers table."""

    def __init__(self, raw: bytes, position: int) -> None:
        self.raw, self.position = raw, position
        self.vtable = position - struct.unpack_from("<i", raw, position)[0]
        self.vtable_bytes = struct.unpack_from("<H", raw, self.vtable)[0]

    @classmethod
    def root(cls, raw: bytes) -> _Table:
        return cls(raw, struct.unpack_from("<I", raw, 0)[0])

    def _field(self, field_id: int) -> int | None:
        slot = 4 + 2 * field_id
        if slot >= self.vtable_bytes:
            return None
        offset = struct.unpack_from("<H", self.raw, self.vtable + slot)[0]
        return self.position + offset if offset else None

    def scalar(self, field_id: int, code: str) -> int:
        position = self._field(field_id)
        return 0 if position is None else struct.unpack_from("<" + code, self.raw, position)[0]

    def _vector(self, field_id: int) -> tuple[int, int]:
        position = self._field(field_id)
        if position is None:
            return 0, 0
        start = position + struct.unpack_from("<I", self.raw, position)[0]
        return start + 4, struct.unpack_from("<I", self.raw, start)[0]

    def string(self, field_id: int) -> str:
        start, count = self._vector(field_id)
        _need(start + count <= len(self.raw), "string outside its buffer")
        return self.raw[start : start + count].decode("utf-8")

    def structs(self, field_id: int, layout: struct.Struct) -> list[tuple[Any, ...]]:
        start, count = self._vector(field_id)
        _need(start + count * layout.size <= len(self.raw), "vector outside its buffer")
        return list(layout.iter_unpack(self.raw[start : start + count * layout.size]))

    def tables(self, field_id: int) -> list[_Table]:
        start, count = self._vector(field_id)
        places = [start + 4 * i for i in range(count)]
        return [_Table(self.raw, place + struct.unpack_from("<I", self.raw, place)[0]) for place in places]


def _align(length: int) -> int:
    return (length + 7) // 8 * 8


def _record(raw: bytes, offset: int) -> tuple[int, bytes, int, int, int, tuple[int, int]]:
    _need(offset + 32 <= len(raw), "truncated")
    marker, kind, flags, reserved, meta_length, meta_crc, data_length, data_crc, crc = FRAME.unpack_from(raw, offset)
    _need(marker == b"\xf6PRc", "no record")
    _need(zlib.crc32(raw[offset : offset + 28]) == crc, "frame checksum")
    _need(flags == 0 and reserved == 0, "flags of a later version")
    data_start = offset + 32 + _align(meta_length)
    end = data_start + _align(data_length)
    _need(end <= len(raw), "truncated")
    meta = raw[offset + 32 : offset + 32 + meta_length]
    _need(zlib.crc32(meta) == meta_crc, "meta checksum")
    return kind, meta, data_start, data_length, end, (meta_crc, data_crc)


def read(raw: bytes) -> dict[str, Any]:
    """The JSON twin of a finished file; Refused when it is not one."""
    try:
        return _read(raw)
    except (struct.error, IndexError, ValueError, KeyError, OverflowError, zstandard.ZstdError) as error:
        raise Refused(f"malformed: {error!r}") from error


def _read(raw: bytes) -> dict[str, Any]:
    _need(raw[:8] == MAGIC, "magic")
    kind, meta, _, _, _, _ = _record(raw, 8)
    _need(kind == 1, "header")
    header = _Table.root(meta)
    major, minor = header.scalar(0, "H"), header.scalar(1, "H")
    _need(major == 1, "version")
    _need(header.scalar(2, "Q") == 0, "required features")
    _need(len(raw) >= 40 and raw[-8:] == MAGIC, "unfinished")
    offset, length, reserved, crc = struct.unpack("<QQII", raw[-32:-8])
    _need(zlib.crc32(raw[-32:-12]) == crc and reserved == 0, "trailer checksum")
    _need(offset + length == len(raw) - 32, "footer place")
    kind, meta, _, _, end, _ = _record(raw, offset)
    _need(kind == 6 and end == offset + length, "footer")
    footer = _Table.root(meta)
    _need(footer.scalar(0, "Q") == 0, "required features")
    ranks: dict[int, dict[str, Any]] = {}
    ends: dict[tuple[int, int], int] = {}
    for entry in sorted(footer.structs(2, CHUNK_ENTRY), key=lambda e: (e[7], e[14], e[2])):
        if entry[14] in TABLES:
            _add_chunk(raw, entry, ranks, ends)
    groups = [
        {
            "group_id": str(g.scalar(0, "Q")), "name": g.string(1), "description": g.string(2),
            "backend": g.string(3),
            "ranks": [r for (r,) in g.structs(4, struct.Struct("<i"))] + _ranks(g.structs(5, RANGE)),
        }
        for g in footer.tables(4)
    ]  # fmt: skip
    return {
        "format": f"{major}.{minor}",
        "graph_kind": GRAPH_KINDS[header.scalar(4, "B")],
        "world_size": header.scalar(5, "i"),
        "metadata": {pair.string(0): pair.string(1) for pair in footer.tables(5)},
        "groups": sorted(groups, key=lambda g: int(g["group_id"])),
        "ranks": {str(rank): _twin_tables(tables) for rank, tables in sorted(ranks.items())},
        "payloads": dict(sorted(_payload(raw, entry) for entry in footer.structs(3, PAYLOAD_ENTRY))),
    }


def _twin_tables(tables: dict[str, Any]) -> dict[str, Any]:
    for table in tables.values():
        columns = table["columns"]
        table["columns"] = {k: v for k, v in columns.items() if any(value is not None for value in v)}
        table.pop("specs")
        types = {k: v for k, v in table.pop("types", {}).items() if k in table["columns"]}
        table |= {"types": types} if types else {}
    return tables


def _payload(raw: bytes, entry: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    digest, _, offset, stored_length, raw_length, crc, compression, _, _ = entry
    stored = raw[offset : offset + stored_length]
    _need(zlib.crc32(stored) == crc, "payload checksum")
    data = _expand(stored, compression, raw_length)
    text = base64.b64encode(data).decode() if raw_length <= 4096 else None
    return digest.hex(), {"num_bytes": str(raw_length), "base64": text}


def _expand(stored: bytes, compression: int, raw_length: int) -> bytes:
    _need(compression in (1, 2), "compression")
    _need(raw_length <= 1 << 28, "limit")
    data = stored
    if compression == 2:
        _need(zstandard.get_frame_parameters(stored).content_size == raw_length, "zstd content size")
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_length)
    _need(len(data) == raw_length, "length")
    return data


def _add_chunk(
    raw: bytes, entry: tuple[Any, ...], ranks: dict[int, dict[str, Any]], ends: dict[tuple[int, int], int]
) -> None:
    offset, length, first_row, _, _, _, num_rows, rank, _, _, meta_crc, data_crc, _, _, table_id, _, _, _ = entry
    kind, meta, data_start, data_length, end, crcs = _record(raw, offset)
    _need(kind == 2 and end == offset + length and crcs == (meta_crc, data_crc), "chunk and index differ")
    chunk = _Table.root(meta)
    told = (chunk.scalar(0, "B"), chunk.scalar(1, "i"), chunk.scalar(2, "Q"), chunk.scalar(3, "I"))
    _need(told == (table_id, rank, first_row, num_rows), "chunk and index differ")
    _need(num_rows <= 1 << 20, "limit")
    streams: dict[tuple[int, int], tuple[Any, ...]] = {}
    position = data_start
    for stream in chunk.structs(8, STREAM):
        column, role, stored_length = stream[6], stream[8], stream[2]
        _need((column, role) not in streams, "stream twice")
        streams[column, role] = (*stream, raw[position : position + stored_length])
        position += stored_length
    _need(position == data_start + data_length, "streams and data differ")
    named = {c.scalar(0, "H"): (c.string(2), TYPES[c.scalar(1, "B")]) for c in chunk.tables(9) if c.scalar(1, "B") < 10}
    specs = COLUMNS[table_id] | {
        c: (name, kind, kind not in ("u8", "u64", "bool")) for c, (name, kind) in named.items()
    }
    decoded = _Chunk(streams, num_rows, specs).columns()
    table = ranks.setdefault(rank, {}).setdefault(
        TABLES[table_id], {"num_rows": 0, "first_index": str(first_row), "columns": {}}
    )
    _need(first_row >= ends.get((rank, table_id), 0), "rows twice")
    ends[rank, table_id] = first_row + num_rows
    before = table["num_rows"]
    for name, kind in sorted(named.values()):
        table.setdefault("types", {}).setdefault(name, TYPE_NAMES[TYPES.index(kind)])
    known = table.setdefault("specs", {})
    known |= {name: (kind_name, optional) for name, kind_name, optional in specs.values()}
    for name, (kind_name, optional) in known.items():
        default = None if optional else DEFAULTS[kind_name]
        if name in decoded or name in table["columns"]:
            values = table["columns"].setdefault(name, [default] * before)
            values.extend(decoded.get(name, [default] * num_rows))
    table["num_rows"] += num_rows


def _ranks(ranges: list[tuple[Any, ...]]) -> list[int]:
    return [first + stride * i for first, count, stride in ranges for i in range(count)]


class _Chunk:
    def __init__(self, streams: dict[tuple[int, int], tuple[Any, ...]], num_rows: int, columns: Any) -> None:
        self.streams, self.num_rows, self.specs = streams, num_rows, columns

    def columns(self) -> dict[str, list[Any]]:
        result = {}
        for column, (name, kind, optional) in self.specs.items():
            _need(all(role in (1, 2, 3) for other, role in self.streams if other == column), "unknown role")
            if (column, 1) not in self.streams:
                _need(not any(key[0] == column for key in self.streams), "column without values")
                continue
            _need(optional or (column, 2) not in self.streams, "validity of a required column")
            rows = self.rows(column)
            values = self.lists(column) if kind == "list" else self.typed(column, kind, optional)
            _need(len(values) == len(rows), "number of values")
            full: list[Any] = [None] * self.num_rows
            for row, value in zip(rows, values, strict=True):
                full[row] = value
            result[name] = full
        return result

    def rows(self, column: int) -> list[int]:
        if (column, 2) not in self.streams:
            return list(range(self.num_rows))
        stream = self.streams[column, 2]
        bits = self.raw(stream)
        _need(stream[9] == 1 and len(bits) == (self.num_rows + 7) // 8, "validity")
        rows = [i for i in range(8 * len(bits)) if bits[i // 8] >> (i % 8) & 1]
        _need(not rows or rows[-1] < self.num_rows, "validity past the end")
        return rows

    def raw(self, stream: tuple[Any, ...]) -> bytes:
        _, num_values, _, raw_length, crc, scale, _, _, _, encoding, compression, width, reserved, stored = stream
        _need(zlib.crc32(stored) == crc, "stream checksum")
        _need(scale != 0 and reserved == 0, "stream")
        dictionary = stream[0] * 8 if encoding == 6 else 0
        _need(raw_length == (0 if encoding == 2 else num_values * width + dictionary), "stream length")
        return _expand(stored, compression, raw_length)

    def integers(self, column: int, role: int) -> list[int]:
        """Values modulo 2**64."""
        stream = self.streams[column, role]
        base, count, scale, reference, encoding, width = (stream[i] for i in (0, 1, 5, 7, 9, 11))
        raw = self.raw(stream)
        if encoding == 2:
            return [base * scale & MASK] * count
        head = raw[: base * 8] if encoding == 6 else b""
        body = raw[len(head) :]
        if encoding == 1:
            numbers = [int.from_bytes(body[i * width : (i + 1) * width], "little", signed=True) for i in range(count)]
        else:
            planes = [body[i * count : (i + 1) * count] for i in range(width)]
            numbers = [int.from_bytes(bytes(plane[i] for plane in planes), "little") for i in range(count)]
        if encoding == 3:
            numbers = [number + base for number in numbers]
        elif encoding == 4:
            total, values = base, []
            for number in numbers:
                total += (number >> 1) ^ -(number & 1)
                values.append(total)
            numbers = values
        elif encoding == 5:
            _need(reference < column, "reference")
            near = dict(zip(self.rows(reference), self.integers(reference, 1), strict=True))
            rows = self.rows(column)
            numbers = [near[r] + scale * ((n >> 1) ^ -(n & 1)) for r, n in zip(rows, numbers, strict=True)]
            return [number & MASK for number in numbers]
        elif encoding == 6:
            numbers = [struct.unpack_from("<q", head, 8 * number)[0] for number in numbers]
        elif encoding == 7:
            numbers = [number - (1 << 8 * width) if number >> (8 * width - 1) else number for number in numbers]
        else:
            _need(encoding == 1, "encoding")
        return [number * scale & MASK for number in numbers]

    def typed(self, column: int, kind: str, optional: bool) -> list[Any]:
        if kind == "f64":
            return self.floats(column, optional)
        values = self.integers(column, 1)
        if kind == "u64":
            return [str(value) for value in values]
        signed = [value - (1 << 64) if value >> 63 else value for value in values]
        if kind in ("string", "digest"):
            dictionary = self.strings() if kind == "string" else self.digests()
            _need(all(value >= 0 for value in signed), "code")
            return [dictionary[value] for value in signed]
        low, high = {"u8": (0, 255), "bool": (0, 1), "i32": (-(1 << 31), (1 << 31) - 1)}.get(kind, (-(1 << 63), MASK))
        absent = low if optional else low - 1
        _need(all(low <= value <= high and value != absent for value in signed), "value out of range")
        if kind == "bool":
            return [bool(value) for value in signed]
        return [str(value) for value in signed] if kind == "i64" else signed

    def floats(self, column: int, optional: bool) -> list[Any]:
        stream = self.streams[column, 1]
        raw, count = self.raw(stream), stream[1]
        if stream[9] == 2:
            raw = struct.pack("<q", stream[0]) * count
        elif stream[9] == 7:
            raw = bytes(raw[plane * count + i] for i in range(count) for plane in range(8))
        numbers = [number for (number,) in struct.iter_unpack("<d", raw)]
        texts = [number if abs(number) < float("inf") else str(number) for number in numbers]
        return [None if optional and text == "nan" else text for text in texts]

    def strings(self) -> list[str]:
        lengths, data = self.integers(0, 4), self.raw(self.streams[0, 5])
        _need(sum(lengths) == len(data), "string lengths")
        texts, start = [], 0
        for length in lengths:
            texts.append(data[start : start + length].decode("utf-8"))
            start += length
        return texts

    def digests(self) -> list[str]:
        data = self.raw(self.streams[0, 6])
        return [data[i : i + 16].hex() for i in range(0, len(data), 16)]

    def lists(self, column: int) -> list[list[str]]:
        lengths, values = self.integers(column, 3), self.integers(column, 1)
        _need(sum(lengths) == len(values), "list lengths")
        signed = [str(value - (1 << 64) if value >> 63 else value) for value in values]
        lists, start = [], 0
        for length in lengths:
            lists.append(signed[start : start + length])
            start += length
        return lists
