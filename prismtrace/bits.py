"""Packs unsigned integers as a byte that says how many bits each has, and the bits below the highest one.

Does not compress: the lengths compress well, the bits do not at all.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MAX_BITS: Final = 64

_WIDTHS: Final = np.array([0, *range(_MAX_BITS)], np.uint8)
"""By length: how many bits are stored, the highest bit alone, and all bits that a number may have."""
_TOPS: Final = np.array([0, *(1 << width for width in range(_MAX_BITS))], np.uint64)
_MASKS: Final = np.array([0, *((2 << width) - 1 for width in range(_MAX_BITS))], np.uint64)


def bit_lengths(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The number of bits of each value: 0 for 0, 64 at most."""
    lengths = np.minimum(np.frexp(values.astype(np.float64))[1], _MAX_BITS).astype(np.uint8)
    # a value just below a power of two may round up to it
    too_long = np.flatnonzero(
        values < np.left_shift(np.uint64(1), np.maximum(lengths, 1).astype(np.uint64) - np.uint64(1))
    )
    lengths[too_long[values[too_long] != 0]] -= np.uint8(1)
    return lengths


def pack(values: NDArray[np.uint64]) -> tuple[bytes, bytes]:
    """Lengths, one byte each; and the bits below the highest of all values, back to back, the lowest bit first."""
    lengths = bit_lengths(values)
    widths = lengths.astype(np.int64)
    np.maximum(widths - 1, 0, out=widths)
    ends = np.cumsum(widths)
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        return lengths.tobytes(), b""
    starts = ends - widths
    bits = values ^ np.where(lengths > 0, np.left_shift(np.uint64(1), widths.view(np.uint64)), np.uint64(0))
    shift = (starts & 63).view(np.uint64)
    word = starts >> 6
    words = np.zeros((total + 63) // 64 + 1, np.uint64)
    # the low part of each value goes into the word in which it starts, the rest into the next
    first = np.flatnonzero(np.diff(word, prepend=-1))
    words[word[first]] = np.bitwise_or.reduceat(bits << shift, first)
    spill = np.flatnonzero((starts & 63) + widths > 64)
    words[word[spill] + 1] |= bits[spill] >> (np.uint64(64) - shift[spill])
    return lengths.tobytes(), words.astype("<u8").tobytes()[: (total + 7) // 8]


def unpack(raw_lengths: bytes, raw_bits: bytes, count: int) -> NDArray[np.uint64]:
    """The values again; ValueError when a length is above 64 or the lengths and the bits do not go together."""
    lengths = np.frombuffer(raw_lengths, np.uint8, count)
    longest = int(lengths.max()) if count else 0
    if longest > _MAX_BITS:
        raise ValueError(f"a number of {longest} bits")
    widths = _WIDTHS.take(lengths)
    places = np.cumsum(widths, dtype=np.int64)
    total = int(places[-1]) if count else 0
    if len(raw_bits) != (total + 7) // 8:
        raise ValueError(f"{len(raw_bits)} bytes for {total} bits")
    places -= widths
    words = np.frombuffer(raw_bits + bytes(16 - len(raw_bits) % 8), "<u8")
    at = places >> 6
    places &= 63
    shifts = places.view(np.uint64)
    values: NDArray[np.uint64] = words.take(at)
    values >>= shifts
    # what reaches into the next word; in two steps, as a shift by 64 has no meaning
    at += 1
    more = words.take(at)
    more <<= np.uint64(1)
    np.subtract(np.uint64(63), shifts, out=shifts)
    more <<= shifts
    values |= more
    values |= _TOPS.take(lengths)
    values &= _MASKS.take(lengths)
    return values
