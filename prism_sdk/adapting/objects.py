"""Remembers something of objects by which they are, and forgets it with them. It keeps none of them alive."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

__all__ = ["OfObjects"]

V = TypeVar("V")


class OfObjects(Generic[V]):
    """A value for each of some objects, whatever they say of being equal.

    In its place a dict by `id` takes a new object for one that is gone and was at the same address.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[V, Any]] = {}

    def __contains__(self, one: object) -> bool:
        return id(one) in self._values

    def __setitem__(self, one: object, value: V) -> None:
        values, key = self._values, id(one)

        def forget(reference: Any) -> None:
            if key in values and values[key][1] is reference:
                del values[key]

        values[key] = value, weakref.ref(one, forget)

    def get(self, one: object) -> V | None:
        """What was remembered of it; None of an object that nothing is known of."""
        found = self._values.get(id(one))
        return None if found is None else found[0]
