"""Remembers which columns were found in order, so that ranks that share them with their role are not checked again.

Does not check, and keeps no column alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

from numpy.typing import NDArray

from prismtrace.tables import DictionaryColumn, ListColumn, Table

_MOST: Final = 1 << 14


class _Empty:
    """Stands for a column that a table does not have."""


_EMPTY: Final = _Empty()
_NOTHING: Final[weakref.ref[Any]] = weakref.ref(_EMPTY)


class Unchanged:
    """Columns by identity: a reader gives ranks of one role the very arrays of the role where they do not differ."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], ...]] = {}

    def is_known(self, what: object, table: Table, names: Sequence[str]) -> bool:
        """Whether the columns of a table, or others of the very same arrays, were in order; `what` names the check."""
        arrays = _arrays(table, names)
        known = self._known.get(_key(what, table, arrays))
        if known is None:
            return False
        return all(array is None or ref() is array for ref, array in zip(known, arrays, strict=True))

    def keep(self, what: object, table: Table, names: Sequence[str]) -> None:
        """These columns are in order."""
        if len(self._known) >= _MOST:
            self._known.clear()
        arrays = _arrays(table, names)
        self._known[_key(what, table, arrays)] = tuple(_NOTHING if a is None else weakref.ref(a) for a in arrays)


def _arrays(table: Table, names: Sequence[str]) -> list[NDArray[Any] | None]:
    columns = table.columns()
    found: list[NDArray[Any] | None] = []
    for name in names:
        column = columns.get(name)
        if isinstance(column, DictionaryColumn):
            found.append(column.codes)
        elif isinstance(column, ListColumn):
            found += [column.offsets, column.values, column.valid]
        else:
            found.append(column)
    return found


def _key(what: object, table: Table, arrays: Sequence[NDArray[Any] | None]) -> tuple[Any, ...]:
    return (what, table.table, len(table), table.first_index, *map(id, arrays))
