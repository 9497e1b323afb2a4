"""Traces of real runs over gloo, simulated with nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism_sdk.cli.main import run
from prism_sdk.simulate import load, simulate
from prismtrace import TraceReader

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "ranks", "options"),
    [
        ("train_ddp.py", 2, ["--steps", "4", "--layers", "3"]),
        ("train_pipeline_1f1b.py", 4, ["--steps", "3"]),
    ],
)
def test_a_real_run_gives_its_own_step_time_again(tmp_path: Path, script: str, ranks: int, options: list[str]) -> None:
    """However busy the machine is: what it did is in the trace."""
    path = tmp_path / "real.prism"
    words = ["observe", "--nproc-per-node", str(ranks), "-o", str(path), "--", str(EXAMPLES / script), *options]
    assert run(words) == 0
    assert largest_error(path) <= 0.001


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
