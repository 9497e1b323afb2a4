"""`prism observe --nccl-profiler` and `prism nccl`: real ranks on gloo, and NCCL played to the library beside them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prismtrace import ABSENT, Op, TraceReader, UnitKind, has_errors, validate

pytest.importorskip("torch")
pytest.importorskip("prismtrace_nccl_profiler", reason="the profiler library is not installed")
HERE = Path(__file__).parent
STEPS = 6
TASKS_A_STEP = 2 + 1 + 1 + 1 + 2 + 4 + 1
FUNCS = {Op.ALL_REDUCE: 12, Op.ALL_GATHER: 6, Op.BROADCAST: 6, Op.ALL_TO_ALL: 6, Op.BARRIER: 6}


def prism(*words: object, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PRISM_", "NCCL_"))}
    done = subprocess.run(
        [sys.executable, "-m", "prism_sdk.cli.main", *map(str, words)], capture_output=True, text=True, timeout=120,
        env={**settings, **environ},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    done: dict[int, Path] = {}

    def run(version: int) -> Path:
        if version not in done:
            output = tmp_path_factory.mktemp(f"v{version}") / "real.prism"
            words = ("observe", "--nccl-profiler", "--nproc-per-node", 2, "-o", output, "--", HERE / "train.py")
            ended = prism(*words, PLAYED_VERSION=str(version))
            assert f"{2 * STEPS * TASKS_A_STEP} of {2 * STEPS * TASKS_A_STEP} operations belong" in ended.stderr
            assert "finding" not in ended.stderr
            done[version] = output
        return done[version]

    return run


@pytest.mark.parametrize("version", [4, 5])
def test_every_unit_says_what_nccl_did(observed: Callable[[int], Path], version: int) -> None:
    trace = observed(version)
    assert not has_errors(validate(trace))
    with TraceReader(trace) as reader:
        names = {group.name: group_id for group_id, group in reader.groups.items()}
        pairs = dict(pair.split("=") for pair in reader.metadata["nccl.communicators"].split(","))
        for rank in (0, 1):
            units = reader.units(rank)
            of_nccl = np.isin(units.kind, (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV))
            assert np.count_nonzero(of_nccl) == STEPS * (2 + 1 + 1 + 1 + 2 + 1 + 1)
            assert ((units["nccl.num_tasks"] != ABSENT) == of_nccl).all()
            for op, num in FUNCS.items():
                mine = np.flatnonzero((units.op == op) & (units.kind == UnitKind.COLLECTIVE))
                assert len(mine) == num
                assert set(units["nccl.num_tasks"][mine]) == {4 if op is Op.ALL_TO_ALL else 1}
            rings = [units["nccl.algo"][int(row)] for row in np.flatnonzero(units.op == Op.ALL_REDUCE)]
            assert set(rings) == {"RING"}
            # both groups have the same members; each got its own communicator
            world = units["nccl.comm"] == 0xAAAA
            assert set(units.group_id[of_nccl & world].tolist()) == {int(pairs["000000000000aaaa"])}
            assert set(units.group_id[of_nccl & ~world].tolist()) == {int(pairs["000000000000bbbb"])}
            assert len(names) == 2
            seq = units["nccl.seq"][(units.op == Op.ALL_REDUCE) & (units["nccl.comm"] == 0xBBBB)]
            assert seq.tolist() == list(range(STEPS))
            sizes = units["nccl.num_bytes"][units.op == Op.ALL_GATHER]
            assert set(sizes) == {32 * 4}


def test_kernel_times_are_on_the_trace_clock(observed: Callable[[int], Path]) -> None:
    with TraceReader(observed(5)) as reader:
        for rank, kernel_ns in ((0, 300_000), (1, 100_000)):
            units = reader.units(rank)
            mine = np.flatnonzero((units.op == Op.ALL_REDUCE) & (units.kind == UnitKind.COLLECTIVE))
            start, end = units["nccl.kernel_start_ns"][mine], units["nccl.kernel_end_ns"][mine]
            assert (np.abs(end - start - kernel_ns) < 5).all()
            assert (units.transfer_ns[mine] == 100_000).all()  # what is left without waiting for the last rank
            assert (start > units.start_ns[mine]).all()
            # played after the wait, before the next post; the GPU's clock is seconds away, the fit good to microseconds
            assert (start > units.end_ns[mine + 1] - 1000).all() and (end < units.end_ns[mine + 2]).all()
            assert (units.gap_ns == ABSENT).all()


def test_kernels_are_events_on_tracks(observed: Callable[[int], Path]) -> None:
    with TraceReader(observed(5)) as reader:
        for rank in (0, 1):
            events, tracks, units = reader.events(rank), reader.tracks(rank), reader.units(rank)
            assert len(events) == STEPS * TASKS_A_STEP
            assert list(tracks.name) == ["NCCL 000000000000aaaa world", "NCCL 000000000000bbbb"]
            assert set(events.name) == {
                "AllReduce RING SIMPLE", "AllGather RING SIMPLE", "Broadcast RING SIMPLE", "Send", "Recv",
            }  # fmt: skip
            assert (units["nccl.kernel_start_ns"][events.unit] <= events.start_ns).all()
            assert (units["nccl.kernel_end_ns"][events.unit] >= events.end_ns).all()


def _bare(observed: Path, target: Path) -> Path:
    """The trace without what NCCL did, made by importing nothing: units keep their own columns only."""
    from prismtrace.rewriting import TABLES, add_rows, iter_tables, new_trace

    with TraceReader(observed) as reader, new_trace(target, like=reader) as writer:
        for group in reader.groups.values():
            writer.add_group(group)
        for rank in reader.ranks:
            for kind in TABLES[:1]:
                for table in iter_tables(reader, kind, rank):
                    columns = {name: value for name, value in table.columns().items() if "." not in name}
                    columns.pop("transfer_ns")
                    add_rows(writer, kind, rank, columns)
    return target


@pytest.fixture
def parts(observed: Callable[[int], Path], tmp_path: Path) -> tuple[Path, Path]:
    trace = observed(5)
    shutil.copytree(f"{trace}.nccl", tmp_path / "records")
    return _bare(trace, tmp_path / "bare.prism"), tmp_path / "records"


def test_import_by_hand_gives_the_same(observed: Callable[[int], Path], parts: tuple[Path, Path]) -> None:
    bare, records = parts
    joined = bare.with_name("joined.prism")
    report = json.loads(prism("nccl", "import", records, "--trace", bare, "-o", joined, "--json").stdout)["report"]
    assert report["num_joined"] == report["num_tasks"] == 2 * STEPS * TASKS_A_STEP
    assert report["num_unequal"] == 0 and report["num_units_joined"] == report["num_units"]
    assert report["findings"] == [] and report["by"] == {"0": "time", "1": "time"}
    assert len(report["clocks"]) == 2
    for fit in report["clocks"].values():
        assert fit["num_violations"] == 0 and fit["uncertainty_ns"] < 100_000
    with TraceReader(joined) as one, TraceReader(observed(5)) as two:
        for rank in (0, 1):
            a, b = one.units(rank), two.units(rank)
            for name in ("nccl.seq", "nccl.kernel_start_ns", "nccl.num_bytes", "transfer_ns"):
                assert (a[name] == b[name]).all()


def test_details_are_events_too(parts: tuple[Path, Path]) -> None:
    bare, records = parts
    joined = bare.with_name("all.prism")
    shown = prism("nccl", "import", records, "--trace", bare, "-o", joined, "--events", "all").stdout
    assert "belong to" in shown and "uncertainty" not in shown
    assert not has_errors(validate(joined))
    with TraceReader(joined) as reader:
        events, tracks = reader.events(0), reader.tracks(0)
        names = list(events.name)
        assert names.count("kernel_ch") == 2 * STEPS * TASKS_A_STEP
        assert names.count("coll_api") == 5 * STEPS and names.count("p2p_api") == 7 * STEPS
        assert names.count("kernel_launch") == 8 * STEPS
        calls = np.array([name in ("coll_api", "p2p_api", "kernel_ch") for name in names])
        assert (events.unit[calls] != ABSENT).all()
        assert sum("channel" in str(name) for name in tracks.name) == 4


def test_another_clock_is_joined_by_order(parts: tuple[Path, Path]) -> None:
    """A trace whose times were moved (other host, aligned): order decides, and kernel times move along."""
    from prismtrace.rewriting import TABLES, add_rows, iter_tables, new_trace

    bare, records = parts
    moved, joined = bare.with_name("moved.prism"), bare.with_name("joined.prism")
    with TraceReader(bare) as reader, new_trace(moved, like=reader) as writer:
        for group in reader.groups.values():
            writer.add_group(group)
        for rank in reader.ranks:
            for table in iter_tables(reader, TABLES[0], rank):
                columns: dict[str, Any] = dict(table.columns())
                for name in ("start_ns", "end_ns"):
                    times = np.asarray(columns[name])
                    columns[name] = np.where(times == ABSENT, ABSENT, times - 10**12)
                add_rows(writer, TABLES[0], rank, columns)
    report = json.loads(prism("nccl", "import", records, "--trace", moved, "-o", joined, "--json").stdout)["report"]
    assert report["num_joined"] == report["num_tasks"] and report["by"] == {"0": "order", "1": "order"}
    assert any("clock is not the trace's" in text for text in report["findings"])
    with TraceReader(joined) as reader:
        units = reader.units(1)
        mine = np.flatnonzero(units["nccl.kernel_start_ns"] != ABSENT)
        assert (np.abs(units["nccl.kernel_start_ns"][mine] - units.start_ns[mine]) < 10**9).all()


def test_records_of_another_job_are_a_finding(parts: tuple[Path, Path]) -> None:
    """Rank 1's records alone, and a trace that lacks half of what they say."""
    bare, records = parts
    next(iter(sorted(records.glob("*rank-00000*")))).unlink()
    cut = bare.with_name("cut.prism")
    prism("slice", bare, "-o", cut, "--ranks", "0")
    done = prism("nccl", "import", records, "--trace", cut, "-o", bare.with_name("x.prism"))
    assert "the trace has no rank 1" in done.stdout and "0 of 0 NCCL operations" in done.stdout


