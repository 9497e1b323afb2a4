"""Foreign tables: the published straggler table, and any table whose columns the user explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prismtrace_arrow.mapping import TableImporter
from prismtrace_arrow.straggler import StragglerImporter

from prism_sdk.abc import ConversionReport
from prism_sdk.errors import UsageError
from prismtrace import ABSENT, ABSENT32, Op, Phase, TraceReader, TraceReadError, UnitKind, validate

EXCERPT = Path(__file__).parent / "data" / "trace-ST-2steps.parquet"


def imported(path: Path, source: Path, **options: str) -> ConversionReport:
    spelled = {key.replace("__", "."): value for key, value in options.items()}
    return TableImporter().import_trace([source], output=path, options=spelled, report=print)


def test_the_straggler_table_becomes_a_trace_without_findings(tmp_path: Path) -> None:
    importer = StragglerImporter()
    assert importer.recognises(EXCERPT, EXCERPT.read_bytes()[: 1 << 16])
    report = importer.import_trace([EXCERPT], output=tmp_path / "s.prism", options={}, report=print)
    assert {"units": 424, "ranks": 8, "steps": 16}.items() <= report.counts.items()
    assert validate(tmp_path / "s.prism") == []  # so collectives and messages match across ranks
    table = pq.read_table(EXCERPT)
    with TraceReader(tmp_path / "s.prism") as reader:
        assert reader.world_size == 8
        durations = sum(int((reader.units(r).end_ns - reader.units(r).start_ns).sum()) for r in range(8))
        assert durations == pytest.approx(sum(table["duration"].to_pylist()) * 1e9, rel=1e-6)
        units = reader.units(2)
        sends = units.label.codes == units.label.values.index("forward-send")
        assert set(units.peer[sends].tolist()) == {4} and set(units.op[sends].tolist()) == {Op.SEND}
        assert units.seq[sends].tolist() == list(range(8))
        compute = units.label.codes == units.label.values.index("backward-compute")
        assert set(units.kind[compute].tolist()) == {UnitKind.COMPUTE}
        assert set(units.phase[compute].tolist()) == {Phase.BACKWARD}
        assert units.microbatch[compute].tolist() == [0, 1, 2, 3] * 2
        assert set(units.microbatch[sends].tolist()) == {ABSENT32} and (np.diff(units.start_ns) >= 0).all()
        assert [reader.groups[g].ranks for g in np.unique(units.group_id[sends])] == [(0, 2, 4, 6)]
        assert reader.step_range(0) == (23, 263)


def test_options_name_the_columns(tmp_path: Path) -> None:
    rows = {
        "worker": [1, 0, 0],
        "what": ["fwd", "ar", None],
        "begin": [5.5, 1.25, None],
        "took": [1.0, 0.5, 2.0],
        "mb": [3, -7, 1],
        "color": ["red", "red", "blue"],
    }
    pq.write_table(pa.table(rows), tmp_path / "ops.parquet")
    report = imported(
        tmp_path / "t.prism",
        tmp_path / "ops.parquet",
        column__rank="worker",
        column__start_ns="begin",
        column__duration_ns="took",
        column__type="what",
        column__microbatch="mb",
        value__fwd="forward compute",
        value__ar="all_reduce",
        time="ms",
        absent="-7",
        world_size="4",
    )
    assert any("color" in note for note in report.notes)
    with TraceReader(tmp_path / "t.prism") as reader:
        zero, one = reader.units(0), reader.units(1)
        assert reader.world_size == 4
        assert sorted(zero.start_ns.tolist()) == [ABSENT, 1_250_000] and one.end_ns.tolist() == [6_500_000]
        row = zero.start_ns.tolist().index(1_250_000)
        assert (int(zero.kind[row]), int(zero.op[row]), zero.label[row]) == (UnitKind.COLLECTIVE, Op.ALL_REDUCE, "ar")
        assert zero.microbatch[row] == ABSENT32 and zero.end_ns[row] == 1_750_000
        assert (int(one.kind[0]), int(one.phase[0]), int(one.microbatch[0])) == (UnitKind.COMPUTE, Phase.FORWARD, 3)


def test_an_unknown_type_is_kept_as_a_label_and_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"r": [0], "s": [1], "t": ["mystery"]}), tmp_path / "x.parquet")
    options = {"column__rank": "r", "column__start_ns": "s", "column__type": "t"}
    report = imported(tmp_path / "t.prism", tmp_path / "x.parquet", **options)
    assert any("mystery" in note for note in report.notes)
    with TraceReader(tmp_path / "t.prism") as reader:
        assert list(reader.units(0).label) == ["mystery"] and reader.units(0).kind.tolist() == [0]


@pytest.mark.parametrize(
    ("columns", "options", "error", "message"),
    [
        ({"r": [0], "s": [1]}, {"column__rank": "r"}, UsageError, "start_ns"),
        ({"r": [0], "s": [1]}, {"column__start_ns": "s"}, UsageError, "rank"),
        ({"r": [0], "s": [1]}, {"column__rank": "q", "column__start_ns": "s"}, TraceReadError, "no column 'q'"),
        ({"r": [-1], "s": [1]}, {"column__rank": "r", "column__start_ns": "s"}, TraceReadError, "ranks are whole"),
        ({"r": [None], "s": [1]}, {"column__rank": "r", "column__start_ns": "s"}, TraceReadError, "'r'"),
        ({"r": [0], "s": ["x"]}, {"column__rank": "r", "column__start_ns": "s"}, TraceReadError, "'s'"),
        ({"r": [0], "s": [float("inf")]}, {"column__rank": "r", "column__start_ns": "s"}, TraceReadError, "infinite"),
        ({"r": [0], "s": [2**60]}, {"column__rank": "r", "column__start_ns": "s", "time": "s"}, TraceReadError, "time"),
        ({"r": [0], "s": [2**63 - 1]}, {"column__rank": "r", "column__start_ns": "s"}, TraceReadError, "years away"),
        ({"r": [0], "s": [-(2**63)]}, {"column__rank": "r", "column__start_ns": "s"}, TraceReadError, "years away"),
        (
            {"r": [0], "s": [1e308]},
            {"column__rank": "r", "column__start_ns": "s", "time": "s"},
            TraceReadError,
            "years",
        ),
        ({"r": [0]}, {"column__rank": "r", "column__start_ns": "r", "time": "min"}, UsageError, "min"),
        ({"r": [0]}, {"column__rank": "r", "column__start_ns": "r", "value__a": "walk"}, UsageError, "walk"),
        ({"r": [0]}, {"column__rank": "r", "column__start_ns": "r", "column__no": "r"}, UsageError, "column.no"),
        ({"r": [0]}, {"column__rank": "r", "column__start_ns": "r", "clock": "step"}, UsageError, "column of steps"),
        ({"r": [0]}, {"colum": "r"}, UsageError, "colum"),
    ],
)
def test_what_makes_no_sense_is_said(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, str], error: type[Exception], message: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(error, match=message):
        imported(tmp_path / "t.prism", tmp_path / "x.parquet", **options)
    assert not (tmp_path / "t.prism").exists() and len(list(tmp_path.iterdir())) == 1


def test_a_negative_duration_has_no_end(tmp_path: Path) -> None:
    pq.write_table(pa.table({"r": [0, 0], "s": [1, 2], "d": [-5, 5]}), tmp_path / "x.parquet")
    options = {"column__rank": "r", "column__start_ns": "s", "column__duration_ns": "d"}
    report = imported(tmp_path / "t.prism", tmp_path / "x.parquet", **options)
    assert any("negative" in note for note in report.notes)
    with TraceReader(tmp_path / "t.prism") as reader:
        assert reader.units(0).end_ns.tolist() == [ABSENT, 7]
