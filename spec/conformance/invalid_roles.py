"""The invalid vectors of roles, and small files that ask for much.

Does not write them.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import zstandard
from building import Broken, Chunk, changed, chunk, one, stream, trace

from prismtrace import ProcessGroup
from prismtrace._generated.schema import Compression, Encoding, StreamPart
from prismtrace.container import FRAME
from prismtrace.encoding import Stream
from prismtrace.entries import RankRange
from prismtrace.writer import payload_digest


def role_vectors() -> Broken:
    """Roles that are not there, and what ranks cannot say of them."""
    start = stream(b"\x01\x02", column=4, count=2)
    times = {"first_ns": 1, "last_ns": 2}
    role = chunk(start, num_rows=2, rank=-1, role=7, **times)
    map_part, shift = {"part": StreamPart.MAP}, {"part": StreamPart.SHIFT}

    def member(*streams: Any, **changes: Any) -> Chunk:
        return chunk(*streams, **{"num_rows": 2, "role": 7, **times, **changes})

    def with_map(raw: bytes, **changes: int) -> bytes:
        return trace(role, member(stream(raw, **{"column": 4, "count": len(raw), **map_part, **changes})))

    def with_ranks(*ranges: tuple[int, int, int], rank: int | None = None) -> bytes:
        ranks = tuple(RankRange(*item) for item in ranges)
        return trace(role, member(ranks=ranks, rank=ranks[0].first if rank is None else rank))

    def index_ranges(**values: int) -> bytes:
        def change(ranges: Any) -> None:
            for name, value in values.items():
                ranges[name] = value

        return trace(role, member(ranks=(RankRange(3, 2, 1),), rank=3), change_ranges=change)

    def longer(ranges: Any) -> None:
        ranges["num_ranks"] = 3

    def index_entry(**values: int) -> bytes:
        def change(entries: Any) -> None:
            for name, value in values.items():
                entries[name][1] = value

        return trace(role, member(ranks=(RankRange(3, 2, 1),), rank=3), change_index=change)

    label = chunk(stream(b"\x00\x00", column=23, count=2), stream(b"\x01", column=0, count=1, part=4),
                  stream(b"a", column=0, count=1, part=5), num_rows=2, rank=-1, role=7)  # fmt: skip
    return {
        "role_missing": ("data", "a rank of a role that the file lacks", trace(member())),
        "role_other_rows": ("data", "a rank with other rows than the role's chunk", trace(role, member(first_row=1))),
        "role_other_table": ("data", "a role of another table", trace(role, member(table=2))),
        "role_of_nobody": ("format", "rank -1 without a role", trace(chunk(start, num_rows=2, rank=-1))),
        "role_of_ranks": ("format", "a chunk of a role that lists ranks", trace(
            chunk(start, num_rows=2, rank=-1, role=7, ranks=(RankRange(-1, 1, 1),)))),
        "role_of_a_role": ("data", "a role that refers to a role", trace(
            chunk(stream(b"\x01\x02", column=4, count=2, encoding=Encoding.ROLE_DIFFERENCE), num_rows=2, rank=-1,
                  role=7), member())),
        "role_with_a_map": ("data", "a role with a map, which could only be of itself", trace(
            chunk(stream(b"\x01\x02", column=4, count=2, **map_part), num_rows=2, rank=-1, role=7), member())),
        "role_twice": ("data", "a role with the same rows twice", trace(role, role, member())),
        "map_without_role": ("data", "a map in a chunk without a role", one(b"\x01\x02", **map_part)),
        "map_of_nothing": ("data", "a map of a column that the role lacks", trace(
            role, member(stream(b"\x01\x02", column=6, count=2, **map_part)))),
        "map_size": ("data", "a map of half a value", with_map(b"\x01\x02\x03")),
        "map_empty": ("data", "a map of no values", with_map(b"")),
        "map_twice": ("data", "a map with a value twice", with_map(b"\x01\x01\x05\x06")),
        "map_and_values": ("data", "a map beside values", trace(role, member(start, stream(
            b"\x01\x02", column=4, count=2, **map_part)))),
        "map_of_strings": ("data", "a map of a column of strings", trace(label, member(
            stream(b"\x00\x00", column=23, count=2, **map_part), first_ns=0, last_ns=-1))),
        "map_to_sentinel": ("data", "a map to the value that stands for absent", with_map(
            struct.pack("<2q", 1, -(2**63)), width=8, count=2)),
        "map_of_differences": ("data", "a map that is encoded as differences", with_map(
            b"\x01\x02", encoding=Encoding.ROLE_DIFFERENCE)),
        "shift_size": ("data", "two shifts for one rank", with_map(b"\x01\x02", **shift)),
        "difference_with_validity": ("data", "differences to the role beside a validity", trace(role, member(
            stream(b"\x01", column=4, count=1, encoding=Encoding.ROLE_DIFFERENCE),
            stream(b"\x01", column=4, count=1, part=StreamPart.VALIDITY)))),
        "ranks_fall": ("format", "ranks of a chunk that do not rise", with_ranks((5, 1, 1), (3, 1, 1))),
        "ranks_overlap": ("data", "a rank twice in one chunk", with_ranks((3, 3, 1), (5, 1, 1))),
        "ranks_other_first": ("format", "a chunk of ranks of which `rank` is not the first", with_ranks(
            (3, 2, 1), rank=4)),
        "ranks_bomb": ("limit", "2 billion ranks of one chunk", with_ranks((0, 2**31 - 1, 1))),
        "ranks_bomb_in_index": ("format", "4 billion ranks in the index", index_ranges(num_ranks=2**32 - 1)),
        "ranks_outside": ("data", "the index names a rank that the chunk does not have", index_ranges(num_ranks=3)),
        "ranks_outside_without_role": ("data", "the same in a chunk without a role", trace(
            chunk(start, num_rows=2, ranks=(RankRange(3, 2, 1),), rank=3, **times), change_ranges=longer)),
        "ranges_outside": ("format", "the index names ranges that it does not have", index_entry(num_ranges=9)),
        "ranks_stride": ("format", "ranks with a stride of 0", index_ranges(stride=0)),
        "index_role": ("data", "index and chunk differ in role", index_entry(role=8)),
    }  # fmt: skip


def bomb_vectors() -> Broken:
    """Small files that ask for much."""
    zeros = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    huge = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2))
    packed = {"compression": Compression.ZSTD}
    nothing = trace()
    footer = nothing.rindex(b"\xf6PRc")

    def zstd(raw: bytes, **sizes: int) -> bytes:
        plain = Stream(0, 2, len(raw), 2, zlib.crc32(raw), 1, 4, 0, 1, 1, Compression.ZSTD, 1)
        return trace(chunk((plain._replace(**sizes), raw), num_rows=2))

    def frame(**changes: int) -> bytes:
        """The footer's frame with some sizes changed and a right checksum."""
        names = ("marker", "kind", "flags", "reserved", "meta_length", "meta_crc", "data_length", "data_crc", "crc")
        fields = dict(zip(names, FRAME.unpack_from(nothing, footer), strict=True)) | changes
        head = FRAME.pack(*fields.values())[:28]
        return changed(nothing, footer, head + struct.pack("<I", zlib.crc32(head)))

    def vector(meta: bytes) -> bytes:
        """The footer with the length of its first vector changed to 2**30."""
        position = struct.unpack_from("<I", meta)[0]
        vtable = position - struct.unpack_from("<i", meta, position)[0]
        field = position + struct.unpack_from("<H", meta, vtable + 4 + 2 * 2)[0]
        start = field + struct.unpack_from("<I", meta, field)[0]
        return changed(meta, start, struct.pack("<I", 1 << 30))

    lengths = stream(
        b"", column=26, count=2, encoding=Encoding.CONSTANT, width=0, base=1 << 40, part=StreamPart.LENGTHS
    )
    return {
        "rows_bomb": ("limit", "4 billion rows of a constant", trace(chunk(stream(
            b"", column=1, count=2**32 - 1, encoding=Encoding.CONSTANT, width=0), num_rows=2**32 - 1))),
        "values_bomb": ("limit", "4 billion values of a constant", one(
            b"", count=2**32 - 1, encoding=Encoding.CONSTANT, width=0)),
        "stream_bomb": ("limit", "a stream of 4 GiB", one(b"", count=2**29 - 1, raw_length=2**32 - 8, width=8)),
        "zstd_bomb": ("format", "a frame that decompresses to more than the stream says", zstd(zeros)),
        "zstd_short": ("format", "a frame that decompresses to less than the stream says", zstd(
            zstandard.ZstdCompressor().compress(b"a"))),
        "zstd_without_size": ("format", "a frame that does not state its size", zstd(huge)),
        "zstd_noise": ("format", "bytes that are no frame", zstd(b"noise noise")),
        "payload_zstd_bomb": ("format", "a payload that decompresses to more than it says", changed_payload(zeros)),
        "payload_size": ("format", "a raw payload of another size than the index says", changed_payload(b"abc", 1)),
        "list_bomb": ("data", "lists of 2^40 elements", trace(chunk(
            lengths, stream(b"", column=26, count=0), num_rows=2))),
        "vector_bomb": ("format", "an index of 2^30 chunks in a footer of 200 bytes", trace(
            chunk(stream(b"\x01", column=1, count=1), num_rows=1), change_footer=vector)),
        "meta_bomb": ("limit", "a meta section of 3 GiB", frame(meta_length=3 << 30)),
        "data_bomb": ("limit", "a data section of 2^50 bytes", frame(data_length=1 << 50)),
        "group_bomb": ("format", "a group of 2^31 ranks", group_bomb()),
        "compressed_constant": ("format", "a constant with bytes", one(
            zeros, encoding=Encoding.CONSTANT, width=0, raw_length=1 << 20, **packed)),
    }  # fmt: skip


def group_bomb() -> bytes:
    """A group whose only range has been made larger."""
    raw = trace(groups=(ProcessGroup(5, ranks=tuple(range(99, 199))),))
    small = struct.pack("<iIi", 99, 100, 1)
    assert raw.count(small) == 1
    return resealed(changed(raw, raw.index(small), struct.pack("<iIi", 99, 1 << 31, 1)))


def changed_payload(stored: bytes, compression: int = Compression.ZSTD) -> bytes:
    """A payload of two bytes, whose stored bytes say something else."""
    raw = bytearray(trace(payloads=[stored]))
    digest = payload_digest(stored)
    entry = raw.rindex(digest)
    struct.pack_into("<Q", raw, entry + 40, 2)
    raw[entry + 52] = compression
    return resealed(bytes(raw))


def resealed(raw: bytes) -> bytes:
    """The file with right checksums of its footer."""
    footer = raw.rindex(b"\xf6PRc")
    meta_length = FRAME.unpack_from(raw, footer)[4]
    raw = changed(raw, footer + 12, struct.pack("<I", zlib.crc32(raw[footer + 32 : footer + 32 + meta_length])))
    return changed(raw, footer + 28, struct.pack("<I", zlib.crc32(raw[footer : footer + 28])))
