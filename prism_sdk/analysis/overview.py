"""Runs every analysis that a trace has the data for, and says what is missing for the others. It formats nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from prism_sdk.analysis.balance import ExpertLoad, GroupBalance, balance_of_job, experts_of_job
from prism_sdk.analysis.bandwidth import Bandwidth, bandwidths
from prism_sdk.analysis.breakdown import MAX_GAP_NS, PARTS, Breakdown, breakdown_of
from prism_sdk.analysis.critical import CriticalPath, critical_path
from prism_sdk.analysis.frames import ResultFrames
from prism_sdk.analysis.job import MAX_ROWS, Job, load_job
from prism_sdk.analysis.layers import LayerCost, layer_costs
from prism_sdk.analysis.memory import RankMemory, memory_of
from prism_sdk.analysis.pipeline import Pipeline, pipeline_of
from prism_sdk.analysis.stragglers import Stragglers, stragglers_of
from prism_sdk.analysis.times import Times
from prism_sdk.analysis.variation import Variation, variation_of_jobs
from prism_sdk.errors import UsageError
from prism_sdk.graph import GraphDeadlockError
from prism_sdk.wording import counted
from prismtrace import ABSENT32, Op, Phase, TraceReader, UnitKind

__all__ = ["Analysis", "analyze"]

#: Above either, an analysis takes seconds.
_LARGE_RANKS, _LARGE_UNITS = 500, 200_000


@dataclass(frozen=True, kw_only=True)
class Analysis(ResultFrames):
    """What is known of one trace. None and empty: the trace does not hold what it takes; ``notes`` say what."""

    #: The trace as it was analysed: of ranks that are alike it may hold one.
    loaded: Job = field(repr=False)
    breakdown: Breakdown
    variation: Variation
    bandwidths: tuple[Bandwidth, ...]
    pipeline: Pipeline | None
    critical_path: CriticalPath | None
    stragglers: Stragglers
    balance: tuple[GroupBalance, ...]
    layers: tuple[LayerCost, ...]
    experts: tuple[ExpertLoad, ...]
    memory: tuple[RankMemory, ...]
    notes: tuple[str, ...]
    #: The column that was asked for, and what units with each of its values cost.
    by: str | None = None
    costs_by: tuple[LayerCost, ...] = ()

    @cached_property
    def job(self) -> Job:
        """The trace with the units of all ranks, which are read again where that was not needed so far."""
        loaded = self.loaded
        if loaded.fold is None:
            return loaded
        steps = loaded.graph.columns["step"]
        return load_job(loaded.path, ranks=loaded.ranks, steps=range(int(steps.min()), int(steps.max()) + 1))

    def columns(self) -> dict[str, Any]:
        """One row a rank, for data frames: the mean parts of its steps, slack, and time on the critical path."""
        ranks, parts = self.breakdown.ranks_parts_ns()
        slack = self.rank_slack_ns()
        on_path = self.critical_path.ranks_ns if self.critical_path is not None else {}
        known = self.critical_path is not None
        return {
            "rank": ranks, **{f"{name}_ns": parts[:, index] for index, name in enumerate(PARTS)},
            "slack_ns": [slack.get(rank) for rank in ranks.tolist()],
            "critical_ns": [on_path.get(rank, 0) if known else None for rank in ranks.tolist()],
        }  # fmt: skip

    def rank_slack_ns(self) -> dict[int, int]:
        """The smallest slack of the COMPUTE units of each rank: 0 on the critical path. {} without such a path."""
        if self.critical_path is None:
            return {}
        job, graph, slack = self.loaded, self.loaded.graph, self.critical_path.slack_ns
        if job.fold is not None:
            slack = slack[job.fold.rows_of_kept()]
        rows = np.flatnonzero((graph.columns["kind"] == UnitKind.COMPUTE) & (slack >= 0))
        smallest = np.full(len(graph.ranks), np.iinfo(np.int64).max)
        np.minimum.at(smallest, np.searchsorted(graph.offsets, rows, side="right") - 1, slack[rows])
        return {rank: int(value) for rank, value in zip(job.ranks, smallest[job.place].tolist(), strict=True)
                if value < np.iinfo(np.int64).max}  # fmt: skip

    def top_units(self, *, limit: int = 10) -> list[tuple[str, int, int]]:
        """What the critical path consists of: (name, number of units, nanoseconds), the most time first."""
        if self.critical_path is None:
            return []
        job, c = self.loaded, self.loaded.graph.columns
        found: dict[str, tuple[int, int]] = {}
        for segment in self.critical_path.segments:
            position, row = (0, segment.row) if job.fold is None else job.fold.folded_row(segment.row)
            if segment.part == "compute":
                phase = int(c["phase"][row])
                known = phase in Phase._value2member_map_ and phase
                name = f"compute {Phase(phase).name.lower()}" if known else "compute"
                if c["stage"][row] != ABSENT32:
                    name += f" of stage {c['stage'][row]}"
            elif segment.part == "communication" and c["group_id"][row]:
                group_id = int(c["group_id"][row])
                if job.fold is not None:
                    group_id = int(job.fold.group_of_lane[job.fold.lane(position, row)])
                group = job.groups.get(group_id)
                where = (group.description or group.name) if group is not None else ""
                name = f"communication in {where}" if where else "communication"
            else:
                name = segment.part.replace("_", " ")
            number, total = found.get(name, (0, 0))
            found[name] = (number + 1, total + segment.end_ns - segment.start_ns)
        ordered = sorted(found.items(), key=lambda item: -item[1][1])[:limit]
        return [(name, number, total) for name, (number, total) in ordered]

    def to_dict(self) -> dict[str, Any]:
        """The analysis as JSON knows it; per rank in place of per row."""
        ranks, parts = self.breakdown.ranks_parts_ns()
        path, slack = self.critical_path, self.rank_slack_ns()
        return {
            "file": self.loaded.path,
            "graph_kind": self.loaded.graph.graph_kind.name.lower(),
            "world_size": self.loaded.graph.world_size,
            "num_ranks": len(self.loaded.ranks),
            "steps": [int(step) for step in np.unique(self.breakdown.windows.step) if step != ABSENT32],
            "mean_step_ns": self.breakdown.mean_step_ns,
            "parts_ns": self.breakdown.mean_parts_ns,
            "overlap_ratio": self.breakdown.overlap_ratio,
            "ranks": [
                {"rank": rank, "parts_ns": dict(zip(PARTS, row, strict=True)), "slack_ns": slack.get(rank)}
                for rank, row in zip(ranks.tolist(), parts.tolist(), strict=True)
            ],
            "variation": self.variation,
            "bandwidths": self.bandwidths,
            "pipeline": self.pipeline,
            "critical_path": None if path is None else {
                "length_ns": path.length_ns, "parts_ns": path.parts_ns, "ranks_ns": path.ranks_ns,
                "units": [{"name": n, "num_segments": k, "time_ns": t} for n, k, t in self.top_units(limit=50)],
            },
            "stragglers": self.stragglers,
            "moe_balance": self.balance,
            "layers": self.layers,
            "experts": self.experts,
            "memory": [
                {name: getattr(item, name) for name in ("rank", "peak_bytes", "peak_unit", "peak_step", "peak_phase",
                                                        "peak_time_ns", "microbatches_held", "bytes_per_microbatch")}
                for item in self.memory
            ],
            **({"by": {"column": self.by, "costs": self.costs_by}} if self.by is not None else {}),
            "notes": self.notes,
        }  # fmt: skip

    def format_table(self) -> str:
        """The analysis as plain text."""
        from prism_sdk.analysis.text import format_analysis

        return format_analysis(self)

    def _repr_html_(self) -> str:
        from prism_sdk.analysis.text import analysis_html

        return analysis_html(self)


def analyze(
    source: str | os.PathLike[str] | TraceReader,
    *,
    ranks: Sequence[int] | None = None,
    steps: range | None = None,
    repeats: Sequence[str | os.PathLike[str]] = (),
    max_gap_ns: int = MAX_GAP_NS,
    max_rows: int = MAX_ROWS,
    by: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Analysis:
    """Analyse a trace.

    Args:
        source: a path, or an open reader.
        ranks: only these ranks; figures across ranks are then about these alone.
        steps: only these steps; see ``load_job`` for what is taken of a large trace without it.
        repeats: further runs of the same job, for the run-to-run variation.
        max_gap_ns: the longest pause between two units that counts as the cost of launching.
        max_rows: see ``load_job``.
        by: also say what units with each value of this column cost; see ``layer_costs``.
        report: is told what goes on where a trace is large enough for that to take seconds.

    Raises:
        UsageError: the trace has no times, no such ranks, no such steps, or no unit with a value of ``by``.
        PrismTraceError: a file cannot be read.
    """
    if not isinstance(source, TraceReader):
        with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
            return analyze(reader, ranks=ranks, steps=steps, repeats=repeats, max_gap_ns=max_gap_ns, max_rows=max_rows,
                           by=by, report=report)  # fmt: skip
    chosen = source.ranks if ranks is None else ranks
    found = _analyze(source, chosen, ranks, steps, repeats, max_gap_ns, max_rows, report, folded=True)
    if by is None:
        return found
    costs = layer_costs(source, found.loaded, column=by)
    if not costs:
        raise UsageError(
            f"{source.path}: no unit of a step has a name or one whole number in {by!r}",
            hint="`prism cat FILE --columns NAME` shows a column; adapters give prism.part and prism.layer",
        )
    return replace(found, by=by, costs_by=costs)


def _analyze(
    source: TraceReader, chosen: Sequence[int], ranks: Sequence[int] | None, steps: range | None,
    repeats: Sequence[str | os.PathLike[str]], max_gap_ns: int, max_rows: int, report: Callable[[str], None], *,
    folded: bool,
) -> Analysis:  # fmt: skip
    is_large = len(chosen) > _LARGE_RANKS or sum(map(source.num_units, source.ranks)) > _LARGE_UNITS

    def say(what: str) -> None:
        if is_large:
            report(what)

    say(f"reading {counted(len(chosen), 'rank')} of {source.path}")
    job = load_job(source, ranks=ranks, steps=steps, max_rows=max_rows, folded=folded)
    notes = list(job.notes)
    say(f"dividing the steps of {counted(job.num_units, 'unit')}")
    parts = breakdown_of(job, max_gap_ns=max_gap_ns)
    path: CriticalPath | None = None
    if job.is_matched or len(job.ranks) == 1:
        say(f"looking for the critical path through {job.num_events} communications")
        try:
            path = critical_path(Times.measured(job))
        except GraphDeadlockError as error:
            if job.fold is not None:  # the message is about ranks that there are
                return _analyze(source, chosen, ranks, steps, repeats, max_gap_ns, max_rows, report, folded=False)
            notes.append(f"no critical path: {str(error).splitlines()[0]}")
    else:
        notes.append("no critical path: it needs the communication of different ranks to be joined")
    found_pipeline = pipeline_of(job)
    if found_pipeline is None:
        notes.append("no pipeline: units of one stage, or without microbatch and stage")
    loaded = np.unique(job.graph.columns["step"])
    window = range(int(loaded[0]), int(loaded[-1]) + 1) if steps is None and loaded[0] != ABSENT32 else steps
    has_all_to_alls = bool((job.graph.columns["op"] == Op.ALL_TO_ALL).any())
    say("memory and the rest")
    held = memory_of(source, ranks=job.graph.ranks, steps=window)
    if job.fold is not None:
        by_rank = {item.rank: item for item in held}
        places = [by_rank.get(rank) for rank in job.graph.ranks]
        held = tuple(replace(item, rank=rank) for rank, place in zip(job.ranks, job.place.tolist(), strict=True)
                     if (item := places[place]) is not None)  # fmt: skip
    if not held:
        notes.append("no memory was recorded")
    return Analysis(
        loaded=job, breakdown=parts,
        variation=variation_of_jobs([job, *(load_job(path, ranks=ranks, steps=steps) for path in repeats)]),
        bandwidths=bandwidths(job), pipeline=found_pipeline, critical_path=path, stragglers=stragglers_of(job, parts),
        balance=balance_of_job(source, job, steps=window) if has_all_to_alls else (),
        layers=layer_costs(source, job), experts=experts_of_job(source, job, steps=window), memory=held,
        notes=tuple(notes),
    )  # fmt: skip
