"""The strategy ``fastest``: every slice several times, the fastest run counts. It does not recompute times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import prismtrace
from prism_sdk.abc import CalibrationContext, CalibrationPass, CalibrationResult, CalibrationStrategy
from prism_sdk.errors import CalibrationError


@dataclass(frozen=True)
class _Run:
    """One run of one slice: the trace that it left, and its median step."""

    trace: Path
    step_ns: int


class Fastest(CalibrationStrategy):
    """Runs each slice ``repeats`` times (option, default 3) and keeps the times of the fastest run."""

    name = "fastest"
    option_names = ("repeats",)
    description = "each slice several times, the fastest run counts (-O repeats=3)"

    def calibrate(self, context: CalibrationContext) -> CalibrationResult:
        """Write the calibrated graph. The interval spans the fastest to the slowest run of the slowest slice."""
        repeats = self._repeats(context.options)
        kept: list[Path] = []
        slowest: list[int] = []
        for first in range(0, context.world_size, context.num_slots):
            ranks = range(first, min(first + context.num_slots, context.world_size))
            runs = [self._run(context, ranks, label=f"ranks{first}-run{number}") for number in range(repeats)]
            runs.sort(key=lambda run: run.step_ns)
            context.report(f"ranks {ranks[0]}-{ranks[-1]}: {runs[0].step_ns / 1e6:.3f} ms, the fastest of {repeats}")
            kept.append(runs[0].trace)
            slowest = max(slowest, [run.step_ns for run in runs])
        metadata = {"calibration.strategy": self.name, "calibration.repeats": str(repeats)}
        prismtrace.merge(
            [context.graph_path, *kept], context.output, metadata=metadata, graph_kind=prismtrace.GraphKind.CALIBRATED
        )
        only = CalibrationPass(
            index=0,
            change_percent=None,
            predicted_step_ns=slowest[0],
            step_low_ns=slowest[0],
            step_high_ns=slowest[-1],
        )
        return CalibrationResult(
            output=context.output,
            passes=(only,),
            predicted_step_ns=only.predicted_step_ns,
            step_low_ns=only.step_low_ns,
            step_high_ns=only.step_high_ns,
            converged=True,
        )

    def _repeats(self, options: Mapping[str, str]) -> int:
        text = options.get("repeats", "3")
        if not text.isdigit() or int(text) < 1:
            raise CalibrationError(f"-O repeats={text} is not a number of at least 1", strategy=self.name)
        return int(text)

    def _run(self, context: CalibrationContext, ranks: range, *, label: str) -> _Run:
        trace = context.run_slice(ranks, graph_path=context.graph_path, label=label)
        durations: list[int] = []
        with prismtrace.TraceReader(trace) as reader:
            for rank in ranks:
                steps = reader.steps(rank)
                timed = steps.start_ns != prismtrace.ABSENT
                durations.extend((steps.end_ns[timed] - steps.start_ns[timed]).tolist())
        if not durations:
            hint = "let the script run at least two steps"
            raise CalibrationError("the slice finished no whole step", strategy=self.name, hint=hint)
        return _Run(trace, int(statistics.median(durations)))
