"""Describes chunks and payloads as entries of the index, and sets of ranks as ranges.

Does not read or write files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prismtrace.container import Frame
from prismtrace.encoding import Stream
from prismtrace.model import ColumnSpec

MAX_RANKS: Final = 1 << 20
"""Limit of the ranks of one chunk (spec/trace-format.md, limits)."""

RANK_RANGE: Final = np.dtype([("first", "<i4"), ("num_ranks", "<u4"), ("stride", "<i4")])


class RankRange(NamedTuple):
    """The ranks first, first + stride, ...: `num_ranks` of them."""

    first: int
    num_ranks: int
    stride: int


CHUNK_ENTRY: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u8"),
        ("first_row", "<u8"),
        ("first_ns", "<i8"),
        ("last_ns", "<i8"),
        ("role", "<u8"),
        ("num_rows", "<u4"),
        ("rank", "<i4"),
        ("first_step", "<i4"),
        ("last_step", "<i4"),
        ("meta_crc", "<u4"),
        ("data_crc", "<u4"),
        ("first_range", "<u4"),
        ("num_ranges", "<u4"),
        ("table", "u1"),
        ("reserved_0", "u1"),
        ("reserved_1", "<u2"),
        ("reserved_2", "<u4"),
    ]
)
PAYLOAD_ENTRY: Final = np.dtype(
    [
        ("digest", "V16"),
        ("offset", "<u8"),
        ("data_offset", "<u8"),
        ("stored_length", "<u8"),
        ("raw_length", "<u8"),
        ("data_crc", "<u4"),
        ("compression", "u1"),
        ("reserved_0", "u1"),
        ("reserved_1", "<u2"),
    ]
)


class ChunkMeta(NamedTuple):
    """The meta section of a chunk."""

    table: int
    rank: int
    first_row: int
    num_rows: int
    first_step: int
    last_step: int
    first_ns: int
    last_ns: int
    streams: tuple[Stream, ...]
    named: tuple[ColumnSpec, ...] = ()
    role: int = 0
    ranges: tuple[RankRange, ...] = ()
    strings: bytes = b""
    stacked: bool = False


def chunk_entry(meta: ChunkMeta, frame: Frame, offset: int, *, first_range: int = 0) -> tuple[int, ...]:
    """The index entry of a chunk, in the order of CHUNK_ENTRY. `first_range` is where the index has its ranges."""
    return (
        offset,
        frame.length,
        meta.first_row,
        meta.first_ns,
        meta.last_ns,
        meta.role,
        meta.num_rows,
        meta.rank,
        meta.first_step,
        meta.last_step,
        frame.meta_crc,
        frame.data_crc,
        first_range if meta.ranges else 0,
        len(meta.ranges),
        meta.table,
        0,
        0,
        0,
    )


def payload_entry(digest: bytes, raw_length: int, compression: int, frame: Frame, offset: int) -> tuple[Any, ...]:
    """The index entry of a payload, in the order of PAYLOAD_ENTRY."""
    data_offset = offset + frame.data_start
    return (digest, offset, data_offset, frame.data_length, raw_length, frame.data_crc, compression, 0, 0)


def ranges_of(ranks: Sequence[int] | NDArray[Any]) -> tuple[RankRange, ...]:
    """Ranks, in their order, as few ranges."""
    values: list[int] = np.asarray(ranks, np.int64).tolist()
    result, start = [], 0
    while start < len(values):
        stop = start + 1
        stride = values[stop] - values[start] if stop < len(values) else 1
        while stop < len(values) and values[stop] - values[stop - 1] == stride:
            stop += 1
        result.append(RankRange(values[start], stop - start, stride))
        start = stop
    return tuple(result)


def ranks_of(ranges: Iterable[RankRange]) -> NDArray[np.int64]:
    """The ranks of ranges, in their order."""
    parts = [first + stride * np.arange(count, dtype=np.int64) for first, count, stride in ranges]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
