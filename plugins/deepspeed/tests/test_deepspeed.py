"""The adapter on DeepSpeed itself, on CPU, against the instructions that its schedules plan; and its contract."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed", exc_type=ImportError)
from prismtrace_deepspeed.adapter import DeepSpeedAdapter

import prismtrace
from prism_sdk.abc import FrameworkAdapter
from prism_sdk.testing import (
    FrameworkAdapterContract,
    Launched,
    Launches,
    NamedUnit,
    Route,
    losses,
    run_route,
    unit_order,
    used_groups,
)

JOB = Path(__file__).parent / "deepspeed_job.py"
MICROBATCHES = 4
NUM_RANKS = 8
REPLICAS = NUM_RANKS // 2  # of a pipeline of two stages
KINDS = ["zero:3:engine", "pipe:2"]  # two steps each
STEP_OF = {kind: 2 * at + 1 for at, kind in enumerate(KINDS)}  # the second step of each
NO_COMPILER = {
    "TORCHDYNAMO_DISABLE": "1"
}  # DeepSpeed decorates an optimizer that is not used: a second of imports a rank

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class TestContract(FrameworkAdapterContract):
    def make_adapter(self) -> FrameworkAdapter:
        return DeepSpeedAdapter()


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("deepspeed")
    return Launches(folder, plugin="prismtrace_deepspeed", environment=NO_COMPILER)


@pytest.fixture(scope="module")
def job(launches: Launches) -> Launched:
    """ZeRO and a pipeline, in one recording."""
    return launches.record(JOB, KINDS, num_ranks=NUM_RANKS)


@pytest.fixture(scope="module")
def route(launches: Launches) -> Route:
    """ZeRO with the other style of backward pass, and a pipeline, at four ranks; ranks 0 and 2 are its stages."""
    return run_route(launches, JOB, ["zero:3:torch", "pipe:2"], sandbox=(0, 2))


def instructions(trace: Path, rank: int) -> list[str]:
    """The instructions of the pipeline's second step as they came."""
    found: list[tuple[str, int | None]] = []
    for unit in unit_order(trace, rank):
        if unit.label is not None and (not found or found[-1] != (unit.label, unit.microbatch)):
            found.append((unit.label, unit.microbatch))
    names = [name for name, _ in found]
    return names[names.index("OptimizerStep") + 1 :]  # the plain engine has no labels


def test_instructions_are_those_that_deepspeed_planned(job: Launched) -> None:
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    for rank in range(NUM_RANKS):
        plan = TrainSchedule(micro_batches=MICROBATCHES, stages=2, stage_id=rank // REPLICAS).steps()
        planned = [type(command).__name__ for commands in plan for command in commands]
        assert instructions(job.trace, rank) == planned


def test_microbatches_of_messages_match(job: Launched) -> None:
    sent: Counter[tuple[int | str | None, ...]] = Counter()
    received: Counter[tuple[int | str | None, ...]] = Counter()
    for rank in range(NUM_RANKS):
        for unit in unit_order(job.trace, rank):
            if unit.op == "send" and unit.label:
                sent[(rank, unit.peer, unit.phase, unit.microbatch)] += 1
            elif unit.op == "recv" and unit.label:
                received[(unit.peer, rank, unit.phase, unit.microbatch)] += 1
    assert sent == received and {key[3] for key in sent} == set(range(MICROBATCHES))


def test_stages_schedule_and_coordinates(job: Launched) -> None:
    first = [
        unit.schedule
        for unit in unit_order(job.trace, 0, step=STEP_OF["pipe:2"])
        if unit.part in ("forward", "backward")
    ]
    assert first[0] == "warmup" and first[-1] == "cooldown"
    reduced = [
        unit
        for unit in unit_order(job.trace, NUM_RANKS - 1, step=STEP_OF["pipe:2"])
        if unit.op == "all_reduce" and unit.part == "grad_sync"
    ]
    assert reduced and {(unit.label, unit.purpose) for unit in reduced} == {("ReduceGrads", "dp")}
    with prismtrace.TraceReader(job.trace) as reader:
        found = [reader.metadata[f"rank.{rank}.coordinates"] for rank in range(NUM_RANKS)]
        assert all(reader.metadata[f"rank.{rank}.fidelity"] == "full" for rank in range(NUM_RANKS))
    assert used_groups(job.trace, 0, step=STEP_OF["zero:3:engine"]) == {("dp", tuple(range(NUM_RANKS)))}
    assert used_groups(job.trace, 1, step=STEP_OF["pipe:2"]) == {
        ("dp", tuple(range(REPLICAS))), ("pp", (1, 1 + REPLICAS)), ("tp_pp", (1, 1 + REPLICAS)),
        ("dp", tuple(range(NUM_RANKS))),
    }  # fmt: skip
    stages = [dict(pair.split("=") for pair in one.split(","))["pp"] for one in found]
    assert stages == ["0"] * REPLICAS + ["1"] * REPLICAS


def of(order: list[NamedUnit], part: str, op: str) -> list[NamedUnit]:
    return [unit for unit in order if unit.part == part and unit.op == op]


def check_zero_3(order: list[NamedUnit]) -> None:
    gathers = [unit.layer or "" for unit in order if unit.part == "param_gather" and unit.op is not None]
    assert {layer for layers in gathers for layer in layers.split(",")} == {"0", "1", "2"}
    assert of(order, "grad_sync", "reduce_scatter") or of(order, "grad_sync", "all_reduce")
    assert {unit.microbatch for unit in order if unit.phase == "backward"} >= {0, 1}
    assert {unit.microbatch for unit in order if unit.part == "forward"} == {0, 1}


def test_zero_3_names_gathers_and_reductions(job: Launched) -> None:
    check_zero_3(unit_order(job.trace, 1, step=STEP_OF["zero:3:engine"]))
    assert len(losses(job.out)) == 4 + 2


def reference() -> list[float]:
    """The losses of ZeRO's job with neither DeepSpeed nor Prism: all replicas have the same data."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    for number in range(4):
        pair = (2 * number, 2 * number + 1)
        x = torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(index)) for index in pair])
        loss = nn.functional.mse_loss(model(x), x.tanh())
        (loss / 2).backward()  # two microbatches
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        values.append(loss.item())
    return values


def test_losses_are_those_without_prism(job: Launched) -> None:
    found = losses(job.out)  # by step: in the first two the pipeline has one as well
    assert [found[0], found[2], *found[4:]] == pytest.approx(reference(), rel=1e-5)


def test_zero_3_is_named_the_same_where_the_loss_is_called_backward(route: Route) -> None:
    check_zero_3(unit_order(route.recorded.trace, 1, step=1))


@pytest.mark.slow
def test_four_ranks_are_observed_recorded_calibrated_and_emulated(route: Route) -> None:
    route.check_names()
    route.check_emulation()
    assert losses(route.observed.out) == pytest.approx(losses(route.recorded.out), rel=1e-4)
