"""The adapter on each data parallelism, against what the flight recorder's operations say; and its contract."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")
from prismtrace_fsdp.adapter import DataParallelAdapter

import prismtrace
from prism_sdk.abc import FrameworkAdapter
from prism_sdk.testing import (
    FrameworkAdapterContract,
    Launches,
    NamedUnit,
    Route,
    losses,
    run_route,
    unit_order,
    used_groups,
)

JOB = Path(__file__).parent / "data_parallel_job.py"
KINDS = ("ddp", "fsdp1", "fsdp2", "hsdp", "grouped", "twice", "tensor")
NUM_RANKS = 8
LAYERS = ("blocks.0", "blocks.1", "(root)")


class TestContract(FrameworkAdapterContract):
    def make_adapter(self) -> FrameworkAdapter:
        return DataParallelAdapter()


@dataclass(frozen=True)
class Job:
    """All kinds, two steps each, recorded at eight ranks on two slots."""

    launches: Launches
    trace: Path
    losses: list[float]

    def order(self, kind: str, rank: int = 0, *, named_only: bool = True) -> list[NamedUnit]:
        """The second step of a kind: nothing is set up in it any more."""
        return unit_order(self.trace, rank, step=2 * KINDS.index(kind) + 1, named_only=named_only)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    launches = Launches(tmp_path_factory.mktemp("kinds"), plugin="prismtrace_fsdp")
    done = launches.record(JOB, KINDS, num_ranks=NUM_RANKS)
    return Job(launches, done.trace, losses(done.out))


def counted(order: list[NamedUnit], part: str, op: str) -> Counter[tuple[str | None, int | None]]:
    return Counter((unit.layer, unit.microbatch) for unit in order if unit.op == op and unit.part == part)


@pytest.mark.parametrize("rank", [0, 7])
def test_fsdp2_gathers_and_reduces_each_layer_in_each_microbatch(job: Job, rank: int) -> None:
    order = job.order("fsdp2", rank)
    gathers, reductions = counted(order, "param_gather", "all_gather"), counted(order, "grad_sync", "reduce_scatter")
    # blocks are gathered again for the backward pass, the outermost module is kept
    assert gathers == {(layer, mb): 1 if layer == "(root)" else 2 for layer in LAYERS for mb in (0, 1)}
    assert reductions == {(layer, mb): 1 for layer in LAYERS for mb in (0, 1)}
    assert all(unit.purpose == "dp_shard" for unit in order if unit.op is not None)


def test_fsdp2_names_the_computing_of_layers(job: Job) -> None:
    order = [unit for unit in job.order("fsdp2") if unit.op is None and unit.part is None and unit.microbatch == 1]
    forward = [unit.layer for unit in order if unit.phase == "forward" and unit.layer]
    backward = [unit.layer for unit in order if unit.phase == "backward" and unit.layer]
    assert [layer for layer in forward if layer != "(root)"] == ["blocks.0", "blocks.1"]
    found = list(dict.fromkeys(backward))
    assert found.index("blocks.1") < found.index("blocks.0")


def test_modules_that_are_sharded_together_are_one_layer(job: Job) -> None:
    order = job.order("grouped")
    layers = ("blocks.0", "blocks.1", "norm, head")
    assert counted(order, "grad_sync", "reduce_scatter") == {(layer, mb): 1 for layer in layers for mb in (0, 1)}
    rest = job.order("grouped", named_only=False)  # a stretch that is not left would name all that follows
    assert {unit.layer for unit in rest if unit.phase == "optimizer"} == {None}


def test_two_forward_passes_for_one_loss_are_one_microbatch(job: Job) -> None:
    gathers = counted([unit for unit in job.order("twice") if unit.phase == "forward"], "param_gather", "all_gather")
    assert gathers["blocks.0", 0] == gathers["blocks.0", 1] == 2


def test_hybrid_sharding_reduces_over_replicas_too(job: Job) -> None:
    order = job.order("hsdp")
    reductions = counted(order, "grad_sync", "all_reduce")
    assert reductions == {(layer, mb): 1 for layer in LAYERS for mb in (0, 1)}
    purposes = {(unit.op, unit.purpose) for unit in order if unit.op is not None}
    assert used_groups(job.trace, 6, step=2 * KINDS.index("hsdp") + 1) == {
        ("dp_shard", (4, 5, 6, 7)), ("dp_replicate", (2, 6)),
    }  # fmt: skip
    assert purposes == {("all_gather", "dp_shard"), ("reduce_scatter", "dp_shard"), ("all_reduce", "dp_replicate")}


def test_fsdp1_names_layers(job: Job) -> None:
    order = job.order("fsdp1")
    assert {layer for layer, _ in counted(order, "param_gather", "all_gather")} == set(LAYERS)
    assert counted(order, "grad_sync", "reduce_scatter") == {(layer, mb): 1 for layer in LAYERS for mb in (0, 1)}


def test_ddp_reduces_in_the_last_microbatch_only(job: Job) -> None:
    order = job.order("ddp")
    reductions = [unit for unit in order if unit.op == "all_reduce"]
    assert reductions and {(unit.part, unit.microbatch, unit.phase) for unit in reductions} == {
        ("grad_sync", 1, "backward")
    }
    assert {unit.microbatch for unit in order if unit.phase == "forward"} == {0, 1}


def test_tensor_parallel_collectives_have_their_purpose(job: Job) -> None:
    order = job.order("tensor")
    used = Counter(unit.purpose for unit in order if unit.op is not None)
    assert used["tp"] > 0 and used["dp_shard"] > 0
    with prismtrace.TraceReader(job.trace) as reader:
        for rank in range(NUM_RANKS):
            coordinates = dict(pair.split("=") for pair in reader.metadata[f"rank.{rank}.coordinates"].split(","))
            assert (coordinates["dp"], coordinates["tp"]) == (str(rank // 2), str(rank % 2))
            assert (coordinates["replicate"], coordinates["shard"]) == (str(rank // 4), str(rank % 4))
            assert reader.metadata[f"rank.{rank}.fidelity"] == "full"


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_counts_microbatches_anew(job: Job, kind: str) -> None:
    for step in (0, 1):
        units = unit_order(job.trace, 1, step=2 * KINDS.index(kind) + step)
        assert {unit.microbatch for unit in units if unit.phase == "backward"} == {0, 1}
        assert all(unit.microbatch is None for unit in units if unit.phase == "optimizer")


REPLACING = """
import runpy, sys
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group

