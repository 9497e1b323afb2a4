"""Holds when the rows of a graph were, measured or calculated: what critical path and slack start from.

It finds no path and computes no times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.folded import Fold
from prism_sdk.analysis.job import Job
from prism_sdk.graph import JobGraph, Schedule
from prismtrace import ABSENT, UnitKind

__all__ = ["Times"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Times:
    """When the rows of a graph were, (N,) each; ABSENT where unknown."""

    graph: JobGraph
    #: For communication rows the post.
    start_ns: Int64Array
    end_ns: Int64Array
    #: Communication rows: when complete, and the last arrival.
    completion_ns: Int64Array
    arrival_ns: Int64Array
    #: Communication that holds up its host until it is complete, with no WAIT for it.
    is_blocking: npt.NDArray[np.bool_]
    #: Whom the ranks of the graph stand for; None: it has all.
    fold: Fold | None = None

    @classmethod
    def measured(cls, job: Job) -> Times:
        """The times in a trace."""
        c = job.graph.columns
        return cls(graph=job.graph, start_ns=c["start_ns"], end_ns=c["end_ns"], completion_ns=job.completion_ns,
                   arrival_ns=job.arrival_ns, is_blocking=job.is_blocking, fold=job.fold)  # fmt: skip

    @classmethod
    def scheduled(cls, schedule: Schedule) -> Times:
        """The times of a calculated timeline."""
        graph = schedule.graph
        communicates = graph.event_of_row >= 0
        arrival = np.where(communicates, schedule.arrival_ns[graph.event_of_row], ABSENT) if graph.num_events else (
            np.full(len(graph), ABSENT, dtype=np.int64))  # fmt: skip
        sends = graph.columns["kind"] == UnitKind.SEND
        return cls(graph=graph, start_ns=schedule.start_ns, end_ns=schedule.end_ns,
                   completion_ns=np.where(communicates, schedule.end_ns, ABSENT),
                   arrival_ns=np.where(sends, schedule.start_ns, arrival),
                   is_blocking=np.zeros(len(graph), dtype=np.bool_))  # fmt: skip
