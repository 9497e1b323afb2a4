"""Operations over ranks and their bandwidths: the last rank's time, messages paired, all-to-alls recognised."""

from __future__ import annotations

from pathlib import Path

import pytest
from nccl_recordwriter import RecordWriter

from prism_sdk.nccl.job import load_job
from prism_sdk.nccl.operations import operations
from prism_sdk.nccl.report import BandwidthRow, bus_factor, make_report


def rank_file(folder: Path, rank: int, num_ranks: int, *, wait_ns: int) -> Path:
    """Two all-reduces, a grouped pair of them, an all-to-all and a message around the ring."""
    writer = RecordWriter(rank=rank, world_size=num_ranks)
    comm = writer.comm(1, 0xC0, ranks=num_ranks, rank=rank)
    offset = 1_000_000_000 * rank  # every GPU's clock is elsewhere
    for seq in range(2):
        at = 100_000 * (seq + 1)
        kernel = (at + offset, at + offset + 8_000 + wait_ns)
        writer.collective(comm, at - 500, "AllReduce", 4_000_000, seq, kernel, at + 9_000 + wait_ns, channels=24)
    group = writer.start(0, comm, 300_000)
    for seq in (2, 3):  # launched together: one kernel, the same stamps
        task = writer.task(1, comm, 300_000, "AllReduce", 1000, group=group, seq=seq)
        writer.kernel(comm, task, (300_000 + offset, 400_000 + offset), 500_000)
    group = writer.start(0, comm, 500_000)
    for peer in range(num_ranks):
        for func in ("Send", "Recv"):
            task = writer.task(2, comm, 500_000, func, 250, group=group, peer=peer, algo="", proto="", channels=2)
            if peer != rank:  # to itself a rank copies: there is no kernel channel
                writer.kernel(comm, task, (500_000 + offset, 520_000 + offset + wait_ns), 540_000 + wait_ns)
    group = writer.start(0, comm, 600_000)
    for func, peer in (("Send", (rank + 1) % num_ranks), ("Recv", (rank - 1) % num_ranks)):
        task = writer.task(2, comm, 600_000, func, 1_000_000, group=group, peer=peer, algo="", proto="", channels=2)
        writer.kernel(comm, task, (600_000 + offset, 640_000 + offset), 650_000)
    return writer.write(folder / f"r{rank}.ncclrec")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [rank_file(tmp_path, rank, 4, wait_ns=0 if rank == 2 else 50_000 + rank) for rank in range(4)]


def rows_of(files: list[Path]) -> dict[tuple[str, int], BandwidthRow]:
    return {(row.name, row.num_bytes): row for row in make_report(load_job(files)).rows}


def test_times_are_those_of_the_rank_that_came_last(files: list[Path]) -> None:
    row = rows_of(files)["all_reduce", 16_000_000]
    assert (row.num_operations, row.num_timed, row.median_ns, row.channels) == (2, 2, 8_000, 24)
    assert row.algbw_gb_per_s == pytest.approx(16_000_000 / 8_000)
    assert row.busbw_gb_per_s == pytest.approx(16_000_000 / 8_000 * 1.5)


def test_operations_of_one_launch_are_counted_and_not_timed(files: list[Path]) -> None:
    report = make_report(load_job(files))
    row = rows_of(files)["all_reduce", 4000]
    assert (row.num_operations, row.num_timed, row.algbw_gb_per_s) == (2, 0, None)
    assert report.num_shared == 2 and report.num_operations == 2 + 2 + 1 + 4


def test_an_all_to_all_is_one_operation(files: list[Path]) -> None:
    row = rows_of(files)["all_to_all", 4 * 1000]
    assert (row.num_operations, row.num_ranks, row.median_ns) == (1, 4, 20_000)
    assert row.busbw_gb_per_s == pytest.approx(4000 / 20_000 * 0.75)


def test_messages_are_paired(files: list[Path]) -> None:
    row = rows_of(files)["send_recv", 4_000_000]
    assert (row.num_operations, row.num_timed, row.median_ns) == (4, 4, 40_000)
    found = [one for one in operations(load_job(files)) if one.name == "send_recv"]
    assert all(one.num_members == 2 for one in found)
    sides = {tuple(sorted(place for place, _ in one.members)) for one in found}
    assert sides == {(0, 1), (1, 2), (2, 3), (0, 3)}


def test_missing_ranks_are_said(files: list[Path]) -> None:
    report = make_report(load_job([files[0], files[1]]))
    assert report.num_incomplete == 2 + 2 + 1 + 2  # all but the message between the two
    assert rows_of([files[0]])["all_reduce", 16_000_000].median_ns == 58_000  # with the waiting in it


def test_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == pytest.approx(2 * 7 / 8)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(name, 8) == pytest.approx(7 / 8)
    for name in ("broadcast", "reduce", "send_recv"):
        assert bus_factor(name, 8) == 1.0
    assert bus_factor("all_reduce", 1) == 1.0
