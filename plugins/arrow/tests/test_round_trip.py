"""A trace that goes to Arrow or Parquet and back is the same trace."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_samples import assert_same_trace, convert, tables_of, write_sample
from hypothesis import HealthCheck, given, settings
from prismtrace_arrow.exporting import ArrowExporter, ParquetExporter
from prismtrace_arrow.importing import ArrowImporter, ParquetImporter

import prismtrace
from prismtrace import TableKind, TraceReader, TraceWriter

KINDS = {"arrow": (ArrowExporter, ArrowImporter), "parquet": (ParquetExporter, ParquetImporter)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", ["true", "false"])
def test_a_folder_keeps_everything(tmp_path: Path, kind: str, names: str) -> None:
    exporter, importer = KINDS[kind]
    source = write_sample(tmp_path / "a.prism")
    folder = tmp_path / "tables"
    report = convert(exporter(), source, folder, payloads="true", names=names)
    assert report.notes == ()
    assert {path.name for path in folder.iterdir()} >= {f"{t}.{kind}" for t in ("units", "steps", "scalars", "groups")}
    back = tmp_path / "b.prism"
    importer().import_trace([folder], output=back, options={}, report=print)
    assert_same_trace(source, back)


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_keeps_units_groups_and_metadata(tmp_path: Path, kind: str) -> None:
    exporter, importer = KINDS[kind]
    source = write_sample(tmp_path / "a.prism")
    report = convert(exporter(), source, tmp_path / f"u.{kind}")
    assert any("steps" in note for note in report.notes) and any("1 payloads" in note for note in report.notes)
    back = tmp_path / "b.prism"
    importer().import_trace([tmp_path / f"u.{kind}"], output=back, options={}, report=print)
    assert_same_trace(source, back, only=("units",), payloads=False)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)))
def test_any_trace_survives(data: st.DataObject, kind: str) -> None:
    exporter, importer = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        source, back = Path(folder, "a.prism"), Path(folder, "b.prism")
        with TraceWriter(source, world_size=data.draw(st.sampled_from([0, 9]))) as writer:
            for rank in data.draw(st.lists(st.integers(0, 8), max_size=3)):
                writer.add_units(rank, data.draw(tables_of(TableKind.UNITS)))
                writer.add_steps(rank, data.draw(tables_of(TableKind.STEPS)))
                writer.add_scalars(rank, data.draw(tables_of(TableKind.SCALARS)))
        convert(exporter(), source, Path(folder, "tables"))
        importer().import_trace([Path(folder, "tables")], output=back, options={}, report=print)
        assert_same_trace(source, back)


def test_what_other_tools_rewrite_is_read(tmp_path: Path) -> None:
    """Without schema metadata, with wider types and dictionary strings, sorted by time: units are still units."""
    source = write_sample(tmp_path / "a.prism", num_ranks=3)
    convert(ParquetExporter(), source, tmp_path / "t")
    table = pq.read_table(tmp_path / "t" / "units.parquet").sort_by(
        [("unit_index", "ascending"), ("rank", "descending")]
    )
    wide = [pa.field(f.name, pa.int64() if f.type == pa.int32() else f.type) for f in table.schema]
    table = table.cast(pa.schema(wide))
    label = table["label"].dictionary_encode()
    table = table.set_column(table.schema.get_field_index("label"), "label", label)
    pq.write_table(table, tmp_path / "units.parquet")
    report = ParquetImporter().import_trace(
        [tmp_path / "units.parquet"], output=tmp_path / "b.prism", options={}, report=print
    )
    assert any("number of ranks" in note for note in report.notes)
    assert_same_trace(source, tmp_path / "b.prism", only=("units",), payloads=False, about=False)


def test_rows_that_were_taken_out_leave_a_consistent_trace(tmp_path: Path) -> None:
    source = write_sample(tmp_path / "a.prism")
    convert(ParquetExporter(), source, tmp_path / "u.parquet")
    table = pq.read_table(tmp_path / "u.parquet")
    kept = table.filter(pa.compute.field("unit_index") != 0)
    pq.write_table(kept, tmp_path / "v.parquet")
    report = ParquetImporter().import_trace(
        [tmp_path / "v.parquet"], output=tmp_path / "b.prism", options={}, report=print
    )
    assert any("numbered anew" in note for note in report.notes)
    with TraceReader(source) as before, TraceReader(tmp_path / "b.prism") as after:
        for rank in before.ranks:
            old, new = before.units(rank), after.units(rank)
            assert len(new) == len(old) - 1
            present = new.awaits != prismtrace.ABSENT
            assert np.array_equal(new.awaits[present] + 1, old.awaits[1:][present]) and present.sum() > 1
    assert not [f for f in prismtrace.validate(tmp_path / "b.prism") if f.code == "PT023"]


def test_ranks_and_steps_choose_rows(tmp_path: Path) -> None:
    source = write_sample(tmp_path / "a.prism", num_ranks=4, steps=3)
    report = convert(ParquetExporter(), source, tmp_path / "t", ranks="1-2", steps="1:3")
    units = pq.read_table(tmp_path / "t" / "units.parquet")
    assert set(units["rank"].to_pylist()) == {1, 2} and set(units["step"].to_pylist()) == {1, 2}
    assert set(pq.read_table(tmp_path / "t" / "steps.parquet")["step"].to_pylist()) == {1, 2}
    assert report.counts["ranks"] == 2 and report.counts["units"] == units.num_rows


def test_absent_is_null_and_names_are_readable(tmp_path: Path) -> None:
    source = write_sample(tmp_path / "a.prism")
    convert(ArrowExporter(), source, tmp_path / "u.arrow", names="true")
    with pa.OSFile(str(tmp_path / "u.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    rows = table.slice(0, 5).to_pylist()
    assert [row["op"] for row in rows] == [0, 1, 0, 10, 0]
    assert [row["op_name"] for row in rows] == ["unspecified", "all_reduce", "unspecified", "send", "unspecified"]
    assert rows[3]["end_ns"] is None and rows[3]["splits_in"] == [] and rows[0]["splits_in"] is None
    assert rows[1]["splits_in"] == [512, 512] and len(rows[1]["payload_in"]) == 16
    assert table.schema.field("start_ns").metadata[b"unit"] == b"ns"


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_recognised(tmp_path: Path, kind: str) -> None:
    exporter, importer = KINDS[kind]
    source = write_sample(tmp_path / "a.prism")
    convert(exporter(), source, tmp_path / f"u.{kind}")
    convert(exporter(), source, tmp_path / "t")
    head = (tmp_path / f"u.{kind}").read_bytes()[: 1 << 16]
    assert importer().recognises(tmp_path / f"u.{kind}", head)
    assert importer().recognises(tmp_path / "t", b"")
    assert not importer().recognises(source, source.read_bytes())
    assert not importer().recognises(tmp_path / "absent", b"")
    for other in KINDS:
        if other != kind:
            assert not KINDS[other][1]().recognises(tmp_path / f"u.{kind}", head)


def test_importing_everything_by_any_value(tmp_path: Path) -> None:
    values: dict[str, Any] = {"label": ["\x00", "", None], "group_id": [2**64 - 1, 0, 1]}
    with TraceWriter(tmp_path / "a.prism") as writer:
        writer.add_units(2**31 - 1, values)
    convert(ParquetExporter(), tmp_path / "a.prism", tmp_path / "t")
    ParquetImporter().import_trace([tmp_path / "t"], output=tmp_path / "b.prism", options={}, report=print)
    assert_same_trace(tmp_path / "a.prism", tmp_path / "b.prism")


def test_rows_that_say_nothing_are_still_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"rank": [4, 4], "label": pa.nulls(2, pa.string())}), tmp_path / "units.parquet")
    ParquetImporter().import_trace([tmp_path / "units.parquet"], output=tmp_path / "b.prism", options={}, report=print)
    with TraceReader(tmp_path / "b.prism") as reader:
        assert reader.num_units(4) == 2 and list(reader.units(4).label) == [None, None]
