"""Says where the time of each step of each rank went; the parts add up to the step, to the nanosecond.

It compares no ranks and knows no pipelines.

At any moment a rank is in exactly one of these states, the first that applies:

1. **compute**: inside a COMPUTE unit.
2. **exposed communication**: some communication is under way, that is, all its members have arrived and it is not
   complete; or the host is in a WAIT and nothing is known of what it waits for.
3. **bubble**: the rank waits for a message whose other side has not arrived.
4. **imbalance**: the rank waits for a collective that some member has not arrived at.
5. **launch gap**: the host is in a WAIT whose communication is complete (waking up); or between two units for at most
   ``max_gap_ns``, or for the ``gap_ns`` that the trace gives the later unit.
6. **idle**: anything else.

A rank waits during WAIT units; on ranks without any, during communication that is not asynchronous (formats that
record a blocking operation as one span). *Hidden* communication is time in flight (post to completion) during compute;
it is part of 1, not of the sum. What makes 1 and 2 differ from HolisticTraceAnalysis' "computation" and
"non-overlapped communication" is that waiting for others is told apart from transfer; 2 + 3 + 4 is theirs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.frames import ResultFrames
from prism_sdk.analysis.job import Job, StepWindows
from prism_sdk.analysis.spans import coverage, cut
from prismtrace import ABSENT, UnitKind

__all__ = ["Breakdown", "PARTS", "breakdown_of"]

Int64Array = npt.NDArray[np.int64]

#: The states, in the order of the columns of ``Breakdown.parts_ns``.
PARTS = ("compute", "exposed_communication", "bubble", "imbalance", "launch_gap", "idle")
#: The longest pause between two units that counts as the cost of launching: above, something else went on.
MAX_GAP_NS = 100_000


@dataclass(frozen=True, kw_only=True)
class Breakdown(ResultFrames):
    """The parts of each step of each rank; W windows, in the order of ``windows``."""

    windows: StepWindows
    #: (W, 6) by ``PARTS``; each row adds up to the length of its window.
    parts_ns: Int64Array
    #: (W,) time with some communication in flight, from post to completion (union, not sum).
    communication_ns: Int64Array
    #: (W,) the part of it during which the rank computed.
    hidden_communication_ns: Int64Array
    max_gap_ns: int

    def columns(self) -> dict[str, Any]:
        """One row a window: rank, step, times, the parts, and communication; for data frames."""
        w = self.windows
        parts = {f"{name}_ns": self.parts_ns[:, index] for index, name in enumerate(PARTS)}
        return {"rank": w.rank, "step": w.step, "start_ns": w.start_ns, "end_ns": w.end_ns, **parts,
                "communication_ns": self.communication_ns,
                "hidden_communication_ns": self.hidden_communication_ns}  # fmt: skip

    def of_rank(self, rank: int) -> dict[str, float]:
        """The mean length of each part over the steady steps of a rank; {} where it has none."""
        chosen = (self.windows.rank == rank) & self.windows.is_steady
        if not chosen.any():
            return {}
        return dict(zip(PARTS, self.parts_ns[chosen].mean(axis=0).tolist(), strict=True))

    @property
    def mean_parts_ns(self) -> dict[str, float]:
        """The mean length of each part over ranks and steady steps."""
        chosen = self.windows.is_steady
        return dict(zip(PARTS, self.parts_ns[chosen].mean(axis=0).tolist(), strict=True))

    @property
    def mean_step_ns(self) -> float:
        """The mean length of a step over ranks and steady steps; the sum of ``mean_parts_ns``."""
        return float(self.windows.length_ns[self.windows.is_steady].mean())

    @property
    def overlap_ratio(self) -> float | None:
        """Hidden communication over communication, steady steps; None without communication.

        As HolisticTraceAnalysis' ``comp_comm_overlap_pctg`` (of 100): time that both share over time communicating.
        """
        chosen = self.windows.is_steady
        total = int(self.communication_ns[chosen].sum())
        return int(self.hidden_communication_ns[chosen].sum()) / total if total else None

    def ranks_parts_ns(self) -> tuple[Int64Array, npt.NDArray[np.float64]]:
        """The ranks (R,), and the mean of each part over their steady steps (R, 6)."""
        chosen = self.windows.is_steady
        ranks, place = np.unique(self.windows.rank[chosen], return_inverse=True)
        total = np.zeros((len(ranks), len(PARTS)))
        np.add.at(total, place, self.parts_ns[chosen])
        return ranks, total / np.bincount(place, minlength=len(ranks))[:, None]


def breakdown_of(job: Job, *, max_gap_ns: int = MAX_GAP_NS) -> Breakdown:
    """Divide each step of each rank into the parts of this module's list."""
    windows = job.windows
    parts = np.zeros((len(windows), len(PARTS)), dtype=np.int64)
    communication = np.zeros(len(windows), dtype=np.int64)
    hidden = np.zeros(len(windows), dtype=np.int64)
    known: dict[bytes, tuple[Int64Array, Int64Array, Int64Array]] = {}  # ranks of one role have equal times
    found: dict[int, tuple[Int64Array, Int64Array, Int64Array]] = {}
    for position, place in enumerate(job.place.tolist()):
        chosen = slice(int(job.window_bounds[position]), int(job.window_bounds[position + 1]))
        if chosen.stop > chosen.start:
            if place not in found:
                key = _digest(job, place, chosen)
                if key not in known:
                    known[key] = _rank(job, place, chosen, max_gap_ns)
                found[place] = known[key]
            parts[chosen], communication[chosen], hidden[chosen] = found[place]
    for array in (parts, communication, hidden):
        array.setflags(write=False)
    return Breakdown(windows=windows, parts_ns=parts, communication_ns=communication,
                     hidden_communication_ns=hidden, max_gap_ns=max_gap_ns)  # fmt: skip


