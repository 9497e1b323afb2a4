"""The importer on dumps that PyTorch wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prismtrace_flight_recorder.importer import FlightRecorderImporter

import prismtrace
from prism_sdk.abc import ConversionReport
from prismtrace import ABSENT, Op, TraceReader

DATA = Path(__file__).parent / "data"


def load(sources: Path | list[Path], output: Path, **options: str) -> ConversionReport:
    given = [sources] if isinstance(sources, Path) else sources
    return FlightRecorderImporter().import_trace(given, output=output, options=options, report=lambda line: None)


def test_dumps_that_pytorch_wrote(tmp_path: Path) -> None:
    report = load([DATA / f"gloo_trace_{rank}" for rank in range(4)], tmp_path / "out.prism")
    assert (report.counts["units"], report.counts["ranks"], report.counts["groups"]) == (28, 4, 3)
    assert prismtrace.validate(report.output) == []
    with TraceReader(report.output) as reader:
        units = reader.units(2)
        assert [Op(value).name for value in units.op.tolist()] == [
            "ALL_REDUCE", "ALL_REDUCE", "ALL_GATHER", "BROADCAST", "ALL_TO_ALL", "REDUCE", "BARRIER",
        ]  # fmt: skip
        assert units.seq.tolist() == [0, 0, 1, 2, 1, 2, 3]
    one = load(DATA / "gloo_trace_0.json", tmp_path / "one.prism", world_size="4")
    assert one.counts["missing_ranks"] == 3
    with TraceReader(report.output) as all_ranks, TraceReader(one.output) as reader:
        assert (all_ranks.units(0).op == reader.units(0).op).all()
        assert (all_ranks.units(0).start_ns != ABSENT).all()


def test_recognises(tmp_path: Path) -> None:
    importer = FlightRecorderImporter()
    for name in ("gloo_trace_0", "gloo_trace_0.json"):
        assert importer.recognises(DATA / name, (DATA / name).read_bytes()[: 1 << 16])
    assert importer.recognises(DATA, b"")
    assert not importer.recognises(tmp_path, b"")
    assert not importer.recognises(Path("x"), b'{"traceEvents": []}')


def test_lossless_keeps_the_dumps(tmp_path: Path) -> None:
    source = DATA / "gloo_trace_0"
    report = load(source, tmp_path / "out.prism", lossless="true")
    reader: Any = TraceReader(report.output)
    assert reader.attachment("flight_recorder.0") == source.read_bytes()
    units = reader.units(0)
    assert units["flight_recorder.collective_seq_id"].tolist() == [1, 1, 2, 3, 2, 3, 4]
    assert set(units["flight_recorder.state"]) == {"scheduled"}
