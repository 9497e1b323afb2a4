"""Applies what ranks of a chunk have in place of their role's values: shifts and maps, of one rank or of all.

Does not decode streams; the decoder passes their values in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.int64]


def table_size(num_values: int, num_ranks: int, *, mapped: bool) -> int:
    """How many distinct values a map is for (1 for a shift); 0 where that does not fit the number of its values."""
    num, rest = divmod(num_values, num_ranks + mapped)
    return 0 if rest or (num != 1 and not mapped) else num


def shifted(values: Values, shifts: Values, place: int | None) -> Values:
    """The role's values plus the shift of the rank in a place; of all ranks, one after the other, for None."""
    if place is not None:
        return values + shifts[place : place + 1]
    return (values[None, :] + shifts[:, None]).reshape(-1)


def replaced(values: Values, table: Values, num: int, place: int | None) -> Values | None:
    """The role's values with what stands in their place, as `shifted`; None where a value stands in the map twice."""
    order = np.argsort(table[:num])
    before = table[:num][order]
    if (before[1:] == before[:-1]).any():
        return None
    after = table[num:].reshape(num, -1)[order]
    codes = np.searchsorted(before, values).clip(0, num - 1)
    there = before[codes] == values
    if place is not None:
        return np.where(there, after[:, place][codes], values)
    return np.where(there[None, :], after.T.take(codes, axis=1), values[None, :]).reshape(-1)
