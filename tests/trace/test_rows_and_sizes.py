"""Rows come out as they went in, in little memory; sizes add up to the file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from trace_sample import GROUP

from prismtrace import TableKind, TraceReader, TraceUsageError, TraceWriter, file_sizes, iter_rows


def test_rows(sample: Path) -> None:
    with TraceReader(sample) as reader:
        batches = list(iter_rows(reader, steps=range(1, 2), columns=["kind", "group_id", "label", "splits_in", "peer"]))
        assert [(batch.rank, batch.row_index) for batch in batches] == [(0, [5, 6, 7, 8, 9]), (1, [5, 6, 7, 8, 9])]
        columns = batches[0].columns
        assert columns["kind"] == ["compute", "collective", "wait", "send", "wait"]
        assert columns["group_id"][1] == GROUP.group_id and columns["peer"] == [None, None, None, 1, None]
        assert columns["label"] == ["forward", None, None, "grüße", None]
        assert columns["splits_in"] == [None, [512, 512], None, [], None]
        (only,) = iter_rows(reader, table=TableKind.SCALARS, ranks=[1], limit=1)
        assert only.columns == {"step": [0], "name": ["loss"], "value": [1.5]}
        (numbers,) = iter_rows(reader, ranks=[0], limit=2, names=False, columns=["kind"])
        assert numbers.columns == {"kind": [1, 2]}
        with pytest.raises(TraceUsageError, match="no column 'x'"):
            list(iter_rows(reader, columns=["x"]))
        with pytest.raises(TraceUsageError, match="rank 9"):
            list(iter_rows(reader, ranks=[9]))


def test_memory_is_bounded(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "long") as writer:
        for start in range(0, 400_000, 20_000):
            times = np.arange(start, start + 20_000) * 1_000_003 % 2**40
            writer.add_units(0, {"kind": np.ones(20_000, np.uint8), "start_ns": times, "end_ns": times + 7})
    with TraceReader(tmp_path / "long") as reader:
        tracemalloc.start()
        count = sum(len(batch.row_index) for batch in iter_rows(reader))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert count == 400_000 and peak < 8 << 20


def test_sizes_add_up(sample: Path) -> None:
    with TraceReader(sample) as reader:
        sizes = file_sizes(reader)
    assert sizes.file_bytes == sample.stat().st_size
    columns = sum(column.stored_bytes for column in sizes.columns)
    assert 0 <= sizes.file_bytes - columns - sizes.payload_bytes - sizes.other_bytes < 1, "padding is of the headers"
    assert sizes.num_rows == {"units": 20, "steps": 4, "scalars": 4}
    named = {(column.table, column.column) for column in sizes.columns}
    assert {("units", "start_ns"), ("units", "(strings)"), ("units", "(digests)"), ("steps", "loss")} <= named
