from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.errors import OutputError, UnreadableError
from prism_sdk.graph.contract import contract
from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.plan import START, BoundaryPlan, Stream, evaluate
from prism_sdk.graph.timing import Timing, schedule
from prismtrace import UnitKind
from tests.graph.jobs import Program, oracle, random_program

sys.setrecursionlimit(20_000)


def _choose_sandbox(graph: JobGraph, seed: int) -> list[int]:
    rng = random.Random(seed)
    return sorted(rng.sample(graph.ranks, rng.randint(1, len(graph.ranks))))


def _disturb(graph: JobGraph, timing: Timing, sandbox: list[int], seed: int) -> Timing:
    """Other compute times and gaps in the sandbox: what an emulation is for."""
    rng = np.random.default_rng(seed)
    inside = np.isin(graph.rank_of_row, sandbox)
    factor = rng.choice([0.0, 0.3, 1.0, 1.7, 5.0], len(graph))
    return replace(
        timing,
        duration_ns=np.where(inside, (timing.duration_ns * factor).astype(np.int64), timing.duration_ns),
        gap_ns=np.where(inside, (timing.gap_ns * factor[::-1]).astype(np.int64), timing.gap_ns),
    )


def _posts(graph: JobGraph, plan: BoundaryPlan, timing: Timing) -> list[int]:
    timeline = schedule(graph, timing=timing)
    c = graph.columns
    posts: dict[tuple[Stream, int], int] = {}
    for row in range(len(graph)):
        rank, kind, peer = int(graph.rank_of_row[row]), int(c["kind"][row]), int(c["peer"][row])
        if rank not in plan.sandbox_ranks or kind not in (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV):
            continue
        stream = Stream(kind, int(c["group_id"][row]))
        if kind != UnitKind.COLLECTIVE:
            ends = (rank, peer) if kind == UnitKind.SEND else (peer, rank)
            stream = Stream(kind, int(c["group_id"][row]), *ends, int(c["tag"][row]))
        key = (stream, int(c["seq"][row]))
        posts[key] = max(posts.get(key, 0), int(timeline.start_ns[row]))
    return [posts[plan.stream(j), int(plan.seq[j])] for j in range(len(plan))]


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.booleans(), st.booleans(), st.booleans())
def test_sandbox_alone_equals_the_whole_job(
    seed: int, choice: int, prune: bool, disturb: bool, with_streams: bool
) -> None:
    """The property that emulation rests on, to the nanosecond, also where the sandbox computes at another speed."""
    graph = random_program(seed, with_streams=with_streams).graph()
    sandbox = _choose_sandbox(graph, choice)
    timing = Timing.from_graph(graph)
    plan = contract(graph, sandbox_ranks=sandbox, prune=prune)
    if disturb:
        timing = _disturb(graph, timing, sandbox, choice)
    whole = schedule(graph, timing=timing)
    alone = oracle(graph, timing, plan=plan, sandbox=sandbox)
    assert alone == {row: (int(whole.start_ns[row]), int(whole.end_ns[row])) for row in alone}
    assert len(alone) == sum(graph.rows(rank).stop - graph.rows(rank).start for rank in sandbox)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_pruning_changes_no_result_and_keeps_no_more_terms(seed: int, choice: int) -> None:
    graph = random_program(seed, num_steps=4).graph()
    sandbox = _choose_sandbox(graph, choice)
    pruned, full = (contract(graph, sandbox_ranks=sandbox, prune=prune) for prune in (True, False))
    np.testing.assert_array_equal(pruned.seq, full.seq)
    assert len(pruned.term_source) <= len(full.term_source)
    for shift in range(4):
        posts = _posts(graph, full, _disturb(graph, Timing.from_graph(graph), sandbox, choice + shift))
        assert evaluate(pruned, posts) == evaluate(full, posts)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_plan_is_causal_and_monotone(seed: int, choice: int) -> None:
    graph = random_program(seed).graph()
    plan = contract(graph, sandbox_ranks=_choose_sandbox(graph, choice))
    for j in range(len(plan)):
        assert all(START <= source < j for source, _, _ in plan.terms(j))
        assert bool(plan.terms(j)) == (plan.kind[j] != UnitKind.SEND)
        assert plan.find(plan.stream(j), seq=int(plan.seq[j])) == (j, 0)
    rng = random.Random(choice)
    posts = _posts(graph, plan, Timing.from_graph(graph))
    later = [post + rng.choice([0, 0, 9]) for post in posts]
    assert all(a <= b for a, b in zip(evaluate(plan, posts)[0], evaluate(plan, later)[0], strict=True))


