"""What an import makes of a trace: units, groups, steps, events; and what it says about bad input."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_helpers import DATA, convert, document, parsed, restored, span
from prismtrace_kineto.importer import KinetoImporter

import prismtrace
from prism_sdk.errors import PrismError, UnreadableError, UsageError
from prism_sdk.simulate import load, simulate, write_timeline
from prismtrace import ABSENT, DType, EventKind, Op, ReduceOp, TraceFormatError, UnitKind

WORDS = [b"null", b"1e999", b"-5", b'"x"', b"[]", b"{", b"}", b"NaN", b"true", b'"ts": ', b"99999999999999999999"]
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start: Any, length: Any, **args: Any) -> dict[str, Any]:
    stream = args.pop("stream", 7)
    return span(name, start, length, cat="kernel", pid=0, tid=stream, device=0, stream=stream, **args)


def write(folder: Path, events: list[Any], name: str = "a.json", **top: Any) -> Path:
    path = folder / name
    path.write_bytes(document(events, **top))
    return path


@pytest.mark.parametrize("names", [("nccl_data",), ("mi300",), ("dlrm-worker0", "dlrm-worker1")])
def test_written_simulations_of_real_traces_simulate_to_themselves(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Although their communication does not say what it meets, and ranks begin at different times."""
    convert(tmp_path / "a.prism", *(DATA / f"{name}.json" for name in names))
    first = simulate(load(tmp_path / "a.prism"))
    write_timeline(first, tmp_path / "b.prism")
    assert not prismtrace.validate(tmp_path / "b.prism")
    again = simulate(load(tmp_path / "b.prism"))
    assert any("wait for nobody" in note for note in again.job.notes)
    assert again.step_time_ns == first.step_time_ns > 0
    for position in range(first.job.num_ranks):
        assert np.array_equal(again.times(position).end_ns, first.times(position).end_ns)
    assert [part.tolist() for part in again.totals()] == [part.tolist() for part in first.totals()]


def test_units_and_groups_of_a_real_trace(tmp_path: Path) -> None:
    report = convert(tmp_path / "a.prism", DATA / "nccl_data.json")
    assert not prismtrace.validate(tmp_path / "a.prism")
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        assert reader.world_size == 2
        (group,) = reader.groups.values()
        assert (group.name, group.description, group.ranks) == ("0", "default_pg", (0, 1))
        units = reader.units(0)
        (rows,) = np.nonzero(units.kind == UnitKind.COLLECTIVE)
        assert len(rows) == report.counts["communications"] == 21
        assert set(units.op[rows].tolist()) == {Op.ALL_REDUCE, Op.BROADCAST} or set(units.op[rows].tolist()) == {
            Op.ALL_REDUCE
        }
        assert set(units.dtype[rows].tolist()) <= {DType.FLOAT32, DType.INT64, DType.INT32}
        assert set(units.group_id[rows].tolist()) == {group.group_id}
        assert (units.num_elements_in[rows] > 0).all()
        assert (units.reduce_op[rows][units.op[rows] == Op.ALL_REDUCE] == ReduceOp.SUM).all()
        assert (units.seq == ABSENT).all()
        first = int(rows[0])
        event = reader.events(0)
        (row,) = np.nonzero(event.unit == first)
        assert event.name[int(row[0])].startswith("nccl")
        assert event.start_ns[row[0]] == units.start_ns[first]
        assert reader.steps(0).step.tolist() == sorted(reader.steps(0).step.tolist())
    assert any("no sequence number" in note for note in report.notes)
    assert any("1 of 2 ranks have no trace" in note for note in report.notes)


