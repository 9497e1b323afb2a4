"""A second reader of PrismTrace 1.0, written from spec/trace-format.md with struct and zstandard only.

Does not import prismtrace, numpy or flatbuffers, and is not fast: it exists to prove that the specification is enough.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import zstandard
from foreign_chunk import TYPE_NAMES, TYPES, Chunk, Refused, expand, need

MAGIC = b"\x89PRSM\x01\r\n"
FRAME = struct.Struct("<4sBBHIIQII")
STREAM = struct.Struct("<qIIIIIHHBBBBBBH")
CHUNK_ENTRY = struct.Struct("<QQQqqQIiiiIIIIBBHI")
RANGE = struct.Struct("<iIi")
PAYLOAD_ENTRY = struct.Struct("<16sQQQQIBBH")
GRAPH_KINDS = ("UNSPECIFIED", "OBSERVED", "BARE", "CALIBRATED", "EMULATED")
DEFAULTS = {"u8": 0, "u64": "0", "bool": False, "i32": 0, "i64": "0", "f64": 0.0}
TABLES = {1: "units", 2: "steps", 3: "scalars", 4: "events", 5: "tracks"}
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
        need(start + count <= len(self.raw), "string outside its buffer")
        return self.raw[start : start + count].decode("utf-8")

    def structs(self, field_id: int, layout: struct.Struct) -> list[tuple[Any, ...]]:
        start, count = self._vector(field_id)
        need(start + count * layout.size <= len(self.raw), "vector outside its buffer")
        return list(layout.iter_unpack(self.raw[start : start + count * layout.size]))

    def tables(self, field_id: int) -> list[_Table]:
        start, count = self._vector(field_id)
        places = [start + 4 * i for i in range(count)]
        return [_Table(self.raw, place + struct.unpack_from("<I", self.raw, place)[0]) for place in places]


def _align(length: int) -> int:
    return (length + 7) // 8 * 8


def _record(raw: bytes, offset: int) -> tuple[int, bytes, int, int, int, tuple[int, int]]:
    need(offset + 32 <= len(raw), "truncated")
    marker, kind, flags, reserved, meta_length, meta_crc, data_length, data_crc, crc = FRAME.unpack_from(raw, offset)
    need(marker == b"\xf6PRc", "no record")
    need(zlib.crc32(raw[offset : offset + 28]) == crc, "frame checksum")
    need(flags == 0 and reserved == 0, "flags of a later version")
    data_start = offset + 32 + _align(meta_length)
    end = data_start + _align(data_length)
    need(end <= len(raw), "truncated")
    meta = raw[offset + 32 : offset + 32 + meta_length]
    need(zlib.crc32(meta) == meta_crc, "meta checksum")
    return kind, meta, data_start, data_length, end, (meta_crc, data_crc)


def read(raw: bytes) -> dict[str, Any]:
    """The JSON twin of a finished file; Refused when it is not one."""
    try:
        return _read(raw)
    except (struct.error, IndexError, ValueError, KeyError, OverflowError, zstandard.ZstdError) as error:
        raise Refused(f"malformed: {error!r}") from error


def _read(raw: bytes) -> dict[str, Any]:
    need(raw[:8] == MAGIC, "magic")
    kind, meta, _, _, start, _ = _record(raw, 8)
    need(kind == 1, "header")
    header = _Table.root(meta)
    major, minor = header.scalar(0, "H"), header.scalar(1, "H")
    need(major == 1, "version")
    need(header.scalar(2, "Q") & ~2 == 0, "required features")
    need(header.scalar(5, "i") >= 0, "world size")
    need(len(raw) >= 40 and raw[-8:] == MAGIC, "unfinished")
    offset, length, reserved, crc = struct.unpack("<QQII", raw[-32:-8])
    need(zlib.crc32(raw[-32:-12]) == crc and reserved == 0, "trailer checksum")
    need(offset + length == len(raw) - 32 and offset >= start, "footer place")
    kind, meta, _, _, end, _ = _record(raw, offset)
    need(kind == 6 and end == offset + length, "footer")
    footer = _Table.root(meta)
    need(footer.scalar(0, "Q") & ~2 == 0, "required features")
    payloads = {entry[0]: entry for entry in footer.structs(3, PAYLOAD_ENTRY)}
    ranks = _File(raw, footer, payloads, start, offset).ranks()
    groups = [
        {
            "group_id": str(g.scalar(0, "Q")), "name": g.string(1), "description": g.string(2),
            "backend": g.string(3),
            "ranks": [r for (r,) in g.structs(4, struct.Struct("<i"))] + _ranks(g.structs(5, RANGE)),
        }
        for g in footer.tables(4)
    ]  # fmt: skip
    graph_kind = header.scalar(4, "B")
    return {
        "format": f"{major}.{minor}",
        "graph_kind": GRAPH_KINDS[graph_kind] if graph_kind < len(GRAPH_KINDS) else str(graph_kind),
        "world_size": header.scalar(5, "i"),
        "metadata": {pair.string(0): pair.string(1) for pair in footer.tables(5)},
        "groups": sorted(groups, key=lambda g: int(g["group_id"])),
        "ranks": {str(rank): _twin_tables(tables) for rank, tables in sorted(ranks.items())},
        "payloads": dict(sorted(_twin_payload(raw, entry) for entry in payloads.values())),
    }


def _twin_tables(tables: dict[str, Any]) -> dict[str, Any]:
    for table in tables.values():
        columns = table["columns"]
        defaults = {k: None if optional else DEFAULTS[kind] for k, (kind, optional) in table["specs"].items()}
        table["columns"] = {k: v for k, v in columns.items() if any(value != defaults[k] for value in v)}
        table.pop("specs")
        types = {k: v for k, v in table.pop("types", {}).items() if k in table["columns"]}
        table |= {"types": types} if types else {}
    return tables


def _payload(raw: bytes, entry: tuple[Any, ...]) -> bytes:
    _, _, offset, stored_length, raw_length, crc, compression, _, _ = entry
    stored = raw[offset : offset + stored_length]
    need(zlib.crc32(stored) == crc, "payload checksum")
    return expand(stored, compression, raw_length)


def _twin_payload(raw: bytes, entry: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    data = _payload(raw, entry)
    text = base64.b64encode(data).decode() if len(data) <= 4096 else None
    return entry[0].hex(), {"num_bytes": str(len(data)), "base64": text}


def _ranks(ranges: list[tuple[Any, ...]]) -> list[int]:
    need(sum(count for _, count, _ in ranges) <= 1 << 20, "limit")
    return [first + stride * i for first, count, stride in ranges for i in range(count)]


class _File:
    """The chunks of a file, put together by rank."""

    def __init__(self, raw: bytes, footer: _Table, payloads: dict[bytes, Any], start: int, end: int) -> None:
        self.raw, self.payloads, self.start, self.end = raw, payloads, start, end
        self.entries = footer.structs(2, CHUNK_ENTRY)
        self.ranges = footer.structs(6, RANGE)
        self.roles: dict[tuple[int, int, int], Chunk] = {}
        self.found: dict[int, dict[str, Any]] = {}
        self.ends: dict[tuple[int, ...], int] = {}
        self.chunks: dict[int, tuple[Any, ...]] = {}

    def ranks(self) -> dict[int, dict[str, Any]]:
        """Rank -> table -> columns."""
        pieces = []
        for entry in self.entries:
            first_row, role, rank, table_id = entry[2], entry[5], entry[7], entry[14]
            if table_id not in TABLES:
                continue
            need(entry[6] <= 1 << 20, "limit")
            if rank == -1:
                need(role != 0 and entry[13] == 0, "role")
                self.roles[table_id, role, first_row] = self.chunk(entry)
            pieces += [
                (table_id, number, role if number < 0 else 0, first_row, entry) for number in self.ranks_of(entry)
            ]
        for table_id, rank, role, first_row, entry in sorted(pieces, key=lambda piece: piece[:4]):
            if entry[6]:
                need(first_row >= self.ends.get((table_id, rank, role), 0), "rows twice")
                self.ends[table_id, rank, role] = first_row + entry[6]
            if rank >= 0:
                self.add(rank, table_id, first_row, entry, self.chunk(entry, rank))
        return self.found

    def ranks_of(self, entry: tuple[Any, ...]) -> list[int]:
        """The ranks that a chunk counts for."""
        if entry[13] == 0:
            return [entry[7]]
        need(entry[12] + entry[13] <= len(self.ranges), "ranges outside the index")
        ranks = _ranks(self.ranges[entry[12] : entry[12] + entry[13]])
        need(ranks[0] == entry[7] and min(ranks) >= 0 and max(ranks) < 1 << 31, "ranks")
        return ranks

    def chunk(self, entry: tuple[Any, ...], rank: int = -1) -> Chunk:
        """The checked chunk of an index entry, as one rank sees it."""
        streams, specs, shared, places, tables, stacked = self.parsed(entry)
        template, place = None, places.get(rank, 0)
        need(rank < 0 or not places or rank in places, "rank is not in the chunk")
        if rank >= 0 and entry[5]:
            template = self.roles.get((entry[14], entry[5], entry[2]))
            need(template is not None and template.num_rows == entry[6], "no such rows of the role")
        if stacked:
            return Chunk(streams, entry[6] * len(places), specs, shared, template, None, len(places), tables)
        return Chunk(streams, entry[6], specs, shared, template, place, max(1, len(places)), tables)

    def parsed(self, entry: tuple[Any, ...]) -> tuple[Any, ...]:
        """Streams, columns, shared strings and ranks of a chunk, and an empty place for decoded maps."""
        if entry[0] in self.chunks:
            return self.chunks[entry[0]]
        offset, length = entry[0], entry[1]
        need(entry[15:] == (0, 0, 0), "reserved bytes of an entry")
        need(self.start <= offset and offset + length <= self.end and offset % 8 == 0, "chunk outside the file")
        kind, meta, data_start, data_length, end, crcs = _record(self.raw, offset)
        need(kind == 2 and end == offset + length and crcs == (entry[10], entry[11]), "chunk and index differ")
        chunk = _Table.root(meta)
        codes = (
            ("B", 0, 14),
            ("Q", 2, 2),
            ("I", 3, 6),
            ("i", 4, 8),
            ("i", 5, 9),
            ("q", 6, 3),
            ("q", 7, 4),
            ("Q", 10, 5),
        )
        need(all(chunk.scalar(field, code) == entry[place] for code, field, place in codes), "chunk and index differ")
        ranks = _ranks(chunk.structs(11, RANGE))
        need(sorted(set(ranks)) == ranks and bool(ranks) == bool(entry[13]), "ranks of a chunk")
        need(bool(ranks) or chunk.scalar(1, "i") == entry[7], "chunk and index differ")
        need(not ranks or chunk.scalar(1, "i") == ranks[0], "ranks of a chunk")
        streams: dict[tuple[int, int], tuple[Any, ...]] = {}
        position = data_start
        for stream in chunk.structs(8, STREAM):
            column, part, stored_length = stream[6], stream[8], stream[2]
            need((column, part) not in streams, "stream twice")
            streams[column, part] = (*stream, self.raw[position : position + stored_length])
            position += stored_length
        need(position == data_start + data_length, "streams and data differ")
        specs = dict(COLUMNS[entry[14]])
        names = set()
        for column in chunk.tables(9):
            column_id, kind_id, name = column.scalar(0, "H"), column.scalar(1, "B"), column.string(2)
            need(column_id >= 1 << 15 and "." in name.strip(".") and name not in names, "named column")
            names.add(name)
            if 0 < kind_id < len(TYPES):
                specs[column_id] = (name, TYPES[kind_id], TYPES[kind_id] not in ("u8", "u64", "bool"))
        digest = chunk.scalar(12, "Q").to_bytes(8, "little") + chunk.scalar(13, "Q").to_bytes(8, "little")
        shared = self.shared(digest) if any(digest) else []
        places = {rank: place for place, rank in enumerate(ranks)}
        stacked = bool(chunk.scalar(14, "B"))
        need(not stacked or (ranks and len(ranks) * entry[6] <= 1 << 20), "ranks of a stacked chunk")
        self.chunks[offset] = (streams, specs, shared, places, {}, stacked)
        return self.chunks[offset]

    def shared(self, digest: bytes) -> list[str]:
        """The strings of a payload that chunks share."""
        data = _payload(self.raw, self.payloads[digest])
        (count,) = struct.unpack_from("<I", data)
        lengths = struct.unpack_from(f"<{count}I", data, 4)
        texts, start = [], 4 + 4 * count
        for length in lengths:
            texts.append(data[start : start + length].decode("utf-8"))
            start += length
        need(start == len(data), "shared strings")
        return texts

    def add(self, rank: int, table_id: int, first_row: int, entry: Any, chunk: Chunk) -> None:
        """Appends the rows of a chunk to the table of a rank."""
        empty = {"num_rows": 0, "first_index": str(first_row), "columns": {}, "specs": {}, "types": {}}
        table = self.found.setdefault(rank, {}).setdefault(TABLES[table_id], empty)
        decoded, specs = chunk.columns()
        num_rows = entry[6]
        if chunk.place is None:
            start = self.parsed(entry)[3][rank] * num_rows
            decoded = {name: values[start : start + num_rows] for name, values in decoded.items()}
        for column_id, (name, kind, optional) in specs.items():
            table["specs"].setdefault(name, (kind, optional))
            need(table["specs"][name] == (kind, optional), "a named column of two types")
            if column_id >= 1 << 15:
                table["types"][name] = TYPE_NAMES[TYPES.index(kind)]
        for name, (kind, optional) in table["specs"].items():
            default = None if optional else DEFAULTS[kind]
            if name in decoded or name in table["columns"]:
                values = table["columns"].setdefault(name, [default] * table["num_rows"])
                values.extend(decoded.get(name, [default] * num_rows))
        table["num_rows"] += num_rows


__all__ = ["Refused", "read"]