def test_ring_of_data_parallel_ranks_needs_one_or_two_terms() -> None:
    p = Program(16, {1: tuple(range(16)), **{2 + i: (2 * i, 2 * i + 1) for i in range(8)}})
    for step in range(30):
        p.step = step
        for layer in range(4):
            for rank in range(16):
                p.compute(rank, 100 + rank)
            for group in [*range(2, 10), 1] if layer % 2 else range(2, 10):
                for rank, unit in p.collective(group, lambda _: 7).items():
                    p.wait(rank, unit)
    plan = contract(p.graph(), sandbox_ranks=[0])
    assert len(plan) == 30 * 6
    assert np.diff(plan.term_offsets).max() <= 2


def _pipeline(num_steps: int, *, microbatches: int = 6) -> Program:
    """Three stages, all forwards then all backwards, then an all-reduce; the middle stage is the slow one."""
    p = Program(3, {1: (0, 1, 2)})
    for step in range(num_steps):
        p.step = step
        for stages in ([0, 1, 2], [2, 1, 0]):
            for _ in range(microbatches):
                for i, stage in enumerate(stages):
                    if i:
                        p.wait(stage, p.recv(1, stages[i - 1], stage, 0, 3), wake=1)
                    p.compute(stage, [10, 25, 12][stage], gap=2)
                    if i < 2:
                        p.send(1, stage, stages[i + 1], 0, 1)
        for rank, unit in p.collective(1, lambda _: 9).items():
            p.wait(rank, unit, wake=2)
    return p


@pytest.mark.parametrize("sandbox", [[0], [1], [2], [0, 2]])
def test_terms_of_a_pipeline_stay_bounded_over_steps(sandbox: list[int]) -> None:
    graph = _pipeline(40).graph()
    plan = contract(graph, sandbox_ranks=sandbox)
    assert np.diff(plan.term_offsets).max() <= 14
    posts = _posts(graph, plan, Timing.from_graph(graph))
    row = graph.rows(sandbox[0]).stop - 1
    assert evaluate(plan, posts)[1][-1][sandbox[0]] + 2 == schedule(graph).end_ns[row]


@pytest.mark.parametrize("sandbox", [[0], [1], [2], [0, 1]])
def test_a_periodic_job_goes_on_exactly_as_if_more_steps_had_been_recorded(sandbox: list[int]) -> None:
    _goes_on_as(_pipeline(4).graph(), _pipeline(9).graph(), sandbox=sandbox)


def _buckets(num_steps: int) -> Program:
    """Data parallel: the first two steps reduce in other buckets, and the second one begins with a broadcast."""
    p = Program(2, {1: (0, 1)})
    for step in range(num_steps):
        p.step = step
        posted = []
        if step == 1:
            posted.append(p.collective(1, lambda _: 1))
        for rank in (0, 1):
            p.compute(rank, 52)
        for _ in range([2, 5, 3][min(step, 2)]):
            for rank in (0, 1):
                p.compute(rank, [5, 6][rank])
            posted.append(p.collective(1, lambda _: 4))
        for rank in (0, 1):
            p.compute(rank, 9)  # hides the last reduction: no rank waits, and sources are of all steps before
        for one in posted:
            for rank, unit in one.items():
                p.wait(rank, unit)
    return p


@pytest.mark.parametrize("sandbox", [[0], [1]])
def test_steps_that_were_unlike_the_last_one_say_nothing_of_later_ones(sandbox: list[int]) -> None:
    _goes_on_as(_buckets(4).graph(), _buckets(9).graph(), sandbox=sandbox)


def _logging(num_steps: int, *, slow: int) -> Program:
    """Data parallel: rank `slow` is last at the first reduction, the other one at the second; step 4 logs something."""
    p = Program(2, {1: (0, 1)})
    for step in range(num_steps):
        p.step = step
        for least, most in ((20, 50), (5, 40)):
            for rank in (0, 1):
                p.compute(rank, most if rank == slow else least)
            slow = 1 - slow
            for _ in range(2 if (step, most) == (4, 40) else 1):
                for rank, unit in p.collective(1, lambda _: 7).items():
                    p.wait(rank, unit)
    return p


@pytest.mark.parametrize("sandbox", [0, 1])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_step_unlike_the_last_one_just_before_it_says_nothing_of_later_ones(sandbox: int, slow: int) -> None:
    _goes_on_as(_logging(6, slow=slow).graph(), _logging(11, slow=slow).graph(), sandbox=[sandbox])


def _in_turns(num_steps: int, *, num_kinds: int) -> Program:
    """Data parallel, every other rank last in turns: one step of `num_kinds` is longer, and evaluates."""
    p = Program(3, {1: (0, 1, 2), 2: (1, 2)})
    for step in range(num_steps):
        p.step = step
        place = step % num_kinds
        if place == num_kinds - 1:
            for rank in (0, 1, 2):
                p.compute(rank, 300 - 90 * rank)
            for rank, unit in p.collective(1, lambda _: 31).items():
                p.wait(rank, unit)
        for _ in range(1 + place % 2):
            for rank in (0, 1, 2):
                p.compute(rank, 20 + 17 * (rank + place) % 50)
            for group in (1, 2):
                for rank, unit in p.collective(group, lambda rank: 7 + rank).items():
                    p.wait(rank, unit)
    return p


