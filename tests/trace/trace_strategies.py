"""Random tables for the trace tests.

Does not test anything itself.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

from prismtrace.model import COLUMNS, ColumnSpec, ColumnType, TableKind

_INT64 = st.integers(-(2**63) + 1, 2**63 - 1)
_RANGES = {
    ColumnType.UINT8: st.integers(0, 255),
    ColumnType.INT32: st.integers(-(2**31) + 1, 2**31 - 1) | st.integers(0, 9),
    ColumnType.INT64: _INT64 | st.integers(0, 9) | st.integers(0, 10**6).map(lambda value: value * 1000),
    ColumnType.UINT64: st.integers(0, 2**64 - 1) | st.sampled_from([1, 2**63, 2**64 - 1]),
    ColumnType.FLOAT64: st.floats(allow_nan=False),
    ColumnType.BOOL: st.booleans(),
    ColumnType.STRING: st.text(st.characters(codec="utf-8"), max_size=6),
    ColumnType.DIGEST: st.binary(min_size=16, max_size=16),
    ColumnType.LIST_INT64: st.lists(_INT64, max_size=4),
}


def values(spec: ColumnSpec) -> st.SearchStrategy[Any]:
    """One value of a column, None included where it may be absent."""
    value = _RANGES[spec.type]
    return st.none() | value if spec.optional else value


@st.composite
def tables(
    draw: st.DrawFn, table: TableKind, *, max_rows: int = 12, num_rows: int | None = None
) -> dict[str, list[Any]]:
    """Columns of one table with a common number of rows; some columns are left out, some constant."""
    if num_rows is None:
        num_rows = draw(st.integers(0, max_rows))
    chosen = draw(st.lists(st.sampled_from(COLUMNS[table]), unique_by=lambda spec: spec.name, max_size=8))
    columns = {}
    for spec in chosen:
        if draw(st.booleans()):
            columns[spec.name] = draw(st.lists(values(spec), min_size=num_rows, max_size=num_rows))
        else:
            columns[spec.name] = [draw(values(spec))] * num_rows
    return columns