def test_report_counts_as_nccl_tests_does(parts: tuple[Path, Path]) -> None:
    _, records = parts
    report = json.loads(prism("nccl", "report", records, "--json").stdout)
    rows = {(row["name"], row["num_bytes"]): row for row in report["rows"]}
    row = rows["all_reduce", 64 * 4]
    assert (row["num_ranks"], row["algo"], row["proto"], row["channels"]) == (2, "RING", "SIMPLE", 2)
    assert row["num_operations"] == 2 and row["median_ns"] == 100_000
    assert row["algbw_gb_per_s"] == pytest.approx(256 / 100_000)
    assert row["busbw_gb_per_s"] == pytest.approx(256 / 100_000)  # 2(n-1)/n is 1 for two ranks
    gathered = rows["all_gather", 2 * 32 * 4]
    assert gathered["busbw_gb_per_s"] == pytest.approx(256 / 20_000 / 2)
    assert rows["broadcast", 128]["num_operations"] == STEPS
    # 1 + 2 messages a step, and of the all-to-all of two ranks one pair each way and two to oneself
    assert rows["send_recv", 32]["num_operations"] == STEPS and rows["send_recv", 512]["num_operations"] == 2 * STEPS
    assert report["num_incomplete"] == 0 and report["num_without_time"] == 0 and report["findings"] == []
    shown = prism("nccl", "report", records).stdout
    assert "busbw GB/s" in shown and "all_reduce" in shown


