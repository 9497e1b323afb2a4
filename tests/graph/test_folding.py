"""The folded graph of a sandbox against the whole one: the boundary plans must give the same."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.graph.contract import contract
from prism_sdk.graph.folding import folded_graph
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.plan import BoundaryPlan, evaluate
from prism_sdk.simulate.loading import load
from prismtrace import ABSENT32, GraphKind, Op, TraceReader
from tests.graph.jobs import Program, random_program
from tests.simulate.reference import write


def _folded(
    path: Path, *, sandbox_ranks: list[int] | tuple[int, ...], kind: GraphKind = GraphKind.CALIBRATED
) -> JobGraph | None:
    with TraceReader(path) as reader:
        job = replace(load(reader, with_sizes=False), graph_kind=kind)
        return folded_graph(reader, job, sandbox_ranks=sandbox_ranks)


def _replicated(seed: int, replicas: int) -> Program:
    """Random jobs side by side, joined by collectives over equal ranks, and by one of all; then the same once more."""
    parts = [random_program(seed, num_steps=1), random_program(seed, num_steps=1, actions_per_step=9)]
    width = parts[0].world_size
    groups = {10 + w: tuple(range(w, width * replicas, width)) for w in range(width)}
    groups[9] = tuple(range(width * replicas))
    for number, part in enumerate(parts):
        for replica in range(replicas):
            for g, group in part.groups.items():
                groups[100 * (1 + replica) + 50 * number + g] = tuple(r + replica * width for r in group.ranks)
    job = Program(width * replicas, groups)
    for number, part in enumerate(parts):
        for replica in range(replicas):
            for rank, rows in part.rows.items():
                mine = job.rows[rank + replica * width]
                shift = len(mine)
                for row in rows:
                    new: dict[str, Any] = {**row, "step": number}
                    if row.get("group_id"):
                        new["group_id"] = 100 * (1 + replica) + 50 * number + row["group_id"]
                    if row.get("peer", ABSENT32) != ABSENT32:
                        new["peer"] = row["peer"] + replica * width
                    if "awaits" in row:
                        new["awaits"] = row["awaits"] + shift
                    mine.append(new)
        job.step = number
        for g in [*range(10, 10 + width), 9]:
            for rank, unit in job.collective(g, lambda r: 5 + r % width, Op.ALL_GATHER).items():
                job.wait(rank, unit, wake=3)
    return job


def _results(plan: BoundaryPlan, posts: dict[Any, int]) -> dict[Any, Any]:
    keys = [(plan.stream(j), int(plan.seq[j])) for j in range(len(plan))]
    arrivals, completions = evaluate(plan, [posts.setdefault(key, 0) for key in keys])
    return {key: (a, c) for key, a, c in zip(keys, arrivals, completions, strict=True)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 9))
def test_the_plan_of_the_folded_graph_gives_the_same(seed: int, replicas: int) -> None:
    rng = random.Random(seed)
    job = _replicated(seed, replicas)
    sandbox = rng.sample(range(job.world_size), rng.choice([1, 1, 2]))
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "job.prism", job.rows, job.groups, kind=GraphKind.CALIBRATED)
        whole = contract(JobGraph.load(path), sandbox_ranks=sandbox)
        graph = _folded(path, sandbox_ranks=sandbox)
    if len(sandbox) == 1 and replicas > 4:
        assert graph is not None
    if graph is None:
        return
    assert len(graph.ranks) <= job.world_size // replicas * (1 + len(sandbox))
    folded = contract(graph, sandbox_ranks=sandbox)
    keys = [(whole.stream(j), int(whole.seq[j])) for j in range(len(whole))]
    assert folded.period_ns == whole.period_ns
    for _ in range(4):
        now, posts = 0, {}
        for key in keys:
            now += rng.choice([0, rng.randint(0, 3000)])
            posts[key] = now
        assert _results(folded, posts) == _results(whole, posts)


def test_ranks_with_own_times_do_not_fold(tmp_path: Path) -> None:
    job = _replicated(5, 6)
    for rank, rows in job.rows.items():
        for row in rows:
            if row["kind"] == 1:
                row["end_ns"] += rank
        job.compute(rank, rank)
    path = write(tmp_path / "job.prism", job.rows, job.groups, kind=GraphKind.CALIBRATED)
    assert _folded(path, sandbox_ranks=[0]) is None


@pytest.mark.parametrize("kind", [GraphKind.BARE, GraphKind.OBSERVED])
def test_what_is_not_calibrated_does_not_fold(tmp_path: Path, kind: GraphKind) -> None:
    job = _replicated(5, 6)
    path = write(tmp_path / "job.prism", job.rows, job.groups, kind=GraphKind.CALIBRATED)
    assert _folded(path, sandbox_ranks=[0]) is not None
    assert _folded(path, sandbox_ranks=[0], kind=kind) is None
