"""Predicts the step time from measured steps, and chooses the measured steps that stand for all of them.

It measures nothing; how weights get into a graph is prism_sdk.graph.calibrate's.

A collective starts when the last of its members arrives, and the mean latest arrival is later than the latest mean
arrival (E[max X] >= max E[X]): a timeline of means is too short, the more so the more ranks meet. So the prediction is
the mean over *draws*: in each, every step of the job has the weights of one whole measured step, of the same number in
all slices, so that units of a step and ranks that ran side by side keep their correlation, and a step that takes longer
by what the program does in it takes longer for all ranks. What a slice happens to take is independent of the others,
which ran at other times. Transfers between slices have no measured step; they are what the caller gives.

Where kinds of steps take turns (`prism_sdk.graph.turns`), a step has the weights of its own kind, and the means are
those of whole rounds of turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.calibrate import (
    Calibration,
    Samples,
    collect_samples,
    merge_samples,
    step_time_ns,
    structures_of,
    whole_steps_ns,
)
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.statistics import Interval, percentile_interval
from prism_sdk.graph.timing import Schedule
from prism_sdk.graph.turns import turns_of

__all__ = ["Prediction", "predict_step_time"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted mean step time in ns, and a timeline whose step times are typical."""

    interval: Interval
    calibration: Calibration
    """Of all draws the one whose mean step and last steps (one of each kind) are nearest to their means over all."""
    means: Calibration
    """The timeline of means, which depends on no draw: what passes are compared by."""


def predict_step_time(
    bare_graph: JobGraph,
    slice_graphs: Sequence[JobGraph],
    *,
    warmup_steps: int = 1,
    default_transfer_ns: int | Int64Array | None = None,
    confidence: float = 0.95,
    num_draws: int = 100,
    num_resamples: int = 100,
    seed: int = 0,
    stands_for: Mapping[int, int] | None = None,
) -> Prediction:
    """The predicted step time with a bootstrap interval; the same seed gives the same prediction.

    A resample draws as many measured steps of every slice as it has, with replacement, and computes the timeline of
    their means; the interval is their spread, in proportion to their own mean, around the estimate. The cost is one
    `merge_slices` for each draw and each resample. Ranks that others ``stands_for`` vary with these.

    Raises:
        GraphError, MissingTimingError: as `merge_slices`.
    """
    turns = turns_of(slice_graphs, warmup_steps=warmup_steps)
    samples, clipped = collect_samples(slice_graphs, warmup_steps=warmup_steps, turns=turns)
    structures = structures_of(bare_graph, stands_for=stands_for, turns=turns)
    generator = np.random.default_rng(seed)

    def merged(places: _Places | None = None, drawn: dict[tuple[int, int], int] | None = None) -> Calibration:
        return merge_samples(
            bare_graph, samples, clipped=clipped, default_transfer_ns=default_transfer_ns, drawn=drawn,
            places=None if places is None else places.at, structures=structures,
        )  # fmt: skip

    seeds = generator.integers(0, 2**63, size=max(num_draws, 1)).tolist()
    found = np.array([_mean_and_lasts_ns(merged(_Places(one)).timeline, turns) for one in seeds])
    typical = int(np.square(found / np.maximum(found.mean(axis=0), 1.0) - 1.0).sum(axis=1).argmin())
    estimate = float(found[:, 0].mean())

    steps = _measured_steps(samples)
    resampled = np.array([
        _mean_and_lasts_ns(merged(drawn=_resample(steps, generator)).timeline, turns)[0] for _ in range(num_resamples)
    ])  # fmt: skip
    interval = percentile_interval(
        resampled * (estimate / max(resampled.mean(), 1.0)), estimate=estimate, confidence=confidence,
        num_samples=min((len(measured) for measured in steps.values()), default=0),
    )  # fmt: skip
    return Prediction(interval=interval, calibration=merged(_Places(seeds[typical])), means=merged())


class _Places:
    """Random numbers for the steps of slices, the same whenever they are asked for: which step, and of which run."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._steps: dict[int, float] = {}
        self._runs: dict[tuple[int, int], float] = {}

    def at(self, slice_index: int, step: int) -> tuple[float, float]:
        if step not in self._steps:
            self._steps[step] = self._generator.random()
        if (slice_index, step) not in self._runs:
            self._runs[slice_index, step] = self._generator.random()
        return self._steps[step], self._runs[slice_index, step]


def _mean_and_lasts_ns(timeline: Schedule, turns: int) -> list[float]:
    """The mean step time, and those of the last whole steps: an emulation goes on like them beyond the recorded steps.

    The mean is over as many whole rounds of ``turns`` steps as there are.
    """
    times = whole_steps_ns(timeline)
    if len(times) < turns:
        return [step_time_ns(timeline)] * 2
    return [float(times[len(times) % turns :].mean()), *times[-turns:].tolist()]


def _measured_steps(samples: dict[tuple[int, bytes], Samples]) -> dict[int, list[int]]:
    """The steps behind the warm-up, by slice."""
    steps: dict[int, set[int]] = {}
    for entry in samples.values():
        for (slice_index, step), warm in zip(entry.sources, entry.is_warm, strict=True):
            if not warm:
                steps.setdefault(slice_index, set()).add(step)
    return {slice_index: sorted(found) for slice_index, found in sorted(steps.items())}


def _resample(steps: dict[int, list[int]], generator: np.random.Generator) -> dict[tuple[int, int], int]:
    drawn: dict[tuple[int, int], int] = {}
    for slice_index, measured in steps.items():
        for step in generator.choice(measured, size=len(measured)).tolist():
            drawn[slice_index, step] = drawn.get((slice_index, step), 0) + 1
    return drawn
