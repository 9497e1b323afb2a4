"""What an export shows of a trace, and which of the two ways it goes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_helpers import DATA, chrome, convert, parsed, restored
from prismtrace_kineto import chrome as chrome_module
from prismtrace_kineto.exporter import KinetoExporter

import prismtrace
from prism_sdk.analysis import breakdown_of, load_job, stragglers_of
from prism_sdk.errors import OutputError, UsageError
from prism_sdk.plugins import PluginManager
from prismtrace import ABSENT, GraphKind, Op, ProcessGroup, TraceFormatError, UnitKind

START = 1_700_000_000_123_456_789


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two ranks: a computation, an all-reduce that both wait for, a message from 0 to 1."""
    path = tmp_path / "job.prism"
    with prismtrace.TraceWriter(path, world_size=2) as writer:
        writer.add_group(ProcessGroup(5, "dp", "data", "nccl", (0, 1)))
        for rank in (0, 1):
            late = 1_001 * rank
            writer.add_units(
                rank,
                {
                    "kind": [
                        UnitKind.COMPUTE,
                        UnitKind.COLLECTIVE,
                        UnitKind.WAIT,
                        UnitKind.RECV if rank else UnitKind.SEND,
                    ],
                    "step": [0, 0, 0, 1],
                    "start_ns": [START, START + 5_000 + late, START + 5_000 + late, START + 20_000],
                    "end_ns": [START + 5_000 + late, START + 9_000, START + 9_000, START + 21_000],
                    "group_id": [0, 5, 0, 5],
                    "seq": [None, 0, None, 0],
                    "op": [0, Op.ALL_REDUCE, 0, Op.RECV if rank else Op.SEND],
                    "peer": [None, None, None, 1 - rank],
                    "tag": [None, None, None, 0],
                    "awaits": [None, None, 1, None],
                    "num_elements_in": [None, 7, None, 3],
                    "label": ["matmul", None, None, None],
                },
            )
            steps = {"step": [0, 1], "start_ns": [START, START + 10_000], "end_ns": [START + 10_000, START + 30_000]}
            writer.add_steps(rank, steps)
    return path


def spans(data: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in data["traceEvents"]
        if event["ph"] == "X" and all(event.get(k) == v for k, v in wanted.items())
    ]


def test_one_file_for_each_rank(job: Path, tmp_path: Path) -> None:
    report = chrome(job, tmp_path / "out")
    assert report.counts["files"] == 2
    for rank in (0, 1):
        data = parsed(gzip.decompress((tmp_path / "out" / f"rank-{rank}.json.gz").read_bytes()))
        told = data["distributedInfo"]
        assert (told["rank"], told["world_size"]) == (rank, 2)
        assert told["pg_config"] == [
            {"pg_name": "dp", "pg_desc": "data", "backend_config": "nccl", "pg_size": 2, "ranks": [0, 1]}
        ]
        (compute,) = spans(data, name="matmul")
        assert int(compute["ts"] * 1000) + data["baseTimeNanoseconds"] == START
        assert str(compute["dur"]) == f"{5 + rank}.00{rank}"
        assert compute["args"]["stream"] == chrome_module.COMPUTE_STREAM
        (collective,) = [
            event for event in spans(data, cat="kernel") if event["name"].startswith("ncclKernel_AllReduce")
        ]
        assert collective["args"]["Process Group Ranks"] == "[0, 1]"
        assert (collective["args"]["Seq"], collective["args"]["In msg nelems"]) == (0, 7)
        assert [event["name"] for event in spans(data, cat="user_annotation")] == [
            "wait",
            "ProfilerStep#0",
            "ProfilerStep#1",
        ]
        assert len(spans(data, cat="cuda_runtime")) == len(spans(data, cat="kernel")) == 3


def test_one_file_for_all_has_arrows(job: Path, tmp_path: Path) -> None:
    chrome(job, tmp_path / "all.json")
    data = parsed((tmp_path / "all.json").read_bytes())
    flows = [event for event in data["traceEvents"] if event["ph"] in "stf"]
    assert [(event["ph"], event["pid"], event["cat"]) for event in flows] == [
        ("s", 0, "collective"), ("f", 2, "collective"), ("s", 0, "message"), ("f", 2, "message"),
    ]  # fmt: skip
    for event in flows:
        inside = [
            span
            for span in spans(data, pid=event["pid"], tid=event["tid"])
            if span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
        ]
        assert inside


