"""Recordings of the example scripts, emulated rank by rank: real processes, the same bits, and what is said when not.

Every job is recorded once, with 4 ranks on 2 slots; the DDP job is calibrated for real, the others get made-up times.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from prismtrace import GraphKind, Op, TraceReader, UnitKind
from tests.runtime.conftest import Bench
from tests.runtime.laboratory import DDP, RANKS, Laboratory, made_up_times, metadata

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

MODEL = ("--width", "32", "--vocab", "64", "--context", "16", "--batch", "2", "--precise")
FSDP2 = ("train_fsdp2_gpt.py", "--steps", "3", "--layers", "2", "--heads", "2", *MODEL)
PIPELINE = ("train_pipeline_1f1b.py", "--steps", "3", "--layers", "1", "--heads", "2", "--microbatches", "4", *MODEL)
MOE = ("train_qwen3moe_fsdp2.py", "--steps", "2", "--layers", "2", "--experts", "4", *MODEL)


def losses(path: Path, rank: int) -> list[float]:
    with TraceReader(path) as reader:
        return [float(loss) for loss in reader.steps(rank).loss]


def values(reader: TraceReader, rank: int) -> list[tuple[int, bytes | None, bytes | None]]:
    """What went into the rank's collectives and came out."""
    table = reader.units(rank)
    collectives = np.flatnonzero(table.kind == UnitKind.COLLECTIVE).tolist()
    return [(int(table.op[row]), table.payload_in_at(row), table.payload_out_at(row)) for row in collectives]


