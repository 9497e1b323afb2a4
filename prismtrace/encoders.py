"""Chooses encodings for arrays of integers and encodes them as streams: what becomes smaller, by a sample where needed.

Does not decode, and does not know tables, files or what a column means.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace._generated.schema import Compression, Encoding, StreamPart
from prismtrace.encoding import Encoded, Stream, compress
from prismtrace.ticks import ONE, Tick, find_tick

_SAMPLE_VALUES: Final = 4096


def width_of(span: int) -> int:
    """Bytes of the smallest integer type that holds `span`."""
    return 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4 if span < 1 << 32 else 8


def shuffled(values: NDArray[Any], width: int) -> bytes:
    """The lowest byte of all values, then the second byte of all, and so on."""
    if width == 1:
        return values.astype(np.uint8).tobytes()
    return values.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()


def zigzag(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Signed numbers as unsigned ones: small ones stay small."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def encode_integers(
    values: NDArray[np.int64],
    *,
    column: int,
    part: int,
    delta: bool = False,
    scalable: bool = False,
    reference: NDArray[np.int64] | None = None,
    reference_column: int = 0,
) -> Encoded:
    """Encodes int64 values (unsigned columns reinterpreted); `delta` and `reference` are hints."""
    count = len(values)
    low, high = (int(values.min()), int(values.max())) if count else (0, 0)
    if low == high:
        return _stream(b"", column, part, Encoding.CONSTANT, 0, count, base=low)
    tick = find_tick(values) if scalable else ONE
    if reference is not None:
        short = encode_differences(values, reference, column=column, part=part, reference=reference_column)
        if short[0].width <= width_of(high - low):
            return short
    ticks = tick.ticks(values)
    low, high = int(ticks.min()), int(ticks.max())
    flat_width = width_of(high - low)
    if delta:
        coded = zigzag(np.diff(ticks, prepend=ticks[:1]))
        width = width_of(int(coded.max()))
        flat = (ticks - low).view(np.uint64)
        if width < flat_width or (width == flat_width and _is_smaller(coded, flat, width)):
            raw = shuffled(coded, width)
            return _stream(raw, column, part, Encoding.DELTA, width, count, base=int(ticks[0]), tick=tick)
    raw = shuffled((ticks - low).view(np.uint64), flat_width)
    return _stream(raw, column, part, Encoding.OFFSET, flat_width, count, base=low, tick=tick)


def _is_smaller(one: NDArray[Any], other: NDArray[Any], width: int) -> bool:
    """Which of two codings of the same values becomes smaller, by a sample of them."""
    middle = max(0, (len(one) - _SAMPLE_VALUES) // 2)
    sizes = [len(compress(shuffled(v[middle : middle + _SAMPLE_VALUES], width))[1]) for v in (one, other)]
    return sizes[0] <= sizes[1]


def encode_interval(
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    *,
    columns: tuple[int, int],
    part: int,
    ended: NDArray[np.bool_] | None,
) -> tuple[Encoded, Encoded]:
    """Encodes starts and ends together. `ended`: which starts have an end (None = all); the starts differ.

    Ends become differences to starts; starts follow each other directly, or where the row before them ended.
    """
    tick = find_tick(start, end)
    if tick.shift == 0:
        tick = find_tick(start, floats=False)
    begun = start if ended is None else start[ended]
    last = encode_differences(end, begun, column=columns[1], part=part, reference=columns[0], like=tick)
    ticks = tick.ticks(start)
    lengths = np.zeros(len(start), np.int64)
    same = last[0].tick == tick
    lengths[... if ended is None else ended] = tick.ticks(end) - tick.ticks(begun) if same else tick.ticks(end - begun)
    gaps = np.diff(ticks, prepend=ticks[:1])
    alone = zigzag(gaps)
    gaps[1:] -= lengths[:-1]
    coded = zigzag(gaps)
    width, base = width_of(int(coded.max())), int(ticks[0])
    if width > width_of(int(alone.max())) or not _is_smaller(coded, alone, width):
        return encode_integers(start, column=columns[0], part=part, delta=True, scalable=True), last
    raw, count = shuffled(coded, width), len(start)
    kind = (columns[0], part, Encoding.CONTINUED, width, count)
    return _stream(raw, *kind, base=base, reference=columns[1], tick=tick), last


def encode_distinct(values: NDArray[np.int64], *, column: int, part: int) -> Encoded:
    """Encodes int64 values that are large and few: a dictionary and codes."""
    distinct, codes = _distinct(values)
    if len(distinct) <= 1 or len(distinct) > len(values) // 4:
        return encode_integers(values, column=column, part=part)
    width = width_of(len(distinct) - 1)
    raw = distinct.astype("<i8").tobytes() + shuffled(codes, width)
    return _stream(raw, column, part, Encoding.DICTIONARY, width, len(values), base=len(distinct))


def encode_differences(
    values: NDArray[np.int64],
    near: NDArray[np.int64],
    *,
    column: int,
    part: int,
    reference: int = 0,
    like: Tick | None = None,
) -> Encoded:
    """Encodes int64 values as differences to a column of the same rows, or without `reference` to that of the role.

    `like` is a tick that both are on, if they are.
    """
    tick = like if like is not None and like.shift and _fits(like, values, near) else ONE
    if tick.shift:
        coded = zigzag(tick.ticks(values) - tick.ticks(near))
    else:
        difference = values - near
        tick = find_tick(difference) if len(difference) else ONE
        tick = tick if tick.shift == 0 else ONE
        coded = zigzag(difference // tick.scale if tick.scale != 1 else difference)
    width = width_of(int(coded.max())) if len(coded) else 1
    encoding = Encoding.DIFFERENCE if reference else Encoding.ROLE_DIFFERENCE
    raw = shuffled(coded, width)
    return _stream(raw, column, part, encoding, width, len(coded), reference=reference, tick=tick)


def _fits(tick: Tick, values: NDArray[np.int64], near: NDArray[np.int64]) -> bool:
    """Whether differences in ticks give the values back exactly."""
    ticks = tick.ticks(near)
    return bool((tick.values(ticks + (tick.ticks(values) - ticks)) == values).all())


_HASH_BITS: Final = 12
_HASH_FACTORS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


def _distinct(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """What np.unique gives with return_inverse. Few distinct values are found by hashing, without sorting all."""
    for factor in _HASH_FACTORS:
        slots = (values.view(np.uint64) * np.uint64(factor) >> np.uint64(64 - _HASH_BITS)).view(np.int64)
        held = np.zeros(1 << _HASH_BITS, np.int64)
        held[slots] = values
        if not np.array_equal(held.take(slots), values):
            continue  # two values share a slot
        used = np.zeros(1 << _HASH_BITS, np.bool_)
        used[slots] = True
        places = np.flatnonzero(used)
        distinct = held[places]
        order = np.argsort(distinct)
        code_of = np.zeros(1 << _HASH_BITS, np.uint16)
        code_of[places[order]] = np.arange(len(places))
        return distinct[order], code_of.take(slots)
    return np.unique(values, return_inverse=True)


def encode_floats(values: NDArray[np.float64], *, column: int, part: int) -> Encoded:
    """Encodes float64 values, every bit kept."""
    bits = np.ascontiguousarray(values).view(np.int64)
    if len(bits) and (bits == bits[0]).all():
        return _stream(b"", column, part, Encoding.CONSTANT, 0, len(bits), base=int(bits[0]))
    return _stream(shuffled(bits.view(np.uint64), 8), column, part, Encoding.SHUFFLED, 8, len(bits))


def encode_bytes(raw: bytes, *, column: int, part: int, width: int = 1) -> Encoded:
    """Encodes bytes as they are, in values of `width` bytes."""
    return _stream(raw, column, part, Encoding.PLAIN, width, len(raw) // width)


def _stream(
    raw: bytes,
    column: int,
    part: int,
    encoding: int,
    width: int,
    count: int,
    *,
    base: int = 0,
    tick: Tick = ONE,
    reference: int = 0,
) -> Encoded:
    compression, stored = compress(raw) if part != StreamPart.DIGESTS else (Compression.NONE, raw)
    crc = zlib.crc32(stored)
    sizes = (base, count, len(stored), len(raw), crc)
    stream = Stream(*sizes, tick.scale, column, reference, part, encoding, compression, width, tick.shift)
    return stream, stored
