"""Bandwidth, pipeline, stragglers, balance, memory, variation and differences, against closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_jobs import MadeJob, pipeline_job

from prism_sdk.analysis import (
    Bandwidth,
    analyze,
    bandwidths,
    breakdown_of,
    bus_factor,
    explain,
    load_job,
    memory_of,
    moe_balance,
    pipeline_of,
    stragglers_of,
    variation_of,
)
from prism_sdk.analysis.job import group_titles
from prism_sdk.analysis.text import format_explanation
from prism_sdk.report import report_content
from prism_sdk.simulate import load, simulate, summarise
from prismtrace import DType, GraphKind, Op, Phase, ProcessGroup, TraceWriter, UnitKind


def one_collective(path: Path, op: Op, *, num_members: int, inputs: int, outputs: int, transfer: int) -> Bandwidth:
    job = MadeJob(num_members)
    for rank in range(num_members):
        job.communicate(rank, 10 * rank, 10 * (num_members - 1) + transfer, op=op, num_elements_in=inputs,
                        num_elements_out=outputs, wait=(10 * rank, 10 * (num_members - 1) + transfer))  # fmt: skip
    (found,) = bandwidths(load_job(job.write(path)))
    return found


# S and factors as nccl-tests prints them for float32: 2 MiB operations of 4 ranks in 1000 ns
@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "busbw"),
    [
        (Op.ALL_REDUCE, 524_288, 524_288, 2097.152 * 1.5),
        (Op.ALL_GATHER, 131_072, 524_288, 2097.152 * 0.75),
        (Op.REDUCE_SCATTER, 524_288, 131_072, 2097.152 * 0.75),
        (Op.ALL_TO_ALL, 524_288, 524_288, 2097.152 * 0.75),
        (Op.BROADCAST, 524_288, 524_288, 2097.152),
        (Op.REDUCE, 524_288, 524_288, 2097.152),
    ],
)
def test_bandwidths_as_nccl_tests(tmp_path: Path, op: Op, inputs: int, outputs: int, busbw: float) -> None:
    found = one_collective(tmp_path / "a.prism", op, num_members=4, inputs=inputs, outputs=outputs, transfer=1000)
    assert found.size_bytes == 2 << 20 and found.time_ns == 1000 and found.is_transfer
    assert found.algbw_gb_per_s == pytest.approx(2097.152) and found.busbw_gb_per_s == pytest.approx(busbw)


@given(st.sampled_from(list(Op)[1:]), st.integers(1, 4096))
def test_factors(op: Op, num_members: int) -> None:
    factor = bus_factor(op, num_members)
    assert 0 <= factor < 2 and (num_members > 1 or factor in (0.0, 1.0))
    if op is Op.ALL_REDUCE:
        assert factor == pytest.approx(2 * bus_factor(Op.REDUCE_SCATTER, num_members))


def test_without_arrivals_the_time_contains_waiting(tmp_path: Path) -> None:
    """One rank of two: when the other arrived is not known."""
    job = MadeJob(2)
    job.communicate(0, 0, 100, wait=(0, 100))
    (found,) = bandwidths(load_job(job.write(tmp_path / "a.prism")))
    assert found.time_ns == 100 and not found.is_transfer


@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3)]), st.integers(2, 5), st.integers(1, 3),
    st.integers(1, 50),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_bubbles_of_equal_stages_are_the_formula(
    tmp_path_factory: pytest.TempPathFactory, schedule: tuple[str, int], num_stages: int, rounds: int, forward: int
) -> None:
    name, num_chunks = schedule
    job = pipeline_job(num_stages, num_stages * rounds, forward=forward, backward=2 * forward, schedule=name,
                       num_chunks=num_chunks)  # fmt: skip
    found = pipeline_of(load_job(job.write(tmp_path_factory.getbasetemp() / "pipeline.prism")))
    assert found is not None and found.num_stages == num_stages and found.num_chunks == num_chunks
    assert found.expected_ratio == pytest.approx((num_stages - 1) / (num_chunks * num_stages * rounds))
    for stage in found.stages:
        assert stage.bubble_ratio == pytest.approx(found.expected_ratio)
        assert stage.busy_ns == 3 * forward * num_chunks * num_stages * rounds
    assert found.stage_imbalance == 1


def test_no_pipeline_no_figures(tmp_path: Path) -> None:
    job = MadeJob(2)
    for rank in (0, 1):
        job.compute(rank, 0, 10, microbatch=0, stage=0)
    assert pipeline_of(load_job(job.write(tmp_path / "a.prism"))) is None


def slow_rank_job(path: Path, delays: list[list[tuple[int, int, int]]], *, stages: list[int] | None = None) -> Path:
    """Steps of compute, a private transfer, a pause, an all_reduce; delays by step and rank: compute, network, host."""
    num_ranks = len(delays[0])
    job = MadeJob(num_ranks, {1: range(num_ranks), **{10 + rank: [rank] for rank in range(num_ranks)}})
    begin = 0
    for step, of_ranks in enumerate(delays):
        posts = []
        for rank, (compute, network, host) in enumerate(of_ranks):
            clock = begin + 1000 + compute
            stage = {"stage": stages[rank], "microbatch": 0} if stages else {}
            job.compute(rank, begin, clock, step=step, **stage)
            job.communicate(rank, clock, clock + 100 + network, group=10 + rank, step=step,
                            wait=(clock, clock + 100 + network))  # fmt: skip
            posts.append(clock + 100 + network + host)
            job.compute(rank, posts[-1], posts[-1], step=step)
        end = max(posts) + 50
        for rank, post in enumerate(posts):
            job.communicate(rank, post, end, step=step, wait=(post, end))
            job.step(rank, step, begin, end)
        begin = end
    return job.write(path)


@pytest.mark.parametrize(("which", "cause"), [(0, "compute"), (1, "network"), (2, "host")])
def test_the_cause_of_a_straggler(tmp_path: Path, which: int, cause: str) -> None:
    delay = tuple(300 if part == which else 0 for part in range(3))
    path = slow_rank_job(tmp_path / "a.prism", [[(0, 0, 0), delay, (0, 0, 0), (0, 0, 0)]] * 6)  # type: ignore[list-item]
    job = load_job(path)
    found = stragglers_of(job, breakdown_of(job, max_gap_ns=10))
    (slow,) = found.found
    assert (slow.rank, slow.cause, slow.num_last, slow.num_collectives) == (1, cause, 6, 6)
    assert slow.caused_wait_ns == 6 * 300 and slow.waited_ns == 0
    assert [rank.waited_ns for rank in found.ranks if rank.rank != 1] == [6 * 300] * 3


def test_a_different_rank_each_step_is_imbalance(tmp_path: Path) -> None:
    delays = [[(300 if rank == step % 4 else 0, 0, 0) for rank in range(4)] for step in range(9)]
    job = load_job(slow_rank_job(tmp_path / "a.prism", delays))
    found = stragglers_of(job, breakdown_of(job)).found
    assert {rank.rank for rank in found} == {0, 1, 2, 3}
    assert {rank.cause for rank in found} <= {"imbalance", "upstream"}


def test_a_slow_stage_is_imbalance(tmp_path: Path) -> None:
    delays = [[(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), (400, 0, 0), (400, 0, 0)]] * 4
    job = load_job(slow_rank_job(tmp_path / "a.prism", delays, stages=[0, 0, 1, 1, 2, 2]))
    found = stragglers_of(job, breakdown_of(job))
    assert [(rank.rank, rank.cause) for rank in found.found] == [(4, "imbalance"), (5, "imbalance")]
    assert found.found[0].stage_excess_ns == 400


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    job = load_job(slow_rank_job(tmp_path / "a.prism", [[(0, 0, 0)] * 4] * 4))
    assert stragglers_of(job, breakdown_of(job)).found == ()


def test_balance_of_experts(tmp_path: Path) -> None:
    path = tmp_path / "moe.prism"
    loads = {0: [[1, 1], [4, 0]], 1: [[1, 1], [0, 0]], 2: [[1, 1], [2, 0]]}
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=3) as writer:
        writer.add_group(ProcessGroup(group_id=1, name="experts", ranks=(0, 1, 2)))
        for rank, splits in loads.items():
            writer.add_units(rank, {
                "kind": [UnitKind.COLLECTIVE] * 2, "op": [Op.ALL_TO_ALL] * 2, "group_id": [1, 1], "seq": [0, 1],
                "start_ns": [0, 10], "end_ns": [5, 15], "dtype": [DType.FLOAT32] * 2, "splits_out": splits,
            })  # fmt: skip
    (found,) = moe_balance(path)
    assert found.num_operations == 2 and found.imbalance == pytest.approx((1 + 4 / 2) / 2)
    assert found.worst_imbalance == 2 and found.worst_seq == 1
    assert found.variation == pytest.approx((0 + np.std([4, 0, 2]) / 2) / 2)
    assert found.shares == pytest.approx((6 / 12, 2 / 12, 4 / 12))
    assert moe_balance(path, ranks=[0]) == ()


def test_memory_says_what_is_held(tmp_path: Path) -> None:
    """Three forwards in flight on top of 1000 bytes, 70 each; the peak is the first backward."""
    job = MadeJob(1)
    levels = [("F", 0, 1070), ("F", 1, 1140), ("F", 2, 1210), ("B", 0, 1300), ("B", 1, 1230), ("B", 2, 1160)]
    for index, (kind, microbatch, level) in enumerate(levels):
        phase = Phase.FORWARD if kind == "F" else Phase.BACKWARD
        job.compute(0, 10 * index, 10 * index + 10, phase=int(phase), microbatch=microbatch, stage=0,
                    memory_bytes=level, step=0)  # fmt: skip
    (found,) = memory_of(job.write(tmp_path / "a.prism"))
    assert (found.peak_bytes, found.peak_unit, found.peak_phase, found.peak_time_ns) == (1300, 3, "backward", 40)
    assert found.microbatches_held == ((0, 0), (1, 0), (2, 0)) and found.bytes_per_microbatch == 70
    assert found.high_water_bytes.tolist() == [level for _, _, level in levels]


def test_variation_within_and_between_runs(tmp_path: Path) -> None:
    paths = []
    for run, lengths in enumerate(([500, 100, 110, 90], [500, 120, 132, 108])):
        job, clock = MadeJob(1), 0
        for step, length in enumerate(lengths):
            job.compute(0, clock, clock + length, step=step)
            job.step(0, step, clock, clock + length)
            clock += length
        paths.append(job.write(tmp_path / f"{run}.prism"))
    found = variation_of(paths)
    assert [run.mean_ns for run in found.runs] == [100, 120] and found.spread == pytest.approx(20 / 110)
    assert found.step_to_step_variation == pytest.approx(np.std([100, 110, 90]) / 100)
    assert found.run_to_run_variation == pytest.approx(np.std([100, 120], ddof=1) / 110)
    first = found.runs[0]
    assert (first.min_ns, first.max_ns, first.num_steps) == (90, 110, 3)
    assert first.interval.low <= 100 <= first.interval.high and first.drift_per_step == pytest.approx(-0.05)


def _uneven_job(path: Path, *, step_ns: int = 100, tells_steps: bool = True) -> Path:
    """Rank 1 ends an uneven first step 30 ns after rank 0, which waits for it in the next; behind all is a barrier."""
    job = MadeJob(2)
    for rank, clock in enumerate((970, 1000)):
        begin = 0
        for step in range(3):
            columns = {"step": step} if tells_steps else {}
            end = 1000 + step_ns * step
            job.compute(rank, begin, clock if step == 0 else max(begin + 10, end - 20), **columns)
            if step:
                job.communicate(rank, end - 20, end - 10, wait=(end - 20, end - 10), **columns)
                job.compute(rank, end - 10, end, phase=int(Phase.OPTIMIZER if tells_steps else Phase.OTHER), **columns)
            begin = clock if step == 0 else end
        columns = {"step": 3} if tells_steps else {}
        job.communicate(rank, begin, begin + 900, op=Op.BARRIER, wait=(begin, begin + 900), **columns)
    return job.write(path)


def test_steps_of_the_job_are_those_of_its_simulation(tmp_path: Path) -> None:
    """Rank 0 waits in step 1 for what rank 1 was late in step 0: no step of the job is longer by that."""
    paths = [_uneven_job(tmp_path / f"{step_ns}.prism", step_ns=step_ns) for step_ns in (100, 110)]
    (run,) = variation_of(paths[:1]).runs
    assert (run.num_steps, run.min_ns, run.max_ns) == (2, 100, 100)
    report = summarise(simulate(load(paths[0])))
    assert report.step_time_ns == report.recorded_step_ns == run.mean_ns
    found = explain(*map(load_job, paths))
    assert (found.first_job_ns, found.second_job_ns) == (100, 110) and found.is_significant
    assert found.sentence.startswith("the second is 10.00 % slower: ")
    assert sum(part.difference_ns for part in found.parts) == pytest.approx(found.difference_ns, abs=1e-6)
    assert "step of the job" in format_explanation(found)


@pytest.mark.parametrize("tells_steps", [False, True])
def test_a_trace_without_optimizer_steps_says_so(tmp_path: Path, tells_steps: bool) -> None:
    path = _uneven_job(tmp_path / "a.prism", tells_steps=tells_steps)
    notes = [analyze(path).notes, summarise(simulate(load(path))).notes, report_content(path)["notes"]]
    told = [any(note.startswith("no optimizer step was seen") for note in mine) for mine in notes]
    assert told == [not tells_steps] * 3
    if not tells_steps:
        assert [(run.num_steps, run.mean_ns) for run in variation_of([path]).runs] == [(1, 2100)]


@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=20, deadline=None)
def test_a_difference_is_the_sum_of_its_parts(
    tmp_path_factory: pytest.TempPathFactory, compute: int, network: int, host: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    jobs = [load_job(slow_rank_job(folder / f"{i}.prism", [[delay, (0, 0, 0)]] * 3))
            for i, delay in enumerate([(0, 0, 0), (compute, network, host)])]  # fmt: skip
    found = explain(*jobs)
    assert sum(part.difference_ns for part in found.parts) == pytest.approx(found.difference_ns, abs=1e-6)
    assert found.difference_ns == pytest.approx(compute + network + host)
    assert found.is_significant is (compute + network + host > 0)
    if network > 2 * (compute + host):
        assert "exposed communication" in found.sentence or "imbalance" in found.sentence
    by_name = {part.name: part.difference_ns for part in found.parts}
    assert by_name["compute"] == pytest.approx(compute / 2)
    assert by_name["exposed_communication"] == pytest.approx(network / 2)


def test_runs_without_a_common_rank(tmp_path: Path) -> None:
    one, other = MadeJob(2), MadeJob(2)
    one.compute(0, 0, 10)
    other.compute(1, 0, 10)
    jobs = [load_job(job.write(tmp_path / f"{i}.prism")) for i, job in enumerate((one, other))]
    with pytest.raises(ValueError, match="no rank in common"):
        explain(*jobs)


def test_groups_are_called_by_what_they_are_for() -> None:
    named = ((1, "0", "default_pg"), (2, "4", ""), (3, "5", ""), (4, "6", ""), (5, "7", "cp"))
    groups = {number: ProcessGroup(number, name, description, "gloo", (0, 1)) for number, name, description in named}
    purposes = {"group.2.purpose": "dp", "group.3.purpose": "tp", "group.5.purpose": "other", "job.argv": "x"}
    assert group_titles(groups, purposes) == {1: "default_pg", 2: "dp", 3: "tp", 4: "6", 5: "cp"}
    assert group_titles(groups, {**purposes, "group.4.purpose": "dp"}) == {
        1: "default_pg", 2: "dp 4", 3: "tp", 4: "dp 6", 5: "cp",
    }  # fmt: skip
