"""What the page is made of: reduced spans, traffic, chosen ranks, and a file that loads nothing."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_jobs import MadeJob
from report_samples import mixed_job, pipeline_traces

from prism_sdk.analysis import analyze, load_job
from prism_sdk.cli.main import run
from prism_sdk.errors import OutputError, UsageError
from prism_sdk.report import report_content, write_report
from prism_sdk.report.content import choose_ranks
from prism_sdk.report.matrix import traffic_matrix
from prism_sdk.report.page import page_html
from prism_sdk.report.timeline import step_spans
from prismtrace import Op, TraceReader, UnitKind


def unpacked(value: dict[str, str]) -> Any:
    return np.frombuffer(base64.b64decode(value["data"]), dtype="<" + value["type"])


def test_spans_are_the_units(tmp_path: Path) -> None:
    path = mixed_job(tmp_path / "a.prism")
    spans = step_spans(load_job(path), step=1, ranks=[0, 3])
    offsets = unpacked(spans["offsets"])
    with TraceReader(path) as reader:
        for row, rank in enumerate((0, 3)):
            units = reader.units(rank, steps=1)
            mine = slice(int(offsets[row]), int(offsets[row + 1]))
            by_unit = {int(unit): i for i, unit in enumerate(unpacked(spans["unit"])[mine])}
            assert set(by_unit) == set(units.row_index.tolist())
            for i, unit in enumerate(units.row_index.tolist()):
                at = by_unit[unit] + mine.start
                assert unpacked(spans["start"])[at] + int(spans["origin_ns"]) == units.start_ns[i]
                assert unpacked(spans["duration"])[at] == units.end_ns[i] - units.start_ns[i]
                kind = spans["classes"][unpacked(spans["klass"])[at]]["kind"]
                assert kind == UnitKind(units.kind[i]).name.lower()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=120), st.integers(16, 64))
@settings(max_examples=30, deadline=None)
def test_merging_loses_no_unit_and_no_time(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, int]], budget: int
) -> None:
    job, clock = MadeJob(1), 0
    for gap, length in pieces:
        clock += gap
        job.compute(0, clock, clock + length, step=0)
        clock += length
    job.step(0, 0, 0, clock + 1)
    loaded = load_job(job.write(tmp_path_factory.getbasetemp() / "merge.prism"))
    spans = step_spans(loaded, step=0, ranks=[0], max_spans=budget)
    start, duration = unpacked(spans["start"]), unpacked(spans["duration"])
    assert unpacked(spans["count"]).sum() == len(pieces)
    assert len(start) <= len(pieces) and (np.diff(start) >= 0).all()
    assert start.min() == loaded.graph.columns["start_ns"].min()
    assert (start + duration).max() == loaded.graph.columns["end_ns"].max()
    covered = {t for a, n in zip(start.tolist(), duration.tolist(), strict=True) for t in range(int(a), int(a + n))}
    for row in job.rows[0]:
        assert set(range(row["start_ns"], row["end_ns"])) <= covered


def test_traffic_of_messages_and_collectives(tmp_path: Path) -> None:
    job = MadeJob(4, {1: range(4), 2: [0, 1]})
    job.message(UnitKind.SEND, 0, 3, 0, 10)
    job.message(UnitKind.RECV, 3, 0, 0, 10)
    for rank in (0, 1):
        job.communicate(rank, 10, 20, group=2, elements=100)
    for rank in range(4):
        job.communicate(rank, 30, 40, group=1, op=Op.BROADCAST, elements=10, peer=2)
    found = traffic_matrix(load_job(job.write(tmp_path / "a.prism")))
    expected = np.zeros((4, 4))
    expected[0, 3] += 16
    expected[0, 1] = expected[1, 0] = 400
    for rank in (0, 1, 3):
        expected[2, rank] += 40
    assert found.values_bytes.tolist() == expected.tolist() and found.num_unknown == 0
    assert found.total_bytes == 16 + 800 + 120


@given(st.integers(2, 40), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_coarse_traffic_adds_up_to_the_fine(
    tmp_path_factory: pytest.TempPathFactory, num_ranks: int, fields: int
) -> None:
    job = MadeJob(num_ranks, {1: range(num_ranks), 2: range(0, num_ranks, 2)})
    for rank in range(num_ranks):
        job.communicate(rank, 0, 5, group=1, elements=8 * rank)
        if rank % 2 == 0 and num_ranks > 2:
            job.communicate(rank, 5, 9, group=2, op=Op.ALL_TO_ALL, elements=4)
    loaded = load_job(job.write(tmp_path_factory.getbasetemp() / "traffic.prism"))
    fine, coarse = traffic_matrix(loaded), traffic_matrix(loaded, max_fields=fields)
    assert (fine.values_bytes >= -1e-6).all() and np.allclose(np.diag(fine.values_bytes), 0, atol=1e-6)
    assert coarse.total_bytes == pytest.approx(fine.total_bytes)
    bounds = coarse.bounds
    for i in range(len(bounds) - 1):
        for j in range(len(bounds) - 1):
            block = fine.values_bytes[bounds[i] : bounds[i + 1], bounds[j] : bounds[j + 1]].sum()
            assert coarse.values_bytes[i, j] == pytest.approx(block, abs=1e-6)


def test_of_many_ranks_the_telling_ones_are_drawn(tmp_path: Path) -> None:
    path = mixed_job(tmp_path / "a.prism")
    with TraceReader(path) as reader:
        analysis = analyze(reader)
        assert choose_ranks(analysis, reader) == [0, 1, 2, 3]
        few = choose_ranks(analysis, reader, limit=2)
    assert len(few) <= 2 and all(rank in analysis.job.ranks for rank in few)


def test_the_page_is_alone_and_cannot_be_broken_out_of(tmp_path: Path) -> None:
    job = MadeJob(1)
    job.compute(0, 0, 10)
    path = job.write(tmp_path / "a<b>&.prism")
    content = report_content(path)
    content["notes"].append("</script><script>window.broken = 1</script>")
    text = page_html(content, title="</title><script>window.broken = 2</script>")
    assert text.count("<script") == 2 and "window.broken = 1</script>" not in text
    assert "</title><script>" not in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert "default-src 'none'" in text and len(text) < 200_000
    data = text.split('id="content">')[1].split("</script>")[0]
    assert json.loads(data)["notes"][-1] == "</script><script>window.broken = 1</script>"


def test_comparing(tmp_path: Path) -> None:
    emulated, real = pipeline_traces(tmp_path)
    content = report_content(emulated, compare=real)
    assert content["other"]["file"] == "real.prism"
    assert content["timeline"]["step"] == content["other"]["timeline"]["step"]
    assert "4.76 % faster" in content["explanation"]["sentence"]
    assert sum(second - first for _, first, second in content["explanation"]["rows"]) == pytest.approx(
        content["step_ns"] - content["other"]["step_ns"]
    )


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mixed_job(tmp_path / "a.prism")
    with pytest.raises(UsageError, match="no step 9"):
        report_content(path, step=9)
    output = tmp_path / "report.html"
    assert run(["report", str(path), "-o", str(output)]) == 0
    assert run(["report", str(path), "-o", str(output)]) == 2
    assert "it exists" in capsys.readouterr().err
    with pytest.raises(OutputError):
        write_report(report_content(path), tmp_path / "none" / "report.html")
    assert run(["report", str(tmp_path / "none.prism"), "-o", str(tmp_path / "x.html")]) == 3
    assert not (tmp_path / "x.html").exists() and not list(tmp_path.glob(".*"))
