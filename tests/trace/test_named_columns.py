"""Columns that the registry does not name, the tables of events and tracks, and attachments come back as written."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_reader import read as foreign_read
from hypothesis import given, settings
from hypothesis import strategies as st

import prismtrace
from prismtrace import ABSENT, ColumnType, EventKind, TraceDataError, TraceReader, TraceUsageError, TraceWriter

INT64 = st.integers(-(2**63) + 1, 2**63 - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "INT64": st.none() | INT64,
    "FLOAT64": st.none() | st.floats(allow_nan=False),
    "BOOL": st.booleans(),
    "STRING": st.none() | st.text(max_size=5).filter(lambda text: text.isprintable()),
    "DIGEST": st.none() | st.binary(min_size=16, max_size=16),
    "LIST_INT64": st.none() | st.lists(INT64, max_size=3),
}


def plain(column: Any) -> list[Any]:
    """A column as Python values, None where absent."""
    if isinstance(column, np.ndarray):
        return [None if v in (ABSENT,) or v != v else v for v in column.tolist()]
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in column]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(VALUES)), num_rows=st.integers(1, 9))
def test_any_named_column_comes_back(data: st.DataObject, kind: str, num_rows: int) -> None:
    values = data.draw(st.lists(VALUES[kind], min_size=num_rows, max_size=num_rows))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.prism"
        with TraceWriter(path) as writer:
            writer.add_units(0, {"kind": [1] * num_rows, "test.value": values})
        with TraceReader(path) as reader:
            units = reader.units(0)
            if all(value is None for value in values):
                assert units.column_names == ("kind",)
            elif any(value not in (False, 0) for value in values) or kind != "BOOL":
                assert units.column_names == ("kind", "test.value")
                assert units.named_specs["test.value"].type.name == kind
                assert plain(units["test.value"]) == values
        assert foreign_read(path.read_bytes()) == prismtrace.to_json(path)


def test_events_and_tracks(tmp_path: Path) -> None:
    path = tmp_path / "t.prism"
    with TraceWriter(path, world_size=1) as writer:
        writer.add_tracks(0, {"name": ["python", "stream 7"], "kind": [1, 2], "stream": [None, 7]})
        first = writer.add_events(
            0,
            {
                "name": ["aten::mm", "gemm"],
                "kind": [EventKind.SPAN, EventKind.SPAN],
                "track": [0, 1],
                "start_ns": [10, 15],
                "end_ns": [20, 60],
                "correlation_id": [5, 5],
                "kineto.blocks": [None, 128],
                "kineto.grid": [None, [1, 2, 3]],
            },
        )
        assert first == 0
        assert writer.add_events(0, {"name": ["gemm"]}) == 2
    with TraceReader(path) as reader:
        assert reader.ranks == (0,)
        assert reader.num_events(0) == 3
        events, tracks = reader.events(0), reader.tracks(0)
        assert list(events.name) == ["aten::mm", "gemm", "gemm"]
        assert (events.end_ns - events.start_ns).tolist()[:2] == [10, 45]
        assert events["kineto.blocks"].tolist() == [ABSENT, 128, ABSENT]
        assert [None if row is None else row.tolist() for row in events["kineto.grid"]] == [None, [1, 2, 3], None]
        assert tracks.stream.tolist() == [ABSENT, 7]
        assert reader.events(0, columns=["kineto.blocks"]).column_names == ("kineto.blocks",)
        assert reader.events(0, columns=["name"]).column_names == ("name",)
        assert len(reader.units(0)) == 0
        again = pickle.loads(pickle.dumps(events))
        assert again["kineto.blocks"].tolist() == [ABSENT, 128, ABSENT]
        with pytest.raises(KeyError, match=r"has no column 'kineto.grids'; it has: .*kineto.grid"):
            events["kineto.grids"]
    assert foreign_read(path.read_bytes()) == prismtrace.to_json(path)


def test_a_table_with_named_columns_can_be_written_again(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a") as writer:
        writer.add_units(0, {"kind": [1, 1], "x.y": [2.5, None], "x.z": ["a", None], "x.big": [2**64 - 1, 0]})
    with TraceReader(tmp_path / "a") as reader, TraceWriter(tmp_path / "b") as writer:
        writer.add_units(0, reader.units(0))
    assert prismtrace.to_json(tmp_path / "a") == prismtrace.to_json(tmp_path / "b")


def test_the_type_of_a_named_column_stays(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_units(0, {"x.y": [1.5]})
        writer.add_units(0, {"x.y": [2]})
        writer.add_units(0, {"x.y": [None], "kind": [1]})
        with pytest.raises(TraceUsageError, match="was FLOAT64 before, now it is STRING"):
            writer.add_units(0, {"x.y": ["a"]})
        writer.add_events(0, {"x.y": ["a"]})
    with TraceReader(tmp_path / "t") as reader:
        assert reader.units(0)["x.y"].tolist()[:2] == [1.5, 2.0]
        assert reader.units(0).named_specs["x.y"].type is ColumnType.FLOAT64
    paths = []
    for number, value in enumerate(([1], ["a"])):
        paths.append(tmp_path / str(number))
        with TraceWriter(paths[-1]) as writer:
            writer.add_units(number, {"x.y": value})
    prismtrace.merge(paths, tmp_path / "merged")
    with TraceReader(tmp_path / "merged") as reader:
        assert reader.units(0)["x.y"].tolist() == [1]
        assert list(reader.units(1)["x.y"]) == ["a"]


def test_two_types_in_one_rank_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_units(0, {"x.y": [1]})
        writer._types[prismtrace.TableKind.UNITS].clear()
        writer.add_units(0, {"x.y": ["a"]})
    with TraceReader(tmp_path / "t") as reader, pytest.raises(TraceDataError, match="INT64 and STRING"):
        reader.units(0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokens": [1]}, "no column 'tokens'"),
        ({".tokens": [1]}, "OWNER.NAME"),
        ({"x." + "y" * 1100: [1]}, "longer than"),
        ({"x.y": [object()]}, "type object"),
        ({"x.y": [1, "a"]}, "different types"),
        ({"x.y": [b"short"]}, "16 bytes"),
        ({"x.y": [2**64]}, "x.y"),
        ({"x.y": [1, 2], "kind": [1]}, "has 1 rows"),
    ],
)
def test_what_cannot_be_a_named_column_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with TraceWriter(tmp_path / "t.prism") as writer, pytest.raises(TraceUsageError, match=message):
        writer.add_units(0, columns)


def test_attachments(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        digest = writer.add_attachment("config.json", b'{"layers": 4}')
        writer.add_attachment("log", b"one")
        writer.add_attachment("log", b"two")
    with TraceReader(tmp_path / "t") as reader:
        assert dict(reader.attachments) == {"config.json": digest, "log": prismtrace.payload_digest(b"two")}
        assert reader.attachment("config.json") == b'{"layers": 4}'
        assert reader.attachment("log") == b"two"
        with pytest.raises(TraceUsageError, match=r"it has: config\.json, log"):
            reader.attachment("other")
    assert prismtrace.validate(tmp_path / "t") == []