def printed(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+ loss (\S+)$", text, re.MULTILINE)]


def assert_same(recorded: Path, emulated: Path, sandbox: str, *, num_steps: int, first_step: int = 0) -> None:
    """The sandbox ranks' losses are those of the recording, to the bit, and so is what they did."""
    ranks = [int(rank) for rank in sandbox.split(",")]
    facts = metadata(emulated)
    with TraceReader(recorded) as before, TraceReader(emulated) as after:
        assert after.graph_kind is GraphKind.EMULATED
        assert list(after.ranks) == ranks
        for rank in ranks:
            assert len(losses(recorded, rank)) == num_steps
            found, wanted = (losses(path, rank)[first_step:] for path in (emulated, recorded))
            np.testing.assert_array_equal(found, wanted)  # NaN: a stage without a loss
            tables = [reader.units(rank) for reader in (before, after)]
            talks = [t.kind >= UnitKind.COLLECTIVE for t in tables]
            for column in ("kind", "op", "group_id", "seq", "num_elements_in", "num_elements_out", "peer", "phase"):
                one, other = (getattr(t, column)[rows] for t, rows in zip(tables, talks, strict=True))
                np.testing.assert_array_equal(one, other, err_msg=column)
            assert facts[f"rank.{rank}.reductions_compensated"] == "0"
            assert facts[f"rank.{rank}.operations_without_values"] == "0"
            assert facts[f"rank.{rank}.steps_beyond_recorded"] == "0"
    assert sum(int(facts[f"rank.{ranks[0]}.prefetch_{what}"]) for what in ("hits", "misses")) > 0


# -- recordings ------------------------------------------------------------------------------------------------------


def test_recordings_do_not_depend_on_the_number_of_slots(lab: Laboratory) -> None:
    two, one = lab.record(DDP), lab.record(DDP, "--slots", "1")
    with TraceReader(one) as first, TraceReader(two) as second:
        assert set(first.payload_digests) == set(second.payload_digests)
        assert len(first.payload_digests) > 0
        for rank in range(RANKS):
            assert losses(one, rank) == losses(two, rank)
            assert values(first, rank) == values(second, rank)


# -- emulations ------------------------------------------------------------------------------------------------------


def test_calibration_writes_a_whole_graph_with_times(lab: Laboratory) -> None:
    path, ended = lab.calibrated
    assert "predicted step" in ended.err
    facts = metadata(path)
    assert (facts["calibration.passes"], facts["calibration.slices"]) == ("1", "2")
    low, high = (int(part) for part in facts["calibration.interval_ns"].split(":"))
    assert 0 < low <= int(facts["calibration.step_ns"]) <= high
    with TraceReader(path) as after, TraceReader(lab.record(DDP)) as before:
        assert after.graph_kind is GraphKind.CALIBRATED
        assert set(after.payload_digests) == set(before.payload_digests)
        for rank in range(RANKS):
            table = after.units(rank)
            assert len(table) == before.num_units(rank)
            talks = (table.kind >= UnitKind.COLLECTIVE) & (table.kind != UnitKind.WAIT)
            assert (table.transfer_ns[talks] >= 0).all()
            ends = after.steps(rank).end_ns
            assert (np.diff(ends) > 0).all()
    assert [p for p in lab.folder.iterdir() if p.name.startswith("prism-calibrate-")] == []


@pytest.mark.parametrize("sandbox", ["0", "3", "0,1", "1,2"])
def test_every_rank_of_ddp(lab: Laboratory, sandbox: str) -> None:
    graph, _ = lab.calibrated
    ended, output = lab.emulate(graph, DDP, sandbox)
    assert ended.code == 0, ended.err
    assert_same(lab.record(DDP), output, sandbox, num_steps=3)
    assert len(printed(ended.out)) == (3 if "0" in sandbox else 0)


@pytest.mark.parametrize(
    ("program", "sandbox", "num_steps"),
    [(FSDP2, "1,2", 3), (PIPELINE, "1", 3), (PIPELINE, "2,3", 3), (MOE, "2", 2)],
    ids=["fsdp2-1-2", "pipeline-1", "pipeline-2-3", "moe-2"],
)
def test_the_other_examples(lab: Laboratory, program: tuple[str, ...], sandbox: str, num_steps: int) -> None:
    if program is MOE:
        pytest.importorskip("transformers")
    ended, output = lab.emulate(lab.graph(program), program, sandbox)
    assert ended.code == 0, ended.err
    # torch infers the shapes of a pipeline by a backward over memory that nobody has written: a loss of the first step
    first_step = 1 if program is PIPELINE else 0
    assert_same(lab.record(program), output, sandbox, num_steps=num_steps, first_step=first_step)
    has_loss = program is not PIPELINE or "3" in sandbox  # of a pipeline only the last stage
    assert np.isfinite(losses(output, int(sandbox[-1]))[first_step:]).all() == has_loss


# -- what is not as recorded -----------------------------------------------------------------------------------------


def test_more_steps_than_recorded(lab: Laboratory) -> None:
    graph, _ = lab.calibrated
    longer = (DDP[0], "--steps", "6", *DDP[3:])
    ended, output = lab.emulate(graph, longer, "0")
    assert ended.code == 0, ended.err
    found = losses(output, 0)
    assert len(found) == 6
    assert found[:3] == losses(lab.record(DDP), 0)
    assert np.isfinite(found).all()
    facts = metadata(output)
    assert facts["rank.0.steps_beyond_recorded"] == "3"
    assert facts["rank.0.operations_without_values"] == "0"
    with TraceReader(output) as reader:
        ends = reader.steps(0).end_ns
    assert (np.diff(ends) > 0).all()


def test_a_graph_of_another_job_is_refused_at_the_first_difference(lab: Laboratory) -> None:
    graph, _ = lab.calibrated
    other = (*DDP[:4], "48", *DDP[5:])
    assert other[3:5] == ("--width", "48")
    ended, output = lab.emulate(graph, other, "0")
    assert ended.code == 1
    found = re.search(r"first difference at rank 0, unit (\d+): the graph has (.*), the program did (.*)", ended.err)
    assert found is not None, ended.err
    assert str(graph) in ended.err
    assert "prism record" in ended.err
    unit, wanted, did = int(found[1]), found[2], found[3]
    with TraceReader(graph) as reader:
        table = reader.units(0)
    assert Op(int(table.op[unit])).name.lower() in wanted
    assert f"{table.num_elements_out[unit]} elements" in wanted
    assert wanted != did
    assert metadata(output)["job.status"] == "aborted"
    with TraceReader(output) as reader:  # the communication before it went as recorded
        before = reader.units(0).kind
    assert (before == UnitKind.COLLECTIVE).sum() == 1 + (table.kind[:unit] == UnitKind.COLLECTIVE).sum()


def test_without_values_it_runs_and_says_so(lab: Laboratory) -> None:
    graph = lab.graph(DDP, "--payloads", "none")
    with TraceReader(graph) as reader:
        assert len(reader.payload_digests) == 0
    ended, output = lab.emulate(graph, DDP, "0")
    assert ended.code == 0, ended.err
    assert "some values were not recorded" in ended.err
    assert int(metadata(output)["rank.0.operations_without_values"]) > 0
    assert len(losses(output, 0)) == 3
    assert np.isfinite(losses(output, 0)).all()


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "missing"])
def test_a_broken_graph_is_named_and_nothing_is_started(lab: Laboratory, damage: str) -> None:
    whole = lab.graph(DDP).read_bytes()
    broken = lab.path(damage)
    if damage == "cut":
        broken.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        middle = len(whole) - 60
        broken.write_bytes(whole[:middle] + bytes(b ^ 0xFF for b in whole[middle : middle + 8]) + whole[middle + 8 :])
    elif damage == "other":
        broken.write_bytes(b"PK\x03\x04 this is no trace" * 50)
    ended, output = lab.emulate(broken, DDP, "0")
    assert ended.code == 3, ended.err
    assert str(broken) in ended.err
    assert "Traceback" not in ended.err
    assert "torch is being loaded" not in ended.err
    assert not output.exists()


