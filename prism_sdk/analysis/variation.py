"""Says how much step times vary: within a run, between ranks, and from run to run. It explains nothing.

Steps are those after the first of each run, which has warm-up in it. A step takes from when the last rank has ended the
one before to when the last rank has ended it, as `calibrate` and `simulate` count (`job_steps_ns`). *Variation* is the
standard deviation over the mean; *spread* the largest less the smallest run mean, over the mean of these; the interval
of a mean is a percentile bootstrap over steps, 95 %.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.frames import ResultFrames, columns_of
from prism_sdk.analysis.job import Job, load_job
from prism_sdk.graph import Interval, bootstrap_interval
from prism_sdk.graph.timing import job_steps_ns, whole_steps

__all__ = ["RunVariation", "Variation", "step_times_ns", "variation_of", "variation_of_jobs"]


@dataclass(frozen=True, kw_only=True)
class RunVariation:
    """The step times of the job in one run."""

    path: str
    num_steps: int
    mean_ns: float
    interval: Interval
    std_ns: float
    variation: float
    min_ns: int
    max_ns: int
    #: Slope of a straight line through the step times, over their mean: growth a step.
    drift_per_step: float


@dataclass(frozen=True, kw_only=True)
class Variation(ResultFrames):
    """Several runs of one job beside each other; with one run there is no spread."""

    runs: tuple[RunVariation, ...]
    mean_ns: float
    #: Largest less smallest of the runs' means, over their mean.
    spread: float | None
    #: Standard deviation of the runs' means (n - 1), over their mean.
    run_to_run_variation: float | None
    #: The mean of the runs' own variations from step to step.
    step_to_step_variation: float

    def columns(self) -> dict[str, Any]:
        """One row a run, for data frames; the interval of the mean as its two ends."""
        rows = columns_of(self.runs)
        intervals = rows.pop("interval")
        return {**rows, "mean_low_ns": [i.low for i in intervals], "mean_high_ns": [i.high for i in intervals]}


def step_times_ns(
    job: Job, *, ranks: Sequence[int] | None = None
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
    """The whole steps of a job but the first, and the time of each; of a job with one step that step, from its start.

    Args:
        job: the job.
        ranks: as if the job had these alone.
    """
    windows = job.windows
    chosen = np.ones(len(windows), dtype=np.bool_) if ranks is None else np.isin(windows.rank, ranks)
    step, end = windows.step[chosen], windows.end_ns[chosen]
    place = job.place[windows.position[chosen]]
    steps, times = job_steps_ns(step, end, whole_steps(job.graph, place, step))
    if not len(steps):
        return step.min(keepdims=True), end.max(keepdims=True) - windows.start_ns[chosen].min()
    return steps, times


def variation_of(sources: Sequence[str | os.PathLike[str]], *, steps: range | None = None) -> Variation:
    """The variation of some runs of one job. Raises ValueError where there are none."""
    return variation_of_jobs([load_job(source, steps=steps) for source in sources])


def variation_of_jobs(jobs: Sequence[Job]) -> Variation:
    """As ``variation_of``, of traces that are loaded already."""
    if not jobs:
        raise ValueError("no runs: there is nothing to compare")
    runs = tuple(_of_run(job) for job in jobs)
    means = np.array([run.mean_ns for run in runs])
    several = len(runs) > 1 and means.mean() > 0
    return Variation(
        runs=runs, mean_ns=float(means.mean()), spread=float(np.ptp(means) / means.mean()) if several else None,
        run_to_run_variation=float(means.std(ddof=1) / means.mean()) if several else None,
        step_to_step_variation=float(np.mean([run.variation for run in runs])),
    )  # fmt: skip


def _of_run(job: Job) -> RunVariation:
    _, times = step_times_ns(job)
    mean = float(times.mean())
    slope = float(np.polyfit(np.arange(len(times)), times.astype(np.float64), 1)[0]) if len(times) > 1 else 0.0
    return RunVariation(
        path=job.path, num_steps=len(times), mean_ns=mean, interval=bootstrap_interval(times),
        std_ns=float(times.std()),
        variation=float(times.std() / mean) if mean else 0.0, min_ns=int(times.min()), max_ns=int(times.max()),
        drift_per_step=slope / mean if mean else 0.0,
    )  # fmt: skip
