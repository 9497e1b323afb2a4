"""Remembers decoded columns by their stored bytes, so that what many ranks have in common is decoded once.

Does not decode, and knows no roles: ranks that were written one by one say the same things in the same bytes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from prismtrace._generated.schema import StreamPart
from prismtrace.encoding import REFERRING, Stream
from prismtrace.model import ColumnSpec
from prismtrace.roles import INTEGERS
from prismtrace.tables import Column, column_bytes, frozen_column

_MOST_STORED_BYTES: Final = 1 << 10  # what many ranks have in common is structure, which compresses well
_MOST_DECODED_BYTES: Final = 32 << 20
_MOST_MISSES: Final = 64
_PARTS: Final = frozenset((StreamPart.VALUES, StreamPart.VALIDITY))


class Repeated:
    """Columns of the chunks of one file. Safe to use from several threads."""

    def __init__(self) -> None:
        self._columns: dict[tuple[Any, ...], Column] = {}
        self._num_bytes = 0
        self._misses: Counter[int] = Counter()
        self._lock = threading.Lock()

    def column(
        self,
        spec: ColumnSpec,
        streams: Sequence[tuple[Stream, int]],
        *,
        num_rows: int,
        fetch: Callable[[int, int], memoryview],
        decode: Callable[[], Column],
    ) -> Column:
        """A column of one chunk, from its streams and their places: what the same streams gave before, else decoded."""
        key = self._key(spec, streams, num_rows, fetch)
        if key is None:
            return decode()
        found = self._columns.get(key)
        if found is not None:
            self._misses[spec.column_id] = 0
            return found
        self._misses[spec.column_id] += 1
        return self._keep(key, frozen_column(decode()))

    def _key(
        self,
        spec: ColumnSpec,
        streams: Sequence[tuple[Stream, int]],
        num_rows: int,
        fetch: Callable[[int, int], memoryview],
    ) -> tuple[Any, ...] | None:
        """All that the values depend on; None where they are not remembered."""
        if spec.type not in INTEGERS or self._misses[spec.column_id] > _MOST_MISSES:
            return None  # a column of which every rank has its own, such as times
        parts: list[Any] = [spec.name, spec.type, spec.optional, num_rows]
        for stream, position in streams:
            length = stream.stored_length
            if length > _MOST_STORED_BYTES or stream.part not in _PARTS or stream.encoding in REFERRING:
                return None
            parts += [stream, bytes(fetch(position, length))]  # their checksum is in the descriptor
        return tuple(parts)

    def _keep(self, key: tuple[Any, ...], column: Column) -> Column:
        with self._lock:
            self._num_bytes += column_bytes(column)
            if self._num_bytes > _MOST_DECODED_BYTES:
                self._columns.clear()
                self._num_bytes = column_bytes(column)
            return self._columns.setdefault(key, column)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._columns.clear()
            self._num_bytes = 0
            self._misses.clear()