@pytest.mark.parametrize("num_kinds", [2, 3, 5])
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("sandbox", [[0], [1], [0, 2]])
def test_steps_of_several_kinds_in_turns(num_kinds: int, more: int, sandbox: list[int]) -> None:
    few, many = (_in_turns(num, num_kinds=num_kinds).graph() for num in (3 * num_kinds + more, 8 * num_kinds))
    _goes_on_as(few, many, sandbox=sandbox, steps_per_round=num_kinds)


@pytest.mark.parametrize("turns", [1, 2])
def test_clocks_of_ranks_that_wait_for_nobody_go_on_in_turns(turns: int) -> None:
    def program(num_steps: int) -> Program:
        p = Program(2, {1: (0, 1)})
        for step in range(num_steps):
            p.step = step
            p.compute(1, [50, 90][step % turns])
            p.send(1, 1, 0, 0, 3)
            p.wait(0, p.recv(1, 1, 0, 0, 3))
        return p

    _goes_on_as(program(6).graph(), program(13).graph(), sandbox=[0], steps_per_round=turns)


def _goes_on_as(few: JobGraph, many: JobGraph, *, sandbox: list[int], steps_per_round: int = 1) -> None:
    """The plan of a few steps must give the times of many, with the sandbox as it is and slower."""
    short = contract(few, sandbox_ranks=sandbox, steps_per_round=steps_per_round)
    plan = contract(many, sandbox_ranks=sandbox)
    for factor in (1, 2):
        timing = Timing.from_graph(many)
        inside = np.isin(many.rank_of_row, sandbox)
        timing = replace(timing, duration_ns=np.where(inside, timing.duration_ns * factor, timing.duration_ns))
        posts = _posts(many, plan, timing)
        expected, _ = evaluate(plan, posts)
        arrivals: dict[tuple[int, int], int] = {}
        for j in range(len(plan)):
            index, shift = short.find(plan.stream(j), seq=int(plan.seq[j]))
            assert int(short.step[index]) + shift * steps_per_round == plan.step[j]
            at = posts[j]
            for source, moved, weight in short.terms(index, shift=shift):
                at = max(at, (0 if source == START else arrivals[source, moved]) + weight)
            arrivals[index, shift] = at
            assert at == expected[j]


def test_find_names_what_the_job_did_not_do() -> None:
    p = _pipeline(2)
    p.step = 2
    p.compute(0, 1)
    plan = contract(p.graph(), sandbox_ranks=[0])
    with pytest.raises(GraphError, match="group 0x5 has no boundary operation"):
        plan.find(Stream(int(UnitKind.COLLECTIVE), 5), seq=0)
    assert plan.find(Stream(int(UnitKind.COLLECTIVE), 1), seq=5)[1] == 4
    with pytest.raises(GraphError, match="only operations of the last recorded step"):
        plan.terms(0, shift=1)
    one = Program(2, {1: (0, 1), 2: (0, 1)})
    one.collective(2, lambda _: 1)
    one.step = 1
    one.collective(1, lambda _: 1)
    with pytest.raises(GraphError, match="none in the last recorded step"):
        contract(one.graph(), sandbox_ranks=[0]).find(Stream(int(UnitKind.COLLECTIVE), 2), seq=1)


def test_sandbox_must_be_ranks_of_the_graph() -> None:
    graph = _pipeline(1).graph()
    for sandbox in ([], [7]):
        with pytest.raises(GraphError, match="must name ranks"):
            contract(graph, sandbox_ranks=sandbox)
    assert len(contract(graph, sandbox_ranks=[0, 1, 2])) == 0


def test_saved_plan_comes_back_mapped(tmp_path: Path) -> None:
    for sandbox in ([0], [0, 1, 2]):
        plan = contract(_pipeline(3).graph(), sandbox_ranks=sandbox)
        path = tmp_path / "plan"
        plan.save(path)
        again = BoundaryPlan.load(path)
        assert (again.world_size, again.sandbox_ranks, again.period_ns) == (3, tuple(sandbox), plan.period_ns)
        for name, value in vars(plan).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(again, name), value)
                assert getattr(again, name).dtype == value.dtype and not getattr(again, name).flags.writeable
        assert list(tmp_path.iterdir()) == [path]


def test_damaged_plans_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    contract(_pipeline(1).graph(), sandbox_ranks=[0]).save(path)
    whole = path.read_bytes()
    for size in [0, 4, 12, 40, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(UnreadableError):
            BoundaryPlan.load(path)
    with pytest.raises(UnreadableError):
        BoundaryPlan.load(tmp_path / "missing")
    with pytest.raises(OutputError):
        contract(_pipeline(1).graph(), sandbox_ranks=[0]).save(tmp_path / "no" / "folder")
