"""What format 1.0 added: named columns, events, tracks and attachments survive too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_samples import assert_same_trace, convert, write_sample
from prismtrace_arrow.exporting import ArrowExporter, ParquetExporter
from prismtrace_arrow.importing import ArrowImporter, ParquetImporter

from prism_sdk.errors import UsageError
from prismtrace import FORMAT_VERSION, TraceReader, TraceWriter

pytestmark = pytest.mark.skipif(FORMAT_VERSION < (1, 0), reason="the trace library writes format 0.1")
KINDS = {"arrow": (ArrowExporter, ArrowImporter), "parquet": (ParquetExporter, ParquetImporter)}


def write_all(path: Path) -> Path:
    """Ranks with different named columns, events that lie on tracks and belong to units, an attachment."""
    with TraceWriter(path, world_size=3) as writer:
        named: list[dict[str, Any]] = [
            {"a.tokens": [1, None, 3], "a.note": ["x", None, "ü"]},
            {"a.tokens": [4, 5, 6], "b.share": [0.5, float("nan"), 1.0], "b.flag": [True, False, True]},
            {"c.list": [[1], None, []], "c.big": np.array([2**64 - 1, 0, 1], np.uint64)},
        ]
        for rank, columns in enumerate(named):
            writer.add_units(rank, {"kind": [1, 2, 1], "start_ns": [0, 10, 20], "end_ns": [5, 15, 25], **columns})
            writer.add_tracks(rank, {"name": ["stream 7", None], "kind": [2, 1], "stream": [7, None]})
            events = {"name": ["k", "k", None], "kind": [1, 2, 3], "track": [0, 1, None], "unit": [2, 0, None]}
            writer.add_events(
                rank, {**events, "start_ns": [20, 1, 2], "end_ns": [22, None, None], "p.v": [1.5, None, 2]}
            )
        writer.add_attachment("config", b"lr: 0.1")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_keeps_all_of_it(tmp_path: Path, kind: str) -> None:
    exporter, importer = KINDS[kind]
    source = write_all(tmp_path / "a.prism")
    report = convert(exporter(), source, tmp_path / "t")
    assert report.notes == () and report.counts["events"] == 9 and report.counts["tracks"] == 6
    importer().import_trace([tmp_path / "t"], output=tmp_path / "b.prism", options={}, report=print)
    assert_same_trace(source, tmp_path / "b.prism")
    with TraceReader(tmp_path / "b.prism") as reader:
        assert reader.attachment("config") == b"lr: 0.1"
        assert reader.units(1)["b.flag"].tolist() == [True, False, True]


def test_references_follow_when_units_are_taken_out(tmp_path: Path) -> None:
    convert(ParquetExporter(), write_all(tmp_path / "a.prism"), tmp_path / "t")
    units = pq.read_table(tmp_path / "t" / "units.parquet")
    pq.write_table(
        units.filter(pa.array([i != 0 for i in units["unit_index"].to_pylist()])), tmp_path / "t" / "units.parquet"
    )
    ParquetImporter().import_trace([tmp_path / "t"], output=tmp_path / "b.prism", options={}, report=print)
    with TraceReader(tmp_path / "b.prism") as reader:
        assert reader.events(0).unit.tolist()[:2] == [1, np.iinfo(np.int64).min]


def test_a_column_that_is_text_here_and_number_there_is_named(tmp_path: Path) -> None:
    from prismtrace import merge

    for rank, values in enumerate(([1, 2], ["x", "y"])):
        with TraceWriter(tmp_path / f"{rank}.prism") as writer:
            writer.add_units(rank, {"kind": [1, 1], "a.b": values})
    merge([tmp_path / "0.prism", tmp_path / "1.prism"], tmp_path / "m.prism")
    with pytest.raises(UsageError, match=r"a\.b"):
        convert(ParquetExporter(), tmp_path / "m.prism", tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_whole_numbers_here_and_fractions_there_become_fractions(tmp_path: Path) -> None:
    from prismtrace import merge

    for rank, values in enumerate(([1, None], [0.5, 2.0])):
        with TraceWriter(tmp_path / f"{rank}.prism") as writer:
            writer.add_units(rank, {"kind": [1, 1], "a.b": values})
    merge([tmp_path / "0.prism", tmp_path / "1.prism"], tmp_path / "m.prism")
    convert(ParquetExporter(), tmp_path / "m.prism", tmp_path / "u.parquet")
    assert pq.read_table(tmp_path / "u.parquet")["a.b"].to_pylist() == [1.0, None, 0.5, 2.0]


def test_foreign_columns_are_kept_under_an_owner(tmp_path: Path) -> None:
    from prismtrace_arrow.mapping import TableImporter

    pq.write_table(pa.table({"r": [0], "s": [1], "color": ["red"]}), tmp_path / "x.parquet")
    options = {"column.rank": "r", "column.start_ns": "s", "keep": "mine"}
    TableImporter().import_trace([tmp_path / "x.parquet"], output=tmp_path / "o.prism", options=options, report=print)
    with TraceReader(tmp_path / "o.prism") as reader:
        assert list(reader.units(0)["mine.color"]) == ["red"]


def test_the_sample_has_no_named_columns(tmp_path: Path) -> None:
    convert(ArrowExporter(), write_sample(tmp_path / "a.prism"), tmp_path / "u.arrow")
    with pa.OSFile(str(tmp_path / "u.arrow")) as file:
        assert not [name for name in pa.ipc.open_file(file).schema.names if "." in name]