def test_kernels_without_a_group_get_none_and_a_note(tmp_path: Path) -> None:
    report = convert(tmp_path / "a.prism", DATA / "mi300.json")
    assert any("5 NCCL kernels name no process group" in note for note in report.notes)
    report = convert(tmp_path / "b.prism", DATA / "dlrm-worker0.json", DATA / "dlrm-worker1.json")
    assert report.counts["ranks"] == 2
    assert report.counts["groups"] == 0
    with prismtrace.TraceReader(tmp_path / "b.prism") as reader:
        assert reader.ranks == (0, 1)
        assert reader.world_size == 8
        assert not reader.units(1).group_id.any()


def test_nanoseconds_are_exact(tmp_path: Path) -> None:
    convert(tmp_path / "a.prism", DATA / "ns_times.json")
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        starts = set(reader.events(0).start_ns.tolist())
    text = (DATA / "ns_times.json").read_text()
    events = json.loads(text, parse_float=str)["traceEvents"]
    wanted = {int(str(event["ts"]).replace(".", "")) for event in events if event["ph"] in "Xi"}
    assert starts == wanted


def test_the_base_is_added_and_the_display_unit_is_not_heeded(tmp_path: Path) -> None:
    times = []
    for unit in ("ms", "ns"):
        source = write(
            tmp_path, [kernel("k", 5, 1)], baseTimeNanoseconds=1_700_000_000_000_000_001, displayTimeUnit=unit
        )
        convert(tmp_path / f"{unit}.prism", source)
        with prismtrace.TraceReader(tmp_path / f"{unit}.prism") as reader:
            times.append(reader.units(0).start_ns.tolist())
    assert times == [[1_700_000_000_000_005_001]] * 2


def test_odd_times_are_counted(tmp_path: Path) -> None:
    events = [
        kernel("string", "12.5", 1), kernel("huge", 10**30, 1), kernel("fine", 1, 1), kernel("negative", 3, -1),
        kernel("word", "soon", 1), kernel("null", None, 1), kernel("list", [1], 1), kernel("bool", True, 1),
    ]  # fmt: skip
    source = tmp_path / "a.json"
    source.write_bytes(document(events).replace(b'"ts": 1, ', b'"ts": 1.23456, ').replace(b"null", b"NaN"))
    report = convert(tmp_path / "a.prism", source)
    told = " ".join(report.notes)
    for what in (
        "1 times written as strings",
        "times out of range",
        "1 times finer than a nanosecond",
        "1 negative durations",
        "times that are no numbers",
    ):
        assert what in told or what.replace("1 ", "2 ", 1) in told, what
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        events_back = reader.events(0)
        starts = dict(zip(list(events_back.name), events_back.start_ns.tolist(), strict=True))
        assert starts["string"] == 12_500
        assert starts["fine"] == 1235
        assert starts["huge"] == starts["word"] == starts["list"] == starts["bool"] == ABSENT
        assert list(reader.units(0).label) == ["fine", "string"]
    assert not prismtrace.has_errors(prismtrace.validate(tmp_path / "a.prism"))


