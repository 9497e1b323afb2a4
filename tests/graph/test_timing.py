from __future__ import annotations

import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.graph.errors import GraphDeadlockError, GraphError, MissingTimingError
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.timing import Timing, job_steps_ns, schedule, step_bounds, whole_steps
from prismtrace import ABSENT, ABSENT32, Phase
from tests.graph.jobs import Program, oracle, random_program

sys.setrecursionlimit(20_000)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_schedule_equals_the_definitions(seed: int, with_streams: bool) -> None:
    graph = random_program(seed, with_streams=with_streams).graph()
    timing = Timing.from_graph(graph)
    result = schedule(graph)
    expected = oracle(graph, timing)
    got = {row: (int(result.start_ns[row]), int(result.end_ns[row])) for row in range(len(graph))}
    assert got == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_longer_weights_never_make_anything_earlier(seed: int, other: int) -> None:
    graph = random_program(seed).graph()
    timing = Timing.from_graph(graph)
    rng = np.random.default_rng(other)
    names = ("gap_ns", "duration_ns", "transfer_ns")
    longer = Timing(**{name: getattr(timing, name) + rng.integers(0, 50, len(graph)) for name in names})
    assert (schedule(graph, timing=longer).end_ns >= schedule(graph, timing=timing).end_ns).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_a_common_origin_moves_everything_by_it(seed: int) -> None:
    graph = random_program(seed).graph()
    moved = schedule(graph, initial_ns=dict.fromkeys(graph.ranks, 77))
    for name in ("start_ns", "end_ns", "arrival_ns", "host_ns"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(schedule(graph), name) + 77)


def test_overlap_wake_and_serial_stream_by_hand() -> None:
    p = Program(2, {1: (0, 1)})
    for step in range(2):
        p.step = step
        for rank in (0, 1):
            p.compute(rank, 100 + 50 * rank, gap=5)
        first = p.collective(1, lambda rank: 40 + rank)
        second = p.collective(1, lambda rank: 10)
        for rank in (0, 1):
            p.compute(rank, 20)
            p.wait(rank, second[rank], wake=3)
            p.wait(rank, first[rank], least=2)
    result = schedule(p.graph())
    # posts at 105 and 155; first ready at 155, done 195 / 196; second ready at 196, done 206, hosts wake at 209
    assert result.end_ns[:6].tolist() == [105, 195, 206, 125, 209, 211]
    assert result.start_ns[:6].tolist() == [5, 105, 105, 105, 125, 209]
    steps, ends = result.step_ends_ns(1)
    assert (steps.tolist(), ends.tolist()) == ([0, 1], [211, 422])
    assert result.step_times_ns(0)[1].tolist() == [211]
    assert result.end_of_job_ns == 422


def test_a_step_of_the_job_ends_with_its_last_rank() -> None:
    """Rank 1 is late by 30 out of an uneven first step: rank 0 waits for that in step 1, which takes the job 100."""
    step = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    ends = np.array([970, 1100, 1200, 1210, 1000, 1100, 1200, 1290])
    is_whole = step < 3
    steps, times = job_steps_ns(step, ends, is_whole)
    assert (steps.tolist(), times.tolist()) == ([1, 2], [100, 100])
    order = np.random.default_rng(0).permutation(len(step))
    assert job_steps_ns(step[order], ends[order], is_whole[order])[1].tolist() == [100, 100]
    assert job_steps_ns(step[:1], ends[:1], is_whole[:1])[1].tolist() == []


_PASS = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@pytest.mark.parametrize(
    ("steps", "is_whole"),
    [
        # an adapter's stretch around the optimizer goes on behind the end of the step, also behind that of the last one
        ([_PASS, (Phase.OPTIMIZER, *_PASS), (Phase.OPTIMIZER, Phase.OTHER)], [True, True, False]),
        ([_PASS, (Phase.OPTIMIZER, Phase.FORWARD, Phase.OPTIMIZER)], [True, False]),
        ([_PASS, (Phase.OPTIMIZER, Phase.FORWARD, Phase.BACKWARD)], [True, False]),  # a crash in the second step
        ([_PASS, (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BACKWARD)], [True, True]),
        ([(Phase.FORWARD, Phase.OPTIMIZER), (Phase.FORWARD,)], [True, False]),  # nobody said what is backward
        ([(Phase.OPTIMIZER, Phase.FORWARD, Phase.BACKWARD)] * 2, [True, True]),  # a profiler's steps begin elsewhere
        ([(Phase.FORWARD, Phase.BACKWARD)] * 2, [True, True]),
    ],
)
def test_a_step_is_whole_where_the_optimizer_ran_behind_a_backward_pass(
    steps: list[tuple[Phase, ...]], is_whole: list[bool]
) -> None:
    p = Program(3, {})
    for number, phases in enumerate(steps):
        p.step = number
        for phase in phases:
            p.compute(1, 5, phase=int(phase))
    p.step = 7
    p.compute(2, 5, phase=int(Phase.FORWARD))
    graph = p.graph()
    step, phase = graph.columns["step"], graph.columns["phase"]
    place, which, ends, found = step_bounds(step, phase, graph.offsets)
    num = len(steps)
    assert (place.tolist(), which.tolist()) == ([1] * num + [2], [*range(num), 7])
    assert ends.tolist() == [*np.cumsum([len(phases) for phases in steps]).tolist(), len(graph)]
    assert found.tolist() == [*is_whole, True]
    order = np.arange(len(found))[::-1]
    assert whole_steps(graph, place[order], which[order]).tolist() == found[order].tolist()


