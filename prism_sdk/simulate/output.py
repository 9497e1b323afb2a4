"""Writes a simulated timeline as a trace: a calibrated graph that every tool reads, and that simulates to itself.

It decides no times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.simulate.job import ALONE
from prism_sdk.simulate.kept import kept_scalars, kept_steps, kept_units, structure_of
from prism_sdk.simulate.simulation import Timeline
from prism_sdk.simulate.weights import FREE_OF, LEAD, PROVENANCE, FreeOf, events_of, find_rows
from prismtrace import ABSENT, ABSENT32, GraphKind, TraceReader, TraceWriter, UnitKind
from prismtrace.model import BEGINS_KEY
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
        keep_columns: take from the source what is still true (labels, sizes, types, what adapters said; ``kept`` says
            what is not); else the file has what the simulation knows.
        progress: is told how many ranks of how many are written.
    """
    tell = progress or (lambda done, total: None)
    job = timeline.job
    profile = "schedule-unit" if len(job.alone_ids) else "schedule-unit,replay"
    begins = zip(map(BEGINS_KEY.format, job.ranks.tolist()), job.origin_ns.tolist(), strict=True)
    facts = {**job.metadata, "profile": profile, **(metadata or {})}
    facts = {key: value for key, value in facts.items() if not key.endswith(BEGINS_KEY.removeprefix("rank.{}"))}
    facts |= {key: str(begin) for key, begin in begins if begin}
    with (
        atomic_output(os.fspath(output), overwrite=True) as temporary,
        TraceWriter(temporary, graph_kind=GraphKind.CALIBRATED, world_size=job.world_size, metadata=facts) as out,
    ):
        out.add_groups(group for group in job.groups.values() if group.backend != ALONE)
        source = job.source_rows if keep_columns else None
        with TraceReader(job.source, allow_unfinished=True) if source is not None else nullcontext() as reader:
            for position in range(job.num_ranks):
                rank = int(job.ranks[position])
                columns: Mapping[str, Any]
                steps: Mapping[str, Any]
                if source is not None and reader is not None:
                    columns, steps = kept_units(job, position, reader, source), kept_steps(reader, source, position)
                    out.add_scalars(rank, kept_scalars(reader, source, position))
                else:
                    columns, steps = structure_of(job, position), {}
                out.add_units(rank, {**columns, **_times(timeline, position)})
                out.add_steps(rank, _steps(timeline, position, steps))
                tell(position + 1, job.num_ranks)


def _times(timeline: Timeline, position: int) -> dict[str, npt.NDArray[Any]]:
    job = timeline.job
    rows, weights = find_rows(job, position)
    times = timeline.times(position)
    kind = job.programs.kind[rows]
    event, talks = events_of(job, position)
    main, side = job.main[weights], job.side[weights]
    transfer = np.where(kind == UnitKind.COMPUTE, ABSENT, main)
    if timeline.shared is not None:
        # what a transfer took with its links shared, so that the timeline gives itself again
        counts = (kind[talks] != UnitKind.SEND) & (main[talks] >= 0)
        transfer[talks[counts]] = times.end_ns[talks[counts]] - timeline.arrival_ns[event[counts]]
    # detached members keep their completion; for a reader that counts from the last arrival, it lies behind it
    is_detached = main[talks] < 0
    transfer[talks[is_detached]] = 0
    lane = job.lanes.lane[job.lanes.offsets[position] + job.programs.lane_of[rows][talks]]
    has_before = (event < job.lanes.num_collectives) & (job.programs.ordinal[rows][talks] > 0)
    free_of = np.zeros(len(kind), dtype=np.uint8)
    free_of[talks[has_before][job.chained[event[has_before]] == 0]] = FreeOf.BEFORE
    free_of[talks[is_detached | np.isin(job.lanes.group_id[lane], job.alone_ids)]] |= np.uint8(FreeOf.OTHERS)
    return {"start_ns": times.start_ns, "end_ns": times.end_ns, "transfer_ns": transfer, "gap_ns": np.maximum(side, 0),
            PROVENANCE: job.provenance[weights],
            **({LEAD: np.maximum(-side, 0)} if (side < 0).any() else {}),
            **({FREE_OF: free_of} if free_of.any() else {})}  # fmt: skip


def _steps(timeline: Timeline, position: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of a rank; ``kept``: columns of those that the source has."""
    job = timeline.job
    bounds = job.programs.bounds_of(int(job.program[position]))
    ends = timeline.step_end_ns[timeline.step_offsets[position] : timeline.step_offsets[position + 1]]
    step = job.programs.bound_step[bounds]
    if len(kept.get("step", ())) and len(ends):
        known = dict(zip(step.tolist(), ends.tolist(), strict=True))
        before = dict(zip(step[1:].tolist(), ends[:-1].tolist(), strict=True))
        steps = kept["step"].tolist()
        return {**kept, "end_ns": np.array([known.get(s, int(ends[-1])) for s in steps], dtype=np.int64),
                "start_ns": np.array([before.get(s, ABSENT) for s in steps], dtype=np.int64)}  # fmt: skip
    real = (step != ABSENT32) & job.programs.bound_is_whole[bounds]
    start = np.concatenate([[ABSENT], ends[:-1]]) if len(ends) else ends
    return {"step": step[real], "start_ns": start[real], "end_ns": ends[real]}
