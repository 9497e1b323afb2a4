"""Explains by how much and why two traces of a job differ in step time. It compares no values and no order.

The difference of the mean steps is the sum of the differences of their parts (``breakdown``), exactly, since the parts
of each add up to its mean. Below that, computing is divided by phase and communication by operation and group: these
are sums of unit lengths a step and rank, and they say where to look; they do not add up to the parts, because
communication overlaps. By how much the job is slower is said of its own steps (``variation``): in means over ranks the
waiting behind an uneven step counts again. Losses, memory and the order of communication are the matter of ``prism
compare``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.breakdown import PARTS, Breakdown, breakdown_of
from prism_sdk.analysis.frames import ResultFrames
from prism_sdk.analysis.job import Job
from prism_sdk.analysis.variation import step_times_ns
from prismtrace import ABSENT, Op, Phase, UnitKind

__all__ = ["Contribution", "Explanation", "explain"]


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One quantity in both traces: its mean a step and rank."""

    name: str
    first_ns: float
    second_ns: float

    @property
    def difference_ns(self) -> float:
        """Second less first."""
        return self.second_ns - self.first_ns


@dataclass(frozen=True, kw_only=True)
class Explanation(ResultFrames):
    """What the second trace does longer or shorter than the first, on the ranks that both have."""

    first: str
    second: str
    ranks: tuple[int, ...]
    #: The mean step of the job.
    first_job_ns: float
    second_job_ns: float
    #: The mean step over ranks, which the parts add up to.
    first_step_ns: float
    second_step_ns: float
    #: By part, in the order of ``PARTS``: the differences add up to ``difference_ns``.
    parts: tuple[Contribution, ...]
    #: Computing by phase and communication by operation and group, the largest difference first.
    units: tuple[Contribution, ...]
    #: Whether the difference is larger than the step-to-step noise: above twice the standard error of both means.
    is_significant: bool
    notes: tuple[str, ...]

    def columns(self) -> dict[str, Any]:
        """One row a part, then one a kind of unit, for data frames."""
        rows = [*self.parts, *self.units]
        return {"level": ["part"] * len(self.parts) + ["unit"] * len(self.units), "name": [row.name for row in rows],
                "first_ns": [row.first_ns for row in rows], "second_ns": [row.second_ns for row in rows],
                "difference_ns": [row.difference_ns for row in rows]}  # fmt: skip

    @property
    def difference_ns(self) -> float:
        """Second less first mean step over ranks."""
        return self.second_step_ns - self.first_step_ns

    @property
    def sentence(self) -> str:
        """The explanation in one sentence."""
        difference = self.second_job_ns - self.first_job_ns
        change = 100 * difference / self.first_job_ns if self.first_job_ns else 0.0
        if not difference:
            return "the mean steps are equal"
        text = f"the second is {abs(change):.2f} % {'slower' if change > 0 else 'faster'}"
        if not self.is_significant:
            text += ", which is within the noise of their steps"
        same = [part for part in self.parts if part.difference_ns * difference > 0]
        same.sort(key=lambda part: -abs(part.difference_ns))
        named = [f"{part.name.replace('_', ' ')} ({part.difference_ns / 1e6:+.3f} ms a step)" for part in same[:2]]
        return f"{text}: {' and '.join(named)}" if named else text


