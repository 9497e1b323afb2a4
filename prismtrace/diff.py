"""Says what changed between two traces: structure, times, groups, metadata, values.

Does not judge: `prism compare` holds an emulation against a real run, this only looks for differences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.alignment import Edits, compare
from prismtrace.differences import (
    CATEGORIES,
    Found,
    StructureChange,
    TraceDiff,
    group_text,
    unit_change,
    value_text,
)
from prismtrace.errors import TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, TableKind
from prismtrace.reader import TraceReader
from prismtrace.rewriting import TABLES, read_table
from prismtrace.source import TraceInput
from prismtrace.structure import (
    Hashes,
    column_numbers,
    group_numbers,
    order_hashes,
    row_hashes,
    what_hashes,
)
from prismtrace.tables import Table, UnitTable
from prismtrace.timing import TimingChange, timing_changes
from prismtrace.wording import counted

_TIME_COLUMNS: Final = ("start_ns", "end_ns", "transfer_ns", "gap_ns")
_PAYLOAD_COLUMNS: Final = ("payload_in", "payload_out")
_EVENT_TIMES: Final = ("start_ns", "end_ns")
_IDENTITY: Final = ("meta_crc", "data_crc", "length")


def diff(
    a: TraceInput, b: TraceInput, *, ignore: Collection[str] = (), max_items: int = 20, allow_unfinished: bool = False
) -> TraceDiff:
    """Compares two traces; see TraceDiff.

    Ranks are matched by number, units by what they are (kind, operation, sizes, group members, label ...), steps by
    number. Group ids need not be equal: groups match by members and description. Ranks whose chunks are the same
    bytes are not decoded.

    Args:
        a: the trace before.
        b: the trace after.
        ignore: categories (CATEGORIES) not to compare.
        max_items: how many differences of each category are described; all are counted.
        allow_unfinished: also reads files without an index.
    """
    if isinstance(ignore, str) or (unknown := set(ignore) - set(CATEGORIES)):
        names = ignore if isinstance(ignore, str) else ", ".join(sorted(unknown))
        raise TraceUsageError(f"cannot ignore {names!r}; there are: {', '.join(CATEGORIES)}")
    with (
        TraceReader(a, allow_unfinished=allow_unfinished) as before,
        TraceReader(b, allow_unfinished=allow_unfinished) as after,
    ):
        return _Diff(before, after, frozenset(ignore), max_items).run()


class _Diff:
    def __init__(self, a: TraceReader, b: TraceReader, ignored: frozenset[str], max_items: int) -> None:
        self._a, self._b, self._ignored = a, b, ignored
        self._found = Found(max_items)
        self._groups = (group_numbers(a.groups), group_numbers(b.groups))
        self._same_groups = dict(a.groups) == dict(b.groups)

    def _wants(self, *categories: str) -> bool:
        return any(category not in self._ignored for category in categories)

    def run(self) -> TraceDiff:
        a, b, found = self._a, self._b, self._found
        self._facts()
        common = sorted(set(a.ranks) & set(b.ranks))
        identical = set(common) if self._same_file() else {rank for rank in common if self._same_bytes(rank)}
        for rank in common:
            if rank not in identical:
                self._rank(rank)
        timing: tuple[TimingChange, ...] = ()
        if self._wants("times") and found.counts["times"]:
            timing = timing_changes(a, b, common, max_items=found.max_items)
        counts = {name: found.counts[name] for name in CATEGORIES if found.counts[name] and name not in self._ignored}
        return TraceDiff(
            a.path,
            b.path,
            MappingProxyType(counts),
            tuple(found.structure) if self._wants("structure") else (),
            timing,
            tuple(item for item in found.values if item.category not in self._ignored),
            a._index.total_rows(TableKind.UNITS),
            b._index.total_rows(TableKind.UNITS),
            len(identical),
            found.largest,
            tuple(sorted(self._ignored)),
        )

    def _facts(self) -> None:
        a, b, found = self._a, self._b, self._found
        for name in ("graph_kind", "world_size"):  # the version says how it is written, not what
            before, after = getattr(a, name), getattr(b, name)
            if before != after:
                texts = [getattr(value, "name", str(value)).lower() for value in (before, after)]
                found.add("header", name, *texts)
        in_a, in_b = (reader._index.rank_set for reader in (a, b))
        single = sorted(in_a ^ in_b)
        for rank in single[: found.max_items]:  # of a million, maybe
            units = counted((a if rank in in_a else b).num_units(rank), "unit")
            found.add("ranks", f"rank {rank}", *((units, None) if rank in in_a else (None, units)))
        found.counts["ranks"] += max(len(single) - found.max_items, 0)
        for key in sorted(set(a.metadata) | set(b.metadata)):
            before, after = a.metadata.get(key), b.metadata.get(key)
            if before != after:
                found.add("metadata", key, before, after)
        self._group_changes()
        only_a, only_b = (set(one.payload_digests) - set(two.payload_digests) for one, two in ((a, b), (b, a)))
        if only_a or only_b:
            found.add("payloads", "payloads in one file only", len(only_a), len(only_b), number=len(only_a | only_b))

    def _group_changes(self) -> None:
        sides = []
        for reader, numbers in ((self._a, self._groups[0]), (self._b, self._groups[1])):
            sides.append({numbers[group_id]: group for group_id, group in reader.groups.items()})
        for number in [*sides[0], *(key for key in sides[1] if key not in sides[0])]:
            before, after = sides[0].get(number), sides[1].get(number)
            if before is None or after is None:
                known = before or after
                assert known is not None
                self._found.add(
                    "groups", f"group {known.name or known.group_id}", group_text(before), group_text(after)
                )
            elif (before.name, before.backend) != (after.name, after.backend):
                self._found.add("groups", f"group {before.name}", group_text(before), group_text(after))

    def _same_file(self) -> bool:
        """Whether all chunks of both files, those of roles too, are the same bytes in the same order."""
        a, b = (reader._index.chunk_entries for reader in (self._a, self._b))
        same = len(a) == len(b) and not any((a[name] != b[name]).any() for name in _IDENTITY)
        return same and self._same_groups

    def _same_bytes(self, rank: int) -> bool:
        """Whether the tables of a rank are the same bytes in both files; those of roles are decoded."""
        if not self._same_groups:
            return False
        for kind in TABLES:
            mine, other = (reader._index.entries(kind, rank) for reader in (self._a, self._b))
            if mine["role"].any() or other["role"].any():
                return False
            if len(mine) != len(other) or any((mine[name] != other[name]).any() for name in _IDENTITY):
                return False
        return True

    def _rank(self, rank: int) -> None:
        for kind in TABLES:
            tables = [read_table(reader, kind, rank) for reader in (self._a, self._b)]
            if kind is TableKind.UNITS:
                self._units(rank, *tables)
            elif kind is TableKind.STEPS:
                self._steps(rank, *tables)
            elif kind is TableKind.SCALARS:
                self._scalars(rank, *tables)
            if kind.name in ("EVENTS", "TRACKS"):
                self._events(kind, rank, *tables)
            else:
                self._named_columns(kind, rank, *tables)

    # --- units -------------------------------------------------------------------------------------------------------

    def _units(self, rank: int, a: Any, b: Any) -> None:
        what = [what_hashes(units, groups) for units, groups in zip((a, b), self._groups, strict=True)]
        if len(a) == len(b) and np.array_equal(what[0], what[1]):
            self._order(rank, a, b, what)
            self._aligned_values(rank, a, b)
            return
        self._step_structure(rank, a, b, what)
        for category, columns in (("times", _TIME_COLUMNS[:2]), ("memory", ("memory_bytes",))):
            if self._wants(category) and any(_totals(getattr(a, n)) != _totals(getattr(b, n)) for n in columns):
                self._found.counts[category] += 1

    def _order(self, rank: int, a: UnitTable, b: UnitTable, what: list[Hashes]) -> None:
        order = [order_hashes(units, hashes) for units, hashes in zip((a, b), what, strict=True)]
        rows = np.flatnonzero(order[0] != order[1])
        if not len(rows):
            return
        for step in np.unique(a.step[rows]).tolist():
            mine = rows[a.step[rows] == step]
            self._structure(rank, step, Edits(0, 0, len(mine), 0, 0), unit_change(a, b, int(mine[0]), int(mine[0])))

    def _step_structure(self, rank: int, a: UnitTable, b: UnitTable, what: list[Hashes]) -> None:
        for step in np.union1d(a.step, b.step).tolist():
            rows = [np.flatnonzero(units.step == step) for units in (a, b)]
            edits = compare(what[0][rows[0]], what[1][rows[1]])
            if edits is None:
                continue
            at = [
                int(mine[place]) if place < len(mine) else None
                for mine, place in zip(rows, (edits.first_a, edits.first_b), strict=True)
            ]
            self._structure(rank, step, edits, unit_change(a, b, *at))

    def _structure(self, rank: int, step: int, edits: Edits, first: str) -> None:
        found = self._found
        found.counts["structure"] += edits.num_added + edits.num_removed + edits.num_changed
        if len(found.structure) < found.max_items:
            number = None if step == ABSENT32 else step
            found.structure.append(
                StructureChange(rank, number, edits.num_added, edits.num_removed, edits.num_changed, first, edits.exact)
            )

    def _aligned_values(self, rank: int, a: UnitTable, b: UnitTable) -> None:
        """Times, memory and payloads of units that match one to one."""
        for category, columns in (
            ("times", _TIME_COLUMNS),
            ("memory", ("memory_bytes",)),
            ("payloads", _PAYLOAD_COLUMNS),
        ):
            if not self._wants(category):
                continue
            unequal = np.zeros(len(a), np.bool_)
            for name in columns:
                unequal |= column_numbers(getattr(a, name)) != column_numbers(getattr(b, name))
            rows = np.flatnonzero(unequal)
            if not len(rows):
                continue
            if category == "times":
                self._found.counts["times"] += len(rows)
                continue
            row, pair = int(rows[0]), []
            for units in (a, b):
                values = [getattr(units, name)[row] for name in columns]
                pair.append(", ".join(value_text(value) for value in values))
            where = f"rank {rank}, unit {int(a.row_index[row])} (and {len(rows) - 1} more)"
            self._found.add(category, where, *pair, number=len(rows))

    # --- other tables ------------------------------------------------------------------------------------------------

    def _steps(self, rank: int, a: Any, b: Any) -> None:
        numbers, in_a, in_b = np.intersect1d(a.step, b.step, return_indices=True)
        for step in np.setxor1d(a.step, b.step).tolist():
            has = [int(step) in steps.step for steps in (a, b)]
            self._found.add("structure", f"rank {rank}, step {step}", *("completed" if one else None for one in has))
        for category, names in (("times", ("start_ns", "end_ns", "cpu_time_ns")), ("memory", ("memory_peak_bytes",))):
            if self._wants(category):
                pairs = [(getattr(a, name)[in_a], getattr(b, name)[in_b]) for name in names]
                unequal = np.any([one != two for one, two in pairs], axis=0)
                rows = np.flatnonzero(unequal)
                if len(rows) and category == "times":
                    self._found.counts["times"] += len(rows)
                elif len(rows):
                    step, (one, two) = numbers[rows[0]], pairs[0]
                    where = f"rank {rank}, step {step} (and {len(rows) - 1} more)"
                    self._found.add(
                        category, where, value_text(one[rows[0]]), value_text(two[rows[0]]), number=len(rows)
                    )
        if self._wants("scalars"):
            labels = [f"step {step} loss" for step in numbers.tolist()]
            self._values(rank, labels, a.loss[in_a], b.loss[in_b], absent_is_nan=True)

    def _scalars(self, rank: int, a: Any, b: Any) -> None:
        if not self._wants("scalars"):
            return
        sides: list[dict[tuple[int, str | None, int], float]] = []
        for table in (a, b):
            seen: Counter[tuple[int, str | None]] = Counter()
            side: dict[tuple[int, str | None, int], float] = {}
            for step, name, value in zip(table.step.tolist(), table.name, table.value.tolist(), strict=True):
                side[step, name, seen[step, name]] = value
                seen[step, name] += 1
            sides.append(side)
        only = set(sides[0]) ^ set(sides[1])
        if only:
            counts = [len(set(side) & only) for side in sides]
            self._found.add("scalars", f"rank {rank}: values on one side only", *counts, number=len(only))
        common = [key for key in sides[0] if key in sides[1]]
        names = [f"step {step} {name} #{place}" for step, name, place in common]
        values = [np.array([side[key] for key in common], np.float64) for side in sides]
        self._values(rank, names, *values, absent_is_nan=False)

    def _values(
        self, rank: int, names: list[str], a: NDArray[np.float64], b: NDArray[np.float64], *, absent_is_nan: bool
    ) -> None:
        """Compares floats bit by bit, and remembers the largest difference."""
        bits = [np.ascontiguousarray(values).view(np.int64) for values in (a, b)]
        rows = np.flatnonzero((bits[0] != bits[1]) & ~(np.isnan(a) & np.isnan(b)))
        if not len(rows):
            return
        with np.errstate(invalid="ignore"):
            sizes = np.abs(a[rows] - b[rows])
        both = np.isfinite(sizes)
        if both.any():
            self._found.largest = max(self._found.largest or 0.0, float(sizes[both].max()))
        largest = int(np.argmax(np.where(both, sizes, np.inf)))
        where = f"rank {rank}, {names[rows[largest]]} (the largest of {len(rows)})"
        pair = (float(side[rows[largest]]) for side in (a, b))
        texts = ("absent" if absent_is_nan and math.isnan(value) else str(value) for value in pair)
        self._found.add("scalars", where, *texts, number=len(rows))

    def _named_columns(self, kind: TableKind, rank: int, a: Table, b: Table) -> None:
        """Columns that the registry does not name."""
        if not self._wants("columns"):
            return
        known = {spec.name for spec in COLUMNS[kind]}
        columns = [{name for name in table.columns() if name not in known} for table in (a, b)]
        for name in sorted(columns[0] ^ columns[1]):
            has = ("present" if name in side else None for side in columns)
            self._found.add("columns", f"rank {rank}, {kind.name.lower()}: {name}", *has)
        if len(a) != len(b):
            return
        for name in sorted(columns[0] & columns[1]):
            numbers = [column_numbers(table.columns()[name]) for table in (a, b)]
            rows = np.flatnonzero(numbers[0] != numbers[1])
            if len(rows):
                where = f"rank {rank}, {kind.name.lower()}: {name}, row {rows[0]} (and {len(rows) - 1} more)"
                pair = (value_text(table.columns()[name][int(rows[0])]) for table in (a, b))
                self._found.add("columns", where, *pair, number=len(rows))

    def _events(self, kind: TableKind, rank: int, a: Table, b: Table) -> None:
        if not self._wants("events"):
            return
        what = f"rank {rank}: {kind.name.lower()}"
        names = sorted(set(a.columns()) | set(b.columns()))
        if any(name not in table.columns() and "." in name for name in names for table in (a, b)):
            self._found.add("events", what, *(", ".join(sorted(table.columns())) for table in (a, b)))
            return
        hashes = [row_hashes(table, [name for name in names if name not in _EVENT_TIMES]) for table in (a, b)]
        edits = compare(*hashes)
        if edits is not None:
            number = edits.num_added + edits.num_removed + edits.num_changed
            self._found.add("events", what, counted(len(a), "row"), counted(len(b), "row"), number=number)
        elif self._wants("times"):
            times = [row_hashes(table, [name for name in names if name in _EVENT_TIMES]) for table in (a, b)]
            self._found.counts["times"] += int(np.count_nonzero(times[0] != times[1]))


def _totals(column: NDArray[np.int64]) -> tuple[int, int]:
    known = column[column != ABSENT]
    return len(known), int(known.sum()) if len(known) else 0
