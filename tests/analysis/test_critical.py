"""Critical path and slack: what they mean is tried out on the timing model, by making units longer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_jobs import MadeJob

from prism_sdk.analysis import Times, critical_path, load_job
from prism_sdk.graph import JobGraph, Timing, schedule
from prismtrace import UnitKind


def timed(seed: int) -> tuple[JobGraph, Timing]:
    """A random job; waking up and the call of wait take no time, so that times alone tell what waited for what."""
    graph = jobs.random_program(seed).graph()
    timing = Timing.from_graph(graph, default_transfer_ns=0)
    waits = graph.columns["kind"] == UnitKind.WAIT
    return graph, replace(
        timing, gap_ns=np.where(waits, 0, timing.gap_ns), duration_ns=np.where(waits, 0, timing.duration_ns)
    )


def end_of(graph: JobGraph, timing: Timing) -> int:
    times = Times.scheduled(schedule(graph, timing=timing))
    return max(schedule(graph, timing=timing).end_of_job_ns, int(times.completion_ns.max(initial=0)))


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_slack_is_how_much_a_unit_may_grow(seed: int) -> None:
    graph, timing = timed(seed)
    path = critical_path(Times.scheduled(schedule(graph, timing=timing)))
    end = end_of(graph, timing)
    rows = np.flatnonzero(graph.columns["kind"] == UnitKind.COMPUTE)
    for row in np.random.default_rng(seed).choice(rows, min(4, len(rows)), replace=False):
        for beyond in (0, 1):
            longer = timing.duration_ns.copy()
            longer[row] += path.slack_ns[row] + beyond
            assert end_of(graph, replace(timing, duration_ns=longer)) == end + beyond


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_path_has_no_holes_and_no_slack(seed: int) -> None:
    graph, timing = timed(seed)
    path = critical_path(Times.scheduled(schedule(graph, timing=timing)))
    if not path.segments:
        return
    for one, next_one in zip(path.segments[:-1], path.segments[1:], strict=True):
        assert one.end_ns == next_one.start_ns
    assert path.segments[-1].end_ns == end_of(graph, timing)
    assert sum(path.parts_ns.values()) == sum(path.ranks_ns.values()) == path.length_ns
    assert not path.slack_ns[path.rows].any()


def test_the_path_changes_ranks_at_the_last_arrival(tmp_path: Path) -> None:
    job = MadeJob(2)
    for rank, post in ((0, 10), (1, 40)):
        job.compute(rank, 0, post)
        job.communicate(rank, post, 45, wait=(post, 47))
    job.compute(0, 47, 80)
    job.compute(1, 47, 60)
    loaded = load_job(job.write(tmp_path / "a.prism"))
    path = critical_path(Times.measured(loaded))
    assert [(s.part, s.start_ns, s.end_ns) for s in path.segments] == [
        ("compute", 0, 40), ("communication", 40, 45), ("launch_gap", 45, 47), ("compute", 47, 80),
    ]  # fmt: skip
    assert [s.rank for s in path.segments if s.part == "compute"] == [1, 0]
    # rank 0 could come 30 later to the collective, rank 1 could end 20 later
    assert path.slack_ns[loaded.graph.rows(0)].tolist()[0] == 30
    assert path.slack_ns[loaded.graph.rows(1)].tolist() == [0, 0, 20, 20]
    assert path.parts_ns == {"compute": 73, "communication": 5, "launch_gap": 2}


def test_blocking_spans_without_waits(tmp_path: Path) -> None:
    job = MadeJob(2)
    for rank, post in ((0, 10), (1, 40)):
        job.compute(rank, 0, post)
        job.communicate(rank, post, 45)
        job.compute(rank, 46, 60 + rank)
    loaded = load_job(job.write(tmp_path / "a.prism"))
    path = critical_path(Times.measured(loaded))
    assert path.length_ns == 61 and path.parts_ns == {"compute": 55, "communication": 5, "launch_gap": 1}
    assert path.slack_ns[loaded.graph.rows(0)].tolist()[0] == 30


def test_a_timeless_graph_has_no_path() -> None:
    graph, timing = timed(3)
    times = Times.scheduled(schedule(graph, timing=timing))
    nothing = np.full(len(graph), np.iinfo(np.int64).min)
    with pytest.raises(ValueError, match="no unit has a time"):
        critical_path(replace(times, start_ns=nothing, end_ns=nothing, completion_ns=nothing))