def test_streams_waits_and_steps(tmp_path: Path) -> None:
    record = {"Collective name": "allgather", "In msg nelems": 3, "dtype": "Half", "External id": 5}
    comm = {"Collective name": "allreduce", "Process Group Name": "dp", "Process Group Ranks": "[0, 1]", "Seq": 4}
    events = [
        span("ProfilerStep#7", 0, 50, cat="user_annotation"), span("ProfilerStep#8", 50, 50, cat="user_annotation"),
        span("cudaLaunchKernel", 1, 1, cat="cuda_runtime", correlation=1),
        span("cudaLaunchKernel", 49, 1, cat="cuda_runtime", correlation=2),
        kernel("a", 10, 10, correlation=1), kernel("b", 15, 10, stream=9), kernel("c", 60, 10, correlation=2),
        kernel(NCCL, 20, 20, stream=20, **comm),
        span("record_param_comms", 45, 4, **record),
        kernel(NCCL.replace("Reduce_Sum", "Gather"), 75, 5, stream=20, **{"External id": 5}),
    ]  # fmt: skip
    source = write(tmp_path, events, distributedInfo={"rank": 1, "world_size": 2})
    report = convert(tmp_path / "a.prism", source)
    assert not prismtrace.has_errors(prismtrace.validate(tmp_path / "a.prism"))
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        units = reader.units(1)
        rows = list(
            zip(units.kind.tolist(), (units.start_ns // 1000).tolist(), (units.end_ns // 1000).tolist(), strict=True)
        )
        compute, wait, collective = int(UnitKind.COMPUTE), int(UnitKind.WAIT), int(UnitKind.COLLECTIVE)
        assert rows == [
            (compute, 10, 20), (collective, 20, 40), (compute, 20, 25), (wait, 25, 40), (compute, 60, 70),
            (collective, 75, 80), (wait, 75, 80),
        ]  # fmt: skip
        assert units.awaits.tolist() == [ABSENT, ABSENT, ABSENT, 1, ABSENT, ABSENT, 5]
        assert units.seq.tolist()[1] == 4
        assert units.op.tolist()[5] == Op.ALL_GATHER
        assert units.num_elements_in.tolist()[5] == 3
        assert units.dtype.tolist()[5] == DType.FLOAT16
        assert units.step.tolist()[0] == 7
        assert units.step.tolist()[4] == 7  # launched in step 7, ran in step 8
        assert reader.steps(1).step.tolist() == [7, 8]
        assert [group.name for group in reader.groups.values()] == ["dp"]
    assert any("overlap" in note for note in report.notes)


def test_messages_and_peers(tmp_path: Path) -> None:
    group = {"Process Group Name": "pp", "Process Group Ranks": "[4, 9]"}
    name = "ncclDevKernel_SendRecv(x)"
    events = [
        kernel(name, 0, 1, **group, **{"Collective name": "send", "Dst Rank": 9}),
        kernel(name, 2, 1, **group, **{"Collective name": "recv", "Src Rank": 1}),
        kernel(name, 4, 1, **group, **{"Collective name": "recv", "Src Rank": 77}),
        kernel(name, 6, 1),
    ]
    report = convert(tmp_path / "a.prism", write(tmp_path, events, distributedInfo={"rank": 4, "world_size": 16}))
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        units = reader.units(4)
        own = units.kind != UnitKind.WAIT
        assert units.kind[own].tolist() == [UnitKind.SEND, UnitKind.RECV, UnitKind.RECV, UnitKind.COLLECTIVE]
        assert units.peer[own].tolist()[:2] == [9, 9]
        assert units.peer[own].tolist()[2] == prismtrace.ABSENT32
        assert units.op[own].tolist()[3] == Op.UNSPECIFIED
    assert any("translated" in note for note in report.notes)
    assert any("not in the group" in note for note in report.notes)


def test_flows_and_ids(tmp_path: Path) -> None:
    launch = span("cudaLaunchKernel", 1, 1, cat="cuda_runtime", correlation=3)
    flow = {"ph": "s", "id": 3, "pid": 1, "tid": 1, "ts": 1, "cat": "ac2g", "name": "ac2g"}
    loose = {"ph": "f", "id": 9, "pid": 1, "tid": 1, "ts": 8, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"}
    twice = [span("l", 2, 1, cat="cuda_runtime", correlation=5)] * 2 + [kernel("k", 4, 1, correlation=5)]
    report = convert(
        tmp_path / "a.prism", write(tmp_path, [launch, flow, kernel("a", 3, 1, correlation=3), loose, *twice])
    )
    assert report.counts["events"] == 7
    assert any("1 device events have no launch of their own" in note for note in report.notes)
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        events = reader.events(0)
        assert events.flow_id.tolist()[:3] == [3, ABSENT, 9]
        assert events.correlation_id.tolist()[:3] == [3, 3, ABSENT]
        assert list(events["kineto.flow_kind"])[:2] == ["start", None]
        assert events.kind.tolist()[2] == EventKind.FLOW_END


@pytest.mark.parametrize("name", ["run_rank3.json", "worker3_step_12.169.pt.trace.json", "x/rank-3/trace.json"])
def test_the_name_tells_the_rank_last(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    source = write(tmp_path, [kernel("a", 1, 1)], name, distributedInfo={})
    report = convert(tmp_path / "a.prism", source)
    assert any("taken from its name" in note for note in report.notes)
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        assert reader.ranks == (3,)
    convert(tmp_path / "a.prism", source, rank="5")
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        assert reader.ranks == (5,)


def test_no_rank_is_a_clear_error(tmp_path: Path) -> None:
    source = write(tmp_path, [kernel("a", 1, 1)], distributedInfo={"rank": "0"})
    with pytest.raises(UsageError, match=r"does not say its rank.*\n.*-O rank=N"):
        convert(tmp_path / "a.prism", source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json"]


def test_two_files_of_one_rank_are_an_error(tmp_path: Path) -> None:
    one, two = write(tmp_path, [], "a.json"), write(tmp_path, [], "b.json")
    with pytest.raises(UsageError, match="are both of rank 0"):
        convert(tmp_path / "a.prism", one, two)
    with pytest.raises(UsageError, match="names one rank"):
        convert(tmp_path / "a.prism", one, two, rank="1")


def test_folders_and_archives(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in (0, 1):
        data = document([kernel(f"k{rank}", 1, 1)], distributedInfo={"rank": rank, "world_size": 2})
        (folder / f"{rank}.json.gz").write_bytes(gzip.compress(data))
    (folder / "notes.txt").write_text("x")
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        archive.add(folder, "traces")
    for source in (folder, tmp_path / "t.tar.gz"):
        report = convert(tmp_path / "a.prism", source)
        assert report.counts["ranks"] == 2
        with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
            assert [reader.units(rank).labels() for rank in (0, 1)] == [["k0"], ["k1"]]
    whole = (tmp_path / "t.tar.gz").read_bytes()
    for cut in range(30, len(whole), 13):
        (tmp_path / "cut.tar.gz").write_bytes(whole[:cut])
        try:
            assert convert(tmp_path / "a.prism", tmp_path / "cut.tar.gz").notes
        except (PrismError, TraceFormatError) as error:
            assert "cut.tar.gz" in str(error)


def test_bad_sources_are_named(tmp_path: Path) -> None:
    empty, text, array, zipped = (tmp_path / name for name in ("empty.json", "text.json", "array.json", "z.json"))
    empty.write_bytes(b"")
    text.write_bytes(b"hello")
    array.write_bytes(b'{"a": 1}')
    zipped.write_bytes(b"PK\x03\x04rest")
    (tmp_path / "bad.tar.gz").write_bytes(gzip.compress(b"no tar"))
    (tmp_path / "none").mkdir()
    os.mkfifo(tmp_path / "fifo.json")
    for name, kind, what in (
        ("empty.json", TraceFormatError, "neither an object nor an array"), ("text.json", TraceFormatError, "neither"),
        ("array.json", TraceFormatError, "no array traceEvents"), ("z.json", UnreadableError, "zip"),
        ("bad.tar.gz", UnreadableError, "tar"), ("none", UnreadableError, "holds no trace"),
        ("fifo.json", UnreadableError, "neither a file nor a folder"),
        ("missing.json", UnreadableError, "No such file"),
    ):  # fmt: skip
        with pytest.raises(kind, match=what) as caught:
            convert(tmp_path / "a.prism", tmp_path / name)
        assert name in str(caught.value)
    assert not (tmp_path / "a.prism").exists()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), lossless=st.sampled_from(["true", "false"]))
def test_no_damage_raises_anything_but_its_own_errors(data: st.DataObject, lossless: str, tmp_path: Path) -> None:
    text = bytearray((DATA / "mi300.json").read_bytes()[-30_000:])
    text[:0] = b'{"distributedInfo": {"rank": 0}, "traceEvents": [{}, '
    start = text.index(b"{}, ") + 4
    del text[start : text.index(b"{\n", start)]
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(start, len(text) - 20))
        text[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=4) | st.sampled_from(WORDS))
    (tmp_path / "rank0.json").write_bytes(text)
    report = convert(tmp_path / "a.prism", tmp_path / "rank0.json", lossless=lossless)
    assert not prismtrace.has_errors(prismtrace.validate(tmp_path / "a.prism"))
    if lossless == "true":
        assert (
            len(parsed(restored(tmp_path / "a.prism", tmp_path / "b.json"))["traceEvents"]) == report.counts["events"]
        )


def test_options_are_checked(tmp_path: Path) -> None:
    source = write(tmp_path, [])
    for options, what in (
        ({"ranks": "1"}, "no such option"),
        ({"rank": "-1"}, "not a rank"),
        ({"lossless": "yes"}, "neither true"),
    ):
        with pytest.raises(UsageError, match=what):
            convert(tmp_path / "a.prism", source, **options)


def test_recognises() -> None:
    importer = KinetoImporter()
    for path in sorted(DATA.glob("*.json")):
        assert importer.recognises(path, path.read_bytes()[:65536])
    assert importer.recognises(DATA, b"")
    assert not importer.recognises(Path("a.json"), b'{"some": "thing"}')
    assert not importer.recognises(Path("a.et"), b"\x08\x01")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(DATA / "mi300.json", "x/mi300.json")
    assert importer.recognises(Path("a.tar.gz"), archive.getvalue()[:65536])


def test_an_import_replaces_its_output_only_when_it_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "a.prism"
    convert(output, DATA / "mi300.json")
    before = output.read_bytes()
    with pytest.raises(TraceFormatError):
        (tmp_path / "x.json").write_text("no")
        convert(output, tmp_path / "x.json")
    assert output.read_bytes() == before
    convert(output, DATA / "nccl_data.json")
    assert output.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.prism", "x.json"]


def test_what_is_no_event_name_or_id_is_counted(tmp_path: Path) -> None:
    odd = kernel("odd", 5, 1, correlation="0x1f") | {"name": 7}
    flow = {"ph": "s", "id": "0x10", "pid": 0, "tid": 7, "ts": 1, "cat": "ac2g", "name": "f"}
    report = convert(tmp_path / "a.prism", write(tmp_path, [kernel("a", 1, 2), 5, None, [], "x", odd, flow]))
    told = " ".join(report.notes)
    assert "4 elements among the events that are no events" in told
    assert "1 names that are no text are left out" in told
    assert "1 ids (correlation) that are no whole numbers are left out" in told
    assert "1 ids (id) that are no whole numbers are left out" in told
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        assert list(reader.events(0).name) == ["a", None, "f"]


def test_a_world_of_absurd_size_costs_nothing(tmp_path: Path) -> None:
    source = write(tmp_path, [kernel("a", 1, 2)], distributedInfo={"rank": 3, "world_size": 2**31 - 1})
    report = convert(tmp_path / "a.prism", source)
    assert f"{2**31 - 2} of {2**31 - 1} ranks have no trace here (0, 1, 2, 4, 5, 6, 7, 8, ...)" in report.notes
    convert(tmp_path / "a.prism", source, rank=str(2**31 - 1))
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        assert (reader.ranks, reader.world_size) == ((2**31 - 1,), 0)


@pytest.mark.timeout(20)
def test_a_pipe_in_a_folder_is_passed_by(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    assert not KinetoImporter().recognises(tmp_path, b"")
    write(tmp_path, [kernel("a", 1, 2)], name="rank0.json")
    assert KinetoImporter().recognises(tmp_path, b"")
    assert convert(tmp_path / "a.prism", tmp_path).counts["ranks"] == 1
