"""The columns of one chunk: streams, encodings, dictionaries, and what a rank has of its role.

Belongs to the second reader; does not know files, records or flatbuffers, and imports nothing of the library.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import zstandard

MASK = (1 << 64) - 1
TYPES = ("", "u8", "i32", "i64", "u64", "f64", "bool", "string", "digest", "list")
TYPE_NAMES = ("", "UINT8", "INT32", "INT64", "UINT64", "FLOAT64", "BOOL", "STRING", "DIGEST", "LIST_INT64")


class Refused(Exception):
    """The bytes are not a trace that this reader reads."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


def expand(stored: bytes, compression: int, raw_length: int) -> bytes:
    need(compression in (1, 2), "compression")
    need(raw_length <= 1 << 28, "limit")
    data = stored
    if compression == 2:
        need(zstandard.get_frame_parameters(stored).content_size == raw_length, "zstd content size")
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_length)
    need(len(data) == raw_length, "length")
    return data


class Chunk:
    def __init__(
        self, streams: dict[tuple[int, int], tuple[Any, ...]], num_rows: int, specs: Any, shared: list[str],
        template: Chunk | None, place: int, num_ranks: int,
    ) -> None:  # fmt: skip
        self.streams, self.num_rows, self.specs, self.shared = streams, num_rows, specs, shared
        self.template, self.place, self.num_ranks = template, place, num_ranks
        self.made: dict[int, Any] = {}
        self.parts: dict[int, set[int]] = {}
        for column, part in streams:
            self.parts.setdefault(column, set()).add(part)

    def columns(self) -> tuple[dict[str, list[Any]], dict[int, tuple[str, str, bool]]]:
        """Name -> values of all rows, and the description of the columns."""
        specs = dict(self.specs)
        if self.template:
            names = {name for name, _, _ in specs.values()}
            more = [spec for spec in self.template.specs.values() if spec[0] not in names]
            specs |= {(1 << 20) + number: spec for number, spec in enumerate(more)}
        found = {column: self.column(spec) for column, spec in specs.items()}
        return {specs[c][0]: v for c, v in found.items() if v is not None}, specs

    def id_of(self, name: str) -> int | None:
        return next((column for column, spec in self.specs.items() if spec[0] == name and column in self.parts), None)

    def column(self, spec: tuple[str, str, bool]) -> list[Any] | None:
        """The values of all rows; None for a column that neither the chunk nor its role has."""
        name, kind, optional = spec
        column = self.id_of(name)
        if column is None:
            return self.template.column(spec) if self.template else None
        if column in self.made:
            return self.made[column]
        parts = self.parts[column]
        need(parts <= {1, 2, 3, 7, 8}, "unknown part")
        if parts & {7, 8} or 1 not in parts or self.streams[column, 1][9] == 8:
            need(len(parts) == 1 and parts <= {1, 7, 8}, "streams that do not go together")
            need(kind in ("u8", "i32", "i64", "u64", "bool"), "type of a column that refers to its role")
            need(self.template is not None and self.template.id_of(name) is not None, "no such column of the role")
        else:
            need((3 in parts) == (kind == "list"), "lengths")
        need(optional or (column, 2) not in self.streams, "validity of a required column")
        rows = self.rows(column)
        values = self.lists(column) if kind == "list" else self.typed(column, kind, optional)
        need(len(values) == len(rows), "number of values")
        full: list[Any] = [None] * self.num_rows
        for row, value in zip(rows, values, strict=True):
            full[row] = value
        self.made[column] = full
        return full

    def of_role(self, column: int) -> tuple[Chunk, int] | None:
        """The role's chunk and its id of a column."""
        other = self.template.id_of(self.specs[column][0]) if self.template else None
        if self.template is None or other is None:
            return None
        need(self.template.specs[other] == self.specs[column], "type of the role's column")
        return self.template, other

    def rows(self, column: int) -> list[int]:
        own = self.streams.get((column, 1)) if self.id_of(self.specs[column][0]) == column else None
        if (own is None or own[9] == 8) and (role := self.of_role(column)):
            return role[0].rows(role[1])
        if (column, 2) not in self.streams:
            return list(range(self.num_rows))
        stream = self.streams[column, 2]
        bits = self.raw(stream)
        need(stream[9] == 1 and len(bits) == (self.num_rows + 7) // 8, "validity")
        rows = [i for i in range(8 * len(bits)) if bits[i // 8] >> (i % 8) & 1]
        need(not rows or rows[-1] < self.num_rows, "validity past the end")
        return rows

    def resolved(self, column: int) -> list[int]:
        """Values modulo 2**64 of the rows that have one, those of the role included."""
        parts = self.parts.get(column, set())
        if not parts & {1, 7, 8}:
            role = self.of_role(column)
            need(role is not None, "no values")
            return role[0].resolved(role[1]) if role else []
        if 1 in parts:
            return self.integers(column, 1)
        role = self.of_role(column)
        need(role is not None, "no such column of the role")
        before = role[0].resolved(role[1]) if role else []
        table = self.integers(column, 7 if 7 in parts else 8)
        if 8 in parts:
            need(len(table) == self.num_ranks, "number of shifts")
            return [value + table[self.place] & MASK for value in before]
        num = len(table) // (1 + self.num_ranks)
        need(num > 0 and num * (1 + self.num_ranks) == len(table), "size of a map")
        pairs = {table[i]: table[num + i * self.num_ranks + self.place] for i in range(num)}
        need(len(pairs) == num, "a map with a value twice")
        return [pairs.get(value, value) for value in before]

    def raw(self, stream: tuple[Any, ...]) -> bytes:
        _, num_values, _, raw_length, crc, scale, _, _, _, encoding, compression, width, reserved, stored = stream
        need(zlib.crc32(stored) == crc, "stream checksum")
        need(scale != 0 and reserved == 0, "stream")
        dictionary = stream[0] * 8 if encoding == 6 else 0
        need(raw_length == (0 if encoding == 2 else num_values * width + dictionary), "stream length")
        return expand(stored, compression, raw_length)

    def integers(self, column: int, part: int) -> list[int]:
        """Values modulo 2**64."""
        stream = self.streams[column, part]
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
        elif encoding == 8:
            role = self.of_role(column)
            need(role is not None and part == 1, "difference to a role that is not there")
            base_values = role[0].resolved(role[1]) if role else []
            need(len(base_values) == count, "number of differences")
            pairs = zip(base_values, numbers, strict=True)
            return [near + scale * ((n >> 1) ^ -(n & 1)) & MASK for near, n in pairs]
        elif encoding == 5:
            need(reference < column and part == 1, "reference")
            need(self.specs[reference][1] == "i64", "reference")
            near = dict(zip(self.rows(reference), self.resolved(reference), strict=True))
            rows = self.rows(column)
            numbers = [near[r] + scale * ((n >> 1) ^ -(n & 1)) for r, n in zip(rows, numbers, strict=True)]
            return [number & MASK for number in numbers]
        elif encoding == 6:
            numbers = [struct.unpack_from("<q", head, 8 * number)[0] for number in numbers]
        elif encoding == 7:
            numbers = [number - (1 << 8 * width) if number >> (8 * width - 1) else number for number in numbers]
        else:
            need(encoding == 1, "encoding")
        return [number * scale & MASK for number in numbers]

    def typed(self, column: int, kind: str, optional: bool) -> list[Any]:
        if kind == "f64":
            return self.floats(column, optional)
        values = self.resolved(column)
        if kind == "u64":
            return [str(value) for value in values]
        signed = [value - (1 << 64) if value >> 63 else value for value in values]
        if kind in ("string", "digest"):
            dictionary = self.strings() if kind == "string" else self.digests()
            need(all(value >= 0 for value in signed), "code")
            return [dictionary[value] for value in signed]
        low, high = {"u8": (0, 255), "bool": (0, 1), "i32": (-(1 << 31), (1 << 31) - 1)}.get(kind, (-(1 << 63), MASK))
        absent = low if optional else low - 1
        need(all(low <= value <= high and value != absent for value in signed), "value out of range")
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
        if (0, 4) not in self.streams and (0, 5) not in self.streams:
            return self.shared
        lengths, data = self.integers(0, 4), self.raw(self.streams[0, 5])
        need(sum(lengths) == len(data), "string lengths")
        texts, start = [], 0
        for length in lengths:
            texts.append(data[start : start + length].decode("utf-8"))
            start += length
        return [*self.shared, *texts]

    def digests(self) -> list[str]:
        data = self.raw(self.streams[0, 6]) if (0, 6) in self.streams else b""
        return [data[i : i + 16].hex() for i in range(0, len(data), 16)]

    def lists(self, column: int) -> list[list[str]]:
        lengths, values = self.integers(column, 3), self.integers(column, 1)
        need(sum(lengths) == len(values), "list lengths")
        signed = [str(value - (1 << 64) if value >> 63 else value) for value in values]
        lists, start = [], 0
        for length in lengths:
            lists.append(signed[start : start + length])
            start += length
        return lists
