"""Recordings of the example scripts, emulated rank by rank: real processes, the same bits, and what is said when not.

Every job is recorded once, with 4 ranks on 2 slots; the DDP job is calibrated for real, the others get made-up times.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism_sdk.builtin.slices import write_times
from prismtrace import ABSENT, GraphKind, Op, TraceReader, UnitKind

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 100.0
RANKS = 4

DDP = ("train_ddp.py", "--steps", "3", "--width", "32", "--layers", "2", "--batch", "8", "--precise")
MODEL = ("--width", "32", "--vocab", "64", "--context", "16", "--batch", "2", "--precise")
FSDP2 = ("train_fsdp2_gpt.py", "--steps", "3", "--layers", "2", "--heads", "2", *MODEL)
PIPELINE = ("train_pipeline_1f1b.py", "--steps", "2", "--layers", "1", "--heads", "2", "--microbatches", "4", *MODEL)
MOE = ("train_qwen3moe_fsdp2.py", "--steps", "2", "--layers", "2", "--experts", "4", *MODEL)

# Every kind of operation once; what each rank gets goes into a file. "extra" is added to what rank 0 contributes.
EVERYTHING = """
    import json, pathlib, sys, time
    import torch, torch.distributed as dist
    folder, extra = pathlib.Path(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])
    got = {}
    base = torch.arange(6.0) + 10 * rank
    mine = base + (extra if rank == 0 else 0)

    def reduced(name, op, tensor, group=None):
        dist.all_reduce(tensor, op, group=group)
        got[name] = tensor.tolist()

    reduced("sum", dist.ReduceOp.SUM, mine.clone())
    reduced("sum-int", dist.ReduceOp.SUM, mine.long())
    reduced("max", dist.ReduceOp.MAX, mine.clone())
    reduced("min", dist.ReduceOp.MIN, mine.clone())
    reduced("product-again", dist.ReduceOp.PRODUCT, base[:2] + 1)
    if rank in (0, 2):
        reduced("pair", dist.ReduceOp.SUM, mine.clone(), pair)
    strided = torch.zeros(3, 4)
    strided[:, ::2] = mine.view(3, 2)
    reduced("strided", dist.ReduceOp.SUM, strided[:, ::2])
    some = [mine.clone(), -base[:3]]
    with dist._coalescing_manager(async_ops=False):
        for tensor in some:
            dist.all_reduce(tensor)
    got["coalesced"] = [t.tolist() for t in some]
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.cat([mine, base[:2]]))
    got["reduce-scatter"] = part.tolist()
    tensor = mine.clone()
    dist.reduce(tensor, 0)
    if rank == 0:
        got["reduce"] = tensor.tolist()

    for root in (0, 3):
        tensor = base.clone()
        dist.broadcast(tensor, root)
        got[f"broadcast-{root}"] = tensor.tolist()
        out = torch.empty(2)
        dist.scatter(out, [base[:2] + i for i in range(size)] if rank == root else None, src=root)
        got[f"scatter-{root}"] = out.tolist()
        parts = [torch.empty(6) for _ in range(size)] if rank == root else None
        dist.gather(base, parts, dst=root)
        got[f"gather-{root}"] = [t.tolist() for t in parts or ()]

    outputs = [torch.empty(size * 6) for _ in range(3)]  # waited for in another order than issued
    works = [dist.all_gather_into_tensor(out, base + 100 * i, async_op=True) for i, out in enumerate(outputs)]
    reduced("between", dist.ReduceOp.SUM, base.clone())
    for i in (2, 0, 1):
        works[i].wait()
    got["gathered"] = [t.tolist() for t in outputs]

    sends = [(rank + other) % 3 for other in range(size)]  # some are empty
    out = torch.empty(sum(sends), 2)
    dist.all_to_all_single(out, torch.arange(2.0 * sum(sends)).view(-1, 2) + 50 * rank, sends, sends)
    got["all-to-all"] = out.tolist()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    got["objects"] = objects

    left, right = (rank - 1) % size, (rank + 1) % size
    tensor = torch.empty(6)
    work = dist.irecv(tensor, left, tag=1)
    if rank == 0:
        got["early"] = work.is_completed()  # what it waits for begins with this rank's own message
        dist.send(base, right, tag=1)
    work.wait()
    got["ring"] = tensor.tolist()
    if rank:
        dist.send(tensor + 1, right, tag=1)
    tensor = torch.empty(3)
    if rank == 1:
        got["any"] = dist.recv(tensor, None, tag=2)
        got["from-any"] = tensor.tolist()
    elif rank == 2:
        dist.send(base[:3], 1, tag=2)
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(got))
    dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@dataclass
