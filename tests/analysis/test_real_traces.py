"""Real traces: HolisticTraceAnalysis' figures, the published answers to a what-if analysis, a published pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_jobs import MadeJob

from prism_sdk.analysis import analyze, breakdown_of, load_job, pipeline_of, stragglers_of
from prism_sdk.cli.main import run
from prismtrace import Phase, TraceReader, UnitKind

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of eight ranks of a DLRM step, by the importer of PyTorch's profiler."""
    pytest.importorskip("prismtrace_kineto", reason="the plugin kineto is not installed")
    folder = tmp_path_factory.mktemp("dlrm")
    sources = [str(ROOT / f"plugins/kineto/tests/data/dlrm-worker{rank}.json") for rank in (0, 1)]
    assert run(["convert", *sources, "-o", str(folder / "dlrm.prism")]) == 0
    return folder / "dlrm.prism"


@pytest.mark.filterwarnings("ignore")
def test_holistic_trace_analysis_agrees(dlrm: Path, tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    for rank in (0, 1):
        source = ROOT / f"plugins/kineto/tests/data/dlrm-worker{rank}.json"
        (tmp_path / f"{rank}.json").write_bytes(source.read_bytes())
    theirs = analysis.TraceAnalysis(trace_dir=str(tmp_path))
    overlaps = theirs.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    times = theirs.get_temporal_breakdown(visualize=False).set_index("rank")
    found = breakdown_of(load_job(dlrm))
    for index, rank in enumerate(found.windows.rank.tolist()):
        parts = found.parts_ns[index]
        hidden = found.hidden_communication_ns[index] / found.communication_ns[index]
        assert 100 * hidden == pytest.approx(overlaps[rank], abs=0.006)  # they round to two decimals
        # their non-compute time is communication and copies outside of computing; here copies are computing
        assert parts[0] / 1000 >= times.loc[rank, "compute_time(us)"]
        busy = times.loc[rank, "compute_time(us)"] + times.loc[rank, "non_compute_time(us)"]
        assert parts[:4].sum() / 1000 == pytest.approx(busy, abs=2)
        assert parts[4:].sum() / 1000 == pytest.approx(times.loc[rank, "idle_time(us)"], abs=2)


def test_what_an_import_lacks_is_said(dlrm: Path) -> None:
    found = analyze(dlrm)
    assert found.critical_path is None and found.pipeline is None and found.memory == ()
    assert any("is not joined" in note for note in found.notes)
    assert any("no critical path" in note for note in found.notes)
    assert found.bandwidths and not found.bandwidths[0].is_transfer


@pytest.fixture(scope="module")
def straggling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of job ST, whose stage 3 the authors' what-if analysis found to be the slow one."""
    pytest.importorskip("prismtrace_arrow", reason="the plugin arrow is not installed")
    path = tmp_path_factory.mktemp("st") / "st.prism"
    source = ROOT / "plugins/arrow/tests/data/trace-ST-2steps.parquet"
    assert run(["convert", str(source), "-o", str(path)]) == 0
    return path


def test_the_straggling_stage_that_the_authors_found(straggling: Path) -> None:
    """Published, by stage: 3 slows its job down by 23 % (34 % in the first of these steps), no other one by more."""
    job = load_job(straggling)
    found = stragglers_of(job, breakdown_of(job))
    imbalanced = [rank for rank in found.found if rank.cause == "imbalance"]
    assert {rank.stage for rank in imbalanced} == {3} and {rank.rank for rank in imbalanced} == {6, 7}
    assert not {rank.cause for rank in found.found} - {"imbalance", "upstream"}
    analysis = analyze(straggling)
    assert analysis.pipeline is not None and analysis.critical_path is not None
    busy = [stage.busy_ns for stage in analysis.pipeline.stages]
    assert int(np.argmax(busy)) == 3 and analysis.pipeline.stage_imbalance > 1.2
    by_rank = analysis.critical_path.ranks_ns
    assert max(by_rank, key=lambda rank: by_rank[rank]) in (6, 7)
    assert sum(by_rank.values()) == analysis.critical_path.length_ns


def primus(name: str) -> tuple[MadeJob, dict[str, Any]]:
    """Published starts and ends of microbatches, in ms, as a job."""
    published = json.loads((DATA / f"{name}.json").read_text())
    job = MadeJob(8)
    chunks = published["config"]["vp_size"]
    begin = 0
    for step, number in enumerate(next(iter(published["ranks"].values()))):
        last = begin
        for rank in range(8):
            values, rows = published["ranks"][str(rank)][number], []
            for phase, kind in ((Phase.FORWARD, "fwd"), (Phase.BACKWARD, "bwd")):
                for index, (start, end) in enumerate(zip(values[f"{kind}_start"], values[f"{kind}_end"], strict=True)):
                    rows.append((begin + round(start * 1e6), begin + round(end * 1e6), phase, index))
            before = 0
            for start, end, phase, index in sorted(rows):
                chunk = {"model_chunk": index % chunks} if chunks > 1 else {}
                job.compute(rank, max(start, before), max(end, before), step=step, phase=int(phase), stage=rank,
                            microbatch=index // chunks, **chunk)  # fmt: skip
                before = max(end, before)
            job.step(rank, step, begin, begin + round(values["total"] * 1e6))
            last = max(last, begin + round(values["total"] * 1e6))
        begin = last
    return job, published


@pytest.mark.parametrize(("name", "expected"), [("primus_pp8", 7 / 16), ("primus_pp8_vpp2", 7 / 32)])
def test_bubbles_of_a_published_pipeline(tmp_path: Path, name: str, expected: float) -> None:
    """Real stages are unequal, so the bubble is above the formula; interleaving makes it smaller, as it says."""
    job, published = primus(name)
    found = pipeline_of(load_job(job.write(tmp_path / "a.prism")))
    assert found is not None and found.num_microbatches == 16 and found.expected_ratio == expected
    assert (found.num_stages, found.num_chunks) == (8, published["config"]["vp_size"])
    assert all(stage.bubble_ratio >= expected - 0.05 for stage in found.stages)
    last = list(published["ranks"]["0"])[-1]
    for stage in found.stages:
        values = published["ranks"][str(stage.ranks[0])][last]
        busy = sum(np.subtract(values[f"{k}_end"], values[f"{k}_start"]).sum() for k in ("fwd", "bwd"))
        assert stage.busy_ns / 1e6 == pytest.approx(busy, rel=1e-3)


def test_interleaving_shrinks_the_published_bubble(tmp_path: Path) -> None:
    ratios = []
    for name in ("primus_pp8", "primus_pp8_vpp2"):
        found = pipeline_of(load_job(primus(name)[0].write(tmp_path / f"{name}.prism")))
        assert found is not None
        ratios.append(found.bubble_ratio)
    assert ratios[1] < ratios[0]


@pytest.mark.filterwarnings("ignore")
def test_holistic_trace_analysis_agrees_to_the_nanosecond_where_it_does_not_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their computing leaves copies out, and they round kernels inwards to microseconds unless told not to."""
    pytest.importorskip("prismtrace_kineto", reason="the plugin kineto is not installed")
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    content = json.loads((ROOT / "plugins/kineto/tests/data/dlrm-worker0.json").read_text())
    for event in content["traceEvents"]:
        if event.get("ph") == "X":  # the file has whole microseconds
            event["ts"] += 0.25
            event["dur"] = max(event["dur"] - 0.375, 0.125)
    (tmp_path / "traces").mkdir()
    source = tmp_path / "traces" / "0.json"
    source.write_text(json.dumps(content))
    theirs = analysis.TraceAnalysis(trace_dir=str(source.parent)).get_temporal_breakdown(visualize=False).iloc[0]
    assert run(["convert", str(source), "-o", str(tmp_path / "x.prism")]) == 0
    with TraceReader(tmp_path / "x.prism") as reader:
        units = reader.units(reader.ranks[0])
        copies = [(label or "").startswith(("Memcpy", "Memset")) for label in units.labels()]
        rows = (np.array(units.kind) == UnitKind.COMPUTE) & ~np.array(copies)
        computing = _length(np.array(units.start_ns)[rows], np.array(units.end_ns)[rows])
    assert computing / 1000 == pytest.approx(theirs["compute_time(us)"], abs=0.01)
    assert computing % 1000


def _length(starts: Any, ends: Any) -> int:
    """Of the union of the intervals."""
    total, until = 0, -1
    for start, end in sorted(zip(starts.tolist(), ends.tolist(), strict=True)):
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total
