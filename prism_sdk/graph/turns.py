"""Finds out whether steps of a job come in kinds that take turns: with other data, or with more work every few steps.

It looks at how long ranks compute and nowhere else; what follows for times is calibrate's and plan's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.timing import step_bounds
from prismtrace import ABSENT, UnitKind

__all__ = ["turns_of"]

# turns must leave at most a tenth of the variation between steps unexplained, and make a rank's steps differ so much
_LEAST_EXPLAINED, _LEAST_DIFFERENCE = 0.9, 0.05


def turns_of(graphs: Sequence[JobGraph], *, warmup_steps: int = 1) -> int:
    """After how many steps the same kind of step comes again; 1 where nothing shows that there are several kinds.

    Steps behind the warm-up must show each kind at least twice. Where several ``graphs`` show a rank, its steps have
    the median length over them. The kinds may be a matter of one rank alone (who writes checkpoints, say).
    """
    by_rank: dict[int, list[dict[int, int]]] = {}
    for graph in graphs:
        for rank, lengths in _step_lengths_ns(graph, warmup_steps).items():
            by_rank.setdefault(rank, []).append(lengths)
    shown = [set(lengths) for runs in by_rank.values() for lengths in runs]
    steps = sorted(set.intersection(*shown)) if shown else []
    if len(steps) < 4 or steps[-1] - steps[0] != len(steps) - 1:
        return 1
    matrix = np.array([np.median([[run[s] for s in steps] for run in runs], axis=0) for runs in by_rank.values()])
    matrix = matrix[matrix.mean(axis=1) > 0]
    matrix /= matrix.mean(axis=1, keepdims=True)
    variation = float(np.square(matrix - 1.0).sum())
    for turns in range(2, len(steps) // 2 + 1):
        kinds = np.stack([matrix[:, kind::turns].mean(axis=1) for kind in range(turns)], axis=1)
        unexplained = float(np.square(matrix - kinds[:, np.arange(len(steps)) % turns]).sum())
        differs = len(kinds) > 0 and float(np.ptp(kinds, axis=1).max()) >= _LEAST_DIFFERENCE
        if differs and unexplained <= (1.0 - _LEAST_EXPLAINED) * variation:
            return turns
    return 1


def _step_lengths_ns(graph: JobGraph, warmup_steps: int) -> dict[int, dict[int, int]]:
    """By rank and whole step behind the warm-up, how long the rank computed."""
    c = graph.columns
    timed = (c["kind"] == UnitKind.COMPUTE) & (c["start_ns"] != ABSENT) & (c["end_ns"] != ABSENT)
    summed = np.append(0, np.cumsum(np.where(timed, c["end_ns"] - c["start_ns"], 0)))
    place, step, end, is_whole = step_bounds(c["step"], c["phase"], graph.offsets)
    lengths: npt.NDArray[np.int64] = np.diff(summed[end], prepend=0)
    counts = is_whole & (step >= (step.min() if len(step) else 0) + warmup_steps)
    found: dict[int, dict[int, int]] = {rank: {} for rank in graph.ranks}
    for at in np.flatnonzero(counts).tolist():
        found[graph.ranks[int(place[at])]][int(step[at])] = int(lengths[at])
    return found
