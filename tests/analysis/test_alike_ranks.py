"""Jobs whose ranks are alike: what is found from one rank of each class is what all ranks give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from alike_jobs import AlikeJob
from hypothesis import event, given, settings
from hypothesis import strategies as st

from prism_sdk.analysis import Analysis, analyze, layer_costs, load_job
from prism_sdk.cli.output import json_ready
from prismtrace import TraceReader


def same(one: Analysis, other: Analysis) -> None:
    """All that two analyses say is equal, to the last digit; only the paths, of equal length, differ."""
    told, expected = json_ready(one.to_dict()), json_ready(other.to_dict())
    assert isinstance(told, dict) and isinstance(expected, dict)
    for runs in (told, expected):
        del runs["file"], runs["variation"]
    assert told == expected
    text = one.format_table().replace(one.loaded.path, other.loaded.path)
    assert text == other.format_table()
    assert (one.critical_path is None) == (other.critical_path is None)
    if one.critical_path is not None and other.critical_path is not None:
        assert one.critical_path.segments == other.critical_path.segments
        assert np.array_equal(one.critical_path.slack_ns, other.critical_path.slack_ns)
    for name, column in one.breakdown.columns().items():
        assert np.array_equal(column, other.breakdown.columns()[name])


@given(seed=st.integers(0, 10**6), partly=st.sampled_from(["all", "ranks", "steps"]))
@settings(max_examples=20, deadline=None)
def test_ranks_that_are_alike_give_what_all_ranks_give(
    seed: int, partly: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    job = AlikeJob.random(seed)
    by_roles = job.write(folder / "roles.prism", by_roles=True)
    each = job.write(folder / "plain.prism", by_roles=False)
    ranks = None if partly != "ranks" else range(job.world - job.pp * job.tp)
    steps = None if partly != "steps" else range(1)
    found = analyze(by_roles, ranks=ranks, steps=steps)
    event(f"folded: {found.loaded.fold is not None}")
    same(found, analyze(each, ranks=ranks, steps=steps))


@pytest.mark.parametrize("by", ["group_id", "peer", "microbatch", "stage", "kind"])
def test_costs_by_a_column_are_those_of_each_rank(by: str, tmp_path: Path) -> None:
    """Also where ranks that are alike have values of their own: their groups and partners."""
    job = AlikeJob(np.random.default_rng(1), 8, 2, 2, True)
    job.groups = {1: tuple(range(32)), **{200 + n: (2 * n, 2 * n + 1) for n in range(16)}}
    job._play(["compute", "tp", "chain", "compute", "world"], num_steps=2)
    by_roles = job.write(tmp_path / "roles.prism", by_roles=True)
    folded, each = load_job(by_roles, folded=True), load_job(by_roles)
    assert folded.fold is not None and each.fold is None
    with TraceReader(by_roles) as reader:
        found = layer_costs(reader, folded, column=by)
        assert found == layer_costs(reader, each, column=by)
    assert len({cost.layer for cost in found}) == {"group_id": 18, "peer": 33}.get(by, len(found)) > 1
    with TraceReader(job.write(tmp_path / "plain.prism", by_roles=False)) as reader:
        assert found == layer_costs(reader, load_job(reader), column=by)


def test_one_rank_of_each_class_is_read(tmp_path: Path) -> None:
    job = AlikeJob(np.random.default_rng(1), 8, 2, 2, True)
    job.groups = {1: tuple(range(32)), **{200 + n: (2 * n, 2 * n + 1) for n in range(16)}}
    job._play(["compute", "tp", "chain", "world"], num_steps=2)
    found = analyze(job.write(tmp_path / "roles.prism", by_roles=True))
    assert found.loaded.fold is not None and found.loaded.graph.ranks == (0, 1, 2, 3)
    assert found.loaded.ranks == found.job.ranks == tuple(range(32))
    assert found.loaded.num_units == len(found.job.graph) and found.loaded.num_events == found.job.graph.num_events
    assert found.critical_path is not None and len(found.critical_path.slack_ns) == len(found.job.graph)


def test_what_does_not_fit_together_is_said_as_for_all_ranks(tmp_path: Path) -> None:
    job = AlikeJob(np.random.default_rng(1), 8, 1, 2, True)
    job.groups = {1: tuple(range(16)), **{200 + n: (2 * n, 2 * n + 1) for n in range(8)}}
    job._play(["compute", "tp", "world"], num_steps=2)
    for rank in range(0, 16, 2):
        job.rows[rank][-2]["num_elements_in"] = 9
    found = analyze(job.write(tmp_path / "roles.prism", by_roles=True))
    assert any("disagree in num_elements_in" in note for note in found.notes)
    assert found.loaded.fold is None
    same(found, analyze(job.write(tmp_path / "plain.prism", by_roles=False)))


def test_load_job_has_all_ranks_unless_told(tmp_path: Path) -> None:
    path = AlikeJob.random(3).write(tmp_path / "roles.prism", by_roles=True)
    whole, folded = load_job(path), load_job(path, folded=True)
    assert whole.fold is None and folded.fold is not None
    assert whole.ranks == folded.ranks and len(folded.graph) < len(whole.graph)
    assert folded.fold.all_rows(folded.graph.columns["start_ns"]).tolist() == whole.graph.columns["start_ns"].tolist()
