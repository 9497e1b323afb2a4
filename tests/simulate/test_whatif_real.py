"""Answers of the simulator against real runs in which the change was made (benchmarks/whatif_real.py has more)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prism_sdk.simulate import Scenario, load, simulate
from prism_sdk.testing import Launches

PACED = Path(__file__).parents[2] / "benchmarks" / "paced_training.py"
PIPELINE = PACED.with_name("paced_pipeline.py")


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("real"))


def test_a_slow_rank_agrees_with_a_real_run(launches: Launches) -> None:
    """Within 2 %, by medians of steps; a neighbour on the machine can spoil a real run, so there are three attempts."""
    errors = []
    for _ in range(3):
        traces, steps = {}, {}
        for name, imbalance in (("plain", "0"), ("slow", "0.5")):
            words = ["--wrap", "ddp", "--forward-ms", "15", "--steps", "7", "--imbalance", imbalance]
            traces[name] = launches.observe(PACED, words, num_ranks=2).trace
            steps[name] = float(np.median(simulate(load(traces[name])).step_times_ns()))
        predicted = Scenario(slow=("rank=1:1.5",)).run(traces["plain"]).step_times_ns()
        assert np.median(predicted) > 1.3 * steps["plain"]
        errors.append(abs(float(np.median(predicted)) / steps["slow"] - 1))
        if errors[-1] < 0.02:
            return
    pytest.fail(f"predictions were off by {errors}")


def test_more_microbatches_agree_with_a_real_run(launches: Launches) -> None:
    """Within 6 %, of torch's own schedule, recorded as it is; with three attempts, as above."""
    errors = []
    for _ in range(3):
        traces, steps = {}, {}
        for number in (2, 6):
            words = ["--microbatches", str(number), "--steps", "6"]
            traces[number] = launches.observe(PIPELINE, words, num_ranks=2).trace
            steps[number] = float(np.median(simulate(load(traces[number])).step_times_ns()))
        predicted = float(np.median(Scenario(microbatches=6).run(traces[2]).step_times_ns()))
        assert predicted > 1.8 * steps[2]
        errors.append(abs(predicted / steps[6] - 1))
        if errors[-1] < 0.06:
            return
    pytest.fail(f"predictions were off by {errors}")
