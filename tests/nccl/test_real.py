"""Records of real NCCL (two H200): every operation is there, its kernel ran after its launch, and the join is right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_records import unpack

from prism_sdk.nccl.attach import attach
from prism_sdk.nccl.format import EventType
from prism_sdk.nccl.job import NcclJob, load_job
from prism_sdk.nccl.operations import operations
from prismtrace import (
    ABSENT,
    ABSENT32,
    DType,
    GraphKind,
    Op,
    ProcessGroup,
    TraceReader,
    TraceWriter,
    UnitKind,
    has_errors,
    validate,
)

FOUND = {
    "AllReduce": Op.ALL_REDUCE, "Broadcast": Op.BROADCAST, "Reduce": Op.REDUCE, "AllGather": Op.ALL_GATHER,
    "ReduceScatter": Op.REDUCE_SCATTER, "Send": Op.SEND, "Recv": Op.RECV,
}  # fmt: skip
DTYPES = {
    "ncclFloat32": DType.FLOAT32, "ncclFloat16": DType.FLOAT16, "ncclBfloat16": DType.BFLOAT16,
    "ncclInt64": DType.INT64, "ncclInt32": DType.INT32, "ncclFloat64": DType.FLOAT64, "ncclInt8": DType.INT8,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return unpack(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def job(files: list[Path]) -> NcclJob:
    return load_job(files)


def test_all_operations_are_there_and_agree(job: NcclJob) -> None:
    assert [one.rank for one in job.ranks] == [0, 1]
    assert [len(one.tasks) for one in job.ranks] == [242, 238]
    whole = [one for one in operations(job) if one.num_members == one.num_ranks]
    # 25 by type and size, 200 at once, one on another communicator; two all-to-alls are not counted here
    assert Counter(one.name for one in whole)["all_reduce"] == 7 + 5 + 200 + 1
    for one in whole:
        sides = {
            (job.ranks[place].tasks.algo[task], job.ranks[place].tasks.proto[task], job.ranks[place].tasks.dtype[task])
            for place, tasks in one.members
            for task in tasks
        }
        assert len(sides) == 1, one
    large = next(one for one in whole if one.name == "all_reduce" and one.num_bytes == 64 << 20)
    assert (large.algo, large.proto, large.channels) == ("RING", "SIMPLE", 24)
    assert large.time_ns is not None and 200_000 < large.time_ns < 450_000


def test_kernels_ran_after_their_launch_and_one_after_another(job: NcclJob) -> None:
    for one in job.ranks:
        tasks = one.tasks
        (fit,) = (job.clocks[comm.device_uuid] for comm in list(one.file.comms.values())[:1] if comm.device_uuid)
        assert fit.num_violations == 0 and fit.drift == 0.0
        assert fit.uncertainty_ns is not None and fit.uncertainty_ns < 25_000
        timed = tasks.kernel_start_ns != ABSENT
        late = (tasks.kernel_start_ns - tasks.launched_ns)[timed]
        assert late.min() > 0 and np.median(late) < 1_000_000
        # one stream: no kernel of a communicator begins before the one before it has ended
        for comm in np.unique(tasks.comm):
            mine = np.flatnonzero(timed & (tasks.comm == comm))
            other = np.diff(tasks.group[mine]) != 0
            assert (tasks.gpu_start_ns[mine][1:] >= tasks.gpu_stop_ns[mine][:-1])[other].all()


def test_kernels_that_were_waited_for_end_before_the_next_call(job: NcclJob) -> None:
    for one in job.ranks:
        tasks, room = one.tasks, max(fit.uncertainty_ns or 0 for fit in job.clocks.values())
        # the first 16 and those of 2^20 elements each ran between two synchronisations
        rows = np.array([row for row in (*range(16), *range(20, 25)) if not tasks.is_message[row]])
        assert len(rows) == 20
        assert (tasks.kernel_start_ns[rows] >= tasks.called_ns[rows] - room).all()
        assert (tasks.kernel_stop_ns[rows] <= tasks.called_ns[rows + 1] + room).all()


def test_channels_of_one_kernel_start_together(job: NcclJob) -> None:
    for one in job.ranks:
        events = one.file.events
        kernels = events.rows_of(EventType.KERNEL_CH)
        kernels = kernels[events.gpu_start_ns[kernels] != ABSENT]
        first: dict[int, list[int]] = {}
        for task, start in zip(events.parent[kernels].tolist(), events.gpu_start_ns[kernels].tolist(), strict=True):
            first.setdefault(task, []).append(start)
        assert max(max(starts) - min(starts) for starts in first.values()) < 1000


def test_stamps_are_put_back_where_messages_to_oneself_shifted_them(job: NcclJob) -> None:
    for one in job.ranks:
        tasks = one.tasks
        loop = (tasks.func == "AllReduce") & (tasks.count >= 5000) & (tasks.count < 5200) & (tasks.channels == 2)
        assert np.count_nonzero(loop) == 200
        took = (tasks.gpu_stop_ns - tasks.gpu_start_ns)[loop & (tasks.gpu_start_ns != ABSENT)]
        assert len(took) >= 199
        assert np.min(took) > 3_000 and np.median(took) < 60_000
        assert one.stamps.num_moved > 400 and one.stamps.num_dropped <= 5
        # without a kernel time: messages to oneself, and the last ones of shifted channels
        untimed = (tasks.gpu_start_ns == ABSENT) & (tasks.num_kernels > 0)
        assert np.count_nonzero(untimed) <= 4
    assert any("put back" in text for text in job.notes())


def made_trace(path: Path, job: NcclJob) -> Path:
    """The trace that an observation of this job would have given: a unit a little before each call."""
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=2) as writer:
        writer.add_group(ProcessGroup(1, "world", "", "nccl", (0, 1)))
        for one in job.ranks:
            tasks, rows = one.tasks, list[dict[str, Any]]()
            for task in np.argsort(tasks.called_ns, kind="stable").tolist():
                func, num = str(tasks.func[task]), int(tasks.count[task])
                if tasks.num_in_group[task] == 4 and tasks.is_message[task]:
                    if rows and rows[-1]["call"] == int(tasks.call[task]):
                        continue
                    op, kind, num = Op.ALL_TO_ALL, UnitKind.COLLECTIVE, 2 * num
                else:
                    op = FOUND[func]
                    kind = {Op.SEND: UnitKind.SEND, Op.RECV: UnitKind.RECV}.get(op, UnitKind.COLLECTIVE)
                rows.append({
                    "call": int(tasks.call[task]), "kind": int(kind), "start_ns": int(tasks.called_ns[task]) - 400,
                    "end_ns": int(tasks.called_ns[task]) + 500, "group_id": 1, "op": int(op),
                    "dtype": int(DTYPES[str(tasks.dtype[task])]), "num_elements_in": num, "num_elements_out": num,
                    "peer": int(tasks.peer[task]) if kind is not UnitKind.COLLECTIVE else ABSENT32,
                })  # fmt: skip
            names = [name for name in rows[0] if name != "call"]
            writer.add_units(one.rank or 0, {name: np.array([row[name] for row in rows]) for name in names})
    return path


@pytest.mark.parametrize("events", ["tasks", "all"])
def test_the_joined_trace_says_what_nccl_did(tmp_path: Path, job: NcclJob, events: str) -> None:
    report = attach(made_trace(tmp_path / "bare.prism", job), job, tmp_path / "joined.prism", events=events)
    assert (report.num_tasks, report.num_joined) == (480, 480)
    assert report.num_units == report.num_units_joined
    assert not has_errors(validate(tmp_path / "joined.prism"))
    with TraceReader(tmp_path / "joined.prism") as reader:
        for rank in (0, 1):
            units, shown = reader.units(rank), reader.events(rank)
            algo, start, end = list(units["nccl.algo"]), units["nccl.kernel_start_ns"], units["nccl.kernel_end_ns"]
            collectives = (units.kind == UnitKind.COLLECTIVE) & (units.op != Op.ALL_TO_ALL)
            assert {algo[row] for row in np.flatnonzero(collectives).tolist()} == {"RING"}
            assert {list(units["nccl.proto"])[row] for row in np.flatnonzero(collectives)} == {"LL", "SIMPLE"}
            assert (np.asarray(units["nccl.channels"]) > 0).sum() >= len(units) - 4
            known = np.asarray(start) != ABSENT
            assert np.count_nonzero(~known) <= 4
            assert (start[known] > units.start_ns[known]).all() and (end[known] > start[known]).all()
            # a collective has no other side, a call no channel: absent, and not rank 0 or channel 0
            names = np.array([str(name) for name in shown.name])
            peers = np.asarray(shown["nccl.peer"])
            assert (peers[np.char.startswith(names, "AllReduce")] == ABSENT).all()
            assert set(peers[np.char.startswith(names, "Send")].tolist()) <= {0, 1}
            if events == "all":
                channel = np.asarray(shown["nccl.channel"])
                assert (channel[names == "coll_api"] == ABSENT).all()
                assert channel[names == "kernel_ch"].min() == 0 and channel[names == "kernel_ch"].max() == 31
