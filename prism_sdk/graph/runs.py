"""Reads one rank of one run as comparisons want it: its graph, its steps, what its kernels took.

It compares nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.kernels import StepKernels, read_kernels
from prismtrace import ABSENT, TraceReader

__all__ = ["Run", "read_run"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """What one rank of one trace holds."""

    path: str
    graph: JobGraph | None
    steps: Int64Array
    time_ns: Int64Array
    loss: npt.NDArray[np.float64]
    memory_bytes: Int64Array
    kernels: StepKernels


def read_run(reader: TraceReader, path: str, rank: int) -> Run:
    """One rank of a trace; `path` is what messages call the run."""
    table = reader.steps(rank)
    order = np.argsort(table.step, kind="stable")
    step, start, end = (np.asarray(getattr(table, n)).astype(np.int64)[order] for n in ("step", "start_ns", "end_ns"))
    # where the start is absent it is the end of the step before
    before = np.concatenate([[ABSENT], end[:-1]])[: len(end)]
    follows = np.concatenate([[False], step[1:] == step[:-1] + 1])[: len(end)]
    start = np.where((start == ABSENT) & follows, before, start)
    time = np.where((start == ABSENT) | (end == ABSENT), ABSENT, end - start)
    graph = None
    if reader.num_units(rank):
        graph = JobGraph.load(reader, ranks=[rank])
    return Run(path, graph, step, time, np.asarray(table.loss, dtype=np.float64)[order],
                np.asarray(table.memory_peak_bytes, dtype=np.int64)[order], read_kernels(reader, rank))  # fmt: skip
