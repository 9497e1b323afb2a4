"""Encodes many protobuf messages of one shape at a time, as numpy arrays. Knows no message of Perfetto.

A message a row: ``Cells`` hold the bytes of all rows side by side, and a mask says which of them are there. The
protobuf library makes one message at a time, which is too slow for millions of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, LENGTH = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Cells:
    """The bytes of each row (``matrix``, one row a message) and which of them count (``mask``)."""

    matrix: NDArray[np.uint8]
    mask: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.matrix)

    def only(self, present: NDArray[np.bool_] | None) -> Cells:
        """The same, empty in rows that are not present."""
        return self if present is None else Cells(self.matrix, self.mask & present[:, None])

    def to_bytes(self) -> bytes:
        """All rows back to back."""
        return self.matrix[self.mask].tobytes()


def constant(num_rows: int, raw: bytes) -> Cells:
    """The same bytes in every row."""
    matrix = np.broadcast_to(np.frombuffer(raw, np.uint8), (num_rows, len(raw)))
    return Cells(matrix, np.broadcast_to(np.True_, matrix.shape))


def join(parts: Sequence[Cells]) -> Cells:
    """Fields one after the other."""
    return Cells(np.concatenate([p.matrix for p in parts], axis=1), np.concatenate([p.mask for p in parts], axis=1))


def varints(values: NDArray[Any]) -> Cells:
    """Base-128 varints; negative numbers as 64-bit two's complement."""
    whole = np.ascontiguousarray(values)
    if whole.dtype != np.uint64:
        whole = whole.astype(np.int64).view(np.uint64)
    most = int(whole.max()) if len(whole) else 0
    width = max(1, -(-most.bit_length() // 7))
    shifted = whole[:, None] >> (np.arange(width, dtype=np.uint64) * np.uint64(7))[None, :]
    mask = shifted > 0
    mask[:, 0] = True
    matrix = (shifted & np.uint64(0x7F)).astype(np.uint8)
    matrix[:, :-1] |= mask[:, 1:].astype(np.uint8) << 7
    return Cells(matrix, mask)


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
    filled = Cells(matrix, np.broadcast_to(np.True_, matrix.shape))
    return join([constant(len(values), tag(number, FIXED64)), filled]).only(present)


def message_field(number: int, parts: Sequence[Cells], present: NDArray[np.bool_] | None = None) -> Cells:
    """A message a row, made of fields."""
    body = join(parts)
    lengths = np.count_nonzero(body.mask, axis=1)
    return join([constant(len(body), tag(number, LENGTH)), varints(lengths), body]).only(present)
