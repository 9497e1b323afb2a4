"""Says how large the pipeline bubble of each stage is, beside the formula that it is compared to.

It does not find out which schedule was used: it says what the common ones would give.

With p stages, m microbatches and v model chunks a stage, t_id the time to compute all microbatches and t_pb the bubble,
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021, section
2.2), give for equal stages and free communication

    t_pb / t_id = (p - 1) / m         GPipe and 1F1B
    t_pb / t_id = (p - 1) / (v m)     interleaved 1F1B

Measured here, for each rank and step: t_id is the time in forward and backward units that have a microbatch; the span
goes from the first such unit of all ranks of its pipeline to the last; t_pb is the span less t_id. So t_pb also holds
communication that nothing hides, and unequal stages: that is what the difference to the formula shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.frames import ResultFrames, columns_of
from prism_sdk.analysis.job import Job
from prismtrace import ABSENT32, Phase, UnitKind

__all__ = ["Pipeline", "StageBubble", "pipeline_of"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StageBubble:
    """The ranks of one stage; times are means over these ranks and the steady steps."""

    stage: int
    ranks: tuple[int, ...]
    busy_ns: float
    span_ns: float
    bubble_ns: float
    #: bubble over busy, as in the formula.
    bubble_ratio: float
    forward_ns: float
    backward_ns: float


@dataclass(frozen=True, kw_only=True)
class Pipeline(ResultFrames):
    """The stages of a pipelined job, and what the formula of this module expects."""

    stages: tuple[StageBubble, ...]
    num_stages: int
    num_microbatches: int
    num_chunks: int
    #: (p - 1) / (v m)
    expected_ratio: float
    #: Mean over stages.
    bubble_ratio: float
    #: Largest busy time of a stage over the mean of all: 1 is balanced.
    stage_imbalance: float

    def columns(self) -> dict[str, Any]:
        """One row a stage, for data frames."""
        return columns_of(self.stages)


def pipeline_of(job: Job) -> Pipeline | None:
    """The bubbles of a pipelined job; None where units carry no microbatch and stage, or there is one stage."""
    graph = job.graph
    c = graph.columns
    tagged = job.is_timed & (c["kind"] == UnitKind.COMPUTE) & (c["microbatch"] != ABSENT32) & (c["stage"] != ABSENT32)
    has_phase = (c["phase"] == Phase.FORWARD) | (c["phase"] == Phase.BACKWARD)
    if (tagged & has_phase).any():
        tagged &= has_phase
    rows = np.flatnonzero(tagged)
    if not len(rows):
        return None
    position = np.searchsorted(graph.offsets, rows, side="right") - 1
    chunk = np.where(c["model_chunk"][rows] == ABSENT32, 0, c["model_chunk"][rows])
    parts = np.unique(np.stack([c["stage"][rows], chunk], axis=1), axis=0)
    of_rank = np.unique(np.stack([position, c["stage"][rows], chunk], axis=1), axis=0)
    num_chunks = int(np.bincount(of_rank[:, 0]).max())
    num_stages = max(1, len(parts) // num_chunks)
    if num_stages < 2:
        return None
    steps = c["step"][rows].astype(np.int64)
    steady = np.unique(steps)[1:] if len(np.unique(steps)) > 1 else np.unique(steps)
    kept = np.isin(steps, steady)
    rows, position, steps = rows[kept], position[kept], steps[kept]
    start, end = c["start_ns"][rows], c["end_ns"][rows]
    together = _pipelines(job)[position]
    spans, span_of = np.unique(np.stack([together, steps], axis=1), axis=0, return_inverse=True)
    first, last = np.full(len(spans), np.iinfo(np.int64).max), np.full(len(spans), np.iinfo(np.int64).min)
    np.minimum.at(first, span_of.reshape(-1), start)
    np.maximum.at(last, span_of.reshape(-1), end)
    cells, cell_of = np.unique(np.stack([position, steps], axis=1), axis=0, return_inverse=True)
    cell_of = cell_of.reshape(-1)
    busy, forward = np.zeros(len(cells), dtype=np.int64), np.zeros(len(cells), dtype=np.int64)
    np.add.at(busy, cell_of, end - start)
    np.add.at(forward, cell_of, np.where(c["phase"][rows] == Phase.FORWARD, end - start, 0))
    backward = np.zeros(len(cells), dtype=np.int64)
    np.add.at(backward, cell_of, np.where(c["phase"][rows] == Phase.BACKWARD, end - start, 0))
    span = np.zeros(len(cells), dtype=np.int64)
    span[cell_of] = (last - first)[span_of.reshape(-1)]
    if job.fold is not None:
        cells, (busy, forward, backward, span) = _of_all(job, cells, (busy, forward, backward, span))
    # the first part that a rank holds names its stage
    stage_of = np.full(len(graph.ranks), -1, dtype=np.int64)
    for at, stage in zip(of_rank[::-1, 0].tolist(), of_rank[::-1, 1].tolist(), strict=True):
        stage_of[at] = stage
    stage_of = stage_of[job.place]
    stages = []
    for stage in np.unique(stage_of[cells[:, 0]]).tolist():
        mine = stage_of[cells[:, 0]] == stage
        mean_busy, mean_span = float(busy[mine].mean()), float(span[mine].mean())
        members = tuple(job.ranks[at] for at in np.unique(cells[mine, 0]).tolist())
        stages.append(StageBubble(
            stage=stage, ranks=members, busy_ns=mean_busy, span_ns=mean_span, bubble_ns=mean_span - mean_busy,
            bubble_ratio=(mean_span - mean_busy) / mean_busy if mean_busy else float("nan"),
            forward_ns=float(forward[mine].mean()), backward_ns=float(backward[mine].mean()),
        ))  # fmt: skip
    num_microbatches = len(np.unique(c["microbatch"][rows]))
    all_busy = np.array([stage.busy_ns for stage in stages])
    return Pipeline(
        stages=tuple(stages), num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks,
        expected_ratio=(num_stages - 1) / (num_chunks * num_microbatches),
        bubble_ratio=float(np.mean([stage.bubble_ratio for stage in stages])),
        stage_imbalance=float(all_busy.max() / all_busy.mean()) if all_busy.any() else 1.0,
    )  # fmt: skip


def _of_all(job: Job, cells: Int64Array, figures: tuple[Int64Array, ...]) -> tuple[Int64Array, list[Int64Array]]:
    """Rank and step of all ranks, and their figures, from those of the ranks in the graph (rising)."""
    bounds = np.searchsorted(cells[:, 0], np.arange(len(job.graph.ranks) + 1))
    sizes = np.diff(bounds)[job.place]
    position = np.repeat(np.arange(len(sizes)), sizes)
    taken = np.arange(len(position)) + np.repeat(bounds[job.place] - np.cumsum(sizes) + sizes, sizes)
    return np.stack([position, cells[taken, 1]], axis=1), [values[taken] for values in figures]


def _pipelines(job: Job) -> Int64Array:
    """Which pipeline each rank of the graph is in: ranks that exchange messages are in one; all are where none do."""
    graph = job.graph
    parent = list(range(len(graph.ranks)))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    c = graph.columns
    rows = np.flatnonzero((c["kind"] == UnitKind.SEND) | (c["kind"] == UnitKind.RECV))
    place = {rank: at for at, rank in enumerate(graph.ranks)}
    position = np.searchsorted(graph.offsets, rows, side="right") - 1
    pairs = np.unique(np.stack([position, c["peer"][rows]], axis=1), axis=0) if len(rows) else np.zeros((0, 2), int)
    for at, peer in pairs.tolist():
        if peer in place:
            parent[root(at)] = root(place[peer])
    if not len(pairs):
        return np.zeros(len(parent), dtype=np.int64)
    return np.array([root(at) for at in range(len(parent))], dtype=np.int64)
