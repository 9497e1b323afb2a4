"""Times come back exactly from every encoding that the writer has for them, and take the room that they should."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_reader import read as foreign_read
from hypothesis import given, settings
from hypothesis import strategies as st

import prismtrace
from prismtrace import TraceReader, TraceWriter
from prismtrace._generated.schema import Encoding
from prismtrace.index import read_meta
from prismtrace.metas import parse_chunk
from prismtrace.ticks import FLOAT32_SHIFT, Tick, find_tick


def encodings(path: Path) -> dict[int, tuple[int, int, int]]:
    """Column id -> encoding, scale and shift of its values in the first chunk."""
    with TraceReader(path) as reader:
        offset = int(reader._index.chunk_entries["offset"][0])
        meta = parse_chunk(read_meta(reader._source, offset)[1], path=reader.path, offset=offset)
    return {stream.column: (stream.encoding, stream.scale, stream.shift) for stream in meta.streams if stream.part == 1}


def written(columns: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[int, tuple[int, int, int]]]:
    """The columns as both readers give them back, and their encodings."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.prism"
        with TraceWriter(path) as writer:
            writer.add_units(0, columns)
        twin = prismtrace.to_json(path)
        assert foreign_read(path.read_bytes()) == twin
        return twin["ranks"]["0"]["units"]["columns"], encodings(path)


@settings(max_examples=150, deadline=None)
@given(
    base=st.integers(-(2**40), 2**50),
    unit=st.sampled_from([1, 10**3, 10**6, 10**9]),
    grid=st.sampled_from(["ns", "float32", "2**-22"]),
    lengths=st.lists(st.integers(0, 10**8), min_size=2, max_size=40),
    gaps=st.lists(st.none() | st.integers(0, 3000), min_size=40, max_size=40),
)
def test_starts_and_ends_come_back(base: int, unit: int, grid: str, lengths: list[int], gaps: list[int | None]) -> None:
    n = len(lengths)
    step = [length + (gap or 0) for length, gap in zip(lengths, gaps, strict=False)]
    start = np.array([base + sum(step[:i]) for i in range(n)], np.int64)
    end = start + np.array(lengths, np.int64)
    if grid == "float32":
        start, end = (
            np.rint((v / unit).astype(np.float32).astype(np.float64) * unit).astype(np.int64) for v in (start, end)
        )
    elif grid == "2**-22":
        start, end = (np.rint(np.rint(v / unit * 2**22) / 2**22 * unit).astype(np.int64) for v in (start, end))
    absent = [gap is None for gap in gaps[:n]]
    ends = [None if gone else value for value, gone in zip(end.tolist(), absent, strict=True)]
    columns, _ = written({"start_ns": start, "end_ns": ends})
    assert columns["start_ns"] == [str(value) for value in start.tolist()]
    assert columns.get("end_ns", [None] * n) == [None if value is None else str(value) for value in ends]


def test_rows_that_follow_each_other_say_only_the_gap() -> None:
    rng = np.random.default_rng(1)
    lengths, gaps = rng.integers(10**6, 10**8, 500), rng.integers(0, 200, 500)
    start = np.cumsum(lengths + gaps) - lengths
    _, told = written({"start_ns": start, "end_ns": start + lengths})
    assert told[4][0] == Encoding.CONTINUED
    assert told[5][0] == Encoding.DIFFERENCE


@pytest.mark.parametrize(("unit", "scale"), [(10**9, 10**9), (10**6, 10**6)])
def test_times_that_were_floats_take_the_room_of_floats(unit: int, scale: int) -> None:
    rng = np.random.default_rng(2)
    length = rng.normal(60e6, 2e6, 300)
    seconds = (np.cumsum(length + 5e6) / unit).astype(np.float32)
    start = np.rint(seconds.astype(np.float64) * unit).astype(np.int64)
    end = np.rint((start / unit + length / unit).astype(np.float32).astype(np.float64) * unit).astype(np.int64)
    _, told = written({"start_ns": start, "end_ns": end})
    assert told[4][1:] == told[5][1:] == (scale, FLOAT32_SHIFT)


def test_times_of_a_python_clock_are_on_its_grid() -> None:
    rng = np.random.default_rng(3)
    seconds = 1_790_000_000.0 + np.cumsum(rng.random(300))
    start = np.rint(seconds * 2**22).astype(np.int64)
    assert find_tick(Tick(10**9, 22).values(start)) == Tick(10**9, 22)
    _, told = written({"start_ns": Tick(10**9, 22).values(start)})
    assert told[4] == (Encoding.DELTA, 10**9, 22)


@given(ticks=st.lists(st.integers(-(2**32), 2**32), min_size=1), scale=st.sampled_from([3, 125, 10**3, 10**6, 10**9]))
def test_ticks_and_values_are_inverse(ticks: list[int], scale: int) -> None:
    for shift in range(29):
        if scale >> shift < 2:
            break
        tick, numbers = Tick(scale, shift), np.array(ticks, np.int64)
        assert (tick.ticks(tick.values(numbers)) == numbers).all()
        exact = [round(n * scale / 2**shift) for n in ticks if abs(n * scale) < 2**52]
        assert [v for v, n in zip(tick.values(numbers).tolist(), ticks, strict=True) if abs(n * scale) < 2**52] == exact


@pytest.mark.filterwarnings("error")
def test_float_ticks_reach_to_the_ends_of_int64_and_not_beyond() -> None:
    tick = Tick(2**31, FLOAT32_SHIFT)
    least = -int(np.float32(2.0**32).view(np.int32))
    assert tick.values(np.array([least], np.int64)).tolist() == [-(2**63)]
    for ordinal in (-least, least - 1, 0x7F800000, -0x7F800000, 2**62, -(2**63)):
        with pytest.raises(ValueError):
            tick.values(np.array([ordinal], np.int64))
