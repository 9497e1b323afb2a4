"""Checks what a caller asks of a table: columns and steps.

Does not read.
"""

from __future__ import annotations

from collections.abc import Collection

from prismtrace.errors import TraceUsageError
from prismtrace.model import COLUMNS, ColumnSpec, TableKind


def specs_of(table: TableKind, columns: Collection[str] | None) -> list[ColumnSpec]:
    """The columns of the registry that are asked for; None = all."""
    if columns is None:
        return list(COLUMNS[table])
    if isinstance(columns, str):
        raise TraceUsageError(f"columns must be a collection of names, not the str {columns!r}")
    specs = [spec for spec in COLUMNS[table] if spec.name in columns]
    unknown = {name for name in set(columns) - {spec.name for spec in specs} if "." not in name}
    if unknown:
        wrong, known = ", ".join(map(repr, sorted(unknown))), ", ".join(spec.name for spec in COLUMNS[table])
        raise TraceUsageError(
            f"{table.name.lower()} have no column {wrong}; they have {known} (others are called OWNER.NAME)"
        )
    return specs


def selected_names(columns: Collection[str] | None) -> frozenset[str] | None:
    """The names that are asked for; None = all."""
    return None if columns is None else frozenset(columns)


def step_range(steps: range | int | None) -> range | None:
    """The steps that are asked for; None = all."""
    if steps is None:
        return None
    wanted = range(steps, steps + 1) if isinstance(steps, int) else steps
    if not isinstance(wanted, range) or wanted.step != 1:  # type: ignore[redundant-expr]
        raise TraceUsageError(f"steps must be a range with step 1, or one step, not {steps!r}")
    return wanted
