"""Which unit an operation belongs to: subgroups, communicators of pairs, threads, cut traces, wrong sizes, no calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_recordwriter import RecordWriter

from prism_sdk.errors import UsageError
from prism_sdk.nccl.attach import attach
from prism_sdk.nccl.job import load_job
from prism_sdk.nccl.join import JoinedRank, join
from prismtrace import (
    ABSENT32,
    DType,
    GraphKind,
    Op,
    ProcessGroup,
    TraceReader,
    TraceWriter,
    UnitKind,
)

WORLD, PAIR = 11, 12
KINDS = {Op.SEND: UnitKind.SEND, Op.RECV: UnitKind.RECV}


def trace(
    path: Path, units: dict[int, Sequence[tuple[int, int, Op, int, int | None]]], *, device_late_ns: int | None = None
) -> Path:
    """Units as (posted_ns, group, op, elements, peer) of each rank of three; with `device_late_ns` the rows have times
    of a device that came to them that much later."""
    late = device_late_ns or 0
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=3) as writer:
        writer.add_group(ProcessGroup(WORLD, "world", "", "nccl", (0, 1, 2)))
        writer.add_group(ProcessGroup(PAIR, "pair", "", "nccl", (1, 2)))
        for rank, rows in units.items():
            columns: dict[str, Any] = {
                "kind": np.array([int(KINDS.get(op, UnitKind.COLLECTIVE)) for _, _, op, _, _ in rows]),
                "start_ns": np.array([row[0] + late for row in rows]),
                "end_ns": np.array([row[0] + late + 90 for row in rows]),
                "group_id": np.array([row[1] for row in rows], np.uint64),
                "op": np.array([int(row[2]) for row in rows]),
                "dtype": np.full(len(rows), int(DType.FLOAT32)),
                "num_elements_in": np.array([row[3] for row in rows]),
                "num_elements_out": np.array([row[3] for row in rows]),
                "peer": np.array([ABSENT32 if row[4] is None else row[4] for row in rows]),
            }
            if device_late_ns is not None:
                columns["prism.issued_ns"] = np.array([row[0] for row in rows])
            writer.add_units(rank, columns)
    return path


def joined_rank(path: Path, writer: RecordWriter, tmp_path: Path) -> JoinedRank:
    with TraceReader(path) as reader:
        (one,) = join(reader, load_job([writer.write(tmp_path / "x.ncclrec")])).ranks
    return one


def call(writer: RecordWriter, comm: int, at: int, func: str, count: int, seq: int = 0, **more: Any) -> None:
    api = writer.task(10 if func in ("Send", "Recv") else 9, comm, at, func, count, algo="", proto="")
    writer.task(2 if func in ("Send", "Recv") else 1, comm, at + 5, func, count, parent=api, seq=seq, **more)


def test_subgroups_and_communicators_of_pairs(tmp_path: Path) -> None:
    units = [
        (1000, WORLD, Op.ALL_REDUCE, 10, None), (2000, PAIR, Op.ALL_REDUCE, 20, None),
        (3000, WORLD, Op.SEND, 30, 0), (4000, WORLD, Op.ALL_REDUCE, 40, None), (5000, PAIR, Op.BROADCAST, 50, 1),
    ]  # fmt: skip
    path = trace(tmp_path / "t.prism", {2: units})
    writer = RecordWriter(rank=2, world_size=3)
    world = writer.comm(1, 0xA, ranks=3, rank=2)
    pair = writer.comm(2, 0xB, ranks=2, rank=1)
    message = writer.comm(3, 0xC, ranks=2, rank=1)  # of ranks 0 and 2, which NCCL got for the one message
    call(writer, world, 1010, "AllReduce", 10)
    call(writer, pair, 2010, "AllReduce", 20)
    call(writer, message, 3010, "Send", 30, peer=0)
    call(writer, world, 4010, "AllReduce", 40, 1)
    call(writer, pair, 5010, "Broadcast", 50)
    one = joined_rank(path, writer, tmp_path)
    assert one.unit.tolist() == [0, 1, 2, 3, 4] and one.by == "time" and one.num_unequal == 0
    with TraceReader(path) as reader:
        groups = join(reader, load_job([tmp_path / "x.ncclrec"])).groups
    assert groups == {0xA: WORLD, 0xB: PAIR, 0xC: WORLD}


def test_a_thread_that_posts_in_between_takes_nothing(tmp_path: Path) -> None:
    """Another thread posted to another group after this unit and before its call of NCCL."""
    path = trace(
        tmp_path / "t.prism", {2: [(1000, WORLD, Op.ALL_REDUCE, 10, None), (1005, PAIR, Op.ALL_REDUCE, 20, None)]}
    )
    writer = RecordWriter(rank=2, world_size=3)
    world, pair = writer.comm(1, 0xA, ranks=3, rank=2), writer.comm(2, 0xB, ranks=2, rank=1)
    call(writer, world, 1010, "AllReduce", 10)
    call(writer, pair, 1012, "AllReduce", 20)
    assert joined_rank(path, writer, tmp_path).unit.tolist() == [0, 1]


def test_a_device_that_is_behind_its_host_changes_nothing(tmp_path: Path) -> None:
    """NCCL is called when the host posts a unit, which the device may come to only after the host has posted more."""
    units = {0: [(1000 * i, WORLD, Op.ALL_REDUCE, 10 * i, None) for i in range(1, 9)]}
    path = trace(tmp_path / "t.prism", units, device_late_ns=3500)
    writer = RecordWriter(rank=0, world_size=3)
    world = writer.comm(1, 0xA, ranks=3, rank=0)
    for i in range(1, 9):
        call(writer, world, 1000 * i + 10, "AllReduce", 10 * i, i)
    one = joined_rank(path, writer, tmp_path)
    assert one.unit.tolist() == list(range(8)) and one.by == "time" and one.num_unequal == 0


def test_operations_after_the_trace_belong_to_no_unit(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.prism", {0: [(1000 * i, WORLD, Op.ALL_REDUCE, 10, None) for i in range(1, 5)]})
    writer = RecordWriter(rank=0, world_size=3)
    comm = writer.comm(1, 0xA, ranks=3, rank=0)
    for i in range(8):
        call(writer, comm, 1000 * i + 10, "AllReduce", 10, i)
    assert joined_rank(path, writer, tmp_path).unit.tolist() == [-1, 0, 1, 2, 3, -1, -1, -1]


def test_wrong_sizes_and_wrong_functions_are_noticed(tmp_path: Path) -> None:
    units = [(1000, WORLD, Op.ALL_REDUCE, 10, None), (2000, WORLD, Op.ALL_REDUCE, 10, None)]
    path = trace(tmp_path / "t.prism", {0: units})
    writer = RecordWriter(rank=0, world_size=3)
    comm = writer.comm(1, 0xA, ranks=3, rank=0)
    call(writer, comm, 1010, "AllReduce", 11)
    call(writer, comm, 2010, "ReduceScatter", 10)
    one = joined_rank(path, writer, tmp_path)
    assert one.unit.tolist() == [0, -1] and one.num_unequal == 1
    report = attach(path, load_job([tmp_path / "x.ncclrec"]), tmp_path / "out.prism")
    assert (report.num_tasks, report.num_joined, report.num_unequal, report.num_units_joined) == (2, 1, 1, 1)
    assert any("belong to no unit" in text for text in report.findings)
    assert any("other byte counts" in text for text in report.findings)


def test_launches_without_calls_are_dealt_out_in_order(tmp_path: Path) -> None:
    """Interface 4: four units are posted, then their messages and collectives appear at once, out of order by kind."""
    units = [
        (1000, WORLD, Op.SEND, 1, 1), (1001, WORLD, Op.RECV, 2, 1), (1002, WORLD, Op.SEND, 3, 2),
        (1003, WORLD, Op.RECV, 4, 2), (3000, WORLD, Op.ALL_TO_ALL, 9, None),
    ]  # fmt: skip
    path = trace(tmp_path / "t.prism", {0: units})
    writer = RecordWriter(rank=0, world_size=3)
    comm = writer.comm(1, 0xA, ranks=3, rank=0)
    group = writer.start(0, comm, 2000)
    for func, count, peer in (("Recv", 4, 2), ("Recv", 2, 1), ("Send", 3, 2), ("Send", 1, 1)):  # not as posted
        writer.task(2, comm, 2001, func, count, parent=group, group=group, peer=peer)
    group = writer.start(0, comm, 3010)
    for peer in range(3):
        for func in ("Send", "Recv"):
            writer.task(2, comm, 3011, func, 3, parent=group, group=group, peer=peer)
    one = joined_rank(path, writer, tmp_path)
    assert one.unit.tolist() == [3, 1, 2, 0] + [4] * 6 and one.num_unequal == 0
    report = attach(path, load_job([tmp_path / "x.ncclrec"]), tmp_path / "out.prism", events="none")
    assert report.num_joined == 10
    with TraceReader(tmp_path / "out.prism") as reader:
        found = reader.units(0)
        assert found["nccl.num_tasks"].tolist() == [1, 1, 1, 1, 6]
        assert found["nccl.num_bytes"].tolist() == [4, 8, 12, 16, 72]
        assert "nccl.kernel_end_ns" not in found.column_names


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.prism", {0: [(1000, WORLD, Op.ALL_REDUCE, 10, None)]})
    files = []
    for name in ("a", "b"):
        writer = RecordWriter(rank=0, world_size=3)
        call(writer, writer.comm(1, 0xA, ranks=3, rank=0), 1010, "AllReduce", 10)
        files.append(writer.write(tmp_path / f"{name}.ncclrec"))
    with TraceReader(path) as reader, pytest.raises(UsageError, match="rank 0 has 2 files"):
        join(reader, load_job(files))


def test_the_rank_comes_from_the_communicator_of_the_world(tmp_path: Path) -> None:
    writer = RecordWriter(rank=-1, world_size=3)
    writer.comm(1, 0xB, ranks=2, rank=0)
    writer.comm(2, 0xA, ranks=3, rank=2)
    assert load_job([writer.write(tmp_path / "x.ncclrec")]).ranks[0].rank == 2
    writer = RecordWriter(rank=-1, world_size=8)
    writer.comm(1, 0xB, ranks=2, rank=0)
    assert load_job([writer.write(tmp_path / "y.ncclrec")]).ranks[0].rank is None
