"""Predicts the step time from measured steps, and chooses the measured steps that stand for all of them.

It measures nothing; how weights get into a graph is prism_sdk.graph.calibrate's.

A collective starts when the last of its members arrives, and the mean latest arrival is later than the latest mean
arrival (E[max X] >= max E[X]): a timeline of means is too short, the more so the more ranks meet. So the prediction is
the mean over *draws*: in each, every step of the ranks of one slice has the weights of one whole measured step, so that
units of a step and ranks that ran side by side keep their correlation, while slices vary independently. Transfers
between slices have no measured step; they are what the caller gives.
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

__all__ = ["Prediction", "predict_step_time"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted mean step time in ns, and a timeline whose step times are typical."""

    interval: Interval
    calibration: Calibration
    """Of all draws the one whose mean step and last step are nearest to their means over all draws."""
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
    samples, clipped = collect_samples(slice_graphs, warmup_steps=warmup_steps)
    structures = structures_of(bare_graph, stands_for=stands_for)
    generator = np.random.default_rng(seed)

    def merged(places: _Places | None = None, drawn: dict[tuple[int, int], int] | None = None) -> Calibration:
        return merge_samples(
            bare_graph, samples, clipped=clipped, default_transfer_ns=default_transfer_ns, drawn=drawn,
            places=None if places is None else places.at, structures=structures,
        )  # fmt: skip

    seeds = generator.integers(0, 2**63, size=max(num_draws, 1)).tolist()
    found = np.array([_mean_and_last_ns(merged(_Places(one)).timeline) for one in seeds])
    typical = int(np.square(found / np.maximum(found.mean(axis=0), 1.0) - 1.0).sum(axis=1).argmin())
    estimate = float(found[:, 0].mean())

    steps = _measured_steps(samples)
    resampled = np.array([
        step_time_ns(merged(drawn=_resample(steps, generator)).timeline) for _ in range(num_resamples)
    ])  # fmt: skip
    interval = percentile_interval(
        resampled * (estimate / max(resampled.mean(), 1.0)), estimate=estimate, confidence=confidence,
        num_samples=min((len(measured) for measured in steps.values()), default=0),
    )  # fmt: skip
    return Prediction(interval=interval, calibration=merged(_Places(seeds[typical])), means=merged())


class _Places:
    """A random number for each step of each slice, the same whenever it is asked for."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._known: dict[tuple[int, int], float] = {}

    def at(self, slice_index: int, step: int) -> float:
        key = (slice_index, step)
        if key not in self._known:
            self._known[key] = self._generator.random()
        return self._known[key]


def _mean_and_last_ns(timeline: Schedule) -> tuple[float, float]:
    """The mean step time, and that of the last whole step: an emulation goes on like it beyond the recorded steps."""
    mean, times = step_time_ns(timeline), whole_steps_ns(timeline)
    return mean, float(times[-1]) if len(times) else mean


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
