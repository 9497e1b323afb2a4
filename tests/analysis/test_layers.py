"""What layers cost and how experts are loaded, in closed form; and that ``prism analyze`` says it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_jobs import MadeJob

from prism_sdk.analysis import analyze, expert_loads, layer_costs, load_job
from prism_sdk.errors import UsageError
from prismtrace import Op, Phase, TraceReader, TraceUsageError, UnitKind

FORWARD, BACKWARD = int(Phase.FORWARD), int(Phase.BACKWARD)
STEP = 1000


def sharded_job(num_steps: int = 3) -> MadeJob:
    """Two ranks: a layer is gathered, computed forward and backward. Rank 1 has a second layer, which takes longer."""
    job = MadeJob(2)
    for step in range(num_steps):
        slow = 10 if step == 0 else 1  # the first step is warm-up and counts for nothing
        for rank in range(2):
            at = step * STEP * 20
            a = {"step": step, "prism.layer": "a"}
            awaited = job.communicate(rank, at, at + 8, op=Op.ALL_GATHER, elements=16, **a)
            job.add(rank, UnitKind.WAIT, at, at + 8, awaits=awaited, **a)
            job.compute(rank, at + 8, at + 8 + 100 * slow, phase=FORWARD, **a)
            at += 8 + 100 * slow
            job.compute(rank, at, at + 30, phase=FORWARD, step=step)
            if rank == 1:
                job.compute(rank, at + 30, at + 530, phase=FORWARD, step=step, **{"prism.layer": "b"})
            job.compute(rank, at + 530, at + 730 + 20 * step, phase=BACKWARD, **a)
            job.step(rank, step, step * STEP * 20, at + 730 + 20 * step)
    return job


def test_layers_have_their_times_waits_and_bytes(tmp_path: Path) -> None:
    path = sharded_job().write(tmp_path / "a.prism")
    with TraceReader(path) as reader:
        costs = {cost.layer: cost for cost in layer_costs(reader, load_job(reader))}
    assert list(costs) == ["b", "a", None]  # the dearest first
    a, b, none = costs["a"], costs["b"], costs[None]
    assert (a.num_ranks, b.num_ranks, none.num_ranks) == (2, 1, 2)
    assert (a.forward_ns, a.backward_ns, a.other_ns, a.waiting_ns) == (100, 200 + (20 + 40) / 2, 0, 8)
    assert (a.communication_ns, a.communication_bytes) == (8, 16 * 4)
    assert (b.forward_ns, b.time_ns, b.communication_bytes) == (500, 500, 0)
    assert (none.forward_ns, none.backward_ns) == (30, 0)


def test_shares_add_up_to_what_ranks_compute_and_wait(tmp_path: Path) -> None:
    """Whatever ranks have a layer, and whether a rank has any: the shares are of all ranks."""
    job = sharded_job()
    for row in job.rows[0]:
        row.pop("prism.layer", None)
    analysis = analyze(job.write(tmp_path / "a.prism"), by="prism.layer")
    costs = {cost.layer: cost for cost in analysis.costs_by}
    assert {layer: cost.num_ranks for layer, cost in costs.items()} == {"a": 1, "b": 1, None: 2}
    total = 2 * analysis.breakdown.mean_step_ns  # of both ranks
    assert costs["b"].share == pytest.approx(500 / total) and costs["a"].share == pytest.approx(338 / total)
    parts = analysis.breakdown.mean_parts_ns  # nothing overlaps here
    held = parts["compute"] + parts["exposed_communication"] + parts["imbalance"] + parts["bubble"]
    assert sum(cost.share for cost in costs.values()) == pytest.approx(2 * held / total)
    assert analysis.to_dict()["by"]["costs"] == analysis.costs_by


def test_shares_of_many_values_add_up_in_the_text_too(tmp_path: Path) -> None:
    job = MadeJob(2)
    for rank in range(2):
        for number in range(20 if rank else 10):
            job.compute(rank, 50 * number, 50 * number + 50, step=0, microbatch=number)
        job.step(rank, 0, 0, 1000)
    text = analyze(job.write(tmp_path / "a.prism"), by="microbatch").format_table()
    lines = text[text.index("by microbatch") :].splitlines()[2:15]
    shares = [line.split("%")[0].split()[-1] for line in lines]
    assert lines[-1].strip().startswith("8 more")
    assert sum(map(float, shares)) == pytest.approx(75, abs=0.1)  # rank 0 is idle half of the time


def test_a_part_of_a_trace_and_traces_without_layers(tmp_path: Path) -> None:
    path = sharded_job(4).write(tmp_path / "a.prism")
    with TraceReader(path) as reader:
        job = load_job(reader, ranks=[1], steps=range(2, 4))
        costs = {cost.layer: cost for cost in layer_costs(reader, job)}
        assert (costs["a"].num_ranks, costs["a"].backward_ns) == (1, 260)  # of step 3: 2 is the first now
    plain = MadeJob(1)
    plain.compute(0, 0, 10, step=0)
    with TraceReader(plain.write(tmp_path / "b.prism")) as reader:
        assert layer_costs(reader, load_job(reader)) == () == expert_loads(reader)


def routed_job() -> MadeJob:
    """Four experts; what two ranks route adds up, microbatch by microbatch."""
    job = MadeJob(2)
    tokens = {0: [[4, 0, 0, 0], [1, 1, 1, 1]], 1: [[0, 4, 0, 0], [1, 1, 1, 1]]}
    for rank, routings in tokens.items():
        for microbatch, counts in enumerate(routings):
            at = 10 * microbatch
            job.compute(rank, at, at + 10, phase=FORWARD, step=0, microbatch=microbatch,
                        **{"prism.layer": "moe.0", "moe.tokens_per_expert": counts})  # fmt: skip
        job.compute(rank, 20, 30, phase=FORWARD, step=0, **{"moe.tokens_per_expert": [0, 0]})
        job.step(rank, 0, 0, 30)
    return job


def test_loads_of_experts(tmp_path: Path) -> None:
    path = routed_job().write(tmp_path / "a.prism")
    (load,) = expert_loads(path)
    assert (load.layer, load.tokens, load.num_ranks, load.num_routings) == ("moe.0", (6, 6, 2, 2), 2, 2)
    assert (load.imbalance, load.worst_imbalance) == ((2 + 1) / 2, 2)
    (alone,) = expert_loads(path, ranks=[0])
    assert (alone.tokens, alone.worst_imbalance) == ((5, 1, 1, 1), 4)


@pytest.mark.parametrize(("job", "lines"), [
    (sharded_job(), ["layer     ranks  forward ms", "b             1       0.001"]),
    (routed_job(), ["0: 37.5 %, 1: 37.5 %, 2: 12.5 %, 3: 12.5 %", "moe.0      2             2      1.500  2.000"]),
])  # fmt: skip
def test_analyze_shows_layers_and_experts(tmp_path: Path, job: MadeJob, lines: list[str]) -> None:
    analysis = analyze(job.write(tmp_path / "a.prism"))
    text = analysis.format_table()
    assert all(line in text for line in lines), text
    said = analysis.to_dict()
    assert said["layers"] == analysis.layers and said["experts"] == analysis.experts


def test_costs_by_another_column(tmp_path: Path) -> None:
    job = MadeJob(1)
    for step in range(2):
        for number in (0, 1, None):
            named = {} if number is None else {"microbatch": number}
            at = step * 1000 + 100 * (2 if number is None else number)
            job.compute(0, at, at + (30 if number else 50), phase=FORWARD, step=step, **named)
        job.step(0, step, step * 1000, step * 1000 + 400)
    path = job.write(tmp_path / "a.prism")
    costs = {cost.layer: cost.forward_ns for cost in analyze(path, by="microbatch").costs_by}
    assert costs == {"0": 50, "1": 30, None: 50}
    assert "no microbatch" in analyze(path, by="microbatch").format_table()
    costs = {cost.layer: cost.forward_ns for cost in analyze(path, by="phase").costs_by}
    assert "forward" in costs and sum(costs.values()) == costs["forward"] > 0
    assert "compute" in {cost.layer for cost in analyze(path, by="kind").costs_by}
    assert analyze(path).by is None and "by" not in analyze(path).to_dict()
    with pytest.raises(UsageError, match="no unit of a step has a name or one whole number"):
        analyze(path, by="prism.part")
    with pytest.raises(TraceUsageError, match="no column"):
        analyze(path, by="unknown")
