"""What Perfetto's trace processor finds in an export is what the trace holds."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from prismtrace_perfetto import wire
from prismtrace_perfetto.exporting import PerfettoExporter
from prismtrace_perfetto.lanes import Lanes
from trace_processor import ask

from prism_sdk.abc import ConversionReport
from prism_sdk.errors import OutputError, UsageError
from prismtrace import GraphKind, Op, ProcessGroup, TraceReader, TraceWriter, UnitKind

DAMAGE = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"


def export(source: Path, output: Path, **options: str) -> ConversionReport:
    return PerfettoExporter().export_trace(source, output=output, options=options, report=print)


def write_job(path: Path, *, num_ranks: int = 4, steps: int = 3, shift_ns: int = 0) -> Path:
    """Pairs of ranks pass a message, all reduce together, with two reductions in flight at once."""
    group = ProcessGroup(7, "dp", "", "nccl", tuple(range(num_ranks)))
    metadata = {"created": "2026-01-02T03:04:05+00:00"}
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=num_ranks, metadata=metadata) as writer:
        writer.add_group(group)
        for rank in range(num_ranks):
            sends = rank % 2 == 0
            for step in range(steps):
                base, first = 100_000 * step + 10 * rank + shift_ns, 6 * step
                start = [base, base + 1000, base + 1500, base + 2000, base + (100 if sends else 0), base + 5000]
                end = [base + 1000, base + 3000, base + 4000, base + 4000, base + 900, None]
                writer.add_units(
                    rank,
                    {
                        "kind": [1, 2, 2, 5, UnitKind.SEND if sends else UnitKind.RECV, 1],
                        "phase": [1, 2, 2, 2, 1, 3],
                        "step": [step] * 6,
                        "start_ns": start,
                        "end_ns": end,
                        "group_id": [0, 7, 7, 0, 7, 0],
                        "seq": [None, 2 * step, 2 * step + 1, None, step, None],
                        "op": [0, Op.ALL_REDUCE, Op.REDUCE_SCATTER, 0, Op.SEND if sends else Op.RECV, 0],
                        "dtype": [0, 4, 4, 0, 1, 0],
                        "num_elements_in": [None, 1024, 2**40, None, 8, None],
                        "peer": [None, None, None, None, rank ^ 1, None],
                        "awaits": [None, None, None, first + 2, None, None],
                        "microbatch": [step, None, None, None, 0, None],
                        "memory_bytes": [2**33 + step, None, None, None, None, None],
                        "label": ["größe" if step else None, None, None, None, None, None],
                    },
                )
                before = base - 95_000 if step else None
                row = {"step": [step], "start_ns": [before], "end_ns": [base + 5000], "loss": [2.5 - step]}
                writer.add_steps(rank, row)
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("perfetto") / "job.prism")


def test_the_trace_processor_finds_every_slice_track_and_flow(tmp_path: Path, job: Path) -> None:
    report = export(job, tmp_path / "x.perfetto-trace")
    damage, processes, slices, lanes, messages, chains, notes, counters, instants, steps = ask(
        tmp_path / "x.perfetto-trace",
        DAMAGE,
        "select name, pid from process where name like 'rank %' order by pid",
        "select t.name, s.name, s.category, count(*), min(s.dur), max(s.depth), min(s.ts) from slice s "
        "join process_track t on t.id = s.track_id join process p using (upid) "
        "where p.name = 'rank 1' and s.dur > 0 group by 1, 2, 3 order by 1, 2",
        "select p.name, count(*) from process_track t join process p using (upid) "
        "where t.name = 'dp (lane 2)' group by 1",
        "select o.name, i.name, i.ts >= o.ts, op.name, ip.name from flow f join slice o on o.id = f.slice_out "
        "join slice i on i.id = f.slice_in join process_track ot on ot.id = o.track_id "
        "join process op on op.upid = ot.upid join process_track it on it.id = i.track_id "
        "join process ip on ip.upid = it.upid where o.name = 'send' order by op.name, o.ts",
        "select o.name, count(*) from flow f join slice o on o.id = f.slice_out join slice i on i.id = f.slice_in "
        "where o.name = i.name group by 1 order by 1",
        "select a.key, a.int_value, a.string_value from slice s join args a using (arg_set_id) "
        "join process_track t on t.id = s.track_id join process p using (upid) where s.name = 'reduce_scatter' "
        "and p.name = 'rank 2' and a.key like 'debug.%' order by s.ts, a.key limit 6",
        "select t.name, count(*), max(value) from counter c join counter_track t on t.id = c.track_id "
        "group by 1 order by 1",
        "select count(*) from slice where dur = 0 and name = 'optimizer'",
        "select name, dur from slice where category = 'step' order by ts limit 1",
    )
    assert damage == []
    assert processes == [(f"rank {rank}", 1_000_000 + rank) for rank in range(4)]
    assert slices == [
        ("dp", "all_reduce", "collective", 3, 2000, 0, 1010),
        ("dp (lane 2)", "reduce_scatter", "collective", 3, 2500, 0, 1510),
        ("dp recv", "recv", "recv", 3, 900, 0, 10),
        ("host", "forward", "compute", 1, 1000, 0, 10),
        ("host", "größe", "compute", 2, 1000, 0, 100_010),
        ("host", "wait", "wait", 3, 2000, 0, 2010),
        ("steps", "step 1", "step", 1, 100_000, 0, 5010),
        ("steps", "step 2", "step", 1, 100_000, 0, 105_010),
    ]
    assert lanes == [(f"rank {rank}", 1) for rank in range(4)]
    # although every receive is posted before its send, arrows go from the send to where the message arrives
    assert messages == [("send", "received", 1, f"rank {r}", f"rank {r + 1}") for r in (0, 0, 0, 2, 2, 2)]
    assert chains == [("all_reduce", 9), ("reduce_scatter", 9)]  # three steps, four members
    assert notes == [
        ("debug.dtype", None, "bfloat16"),
        ("debug.group", None, "dp"),
        ("debug.num_elements_in", 2**40, None),
        ("debug.op", None, "reduce_scatter"),
        ("debug.phase", None, "backward"),
        ("debug.seq", 1, None),
    ]
    assert counters == [("loss", 12, 2.5), ("memory", 12, 2.0**33 + 2)]
    assert instants == [(12,)] and steps == [("step 1", 100_000)]
    assert report.counts["units"] == 72 and report.counts["slices"] == 60 + 8
    assert report.counts["overlapping_slices_moved_to_another_lane"] == 12
    assert any("12 slices overlapped" in note for note in report.notes)
    assert any("12 units without an end" in note for note in report.notes)


def test_options_choose(tmp_path: Path, job: Path) -> None:
    export(job, tmp_path / "a.pftrace", ranks="1-2", steps="1:2", flows="messages", annotations="false")
    ranks, flows, args, ts = ask(
        tmp_path / "a.pftrace",
        "select name from process where name like 'rank %' order by 1",
        "select count(*) from flow",
        "select count(*) from args where key like 'debug.%'",
        "select min(ts), max(ts) from slice where category != 'step'",
    )
    assert ranks == [("rank 1",), ("rank 2",)] and flows == [(0,)] and args == [(1,)]  # of the steps
    assert ts == [(100_010, 105_020)]


def test_gzip(tmp_path: Path, job: Path) -> None:
    export(job, tmp_path / "plain.pftrace")
    export(job, tmp_path / "a.perfetto-trace.gz")
    export(job, tmp_path / "b.pftrace", gzip="true")
    for name in ("a.perfetto-trace.gz", "b.pftrace"):
        assert gzip.decompress((tmp_path / name).read_bytes()) == (tmp_path / "plain.pftrace").read_bytes()
    assert ask(tmp_path / "b.pftrace", "select count(*) > 60 from slice") == [[(1,)]]


def test_times_below_zero_are_shifted_and_the_clock_is_kept(tmp_path: Path) -> None:
    source = write_job(tmp_path / "n.prism", num_ranks=2, steps=1, shift_ns=-(10**12))
    report = export(source, tmp_path / "n.pftrace")
    assert any("below zero" in note for note in report.notes)
    found, real = ask(
        tmp_path / "n.pftrace",
        "select min(ts), count(*) from slice where dur > 0",
        "select clock_value from clock_snapshot where clock_name = 'REALTIME'",
    )
    assert found == [(0, 10)] and real == [(1767323045 * 10**9,)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30), st.integers(0, 30))
def test_lanes_never_overlap_and_are_as_few_as_can_be(pairs: list[tuple[int, int]], cut: int) -> None:
    pairs.sort()
    start = np.array([s for s, _ in pairs], np.int64)
    end = start + np.array([d for _, d in pairs], np.int64)
    lanes = Lanes()
    lane = np.concatenate([lanes.assign(start[:cut], end[:cut]), lanes.assign(start[cut:], end[cut:])])
    for number in range(lanes.num_lanes):
        mine = lane == number
        assert mine.any() and (start[mine][1:] >= end[mine][:-1]).all()
    deepest = max((int(((start <= t) & (end > t)).sum()) for t in start), default=0)
    empty = (start == end).any()  # a slice without length needs a lane where all others are taken
    assert deepest <= lanes.num_lanes <= deepest + empty


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1), st.booleans()), min_size=1, max_size=9
    )
)
def test_the_wire_format_is_what_the_protobuf_library_reads(rows: list[tuple[int, int, bool]]) -> None:
    signed, unsigned, present = (
        np.array(c, t) for c, t in zip(zip(*rows, strict=True), ("i8", "u8", "?"), strict=True)
    )
    note = wire.message_field(4, [wire.varint_field(1, unsigned), wire.varint_field(4, signed)], present)
    cells = wire.message_field(
        11, [wire.varint_field(11, unsigned), note, wire.fixed64_field(47, unsigned, present)], None
    )
    for number, (value, other, there) in enumerate(rows):
        one = slice(number, number + 1)
        blocks = tuple((m[one] if len(m) > 1 else m, k[one] if len(k) > 1 else k) for m, k in cells.blocks)
        raw = wire.Cells(blocks, cells.lengths[one]).to_bytes()
        assert len(raw) == cells.lengths[number]
        event = pb.TracePacket.FromString(raw).track_event
        expected = pb.TrackEvent(track_uuid=other)
        if there:
            expected.debug_annotations.add(name_iid=other, int_value=value)
            expected.flow_ids.append(other)
        assert event == expected


def test_every_packet_is_well_formed(tmp_path: Path, job: Path) -> None:
    export(job, tmp_path / "x.pftrace")
    trace = pb.Trace.FromString((tmp_path / "x.pftrace").read_bytes())
    described = {p.track_descriptor.uuid for p in trace.packet if p.HasField("track_descriptor")}
    events = [p.track_event for p in trace.packet if p.HasField("track_event")]
    assert {e.track_uuid for e in events} <= described
    types = [e.type for e in events]
    assert types.count(pb.TrackEvent.TYPE_SLICE_BEGIN) == types.count(pb.TrackEvent.TYPE_SLICE_END) == 68
    names = {n.iid: n.name for p in trace.packet for n in p.interned_data.event_names}
    assert {e.name_iid for e in events if e.name_iid} <= names.keys() and "größe" in names.values()


def test_values_that_no_version_names_are_shown_as_numbers(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.prism") as writer:
        writer.add_units(0, {"kind": [99, 2], "op": [0, 200], "start_ns": [0, 5], "end_ns": [5, 6], "group_id": [0, 5]})
    export(tmp_path / "a.prism", tmp_path / "a.pftrace")
    (found,) = ask(
        tmp_path / "a.pftrace", "select s.name, t.name from slice s join track t on t.id = s.track_id order by ts"
    )
    assert found == [("unitkind 99", "host"), ("op 200", "group 5")]


def test_what_cannot_be_done_is_said(tmp_path: Path, job: Path) -> None:
    (tmp_path / "folder").mkdir()
    with TraceWriter(tmp_path / "bare.prism") as writer:
        writer.add_units(0, {"kind": [1]})
    cases: list[tuple[Path, Path, dict[str, str], type[Exception], str]] = [
        (tmp_path / "bare.prism", tmp_path / "o", {}, UsageError, "no unit or step has a time"),
        (job, tmp_path / "folder", {}, UsageError, "is a folder"),
        (job, tmp_path / "no" / "o", {}, OutputError, "cannot write"),
        (job, tmp_path / "bare.prism" / "o", {}, OutputError, "cannot write"),
        (job, tmp_path / "o", {"rank": "1"}, UsageError, "no option"),
        (job, tmp_path / "o", {"ranks": "9"}, UsageError, "selects no rank"),
        (job, tmp_path / "o", {"steps": "5:4"}, UsageError, "empty"),
        (job, tmp_path / "o", {"flows": "some"}, UsageError, "flows=some"),
        (job, tmp_path / "o", {"gzip": "some"}, UsageError, "gzip=some"),
    ]
    for source, output, options, error, message in cases:
        with pytest.raises(error, match=message):
            export(source, output, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare.prism", "folder"]


_LIMITED = """
import resource, sys
from pathlib import Path
from prism_sdk.errors import OutputError
from prismtrace_perfetto.exporting import PerfettoExporter
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    PerfettoExporter().export_trace(Path(sys.argv[1]), output=Path(sys.argv[2]), options={}, report=print)
except OutputError as error:
    print(error)
    sys.exit(7)
