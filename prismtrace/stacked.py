"""Gives each rank its rows of a stacked chunk: all ranks are decoded together, once, and a rank's columns are slices.

Does not read files and does not decode; `decoder` does that.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from prismtrace.decoder import ChunkDecoder
from prismtrace.model import ColumnSpec
from prismtrace.tables import Column, frozen_column

_Known = tuple[tuple[str, Column, bool], ...]


class StackedChunk:
    """The decoded columns of a stacked chunk, kept while its ranks are read. Safe to use from several threads.

    Columns that only the role has are the role's own arrays, the same for all ranks.
    """

    def __init__(self, decoder: ChunkDecoder, *, num_rows: int) -> None:
        self._decoder, self._num_rows = decoder, num_rows
        self._known: dict[tuple[int, frozenset[str] | None], tuple[_Known, tuple[ColumnSpec, ...]]] = {}
        self._columns: dict[str, Column] = {}
        self._lock = threading.Lock()

    def columns(
        self, place: int, specs: Sequence[ColumnSpec], selected: frozenset[str] | None
    ) -> tuple[dict[str, Column], tuple[ColumnSpec, ...]]:
        """Columns of the rank in a place, and the description of the named ones. `selected`: names, None = all."""
        key = (len(specs), selected)  # which follow from each other, but for `step`
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._decode(specs, selected)
        rows = slice(place * self._num_rows, (place + 1) * self._num_rows)
        return {name: _part(column, rows) if own else column for name, column, own in known[0]}, known[1]

    def _decode(
        self, specs: Sequence[ColumnSpec], selected: frozenset[str] | None
    ) -> tuple[_Known, tuple[ColumnSpec, ...]]:
        """The asked columns of all ranks: name, values, and whether they are those of all ranks one after the other."""
        fresh = [spec for spec in specs if spec.name not in self._columns]
        decoded = self._decoder.decode(fresh, selected)
        for name, column in decoded.items():
            self._columns.setdefault(name, frozen_column(column))
        named = self._decoder.named_specs(decoded)
        wanted = [spec for spec in (*specs, *named) if spec.name in self._columns]
        return tuple((s.name, self._columns[s.name], self._decoder.has_own(s)) for s in wanted), named


def _part(column: Column, rows: slice) -> Column:
    return column[rows] if isinstance(column, np.ndarray) else frozen_column(column[rows])
