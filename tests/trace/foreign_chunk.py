"""The columns of one chunk: streams, encodings, dictionaries, and what a rank has of its role.

Belongs to the second reader; does not know files, records or flatbuffers, and imports nothing of the library.
"""

from __future__ import annotations

import struct
import zlib
from itertools import accumulate
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


_NEEDED = (1, 3, 4, 5, 9, 10, 11, 12)


def signed(number: int) -> int:
    """A number modulo 2**64 as a signed one."""
    number &= MASK
    return number - (1 << 64) if number >> 63 else number


def value_of(number: int, scale: int, shift: int) -> int:
    """What a number of ticks stands for, modulo 2**64."""
    number = signed(number)
    if shift == 0:
        return number * scale & MASK
    if shift == 32:
        need(abs(number) < 0x7F800000, "no float32")
        (bits,) = struct.unpack("<f", struct.pack("<I", abs(number) | (number < 0) << 31))
        value = round(bits * scale)
        need(-(1 << 63) <= value < 1 << 63, "a float outside of int64")
        return value & MASK
    half = 1 << shift - 1
    value, rest = divmod(number * scale, 1 << shift)
    return value + (rest > half or (rest == half and value & 1)) & MASK


def ticks_of(value: int, scale: int, shift: int) -> int:
    """The nearest number of ticks of a value."""
    if shift == 32:
        (bits,) = struct.unpack("<i", struct.pack("<f", float(value) / scale))
        return -(bits & 0x7FFFFFFF) if bits < 0 else bits
    whole, part = divmod(value, scale)
    return (whole << shift) + ((part << shift) + scale // 2) // scale


class Chunk:
    def __init__(
        self, streams: dict[tuple[int, int], tuple[Any, ...]], num_rows: int, specs: Any, shared: list[str],
        template: Chunk | None, place: int | None, num_ranks: int, tables: dict[int, list[int]],
    ) -> None:  # fmt: skip
        """`place` is None for the rows of all ranks of a stacked chunk."""
        self.streams, self.num_rows, self.specs, self.shared = streams, num_rows, specs, shared
        self.template, self.place, self.num_ranks, self.tables = template, place, num_ranks, tables
        self.times = num_ranks if place is None else 1
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
            values = self.template.column(spec) if self.template else None
            return None if values is None else values * self.times
        if column in self.made:
            return self.made[column]
        parts = self.parts[column]
        need(parts <= {1, 2, 3, 7, 8, 9}, "unknown part")
        need(9 not in parts or (1 in parts and self.streams[column, 1][9] in (4, 5, 8, 9)), "bits of what")
        need(9 not in parts or kind in ("u8", "i32", "i64", "u64", "bool"), "bits of a column of another type")
        if parts & {7, 8} or 1 not in parts or self.streams[column, 1][9] == 8:
            need(len(parts - {9}) == 1 and parts <= {1, 7, 8, 9}, "streams that do not go together")
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
            once = role[0].rows(role[1])
            return [row + turn * role[0].num_rows for turn in range(self.times) for row in once]
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
            return role[0].resolved(role[1]) * self.times if role else []
        if 1 in parts:
            return self.integers(column, 1)
        role = self.of_role(column)
        need(role is not None, "no such column of the role")
        before = role[0].resolved(role[1]) if role else []
        if column not in self.tables:  # of many ranks: decoded once
            self.tables[column] = self.integers(column, 7 if 7 in parts else 8)
        table = self.tables[column]
        if 8 in parts:
            need(len(table) == self.num_ranks, "number of shifts")
            return [value + table[place] & MASK for place in self.places() for value in before]
        num = len(table) // (1 + self.num_ranks)
        need(num > 0 and num * (1 + self.num_ranks) == len(table), "size of a map")
        need(len(set(table[:num])) == num, "a map with a value twice")
        mapped = []
        for place in self.places():
            pairs = {table[i]: table[num + i * self.num_ranks + place] for i in range(num)}
            mapped += [pairs.get(value, value) for value in before]
        return mapped

    def places(self) -> list[int]:
        """The ranks of the chunk that this is about, by place."""
        return list(range(self.num_ranks)) if self.place is None else [self.place]

    def raw(self, stream: tuple[Any, ...]) -> bytes:
        num_values, raw_length, crc, scale, encoding, compression, width, shift = (stream[i] for i in _NEEDED)
        need(zlib.crc32(stream[-1]) == crc, "stream checksum")
        need(scale != 0 and shift <= 32 and stream[13] == 0, "stream")
        need(stream[14] == 0 or (stream[9] in (4, 5, 8, 9) and stream[8] == 1 and stream[14] < num_values), "lap")
        need(1 <= encoding <= 9 and width in ((0,) if encoding == 2 else (1, 2, 4, 8, 16)), "encoding")
        dictionary = stream[0] * 8 if encoding == 6 else 0
        need(raw_length == (0 if encoding == 2 else num_values * width + dictionary), "stream length")
        need(num_values * 8 <= 1 << 28, "limit")
        return expand(stream[-1], compression, raw_length)

    def numbers(self, stream: tuple[Any, ...]) -> list[int]:
        """The stored numbers: signed for PLAIN, SHUFFLED and differences, else unsigned."""
        raw = self.raw(stream)
        count, encoding, width = (stream[i] for i in (1, 9, 11))
        body = raw[stream[0] * 8 :] if encoding == 6 else raw
        if encoding == 1:
            return [int.from_bytes(body[i * width : (i + 1) * width], "little", signed=True) for i in range(count)]
        if (stream[6], 9) in self.streams and encoding in (4, 5, 8, 9):
            return self.without_laps(self.from_bits(raw, stream), stream[14])
        planes = [body[i * count : (i + 1) * count] for i in range(width)]
        numbers = [
            int.from_bytes(bytes(plane[i] for plane in planes), "little", signed=encoding == 7) for i in range(count)
        ]
        return self.without_laps(numbers, stream[14]) if encoding in (4, 5, 8, 9) else numbers

    def from_bits(self, lengths: bytes, stream: tuple[Any, ...]) -> list[int]:
        """The numbers of which a stream has the lengths."""
        other = self.streams[stream[6], 9]
        need(stream[11] == 1 and other[9] == other[11] == 1, "bits")
        data = self.raw(other)
        need(max(lengths, default=0) <= 64, "a number of too many bits")
        need(len(data) == (sum(max(length - 1, 0) for length in lengths) + 7) // 8, "number of bits")
        every, numbers = int.from_bytes(data, "little"), []
        for length in lengths:
            top = 1 << max(length - 1, 0)
            numbers.append(every & (top - 1) | top if length else 0)
            every >>= max(length - 1, 0)
        return numbers

    @staticmethod
    def without_laps(numbers: list[int], lap: int) -> list[int]:
        """Signed numbers, each with the one a lap before added."""
        signed_numbers = [(n >> 1) ^ -(n & 1) for n in numbers]
        for i in range(lap, len(numbers) if lap else 0):
            signed_numbers[i] += signed_numbers[i - lap]
        return signed_numbers

    def integers(self, column: int, part: int) -> list[int]:
        """Values modulo 2**64."""
        stream = self.streams[column, part]
        base, count, scale, reference, encoding, shift = (stream[i] for i in (0, 1, 5, 7, 9, 12))
        if encoding == 2:
            self.raw(stream)
            return [value_of(base, scale, shift)] * count
        numbers = self.numbers(stream)
        if encoding == 3:
            numbers = [number + base for number in numbers]
        elif encoding == 4:
            numbers = [base + total for total in accumulate(numbers)]
        elif encoding == 6:
            distinct = struct.unpack_from(f"<{base}q", self.raw(stream))
            numbers = [distinct[number] for number in numbers]
        elif encoding in (5, 8):
            need(part == 1, "a difference that is no value")
            near = self.near(column, reference) if encoding == 5 else self.near_role(column)
            need(len(near) == count, "number of differences")
            pairs = list(zip(near, numbers, strict=True))
            if shift == 0:
                return [value + scale * number & MASK for value, number in pairs]
            numbers = [ticks_of(signed(value), scale, shift) + number for value, number in pairs]
        elif encoding == 9:
            need(part == 1, "a continuation that is no value")
            lengths = self.lengths(column, reference, scale, shift)
            need(len(lengths) == count, "number of lengths")
            numbers = [
                base + total for total in accumulate(n + d for n, d in zip(numbers, [0, *lengths], strict=False))
            ]
        return [value_of(number, scale, shift) for number in numbers]

    def near(self, column: int, reference: int) -> list[int]:
        """The values of another column in the rows in which this one has a value."""
        need(reference < column and self.specs[reference][1] == "i64", "reference")
        values = dict(zip(self.rows(reference), self.resolved(reference), strict=True))
        return [values[row] for row in self.rows(column)]

    def near_role(self, column: int) -> list[int]:
        role = self.of_role(column)
        need(role is not None, "difference to a role that is not there")
        return role[0].resolved(role[1]) * self.times if role else []

    def lengths(self, column: int, reference: int, scale: int, shift: int) -> list[int]:
        """Ticks from each value of a column to that of the column which refers to it; 0 where that has none."""
        other = self.streams[reference, 1]
        need(other[9] == 5 and other[7] == column and self.specs[reference][1] == "i64", "continuation")
        rows, numbers = self.rows(reference), self.numbers(other)
        need(len(rows) == len(numbers), "number of values")
        if (other[5], other[12]) != (scale, shift):
            need(other[12] == 0 and shift != 32, "continuation of other ticks")
            numbers = [ticks_of(number * other[5], scale, shift) for number in numbers]
        found, mine = dict(zip(rows, numbers, strict=True)), self.rows(column)
        need(set(rows) <= set(mine), "an end without a start")
        return [found.get(row, 0) for row in mine]

    def typed(self, column: int, kind: str, optional: bool) -> list[Any]:
        if kind == "f64":
            return self.floats(column, optional)
        unsigned = self.resolved(column)
        if kind == "u64":
            return [str(value) for value in unsigned]
        values = [signed(value) for value in unsigned]
        if kind in ("string", "digest"):
            dictionary = self.strings() if kind == "string" else self.digests()
            need(all(value >= 0 for value in values), "code")
            return [dictionary[value] for value in values]
        low, high = {"u8": (0, 255), "bool": (0, 1), "i32": (-(1 << 31), (1 << 31) - 1)}.get(kind, (-(1 << 63), MASK))
        absent = low if optional else low - 1
        need(all(low <= value <= high and value != absent for value in values), "value out of range")
        if kind == "bool":
            return [bool(value) for value in values]
        return [str(value) for value in values] if kind == "i64" else values

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
        need(self.streams[0, 5][9] == self.streams[0, 5][11] == 1, "string dictionary")
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
        texts = [str(signed(value)) for value in values]
        lists, start = [], 0
        for length in lengths:
            lists.append(texts[start : start + length])
            start += length
        return lists