own, ours = Group.post_backward.__wrapped__, Group.post_backward
Group.post_backward = (lambda *args: ours(*args)) if "wrapper" in sys.argv else (lambda *args: own(*args))
sys.argv = [sys.argv[1], "fsdp2"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("what", ["wrapper", "replacement"])
def test_a_hook_that_the_program_replaces_is_reported(job: Job, what: str) -> None:
    script = job.launches.folder / "replacing.py"
    script.write_text(REPLACING)
    done = job.launches.record(script, [str(JOB), what], num_ranks=2)
    is_lost = what == "replacement"
    with prismtrace.TraceReader(done.trace) as reader:
        assert [reader.metadata[f"rank.{rank}.fidelity"] for rank in range(2)] == ["reduced" if is_lost else "full"] * 2
    assert ("FSDPParamGroup.post_backward is left out: __main__.<lambda> is in its place" in done.err) is is_lost


def reference() -> list[float]:
    """The losses of the job's model on one process: the mean gradient over the streams of data, without Prism."""
    import torch
    from torch import nn

    def model(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = x + block(x)
        return head(x)

    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2))
    head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    parameters = [*blocks.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    num_streams = NUM_RANKS // 2
    streams = [torch.Generator().manual_seed(1 + stream) for stream in range(num_streams)]
    means = []
    for _ in range(2):
        losses = [
            (model(x) - x.tanh()).square().mean()
            for x in (torch.randn(4, 16, generator=streams[number % num_streams]) for number in range(2 * num_streams))
        ]
        (sum(losses, torch.zeros(())) / num_streams).backward()  # two microbatches; replicas are averaged
        optimizer.step()
        optimizer.zero_grad()
        means.append((losses[0].item() + losses[num_streams].item()) / 2)
    return means


def test_losses_are_the_same_under_all_and_without_prism(job: Job) -> None:
    per_kind = [job.losses[at : at + 2] for at in range(0, len(job.losses), 2)]
    assert len(per_kind) == len(KINDS)
    assert all(values == pytest.approx(per_kind[0], rel=1e-5) for values in per_kind)
    assert per_kind[0] == pytest.approx(reference(), rel=1e-5)


@pytest.fixture(scope="module")
def route(job: Job) -> Route:
    """Three kinds on the whole way at four ranks; data parallel ranks all do the same, so one of them is emulated."""
    launches = Launches(job.launches.folder, plugin="prismtrace_fsdp", environment={"TORCH_FR_BUFFER_SIZE": "2000"})
    return run_route(launches, JOB, ["ddp", "fsdp2", "tensor"], sandbox=(0,))


@pytest.mark.slow
def test_four_ranks_are_observed_recorded_calibrated_and_emulated(route: Route) -> None:
    route.check_names()
    route.check_emulation()
    assert losses(route.observed.out) == pytest.approx(losses(route.recorded.out), rel=1e-5)


@pytest.mark.slow
def test_observing_gives_the_collectives_of_the_flight_recorder(route: Route) -> None:
    order = unit_order(route.observed.trace, 1, step=3)
    assert counted(order, "grad_sync", "reduce_scatter") == {(layer, mb): 1 for layer in LAYERS for mb in (0, 1)}
    (line,) = [line for line in route.observed.out.splitlines() if line.startswith("flight recorder")]
    seen = json.loads(line.removeprefix("flight recorder "))
    ours = Counter(unit.op for unit in unit_order(route.observed.trace, 0, named_only=False) if unit.op is not None)
    assert len(seen) == sum(ours.values()) and len(seen) > 20
    gathers = sum(1 for name in seen if "all_gather" in name)
    assert gathers == ours["all_gather"]  # gloo does a reduce-scatter as an all-reduce, and says so
