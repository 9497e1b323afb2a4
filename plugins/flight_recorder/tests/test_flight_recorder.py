"""The importer on dumps of PyTorch and on made ones of NCCL's structure: units, numbers, and what is said of a hang."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prismtrace_flight_recorder.importer import FlightRecorderImporter

import prismtrace
from prism_sdk.abc import ConversionReport
from prism_sdk.errors import UsageError
from prismtrace import ABSENT, DType, Op, TraceFormatError, TraceReader, TraceReadError, UnitKind

DATA = Path(__file__).parent / "data"
START = 1_795_984_319_922_421_793
Dumps = dict[int, dict[str, Any]]


def load(sources: Path | list[Path], output: Path, **options: str) -> ConversionReport:
    given = [sources] if isinstance(sources, Path) else sources
    return FlightRecorderImporter().import_trace(given, output=output, options=options, report=lambda line: None)


class Recorder:
    """Writes what a rank's recorder would hold, in the structure of version 2.10."""

    def __init__(self, rank: int, groups: dict[str, tuple[str, list[int]]]) -> None:
        self.rank, self.entries = rank, list[dict[str, Any]]()
        self.seq: dict[str, int] = {}
        self.p2p: dict[str, int] = {}
        self.groups = {name: given for name, given in groups.items() if rank in given[1]}

    def add(
        self,
        verb: str,
        group: str = "0",
        *,
        state: str = "completed",
        sizes: Any = None,
        outputs: Any = None,
        **more: Any,
    ) -> None:
        is_p2p = verb.startswith(("send", "recv"))
        same = more.pop("same_seq", False)
        counter = self.p2p if is_p2p or more.get("is_p2p") else self.seq
        if not same:
            counter[group] = counter.get(group, 0) + 1
        number = len(self.entries)
        created = START + 1000 * number + self.rank
        self.entries.append(
            {
                "record_id": number,
                "pg_id": int(group) if group.isdigit() else 0,
                "process_group": (group, self.groups[group][0]),
                "collective_seq_id": self.seq.get(group, 0),
                "p2p_seq_id": self.p2p.get(group, 0),
                "op_id": number + 1,
                "profiling_name": f"nccl:{verb}",
                "time_created_ns": created,
                "input_sizes": [[4, 4]] if sizes is None else sizes,
                "input_dtypes": ["BFloat16"],
                "output_sizes": ([[4, 4]] if sizes is None else sizes) if outputs is None else outputs,
                "output_dtypes": ["BFloat16"],
                "state": state,
                "time_discovered_started_ns": created + 10 if state != "scheduled" else None,
                "time_discovered_completed_ns": created + 500 if state == "completed" else None,
                "retired": state == "completed",
                "timeout_ms": 600000,
                "is_p2p": is_p2p,
                "frames": [
                    {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 1},
                    {"name": "train", "filename": "train.py", "line": 85},
                ],
            }
            | more
        )

    def dump(self, *, keep: int | None = None) -> dict[str, Any]:
        return {
            "version": "2.10",
            "entries": self.entries if keep is None else self.entries[-keep:],
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in self.groups.items()
            },
            "pg_status": {
                "0": {"last_enqueued_collective": 3, "last_started_collective": 2, "last_completed_collective": 1}
            },
            "comm_lib_version": "2.27.3",
        }


GROUPS: dict[str, tuple[str, list[int]]] = {
    "0": ("default_pg", [0, 1, 2, 3]),
    "1": ("dp", [0, 2]),
    "2": ("dp", [1, 3]),
}


def write(folder: Path, dumps: Dumps, *, as_json: bool = False, prefix: str = "nccl_trace_rank_") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps.items():
        path = folder / f"{prefix}{rank}"
        if as_json:
            path.write_text(json.dumps(dump))
        else:
            path.write_bytes(pickle.dumps(dump, 2))
    return folder


def healthy() -> list[Recorder]:
    ranks = [Recorder(rank, GROUPS) for rank in range(4)]
    for recorder in ranks:
        recorder.add("all_reduce")
        recorder.add("_reduce_scatter_base", "1" if recorder.rank % 2 == 0 else "2", sizes=[[8]], outputs=[[4]])
        recorder.add("all_reduce")
    return ranks


