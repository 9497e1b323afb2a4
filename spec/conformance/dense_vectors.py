"""The vectors of what format 1.1 added: stacked chunks, bits and laps, right and wrong.

Does not write them.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from building import HEADER, Broken, Chunk, Streams, chunk, shuffled, stream, trace

from prismtrace import TraceWriter, compact
from prismtrace._generated.schema import Encoding, StreamPart
from prismtrace.bits import pack
from prismtrace.entries import RankRange
from prismtrace.metas import DENSE, pack_header

_HEADER = pack_header(replace(HEADER, version=(1, 1), required_features=DENSE))
THREE = (RankRange(3, 2, 4), RankRange(9, 1, 1))
DELTA = {"encoding": Encoding.DELTA}


def dense(*chunks: Chunk) -> bytes:
    """A finished file with the feature bit."""
    return trace(*chunks, header=_HEADER, required=DENSE)


def stacked(*streams: Streams, **changes: Any) -> Chunk:
    """A stacked chunk of two rows of the ranks 3, 7 and 9."""
    return chunk(*streams, **{"num_rows": 2, "ranks": THREE, "rank": 3, "stacked": True, **changes})


def in_bits(numbers: list[int], *, column: int, **changes: int) -> tuple[Streams, Streams]:
    """Signed numbers as lengths and bits."""
    values = np.array(numbers, np.int64)
    lengths, bits = pack(((values << 1) ^ (values >> 63)).view(np.uint64))
    changes = {**DELTA, **changes}
    own = stream(lengths, column=column, count=len(numbers), **changes)
    return own, stream(bits, column=column, count=len(bits), part=StreamPart.BITS)


def with_a_role() -> bytes:
    """A role, and ranks with a map, a shift, values, lists, differences, and columns of which they have nothing."""
    times = stream(b"\x0a\x14", column=4, count=2)
    role = chunk(
        times, stream(b"\x01\x02", column=7, count=2), stream(b"\x02", column=12, count=1),
        stream(b"\x02", column=12, count=1, part=StreamPart.VALIDITY), stream(b"\x05\x06", column=16, count=2),
        num_rows=2, rank=-1, role=7, first_ns=10, last_ns=20,
    )  # fmt: skip
    body = stacked(
        stream(b"\x01\x02\x03", column=4, count=3, part=StreamPart.SHIFT),
        stream(shuffled([2, 1, 4, 3, 6, 5], 1), column=5, count=6, encoding=Encoding.DIFFERENCE, reference=4),
        stream(b"\x01\x0a\x0b\x0c", column=7, count=4, part=StreamPart.MAP),
        *in_bits([5, 1000, -3], column=12, encoding=Encoding.ROLE_DIFFERENCE),
        stream(b"\x33", column=20, count=1, part=StreamPart.VALIDITY),
        stream(b"\x01\x02\x03\x04", column=20, count=4),
        stream(b"\x00\x01\x01\x00\x00\x01", column=23, count=6),
        stream(b"\x01\x02", column=0, count=2, part=StreamPart.STRING_LENGTHS),
        stream(b"abb", column=0, count=3, part=StreamPart.STRING_BYTES),
        stream(b"\x01\x00\x02\x00\x00\x01", column=26, count=6, part=StreamPart.LENGTHS),
        stream(b"\x04\x05\x06\x07", column=26, count=4),
        role=7, first_ns=11, last_ns=23,
    )  # fmt: skip
    return dense(role, body)


def in_laps() -> bytes:
    """Every encoding that may have laps, as bytes and as bits, with numbers of all lengths."""
    numbers = [0, 1, -1, 2**40, -(2**62), 5, -(2**63), 2**63 - 1]
    many = {"count": 8, "width": 8}
    wide = shuffled([(n << 1 ^ n >> 63) % 2**64 for n in numbers], 8)
    return dense(
        chunk(stream(wide, column=11, encoding=Encoding.DELTA, lap=3, **many), num_rows=8),
        chunk(
            *in_bits([7, 1, 2, 0, 0, 1, 0, 3], column=4, encoding=Encoding.CONTINUED, reference=5, lap=2),
            *in_bits([90, 80, 1, -1, 0, 2, 0, 0], column=5, encoding=Encoding.DIFFERENCE, reference=4, lap=2, scale=10),
            *in_bits(numbers, column=14), *in_bits([0] * 8, column=16, lap=7), num_rows=8, rank=1,
            first_ns=7, last_ns=6883,
        ),
    )  # fmt: skip


def compacted() -> bytes:
    """What `compact` makes of ranks with few rows: some of one structure with their own times, some alone."""

    def rows(rank: int) -> dict[str, Any]:
        start = 1000 * rank + np.cumsum(np.arange(12) % 4 * 100 + rank * np.arange(12) % 7)
        kind = np.array([1, 1, 2, 5] * 3, np.uint8) if rank < 6 else np.array([1, 2, 5, rank] * 3, np.uint8)
        return {
            "kind": kind, "step": np.repeat([1, 2, 3], 4), "start_ns": start, "end_ns": start + 40 + rank % 3,
            "group_id": np.where(kind == 2, 5 + rank // 4, 0).astype(np.uint64), "stage": np.full(12, rank // 4),
            "label": [None if k == 5 else f"kind {k}" for k in kind.tolist()],
        }  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder) / "plain.prism", Path(folder) / "small.prism"
        with TraceWriter(plain, world_size=9) as writer:
            for rank in range(9):
                writer.add_units(rank, rows(rank))
        compact(plain, small)
        return small.read_bytes()


def dense_vectors() -> Broken:
    """What readers of 1.1 refuse."""
    start = stream(b"\x01\x02\x03\x04\x05\x06", column=4, count=6)
    times = {"first_ns": 1, "last_ns": 6}
    lengths, bits = in_bits([1, 100, -7], column=11)

    def three(*streams: Streams) -> bytes:
        return dense(chunk(*streams, num_rows=3))

    def edited(item: Streams, **changes: int) -> Streams:
        return item[0]._replace(**changes), item[1]

    return {
        "stacked_without_ranks": ("format", "a stacked chunk without ranks", dense(
            chunk(start, num_rows=6, stacked=True, **times))),
        "stacked_role": ("format", "a stacked chunk of a role", dense(
            chunk(start, num_rows=6, rank=-1, role=7, stacked=True, **times), chunk(num_rows=6, role=7, **times))),
        "stacked_rows": ("data", "a stacked chunk with the values of one rank", dense(
            stacked(stream(b"\x01\x02", column=4, count=2), first_ns=1, last_ns=2))),
        "stacked_bomb": ("limit", "a stacked chunk of 2^21 rows", dense(chunk(
            num_rows=2**20, ranks=(RankRange(0, 2, 1),), stacked=True))),
        "stacked_bomb_of_ranks": ("limit", "a stacked chunk of a million ranks", dense(chunk(
            num_rows=2, ranks=(RankRange(0, 2**20, 1),), stacked=True))),
        "stacked_map": ("data", "a map without a role in a stacked chunk", dense(
            stacked(stream(b"\x01\x02\x03\x04", column=7, count=4, part=StreamPart.MAP)))),
        "bits_too_few": ("format", "a byte of bits less than the lengths say", three(
            lengths, stream(bits[1][:-1], column=11, count=len(bits[1]) - 1, part=StreamPart.BITS))),
        "bits_too_many": ("format", "a byte of bits more", three(
            lengths, stream(bits[1] + b"\0", column=11, count=len(bits[1]) + 1, part=StreamPart.BITS))),
        "bits_of_65": ("format", "a number of 65 bits", three(
            stream(b"\x01\x41\x01", column=11, count=3, **DELTA),
            stream(bytes(8), column=11, count=8, part=StreamPart.BITS))),
        "bits_alone": ("data", "bits without lengths", three(bits)),
        "bits_of_offsets": ("data", "bits beside numbers that are no differences", three(
            edited(lengths, encoding=Encoding.OFFSET), bits)),
        "bits_of_wide_lengths": ("format", "lengths of two bytes", three(
            stream(bytes(6), column=11, count=3, width=2, **DELTA), stream(b"", column=11, count=0, part=9))),
        "bits_shuffled": ("data", "bits in another encoding", three(
            lengths, edited(bits, encoding=Encoding.SHUFFLED))),
        "bits_of_floats": ("data", "bits of a column of floats", dense(chunk(
            edited(lengths, column=4), edited(bits, column=4), num_rows=3, table=2))),
        "lap_of_all": ("format", "a lap as long as the numbers", three(edited(lengths, lap=3), bits)),
        "lap_of_offsets": ("format", "a lap in an encoding that has none", three(
            stream(b"\x01\x02\x03", column=11, count=3, encoding=Encoding.OFFSET, lap=1))),
        "lap_of_validity": ("format", "a lap in a validity", dense(chunk(
            stream(b"\x01", column=4, count=1, part=StreamPart.VALIDITY, lap=1),
            stream(b"\x01", column=4, count=1), num_rows=2))),
    }  # fmt: skip
