"""Reading record files: what the specification says comes back; damage costs what it hits and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nccl_recordwriter import RecordWriter

from prism_sdk.errors import UnreadableError
from prism_sdk.nccl import read_records
from prism_sdk.nccl.format import EventType
from prism_sdk.nccl.job import load_job
from prism_sdk.nccl.report import make_report
from prism_sdk.nccl.tasks import collect_tasks
from prismtrace import ABSENT


def example(num: int = 40, *, num_blocks: int = 8) -> RecordWriter:
    writer = RecordWriter(rank=3, world_size=8)
    comm = writer.comm(1, 0xABC, ranks=8, rank=3, uuid=b"0123456789abcdef", name="world")
    for seq in range(num):
        gpu = (7000 + seq * 1000, 7000 + seq * 1000 + 500)
        writer.collective(comm, 1000 * seq, "AllReduce", 100 + seq, seq, gpu, 1000 * seq + 900)
        if seq % (num // num_blocks) == 0:
            writer.flush()
    return writer


def test_a_file_by_the_specification(tmp_path: Path) -> None:
    file = read_records(example().write(tmp_path / "x.ncclrec"))
    assert (file.rank, file.world_size, file.host, file.boot_id, file.pid) == (3, 8, "host", "boot", 103)
    assert file.is_complete and not file.lost_bytes and not file.num_missing_stops
    comm = file.comms[1]
    assert (comm.hash, comm.name, comm.num_ranks, comm.rank, comm.destroyed_ns) == (0xABC, "world", 8, 3, None)
    assert comm.device_uuid == b"0123456789abcdef".hex()
    tasks = collect_tasks(file)
    assert len(tasks) == 40 and list(tasks.seq) == list(range(40))
    assert (tasks.count == 100 + tasks.seq).all() and (tasks.num_bytes == 4 * tasks.count).all()
    assert set(tasks.func) == {"AllReduce"} and set(tasks.algo) == {"RING"} and set(tasks.proto) == {"LL"}
    assert (tasks.gpu_start_ns == 7000 + 1000 * tasks.seq).all()
    assert (tasks.gpu_stop_ns == tasks.gpu_start_ns + 500).all()
    assert (tasks.called_ns == 1000 * tasks.seq).all() and (tasks.launched_ns == tasks.called_ns).all()
    assert set(tasks.num_kernels) == {1} and set(tasks.num_in_group) == {1}


def test_the_caller_s_count_stands_above_nccl_s_bytes(tmp_path: Path) -> None:
    writer = RecordWriter()
    comm = writer.comm(1, 1, ranks=2, rank=0)
    api = writer.task(9, comm, 0, "AllGather", 32, algo="", proto="")
    writer.task(1, comm, 1, "AllGather", 128, parent=api, seq=0, dtype="ncclInt8")
    writer.task(1, comm, 2, "AllGather", 128, seq=1, dtype="ncclInt8")  # version 4: the call is not known
    tasks = collect_tasks(read_records(writer.write(tmp_path / "x.ncclrec")))
    assert list(tasks.count) == [32, 128] and list(tasks.dtype) == ["ncclFloat32", "ncclInt8"]
    assert list(tasks.num_bytes) == [128, 128] and list(tasks.has_call) == [True, False]


def test_first_stop_counts_and_strays_are_counted(tmp_path: Path) -> None:
    writer = RecordWriter()
    comm = writer.comm(1, 1, ranks=2, rank=0)
    group = writer.start(0, comm, 10)
    writer.stop(group, 30)
    writer.stop(group, 20)  # of another thread: the earlier time is the end, whatever the order in the file
    writer.stop(0x7777000, 40)
    file = read_records(writer.write(tmp_path / "x.ncclrec"))
    assert list(file.events.stop_ns) == [20] and file.num_extra_stops == 2 and file.num_missing_stops == 0


def test_torn_stamps_make_no_duration(tmp_path: Path) -> None:
    writer = RecordWriter()
    comm = writer.comm(1, 1, ranks=2, rank=0)
    writer.collective(comm, 0, "AllReduce", 1, 0, (900, 400), 1000)  # overwritten while it was read
    writer.collective(comm, 5, "AllReduce", 1, 1, (0, 400), 1000)  # no start
    tasks = collect_tasks(read_records(writer.write(tmp_path / "x.ncclrec")))
    assert (tasks.gpu_start_ns == ABSENT).all() and (tasks.gpu_stop_ns == ABSENT).all()


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 200, 999])
def test_a_cut_costs_the_last_block_only(tmp_path: Path, cut: int) -> None:
    data = example().data(end=False)
    path = tmp_path / "x.ncclrec"
    path.write_bytes(data[:-cut])
    whole = read_records(example().write(tmp_path / "whole.ncclrec"))
    file = read_records(path)
    assert not file.is_complete
    assert 0 < len(file.events) < len(whole.events)
    assert (file.events.id == whole.events.id[: len(file.events)]).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(192, 20000), mask=st.integers(1, 255), seed=st.integers(0, 3))
def test_damage_never_makes_wrong_events(tmp_path: Path, place: int, mask: int, seed: int) -> None:
    whole_data = bytearray(example(24, num_blocks=6 + seed).data())
    path = tmp_path / "x.ncclrec"
    path.write_bytes(whole_data)
    whole = read_records(path)
    whole_data[place % (len(whole_data) - 192) + 192] ^= mask
    path.write_bytes(whole_data)
    file = read_records(path)
    assert file.lost_bytes > 0 and not file.is_complete and file.first_damage is not None
    known = {int(id_): row for row, id_ in enumerate(whole.events.id)}
    rows = np.array([known[int(id_)] for id_ in file.events.id], np.int64)
    assert (file.events.start_ns == whole.events.start_ns[rows]).all()
    assert (file.events.type == whole.events.type[rows]).all()
    if file.comms:
        report = make_report(load_job([path]))
        assert report.num_operations <= 24
        assert any("damaged" in text for text in report.findings)
    else:
        assert not len(collect_tasks(file))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=400), keep_header=st.booleans())
def test_junk_is_refused_or_read_as_nothing(tmp_path: Path, junk: bytes, keep_header: bool) -> None:
    path = tmp_path / "x.ncclrec"
    path.write_bytes((RecordWriter().header if keep_header else b"") + junk)
    if keep_header:
        file = read_records(path)
        assert not len(file.events) and file.lost_bytes == len(junk)
    else:
        with pytest.raises(UnreadableError):
            read_records(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    data = bytearray(RecordWriter().data())
    data[8] = 2
    path = tmp_path / "x.ncclrec"
    path.write_bytes(data)
    with pytest.raises(UnreadableError, match="version 2"):
        read_records(path)


def test_unknown_blocks_and_types_are_passed_by(tmp_path: Path) -> None:
    writer = example(8, num_blocks=2)
    writer.flush()
    writer.block(99, b"\1" * 64)
    file = read_records(writer.write(tmp_path / "x.ncclrec"))
    assert file.is_complete and len(file.events.rows_of(EventType.COLL)) == 8