def test_wrong_files_are_named(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    bare, records = parts
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no record files" in prism("nccl", "report", empty, code=3).stderr
    assert "not a record file" in prism("nccl", "report", bare, code=3).stderr
    assert "No such file" in prism("nccl", "report", tmp_path / "missing", code=3).stderr
    first = sorted(records.glob("*.ncclrec"))[0]
    shutil.copy(first, records / "copy.ncclrec")
    words = ("nccl", "import", records, "--trace", bare, "-o", tmp_path / "y.prism")
    assert "rank 0 has 2 files" in prism(*words, code=2).stderr


def test_a_job_that_fails_keeps_what_nccl_did(tmp_path: Path) -> None:
    line = "        works = []\n"
    program = (HERE / "train.py").read_text().replace(line, f"{line}        assert step < 3\n")
    assert "assert step < 3" in program
    script = tmp_path / "failing.py"
    script.write_text(program.replace("os.path.dirname(os.path.abspath(__file__))", repr(str(HERE))))
    output = tmp_path / "failed.prism"
    done = prism("observe", "--nccl-profiler", "--nproc-per-node", 2, "-o", output, "--", script, code=1)
    assert "AssertionError" in done.stderr and "operations belong to units" in done.stderr
    with TraceReader(output) as reader:
        assert reader.metadata["job.status"] == "aborted"
        joined = sum(np.count_nonzero(reader.units(rank)["nccl.num_tasks"] != ABSENT) for rank in reader.ranks)
    assert joined >= 2 * 3 * 9


def test_a_job_without_nccl_says_so(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")
    output = tmp_path / "plain.prism"
    done = prism("observe", "--nccl-profiler", "--nproc-per-node", 2, "-o", output, "--", script)
    assert "recorded nothing" in done.stderr
    assert output.exists() and not Path(f"{output}.nccl").exists()


def test_a_library_that_is_not_installed_is_named(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print(1)\n")
    code = (
        "import sys\nsys.modules['prismtrace_nccl_profiler'] = None\nfrom prism_sdk.cli.main import run\n"
        f"sys.exit(run(['observe', '--nccl-profiler', '-o', {str(tmp_path / 'x.prism')!r}, '--', {str(script)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install ./nccl_profiler" in done.stderr
