"""Held streams are released when the boundary engine says so: the releaser, with a thread that plays the GPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.graph.contract import contract
from prism_sdk.graph.plan import BoundaryPlan, evaluate
from prism_sdk.graph.timing import Timing
from prism_sdk.runtime.engine import BoundaryEngine
from prism_sdk.runtime.oncuda import holdtable as fields
from prism_sdk.runtime.oncuda.holdtable import NUM_SLOTS, HoldTable, create_table
from prism_sdk.runtime.oncuda.releaser import MAX_LEAD_NS, Releaser
from tests.graph.jobs import Program, random_program

pytestmark = pytest.mark.timeout(60)


def plan_of(seed: int) -> BoundaryPlan:
    graph = random_program(seed).graph()
    sandbox = random.Random(seed).sample(graph.ranks, 1)
    return contract(graph, sandbox_ranks=sandbox, timing=Timing.from_graph(graph))


class Shared:
    """A table, and both ends of it."""

    def __init__(self) -> None:
        self.fd = create_table()
        self.rank, self.other = HoldTable(self.fd), HoldTable(self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def arrive(self, number: int) -> None:
        self.rank.words[self.rank.word(number, fields.ARRIVED)] = self.rank.ticket(number)

    def is_released(self, number: int) -> bool:
        return self.rank.words[self.rank.word(number, fields.RELEASE)] == self.rank.ticket(number)

    def pass_(self, number: int) -> None:
        self.rank.words[self.rank.word(number, fields.DONE)] = self.rank.ticket(number)


@pytest.fixture
def shared() -> Iterator[Shared]:
    with closing(Shared()) as both:
        yield both


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_every_release_is_due_by_the_definition(seed: int, other: int) -> None:
    """Whatever the mix of posts by the host and by the GPU, and however late the GPU is behind the host."""
    plan = plan_of(seed)
    rng = random.Random(other)
    (rank,) = plan.sandbox_ranks
    now = origin = 1_000
    posts = []
    for _ in range(len(plan)):
        now += rng.randint(0, 5_000)
        posts.append(now)
    on_host = [rng.random() < 0.3 for _ in posts]
    _, completions = evaluate(plan, posts, origin_ns=origin)
    with closing(Shared()) as shared:
        shared.rank.origin_ns = origin
        clock = 0
        releaser = Releaser(shared.other, BoundaryEngine(plan, rank, None), clock=lambda: clock, lead_ns=0)
        for index, posted in enumerate(posts):
            kind = fields.HOST_POST if on_host[index] else fields.HELD
            assert shared.rank.append(kind, (index, 0), posted_ns=posted if on_host[index] else 0) == index
            if rng.random() < 0.2:
                releaser.look()
        for index, posted in enumerate(posts):  # one stream arrives at all of them, in order
            clock = posted
            if not on_host[index]:
                shared.arrive(index)
            releaser.look()
        held = sorted((i for i, host in enumerate(on_host) if not host), key=lambda i: completions[i][rank])
        for index in held:
            due = completions[index][rank]
            assert shared.is_released(index) == (due <= clock)
            if due > clock:
                clock = due - 1
                releaser.look()
                assert not shared.is_released(index)
                clock = due
                releaser.look()
            assert shared.is_released(index)
            assert shared.rank.longs[shared.rank.long(index, fields.DUE)] == due
            shared.pass_(index)
            releaser.look()
            assert shared.rank.done_at(index) == clock
        assert not releaser.num_open
        assert shared.rank.taken == len(posts)


def test_a_slot_is_used_again_only_when_its_operation_is_done(shared: Shared) -> None:
    table = shared.rank
    for number in range(NUM_SLOTS):
        assert table.is_free(number)
        table.append(fields.HELD if number == 1 else fields.HOST_POST, (number, 0))
    assert not table.is_free(NUM_SLOTS)  # nobody has read it
    table.taken = NUM_SLOTS
    assert table.is_free(NUM_SLOTS)
    table.append(fields.HELD, (7, 3))
    assert not table.is_free(NUM_SLOTS + 1)
    table.longs[table.long(1, fields.DONE_AT)] = 5
    assert table.is_free(NUM_SLOTS + 1)
    assert not table.is_done(NUM_SLOTS)
    shared.pass_(0)  # the mark of who had the slot before
    assert not table.is_done(NUM_SLOTS)


def test_what_is_held_is_let_go_when_the_rank_gives_up(shared: Shared) -> None:
    for number in range(5):
        shared.rank.append(fields.HELD, (number, 0))
    shared.rank.abandon()
    assert all(map(shared.is_released, range(5)))


@pytest.mark.parametrize(("took_ns", "lead_ns"), [(9_000, 9_000), (100_000, MAX_LEAD_NS)])
def test_the_lead_is_learnt_from_releases_that_nothing_held_up(shared: Shared, took_ns: int, lead_ns: int) -> None:
    plan = plan_of(3)
    clock = shared.rank.origin_ns = 1
    releaser = Releaser(shared.other, BoundaryEngine(plan, plan.sandbox_ranks[0], None), clock=lambda: clock)
    for number in range(30):
        shared.rank.append(fields.HELD, (0, 0))
        shared.arrive(number)
        releaser.look()
        while not shared.is_released(number):
            clock += 1_000
            releaser.look()
        clock += 10**6 if number % 3 == 0 else took_ns
        shared.pass_(number)
        releaser.look()
    assert releaser.lead_ns() == lead_ns


def test_the_process_releases_in_time(tmp_path: Path, shared: Shared) -> None:
    """A thread plays the GPU: it passes an operation 2 us or more after it sees the release."""
    plan = plan_of(11)
    plan.save(tmp_path / "plan")
    (rank,) = plan.sandbox_ranks
    num = min(len(plan), 40)
    shared.rank.origin_ns = time.monotonic_ns()
    process = subprocess.Popen(
        [sys.executable, "-m", "prism_sdk.runtime.oncuda.releaser", str(os.getpid()), str(shared.fd),
         str(tmp_path / "plan"), str(rank), "-1", ""], pass_fds=[shared.fd],
    )  # fmt: skip
    try:
        until = time.monotonic() + 30
        while not shared.rank.is_ready:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        posted: list[int] = []

        def gpu() -> None:
            for number in range(num):
                time.sleep(0.002)
                posted.append(time.monotonic_ns())
                shared.arrive(number)
                while not shared.is_released(number):
                    time.sleep(0.000002)
                shared.pass_(number)

        for number in range(num):
            shared.rank.append(fields.HELD, (number, 0))
        thread = threading.Thread(target=gpu)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        while not shared.rank.done_at(num - 1):
            time.sleep(0.001)
        seen = [shared.rank.posted(number) for number in range(num)]
        _, completions = evaluate(plan, [*seen, *([0] * (len(plan) - num))], origin_ns=shared.rank.origin_ns)
        for number in range(num):
            assert seen[number] >= posted[number]
            assert shared.rank.longs[shared.rank.long(number, fields.DUE)] == completions[number][rank]
            released = shared.rank.longs[shared.rank.long(number, fields.RELEASED)]
            assert completions[number][rank] - MAX_LEAD_NS <= released <= shared.rank.done_at(number)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_calls_that_are_alike_have_a_lead_of_their_own(shared: Shared) -> None:
    """What a release lets begin takes milliseconds: those alike are released by so much earlier, others are not."""
    plan = plan_of(3)
    clock = shared.rank.origin_ns = 1
    releaser = Releaser(shared.other, BoundaryEngine(plan, plan.sandbox_ranks[0], None), clock=lambda: clock)
    took = {0: 9_000, 1: 2_000_000, 7: 40_000_000}
    for number in range(45):
        like = (0, 1, 7)[number % 3]
        assert shared.rank.append(fields.HELD, (0, 0), lane=number % 3, like=like) == number
        assert (shared.rank.kind(number), shared.rank.lane(number)) == (fields.HELD, number % 3)
        assert shared.rank.like(number) == like
        shared.arrive(number)
        releaser.look()
        while not shared.is_released(number):
            clock += 1_000
            releaser.look()
        clock += took[like]
        shared.pass_(number)
        releaser.look()
    assert {like: releaser.lead_ns(like) for like in took} == took


@pytest.mark.parametrize(("took_ns", "is_ahead"), [(400_000, True), (100_000, False)])
def test_a_call_that_takes_all_of_its_time_begins_when_the_others_arrive(
    shared: Shared, took_ns: int, is_ahead: bool
) -> None:
    """And one that is quicker than the operation of the job waits for the rank, and for the rest of the time."""
    program = Program(2, {1: (0, 1)})
    for _ in range(40):
        program.compute(0, 1_000_000)
        program.compute(1, 700_000)
        for rank, unit in program.collective(1, lambda _: 400_000).items():
            program.wait(rank, unit)
        program.step += 1
    plan = contract(program.graph(), sandbox_ranks=[0])
    clock = shared.rank.origin_ns = 1
    releaser = Releaser(shared.other, BoundaryEngine(plan, 0, None), clock=lambda: clock)
    ended = clock
    for number in range(40):
        shared.rank.append(fields.HELD, (number, 0), like=1)
        releaser.look()
        clock = ended + 700_000  # the other rank's arrival
        releaser.look()
        released = shared.is_released(number)
        clock = ended + 1_000_000
        shared.arrive(number)
        releaser.look()
        while not shared.is_released(number):
            clock += 1_000
            releaser.look()
        clock += took_ns
        shared.pass_(number)
        releaser.look()
        due = shared.rank.longs[shared.rank.long(number, fields.DUE)]
        assert due == ended + 1_400_000
        if number:  # the first one is what the lead is learnt from
            assert released == is_ahead
            assert abs(clock - due) <= 1_000
        ended = due
    assert not releaser.num_open


def test_what_a_rank_leaves_out_has_the_post_of_an_operation_rounds_beyond(shared: Shared) -> None:
    program = Program(2, {1: (0, 1)})
    for step in range(4):  # the last one is the end of the job
        program.step = step
        for rank, unit in program.collective(1, lambda _: 400_000).items():
            program.wait(rank, unit)
    plan = contract(program.graph(), sandbox_ranks=[0], last_step=2)
    shared.rank.origin_ns = 1
    releaser = Releaser(shared.other, BoundaryEngine(plan, 0, None), clock=lambda: 60_000_000)
    last, end = (2, 4), (3, 0)
    shared.rank.append(fields.HOST_POST, last, posted_ns=50_000_000)
    shared.rank.append(fields.STAND_IN, end, posted_ns=releaser.engine.row(*last))
    releaser.look()
    assert releaser.engine.completion(end) == 50_400_000
