"""Remembers what follows from arrays that many ranks share, by the identity of these arrays.

It compares no contents: readers give the ranks of one role, and ranks whose bytes are equal, the very same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Recalled", "fixed"]

V = TypeVar("V")
Array = npt.NDArray[Any]


class Recalled:
    """Values by what they are and the arrays that they follow from, which are kept as long as the value is."""

    def __init__(self, *, most_bytes: int = 32 << 20) -> None:
        self._values: dict[tuple[Any, ...], tuple[Any, tuple[Array, ...]]] = {}
        self._most_bytes = most_bytes
        self._num_bytes = 0

    def get(self, what: object, arrays: Sequence[Array]) -> Any | None:
        """The value that was put, None where there is none (any more)."""
        found = self._values.get((what, *map(id, arrays)))
        return None if found is None else found[0]

    def put(self, what: object, arrays: Sequence[Array], value: V) -> V:
        """Remember a value, which must not be None; returns it."""
        self._num_bytes += sum([array.nbytes for array in arrays])
        if self._num_bytes > self._most_bytes:
            self._values.clear()
            self._num_bytes = 0
        self._values[(what, *map(id, arrays))] = value, tuple(arrays)
        return value

    def of(self, function: Callable[..., V], *arrays: Array) -> V:
        """``function`` of the arrays, computed once as long as it is remembered."""
        found: V | None = self.get(function, arrays)
        return self.put(function, arrays, function(*arrays)) if found is None else found


def fixed(values: Array, dtype: type[np.generic]) -> Array:
    """The array read-only and in one layout, itself where it is so: compiled code is made for one layout only."""
    wanted = np.dtype(dtype)
    if values.dtype == wanted:
        array = values
    elif values.dtype.kind in "ui" and values.dtype.itemsize == wanted.itemsize:
        array = values.view(wanted)
    else:
        array = values.astype(wanted)
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = np.array(array)
        flags = array.flags
    if flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
