"""Gathers everything that the page of a trace shows into one value for JSON. It writes no HTML."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prism_sdk.analysis import PARTS, Analysis, RankMemory, analyze, explain
from prism_sdk.analysis.text import analysis_tables
from prism_sdk.analysis.variation import step_times_ns
from prism_sdk.errors import UsageError
from prism_sdk.report.matrix import traffic_matrix
from prism_sdk.report.timeline import packed, step_spans
from prismtrace import ABSENT32, GraphKind, TraceReader

__all__ = ["MAX_ROWS_SHOWN", "choose_ranks", "report_content"]

#: Ranks of the pipeline chart; the heat map shows all of them.
MAX_ROWS_SHOWN = 192
_MAX_POINTS, _MAX_CURVES = 2000, 6
_MODEL_KEYS = ("calibration.", "emulate.", "record.", "clock.", "job.", "created", "simulate.")

_WORTH = {
    GraphKind.OBSERVED: "Measured: every time was taken in a run in which every rank was real.",
    GraphKind.CALIBRATED: "Computing and gaps were measured in slices of the job; transfers of groups that fit no "
    "slice come from a model. When a unit starts and ends was then calculated for all ranks on one clock.",
    GraphKind.EMULATED: "Ranks in this file were run for real. When their communication completed was replayed from a "
    "graph: computing and memory are measured, waiting and transfers are modelled.",
    GraphKind.BARE: "Nothing here is a real time: a bare graph has the right structure only.",
    GraphKind.UNSPECIFIED: "The file does not say how its times came about.",
}  # fmt: skip


def choose_ranks(analysis: Analysis, reader: TraceReader, *, limit: int = MAX_ROWS_SHOWN) -> list[int]:
    """The rows of the pipeline chart: all ranks, or one of each role and stage, critical ones, stragglers, and others
    evenly spaced."""
    ranks = analysis.job.ranks
    if len(ranks) <= limit:
        return list(ranks)
    present = set(ranks)
    wanted: dict[int, None] = dict.fromkeys(members[0] for members in reader.roles.values() if members[0] in present)
    if analysis.pipeline is not None:
        wanted |= dict.fromkeys(stage.ranks[0] for stage in analysis.pipeline.stages)
    if analysis.critical_path is not None:
        critical = sorted(analysis.critical_path.ranks_ns.items(), key=lambda item: -item[1])
        wanted |= dict.fromkeys(rank for rank, _ in critical[: limit // 4])
    wanted |= dict.fromkeys(rank.rank for rank in analysis.stragglers.found[: limit // 4])
    chosen = list(wanted)[: limit * 3 // 4]
    spaced = [ranks[int(i)] for i in np.linspace(0, len(ranks) - 1, limit - len(chosen))]
    return sorted(set(chosen) | set(spaced))


def report_content(
    source: str | os.PathLike[str], *, compare: str | os.PathLike[str] | None = None, step: int | None = None,
    ranks: Sequence[int] | None = None, steps: range | None = None, report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Analyse a trace, and another one to hold it against, and return what the page shows.

    Args:
        source: the trace.
        compare: a real run of the same job, drawn beside it.
        step: the step of the pipeline chart; the one of median length when left out.
        ranks: analyse only these.
        steps: analyse only these.
        report: is told what goes on where that takes seconds.

    Raises:
        UsageError: there is no such step, or a trace has no times.
        PrismTraceError: a file cannot be read.
    """
    with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
        analysis = analyze(reader, ranks=ranks, steps=steps, report=report)
        rows = choose_ranks(analysis, reader)
        content = _of_trace(analysis, reader, rows, _step(analysis, step))
    if compare is not None:
        with TraceReader(os.fspath(compare), allow_unfinished=True) as reader:
            other = analyze(reader, ranks=ranks, steps=steps, report=report)
            shown = [rank for rank in rows if rank in set(other.job.ranks)]
            content["other"] = _of_trace(other, reader, shown, _step(other, content["timeline"]["step"], strict=False))
        if not shown:
            raise UsageError(f"{source} and {compare} have no rank in common", hint="compare traces of the same job")
        found = explain(other.job, analysis.job, first_parts=other.breakdown, second_parts=analysis.breakdown)
        content["explanation"] = {
            "sentence": found.sentence,
            "rows": [[part.name, part.first_ns, part.second_ns] for part in found.parts],
            "job_step": ["step of the job", found.first_job_ns, found.second_job_ns],
            "units": [[unit.name, unit.first_ns, unit.second_ns] for unit in found.units[:12]],
        }
    return content