def test_export_and_import_again(job: Path, tmp_path: Path) -> None:
    chrome(job, tmp_path / "out")
    convert(tmp_path / "again.prism", tmp_path / "out")
    with prismtrace.TraceReader(job) as old, prismtrace.TraceReader(tmp_path / "again.prism") as new:
        assert [group.ranks for group in new.groups.values()] == [(0, 1)]
        for rank in (0, 1):
            one, two = old.units(rank), new.units(rank)
            assert one.start_ns.tolist()[:2] == two.start_ns.tolist()[:2]
            assert one.end_ns.tolist()[:2] == two.end_ns.tolist()[:2]
            assert two.op.tolist()[1] == Op.ALL_REDUCE
            assert two.seq.tolist()[1] == 0
            assert old.steps(rank).end_ns.tolist() == new.steps(rank).end_ns.tolist()


def test_events_are_shown_on_their_tracks(tmp_path: Path) -> None:
    convert(tmp_path / "a.prism", DATA / "nccl_data.json")
    chrome(tmp_path / "a.prism", tmp_path / "a.json")
    data, source = (json.loads(path.read_bytes()) for path in (tmp_path / "a.json", DATA / "nccl_data.json"))
    names = sorted(event["name"] for event in source["traceEvents"] if event["ph"] == "X")
    assert sorted(event["name"] for event in spans(data) if event["name"] != "wait") == names
    streams = {event["args"]["stream"] for event in source["traceEvents"] if event.get("cat") == "kernel"}
    assert {event["args"]["stream"] for event in spans(data, cat="kernel")} == streams
    chrome(tmp_path / "a.prism", tmp_path / "units.json", events="false")
    units = json.loads((tmp_path / "units.json").read_bytes())
    assert len(spans(units, cat="kernel")) == len(
        [e for e in source["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    )
    assert not spans(units, cat="cpu_op")


def test_imported_json_is_used_where_there_is_one(tmp_path: Path) -> None:
    convert(tmp_path / "a.prism", DATA / "mi300.json", lossless="true")
    source = parsed((DATA / "mi300.json").read_bytes())
    chrome(tmp_path / "a.prism", tmp_path / "auto.json")
    assert parsed((tmp_path / "auto.json").read_bytes()) == source
    chrome(tmp_path / "a.prism", tmp_path / "units.json.gz", lossless="false")
    assert parsed(gzip.decompress((tmp_path / "units.json.gz").read_bytes()))["traceEvents"] != source["traceEvents"]


def test_a_slice_shows_its_units_and_not_the_whole_import(tmp_path: Path) -> None:
    convert(tmp_path / "a.prism", DATA / "mi300.json", lossless="true")
    extra = {"slice.steps": "0:1"}
    prismtrace.merge([tmp_path / "a.prism"], tmp_path / "b.prism", metadata=extra)
    assert "files" in chrome(tmp_path / "b.prism", tmp_path / "b.json").counts
    shown = parsed((tmp_path / "b.json").read_bytes())
    assert len(shown["traceEvents"]) != len(parsed((DATA / "mi300.json").read_bytes())["traceEvents"])
    assert not spans(shown, cat="cpu_op")


def test_a_cut_trace_is_written_whole(tmp_path: Path) -> None:
    data = (DATA / "mi300.json").read_bytes()
    events = parsed(data)["traceEvents"]
    packed = gzip.compress(data)
    for cut in (len(packed) // 2, len(packed) - 300):
        (tmp_path / "cut-rank0.json.gz").write_bytes(packed[:cut])
        report = convert(tmp_path / "a.prism", tmp_path / "cut-rank0.json.gz", lossless="true")
        assert any("cut off" in note for note in report.notes)
        back = parsed(restored(tmp_path / "a.prism", tmp_path / "back.json"))["traceEvents"]
        assert len(back) == report.counts["events"] > 20
        assert back == events[: len(back)]


def test_errors_say_what_to_do(job: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no imported Kineto events"):
        restored(job, tmp_path / "x.json")
    with pytest.raises(UsageError, match="no such option"):
        chrome(job, tmp_path / "x.json", unit="true")
    (tmp_path / "there").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        chrome(job, tmp_path / "there")
    with pytest.raises(OutputError, match="No such file"):
        chrome(job, tmp_path / "nowhere" / "x.json")
    convert(tmp_path / "two.prism", DATA / "dlrm-worker0.json", DATA / "dlrm-worker1.json", lossless="true")
    with pytest.raises(UsageError, match="name a folder"):
        restored(tmp_path / "two.prism", tmp_path / "x.json")
    with prismtrace.TraceWriter(tmp_path / "bad.prism") as writer:
        writer.add_attachment("kineto.events", b"nonsense")
    with pytest.raises(TraceFormatError, match="not a block"):
        restored(tmp_path / "bad.prism", tmp_path / "x.json")
    with prismtrace.TraceWriter(tmp_path / "empty.prism"):
        pass
    with pytest.raises(UsageError, match="no units and no events"):
        chrome(tmp_path / "empty.prism", tmp_path / "x.json")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "x."))]


def test_the_plugin_registers_everything() -> None:
    manager = PluginManager()
    assert {"kineto", "chrome"} <= set(manager.exporters())
    assert "kineto" in manager.importers()
    assert isinstance(manager.exporters()["kineto"], KinetoExporter)


@pytest.mark.filterwarnings("ignore")
def test_holistic_trace_analysis_agrees(tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    source = tmp_path / "source"
    source.mkdir()
    for rank in (0, 1):
        (source / f"{rank}.json").write_bytes((DATA / f"dlrm-worker{rank}.json").read_bytes())
    convert(tmp_path / "a.prism", source)
    chrome(tmp_path / "a.prism", tmp_path / "events")
    chrome(tmp_path / "a.prism", tmp_path / "units", events="false")
    tables = []
    for folder in (source, tmp_path / "events", tmp_path / "units"):
        found = analysis.TraceAnalysis(trace_dir=str(folder))
        tables.append((found.get_temporal_breakdown(visualize=False), found.get_comm_comp_overlap(visualize=False)))
    for other in tables[1:]:
        for one, two in zip(tables[0], other, strict=True):
            assert one.equals(two), f"{one}\n{two}"
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        for rank in (0, 1):
            units = reader.units(rank)
            compute = units.kind == UnitKind.COMPUTE
            busy = int((units.end_ns[compute] - units.start_ns[compute]).sum()) / 1000
            row = tables[0][0][tables[0][0]["rank"] == rank].iloc[0]
            copies = sum("Memcpy" in (label or "") or "Memset" in (label or "") for label in units.labels())
            assert busy >= row["compute_time(us)"] - 1
            assert copies or busy == pytest.approx(row["compute_time(us)"], abs=1)


def data_parallel_job(path: Path, *, slow: int, num_ranks: int = 6, num_steps: int = 5) -> None:
    """A job whose ranks compute and reduce; `slow` computes a third longer than the others."""
    group = prismtrace.ProcessGroup(9, "0", "dp", "nccl", tuple(range(num_ranks)))
    work = np.random.default_rng(0).integers(9_000_000, 9_300_000, (num_steps, num_ranks))
    work[:, slow] += 3_000_000
    begins = np.concatenate([[0], np.cumsum(work.max(axis=1) + 2_000_000)])
    with prismtrace.TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=num_ranks) as writer:
        writer.add_group(group)
        for rank in range(num_ranks):
            arrivals = begins[:-1] + work[:, rank]
            columns = {
                "kind": [UnitKind.COMPUTE, UnitKind.COLLECTIVE] * num_steps,
                "op": [Op.UNSPECIFIED, Op.ALL_REDUCE] * num_steps,
                "group_id": np.array([0, 9] * num_steps, np.uint64),
                "step": np.repeat(np.arange(num_steps), 2),
                "seq": np.stack([np.full(num_steps, ABSENT), np.arange(num_steps)], axis=1).ravel(),
                "start_ns": np.stack([begins[:-1], arrivals], axis=1).ravel(),
                "end_ns": np.stack([arrivals, begins[1:]], axis=1).ravel(),
            }  # fmt: skip
            writer.add_units(rank, columns)
            steps = {"step": np.arange(num_steps), "start_ns": begins[:-1], "end_ns": begins[1:]}
            writer.add_steps(rank, steps)


@pytest.mark.filterwarnings("ignore")
def test_holistic_trace_analysis_names_the_same_straggler(tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    data_parallel_job(tmp_path / "job.prism", slow=4)
    chrome(tmp_path / "job.prism", tmp_path / "folder")
    theirs = analysis.TraceAnalysis(trace_dir=str(tmp_path / "folder"))
    job = load_job(tmp_path / "job.prism")
    ours = stragglers_of(job, breakdown_of(job)).found[0]
    assert theirs.get_potential_stragglers(num_candidates=1) == [4]
    assert (ours.rank, ours.cause, ours.num_last) == (4, "compute", 5)