"""
_PEAK = """
import resource, sys
from pathlib import Path
from prismtrace_perfetto.exporting import PerfettoExporter
PerfettoExporter().export_trace(Path(sys.argv[1]), output=Path(sys.argv[2]), options={}, report=print)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_full_disk_leaves_nothing(tmp_path: Path, job: Path) -> None:
    """A limit on file sizes stands for the full disk."""
    command = [sys.executable, "-c", _LIMITED, str(job), str(tmp_path / "x.pftrace")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "x.pftrace" in done.stdout and "arge" in done.stdout and list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_ranks(tmp_path: Path) -> None:
    peaks = []
    for num_ranks in (10, 100):
        source = tmp_path / f"{num_ranks}.prism"
        with TraceWriter(source, world_size=num_ranks) as writer:
            for rank in range(num_ranks):
                start = np.arange(3000) * 1000
                kinds = np.tile([1, 2], 1500)
                columns = {"kind": kinds, "start_ns": start, "end_ns": start + 1500, "seq": np.arange(3000)}
                writer.add_units(rank, {**columns, "group_id": np.full(3000, 1, np.uint64)})
        command = [sys.executable, "-c", _PEAK, str(source), str(tmp_path / "x.pftrace")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    # the larger file is 27 MB larger
    assert peaks[1] - peaks[0] < 8, peaks


def test_the_slices_are_the_units_of_the_trace(tmp_path: Path, job: Path) -> None:
    export(job, tmp_path / "x.pftrace", flows="none")
    (rows,) = ask(
        tmp_path / "x.pftrace",
        "select p.pid - 1000000, a.int_value, s.ts, s.dur from slice s join process_track t on t.id = s.track_id "
        "join process p using (upid) join args a using (arg_set_id) where a.key = 'debug.unit' order by 1, 2",
    )
    expected = []
    with TraceReader(job) as reader:
        for rank in reader.ranks:
            units = reader.units(rank)
            ends = np.where(units.end_ns < 0, units.start_ns, units.end_ns)
            durations = (ends - units.start_ns).tolist()
            expected += [
                (rank, n, s, d) for n, (s, d) in enumerate(zip(units.start_ns.tolist(), durations, strict=True))
            ]
    assert rows == expected