def _digest(job: Job, place: int, chosen: slice) -> bytes:
    """Of everything that `_rank` looks at."""
    rows = slice(int(job.graph.offsets[place]), int(job.graph.offsets[place + 1]))
    awaited = job.graph.awaited_row[rows]
    digest = hashlib.blake2b(digest_size=16)
    for array in (
        job.windows.start_ns[chosen], job.windows.end_ns[chosen], job.completion_ns[rows], job.arrival_ns[rows],
        job.is_blocking[rows], np.where(awaited >= 0, awaited - rows.start, -1),
        *(job.graph.columns[name][rows] for name in ("kind", "start_ns", "end_ns", "gap_ns")),
    ):  # fmt: skip
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _rank(job: Job, place: int, chosen: slice, max_gap_ns: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    begin, stop = job.windows.start_ns[chosen], job.windows.end_ns[chosen]
    rows = np.arange(job.graph.offsets[place], job.graph.offsets[place + 1])
    c = {name: job.graph.columns[name][rows] for name in ("kind", "start_ns", "end_ns", "gap_ns")}
    kind, start, end = c["kind"], c["start_ns"], c["end_ns"]
    completion, arrival = job.completion_ns[rows], job.arrival_ns[rows]
    timed = (start != ABSENT) & (end != ABSENT)
    computes, waits = timed & (kind == UnitKind.COMPUTE), timed & (kind == UnitKind.WAIT)
    flies = (completion != ABSENT) & (start != ABSENT)
    # without a known arrival all of it counts as transfer
    ready = np.clip(np.where(arrival == ABSENT, start, arrival), start, np.maximum(start, completion))
    spans = {
        "compute": (start[computes], end[computes]),
        "flight": (start[flies], completion[flies]),
        "transfer": (ready[flies], completion[flies]),
        "wait": (start[waits], end[waits]),
    }
    is_message = (kind == UnitKind.SEND) | (kind == UnitKind.RECV)
    for name, of_messages in (("bubble", True), ("imbalance", False)):
        blocking = flies & job.is_blocking[rows] & (is_message == of_messages)
        awaited = job.graph.awaited_row[rows[waits]] - rows[0]
        inside = awaited >= 0
        waiting, target = np.flatnonzero(waits)[inside], awaited[inside]
        fits = flies[target] & (is_message[target] == of_messages)
        waiting, target = waiting[fits], target[fits]
        spans[name] = (
            np.concatenate([start[blocking], start[waiting]]),
            np.concatenate([ready[blocking], np.minimum(ready[target], end[waiting])]),
        )
    # a wait for something that has no known completion: blocked, and no more can be said
    awaited = job.graph.awaited_row[rows] - rows[0]
    unknown = waits & ((awaited < 0) | ~flies[np.maximum(awaited, 0)])
    spans["unknown"] = (start[unknown], end[unknown])
    spans["gap"] = _gaps(start, end, c["gap_ns"], computes | waits, max_gap_ns)
    bounds = cut(begin, stop, *(times for pair in spans.values() for times in pair))
    covered = {name: coverage(bounds, *pair) > 0 for name, pair in spans.items()}
    state = np.select(
        [covered["compute"], covered["transfer"] | covered["unknown"], covered["bubble"], covered["imbalance"],
         covered["wait"] | covered["gap"]], [0, 1, 2, 3, 4], 5,
    )  # fmt: skip
    length = np.diff(bounds)
    window = np.searchsorted(begin, bounds[:-1], side="right") - 1
    inside = (window >= 0) & (bounds[:-1] < stop[np.maximum(window, 0)])
    parts = np.zeros((len(begin), len(PARTS)), dtype=np.int64)
    np.add.at(parts, (window[inside], state[inside]), length[inside])
    communication, hidden = (np.zeros(len(begin), dtype=np.int64) for _ in range(2))
    for array, mask in ((communication, covered["flight"]), (hidden, covered["flight"] & covered["compute"])):
        np.add.at(array, window[inside & mask], length[inside & mask])
    return parts, communication, hidden


def _gaps(
    start: Int64Array, end: Int64Array, gap: Int64Array, hosts: npt.NDArray[np.bool_], max_gap_ns: int
) -> tuple[Int64Array, Int64Array]:
    """The pauses of the host that count as launching, each ending where the later unit begins."""
    rows = np.flatnonzero(hosts)
    rows = rows[np.argsort(start[rows], kind="stable")]
    latest = np.maximum.accumulate(end[rows])[:-1]
    begin, given = start[rows][1:], gap[rows][1:]
    pause = begin - latest
    counted = np.where(pause <= max_gap_ns, pause, 0)
    counted = np.where(given != ABSENT, np.maximum(counted, np.minimum(given, pause)), counted)
    kept = counted > 0
    return begin[kept] - counted[kept], begin[kept]
