"""The invalid vectors: files that a reader must refuse, and files that a validator must find fault with.

Does not write them.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from building import HEADER, Broken, changed, chunk, one, stream, trace, units, written
from dense_vectors import dense_vectors
from invalid_roles import bomb_vectors, role_vectors

from prismtrace import ProcessGroup, TraceWriter
from prismtrace._generated.schema import Encoding, StreamPart
from prismtrace.container import FRAME, MAGIC
from prismtrace.metas import HeaderMeta, pack_header
from prismtrace.model import ColumnType, named_spec
from prismtrace.writer import payload_digest


def broken_index(**values: int) -> bytes:
    """A file whose index says something about its only chunk that is not so."""

    def change(entries: Any) -> None:
        for name, value in values.items():
            entries[name] = value

    return trace(chunk(stream(b"\x01\x02", column=1, count=2), num_rows=2), change_index=change)


def cut_vectors() -> Broken:
    """A file that ends inside each of its structures."""

    def fill(writer: TraceWriter) -> None:
        writer.set_metadata("key", "value")
        writer.add_group(ProcessGroup(5, ranks=(0, 1)))
        writer.add_payload(b"x" * 40)
        writer.add_units(0, {"kind": [1, 2], "start_ns": [5, 9000]})

    good = written(fill)
    names = {1: "header", 2: "chunk", 3: "payload", 4: "group", 5: "metadata", 6: "footer"}
    result: Broken = {
        "zero_bytes": ("unfinished", "nothing at all", b""),
        "cut_in_magic": ("unfinished", "five bytes", good[:5]),
        "cut_after_magic": ("truncated", "the magic bytes alone", good[:8]),
    }
    offset = 8
    while good[offset : offset + 4] == b"\xf6PRc":
        _, kind, _, _, meta_length, _, data_length, _, _ = FRAME.unpack_from(good, offset)
        name, error = names[kind], "truncated" if kind == 1 else "unfinished"
        data = offset + 32 + (meta_length + 7) // 8 * 8
        result[f"cut_in_{name}_frame"] = (error, f"cut in the frame of a record: {name}", good[: offset + 20])
        result[f"cut_in_{name}_meta"] = (
            error,
            f"cut in the meta section: {name}",
            good[: offset + 32 + meta_length // 2],
        )
        if data_length:
            result[f"cut_in_{name}_data"] = (error, f"cut in the data section: {name}", good[: data + data_length // 2])
        offset = data + (data_length + 7) // 8 * 8
        if kind != 6:
            result[f"cut_after_{name}"] = ("unfinished", f"cut after a whole record: {name}", good[:offset])
    result["cut_before_trailer"] = ("unfinished", "no trailer", good[:offset])
    result["cut_in_trailer"] = ("unfinished", "one byte is missing at the end", good[:-1])
    return result


def container_vectors() -> Broken:
    """Magic bytes, checksums, versions and places."""
    good = trace(chunk(stream(b"\x01\x02", column=1, count=2), num_rows=2))
    first = good.index(b"\xf6PRc", 16)
    footer = good.index(b"\xf6PRc", first + 4)
    payload = written(lambda w: w.add_payload(b"x" * 40))

    def header(**changes: Any) -> bytes:
        return trace(header=pack_header(HeaderMeta(**{**HEADER.__dict__, **changes})))

    def frame(**changes: int) -> bytes:
        """The first chunk's frame with some fields changed and a right checksum."""
        names = ("marker", "kind", "flags", "reserved", "meta_length", "meta_crc", "data_length", "data_crc", "crc")
        fields = dict(zip(names, FRAME.unpack_from(good, first), strict=True)) | changes
        head = FRAME.pack(*fields.values())[:28]
        return changed(good, first, head + struct.pack("<I", zlib.crc32(head)))

    def trailer(offset: int, length: int) -> bytes:
        head = struct.pack("<QQI", offset, length, 0)
        return good[:-32] + head + struct.pack("<I", zlib.crc32(head)) + MAGIC

    return {
        "no_trace": ("format", "another kind of file", b"{}\n" * 20),
        "first_byte": ("format", "the first byte lost its high bit", changed(good, 0, b"\x09")),
        "text_mode": ("format", "CR LF became LF on the way", good.replace(b"\r\n", b"\n")),
        "draft": ("version", "magic of the draft", changed(good, 5, b"\x00")),
        "future_major": ("version", "magic of format 2", changed(good, 5, b"\x02")),
        "header_major": ("version", "magic of format 1, header of format 2", header(version=(2, 0))),
        "required_feature": ("version", "a required feature that format 1.0 does not have", header(
            required_features=1 << 40)),
        "required_feature_in_footer": ("version", "the same in the footer", trace(required=1)),
        "frame_flags": ("version", "flags of a later version", frame(flags=1)),
        "frame_reserved": ("version", "reserved bytes of a frame", frame(reserved=1)),
        "frame_checksum": ("checksum", "a bit of a frame is flipped", changed(good, first + 16)),
        "header_checksum": ("checksum", "a bit of the header is flipped", changed(good, 50)),
        "meta_checksum": ("checksum", "a bit of a chunk header is flipped", changed(good, first + 40)),
        "stream_checksum": ("checksum", "a bit of a column is flipped", changed(good, footer - 8)),
        "payload_checksum": ("checksum", "a bit of a payload is flipped", changed(payload, payload.index(b"xxxx") + 9)),
        "footer_checksum": ("checksum", "a bit of the footer is flipped", changed(good, footer + 40)),
        "trailer_checksum": ("checksum", "a bit of the trailer is flipped", changed(good, len(good) - 30)),
        "trailer_place": ("format", "the trailer points to a chunk", trailer(first, len(good) - 32 - first)),
        "trailer_outside": ("format", "the trailer points past the file", trailer(1 << 40, 64)),
        "negative_world": ("format", "a world of -1 ranks", header(world_size=-1)),
        "no_header": ("format", "the first record is a chunk", good[:8] + good[first:]),
        "index_outside": ("format", "the index points past the end", broken_index(offset=1 << 40)),
        "index_unaligned": ("format", "the index points between records", broken_index(offset=first + 4)),
        "index_elsewhere": ("format", "the index points to the header", broken_index(offset=8)),
        "index_length": ("data", "index and chunk differ in length", broken_index(length=48)),
        "index_rows": ("data", "index and chunk differ in rows", broken_index(num_rows=1)),
        "index_rank": ("data", "index and chunk differ in rank", broken_index(rank=1)),
        "index_steps": ("data", "index and chunk differ in steps", broken_index(first_step=-5)),
        "index_reserved": ("data", "reserved bytes of an index entry", broken_index(reserved_2=1)),
        "index_negative_rank": ("format", "rank -1 without a role", broken_index(rank=-1)),
        "same_rows_twice": ("data", "two chunks with the same rows", trace(
            units({"kind": [1, 2]}), units({"kind": [1, 2]}, first_row=1))),
        "stream_lengths": ("data", "streams and data section differ in length", trace((
            chunk(stream(b"ab", column=1, count=2), num_rows=2)[0], [b"abc"]))),
    }  # fmt: skip


