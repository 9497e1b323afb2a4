"""What cannot be done is said with the name of the file, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_samples import convert, write_sample
from hypothesis import given, settings
from prismtrace_arrow.exporting import ArrowExporter, ParquetExporter
from prismtrace_arrow.importing import ArrowImporter, ParquetImporter

from prism_sdk.errors import OutputError, UsageError
from prismtrace import PrismTraceError, TraceReadError, TraceWriter

KINDS = {"arrow": (ArrowExporter, ArrowImporter), "parquet": (ParquetExporter, ParquetImporter)}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("errors") / "a.prism")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_cannot_be(tmp_path: Path, trace: Path, kind: str) -> None:
    exporter = KINDS[kind][0]()
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("keep me")
    (tmp_path / f"folder.{kind}").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        convert(exporter, trace, taken)
    with pytest.raises(UsageError, match="is a folder"):
        convert(exporter, trace, tmp_path / f"folder.{kind}")
    for place in (tmp_path / "no" / "such", tmp_path / "no" / f"such.{kind}", taken / "mine.txt" / f"x.{kind}"):
        with pytest.raises(OutputError, match="cannot write"):
            convert(exporter, trace, place)
    assert sorted(p.name for p in tmp_path.rglob("*")) == [f"folder.{kind}", "mine.txt", "taken"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path, trace: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match=r"[Pp]ermission"):
        convert(ParquetExporter(), trace, tmp_path / "x.parquet")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("single", [True, False])
def test_a_full_disk_leaves_nothing(tmp_path: Path, trace: Path, kind: str, single: bool) -> None:
    """A limit on file sizes stands for the full disk: the write fails in the middle."""
    output = tmp_path / (f"x.{kind}" if single else "x")
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from prism_sdk.errors import OutputError\n"
        f"from prismtrace_arrow.exporting import {KINDS[kind][0].__name__} as Exporter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n"
        "    Exporter().export_trace(Path(sys.argv[1]), output=Path(sys.argv[2]), options={}, report=print)\n"
        "except OutputError as error:\n"
        "    print(error); sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, trace, output], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert str(output) in done.stdout and "arge" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": "1"}, "no option 'rank'"),
        ({"ranks": "a"}, "ranks=a"),
        ({"ranks": "7-9"}, "selects no rank"),
        ({"steps": "x"}, "steps=x"),
        ({"steps": "3:3"}, "empty"),
        ({"names": "maybe"}, "names=maybe"),
        ({"compression": "rar"}, "compression=rar"),
        ({"level": "99"}, "level=99"),
        ({"level": "3", "compression": "lz4"}, "level"),
        ({"table": "unit"}, "table=unit"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_options(tmp_path: Path, trace: Path, kind: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        convert(KINDS[kind][0](), trace, tmp_path / f"x.{kind}", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, trace: Path, kind: str, data: st.DataObject
) -> None:
    """A cut or two changed bytes: a trace error that names the file, or a trace; never anything else."""
    folder = tmp_path_factory.getbasetemp() / f"damaged-{kind}"
    if not folder.exists():
        folder.mkdir()
        convert(KINDS[kind][0](), trace, folder / f"good.{kind}")
    raw = bytearray((folder / f"good.{kind}").read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        for _ in range(2):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    bad, out = folder / f"bad.{kind}", folder / "out.prism"
    bad.write_bytes(raw)
    out.unlink(missing_ok=True)
    try:
        KINDS[kind][1]().import_trace([bad], output=out, options={"table": "units"}, report=print)
    except PrismTraceError as error:
        assert str(bad) in str(error)
        assert not out.exists()
    else:
        assert out.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_sources_that_cannot_be(tmp_path: Path, kind: str) -> None:
    importer = KINDS[kind][1]()
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("empty", "no .* file"), ("zero", "begin"), ("absent", "no such"), ("fifo", "regular")):
        with pytest.raises(TraceReadError, match=message):
            importer.import_trace([tmp_path / name], output=tmp_path / "o.prism", options={}, report=print)
    assert not (tmp_path / "o.prism").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"start_ns": [1]}, "no column 'rank'"),
        ({"rank": [None], "kind": [1]}, "no rank"),
        ({"rank": [0], "kind": [300]}, "'kind'"),
        ({"rank": [0], "kind": ["compute"]}, "'kind'"),
        ({"rank": [0], "start_ns": [-(2**63)]}, "absent"),
        ({"rank": [0], "splits_in": [[None]]}, "'splits_in'"),
        ({"rank": [0], "label": [3]}, "'label'"),
        ({"rank": [0], "payload_in": [b"short"]}, "'payload_in'|payload_in"),
        ({"rank": [-1], "kind": [1]}, "rank -1"),
        ({"rank": [0, 0], "unit_index": [1, 0]}, "ascending"),
    ],
)
def test_values_that_a_trace_cannot_hold(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "units.parquet")
    with pytest.raises(TraceReadError, match=message):
        ParquetImporter().import_trace(
            [tmp_path / "units.parquet"], output=tmp_path / "o.prism", options={}, report=print
        )
    assert [p.name for p in tmp_path.iterdir()] == ["units.parquet"]


def test_files_of_two_traces_are_not_mixed(tmp_path: Path, trace: Path) -> None:
    with TraceWriter(tmp_path / "other.prism", world_size=77) as writer:
        writer.add_units(0, {"kind": [1]})
    convert(ParquetExporter(), trace, tmp_path / "units.parquet")
    convert(ParquetExporter(), tmp_path / "other.prism", tmp_path / "u2.parquet")
    with pytest.raises(TraceReadError, match="another trace"):
        ParquetImporter().import_trace(
            [tmp_path / "units.parquet", tmp_path / "u2.parquet"],
            output=tmp_path / "o.prism",
            options={},
            report=print,
        )


def test_names_of_columns_that_are_no_text(tmp_path: Path, trace: Path) -> None:
    convert(ArrowExporter(), trace, tmp_path / "units.arrow", table="units")
    raw = (tmp_path / "units.arrow").read_bytes()
    assert raw.count(b"num_elements_in") >= 2
    (tmp_path / "units.arrow").write_bytes(raw.replace(b"num_elements_in", b"num_\x80lements_in"))
    with pytest.raises(TraceReadError, match=r"units\.arrow: .*utf-8"):
        ArrowImporter().import_trace(
            [tmp_path / "units.arrow"], output=tmp_path / "back.prism", options={}, report=print
        )
