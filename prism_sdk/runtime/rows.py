"""Where what stands in a row of the tracer, and the columns that rows become. The rows are made by the tracer.

A row is a list, because completion times and payloads are filled in later. It ends where nothing more is to be said:
computing after MEMORY, a wait after AWAITS; a communication has everything. Short rows are quick to make, and Python's
search for garbage passes over them quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prismtrace import ABSENT

(KIND, PHASE, START, END, NAMES, MEMORY, AWAITS, GROUP, SEQ, OP, REDUCE_OP, DTYPE, COUNT_IN, COUNT_OUT, PEER, TAG,
 ASYNC, PAYLOAD_IN, PAYLOAD_OUT, SPLITS_IN, SPLITS_OUT) = range(21)  # fmt: skip

_ABSENT32 = int(np.iinfo(np.int32).min)
# column, and what rows that end before it have there
_COLUMNS: tuple[tuple[str, int | None], ...] = (
    ("kind", 0), ("phase", 0), ("start_ns", 0), ("end_ns", 0), ("names", None), ("memory_bytes", ABSENT),
    ("awaits", ABSENT), ("group_id", 0), ("seq", ABSENT), ("op", 0), ("reduce_op", 0), ("dtype", 0),
    ("num_elements_in", ABSENT), ("num_elements_out", ABSENT), ("peer", _ABSENT32), ("tag", ABSENT), ("is_async", 0),
    ("payload_in", None), ("payload_out", None), ("splits_in", None), ("splits_out", None),
)  # fmt: skip


def columns_of(rows: Sequence[list[Any]]) -> dict[str, Any]:
    """The columns of these rows: arrays of whole numbers, lists where there are none (names, payloads, splits)."""
    columns: dict[str, Any] = {}
    given = np.arange(len(rows))
    for position, (name, default) in enumerate(_COLUMNS):
        if position in (AWAITS, GROUP):  # where some rows end
            given = np.array([at for at, row in enumerate(rows) if len(row) > position], dtype=np.int64)
        values = [rows[at][position] for at in given.tolist()]
        if default is None:
            column: list[Any] = [None] * len(rows)
            for at, value in zip(given.tolist(), values, strict=True):
                column[at] = value
            columns[name] = column
        else:
            dtype = np.uint64 if position == GROUP else np.int64
            columns[name] = np.full(len(rows), default, dtype=dtype)
            columns[name][given] = np.array(values, dtype=dtype)
    return columns