def stream_vectors() -> Broken:
    """Streams that do not fit themselves, each other or their column."""
    kind = stream(b"\x01\x02", column=1, count=2)
    label = stream(b"\x00\x05", column=23, count=2, encoding=Encoding.OFFSET)
    codes = stream(b"\x00\x00", column=23, count=2, encoding=Encoding.OFFSET)
    lengths = stream(b"\x01", column=0, count=1, part=StreamPart.STRING_LENGTHS)
    letter = stream(b"a", column=0, count=1, part=StreamPart.STRING_BYTES)
    validity = {"column": 4, "count": 1, "part": StreamPart.VALIDITY}
    end = {"column": 5, "encoding": Encoding.DIFFERENCE, "reference": 4}
    begin = {"column": 4, "encoding": Encoding.CONTINUED, "reference": 5}
    named = named_spec("test.value", ColumnType.INT64)
    value = stream(b"ab", column=32_768, count=2)

    def described(*specs: Any) -> bytes:
        return trace(chunk(value, num_rows=2, named=specs))

    def continued(other: dict[str, int], **changes: int) -> bytes:
        pair = stream(b"ab", count=2, **{**begin, **changes}), stream(b"cd", count=2, **other)
        return trace(chunk(*pair, num_rows=2))

    return {
        "unknown_encoding": ("version", "encoding 99", one(b"ab", encoding=99)),
        "unknown_compression": ("version", "compression 9", one(b"ab", compression=9)),
        "unknown_part": ("version", "stream part 99 in a known column", trace(chunk(kind, stream(
            b"ab", column=1, count=2, part=99), num_rows=2))),
        "stream_length": ("format", "bytes and number of values differ", one(b"abc")),
        "stream_reserved": ("format", "reserved bytes of a stream", one(b"ab", lap=1)),
        "stream_width": ("format", "values of three bytes", one(b"abcdef", width=3)),
        "scale_zero": ("format", "scale 0", one(b"ab", scale=0)),
        "shift_33": ("format", "a shift above 32", one(b"ab", shift=33)),
        "float_nan": ("format", "a tick that is no float32", one(struct.pack("<2i", 0x7F800000, 1), width=4, shift=32)),
        "float_too_large": ("format", "a float32 that is no int64", one(
            struct.pack("<2i", 0x7F000000, 1), width=4, scale=10**9, shift=32)),
        "stream_twice": ("data", "the same stream twice", trace(chunk(kind, kind, num_rows=2))),
        "too_few_values": ("data", "one value for two rows", one(b"a", count=1)),
        "validity_only": ("data", "validity of a column without values", one(b"\x01", **validity)),
        "validity_size": ("format", "validity of too many rows", trace(chunk(
            stream(b"ab", column=4, count=2), stream(b"\x03\x00", **{**validity, "count": 2}), num_rows=2))),
        "validity_past_end": ("format", "bits for rows that do not exist", trace(chunk(
            stream(b"ab", column=4, count=2), stream(b"\x07", **validity), num_rows=2))),
        "required_absent": ("data", "an absent value in a column that has none", trace(chunk(
            stream(b"a", column=1, count=1), stream(b"\x01", **{**validity, "column": 1}), num_rows=2))),
        "sentinel": ("data", "the value that stands for absent", one(struct.pack("<2q", 1, -(2**63)), width=8)),
        "too_wide": ("data", "300 in an 8-bit column", one(struct.pack("<2h", 1, 300), width=2, column=1)),
        "bool_two": ("data", "2 in a column of booleans", one(b"\x01\x02", column=15)),
        "code_outside": ("data", "a string that the dictionary lacks", trace(chunk(
            label, lengths, letter, num_rows=2))),
        "code_negative": ("data", "a negative index", trace(chunk(
            stream(b"\x00\xff", column=23, count=2), lengths, letter, num_rows=2))),
        "dictionary_code": ("data", "a code outside the stream's dictionary", one(
            struct.pack("<q", 5) + b"\x00\x01", encoding=Encoding.DICTIONARY, base=1)),
        "dictionary_size": ("format", "a dictionary of -1 values", one(b"", encoding=Encoding.DICTIONARY, base=-1)),
        "invalid_utf8": ("format", "a string that is not UTF-8", trace(chunk(codes, lengths, stream(
            b"\xff", column=0, count=1, part=StreamPart.STRING_BYTES), num_rows=2))),
        "string_lengths": ("data", "strings longer than their bytes", trace(chunk(codes, stream(
            b"\x05", column=0, count=1, part=StreamPart.STRING_LENGTHS), letter, num_rows=2))),
        "string_bytes_only": ("data", "string bytes without lengths", trace(chunk(codes, letter, num_rows=2))),
        "list_lengths": ("data", "lists longer than their elements", trace(chunk(stream(
            b"\x02\x02", column=26, count=2, part=StreamPart.LENGTHS), stream(
                b"abc", column=26, count=3), num_rows=2))),
        "list_without_lengths": ("data", "a list column without lengths", one(b"ab", column=26)),
        "lengths_of_no_list": ("data", "lengths of a column that has no lists", trace(chunk(
            kind, stream(b"ab", column=1, count=2, part=StreamPart.LENGTHS), num_rows=2))),
        "self_reference": ("data", "a column that refers to itself", one(b"ab", **{**end, "column": 4})),
        "absent_reference": ("data", "a difference to a column that is not there", one(b"ab", **end)),
        "reference_of_no_value": ("data", "a difference to rows without a value", trace(chunk(
            stream(b"a", column=4, count=1), stream(b"\x01", **validity), stream(b"ab", count=2, **end), num_rows=2))),
        "continued_alone": ("data", "rows that continue a column that is not there", one(b"ab", **begin)),
        "continued_by_values": ("data", "rows that continue a column of another encoding", continued({"column": 5})),
        "continued_by_another": ("data", "rows that continue a column which refers to another one", continued(
            {**end, "reference": 7, "column": 16}, reference=16)),
        "continued_in_other_ticks": ("data", "rows that continue a column of other ticks", continued(
            {**end, "scale": 1000, "shift": 2}, scale=1000, shift=3)),
        "name_without_owner": ("format", "a named column without an owner", described(
            named_spec("value", ColumnType.INT64))),
        "name_twice": ("format", "two named columns of one name", described(
            named, named_spec("test.value", ColumnType.INT64, column_id=32_769))),
        "named_id_low": ("format", "a named column with an id of the registry", described(
            named_spec("test.value", ColumnType.INT64, column_id=4))),
        "named_two_types": ("data", "one name with two types in one rank", trace(
            chunk(value, num_rows=2, named=(named,)),
            chunk(value, num_rows=2, first_row=2, named=(named_spec("test.value", ColumnType.INT32),)))),
        "shared_strings_missing": ("data", "shared strings that the file lacks", trace(
            chunk(codes, num_rows=2, strings=bytes(range(16))))),
        "shared_strings_sizes": ("data", "shared strings whose sizes do not add up", trace(
            chunk(codes, num_rows=2, strings=payload_digest(b"\x01\0\0\0\x09\0\0\0abc")),
            payloads=[b"\x01\0\0\0\x09\0\0\0abc"])),
    }  # fmt: skip


def invalid_vectors() -> Broken:
    """Name -> the kind of error, why, and the bytes."""
    parts = (cut_vectors, container_vectors, stream_vectors, role_vectors, bomb_vectors, dense_vectors)
    found: Broken = {}
    for part in parts:
        made = part()
        assert not found.keys() & made.keys()
        found |= made
    return found
