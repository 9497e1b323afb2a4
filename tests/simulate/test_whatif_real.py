"""Answers of the simulator against real runs in which the change was made (benchmarks/whatif_real.py has more)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prism_sdk.cli.main import run
from prism_sdk.simulate import Scenario, load, simulate

PACED = Path(__file__).parents[2] / "benchmarks" / "paced_training.py"
PIPELINE = PACED.with_name("paced_pipeline.py")


def test_a_slow_rank_agrees_with_a_real_run(tmp_path: Path) -> None:
    """Within 2 %, by medians of steps; a neighbour on the machine can spoil a real run, so there are three attempts."""
    errors = []
    for attempt in range(3):
        steps = {}
        for name, imbalance in (("plain", "0"), ("slow", "0.5")):
            path = tmp_path / f"{name}{attempt}.prism"
            words = ["--wrap", "ddp", "--forward-ms", "15", "--steps", "7", "--imbalance", imbalance]
            assert run(["observe", "--nproc-per-node", "2", "-o", str(path), "--", str(PACED), *words]) == 0
            steps[name] = float(np.median(simulate(load(path)).step_times_ns()))
        predicted = Scenario(slow=("rank=1:1.5",)).run(tmp_path / f"plain{attempt}.prism").step_times_ns()
        assert np.median(predicted) > 1.3 * steps["plain"]
        errors.append(abs(float(np.median(predicted)) / steps["slow"] - 1))
        if errors[-1] < 0.02:
            return
    pytest.fail(f"predictions were off by {errors}")


def test_more_microbatches_agree_with_a_real_run(tmp_path: Path) -> None:
    """Within 6 %, of torch's own schedule, recorded as it is; with three attempts, as above."""
    errors = []
    for attempt in range(3):
        steps = {}
        for microbatches in (2, 6):
            path = tmp_path / f"{microbatches}-{attempt}.prism"
            words = ["--microbatches", str(microbatches), "--steps", "6"]
            assert run(["observe", "--nproc-per-node", "2", "-o", str(path), "--", str(PIPELINE), *words]) == 0
            steps[microbatches] = float(np.median(simulate(load(path)).step_times_ns()))
        predicted = float(np.median(Scenario(microbatches=6).run(tmp_path / f"2-{attempt}.prism").step_times_ns()))
        assert predicted > 1.8 * steps[2]
        errors.append(abs(predicted / steps[6] - 1))
        if errors[-1] < 0.06:
            return
    pytest.fail(f"predictions were off by {errors}")
