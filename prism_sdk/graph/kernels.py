"""Compares the kernels that two sides recorded of a job: of each name start and duration, beside the real runs' spread.

Responsible for matching kernels of one name, step by step in the order in which they started, and for the numbers.  It
reads what `--kernels` put into the traces' events, and runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prismtrace import ABSENT, EventKind, TraceReader

__all__ = ["KernelComparison", "StepKernels", "compare_kernels", "read_kernels"]

_STEP_COLUMN = "prism.step"
Int64Array = npt.NDArray[np.int64]
StepKernels = Mapping[int, Mapping[str, tuple[Int64Array, Int64Array]]]
"""Step -> name -> starts after the step's first kernel, and durations, in ns, in the order of the starts."""


@dataclass(frozen=True, kw_only=True)
class KernelComparison:
    """The kernels of one name, over the steps that all runs recorded.

    Starts are counted from the first kernel of the step. None: numbers of kernels differ, or there is one real run.
    """

    name: str
    num_real: int
    """Kernels in these steps, of the first real run."""
    num_other: int
    real_ns: float
    """Time of all of them in a step, the mean over steps and runs."""
    other_ns: float
    error_percent: float | None
    real_spread_percent: float | None
    """Largest less smallest such time of the real runs, in percent of their mean."""
    start_difference_ns: float | None
    """Median over the kernels: the other runs' mean start against the real runs'."""
    real_start_spread_ns: float | None
    """Median over the kernels: the latest less the earliest start of the real runs."""


def read_kernels(reader: TraceReader, rank: int) -> StepKernels:
    """The recorded kernels of a rank; empty where `--kernels` was not given."""
    if not reader.num_events(rank):
        return {}
    events = reader.events(rank)
    columns = events.columns()
    step = columns.get(_STEP_COLUMN)
    if step is None:
        return {}
    start, end = (np.asarray(columns[name]).astype(np.int64) for name in ("start_ns", "end_ns"))
    whole = (np.asarray(columns["kind"]) == EventKind.SPAN) & (np.asarray(step) != ABSENT) & (end != ABSENT)
    names = np.array([name or "" for name in columns["name"]], dtype=object)
    result: dict[int, dict[str, tuple[Int64Array, Int64Array]]] = {}
    for number in np.unique(np.asarray(step)[whole]).tolist():
        rows = np.flatnonzero(whole & (np.asarray(step) == number))
        rows = rows[np.argsort(start[rows], kind="stable")]
        first = start[rows[0]]
        unique, inverse = np.unique(names[rows].astype(str), return_inverse=True)
        result[int(number)] = {
            str(name): (start[chosen] - first, end[chosen] - start[chosen])
            for at, name in enumerate(unique)
            for chosen in [rows[inverse.reshape(-1) == at]]
        }
    return result


def compare_kernels(real: Sequence[StepKernels], other: Sequence[StepKernels]) -> tuple[KernelComparison, ...]:
    """Each name, the longest first. Empty where the runs have no recorded step in common."""
    runs = [*real, *other]
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    names = {name for run in runs for step in steps for name in run[step]}
    found = [_compare_name(name, real, other, steps) for name in sorted(names)]
    return tuple(sorted(found, key=lambda kernel: -max(kernel.real_ns, kernel.other_ns)))


def _compare_name(
    name: str, real: Sequence[StepKernels], other: Sequence[StepKernels], steps: Sequence[int]
) -> KernelComparison:
    nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    of = [[[run[step].get(name, nothing) for step in steps] for run in side] for side in (real, other)]
    counts = [[[len(starts) for starts, _ in run] for run in side] for side in of]
    totals = [np.array([sum(int(d.sum()) for _, d in run) / len(steps) for run in side]) for side in of]
    real_ns, other_ns = float(totals[0].mean()), float(totals[1].mean())
    difference = spread = None
    if all(run == counts[0][0] for side in counts for run in side):
        starts = [np.array([np.concatenate([s for s, _ in run]) for run in side], dtype=np.float64) for side in of]
        difference = float(np.median(starts[1].mean(axis=0) - starts[0].mean(axis=0)))
        spread = float(np.median(np.ptp(starts[0], axis=0))) if len(real) > 1 else None
    return KernelComparison(
        name=name, num_real=sum(counts[0][0]), num_other=sum(counts[1][0]), real_ns=real_ns, other_ns=other_ns,
        error_percent=100 * (other_ns / real_ns - 1) if real_ns else None,
        real_spread_percent=100 * float(np.ptp(totals[0])) / real_ns if len(real) > 1 and real_ns else None,
        start_difference_ns=difference, real_start_spread_ns=spread,
    )  # fmt: skip
