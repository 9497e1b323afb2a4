"""Encodes starts and ends with all that format 1.1 offers: laps, and numbers as lengths and bits.

Does not decode, and is not the quick way to write: it tries every combination and takes the smallest.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from prismtrace._generated.schema import Compression, Encoding, StreamPart
from prismtrace.bits import bit_lengths, pack
from prismtrace.columns import Rows
from prismtrace.encoders import encode_bytes, shuffled, width_of, zigzag
from prismtrace.encoding import Encoded, Stream
from prismtrace.ticks import FLOAT32_SHIFT, ONE, Tick, find_tick

_LEVEL: Final = 12
_DESCRIPTOR_BYTES: Final = 40
_MAX_LAP: Final = (1 << 16) - 1


@dataclass(frozen=True)
class _Coding:
    """One way to write a column: signed numbers, of which `lap` says what has been taken off each."""

    encoding: int
    tick: Tick
    numbers: NDArray[np.int64]
    base: int
    reference: int
    lap: int
    bits: float


def dense_interval(
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    *,
    columns: tuple[int, int],
    ended: NDArray[np.bool_] | None,
    laps: Sequence[int] = (),
    near: NDArray[np.int64] | None = None,
) -> list[Encoded]:
    """The streams of starts and ends. `ended`: which starts have an end (None = all).

    Args:
        start, end: the values that are there, at least two starts.
        columns: their ids.
        laps: how many rows may be between like ones.
        near: the starts of the role in the same rows, if there are.
    """
    begun = start if ended is None else start[ended]
    best: tuple[_Coding, _Coding] | None = None
    tick = find_tick(start, end)
    if tick.shift == 0:
        tick = find_tick(start, floats=False)
    for last in _ends(end, begun, tick, columns[0], laps):
        for first in _starts(start, ended, last, tick, columns[1], laps, near):
            if best is None or first.bits + last.bits < best[0].bits + best[1].bits:
                best = first, last
    assert best is not None
    return [*_streams(best[0], columns[0]), *_streams(best[1], columns[1])]


def laps_of(rows: Rows, *, num_rows: int | None = None) -> tuple[int, ...]:
    """How far apart rows are that are likely to be alike: a step; or a rank, where one has `num_rows` of the rows."""
    found = set() if num_rows is None else {num_rows}
    step = rows.columns.get("step")
    if isinstance(step, np.ndarray) and len(step):
        begins = np.flatnonzero(np.diff(step[:num_rows])) + 1
        lengths = np.diff(begins, prepend=0)
        if len(begins) > 1 and (lengths == lengths[0]).all():
            found.add(int(lengths[0]))
    return tuple(sorted(found))


def _ends(
    end: NDArray[np.int64], begun: NDArray[np.int64], tick: Tick, reference: int, laps: Sequence[int]
) -> Iterator[_Coding]:
    lengths = end - begun
    plain = find_tick(lengths) if len(lengths) else ONE
    if plain.shift:
        plain = ONE
    yield _cheapest(Encoding.DIFFERENCE, plain, lengths // plain.scale, 0, reference, laps)
    if tick.shift:
        there, here = tick.ticks(begun), tick.ticks(end)
        if (tick.values(there + (here - there)) == end).all():
            yield _cheapest(Encoding.DIFFERENCE, tick, here - there, 0, reference, laps)


def _starts(
    start: NDArray[np.int64],
    ended: NDArray[np.bool_] | None,
    last: _Coding,
    tick: Tick,
    reference: int,
    laps: Sequence[int],
    near: NDArray[np.int64] | None,
) -> Iterator[_Coding]:
    own = tick.ticks(start)
    gaps = np.diff(own, prepend=own[:1])
    yield _cheapest(Encoding.DELTA, tick, gaps, int(own[0]), 0, laps)
    if near is not None:
        if tick.shift:
            there = tick.ticks(near)
            if (tick.values(there + (own - there)) == start).all():
                yield _cheapest(Encoding.ROLE_DIFFERENCE, tick, own - there, 0, 0, laps)
        yield _cheapest(Encoding.ROLE_DIFFERENCE, ONE, start - near, 0, 0, laps)
    numbers = whole_numbers(last)
    if last.tick != tick:
        if last.tick.shift or tick.shift == FLOAT32_SHIFT:
            return
        numbers = tick.ticks(last.tick.values(numbers))
    lengths = np.zeros(len(start), np.int64)
    lengths[... if ended is None else ended] = numbers
    rest = gaps.copy()
    rest[1:] -= lengths[:-1]
    yield _cheapest(Encoding.CONTINUED, tick, rest, int(own[0]), reference, laps)


def _cheapest(
    encoding: int, tick: Tick, numbers: NDArray[np.int64], base: int, reference: int, laps: Sequence[int]
) -> _Coding:
    """The numbers as they are, or each less the one a lap before, whichever has less in it."""
    best = _Coding(encoding, tick, numbers, base, reference, 0, _content(numbers))
    for lap in laps:
        if 0 < lap < min(len(numbers), _MAX_LAP + 1):
            less = numbers.copy()
            less[lap:] -= numbers[:-lap]
            bits = _content(less)
            if bits < best.bits:
                best = _Coding(encoding, tick, less, base, reference, lap, bits)
    return best


def whole_numbers(coding: _Coding) -> NDArray[np.int64]:
    """The numbers of a coding without its laps."""
    if not coding.lap:
        return coding.numbers
    numbers = np.zeros(-(-len(coding.numbers) // coding.lap) * coding.lap, np.int64)
    numbers[: len(coding.numbers)] = coding.numbers
    return np.cumsum(numbers.reshape(-1, coding.lap), axis=0).reshape(-1)[: len(coding.numbers)]


def _content(numbers: NDArray[np.int64]) -> float:
    """Bits that numbers take as lengths, coded by how frequent each is, and the bits below the highest."""
    lengths = bit_lengths(zigzag(numbers))
    counts = np.bincount(lengths, minlength=65).astype(np.float64)
    used = counts[counts > 0]
    entropy = float((used * np.log2(len(numbers) / used)).sum()) if len(numbers) else 0.0
    return entropy + float((counts * np.maximum(np.arange(65) - 1, 0)).sum())


def _streams(coding: _Coding, column: int) -> list[Encoded]:
    """The streams of a column: numbers in bytes, or their lengths and bits, whichever is smaller."""
    coded = zigzag(coding.numbers)
    width = width_of(int(coded.max())) if len(coded) else 1
    whole = _stream(shuffled(coded, width), coding, column, width)
    lengths, bits = pack(coded)
    apart = [_stream(lengths, coding, column, 1), encode_bytes(bits, column=column, part=StreamPart.BITS)]
    size = sum(len(stored) for _, stored in apart) + _DESCRIPTOR_BYTES
    # numbers of 8 bytes are the slowest to put together: lengths and bits may then be a little larger
    return apart if bits and size < len(whole[1]) * (1.05 if width == 8 else 1) else [whole]


def _stream(raw: bytes, coding: _Coding, column: int, width: int) -> Encoded:
    stored, compression = zstandard.ZstdCompressor(level=_LEVEL).compress(raw), Compression.ZSTD
    if len(stored) >= len(raw):
        stored, compression = raw, Compression.NONE
    stream = Stream(
        coding.base,
        len(coding.numbers),
        len(stored),
        len(raw),
        zlib.crc32(stored),
        coding.tick.scale,
        column,
        coding.reference,
        StreamPart.VALUES,
        coding.encoding,
        compression,
        width,
        coding.tick.shift,
        lap=coding.lap,
    )
    return stream, stored
