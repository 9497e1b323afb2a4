"""Sums up a timeline: step time with its interval, stages, exposed communication, critical path, stragglers, memory.

It computes no times and prints nothing: ``format_report`` gives text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prism_sdk.graph.statistics import Interval, bootstrap_interval
from prism_sdk.simulate import kernel
from prism_sdk.simulate.critical import PathPart, critical_path
from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.simulation import Timeline

__all__ = ["PathShare", "Report", "Shares", "Straggler", "summarise"]

PROVENANCES = ("unspecified", "measured", "fitted", "modelled")


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Where the time of some ranks goes, percent of the counted steps; the parts add up to 100.

    ``bubble``: waiting for a message whose sender has not sent. ``imbalance``: waiting for members of a collective that
    have not arrived. ``exposed``: waiting while data moves. ``host``: gaps between units and delays after waits.
    """

    name: str
    num_ranks: int
    busy_percent: float
    bubble_percent: float
    imbalance_percent: float
    exposed_percent: float
    host_percent: float


@dataclass(frozen=True, kw_only=True)
class PathShare:
    """What the critical path consists of, percent of its length."""

    what: str
    time_ns: int
    percent: float


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that others wait for: the idle time of all ranks, per step, for which it arrived last."""

    rank: int
    idle_caused_ns: float
    path_percent: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """A simulation in figures. Times are ns of one step, unless they say otherwise."""

    source: str
    num_ranks: int
    #: Ranks of the job; 0 = unknown. Where it is more than ``num_ranks``, the figures are those of a part of the job.
    world_size: int
    num_units: int
    num_steps: int
    step_time_ns: float
    #: From the spread of the calibration, or of the steps of an observed trace; None where neither is known.
    interval: Interval | None
    interval_basis: str
    recorded_step_ns: float | None
    #: Communication that the host waits for while data moves, and all communication, ns a step and rank.
    exposed_ns: float
    communication_ns: float
    shares: Shares
    stages: tuple[Shares, ...]
    critical_path: tuple[PathShare, ...]
    critical_ranks: tuple[PathShare, ...]
    provenance: tuple[PathShare, ...]
    stragglers: tuple[Straggler, ...]
    memory_peak_bytes: int | None
    memory_peak_rank: int | None
    notes: tuple[str, ...]

    @property
    def error_percent(self) -> float | None:
        """How far the simulated step is from the recorded one, percent."""
        if not self.recorded_step_ns:
            return None
        return 100.0 * (self.step_time_ns / self.recorded_step_ns - 1.0)


def summarise(timeline: Timeline, *, num_stragglers: int = 5, base_step_ns: float | None = None) -> Report:
    """The report of a timeline. ``base_step_ns``: the step time without what-if changes, for the interval."""
    job = timeline.job
    totals, blame, counted = timeline.totals()
    num_steps = max(int(max(timeline.steps(p)[2].sum() for p in range(min(job.num_ranks, 64)))), 1)
    step_time = timeline.step_time_ns
    interval, basis = _interval(timeline, step_time, base_step_ns)
    parts = critical_path(timeline)
    length = sum(part.duration_ns for part in parts) or 1
    by_rank = _grouped([str(part.rank) for part in parts], parts, length)
    path_percent = {share.what: share.percent for share in by_rank}
    order = np.argsort(-blame, kind="stable")[:num_stragglers]
    exposed = totals[:, [kernel.EXPOSED_MESSAGE, kernel.EXPOSED_COLLECTIVE]].sum()
    moved = totals[:, [kernel.MOVED_MESSAGE, kernel.MOVED_COLLECTIVE]].sum()
    peak = int(job.memory_bytes.max()) if job.num_ranks else -1
    return Report(
        source=job.source, num_ranks=job.num_ranks, world_size=job.world_size, num_units=len(job),
        num_steps=num_steps, step_time_ns=step_time, interval=interval, interval_basis=basis,
        recorded_step_ns=job.recorded_step_ns, exposed_ns=float(exposed) / num_steps / job.num_ranks,
        communication_ns=float(moved) / num_steps / job.num_ranks,
        shares=_shares("all", np.arange(job.num_ranks), totals, counted), stages=_stages(job, totals, counted),
        critical_path=_grouped([part.what for part in parts], parts, length), critical_ranks=by_rank[:num_stragglers],
        provenance=_grouped([PROVENANCES[part.provenance % 4] for part in parts], parts, length),
        stragglers=tuple(
            Straggler(rank=int(job.ranks[at]), idle_caused_ns=float(blame[at]) / num_steps,
                      path_percent=path_percent.get(str(int(job.ranks[at])), 0.0))
            for at in order.tolist() if blame[at] > 0
        ),
        memory_peak_bytes=peak if peak >= 0 else None,
        memory_peak_rank=int(job.ranks[int(job.memory_bytes.argmax())]) if peak >= 0 else None,
        notes=(*job.notes, *_sharing_notes(timeline)),
    )  # fmt: skip


def _sharing_notes(timeline: Timeline) -> tuple[str, ...]:
    if timeline.sharing is None:
        return ()
    number, longer_ns = timeline.sharing
    total = timeline.job.lanes.total_events
    return (f"links are shared: {number:,} of {total:,} transfers take longer than alone, {longer_ns / 1e6:,.3f} ms "
            "together",)  # fmt: skip


def _interval(timeline: Timeline, step_time: float, base_step_ns: float | None) -> tuple[Interval | None, str]:
    facts = timeline.job.metadata
    try:
        low, high = (float(part) for part in facts["calibration.interval_ns"].split(":"))
        middle = float(facts["calibration.step_ns"])
    except (KeyError, ValueError):
        middle = 0.0
    if middle > 0:
        scale = step_time / middle if base_step_ns is None else step_time / base_step_ns * (base_step_ns / middle)
        return Interval(estimate=step_time, low=low * scale, high=high * scale, confidence=0.95, num_samples=0), (
            "spread of the calibration"
        )
    times = timeline.job_steps_ns()
    if len(times) < 3:
        return None, "unknown: the trace has too few steps"
    return bootstrap_interval(times), "spread of the steps"


def _grouped(names: Sequence[str], parts: Sequence[PathPart], length: int) -> tuple[PathShare, ...]:
    sums: dict[str, int] = {}
    for name, part in zip(names, parts, strict=True):
        sums[name] = sums.get(name, 0) + part.duration_ns
    return tuple(
        PathShare(what=name, time_ns=time, percent=100.0 * time / length)
        for name, time in sorted(sums.items(), key=lambda item: -item[1])
    )


def _shares(name: str, positions: np.ndarray, totals: np.ndarray, counted: np.ndarray) -> Shares:
    total = max(float(counted[positions].sum()), 1.0)
    sums = totals[positions].sum(axis=0)

    def percent(*columns: int) -> float:
        return 100.0 * float(sum(sums[c] for c in columns)) / total

    parts = {
        "busy_percent": percent(*range(kernel.BUSY, kernel.NUM_TOTALS)), "bubble_percent": percent(kernel.IDLE_MESSAGE),
        "imbalance_percent": percent(kernel.IDLE_COLLECTIVE),
        "exposed_percent": percent(kernel.EXPOSED_MESSAGE, kernel.EXPOSED_COLLECTIVE),
    }  # fmt: skip
    return Shares(
        name=name, num_ranks=len(positions), host_percent=round(100.0 - sum(parts.values()), 9) + 0.0, **parts
    )


def _stages(job: SimJob, totals: np.ndarray, counted: np.ndarray) -> tuple[Shares, ...]:
    stages = np.unique(job.stage)
    if len(stages) < 2:
        return ()
    return tuple(
        _shares(f"stage {stage}" if stage >= 0 else "no stage", np.flatnonzero(job.stage == stage), totals, counted)
        for stage in stages.tolist()
    )
