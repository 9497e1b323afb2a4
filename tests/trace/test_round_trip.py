"""What is written is what is read, with both readers."""

from __future__ import annotations

import io
import math
import mmap
import pickle
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_reader import read as foreign_read
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_sample import GROUP, write_sample
from trace_strategies import tables

import prismtrace
from prismtrace import ABSENT, GraphKind, TableKind, TraceReader, TraceUsageError, TraceWriter
from prismtrace.model import COLUMNS, ColumnType

FAST = settings(max_examples=120, deadline=None)


def as_lists(table: Any, kind: TableKind) -> dict[str, list[Any]]:
    """Every column of a table as Python values, None where absent."""
    result = {}
    for spec in COLUMNS[kind]:
        column = getattr(table, spec.name)
        if spec.type is ColumnType.LIST_INT64:
            result[spec.name] = [None if row is None else row.tolist() for row in column]
        elif spec.type in (ColumnType.STRING, ColumnType.DIGEST):
            result[spec.name] = list(column)
        else:
            default = spec.default
            plain = column.tolist()
            absent = [spec.optional and (v == default or (v != v and default != default)) for v in plain]
            result[spec.name] = [None if gone else v for v, gone in zip(plain, absent, strict=True)]
    return result


def expected(columns: dict[str, list[Any]], kind: TableKind, num_rows: int) -> dict[str, list[Any]]:
    """What a reader must say about columns that a writer was given."""
    return {
        spec.name: columns.get(spec.name, [None if spec.optional else spec.default] * num_rows)
        for spec in COLUMNS[kind]
    }