def explain(
    first: Job, second: Job, *, first_parts: Breakdown | None = None, second_parts: Breakdown | None = None
) -> Explanation:
    """Compare two loaded traces. Raises ValueError where they have no rank in common."""
    ranks = tuple(np.intersect1d(first.windows.rank, second.windows.rank).tolist())
    if not ranks:
        raise ValueError(f"{first.path} and {second.path} have no rank in common that has times")
    sides = [(first, first_parts or breakdown_of(first)), (second, second_parts or breakdown_of(second))]
    means, totals, units = [], [], []
    for job, parts in sides:
        chosen = parts.windows.is_steady & np.isin(parts.windows.rank, ranks)
        # integers first: the sums of the parts and of the windows agree to the nanosecond
        sums, num = parts.parts_ns[chosen].sum(axis=0), max(int(chosen.sum()), 1)
        means.append([int(value) / num for value in sums])
        totals.append(int(parts.windows.length_ns[chosen].sum()) / num)
        units.append(_units(job, ranks, num))
    notes = [f"only in {name}: ranks {sorted(extra)[:8]}"
             for name, extra in ((first.path, set(first.ranks) - set(ranks)), (second.path, set(second.ranks)
                                                                               - set(ranks))) if extra]  # fmt: skip
    notes += [f"{job.path}: {note}" for job, _ in sides for note in job.notes]
    times = [step_times_ns(job, ranks=ranks)[1] for job, _ in sides]
    names = sorted(set(units[0]) | set(units[1]))
    details = [Contribution(name=name, first_ns=units[0].get(name, 0.0), second_ns=units[1].get(name, 0.0))
               for name in names]  # fmt: skip
    return Explanation(
        first=first.path, second=second.path, ranks=ranks, first_job_ns=float(times[0].mean()),
        second_job_ns=float(times[1].mean()), first_step_ns=totals[0], second_step_ns=totals[1],
        parts=tuple(Contribution(name=name, first_ns=means[0][i], second_ns=means[1][i])
                    for i, name in enumerate(PARTS)),
        units=tuple(sorted(details, key=lambda item: -abs(item.difference_ns))),
        is_significant=_is_significant(*times), notes=tuple(notes),
    )  # fmt: skip


def _is_significant(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> bool:
    """Of the steps of two jobs."""
    difference = float(second.mean() - first.mean())
    if min(len(first), len(second)) < 2:
        return bool(difference)
    error = float(np.sqrt(sum(times.var(ddof=1) / len(times) for times in (first, second))))
    return abs(difference) > 2 * error


def _units(job: Job, ranks: tuple[int, ...], num_windows: int) -> dict[str, float]:
    """The summed length of units by what they are, over the steady steps of some ranks, a window."""
    c, graph = job.graph.columns, job.graph
    steady = np.unique(job.windows.step[job.windows.is_steady])
    kept = np.isin(graph.rank_of_row, ranks) & (np.isin(c["step"], steady) | (len(np.unique(job.windows.step)) == 1))
    computes = np.flatnonzero(kept & job.is_timed & (c["kind"] == UnitKind.COMPUTE))
    length = c["end_ns"] - c["start_ns"]
    found: dict[str, float] = {}
    for phase in np.unique(c["phase"][computes]).tolist():
        name = Phase(phase).name.lower() if phase in Phase._value2member_map_ and phase else "unspecified"
        found[f"compute {name}"] = int(length[computes[c["phase"][computes] == phase]].sum()) / num_windows
    arrival = np.where(job.arrival_ns == ABSENT, c["start_ns"], job.arrival_ns)
    comms = np.flatnonzero(kept & (job.completion_ns != ABSENT) & (c["start_ns"] != ABSENT))
    keys = np.stack([c["op"][comms].astype(np.uint64), c["group_id"][comms]], axis=1)
    unique, place = np.unique(keys, axis=0, return_inverse=True)
    sums = np.zeros(len(unique), dtype=np.int64)
    np.add.at(sums, place.reshape(-1), job.completion_ns[comms] - arrival[comms])
    for (op, group_id), total in zip(unique.tolist(), sums.tolist(), strict=True):
        group = graph.groups.get(int(group_id))
        where = (group.description or job.titles.get(group_id) or hex(group_id)) if group is not None else "no group"
        name = Op(op).name.lower() if op in Op._value2member_map_ else str(op)
        key = f"transfer {name} in {where}"
        found[key] = found.get(key, 0.0) + total / num_windows
    return found
