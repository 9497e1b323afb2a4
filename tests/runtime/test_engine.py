"""When boundary operations complete: the engine against the definition, on random jobs."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prism_sdk.errors import RunError
from prism_sdk.graph.contract import contract
from prism_sdk.graph.plan import START, BoundaryPlan, evaluate
from prism_sdk.graph.timing import Timing
from prism_sdk.runtime.engine import BoundaryEngine, PostBoard
from tests.graph.jobs import Program, random_program

SEEDS = st.integers(0, 2**32)


def plan_of(seed: int, *, num_sandbox: int, program: Program | None = None) -> BoundaryPlan:
    graph = (program or random_program(seed)).graph()
    assume(len(graph.ranks) >= num_sandbox)
    sandbox = sorted(random.Random(seed).sample(graph.ranks, num_sandbox))
    return contract(graph, sandbox_ranks=sandbox, timing=Timing.from_graph(graph))


@pytest.fixture
def board_fd() -> Iterator[int]:
    fd = os.memfd_create("board", 0)
    os.ftruncate(fd, 1 << 32)
    yield fd
    os.close(fd)


@settings(max_examples=200, deadline=None)
@given(SEEDS, SEEDS)
def test_one_rank_alone(seed: int, other: int) -> None:
    plan = plan_of(seed, num_sandbox=1)
    rng = random.Random(other)
    origin = rng.randint(1, 10**6)
    posts = [origin + rng.randint(0, 5000) for _ in range(len(plan))]
    (rank,) = plan.sandbox_ranks
    engine = BoundaryEngine(plan, rank, None)
    engine.start(origin)
    handles = [engine.post(plan.stream(j), int(plan.seq[j]), posts[j]) for j in range(len(plan))]
    assert handles == [(j, 0) for j in range(len(plan))]
    arrivals, completions = evaluate(plan, posts, origin_ns=origin)
    for j in rng.sample(range(len(plan)), len(plan)):  # asked in any order
        due = completions[j][rank]
        assert not engine.is_complete(handles[j], due - 1)
        assert engine.is_complete(handles[j], due)
        assert engine.completion(handles[j]) == due >= arrivals[j]


@settings(max_examples=50, deadline=None)
@given(SEEDS, SEEDS)
def test_nothing_is_looked_up_any_more_at_an_arrival_that_was_prepared(seed: int, other: int) -> None:
    """Also not of operations that wait for nobody: what that takes, their release is late by."""
    plan = plan_of(seed, num_sandbox=1)
    rng = random.Random(other)
    posts = [10**6 + rng.randint(0, 5000) for _ in range(len(plan))]
    (rank,) = plan.sandbox_ranks
    engine = BoundaryEngine(plan, rank, None)
    engine.start_at(10**6)
    for j in range(len(plan)):
        engine.prepare((j, 0))
        engine.post_at((j, 0), posts[j])
    arrivals, completions = evaluate(plan, posts, origin_ns=10**6)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("terms", "members"):
            patch.delattr(BoundaryPlan, name)
        for j in range(len(plan)):
            assert engine.arrival((j, 0)) == arrivals[j]
            assert engine.transfer((j, 0)) == completions[j][rank] - arrivals[j]


@settings(max_examples=100, deadline=None)
@given(SEEDS, SEEDS)
def test_several_ranks_agree_through_the_board(seed: int, other: int) -> None:
    plan = plan_of(seed, num_sandbox=2)
    rng = random.Random(other)
    fd = os.memfd_create("board", 0)
    try:
        os.ftruncate(fd, 1 << 32)
        engines = {rank: BoundaryEngine(plan, rank, PostBoard(fd, 2)) for rank in plan.sandbox_ranks}
        origin = rng.randint(1, 10**6)
        for position, engine in enumerate(engines.values()):  # only the first one's clock counts
            engine.start(origin + 777 * position)
        posts = []
        for j in range(len(plan)):
            own = {rank: origin + rng.randint(0, 5000) for rank, _ in plan.members(j)}
            posts.append(max(own.values()))
            for rank, at in own.items():
                engines[rank].post(plan.stream(j), int(plan.seq[j]), at)
        _, completions = evaluate(plan, posts, origin_ns=origin)
        for j in rng.sample(range(len(plan)), len(plan)):
            for rank, due in completions[j].items():
                assert engines[rank].completion((j, 0)) == due
    finally:
        os.close(fd)


def periodic_job(num_steps: int) -> Program:
    """Three ranks; every step the same: two collectives, a message each way, and a final barrier behind the steps."""
    program = Program(3, {1: (0, 1, 2), 2: (1, 2)})
    for step in range(num_steps):
        program.step = step
        for rank in range(3):
            program.compute(rank, 100 + 10 * rank)
        for rank, unit in program.collective(1, lambda rank: 7 + rank).items():
            program.wait(rank, unit)
        program.send(1, 1, 0, 0, 3)
        program.compute(2, 50)
        program.wait(0, program.recv(1, 1, 0, 0, 5))
        program.compute(0, 20)
        program.send(1, 0, 2, 0, 3)
        program.wait(2, program.recv(1, 0, 2, 0, 5))
        for rank, unit in program.collective(2, lambda _: 11).items():
            program.wait(rank, unit)
    program.step = num_steps
    for rank, unit in program.collective(1, lambda rank: 2).items():
        program.wait(rank, unit)
    return program


@pytest.mark.parametrize("sandbox", [(0,), (1,), (2,), (0, 2)])
def test_beyond_the_recorded_steps_as_if_they_had_been_recorded(sandbox: tuple[int, ...]) -> None:
    """A job that is the same every step: what a short recording says of later steps is what a long one says."""
    short, long = (periodic_job(n).graph() for n in (3, 9))
    plans = [
        contract(graph, sandbox_ranks=sandbox, timing=Timing.from_graph(graph), last_step=last)
        for graph, last in ((short, 2), (long, 8))
    ]
    found = []
    for plan, num_recorded in zip(plans, (3, 9), strict=True):
        engine = BoundaryEngine(plan, sandbox[0], None)
        engine.start(10**6)
        recorded = plan.last_step
        of_step = {s: [j for j in range(len(plan)) if plan.step[j] == s] for s in range(recorded + 1)}
        completions = []
        at = 10**6
        for step in range(9):
            shift = max(0, step - recorded)
            for j in of_step[min(step, recorded)]:
                if sandbox[0] not in dict(plan.members(j)):
                    continue
                at += 40  # faster than the virtual ranks at times, slower at others
                handle = engine.post(plan.stream(j), int(plan.seq[j]), at, shift=shift)
                assert handle == (j, shift)
                at = max(at, engine.completion(handle))
                completions.append(at - 10**6)
        found.append(completions)
        assert num_recorded == recorded + 1
    assert len(found[0]) == len(found[1])
    assert found[0] == found[1]


@settings(max_examples=100, deadline=None)
@given(SEEDS, SEEDS)
def test_beyond_the_recorded_steps_on_random_jobs(seed: int, other: int) -> None:
    plan = plan_of(seed, num_sandbox=1)
    rng = random.Random(other)
    (rank,) = plan.sandbox_ranks
    last = [j for j in range(len(plan)) if plan.step[j] == plan.last_step]
    engine = BoundaryEngine(plan, rank, None)
    engine.start(500)
    posts = {(j, 0): 500 + rng.randint(0, 5000) for j in range(len(plan))}
    posts |= {(j, shift): 500 + 4000 * shift + rng.randint(0, 5000) for shift in (1, 2, 3) for j in last}
    for (j, shift), at in posts.items():
        assert engine.post(plan.stream(j), int(plan.seq[j]), at, shift=shift) == (j, shift)

    @cache
    def arrival(j: int, shift: int) -> int:
        bases = [(500 if s == START else arrival(s, moved)) + w for s, moved, w in plan.terms(j, shift=shift)]
        return max([posts[j, shift], *bases])

    for j, shift in rng.sample(sorted(posts), len(posts)):
        assert engine.completion((j, shift)) == arrival(j, shift) + dict(plan.members(j))[rank]


def test_asking_early_does_not_settle_what_is_not_posted() -> None:
    """A program may poll an operation before it posts what that operation depends on."""
    program = Program(2, {1: (0, 1)})
    program.send(1, 0, 1, 0, 0)
    program.wait(1, program.recv(1, 0, 1, 0, 10))
    program.send(1, 1, 0, 0, 0)
    program.wait(0, program.recv(1, 1, 0, 0, 10))
    graph = program.graph()
    plan = contract(graph, sandbox_ranks=(0,), timing=Timing.from_graph(graph))
    send, recv = (next(j for j in range(len(plan)) if plan.kind[j] == kind) for kind in (3, 4))
    engine = BoundaryEngine(plan, 0, None)
    engine.start(1000)
    waiting = engine.post(plan.stream(recv), 0, 1001)
    assert not engine.is_complete(waiting, 10**9)
    engine.post(plan.stream(send), 0, 5000)
    assert engine.completion(waiting) == 5020
    assert not engine.is_complete(waiting, 5019)


def test_waits_for_the_post_of_another_sandbox_rank(board_fd: int) -> None:
    program = Program(3, {1: (0, 1, 2)})
    program.collective(1, lambda rank: 10)
    graph = program.graph()
    plan = contract(graph, sandbox_ranks=(0, 1), timing=Timing.from_graph(graph))
    first, second = (BoundaryEngine(plan, rank, PostBoard(board_fd, 2)) for rank in (0, 1))
    first.start(100)
    second.start(999)
    handle = first.post(plan.stream(0), 0, 200)
    assert not first.is_complete(handle, 10**9)

    def later() -> None:
        time.sleep(0.05)
        second.post(plan.stream(0), 0, 300)

    thread = threading.Thread(target=later)
    thread.start()
    try:
        assert first.completion(handle) == 310
    finally:
        thread.join()


def test_a_rank_that_is_no_member_is_told_so() -> None:
    program = Program(3, {1: (0, 2)})
    program.collective(1, lambda rank: 10)
    graph = program.graph()
    plan = contract(graph, sandbox_ranks=(0, 1), timing=Timing.from_graph(graph))
    fd = os.memfd_create("board", 0)
    try:
        os.ftruncate(fd, 1 << 20)
        engines = [BoundaryEngine(plan, rank, PostBoard(fd, 2)) for rank in (0, 1)]
        for engine in engines:
            engine.start(1)
        handle = engines[0].post(plan.stream(0), 0, 5)
        with pytest.raises(RunError, match="rank 1 is no member"):
            engines[1].completion(handle)
    finally:
        os.close(fd)
