"""The library against a program that plays NCCL: every version, threads, odd orders, crashes, forks, sanitizers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from host_runs import CRASHES, Build, Played

from prism_sdk.nccl import RecordFile, read_records
from prism_sdk.nccl.format import EventType
from prismtrace import ABSENT

Play = Callable[..., Played]
VERSIONS = range(1, 8)
KNOWN_SINCE = {
    1: {"group", "coll", "p2p", "proxy_op", "proxy_step", "proxy_ctrl"},
    3: {"kernel_ch", "net"},
    5: {"group_api", "coll_api", "p2p_api", "kernel_launch"},
    6: {"ce_coll", "ce_sync", "ce_batch"},
    7: {"kernel_phase"},
}


def counts(records: RecordFile) -> dict[str, int]:
    return {kind.name.lower(): int(np.count_nonzero(records.events.type == kind)) for kind in EventType}


def the_file(played: Played) -> RecordFile:
    assert len(played.files) == 1, played.files
    return read_records(played.files[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_played_is_in_the_file(play: Play, version: int) -> None:
    played = play(version, "normal", 3000, 3, 4)
    assert played.exit_code == 0 and played.report["errors"] == 0
    known = set().union(*(kinds for since, kinds in KNOWN_SINCE.items() if since <= version))
    assert played.report["mask"] == sum(1 << kind for kind in EventType if kind.name.lower() in known)
    records = the_file(played)
    assert counts(records) == played.report["started"]
    assert not any(played.report["refused"].values())
    assert records.is_complete and not records.num_lost_events and not records.num_orphans
    assert not records.num_missing_stops and not records.num_extra_stops
    assert {kind for kind, num in counts(records).items() if num} <= known


@pytest.mark.parametrize("version", VERSIONS)
def test_communicators_and_fields(play: Play, version: int) -> None:
    records = the_file(play(version, "normal", 200, 3, 4))
    assert {comm.hash for comm in records.comms.values()} == {0x1000, 0x1001, 0x1002}
    by_hash = {comm.hash: comm for comm in records.comms.values()}
    for place in range(3):
        comm = by_hash[0x1000 + place]
        assert comm.rank == place and comm.interface_version == version
        assert comm.num_ranks == (8 if version >= 4 else None)
        assert comm.name == (f"comm{place}" if version >= 4 else "world")
        assert comm.destroyed_ns is not None and comm.destroyed_ns > comm.created_ns
    fields = records.tasks.fields[records.events.type[records.tasks.event] == EventType.COLL]
    assert {records.text(code) for code in fields["func"]} == {"AllReduce"}
    assert {records.text(code) for code in fields["dtype"]} == {"ncclFloat32"}
    assert {records.text(code) for code in fields["algo"]} == {"RING"}
    assert {records.text(code) for code in fields["proto"]} == {"SIMPLE"}
    assert set(fields["channels"]) == {4} and set(fields["warps"]) == {16}
    comm_of = records.events.comm[records.tasks.event][records.events.type[records.tasks.event] == EventType.COLL]
    for number in records.comms:
        mine = fields[comm_of == number]
        assert sorted(mine["seq"]) == list(range(200))
        assert (mine["count"] == 1000 + mine["seq"]).all()
    messages = records.tasks.fields[records.events.type[records.tasks.event] == EventType.P2P]
    assert {records.text(code) for code in messages["func"]} == {"Send", "Recv"}
    assert set(messages["root"]) == {1} and set(messages["count"]) == {64}
    tags = set(records.tasks.user_tag[records.events.type[records.tasks.event] == EventType.COLL].tolist())
    assert tags == ({42} if version == 7 else {0})


@pytest.mark.parametrize("version", [4, 5, 7])
def test_parents_and_gpu_times(play: Play, version: int) -> None:
    records = the_file(play(version, "normal", 500, 2, 4))
    events = records.events
    kernels = events.rows_of(EventType.KERNEL_CH)
    assert np.isin(events.type[events.parent[kernels]], [EventType.COLL, EventType.P2P]).all()
    assert (events.comm[kernels] == events.comm[events.parent[kernels]]).all()
    assert (events.gpu_start_ns[kernels] != ABSENT).all() and (events.gpu_stop_ns[kernels] != ABSENT).all()
    assert (events.gpu_stop_ns[kernels] >= events.gpu_start_ns[kernels]).all()
    colls = events.rows_of(EventType.COLL)
    api, group = events.parent[colls], records.tasks.group[events.task[colls]]
    assert (events.type[group] == EventType.GROUP).all()
    if version >= 5:
        assert (events.type[api] == EventType.COLL_API).all()
        assert (events.type[events.parent[api]] == EventType.GROUP_API).all()
    else:
        assert (api == group).all()
    steps = events.rows_of(EventType.NET)
    assert (events.values[steps, 2] == 4096).all() and (events.values[steps, 1] == (2 | 55 << 32)).all()


def test_stops_that_are_missing_doubled_and_out_of_order(play: Play) -> None:
    missing = the_file(play(5, "missing", 700, 2, 4))
    colls = missing.events.rows_of(EventType.COLL)
    seq = missing.tasks.fields["seq"][missing.events.task[colls]]
    assert ((missing.events.stop_ns[colls] == ABSENT) == (seq % 7 == 0)).all()
    assert missing.num_missing_stops > 200 and not missing.num_extra_stops


def test_doubled_stops_count_once(play: Play) -> None:
    played = play(6, "reorder", 1100, 1, 4)
    records = the_file(played)
    # the proxy operations of every eleventh collective, and of the two messages that every 32nd has beside it
    doubled = sum(3 if seq % 32 == 0 else 1 for seq in range(0, 1100, 11))
    assert records.num_extra_stops == doubled and not records.num_missing_stops


def test_full_rings_drop_and_count(play: Play) -> None:
    """A ring of 128 records and a writer that comes every second: nearly everything is lost, and NCCL goes on."""
    played = play(5, "normal", 20000, 1, 8, environ={"PRISM_NCCL_RING_KIB": "4", "PRISM_NCCL_INTERVAL_US": "1000000"})
    assert played.exit_code == 0
    records = the_file(played)
    refused = sum(played.report["refused"].values())
    assert refused > 100_000 and records.num_lost_events > 0
    assert records.num_lost_events + records.num_orphans == refused
    assert sum(counts(records).values()) == sum(played.report["started"].values())
    assert 0 < records.num_missing_stops <= records.num_lost_stops


def test_sampling_keeps_the_same_collectives_everywhere(play: Play) -> None:
    records = the_file(play(5, "normal", 1000, 3, 2, environ={"PRISM_NCCL_SAMPLE": "10"}))
    colls = records.events.rows_of(EventType.COLL)
    assert set(records.tasks.fields["seq"][records.events.task[colls]]) == set(range(0, 1000, 10))
    assert len(colls) == 300 and records.num_sampled_out >= 2700
    assert not records.num_lost_events


@pytest.mark.parametrize(("words", "kinds"), [
    ("kernel_ch", {"kernel_ch", "coll", "p2p"}),
    ("coll,proxy_step", {"coll", "p2p", "proxy_op", "proxy_step"}),
    ("0x2", {"coll"}),
    ("coll_api,nonsense", {"coll_api", "group_api"}),
])  # fmt: skip
def test_events_are_chosen_with_their_ancestors(play: Play, words: str, kinds: set[str]) -> None:
    played = play(6, "normal", 64, 1, 2, environ={"PRISM_NCCL_EVENTS": words})
    assert {kind for kind, num in counts(the_file(played)).items() if num} == kinds
    assert ("nonsense" in played.stderr) == ("nonsense" in words)


@pytest.mark.parametrize("scenario", ["exit", "crash", "abort"])
def test_nothing_is_lost_at_the_end(play: Play, scenario: str) -> None:
    """The writer comes every ten seconds: what is in the file was put there by the end itself."""
    played = play(5, scenario, 500, 2, 4, environ={"PRISM_NCCL_INTERVAL_US": "10000000"})
    assert played.exit_code == CRASHES.get(scenario, 0)
    records = the_file(played)
    assert counts(records) == played.report["started"] and records.is_complete


def test_what_was_drained_survives_a_kill(play: Play) -> None:
    played = play(5, "kill", 500, 2, 4)
    assert played.exit_code == CRASHES["kill"]
    records = the_file(played)
    assert counts(records) == played.report["started"] and not records.is_complete


def test_callbacks_after_the_last_communicator(play: Play) -> None:
    played = play(5, "late", 100, 1, 2)
    assert played.exit_code == 0
    assert len(the_file(played).events) == sum(played.report["started"].values()) + 1


def test_a_forked_child_has_a_file_of_its_own(play: Play) -> None:
    played = play(5, "fork", 100, 1, 2)
    assert played.exit_code == 0, played.stderr
    parent, child = sorted((read_records(path) for path in played.files), key=lambda one: -len(one.events))
    assert counts(parent) == played.report["started"]
    assert counts(child) == {**dict.fromkeys(counts(child), 0), "group": 10}
    assert [comm.name for comm in child.comms.values()] == ["child"] and child.pid != parent.pid


def test_rings_of_ended_threads_are_used_again(play: Play) -> None:
    played = play(5, "churn", 300)
    records = the_file(played)
    assert len(records.events) == 300 and not records.num_lost_events and not records.num_missing_stops
    assert len(set(records.events.thread_id.tolist())) > 128


def test_files_are_never_overwritten(play: Play, tmp_path: Path) -> None:
    environ = {"PRISM_NCCL_OUTPUT": str(tmp_path / "same-%r.ncclrec"), "RANK": "3", "WORLD_SIZE": "8"}
    play(5, "normal", 10, environ=environ)
    played = play(5, "normal", 20, environ=environ)
    assert [path.name for path in played.files] == ["same-00003.ncclrec", "same-00003.ncclrec.1"]
    first, second = (read_records(path) for path in played.files)
    assert (first.rank, first.world_size) == (3, 8)
    assert len(second.events) > len(first.events)


@pytest.mark.parametrize("output", ["/nonexistent/folder/x.ncclrec", "/dev/null/x.ncclrec"])
def test_a_file_that_cannot_be_written_never_reaches_nccl(play: Play, output: str) -> None:
    played = play(5, "normal", 100, environ={"PRISM_NCCL_OUTPUT": output})
    assert played.exit_code == 0 and played.report["mask"] == 0 and not played.report["has_context"]
    assert output.split("/x.")[0] in played.stderr and "nothing is recorded" in played.stderr
    assert len(played.stderr.splitlines()) == 1


def test_a_full_disk_leaves_a_readable_file(build: Callable[[str], Build], tmp_path: Path) -> None:
    """RLIMIT_FSIZE plays the full disk: writes beyond it fail (the signal that comes with it is ignored)."""
    made = build("plain")
    script = f"trap '' XFSZ; ulimit -f 100; exec {made.host} {made.library} 5 normal 5000 2 4"
    environ = {**os.environ, "PRISM_NCCL_OUTPUT": str(tmp_path / "cut.ncclrec")}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "cut.ncclrec")
    assert 0 < (tmp_path / "cut.ncclrec").stat().st_size <= 100 * 1024
    assert not records.lost_bytes and not records.is_complete


@pytest.mark.parametrize("kind", ["address", "thread"])
@pytest.mark.parametrize(("version", "scenario"), [(1, "normal"), (3, "missing"), (5, "reorder"), (7, "late")])
def test_under_sanitizers(play: Play, kind: str, version: int, scenario: str) -> None:
    played = play(version, scenario, 1500, 2, 4, kind=kind)
    assert played.exit_code == 0, played.stderr[-4000:]
    records = the_file(played)
    late = scenario == "late"
    assert len(records.events) + records.num_lost_events + records.num_orphans == late + sum(
        played.report["started"].values()
    ) + sum(played.report["refused"].values())


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_drops_under_sanitizers(play: Play, kind: str) -> None:
    played = play(7, "normal", 1500, 2, 4, kind=kind, environ={"PRISM_NCCL_RING_KIB": "4"})
    assert played.exit_code == 0, played.stderr[-4000:]
    assert sum(counts(the_file(played)).values()) == sum(played.report["started"].values())
