"""Columns of equal bytes are decoded once, and every rank and chunk still gets its own rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from foreign_reader import read as foreign_read
from hypothesis import given, settings
from hypothesis import strategies as st

import prismtrace
from prismtrace import TraceReader, TraceWriter
from prismtrace.model import ABSENT

_VALUES = st.none() | st.integers(0, 3)


@st.composite
def _rows(draw: st.DrawFn) -> dict[str, list[Any]]:
    num_rows = draw(st.integers(1, 3))
    column = st.lists(_VALUES, min_size=num_rows, max_size=num_rows)
    names = draw(st.sets(st.sampled_from(("memory_bytes", "transfer_ns", "step", "peer")), min_size=1))
    return {"kind": [1] * num_rows, **{name: draw(column) for name in sorted(names)}}


@settings(max_examples=60, deadline=None)
@given(
    pool=st.lists(_rows(), min_size=1, max_size=3),
    picks=st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=2, max_size=4),
)
def test_a_second_reader_sees_the_same(pool: list[dict[str, list[Any]]], picks: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.prism"
        with TraceWriter(path, world_size=len(picks)) as writer:
            for rank, chosen in enumerate(picks):
                for number in chosen:
                    writer.add_units(rank, pool[number % len(pool)])
        assert prismtrace.to_json(path) == foreign_read(path.read_bytes())


def test_chunks_of_one_rank_with_the_same_bytes_have_rows_each(tmp_path: Path) -> None:
    values = ([7, None, 9], [None, 8, 9])
    picks = {0: [0], 1: [0, 1, 1], 2: [1], 3: [0]}
    with TraceWriter(tmp_path / "t.prism") as writer:
        for rank, chosen in picks.items():
            for number in chosen:
                writer.add_units(rank, {"kind": [1, 1, 1], "memory_bytes": values[number]})
    with TraceReader(tmp_path / "t.prism") as reader:
        for rank, chosen in picks.items():
            found = reader.units(rank).memory_bytes.tolist()
            assert found == [ABSENT if value is None else value for number in chosen for value in values[number]]
        assert reader.units(0).memory_bytes is reader.units(3).memory_bytes
