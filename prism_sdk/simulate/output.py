"""Writes a simulated timeline as a trace: a calibrated graph that every tool reads, and that simulates to itself.

It decides no times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.simulation import Timeline
from prism_sdk.simulate.weights import LEAD, PROVENANCE, find_rows
from prismtrace import ABSENT, ABSENT32, GraphKind, Op, TraceReader, TraceWriter, UnitKind
from prismtrace.rewriting import atomic_output

__all__ = ["write_timeline"]


def write_timeline(
    timeline: Timeline, output: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None,
    keep_columns: bool = True, progress: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Write the timeline of every rank; whole or not at all.

    Args:
        timeline: what was simulated.
        output: the file; one that is there is replaced.
        metadata: text pairs beside those of the source.
        keep_columns: take all other columns from the source, whose units must be the same (labels, sizes, payload
            digests); else the file has what the simulation knows.
        progress: is told how many ranks of how many are written.
    """
    tell = progress or (lambda done, total: None)
    job = timeline.job
    facts = {**job.metadata, "profile": "schedule-unit,replay", **(metadata or {})}
    with (
        atomic_output(os.fspath(output), overwrite=True) as temporary,
        TraceWriter(temporary, graph_kind=GraphKind.CALIBRATED, world_size=job.world_size, metadata=facts) as out,
    ):
        for group in job.groups.values():
            out.add_group(group)
        if keep_columns:
            with TraceReader(job.source, allow_unfinished=True) as reader:
                for position in range(job.num_ranks):
                    rank = int(job.ranks[position])
                    table = reader.units(rank)
                    columns: dict[str, Any] = {**table.columns(), **_times(timeline, position)}
                    out.add_units(rank, columns)
                    out.add_steps(rank, _steps(timeline, position, reader))
                    out.add_scalars(rank, reader.scalars(rank))
                    tell(position + 1, job.num_ranks)
        else:
            for position in range(job.num_ranks):
                out.add_units(int(job.ranks[position]), {**_structure(job, position), **_times(timeline, position)})
                out.add_steps(int(job.ranks[position]), _steps(timeline, position, None))
                tell(position + 1, job.num_ranks)


def _times(timeline: Timeline, position: int) -> dict[str, npt.NDArray[Any]]:
    job = timeline.job
    rows, weights = find_rows(job, position)
    times = timeline.times(position)
    kind = job.programs.kind[rows]
    is_compute, is_wait = kind == UnitKind.COMPUTE, kind == UnitKind.WAIT
    main, side = job.main[weights], job.side[weights]
    transfer = np.where(is_compute, ABSENT, main)
    if timeline.shared is not None:
        # what a transfer took with its links shared, so that the timeline gives itself again
        counts = ~is_compute & ~is_wait & (kind != UnitKind.SEND) & (main >= 0)
        lanes = job.lanes.event[job.lanes.offsets[position] : job.lanes.offsets[position + 1]]
        event = lanes[job.programs.lane_of[rows][counts]] + job.programs.ordinal[rows][counts]
        transfer[counts] = times.end_ns[counts] - timeline.arrival_ns[event]
    # detached members keep their completion; in the graph it counts from the last arrival, which lies behind it
    transfer[~is_compute & ~is_wait & (main < 0)] = 0
    return {"start_ns": times.start_ns, "end_ns": times.end_ns, "transfer_ns": transfer, "gap_ns": np.maximum(side, 0),
            PROVENANCE: job.provenance[weights],
            **({LEAD: np.maximum(-side, 0)} if (side < 0).any() else {})}  # fmt: skip


def _steps(timeline: Timeline, position: int, reader: TraceReader | None) -> dict[str, Any]:
    job = timeline.job
    bounds = job.programs.bounds_of(int(job.program[position]))
    ends = timeline.step_end_ns[timeline.step_offsets[position] : timeline.step_offsets[position + 1]]
    step = job.programs.bound_step[bounds]
    real = (step != ABSENT32) & job.programs.bound_is_whole[bounds]
    start = np.concatenate([[ABSENT], ends[:-1]]) if len(ends) else ends
    columns: dict[str, Any] = {"step": step[real], "start_ns": start[real], "end_ns": ends[real]}
    if reader is not None:
        table = reader.steps(int(job.ranks[position]))
        if len(table):
            known = dict(zip(step.tolist(), ends.tolist(), strict=True))
            before = dict(zip(step[1:].tolist(), ends[:-1].tolist(), strict=True))
            steps = table.step.tolist()
            return {**table.columns(),
                    "end_ns": np.array([known.get(s, int(ends[-1])) for s in steps], dtype=np.int64),
                    "start_ns": np.array([before.get(s, ABSENT) for s in steps], dtype=np.int64)}  # fmt: skip
    return columns


def _structure(job: SimJob, position: int) -> dict[str, npt.NDArray[Any]]:
    """The registry columns that the simulation knows, of one rank."""
    p, lanes = job.programs, job.lanes
    program = int(job.program[position])
    rows = p.rows(program)
    kind, lane_of = p.kind[rows], p.lane_of[rows]
    is_communication = lane_of >= 0
    lane = lanes.lane[lanes.offsets[position] : lanes.offsets[position + 1]][np.maximum(lane_of, 0)] if len(
        lanes.lane) else np.zeros(len(kind), dtype=np.int64)  # fmt: skip
    is_message = is_communication & (kind != UnitKind.COLLECTIVE)
    bounds = p.bounds_of(program)
    step = np.repeat(p.bound_step[bounds], np.diff(p.bounds[bounds], prepend=0))
    op = np.where(kind == UnitKind.SEND, Op.SEND, np.where(kind == UnitKind.RECV, Op.RECV, p.op[rows]))
    peer = np.where(kind == UnitKind.SEND, lanes.destination[lane], lanes.source[lane])
    return {
        "kind": kind, "phase": p.phase[rows],
        "op": op.astype(np.uint8),
        "step": step, "microbatch": p.microbatch[rows],
        "group_id": np.where(is_communication, lanes.group_id[lane], 0).astype(np.uint64),
        "seq": np.where(is_communication, lanes.first_seq[lane] + p.ordinal[rows], ABSENT),
        "peer": np.where(is_message, peer, ABSENT32).astype(np.int32),
        "tag": np.where(is_message, lanes.tag[lane], ABSENT),
        "awaits": np.where(p.awaited[rows] >= 0, p.awaited[rows].astype(np.int64), ABSENT),
        "stage": np.full(len(kind), job.stage[position] if job.stage[position] >= 0 else ABSENT32, dtype=np.int32),
    }  # fmt: skip