@pytest.mark.parametrize("kind", COLUMNS)
@FAST
@given(data=st.data())
def test_any_table_comes_back(kind: TableKind, data: st.DataObject) -> None:
    parts = data.draw(st.lists(tables(kind), min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.prism"
        with TraceWriter(path) as writer:
            add = {
                TableKind.UNITS: writer.add_units,
                TableKind.STEPS: writer.add_steps,
                TableKind.SCALARS: writer.add_scalars,
                TableKind.EVENTS: writer.add_events,
                TableKind.TRACKS: writer.add_tracks,
            }[kind]
            for part in parts:
                add(7, part)
        wanted: dict[str, list[Any]] = {spec.name: [] for spec in COLUMNS[kind]}
        for part in parts:
            num_rows = len(next(iter(part.values()), []))
            for name, values in expected(part, kind, num_rows).items():
                wanted[name] += values
        with TraceReader(path) as reader:
            if not wanted["kind" if "kind" in wanted else "step"]:
                assert reader.ranks == ()
                return
            table = {
                TableKind.UNITS: reader.units,
                TableKind.STEPS: reader.steps,
                TableKind.SCALARS: reader.scalars,
                TableKind.EVENTS: reader.events,
                TableKind.TRACKS: reader.tracks,
            }
            got = table[kind](7)
            assert as_lists(got, kind) == wanted
            twin = prismtrace.to_json(reader)
        assert foreign_read(path.read_bytes()) == twin


def test_sample_reads_the_same_everywhere(sample: Path) -> None:
    twin = prismtrace.to_json(sample)
    assert foreign_read(sample.read_bytes()) == twin
    with sample.open("rb") as file:
        assert prismtrace.to_json(file) == twin
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert prismtrace.to_json(mapped) == twin
    assert prismtrace.to_json(io.BytesIO(sample.read_bytes())) == twin


def test_what_the_index_knows(sample: Path) -> None:
    with TraceReader(sample) as reader:
        assert reader.graph_kind is GraphKind.OBSERVED
        assert reader.world_size == 2
        assert reader.metadata == {"job.status": "complete"}
        assert reader.groups == {GROUP.group_id: GROUP}
        assert reader.ranks == (0, 1)
        assert reader.num_units(0) == 10
        assert reader.num_units(5) == 0
        assert reader.step_range(1) == (0, 1)
        assert reader.format_version == (1, 0)
        assert not reader.unfinished


def test_steps_and_columns_are_selected(sample: Path) -> None:
    with TraceReader(sample) as reader:
        part = reader.units(1, steps=range(1, 2), columns=["kind", "label"])
        assert len(part) == 5
        assert part.first_index == 5
        assert part.row_index.tolist() == [5, 6, 7, 8, 9]
        assert part.labels() == ["forward", None, None, "grüße", None]
        with pytest.raises(AttributeError, match="not read"):
            _ = part.start_ns
        assert len(reader.units(1, steps=1)) == 5
        assert len(reader.units(1, steps=range(5, 9))) == 0
        assert [len(chunk) for chunk in reader.iter_units(1)] == [5, 5]
        with pytest.raises(TraceUsageError, match="no column"):
            reader.units(0, columns=["star_ns"])
        with pytest.raises(TraceUsageError, match="rank 9"):
            reader.units(9)


def test_end_is_read_without_its_reference_column(sample: Path) -> None:
    with TraceReader(sample) as reader:
        alone = reader.units(0, columns=["end_ns"]).end_ns
        assert alone.tolist() == reader.units(0).end_ns.tolist()
        assert alone[3] == ABSENT


def test_tables_are_read_only(sample: Path) -> None:
    with TraceReader(sample) as reader:
        units = reader.units(0)
    for array in (units.start_ns, units.memory_bytes, units.label.codes, units.splits_in.values, units.row_index):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(AttributeError):
        units.start_ns = np.zeros(3)
    with pytest.raises(AttributeError, match="no column"):
        _ = units.star_ns
    assert pickle.loads(pickle.dumps(units)).label[3] == "grüße"


def test_a_table_can_be_written_again(sample: Path, tmp_path: Path) -> None:
    with TraceReader(sample) as reader, TraceWriter(tmp_path / "again.prism", world_size=2) as writer:
        for rank in reader.ranks:
            writer.add_units(rank, reader.units(rank))
            writer.add_steps(rank, reader.steps(rank))
    with TraceReader(sample) as one, TraceReader(tmp_path / "again.prism") as two:
        assert as_lists(one.units(1), TableKind.UNITS) == as_lists(two.units(1), TableKind.UNITS)


def test_large_tables_are_split_into_chunks(tmp_path: Path) -> None:
    path = tmp_path / "large.prism"
    n = 150_000
    start = np.arange(n, dtype=np.int64) * 3000
    with TraceWriter(path) as writer:
        lists = [[i] if i % 50_000 == 0 else None for i in range(n)]
        labels = [f"l{i % 3}" if i >= n // 2 else None for i in range(n)]
        columns = {"start_ns": start, "end_ns": start + 2000, "splits_in": lists, "label": labels}
        assert writer.add_units(3, columns) == 0
        assert writer.add_units(3, {"kind": [1]}) == n
    assert path.stat().st_size < 60_000
    with TraceReader(path) as reader:
        units = reader.units(3)
        assert len(units) == n + 1
        assert (units.start_ns[:-1] == start).all()
        assert units.start_ns[-1] == ABSENT
        assert [i for i in range(n) if units.splits_in[i] is not None] == [0, 50_000, 100_000]
        assert units.splits_in_at(100_000).tolist() == [100_000]
        assert units.labels()[:-1] == labels


def test_threads_share_a_reader(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "t.prism", steps=50)
    results = []
    with TraceReader(path) as reader:
        wanted = reader.units(0).start_ns.tolist()

        def work() -> None:
            results.append(all(reader.units(0).start_ns.tolist() == wanted for _ in range(5)))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 8


def test_nan_loss_is_absent_and_nan_scalar_is_a_value(tmp_path: Path) -> None:
    path = tmp_path / "nan.prism"
    with TraceWriter(path) as writer:
        writer.add_steps(0, {"step": [0, 1], "end_ns": [1, 2], "loss": [math.nan, 2.0]})
        writer.add_scalars(0, {"step": [0], "name": ["loss"], "value": [math.nan]})
    twin = prismtrace.to_json(path)
    assert twin["ranks"]["0"]["steps"]["columns"]["loss"] == [None, 2.0]
    assert twin["ranks"]["0"]["scalars"]["columns"]["value"] == ["nan"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"kind": [1], "start": [1]}, "no column 'start'"),
        ({"kind": [1, 2], "step": [1]}, "has 1 rows"),
        ({"kind": [300]}, "values in 300"),
        ({"kind": [None]}, "must have a value"),
        ({"start_ns": [1.5]}, "must hold int64"),
        ({"start_ns": [2**63]}, "start_ns"),
        ({"group_id": [-1]}, "group_id"),
        ({"label": [3]}, "must hold str"),
        ({"label": ["\ud800"]}, "label"),
        ({"payload_in": [b"short"]}, "16 bytes"),
        ({"splits_in": [[1.5, "x"]]}, "splits_in"),
        ({"start_ns": np.zeros((2, 2), np.int64)}, "one dimension"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with TraceWriter(tmp_path / "t.prism") as writer:
        with pytest.raises(TraceUsageError, match=message):
            writer.add_units(0, columns)
        writer.add_units(0, {"kind": [1]})
    assert TraceReader(tmp_path / "t.prism").num_units(0) == 1