def _step(analysis: Analysis, wanted: int | None, *, strict: bool = True) -> int:
    windows = analysis.breakdown.windows
    present = np.unique(windows.step)
    if wanted is not None:
        if wanted in present:
            return wanted
        if strict:
            known = f"it has {present.min()} to {present.max()}"
            raise UsageError(f"what was chosen of {analysis.job.path} has no step {wanted}", hint=known)
    steps, times = step_times_ns(analysis.job)
    return int(steps[np.argsort(times, kind="stable")[(len(times) - 1) // 2]])


def _of_trace(analysis: Analysis, reader: TraceReader, rows: Sequence[int], step: int) -> dict[str, Any]:
    job, parts = analysis.job, analysis.breakdown
    ranks, means = parts.ranks_parts_ns()
    slack = analysis.rank_slack_ns()
    critical = analysis.critical_path.ranks_ns if analysis.critical_path is not None else {}
    traffic = traffic_matrix(job)
    steps, times = step_times_ns(job)
    stage = {rank.rank: rank.stage for rank in analysis.stragglers.ranks}
    return {
        "file": os.path.basename(job.path), "kind": job.graph.graph_kind.name.lower(),
        "worth": _WORTH[job.graph.graph_kind], "world_size": job.graph.world_size, "num_ranks": len(job.ranks),
        "num_roles": len(reader.roles), "num_units": len(job.graph),
        "job_step_ns": float(times.mean()), "step_ns": parts.mean_step_ns, "overlap": parts.overlap_ratio,
        "parts": parts.mean_parts_ns,
        "part_names": list(PARTS),
        "metadata": {k: v[:200] for k, v in sorted(reader.metadata.items()) if k.startswith(_MODEL_KEYS)},
        "notes": list(analysis.notes), "stragglers": _stragglers(analysis),
        "tables": [{"title": title, "header": list(header), "rows": rows_} for title, header, rows_ in
                   analysis_tables(analysis)],
        "ranks": packed(ranks, "i4"), "rank_parts": packed(means, "f8"),
        "rank_slack": packed([slack.get(rank, -1) for rank in ranks.tolist()], "f8"),
        "rank_critical": packed([critical.get(rank, 0) for rank in ranks.tolist()], "f8"),
        "rank_stage": [stage.get(rank) for rank in ranks.tolist()],
        "steps": [None if s == ABSENT32 else int(s) for s in steps], "step_times": times.tolist(),
        "memory": [_curve(item) for item in _chosen_memory(analysis.memory)], "num_memory": len(analysis.memory),
        "matrix": {"bounds": list(traffic.bounds), "values": packed(traffic.values_bytes, "f8"),
                   "unknown": traffic.num_unknown},
        "critical_ns": analysis.critical_path.length_ns if analysis.critical_path is not None else None,
        "timeline": step_spans(job, step=step, ranks=rows, path=analysis.critical_path),
    }  # fmt: skip


def _stragglers(analysis: Analysis) -> list[dict[str, Any]]:
    return [{"rank": r.rank, "cause": r.cause, "caused_ns": r.caused_wait_ns} for r in analysis.stragglers.found[:64]]


def _chosen_memory(found: Sequence[RankMemory]) -> list[RankMemory]:
    """The ranks of the highest, lowest and median peaks, and some between."""
    ordered = sorted(found, key=lambda item: -item.peak_bytes)
    if len(ordered) <= _MAX_CURVES:
        return ordered
    return [ordered[int(i)] for i in np.linspace(0, len(ordered) - 1, _MAX_CURVES)]


def _curve(memory: RankMemory) -> dict[str, Any]:
    """A curve of at most so many points; of each stretch that is left out the highest value stays."""
    times, values = memory.times_ns, memory.high_water_bytes
    if len(times) > _MAX_POINTS:
        begins = np.linspace(0, len(times), _MAX_POINTS + 1).astype(np.int64)[:-1]
        times, values = times[begins], np.maximum.reduceat(values, begins)
    return {"rank": memory.rank, "peak_bytes": memory.peak_bytes, "phase": memory.peak_phase,
            "held": [list(pair) for pair in memory.microbatches_held[:64]],
            "times": packed(times, "f8"), "values": packed(values, "f8")}  # fmt: skip