class Laboratory:
    """Runs `prism` in one folder, and each recording only once."""

    folder: Path
    serial: int = 0
    kept: dict[str, Path] = field(default_factory=dict)

    def run(self, mode: str, output: Path, program: tuple[str, ...], *options: str | Path) -> Ended:
        script = EXAMPLES / program[0] if not os.path.isabs(program[0]) else Path(program[0])
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PRISM_")} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "prism_sdk.cli.main", mode, "-o", output, *options, "--", script, *program[1:]]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=SECONDS, cwd=self.folder, env=environment
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def path(self, name: str) -> Path:
        self.serial += 1
        return self.folder / f"{name}-{self.serial}.prism"

    def record(self, program: tuple[str, ...], *options: str) -> Path:
        key = json.dumps([program, options])
        if key not in self.kept:
            output = self.path("recorded")
            flags = options if "--slots" in options else ("--slots", "2", *options)
            ended = self.run("record", output, program, "--nproc-per-node", str(RANKS), *flags)
            assert ended.code == 0, ended.err
            self.kept[key] = output
        return self.kept[key]

    def graph(self, program: tuple[str, ...], *options: str) -> Path:
        """The recording with times that nobody measured: values do not depend on them."""
        key = json.dumps(["graph", program, options])
        if key not in self.kept:
            self.kept[key] = made_up_times(self.record(program, *options), self.path("graph"))
        return self.kept[key]

    def emulate(self, graph: Path, program: tuple[str, ...], sandbox: str, *options: str) -> tuple[Ended, Path]:
        output = self.path("emulated")
        return self.run("emulate", output, program, "--graph", graph, "--sandbox", sandbox, *options), output

    @cached_property
    def calibrated(self) -> tuple[Path, Ended]:
        """The DDP job, calibrated as a user would."""
        output = self.path("calibrated")
        ended = self.run("calibrate", output, DDP, "--graph", self.record(DDP), "--slots", "2", "-O", "passes=1")
        assert ended.code == 0, ended.err
        return output, ended


def made_up_times(source: Path, output: Path) -> Path:
    columns: dict[int, dict[str, Any]] = {}
    with TraceReader(source) as reader:
        for rank in reader.ranks:
            table = reader.units(rank)
            talks = np.isin(table.kind, [UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV])
            columns[rank] = {
                "transfer_ns": np.where(talks, 20_000, ABSENT),
                "gap_ns": np.where(table.kind == UnitKind.COMPUTE, 0, ABSENT),
            }
    write_times(source, columns, output, GraphKind.CALIBRATED, {}, with_payloads=True)
    return output


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("emulate"))


def losses(path: Path, rank: int) -> list[float]:
    with TraceReader(path) as reader:
        return [float(loss) for loss in reader.steps(rank).loss]


def metadata(path: Path) -> Mapping[str, str]:
    with TraceReader(path) as reader:
        return dict(reader.metadata)


def values(reader: TraceReader, rank: int) -> list[tuple[int, bytes | None, bytes | None]]:
    """What went into the rank's collectives and came out."""
    table = reader.units(rank)
    collectives = np.flatnonzero(table.kind == UnitKind.COLLECTIVE).tolist()
    return [(int(table.op[row]), table.payload_in_at(row), table.payload_out_at(row)) for row in collectives]


