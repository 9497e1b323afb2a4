"""The events of one document as plain arrays: name, category, times, track, ids. Derives nothing from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT
from prismtrace_kineto.columns import Columns, Shape, decimal_texts
from prismtrace_kineto.lossless import nanoseconds
from prismtrace_kineto.scanner import decode

Array = NDArray[Any]
Ints = NDArray[np.int64]
_EXACT: Final = frozenset({"i", "d0", "d1", "d2", "d3", "v1", "v2", "v3"})
_MAX_NS: Final = (1 << 62) - 1  # a start and a duration fit together


def field_values(kind: str, values: Array, strings: Sequence[str]) -> list[Any]:
    """The values of a column as JSON values."""
    if kind == "s":
        return [strings[code] for code in values.tolist()]
    if kind in "rj":
        return [decode(strings[code]) for code in values.tolist()]
    if kind == "b":
        return [bool(value) for value in values.tolist()]
    if kind[0] in "dv":
        return [Decimal(text) for text in decimal_texts(kind, values)]
    return [int(value) for value in values.tolist()]


@dataclass
class Timeline:
    """One document. Arrays have one row for each event; absent numbers are ABSENT, absent codes -1."""

    columns: Columns
    first: int
    last: int
    tracks: list[tuple[Any, Any]]
    shape: NDArray[np.uint32]
    place: Ints
    """Row of the event within its shape's columns."""
    name: Ints
    category: Ints
    phase: Ints
    track: Ints
    start_ns: Ints
    end_ns: Ints
    correlation: Ints
    external_id: Ints
    flow_id: Ints
    flow_phase: Ints
    categories: list[str | None]
    phases: list[str | None]
    counts: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.last - self.first

    def names(self, rows: Array) -> list[str]:
        """Names of some rows; empty where an event has none."""
        strings = self.columns.strings
        return [strings[code] if code >= 0 else "" for code in self.name[rows].tolist()]

    def argument(self, row: int, name: str) -> Any:
        """One value in `args` of one event; None when it is not there."""
        shape = self.columns.shapes[self.shape[row]]
        wanted = f"args.{name}"
        for index, (path, kind) in enumerate(shape.fields):
            if path == wanted:
                value = self.columns.data[self.shape[row]][index][self.place[row] : self.place[row] + 1]
                return field_values(kind, value, self.columns.strings)[0]
        return None

    def in_categories(self, wanted: frozenset[str]) -> NDArray[np.bool_]:
        """Which rows have a category of this set (lower case)."""
        known = np.array([(name or "").lower() in wanted for name in self.categories] + [False], np.bool_)
        result: NDArray[np.bool_] = known[self.category]
        return result

    def is_phase(self, letter: str) -> NDArray[np.bool_]:
        """Which rows have this `ph`."""
        result: NDArray[np.bool_] = self.phase == (self.phases.index(letter) if letter in self.phases else -2)
        return result


def timelines(columns: Columns, bases: Sequence[int]) -> list[Timeline]:
    """One timeline for each document; `bases` are added to the times of each, in nanoseconds."""
    positions = columns.positions()
    result = []
    first = 0
    for number, (last, base) in enumerate(zip(columns.ends, bases, strict=True)):
        result.append(_timeline(columns, positions, first, last, number, base))
        first = last
    return result


def _codes(values: Sequence[str | None]) -> tuple[list[str | None], Ints]:
    known: dict[str | None, int] = {}
    codes = [known.setdefault(value, len(known)) for value in values]
    return list(known), np.array(codes, np.int64)


def _timeline(
    columns: Columns, positions: list[Ints], first: int, last: int, number: int, base: int
) -> Timeline:  # fmt: skip
    count = last - first
    shape = columns.order[first:last]
    categories, category_of = _codes([item.cat for item in columns.shapes])
    phases, phase_of = _codes([item.ph for item in columns.shapes])

    def full(value: int) -> Ints:
        return np.full(count, value, np.int64)

    line = Timeline(
        columns, first, last, columns.tracks[number], shape, full(0), full(-1), category_of[shape], phase_of[shape],
        full(-1), full(ABSENT), full(ABSENT), full(ABSENT), full(ABSENT), full(ABSENT), full(-1), categories, phases,
    )  # fmt: skip
    for index in np.unique(shape).tolist():
        rows = positions[index]
        low, high = np.searchsorted(rows, [first, last])
        _fill(line, columns.shapes[index], columns.data[index], rows[low:high] - first, int(low), int(high), base)
    return line


def _fill(line: Timeline, shape: Shape, data: list[Array], rows: Ints, low: int, high: int, base: int) -> None:
    line.place[rows] = np.arange(low, high)
    targets = {"track": line.track, "args.correlation": line.correlation, "args.External id": line.external_id}
    targets |= {"args.external id": line.external_id, "flow": line.flow_id, "id": line.flow_id}
    duration: Ints | None = None
    if shape.odd:
        _count(line, "elements among the events that are no events", len(rows))
    for (name, kind), column in zip(shape.fields, data, strict=True):
        values = column[low:high]
        if name == "name" and kind == "s":
            line.name[rows] = values
        elif kind in "it" and name in targets:
            targets[name][rows] = values
        elif name == "name":
            _count(line, "names that are no text are left out", len(rows))
        elif name in targets:
            _count(line, f"ids ({name.removeprefix('args.')}) that are no whole numbers are left out", len(rows))
        elif name == "ts":
            line.start_ns[rows] = _times(line, kind, values, base)
        elif name == "dur":
            duration = _times(line, kind, values, 0)
    if shape.flow is not None:
        line.flow_phase[rows] = "stf".index(dict(shape.flow.constants)["ph"])
        if shape.flow.id_is_correlation:
            line.flow_id[rows] = line.correlation[rows]
    if duration is not None:
        negative = (duration < 0) & (duration != ABSENT)
        if negative.any():
            _count(line, "negative durations", int(negative.sum()))
        usable = (duration >= 0) & (line.start_ns[rows] != ABSENT)
        line.end_ns[rows[usable]] = line.start_ns[rows[usable]] + duration[usable]


def _count(line: Timeline, what: str, number: int) -> None:
    line.counts[what] = line.counts.get(what, 0) + number


def _times(line: Timeline, kind: str, values: Ints, base: int) -> Ints:
    if kind in _EXACT:
        factor = 1000 if kind == "i" else 10 ** (3 - int(kind[1:]))
        limit = (_MAX_NS - abs(base)) // factor
        fits = (values <= limit) & (values >= -limit)
        if not fits.all():
            _count(line, "times out of range", int((~fits).sum()))
        return np.where(fits, nanoseconds(kind, np.where(fits, values, 0)) + base, ABSENT)
    result = np.full(len(values), ABSENT, np.int64)
    for index, value in enumerate(field_values(kind, values, line.columns.strings)):
        if isinstance(value, str):
            _count(line, "times written as strings", 1)
        elif not isinstance(value, Decimal | int) or isinstance(value, bool):
            _count(line, "times that are no numbers", 1)
            continue
        try:
            exact = Decimal(value) * 1000
            rounded = int(exact.to_integral_value())
        except (InvalidOperation, ValueError, OverflowError):
            _count(line, "times that are no numbers", 1)
            continue
        if abs(rounded + base) > _MAX_NS:
            _count(line, "times out of range", 1)
            continue
        if rounded != exact:
            _count(line, "times finer than a nanosecond, rounded", 1)
        result[index] = rounded + base
    return result
