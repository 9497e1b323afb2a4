"""The few statistics that calibration and comparison share, on integers of nanoseconds where that is possible.

It knows nothing of graphs or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prismtrace import ABSENT

__all__ = ["Interval", "bootstrap_interval", "mean_known", "percentile_interval"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with a confidence interval, and how many samples it rests on."""

    estimate: float
    low: float
    high: float
    confidence: float
    num_samples: int


def mean_known(samples: Int64Array) -> Int64Array:
    """The mean down each column of the values that are not ABSENT; ABSENT where there is none. Rounds down."""
    is_known = samples != ABSENT
    num_known = is_known.sum(axis=0)
    total = np.where(is_known, samples, 0).sum(axis=0)
    mean: Int64Array = np.where(num_known > 0, total // np.maximum(num_known, 1), ABSENT)
    return mean


def percentile_interval(
    resampled: npt.NDArray[np.float64], *, estimate: float, confidence: float, num_samples: int
) -> Interval:
    """The interval that holds the middle ``confidence`` of resampled estimates."""
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(resampled, [tail, 100.0 - tail])
    return Interval(estimate=estimate, low=float(low), high=float(high), confidence=confidence, num_samples=num_samples)


def bootstrap_interval(
    values: npt.ArrayLike,
    *,
    statistic: Literal["mean", "median"] = "mean",
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """A percentile bootstrap interval of the mean or median of some values; the same seed gives the same interval.

    Raises ValueError where there are no values.
    """
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        raise ValueError("no values: there is nothing to estimate")
    function: Any = np.mean if statistic == "mean" else np.median
    chosen = np.random.default_rng(seed).integers(0, len(data), size=(num_resamples, len(data)))
    return percentile_interval(
        function(data[chosen], axis=1), estimate=float(function(data)), confidence=confidence, num_samples=len(data)
    )
