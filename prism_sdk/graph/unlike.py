"""Says how runs differ from the graph whose times they are to show. It measures nothing, and reads no names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prism_sdk.graph.calibrate import Int64Array, structures_of
from prism_sdk.graph.job import JobGraph
from prism_sdk.wording import counted

__all__ = ["first_difference"]

_COMMUNICATION = ("kind", "op", "group_id", "peer")


def first_difference(
    graph: JobGraph, runs: Sequence[JobGraph], *, stands_for: Mapping[int, int] | None = None
) -> str | None:
    """What a run does otherwise in the first step of the graph that none shows; None where all steps are shown.

    Args:
        graph: the job.
        runs: what ran of it, each rank in one of them.
        stands_for: by rank the one that ran in its place.
    """
    shown = {key for run in runs for keys in structures_of(run).values() for key in keys}
    for segment, keys in structures_of(graph, stands_for=stands_for).items():
        if shown.isdisjoint(keys):
            rank = keys[0][0]
            run = next((one for one in runs if rank in one.ranks), None)
            return f"rank {rank} did not run" if run is None else _difference(graph, run, rank, segment.step)
    return None


def _difference(graph: JobGraph, run: JobGraph, rank: int, step: int) -> str:
    expected, found = _communications(graph, rank), _communications(run, rank)
    num = min(len(expected), len(found))
    wanted, got = (
        np.stack([one.columns[name][rows[:num]].astype(np.int64) for name in _COMMUNICATION])
        for one, rows in ((graph, expected), (run, found))
    )
    other = np.flatnonzero((wanted != got).any(axis=0))
    if len(other):
        at = int(other[0])
        return f"the graph has {graph.describe(int(expected[at]))}, the run did {run.describe(int(found[at]))}"
    if len(expected) != len(found):
        return f"rank {rank} communicates {counted(len(found), 'time')}, in the graph {len(expected)}"
    units, in_graph = (int((one.columns["step"][one.rows(rank)] == step).sum()) for one in (run, graph))
    return (
        f"rank {rank} communicates as recorded, and its computing or waiting is cut otherwise: "
        f"step {step} has {counted(units, 'unit')}, in the graph {in_graph}"
    )


def _communications(graph: JobGraph, rank: int) -> Int64Array:
    rows = np.arange(len(graph))[graph.rows(rank)]
    return rows[graph.event_of_row[rows] >= 0]
