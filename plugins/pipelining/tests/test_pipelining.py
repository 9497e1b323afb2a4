"""The adapter on every schedule of torch, against the orders that torch itself plans; and its contract."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")
from prismtrace_pipelining.adapter import PipeliningAdapter

import prismtrace
from prism_sdk.abc import FrameworkAdapter
from prism_sdk.testing import FrameworkAdapterContract, Launches, NamedUnit, losses, run_route, unit_order, used_groups

JOB = Path(__file__).parent / "pipeline_job.py"
SINGLE = ("GPipe", "1F1B")
MULTI = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
NUM_RANKS, STAGES = 8, 4  # two replicas of a pipeline; rank // 2 is the place in it
LETTERS = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}
MESSAGES = {
    "send activation": "SEND_F", "recv activation": "RECV_F", "send gradient": "SEND_B", "recv gradient": "RECV_B",
}  # fmt: skip


class TestContract(FrameworkAdapterContract):
    def make_adapter(self) -> FrameworkAdapter:
        return PipeliningAdapter()


@dataclass(frozen=True)
class Job:
    """All schedules, one a step, recorded at eight ranks on two slots."""

    launches: Launches
    trace: Path
    plans: dict[str, list[list[str]]]
    losses: list[float]

    def order(self, name: str, rank: int) -> list[NamedUnit]:
        return unit_order(self.trace, rank, step=list(self.plans).index(name))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("schedules")
    launches = Launches(folder, plugin="prismtrace_pipelining")
    plan = folder / "plans.json"
    done = launches.record(JOB, [str(plan), *SINGLE, *MULTI], num_ranks=NUM_RANKS)
    return Job(launches, done.trace, json.loads(plan.read_text()), losses(done.out))


def action(unit: NamedUnit) -> str | None:
    """A unit as torch spells its actions, such as 2SEND_F0; None for what is no action."""
    if unit.op is not None:
        return f"{unit.stage}{MESSAGES[unit.label]}{unit.microbatch}" if unit.label in MESSAGES else None
    letter = LETTERS.get(unit.part or "")
    return None if letter is None else f"{unit.stage}{letter}{unit.microbatch}"


def planned(actions: list[str]) -> list[str]:
    """The actions of a plan that computing or messages come of; an overlapped pair one after the other."""
    flat: list[str] = []
    for one in actions:
        flat += re.findall(r"\d+(?:SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B)\d+", one)
    return flat


@pytest.mark.parametrize("name", MULTI)
def test_units_come_in_the_order_that_torch_planned(job: Job, name: str) -> None:
    for rank in range(NUM_RANKS):
        found = [one for one in map(action, job.order(name, rank)) if one is not None]
        assert found == planned(job.plans[name][rank // 2])


@pytest.mark.parametrize("name", SINGLE)
def test_passes_come_in_the_order_that_torch_planned(job: Job, name: str) -> None:
    for rank in range(NUM_RANKS):
        found = [one for one in map(action, job.order(name, rank)) if one is not None and "_" not in one]
        plan = planned(job.plans[name][rank // 2])
        if "3F8" in plan:  # torch 2.13 plans 1F1B's last stage with forwards counted from 1: there is no microbatch 8
            plan = [f"3F{int(one[2:]) - 1}" if "F" in one else one for one in plan]
        assert found == plan


@pytest.mark.parametrize("name", SINGLE + MULTI)
def test_every_message_is_sent_and_received_once(job: Job, name: str) -> None:
    sent: Counter[tuple[int | str | None, ...]] = Counter()
    received: Counter[tuple[int | str | None, ...]] = Counter()
    for rank in range(NUM_RANKS):
        for unit in job.order(name, rank):
            if unit.label == "shapes":
                continue
            towards = 1 if unit.phase == "forward" else -1
            if unit.op == "send":
                assert unit.stage is not None
                sent[(rank, unit.peer, unit.phase, unit.microbatch, unit.stage + towards)] += 1
            elif unit.op == "recv":
                received[(unit.peer, rank, unit.phase, unit.microbatch, unit.stage)] += 1
    assert sent == received and sent and set(sent.values()) == {1}


def test_warmup_and_cooldown_of_1f1b(job: Job) -> None:
    for rank in range(NUM_RANKS):
        parts = Counter(unit.schedule for unit in job.order("1F1B", rank) if unit.part in ("forward", "backward"))
        assert parts["warmup"] == STAGES - rank // 2
        assert parts["cooldown"] == max(STAGES - rank // 2, 1)
        assert parts["steady"] == 16 - parts["warmup"] - parts["cooldown"]


def test_chunks_coordinates_and_fidelity(job: Job) -> None:
    chunks = {(unit.stage, unit.model_chunk) for unit in job.order("ZBVZeroBubble", 3) if unit.part == "forward"}
    assert chunks == {(1, 0), (6, 1)}
    with prismtrace.TraceReader(job.trace) as reader:
        facts = reader.metadata
    assert [facts[f"rank.{rank}.coordinates"] for rank in range(NUM_RANKS)] == [f"pp={rank // 2}" for rank in range(8)]
    assert all(facts[f"rank.{rank}.fidelity"] == "full" for rank in range(NUM_RANKS))
    assert ("pp", (1, 3, 5, 7)) in used_groups(job.trace, 3, step=0)
    assert facts["job.adapters"].split(",").count("pipelining") == 1


@pytest.mark.slow
def test_four_ranks_are_observed_recorded_calibrated_and_emulated(job: Job) -> None:
    route = run_route(job.launches, JOB, ["-", "1F1B", "ZBVZeroBubble"], sandbox=(0, 2))  # the stages of one replica
    route.check_names()
    route.check_emulation()
    assert losses(route.observed.out) == pytest.approx(losses(route.recorded.out), rel=1e-5)
    parts = {unit.part for unit in unit_order(route.emulated.trace, 2, step=1)}
    assert parts >= {"forward", "input_grad", "weight_grad"}


def reference(name: str, num_ranks: int) -> float:
    """The loss of the job's model, all stages in a row, with neither a pipeline nor Prism."""
    import torch
    from torch import nn

    modules = []
    for index in range(num_ranks if name in SINGLE else 2 * num_ranks):
        torch.manual_seed(index)
        modules.append(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    torch.manual_seed(100)
    data = torch.randn(8 * 2, 16)
    losses = [nn.functional.mse_loss(nn.Sequential(*modules)(x), x * 0.5) for x in data.chunk(8)]
    return torch.stack(losses).mean().item()


def test_losses_are_those_without_prism(job: Job) -> None:
    assert job.losses == pytest.approx([reference(name, STAGES) for name in SINGLE + MULTI], rel=1e-6)
