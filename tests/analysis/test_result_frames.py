"""Results as data frames and in notebooks."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_jobs import pipeline_job

from prism_sdk.analysis import PARTS, analyze, explain, load_job


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    jobs = [pipeline_job(3, 6, forward=length, backward=2 * length) for length in (10, 12)]
    return jobs[0].write(tmp_path / "a.prism"), jobs[1].write(tmp_path / "b.prism")


@pytest.mark.parametrize("library", ["pandas", "polars", "arrow"])
def test_results_as_frames(traces: tuple[Path, Path], library: str) -> None:
    pytest.importorskip({"arrow": "pyarrow"}.get(library, library))
    found = analyze(traces[0])
    assert found.pipeline is not None and found.critical_path is not None
    difference = explain(load_job(traces[0]), load_job(traces[1]))
    results = {"analysis": (found, 3), "breakdown": (found.breakdown, 6), "pipeline": (found.pipeline, 3),
               "stragglers": (found.stragglers, 3), "variation": (found.variation, 1),
               "difference": (difference, len(PARTS) + len(difference.units)),
               "path": (found.critical_path, len(found.critical_path.segments))}  # fmt: skip
    for name, (result, num_rows) in results.items():
        frame = getattr(result, f"to_{library}")()
        assert len(frame) == num_rows, name
        assert "<table>" in result._repr_html_(), name
    frame = getattr(found, f"to_{library}")()
    busy = frame["compute_ns"].to_pylist() if library == "arrow" else list(frame["compute_ns"])
    assert busy == [180, 180, 180]


def test_an_analysis_in_a_notebook(traces: tuple[Path, Path]) -> None:
    view = analyze(traces[0])._repr_html_()
    assert view.count("<table>") >= 5 and "where a step goes" in view and "no memory was recorded" in view
    long = pipeline_job(2, 30, forward=1, backward=2)
    text = analyze(long.write(traces[0])).breakdown._repr_html_()
    assert text.count("<tr>") == 1 + 4