def test_a_job_without_steps_whose_futures_cross(bench: Bench) -> None:
    """Two groups in opposite orders, a callback, no training step: recorded on one slot, calibrated, emulated."""
    script = bench.script("""
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, seen = dist.get_rank(), []
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [torch.ones(3) * rank, torch.ones(3) * (rank + 1)]
    order = (0, 1) if rank else (1, 0)
    futures = [dist.all_reduce(tensors[i], group=groups[i], async_op=True).get_future() for i in order]
    torch.futures.collect_all(futures).then(lambda all_: [one.value() for one in all_.value()]).wait()
    dist.all_reduce(torch.ones(1), async_op=True).get_future().add_done_callback(lambda f: seen.append(f.value()))
    dist.barrier()
    dist.barrier()
    print(" ".join(map(str, [rank, [t[0].item() for t in tensors], len(seen)])) + "\\n", end="", flush=True)
    """)
    bare, graph = bench.folder / "bare.prism", bench.folder / "graph.prism"
    for verb, *options in (
        ("record", "--nproc-per-node", "2", "--slots", "1", "-o", str(bare)),
        ("calibrate", "--graph", str(bare), "-o", str(graph)),
        ("emulate", "--graph", str(graph), "--sandbox", "0", "-o", str(bench.output)),
    ):
        ended = bench.run_shared(verb, script, *options)
        assert ended.code == 0, ended.err
        if verb != "calibrate":
            assert "0 [1.0, 3.0] 1" in ended.out


KILLER = """
    import os, pathlib, signal, sys, time
    import torch, torch.distributed as dist
    graph, victim = sys.argv[1:]
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*") if victim else ():
        try:
            words, state = (folder / "cmdline").read_text(), (folder / "stat").read_text()
        except OSError:
            continue
        found.append((int(folder.name), int(state.rpartition(")")[2].split()[1]), words))
    parents = [parent for _, parent, words in found if "runtime.prefetch" in words and graph in words]
    for number, parent, words in found:
        if parent in parents and victim in words:
            os.kill(number, signal.SIGKILL)
            time.sleep(60)
"""


@pytest.mark.parametrize(
    ("backend", "victim", "name"),
    [
        ("local", "prism_sdk.runtime.prefetch", "the process that reads values ahead of rank 0"),
        ("gloo", "prism_sdk.runtime.virtual", "the assistant that plays the virtual ranks"),
    ],
)
def test_a_helper_that_is_killed_ends_the_run(bench: Bench, backend: str, victim: str, name: str) -> None:
    """Without it operations would come late, or never, and times would mean nothing."""
    script, bare = bench.script(KILLER), bench.folder / "bare.prism"
    words = ("record", script, "--nproc-per-node", "2", "-o", str(bare))
    assert bench.run_shared(*words, arguments=("", "")).code == 0
    graph = made_up_times(bare, bench.folder / "graph.prism")
    ended = bench.run_shared("emulate", script, "--graph", str(graph), "--backend", backend, "-o", str(bench.output),
                             arguments=(str(graph), victim))  # fmt: skip
    assert ended.code == 1 and f"{name} ended before the ranks did (killed by SIGKILL)" in ended.err
    assert "memory may have run out" in ended.err and "Traceback" not in ended.err
