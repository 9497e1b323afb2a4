"""Applies what ranks of a chunk have in place of their role's values: shifts and maps, of one rank or of all.

Does not decode streams; the decoder passes their values in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.int64]


class OfRanks(NamedTuple):
    """An integer column of several ranks: in row `i` they have `values[codes[i]]`, of shape (ranks,)."""

    codes: NDArray[np.int64]
    values: Values

    @classmethod
    def of(cls, column: NDArray[Any], num_ranks: int, replaced: tuple[NDArray[np.int64], Values] | None) -> OfRanks:
        """A column that ranks have in common, but for what replaces it (see `add_alike`); no two values are the same.

        Values are int64; unsigned ones are reinterpreted.
        """
        column = column.view(np.int64) if column.dtype == np.uint64 else column.astype(np.int64)
        distinct, codes = np.unique(column, return_inverse=True)
        if replaced is None:
            return cls(codes, np.repeat(distinct[:, None], num_ranks, axis=1))
        values = np.concatenate([replaced[1], np.repeat(distinct[:, None], num_ranks, axis=1)])
        codes = np.where(replaced[0] >= 0, replaced[0], codes + len(replaced[1]))
        same: dict[bytes, int] = {}
        one_of = np.array([same.setdefault(row.tobytes(), place) for place, row in enumerate(values)], np.int64)
        return cls(one_of[codes] if len(one_of) else codes, values)


class Changes(NamedTuple):
    """What the ranks of a chunk have in place of one column of their role.

    `before` are the values that are mapped, rising, and `after[i]` those of all ranks in place of `before[i]`; without
    `before`, `after[0]` is what each rank's values are above the role's.
    """

    before: Values | None
    after: Values

    def of_rank(self, values: Values, place: int | None) -> Values:
        """What the rank in a place has for values of the role; all ranks, one after the other, for None."""
        if self.before is None:
            shifts = self.after[0]
            whole: Values = values[None, :] + (shifts if place is None else shifts[place : place + 1])[:, None]
            return whole.reshape(-1)
        codes = np.searchsorted(self.before, values).clip(0, len(self.before) - 1)
        there = self.before[codes] == values
        if place is not None:
            return np.where(there, self.after[codes, place], values)
        return np.where(there[None, :], self.after.T.take(codes, axis=1), values[None, :]).reshape(-1)

    def of_all(self, distinct: Values) -> Values:
        """What each rank has for values of the role, of shape (values, ranks)."""
        if self.before is None:
            return distinct[:, None] + self.after
        codes = np.searchsorted(self.before, distinct).clip(0, len(self.before) - 1)
        there = self.before[codes] == distinct
        return np.where(there[:, None], self.after[codes], distinct[:, None])


def table_size(num_values: int, num_ranks: int, *, mapped: bool) -> int:
    """How many distinct values a map is for (1 for a shift); 0 where that does not fit the number of its values."""
    num, rest = divmod(num_values, num_ranks + mapped)
    return 0 if rest or (num != 1 and not mapped) else num


def changes_of(values: Values, num: int, *, mapped: bool) -> Changes | None:
    """A map or shift from the values of its stream, `num` as `table_size`; None where one value stands in it twice."""
    if not mapped:
        return Changes(None, values[None, :])
    order = np.argsort(values[:num])
    before = values[:num][order]
    if (before[1:] == before[:-1]).any():
        return None
    return Changes(before, values[num:].reshape(num, -1)[order])
