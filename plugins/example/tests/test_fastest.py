"""The contract tests that Prism ships, on this plugin's strategy, and what is particular to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from prismtrace_example.fastest import Fastest

import prismtrace
from prism_sdk.abc import CalibrationStrategy
from prism_sdk.errors import CalibrationError
from prism_sdk.testing import CalibrationStrategyContract, ScriptedCalibration


class TestFastest(CalibrationStrategyContract):
    def make_strategy(self) -> CalibrationStrategy:
        return Fastest()


def test_the_fastest_run_of_each_slice_counts(tmp_path: Path) -> None:
    context = ScriptedCalibration(
        tmp_path, world_size=4, num_slots=2, step_ns=[30, 10, 20, 300, 200, 100], options={"repeats": "3"}
    )
    result = Fastest().calibrate(context)
    assert [ranks for ranks, _ in context.slices] == [(0, 1)] * 3 + [(2, 3)] * 3
    assert (result.predicted_step_ns, result.step_low_ns, result.step_high_ns) == (100, 100, 300)
    with prismtrace.TraceReader(result.output) as reader:
        assert reader.graph_kind is prismtrace.GraphKind.CALIBRATED
        durations = [(reader.steps(rank).end_ns - reader.steps(rank).start_ns)[1] for rank in range(4)]
    assert durations == [10, 10, 100, 100]


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
def test_a_bad_option_is_named(tmp_path: Path, text: str) -> None:
    context = ScriptedCalibration(tmp_path, world_size=2, options={"repeats": text})
    with pytest.raises(CalibrationError, match=f"repeats={text}"):
        Fastest().calibrate(context)