def test_rows_without_a_step_belong_to_the_one_before() -> None:
    step = np.array([ABSENT32, 0, ABSENT32, 1, ABSENT32, ABSENT32], dtype=np.int32)
    place, which, ends, is_whole = step_bounds(step, np.zeros(6, dtype=np.uint8), np.array([0, 4, 4, 6]))
    assert (place.tolist(), which.tolist()) == ([0, 0, 0, 2], [ABSENT32, 0, 1, ABSENT32])
    assert (ends.tolist(), is_whole.all()) == ([1, 3, 4, 6], True)
    assert [len(part) for part in step_bounds(step[:0], step[:0], np.array([0, 0]))] == [0] * 4


def test_wait_as_first_row_and_empty_rank() -> None:
    graph = JobGraph.from_columns(
        {0: {"kind": []}, 1: {"kind": [5, 1], "awaits": [ABSENT, ABSENT], "transfer_ns": [7, ABSENT],
                              "start_ns": [ABSENT, 0], "end_ns": [ABSENT, 4]}, 2: {"kind": []}},
        world_size=3, groups={},
    )  # fmt: skip
    result = schedule(graph, initial_ns={1: 100})
    assert (result.start_ns.tolist(), result.end_ns.tolist()) == ([100, 107], [107, 111])


def test_absent_times_are_never_guessed() -> None:
    p = Program(2, {1: (0, 1)})
    p.collective(1, lambda _: ABSENT)
    graph = p.graph()
    with pytest.raises(MissingTimingError, match=r"transfer time.*\n.*rank 0, unit 0"):
        schedule(graph)
    assert schedule(graph, timing=Timing.from_graph(graph, default_transfer_ns=4)).end_ns.tolist() == [4, 4]
    p = Program(1, {})
    p.rows[0].append({"kind": 1, "step": 0, "start_ns": 3})
    with pytest.raises(MissingTimingError, match="start or end of compute"):
        schedule(p.graph())
    p.rows[0][0]["end_ns"] = 2
    with pytest.raises(MissingTimingError, match="duration_ns is negative"):
        schedule(p.graph())


def test_crossed_groups_are_a_named_deadlock() -> None:
    p = Program(2, {1: (0, 1), 2: (0, 1)})
    a = p.collective(1, lambda _: 1)
    p.wait(0, a[0])
    b = p.collective(2, lambda _: 1)
    p.wait(0, b[0])
    p.wait(1, b[1])
    p.wait(1, a[1])
    # rank 1 calls the groups in the other order, and waits in between
    p.rows[1] = [p.rows[1][1], {"kind": 5, "step": 0, "awaits": 0}, p.rows[1][0], {"kind": 5, "step": 0, "awaits": 2}]
    with pytest.raises(GraphDeadlockError) as caught:
        schedule(p.graph())
    text = str(caught.value)
    assert "rank 0, unit 0" in text and "waits for ranks [1]" in text
    assert "rank 1, unit 0" in text and "waits for ranks [0]" in text
    assert "g1 [0, 1] seq 0" in text and "g2 [0, 1] seq 0" in text


def test_ranks_that_are_not_loaded() -> None:
    p = Program(2, {1: (0, 1)})
    p.compute(1, 50)
    for rank, unit in p.collective(1, lambda _: 10).items():
        p.wait(rank, unit)
    columns = p.columns()
    graph = JobGraph.from_columns({0: columns[0]}, world_size=2, groups=p.groups)
    assert not graph.has_all_ranks and not graph.event_is_whole.any()
    with pytest.raises(GraphError, match="ranks that are not in the graph"):
        schedule(graph)
    assert schedule(graph, allow_absent_ranks=True).end_ns.tolist() == [10, 10]


def test_a_million_rows_take_seconds() -> None:
    p = Program(8, {1: tuple(range(8)), 2: (0, 1), 3: (2, 3)})
    for step in range(20):
        p.step = step
        for _ in range(6):
            for rank in range(8):
                p.compute(rank, 10 + rank)
            for group in (1, 2, 3):
                for rank, unit in p.collective(group, lambda _: 5).items():
                    p.wait(rank, unit)
    small = p.columns()
    repeat = 1_000_000 // sum(len(c["kind"]) for c in small.values())
    columns = {}
    for rank, c in small.items():
        n = len(c["kind"])
        tiled = {name: np.tile(np.array(v), repeat) for name, v in c.items()}
        lap = np.repeat(np.arange(repeat), n)
        awaits = tiled["awaits"]
        tiled["awaits"] = np.where(awaits == ABSENT, awaits, awaits + lap * n)
        tiled["seq"] = np.where(tiled["seq"] == ABSENT, ABSENT, tiled["seq"] + lap * 120)
        columns[rank] = tiled
    begin = time.perf_counter()
    graph = JobGraph.from_columns(columns, world_size=8, groups=p.groups)
    matched = time.perf_counter()
    result = schedule(graph)
    end = time.perf_counter()
    print(f"{len(graph)} rows: match {matched - begin:.2f} s, schedule {end - matched:.2f} s")
    assert result.end_of_job_ns > 0
    assert end - begin < 30  # about 3 s on one quiet core; the machine may be shared
