"""Traces of real runs over gloo, simulated with nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism_sdk.simulate import load, simulate
from prism_sdk.testing import Launches
from prismtrace import TraceReader

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("real"))


@pytest.mark.parametrize(
    ("script", "ranks", "options"),
    [
        ("train_ddp.py", 2, ["--steps", "4", "--layers", "3"]),
        ("train_pipeline_1f1b.py", 4, ["--steps", "3"]),
    ],
)
def test_a_real_run_gives_its_own_step_time_again(
    launches: Launches, script: str, ranks: int, options: list[str]
) -> None:
    """However busy the machine is: what it did is in the trace."""
    assert largest_error(launches.observe(EXAMPLES / script, options, num_ranks=ranks).trace) <= 0.001


def largest_error(path: Path) -> float:
    """Of the mean step, and of each step of each rank, against what was observed, as a share of it."""
    timeline = simulate(load(path))
    assert timeline.job.recorded_step_ns is not None
    found = [abs(timeline.step_time_ns / timeline.job.recorded_step_ns - 1)]
    with TraceReader(path) as reader:
        for position, rank in enumerate(reader.ranks):
            ends = dict(zip(*(c.tolist() for c in (reader.steps(rank).step, reader.steps(rank).end_ns)), strict=True))
            steps, times, _ = timeline.steps(position)
            for step, time in zip(steps.tolist(), times.tolist(), strict=True):
                if step in ends and step - 1 in ends:
                    found.append(abs(time / (ends[step] - ends[step - 1]) - 1))
    assert len(found) > len(reader.ranks)
    return max(found)
