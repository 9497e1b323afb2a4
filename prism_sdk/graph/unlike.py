"""Says how runs differ from the graph whose times they are to show. It measures nothing, and reads no names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prism_sdk.graph.calibrate import Int64Array, Key, structures_of
from prism_sdk.graph.job import JobGraph
from prism_sdk.wording import counted

__all__ = ["first_difference"]

_COMMUNICATION = ("kind", "op", "group_id", "peer")


def first_difference(graph: JobGraph, runs: Sequence[JobGraph]) -> str | None:
    """The first rank of a run that has a step whose units no step of the rank in the graph has; None where none has."""
    known: set[Key] = {key for keys in structures_of(graph).values() for key in keys}
    for run in runs:
        for segment, (_, key) in structures_of(run).items():
            if key not in known and segment.rank in graph.ranks:
                return _difference(graph, run, segment.rank, segment.step)
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
        f"rank {rank} communicates as recorded, and its computing is cut otherwise: "
        f"step {step} has {counted(units, 'unit')}, in the graph {in_graph}"
    )


def _communications(graph: JobGraph, rank: int) -> Int64Array:
    rows = np.arange(len(graph))[graph.rows(rank)]
    return rows[graph.event_of_row[rows] >= 0]
