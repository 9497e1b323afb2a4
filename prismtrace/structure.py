"""Gives every row of a table a 64-bit digest of what it is, so that equal structure is recognised at array speed.

Does not look at times, and does not guard against forged collisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.model import ABSENT, ProcessGroup
from prismtrace.tables import Column, DictionaryColumn, ListColumn, Table, UnitTable

Hashes = NDArray[np.uint64]

WHAT_COLUMNS: Final = (
    "kind",
    "phase",
    "op",
    "reduce_op",
    "dtype",
    "num_elements_in",
    "num_elements_out",
    "peer",
    "tag",
    "is_async",
    "microbatch",
    "stage",
    "model_chunk",
    "label",
    "splits_in",
    "splits_out",
)
"""Columns that say what a unit is, wherever it stands; its group counts too."""

ORDER_COLUMNS: Final = ("step", "seq", "awaits")
"""Columns that change when units before are added or removed."""

_MULTIPLY: Final = np.uint64(0x9E3779B97F4A7C15)
_SPREAD: Final = np.uint64(0xD6E8FEB86659FD93)
_SHIFT: Final = np.uint64(32)


def mixed(hashes: Hashes, values: NDArray[Any]) -> Hashes:
    """Digests that also depend on one more integer a row."""
    result = (hashes ^ (values.astype(np.int64, copy=False).view(np.uint64) * _MULTIPLY)) * _SPREAD
    result ^= result >> _SHIFT
    return result * _MULTIPLY


def text_hash(value: str | bytes) -> int:
    """A number that stands for a text or digest."""
    raw = value.encode("utf-8") if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)


def column_numbers(column: Column) -> NDArray[np.int64]:
    """One integer a row: the value, or a digest of a text or list."""
    if isinstance(column, DictionaryColumn):
        table = np.array([*map(text_hash, column.values), ABSENT], np.int64)
        return np.asarray(table[column.codes])
    if isinstance(column, ListColumn):
        return _list_numbers(column)
    if column.dtype == np.float64:
        return np.ascontiguousarray(column).view(np.int64)
    return column.view(np.int64) if column.dtype == np.uint64 else column.astype(np.int64)


def _list_numbers(column: ListColumn) -> NDArray[np.int64]:
    lengths = np.diff(column.offsets)
    start, stop = int(column.offsets[0]), int(column.offsets[-1])
    place = np.arange(start, stop) - np.repeat(column.offsets[:-1], lengths)
    each = mixed(np.zeros(stop - start, np.uint64), column.values[start:stop] + place * np.int64(1_000_003))
    total = np.zeros(len(each) + 1, np.uint64)
    np.cumsum(each, out=total[1:])
    sums = total[column.offsets[1:] - start] - total[column.offsets[:-1] - start]
    return np.where(column.valid, mixed(sums, lengths).view(np.int64), ABSENT)


def group_numbers(groups: Mapping[int, ProcessGroup]) -> dict[int, int]:
    """Group id -> a number that is the same in two traces when the group has the same members and description.

    Several groups with the same members and description are told apart by the order of their names and ids.
    """
    order = sorted(groups.values(), key=lambda group: (group.name, group.group_id))
    seen: dict[tuple[object, ...], int] = {}
    numbers = {0: 0}
    for group in order:
        key = (group.ranks, group.description)
        seen[key] = seen.get(key, -1) + 1
        numbers[group.group_id] = text_hash(f"{group.ranks} {group.description} {seen[key]}")
    return numbers


def what_hashes(units: UnitTable, groups: Mapping[int, int]) -> Hashes:
    """What each unit is, without its place in the order."""
    hashes = np.zeros(len(units), np.uint64)
    for name in WHAT_COLUMNS:
        hashes = mixed(hashes, column_numbers(getattr(units, name)))
    ids, inverse = np.unique(units.group_id, return_inverse=True)
    numbers = np.array([groups.get(value, value) & (2**63 - 1) for value in ids.tolist()], np.int64)
    return mixed(hashes, numbers[inverse]) if len(units) else hashes


def order_hashes(units: UnitTable, what: Hashes) -> Hashes:
    """The same with step, seq, and how many rows back `awaits` reaches."""
    back = np.where(units.awaits == ABSENT, ABSENT, units.row_index - units.awaits)
    hashes = what
    for values in (units.step.astype(np.int64), units.seq, back):
        hashes = mixed(hashes, values)
    return hashes


def row_hashes(table: Table, columns: Iterable[str]) -> Hashes:
    """A digest of the named columns of each row."""
    hashes = np.zeros(len(table), np.uint64)
    for name in columns:
        hashes = mixed(hashes, column_numbers(getattr(table, name)))
    return hashes
