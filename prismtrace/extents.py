"""Checks that the rows of a table lie inside the steps and times that its chunks name.

Does not read tables: it compares one that was read with the index, by which others choose what to read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prismtrace.model import ABSENT, ABSENT32
from prismtrace.reader import TraceReader
from prismtrace.tables import Table


def rows_outside(reader: TraceReader, table: Table, *, role: int = 0) -> Iterator[tuple[int, str]]:
    """The first row of each chunk that a search by step or time would miss, and why.

    A chunk may name more than its rows have: those of other ranks count too.

    Args:
        reader: where the table came from.
        table: a whole table of a rank or, with `role`, of a role.
        role: the role that the table belongs to.
    """
    chunks = reader.chunk_ranges(table.table, table.rank, role=role)
    starts = np.searchsorted(table.row_index, chunks["first_row"].astype(np.int64)).tolist()
    columns = table.columns()
    for name, absent, first, last in (
        ("step", ABSENT32, "first_step", "last_step"),
        ("start_ns", ABSENT, "first_ns", "last_ns"),
        ("end_ns", ABSENT, "first_ns", "last_ns"),
    ):
        column = columns.get(name)
        if not isinstance(column, np.ndarray):
            continue
        for start, chunk in zip(starts, chunks, strict=True):
            part: NDArray[np.int64] = column[start : start + int(chunk["num_rows"])]
            low, high = int(chunk[first]), int(chunk[last])
            bad = np.flatnonzero((part != absent) & ((part < low) | (part > high)))
            if len(bad):
                row = int(table.row_index[start + int(bad[0])])
                yield row, f"{name} {int(part[bad[0]])}, its chunk names {low} .. {high}"
