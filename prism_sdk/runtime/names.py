"""The names of units as adapters gave them, and the columns that they become. Who gives them is in adapters.py."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_MOST_TEXT_BYTES = 1 << 12  # of a name
_INDEX_LIMIT = 1 << 31
_MOST_COLUMN = 200  # characters; the format has room for 1,024 bytes
_INT64 = range(-(1 << 63), 1 << 63)

_ABSENT32 = int(np.iinfo(np.int32).min)

# the registry's own columns, and named columns whose owner is Prism
_NUMBER_COLUMNS = ("microbatch", "stage", "model_chunk")
_TEXT_COLUMNS = {
    "label": "label", "part": "prism.part", "layer": "prism.layer", "schedule": "prism.schedule",
    "adapter": "prism.adapter",
}  # fmt: skip


class Names:
    """What framework adapters say of the units of one stretch; compared by identity, which is fast."""

    __slots__ = ("adapter", "label", "layer", "microbatch", "model_chunk", "part", "schedule", "stage")

    def __init__(
        self, label: str | None = None, microbatch: int | None = None, stage: int | None = None,
        model_chunk: int | None = None, part: str | None = None, layer: str | None = None,
        schedule: str | None = None, adapter: str | None = None,
    ) -> None:  # fmt: skip
        self.label = label
        self.microbatch = microbatch
        self.stage = stage
        self.model_chunk = model_chunk
        self.part = part
        self.layer = layer
        self.schedule = schedule
        self.adapter = adapter

    def with_part_of(self, other: Names) -> Names:
        """These names with the part of `other`."""
        return Names(
            self.label, self.microbatch, self.stage, self.model_chunk, other.part, self.layer, self.schedule,
            self.adapter,
        )  # fmt: skip


def checked_index(value: Any) -> int:
    """An index that a column can hold; everything that can be one exactly counts, such as a numpy integer.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative, or too large.
    """
    number = operator.index(value)
    if not 0 <= number < _INDEX_LIMIT:
        raise ValueError(f"an index is from 0 to {_INDEX_LIMIT - 1}, and not {number}")
    return number


def checked_text(value: Any) -> str:
    """A text that a column can hold: half surrogates become escapes.

    Raises:
        TypeError: it is no text.
        ValueError: it is too long.
    """
    if not isinstance(value, str):
        raise TypeError(f"a text is needed, and not {type(value).__name__}")
    data = value.encode("utf-8", "backslashreplace")
    if len(data) > _MOST_TEXT_BYTES:
        raise ValueError(f"a text of {len(data)} bytes is too long: at most {_MOST_TEXT_BYTES}")
    return data.decode()


PASSES = (None, "forward", "backward", "input_grad", "weight_grad")  # parts that say no more than the pass does
FIELDS = ("phase", "microbatch", "stage", "model_chunk", "label", "part", "layer", "schedule")  # what is said, in order
_KEPT = (int, str, np.integer, float, type(None))


def checked(said: tuple[Any, ...], failed: Callable[[str], None]) -> tuple[tuple[Any, ...], bool]:
    """What an adapter said of a stretch as columns can hold it; a wrong value is absent, and `failed` is told.

    Args:
        said: the names around it, then the values in the order of `FIELDS`.
        failed: gets a sentence for each wrong value.

    Returns:
        The same without wrong values, and whether it may be kept as the key of a dict: a tensor lives too long there.
    """
    found: list[Any] = [said[0]]
    for field, value in zip(FIELDS, said[1:], strict=True):
        try:
            if value is not None and field != "phase":
                value = checked_index(value) if field in _NUMBER_COLUMNS else checked_text(value)
        except Exception as error:  # of a value that may be anything
            failed(f"{field}: {error}")
            value = None
        found.append(value)
    return tuple(found), all(isinstance(value, _KEPT) for value in said[1:])


def name_columns(names: Sequence[Names | None]) -> dict[str, Any]:
    """The columns of rows with these names; none when no row has any."""
    if not any(names):
        return {}
    columns: dict[str, Any] = {}
    for field, column in _TEXT_COLUMNS.items():
        columns[column] = [None if one is None else getattr(one, field) for one in names]
    for field in _NUMBER_COLUMNS:
        given = [None if one is None else getattr(one, field) for one in names]
        columns[field] = np.array([_ABSENT32 if value is None else value for value in given], dtype=np.int64)
    return columns


class Notes:
    """Lists of integers for named columns, each for one unit; callables are asked when rows are written.

    What cannot be written is left out, and the one that gave it is told by its `failed`.
    """

    def __init__(self) -> None:
        self._notes: list[tuple[int, str, Any, Callable[[str], None]]] = []

    def add(
        self, unit: int, column: str, value: Sequence[int] | Callable[[], Sequence[int]], failed: Callable[[str], None]
    ) -> None:
        """Keep a value for the column of row `unit`."""
        self._notes.append((unit, column, value, failed))

    def settle(self) -> None:
        """Ask every callable now: nothing fails any more when rows are written."""
        settled = []
        for unit, column, value, failed in self._notes:
            try:
                settled.append((unit, column, _integers(value() if callable(value) else value), failed))
            except Exception as error:  # an adapter's fault must not reach the training
                failed(f"note {column}: {type(error).__name__}: {error}")
        self._notes = settled

    def columns(self, first: int, num: int) -> dict[str, list[list[int] | None]]:
        """The columns of rows `first` to `first + num`; what they took is forgotten."""
        kept = [note for note in self._notes if note[0] >= first + num]
        self._notes = [note for note in self._notes if note[0] < first + num]
        self.settle()
        columns: dict[str, list[list[int] | None]] = {}
        for unit, column, value, _ in self._notes:
            if unit >= first:
                columns.setdefault(column, [None] * num)[unit - first] = value
        self._notes = kept
        return columns


def _integers(values: Any) -> list[int]:
    found = [int(one) for one in values]
    for one in found:
        if one not in _INT64:
            raise ValueError(f"{one} is no integer of 64 bits")
    return found


def check_note(column: Any) -> None:
    """Refuse a column that an adapter cannot have.

    Raises:
        ValueError: it is not OWNER.NAME, or its owner is Prism.
    """
    owner, dot, name = column.partition(".") if isinstance(column, str) else ("", "", "")
    if not (owner and dot and name.strip(".")) or column != checked_text(column) or len(column) > _MOST_COLUMN:
        raise ValueError(f"the column {column!r:.60} is not OWNER.NAME of at most {_MOST_COLUMN} characters")
    if owner == "prism":
        raise ValueError(f"the column {column!r} is one of Prism's own; take another owner")