def torch_says(folder: Path) -> Any:
    """The database that PyTorch's own analyser makes of the same files."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    args = argparse.Namespace(
        trace_dir=str(folder), prefix="nccl_trace_rank_", just_print_entries=False, verbose=False,
        allow_incomplete_ranks=True, mismatch_cap=10,
    )  # fmt: skip
    details, version = loader.read_dir(args)
    return builder.build_db(details, args, version)


def test_units_of_a_job_that_ended_well(tmp_path: Path) -> None:
    folder = write(tmp_path / "job", {recorder.rank: recorder.dump() for recorder in healthy()})
    report = load(folder, tmp_path / "out.prism")
    assert prismtrace.validate(report.output) == []
    assert report.counts["units"] == 12 and report.counts["not_complete"] == 0
    with TraceReader(report.output) as reader:
        assert {group.ranks for group in reader.groups.values()} == {(0, 1, 2, 3), (0, 2), (1, 3)}
        units = reader.units(3)
        assert [Op(value).name for value in units.op.tolist()] == ["ALL_REDUCE", "REDUCE_SCATTER", "ALL_REDUCE"]
        assert units.seq.tolist() == [0, 0, 1]
        assert units.start_ns.tolist() == [START + 3, START + 1003, START + 2003]
        assert units.end_ns.tolist() == [START + 503, START + 1503, START + 2503]
        assert (units.num_elements_in.tolist(), units.num_elements_out.tolist()) == ([16, 8, 16], [16, 4, 16])
        assert {DType(value) for value in units.dtype.tolist()} == {DType.BFLOAT16}
        assert reader.groups[int(units.group_id[1])].ranks == (1, 3)
        assert reader.metadata["flight_recorder.version"] == "2.10"
    assert not any("not joined" in note or "complete" in note for note in report.notes)
    database = torch_says(folder)
    assert len(database.collectives) == 4
    assert all(collective.pass_check for collective in database.collectives)
    assert {len(group.ranks) for group in TraceReader(report.output).groups.values()} == {
        g.size for g in database.groups
    }


def test_pickle_and_json_say_the_same(tmp_path: Path) -> None:
    dumps = {recorder.rank: recorder.dump() for recorder in healthy()}
    for dump in dumps.values():
        dump["entries"][-1] |= {
            "state": "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
        }
    load(write(tmp_path / "pickles", dumps), tmp_path / "a.prism")
    for dump in dumps.values():
        dump["entries"][-1] |= {"time_discovered_started_ns": 0, "time_discovered_completed_ns": 0}
    load(write(tmp_path / "json", dumps, as_json=True), tmp_path / "b.prism")
    left, right = (prismtrace.to_json(tmp_path / name) for name in ("a.prism", "b.prism"))
    assert left == right
    with TraceReader(tmp_path / "a.prism") as reader:
        assert reader.units(0).end_ns[-1] == ABSENT


def test_who_has_not_joined(tmp_path: Path) -> None:
    ranks = healthy()
    for recorder in ranks:
        if recorder.rank != 2:
            recorder.add("all_reduce", state="scheduled" if recorder.rank else "started")
    folder = write(tmp_path / "job", {recorder.rank: recorder.dump() for recorder in ranks})
    report = load(folder, tmp_path / "out.prism")
    assert report.notes[0] == (
        "group '0' (default_pg) of ranks 0-3: rank 2 has not joined nccl:all_reduce, collective_seq_id 3 "
        "(its last is 2); ranks 0-1, 3 wait there, called by train at train.py:85"
    )
    assert report.counts["not_complete"] == 3
    failed = [each for each in torch_says(folder).collectives if not each.pass_check]
    assert [(each.collective_seq_id, each.missing_ranks) for each in failed] == [(3, {2})]


@pytest.mark.parametrize("behind", [{0}, {1}, {1, 3}, {0, 1, 2}])
@pytest.mark.parametrize("ahead", [1, 2])
def test_pytorchs_analyser_names_the_same_ranks(tmp_path: Path, behind: set[int], ahead: int) -> None:
    ranks = healthy()
    for recorder in ranks:
        for _ in range(0 if recorder.rank in behind else ahead):
            recorder.add("broadcast", state="scheduled")
    folder = write(tmp_path / "job", {recorder.rank: recorder.dump() for recorder in ranks})
    note = load(folder, tmp_path / "out.prism").notes[0]
    first = next(each for each in torch_says(folder).collectives if each.missing_ranks)
    assert (first.collective_seq_id, first.missing_ranks, first.collective_name) == (3, behind, "nccl:broadcast")
    have = "rank" if len(behind) == 1 else "ranks"
    named = {0: "0", 1: "1"}.get(min(behind), "") if len(behind) == 1 else "1, 3" if behind == {1, 3} else "0-2"
    assert f": {have} {named} ha" in note and "not joined nccl:broadcast, collective_seq_id 3" in note


def test_a_rank_that_joined_nothing_and_one_without_a_dump(tmp_path: Path) -> None:
    ranks = healthy()[:3]
    ranks[1].entries.clear()
    report = load(
        write(tmp_path / "job", {recorder.rank: recorder.dump() for recorder in ranks}), tmp_path / "out.prism"
    )
    assert "rank 1 has not joined nccl:all_reduce, collective_seq_id 1 (none in this group so far)" in report.notes[0]
    assert any(note.startswith("no dump of ranks 3") for note in report.notes)
    assert report.counts["missing_ranks"] == 1


def test_all_joined_and_not_complete(tmp_path: Path) -> None:
    ranks = healthy()
    for recorder in ranks:
        recorder.add("all_gather", state="started" if recorder.rank in (1, 2) else "completed")
    report = load(write(tmp_path / "job", {r.rank: r.dump() for r in ranks}), tmp_path / "out.prism")
    assert "all ranks joined nccl:all_gather, collective_seq_id 3" in report.notes[0]
    assert "not complete on ranks 1-2 (started)" in report.notes[0]


def test_ranks_that_disagree(tmp_path: Path) -> None:
    ranks = healthy()
    for recorder in ranks:
        recorder.add("all_reduce", sizes=[[5]] if recorder.rank == 1 else [[4]], state="started")
    folder = write(tmp_path / "job", {r.rank: r.dump() for r in ranks})
    report = load(folder, tmp_path / "out.prism")
    assert any(
        "disagree at collective_seq_id 3: elements in of nccl:all_reduce: ranks 0, 2-3 4; rank 1 5" in note
        for note in report.notes
    )
    bad = [collective for collective in torch_says(folder).collectives if not collective.pass_check]
    assert bad and 1 in (bad[0].mismatch_collectives or {})
    ranks[3].entries[-1]["profiling_name"] = "nccl:broadcast"
    report = load(write(tmp_path / "job", {r.rank: r.dump() for r in ranks}), tmp_path / "out.prism")
    assert any("ranks 0-2 called nccl:all_reduce; rank 3 called nccl:broadcast" in note for note in report.notes)


def test_a_ring_buffer_that_begins_late(tmp_path: Path) -> None:
    ranks = healthy()
    for recorder in ranks:
        for _ in range(5):
            recorder.add("all_reduce")
    report = load(
        write(tmp_path / "job", {r.rank: r.dump(keep=3 if r.rank == 1 else 4) for r in ranks}), tmp_path / "out.prism"
    )
    with TraceReader(report.output) as reader:
        assert reader.units(1).seq.tolist() == [4, 5, 6]
        assert reader.units(0).seq.tolist() == [3, 4, 5, 6]
        scalars = dict(zip(reader.scalars(1).names(), reader.scalars(1).value.tolist(), strict=True))
        assert scalars["flight_recorder.first_record_id"] == 5
        assert scalars["flight_recorder.first_collective_seq_id.0"] == 5
    assert "rank 1: the ring buffer begins with record 5; first kept: 5 of group '0'" in report.notes
    assert not any("not joined" in note for note in report.notes)
    assert [f for f in prismtrace.validate(report.output) if f.severity == "error"] == []


def test_batches_get_numbers_of_their_own_and_the_end_of_their_end(tmp_path: Path) -> None:
    ranks = healthy()
    nothing: dict[str, Any] = {
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
    }
    for recorder in ranks:
        recorder.add("all_gather", state="scheduled", **nothing)
        recorder.add("all_gather", state="scheduled", same_seq=True, **nothing)
        recorder.add("ALLGATHER_coalesced", same_seq=True, sizes=[])
        recorder.add("all_reduce")
    report = load(write(tmp_path / "job", {r.rank: r.dump() for r in ranks}), tmp_path / "out.prism")
    with TraceReader(report.output) as reader:
        units = reader.units(0)
        assert units.seq.tolist() == [0, 0, 1, 2, 3, 4]
        assert (units.end_ns != ABSENT).all()
    assert report.counts["batches"] == 4 and report.counts["not_complete"] == 0
    assert prismtrace.validate(report.output) == []


def test_messages_name_global_ranks(tmp_path: Path) -> None:
    """Entries hold ranks inside the group: rank 3 of group [1, 3] says `recv 1<-0` and means 3 from 1."""
    ranks = [Recorder(rank, GROUPS) for rank in range(4)]
    ranks[1].add("send 0->1", "2", sizes=[[7]])
    ranks[3].add("recv 1<-0", "2", sizes=[], outputs=[[7]])
    ranks[3].add("recv 1<-0", "2", sizes=[], outputs=[[7]], state="scheduled")
    ranks[0].add("send 0->2", "1", sizes=[[7]])
    report = load(write(tmp_path / "job", {r.rank: r.dump() for r in ranks}), tmp_path / "out.prism")
    with TraceReader(report.output) as reader:
        sent, received, global_named = reader.units(1), reader.units(3), reader.units(0)
        assert (sent.kind.tolist(), sent.peer.tolist(), sent.seq.tolist()) == ([UnitKind.SEND], [3], [0])
        assert (received.peer.tolist(), received.seq.tolist()) == ([1, 1], [0, 1])
        assert (sent.num_elements_in.tolist(), received.num_elements_out.tolist()) == ([7], [7, 7])
        assert global_named.peer.tolist() == [2]
    assert any(
        "rank 3 has not completed recv from rank 1 (p2p_seq_id 2), which has not posted its send" in note
        for note in report.notes
    )
    assert [f for f in prismtrace.validate(report.output) if f.severity == "error"] == []


def test_messages_are_not_numbered_where_entries_are_lost(tmp_path: Path) -> None:
    ranks = [Recorder(rank, GROUPS) for rank in range(4)]
    for _ in range(3):
        ranks[0].add("send 0->1", "1")
        ranks[2].add("recv 1<-0", "1")
    report = load(
        write(tmp_path / "job", {r.rank: r.dump(keep=2 if r.rank == 2 else 9) for r in ranks}), tmp_path / "o.prism"
    )
    with TraceReader(report.output) as reader:
        assert reader.units(0).seq.tolist() == [ABSENT] * 3
        assert reader.units(0).peer.tolist() == [2] * 3
    assert any("5 sends and receives have no seq" in note for note in report.notes)


def test_whose_rank_it_is_and_what_is_no_dump(tmp_path: Path) -> None:
    dump = healthy()[0].dump()
    folder = write(tmp_path / "a", {0: dump}, prefix="host7_trace_rank_")
    shutil.copy(folder / "host7_trace_rank_0", folder / "host8_trace_rank_0")
    with pytest.raises(UsageError, match="both of rank 0"):
        load(folder, tmp_path / "out.prism")
    plain = tmp_path / "plain"
    plain.write_bytes(pickle.dumps(dump))
    with pytest.raises(UsageError, match="does not say of which rank"):
        load(plain, tmp_path / "out.prism")
    load(plain, tmp_path / "out.prism", rank="2")
    with TraceReader(tmp_path / "out.prism") as reader:
        assert reader.ranks == (2,)
    with pytest.raises(UsageError, match="in a world of 2"):
        load(plain, tmp_path / "out.prism", rank="2", world_size="2")
    with pytest.raises(UsageError, match="not an option"):
        load(plain, tmp_path / "out.prism", ranks="2")
    for text, message in (
        (b"hello", "neither a pickle"),
        (b"{", "is no JSON"),
        (b"{}", "no version"),
        (b"", "neither"),
    ):
        (tmp_path / "x_1").write_bytes(text)
        with pytest.raises(TraceFormatError, match=message):
            load(tmp_path / "x_1", tmp_path / "new.prism")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TraceReadError, match="no flight-recorder dump"):
        load(empty, tmp_path / "new.prism")
    assert not (tmp_path / "new.prism").exists()


def test_one_hostile_file_in_a_folder_stops_the_import(tmp_path: Path) -> None:
    folder = write(tmp_path / "job", {0: healthy()[0].dump()})
    (folder / "nccl_trace_rank_1").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    (folder / "notes_2").write_text("not a dump")
    with pytest.raises(TraceFormatError, match=r"nccl_trace_rank_1: byte 2: .*os\.system"):
        load(folder, tmp_path / "out.prism")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**63) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=8,
)
FIELDS = list(healthy()[0].entries[0])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), JSON), max_size=6), JSON, JSON)
def test_whatever_a_dump_holds_nothing_crashes(
    tmp_path: Path, changes: list[tuple[str, Any]], config: Any, status: Any
) -> None:
    ranks = healthy()
    for place, (field, value) in enumerate(changes):
        ranks[place % 4].entries[place % 3][field] = value
    dumps = {recorder.rank: recorder.dump() for recorder in ranks}
    dumps[0]["pg_config"], dumps[1]["pg_status"] = config, status
    report = load(write(tmp_path / "fuzz", dumps), tmp_path / "fuzz.prism")
    errors = {finding.code for finding in prismtrace.validate(report.output) if finding.severity == "error"}
    assert errors <= {"PT031"}, "ranks may disagree, the trace itself is sound"
