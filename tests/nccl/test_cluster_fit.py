"""A cluster profile from what NCCL's profiler recorded on two H200: measured transfers, with their source."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from real_records import DATA, unpack

from prism_sdk.cli.main import run
from prism_sdk.cli.output import json_ready
from prism_sdk.cluster import Shape, estimate, load_cluster, read_nccl, tables_of
from prism_sdk.cluster.estimate import FITTED, MODELLED
from prism_sdk.errors import UnreadableError, UsageError
from prism_sdk.nccl.job import load_job
from prism_sdk.nccl.report import make_report
from prismtrace import Op

PAIR = Shape(ranks=2, nodes=1)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    unpack(folder)
    return folder


def test_records_become_tables(records: Path) -> None:
    samples = read_nccl([records])
    assert {one.shape for one in samples} == {PAIR}
    tables = {(table.op, table.algo, table.proto): table for table in tables_of(samples, source="x")}
    ring = tables[Op.ALL_REDUCE, "ring", "simple"]
    assert ring.size_bytes == (4 << 20, 64 << 20)
    # two hundred sizes of nearly 20 KiB are one point
    small = tables[Op.ALL_REDUCE, "ring", "ll"]
    near = [size for size in small.size_bytes if 19 << 10 < size < 21 << 10]
    assert len(near) <= 2 and len(small.size_bytes) < 12
    # the first of a communicator sets up: not among them
    assert max(small.time_ns) < 10_000
    assert tables[Op.ALL_TO_ALL, "", ""].size_bytes == (8 << 20,)


def test_a_fitted_profile_estimates_with_provenance(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = str(tmp_path / "mine.toml")
    assert run(["cluster", "init", "h200-sxm", "--nodes", "1", "-o", mine]) == 0
    assert run(["cluster", "fit", mine, "--nccl", str(records), "-o", mine, "--overwrite"]) == 0
    shown = capsys.readouterr()
    assert f"NCCL profiler, {records.name}" in shown.out and "it was killed" in shown.err
    cluster = load_cluster(mine)
    known = estimate(cluster, Op.ALL_REDUCE, num_bytes=64 << 20, shape=PAIR)
    assert known.provenance == FITTED and 200_000 < known.time_ns < 300_000
    between = estimate(cluster, Op.ALL_REDUCE, num_bytes=16 << 20, shape=PAIR)
    assert between.provenance == FITTED and 32_000 < between.time_ns < 252_000
    assert estimate(cluster, Op.ALL_REDUCE, num_bytes=1 << 30, shape=PAIR).provenance == MODELLED


def test_a_report_of_all_ranks_gives_the_same_times(records: Path, tmp_path: Path) -> None:
    report = make_report(load_job(sorted(records.iterdir())))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(json_ready(report)))
    with pytest.raises(UsageError, match="lack the records of some ranks"):  # rank 1 failed before the last ones
        read_nccl([path])
    whole = json.loads(path.read_text())
    whole["num_incomplete"] = 0
    path.write_text(json.dumps(whole))
    times = {(one.op, one.size_bytes, one.proto): one.time_ns for one in read_nccl([path])}
    assert times[Op.ALL_REDUCE, 64 << 20, "simple"] == pytest.approx(
        np.median([s.time_ns for s in read_nccl([records]) if (s.op, s.size_bytes) == (Op.ALL_REDUCE, 64 << 20)])
    )


def test_what_has_no_times_of_its_own_is_refused(records: Path, tmp_path: Path) -> None:
    alone = sorted(records.iterdir())[0]
    with pytest.raises(UsageError, match="no operation has a time of its own"):
        read_nccl([alone])
    with pytest.raises(UsageError, match="record files of all ranks"):
        read_nccl([alone])
    cut = tmp_path / "cut"
    cut.mkdir()
    for num_bytes, error, match in ((2500, UsageError, "copy them again"), (300, UnreadableError, "cut off")):
        for path in records.iterdir():
            (cut / path.name).write_bytes(path.read_bytes()[:num_bytes])
        with pytest.raises(error, match="damaged or cut off"):
            read_nccl([cut])
        with pytest.raises(error, match=match):
            read_nccl([cut])
    (tmp_path / "cut.json").write_text('{"rows": [')
    with pytest.raises(UnreadableError, match="it is no JSON"):
        read_nccl([tmp_path / "cut.json"])
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(UsageError, match="not a report"):
        read_nccl([tmp_path / "other.json"])


def test_findings_are_an_exit_code(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["nccl", "report", str(records)]) == 1  # rank 0 was killed
    assert "finding:" in capsys.readouterr().out
    assert run(["nccl", "report", str(DATA)]) == 3
    assert "zstd -d" in capsys.readouterr().err


def test_the_report_takes_sizes_together(records: Path) -> None:
    job = load_job(sorted(records.iterdir()))
    by_size, by_power = make_report(job), make_report(job, by="power")
    assert sum(row.num_operations for row in by_size.rows) == sum(row.num_operations for row in by_power.rows)
    assert len(by_power.rows) < 40 < 200 < len(by_size.rows)
    (row,) = [row for row in by_power.rows if row.num_operations == 200]
    assert (row.min_bytes, row.max_bytes, row.name, row.channels) == (20_000, 20_796, "all_reduce", 2)
    assert row.median_ns is not None and 3_000 < row.median_ns < 5_000
    assert row.algbw_gb_per_s == pytest.approx(row.num_bytes / row.median_ns, rel=0.02)