def printed(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+ loss (\S+)$", text, re.MULTILINE)]


def assert_same(recorded: Path, emulated: Path, sandbox: str, *, num_steps: int) -> None:
    """The sandbox ranks' losses are those of the recording, to the bit, and so is what they did."""
    ranks = [int(rank) for rank in sandbox.split(",")]
    facts = metadata(emulated)
    with TraceReader(recorded) as before, TraceReader(emulated) as after:
        assert after.graph_kind is GraphKind.EMULATED
        assert list(after.ranks) == ranks
        for rank in ranks:
            assert len(losses(recorded, rank)) == num_steps
            np.testing.assert_array_equal(losses(emulated, rank), losses(recorded, rank))  # NaN: a stage without a loss
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
    [(FSDP2, "1,2", 3), (PIPELINE, "1", 2), (PIPELINE, "2,3", 2), (MOE, "2", 2)],
    ids=["fsdp2-1-2", "pipeline-1", "pipeline-2-3", "moe-2"],
)
def test_the_other_examples(lab: Laboratory, program: tuple[str, ...], sandbox: str, num_steps: int) -> None:
    if program is MOE:
        pytest.importorskip("transformers")
    ended, output = lab.emulate(lab.graph(program), program, sandbox)
    assert ended.code == 0, ended.err
    assert_same(lab.record(program), output, sandbox, num_steps=num_steps)
    assert np.isfinite(losses(output, int(sandbox[-1]))).all() or sandbox == "1"  # only the last stage has a loss


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


# -- every operation -------------------------------------------------------------------------------------------------


class Operations:
    """The program that does everything once, recorded; and what its ranks got."""

    def __init__(self, lab: Laboratory) -> None:
        self.lab = lab
        self.script = lab.folder / "everything.py"
        self.script.write_text(textwrap.dedent(EVERYTHING))
        self.recorded, program = self.program("recorded", 0)
        self.graph = lab.graph(program)

    def program(self, name: str, extra: float) -> tuple[Path, tuple[str, ...]]:
        folder = self.lab.folder / name
        folder.mkdir()
        return folder, (str(self.script), str(folder), str(extra))

    def emulate(self, sandbox: str, *options: str, extra: float = 0) -> tuple[dict[int, Any], Mapping[str, str]]:
        folder, program = self.program(f"emulated-{sandbox}-{extra}", extra)
        ended, output = self.lab.emulate(self.graph, program, sandbox, *options)
        assert ended.code == 0, ended.err
        return {int(rank): got(folder, int(rank)) for rank in sandbox.split(",")}, metadata(output)


def got(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


@pytest.fixture(scope="module")
def operations(lab: Laboratory) -> Operations:
    return Operations(lab)


@pytest.mark.parametrize("sandbox", ["0", "3", "1,2"])
def test_every_operation_returns_what_it_returned_in_the_recording(operations: Operations, sandbox: str) -> None:
    found, facts = operations.emulate(sandbox, "-O", "prefetch_bytes=100000")
    for rank, values in found.items():
        assert values == got(operations.recorded, rank)
        assert facts[f"rank.{rank}.reductions_compensated"] == "0"
        assert facts[f"rank.{rank}.operations_without_values"] == "0"
    assert found.get(0, {}).get("early", False) is False


def test_what_a_rank_changes_is_made_up_for_and_not_overwritten(operations: Operations) -> None:
    extra = 100.0
    values, facts = operations.emulate("0", extra=extra)
    before, after = got(operations.recorded, 0), values[0]

    def more(name: str, by: float = extra) -> Any:
        return (np.array(before[name]) + by).tolist()

    for name in ("sum", "sum-int", "pair", "strided", "reduce"):
        assert after[name] == more(name), name
    assert after["reduce-scatter"] == more("reduce-scatter")
    assert after["max"] == [100.0 + i for i in range(6)]
    assert after["min"] == before["min"]  # still the lowest that anybody is known to have given
    assert after["coalesced"] == [(np.array(before["coalesced"][0]) + extra).tolist(), before["coalesced"][1]]
    for name in before.keys() - {"sum", "sum-int", "pair", "strided", "reduce", "reduce-scatter", "max", "coalesced"}:
        assert after[name] == before[name], name
    assert int(facts["rank.0.reductions_compensated"]) == 9
