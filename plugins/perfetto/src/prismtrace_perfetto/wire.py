"""Encodes many protobuf messages of one shape at a time, as numpy arrays. Knows no message of Perfetto.

A message a row: ``Cells`` hold the bytes of all rows side by side, and masks say which of them are there. The
protobuf library makes one message at a time, which is too slow for millions of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, LENGTH = 0, 1, 2


Part = tuple[NDArray[np.uint8], NDArray[np.bool_]]


@dataclass(frozen=True, eq=False)
class Cells:
    """The bytes of each row, as blocks that stand side by side.

    A block is a matrix with a row for each message, or one for all, and a mask that says which of its bytes count.
    ``lengths`` is how many bytes of each row do.
    """

    blocks: tuple[Part, ...]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def only(self, present: NDArray[np.bool_] | None) -> Cells:
        """The same, empty in rows that are not present."""
        if present is None:
            return self
        column = present[:, None]
        return Cells(tuple((matrix, mask & column) for matrix, mask in self.blocks), self.lengths * present)

    def to_bytes(self) -> bytes:
        """All rows back to back."""
        width = sum(matrix.shape[1] for matrix, _ in self.blocks)
        bytes_of, counts = np.empty((len(self), width), np.uint8), np.empty((len(self), width), np.bool_)
        left = 0
        for matrix, mask in self.blocks:
            right = left + matrix.shape[1]
            bytes_of[:, left:right], counts[:, left:right] = matrix, mask
            left = right
        return bytes_of[counts].tobytes()


def constant(num_rows: int, raw: bytes) -> Cells:
    """The same bytes in every row."""
    matrix = np.frombuffer(raw, np.uint8)[None, :]
    return Cells(((matrix, np.ones((1, len(raw)), np.bool_)),), np.full(num_rows, len(raw), np.int64))


def join(parts: Sequence[Cells]) -> Cells:
    """Fields one after the other."""
    lengths = parts[0].lengths
    for part in parts[1:]:
        lengths = lengths + part.lengths
    return Cells(tuple(block for part in parts for block in part.blocks), lengths)


def varints(values: NDArray[Any]) -> Cells:
    """Base-128 varints; negative numbers as 64-bit two's complement."""
    whole = np.ascontiguousarray(values)
    if whole.dtype != np.uint64:
        whole = whole.astype(np.int64).view(np.uint64)
    most = int(whole.max()) if len(whole) else 0
    if most < 0x80:
        lengths = np.ones(len(whole), np.int64)
        return Cells(((whole.astype(np.uint8)[:, None], np.ones((1, 1), np.bool_)),), lengths)
    width = -(-most.bit_length() // 7)
    shifted = whole[:, None] >> (np.arange(width, dtype=np.uint64) * np.uint64(7))[None, :]
    mask = shifted > 0
    mask[:, 0] = True
    matrix = (shifted & np.uint64(0x7F)).astype(np.uint8)
    matrix[:, :-1] |= mask[:, 1:].view(np.uint8) << 7
    return Cells(((matrix, mask),), np.count_nonzero(mask, axis=1))


def tag(number: int, wire_type: int) -> bytes:
    """The bytes in front of a field."""
    return varint_bytes(number << 3 | wire_type)


def varint_bytes(value: int) -> bytes:
    """One varint."""
    raw = bytearray()
    while value > 0x7F:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)


def varint_field(number: int, values: NDArray[Any], present: NDArray[np.bool_] | None = None) -> Cells:
    """A varint field a row."""
    return join([constant(len(values), tag(number, VARINT)), varints(values)]).only(present)


def fixed64_field(number: int, values: NDArray[Any], present: NDArray[np.bool_] | None = None) -> Cells:
    """A 64-bit field a row: fixed64 of integers, double of floats."""
    raw = np.ascontiguousarray(values.astype("<f8" if values.dtype.kind == "f" else "<u8"))
    matrix = raw.view(np.uint8).reshape(len(values), 8)
    filled = Cells(((matrix, np.ones((1, 8), np.bool_)),), np.full(len(values), 8, np.int64))
    return join([constant(len(values), tag(number, FIXED64)), filled]).only(present)


def message_field(number: int, parts: Sequence[Cells], present: NDArray[np.bool_] | None = None) -> Cells:
    """A message a row, made of fields."""
    body = join(parts)
    return join([constant(len(body), tag(number, LENGTH)), varints(body.lengths), body]).only(present)
