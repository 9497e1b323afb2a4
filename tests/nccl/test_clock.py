"""Fitting a GPU's clock between bounds: the truth is within what the fit says it may be off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.nccl.clock import fit_clock
from prismtrace import ABSENT


def made(
    rng: np.random.Generator, *, num: int, span_ns: float, drift: float, offset_ns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Kernels of a GPU with a known clock: (gpu start, launched, gpu end, told)."""
    start = np.sort(rng.uniform(0, span_ns, num)).astype(np.int64) + 10**14
    end = start + rng.integers(5_000, 500_000, num)
    launched = start - 3_000 - rng.exponential(40_000, num).astype(np.int64)
    told = end + 2_000 + rng.exponential(60_000, num).astype(np.int64)

    def gpu(host: np.ndarray) -> np.ndarray:
        return host - offset_ns - np.rint((host - 10**14) * drift).astype(np.int64)

    return gpu(start), launched, gpu(end), told


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    drift_ppm=st.floats(-100, 100),
    offset_ns=st.integers(-(10**15), 10**15),
    span_s=st.sampled_from([0.2, 5.0, 600.0]),
    num=st.integers(30, 3000),
)
def test_the_truth_is_within_the_stated_room(
    seed: int, drift_ppm: float, offset_ns: int, span_s: float, num: int
) -> None:
    drift = drift_ppm * 1e-6
    rng = np.random.default_rng(seed)
    gpu_start, launched, gpu_end, told = made(rng, num=num, span_ns=span_s * 1e9, drift=drift, offset_ns=offset_ns)
    rng = np.random.default_rng(seed)  # the same again
    true_start = np.sort(rng.uniform(0, span_s * 1e9, num)).astype(np.int64) + 10**14
    fit = fit_clock((gpu_start, launched), (gpu_end, told))
    assert fit is not None and fit.uncertainty_ns is not None
    assert fit.num_violations == 0
    assert (fit.num_lower, fit.num_upper) == (num, num)
    found = fit.apply(gpu_start)
    # no kernel before its launch, none ending after it was known
    assert (found >= launched - 2).all() and (fit.apply(gpu_end) <= told + 2).all()
    assert np.abs(found - true_start).max() <= fit.uncertainty_ns + 3


def test_many_points_are_thinned_without_losing_the_tightest() -> None:
    rng = np.random.default_rng(5)
    gpu_start, launched, gpu_end, told = made(rng, num=200_000, span_ns=60e9, drift=3e-6, offset_ns=12345)
    fit = fit_clock((gpu_start, launched), (gpu_end, told))
    assert fit is not None and fit.num_violations == 0
    assert fit.drift == pytest.approx(3e-6, abs=1e-7)
    assert fit.uncertainty_ns is not None and fit.uncertainty_ns < 6_000


def test_one_side_only_says_so() -> None:
    ends, told = np.array([10, 20, 30]), np.array([115, 121, 133])
    fit = fit_clock((np.zeros(0, np.int64), np.zeros(0, np.int64)), (ends, told))
    assert fit is not None and fit.uncertainty_ns is None
    assert fit.offset_ns == 101 and fit.drift == 0.0
    assert list(fit.apply(np.array([20, ABSENT]))) == [121, ABSENT]


def test_nothing_known_gives_no_fit() -> None:
    none = np.zeros(0, np.int64)
    assert fit_clock((none, none), (none, none)) is None


def test_a_clock_that_jumps_is_noticed() -> None:
    rng = np.random.default_rng(1)
    gpu_start, launched, gpu_end, told = made(rng, num=1000, span_ns=1e9, drift=0.0, offset_ns=0)
    gpu_start[500:] += 10_000_000
    gpu_end[500:] += 10_000_000
    fit = fit_clock((gpu_start, launched), (gpu_end, told))
    assert fit is not None and fit.num_violations > 100
