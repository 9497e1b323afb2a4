"""Takes durations, gaps, wake overheads and transfers from measured slices, and puts them into a bare graph.

It runs no slice, writes no file and decides nothing about passes: a calibration strategy does, with these functions.

What is measured, by row of a slice (ABSENT where a row cannot say it):

- COMPUTE: ``duration = end - start``; ``gap = start - end of the host row before``.
- WAIT: where the awaited unit completed during the wait, the wake overhead ``end - completion``; else the least
  duration ``end - start``. So waiting for others is in neither.
- communication: ``gap = start - end of the host row before``, which only streams of a GPU make other than 0;
  ``transfer = end - last arrival``, the latest of all members' posts and of the ends of the collective
  before it in the group. Only where *all* members are in the slice, that is on one clock and real: the completion of
  an operation with virtual members is what the emulation made it.

Rows of different steps belong together by (rank, structure of the step, position in the step): the structure is kind,
operation, group, dtype, counts, peer, tag, and what each wait awaits; without the counts where that finds nothing.
Of steps that take turns (`prism_sdk.graph.turns`) those of the same turn come first.
Means are taken over the steps behind the warm-up; steps of a structure seen only during the warm-up use those. Means,
not medians: durations are skewed to the right, and the medians of the units of a step add up to less than the step.
What means lose in turn, the cost of variation, `prism_sdk.graph.prediction` puts back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.statistics import mean_known
from prism_sdk.graph.timing import Schedule, Timing, job_steps_ns, schedule, whole_steps
from prism_sdk.graph.turns import turns_of
from prismtrace import ABSENT, UnitKind

__all__ = ["Calibration", "Key", "Measurement", "Samples", "collect_samples", "communications_of", "measure",
           "merge_samples", "merge_slices", "relative_change", "step_time_ns", "structures_of",
           "whole_steps_ns"]  # fmt: skip

Int64Array = npt.NDArray[np.int64]

_FIELDS = ("gap_ns", "duration_ns", "transfer_ns")
_STRUCTURE = ("kind", "op", "reduce_op", "group_id", "dtype", "peer", "tag")
_COUNTS = ("num_elements_in", "num_elements_out")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What each row of a graph says about its weights, in the meaning of ``Timing``; ABSENT where nothing."""

    gap_ns: Int64Array
    duration_ns: Int64Array
    transfer_ns: Int64Array
    #: How many values came out below zero and were set to it (clocks of little resolution).
    num_clipped: int


def measure(graph: JobGraph) -> Measurement:
    """The weights that the times of an observed or emulated graph show, row by row."""
    c = graph.columns
    kind, start, end = c["kind"], c["start_ns"], c["end_ns"]
    timed = (start != ABSENT) & (end != ABSENT)
    is_compute, is_wait = kind == UnitKind.COMPUTE, kind == UnitKind.WAIT
    gap, duration, transfer = (np.full(len(graph), ABSENT, dtype=np.int64) for _ in range(3))

    rows = np.flatnonzero(is_compute & timed)
    duration[rows] = end[rows] - start[rows]
    hosts = np.flatnonzero(is_compute | is_wait)
    before = np.full(len(graph), -1, dtype=np.int64)
    before[hosts[1:]] = np.where(graph.rank_of_row[hosts[1:]] == graph.rank_of_row[hosts[:-1]], hosts[:-1], -1)
    given = np.flatnonzero(is_compute & (c["gap_ns"] != ABSENT))
    gap[given] = c["gap_ns"][given]
    rows = rows[(before[rows] >= 0) & (end[before[rows]] != ABSENT)]
    gap[rows] = start[rows] - end[before[rows]]

    rows = np.flatnonzero(~is_compute & ~is_wait & (start != ABSENT))
    previous_host = hosts[np.maximum(np.searchsorted(hosts, rows) - 1, 0)] if len(hosts) else rows
    is_after = (previous_host < rows) & (graph.rank_of_row[previous_host] == graph.rank_of_row[rows])
    is_after &= end[previous_host] != ABSENT
    rows, previous_host = rows[is_after], previous_host[is_after]
    post = start[rows] - end[previous_host]

    rows_posted, rows = rows, np.flatnonzero(is_wait & timed)
    awaited = graph.awaited_row[rows]
    completion = np.where(awaited >= 0, end[awaited], ABSENT)
    known = (completion != ABSENT) | (c["awaits"][rows] == ABSENT)
    waited = known & (completion > start[rows])
    gap[rows[waited]] = end[rows[waited]] - completion[waited]
    idle = known & ~waited
    duration[rows[idle]] = end[rows[idle]] - start[rows[idle]]

    if graph.num_events:
        members = graph.event_rows
        begins = graph.event_offsets[:-1]
        sizes = np.diff(graph.event_offsets)
        all_timed = np.logical_and.reduceat(timed[members], begins) & graph.event_is_whole
        arrival = np.maximum.reduceat(start[members], begins)
        last_end = np.maximum.reduceat(end[members], begins)
        previous = graph.event_previous
        arrival = np.maximum(arrival, np.where(previous >= 0, last_end[previous], ABSENT))
        ready = np.repeat(arrival, sizes)
        # a buffered send waits for nobody
        ready = np.where(kind[members] == UnitKind.SEND, start[members], ready)
        usable = np.repeat(all_timed, sizes)
        transfer[members[usable]] = (end[members] - ready)[usable]
    clipped = 0
    for values in (gap, duration, transfer):
        negative = (values < 0) & (values != ABSENT)
        clipped += int(negative.sum())
        values[negative] = 0
    gap[rows_posted] = post
    return Measurement(gap_ns=gap, duration_ns=duration, transfer_ns=transfer, num_clipped=clipped)


@dataclass(frozen=True)
class Segment:
    """The rows of one step of one rank."""

    rank: int
    step: int
    begin: int
    end: int


def _segments(graph: JobGraph) -> list[Segment]:
    step = graph.columns["step"]
    first = np.ones(len(graph), dtype=np.bool_)
    first[1:] = step[1:] != step[:-1]
    first[graph.offsets[:-1][np.diff(graph.offsets) > 0]] = True
    begins = np.flatnonzero(first)
    ends = np.append(begins[1:], len(graph))
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    return [Segment(int(graph.rank_of_row[b]), int(step[b]), b, e) for b, e in spans]


Key = tuple[int, bytes]
Structures = Mapping[Segment, tuple[Key, ...]]


def structures_of(
    graph: JobGraph, *, stands_for: Mapping[int, int] | None = None, of_communications: bool = False, turns: int = 1
) -> Structures:
    """For each step of each rank the keys of its samples: rank and digest, with the counts and without.

    ``turns``: as `turns_of` has it; if there are several, the first key holds for steps of the same turn alone.
    ``stands_for``: by rank the one that was measured in its place; it is in the graph, with the same steps.
    ``of_communications``: steps are alike if their communications are, however they compute and wait between them.
    """
    relative = np.where(graph.awaited_row >= 0, np.arange(len(graph)) - graph.awaited_row, 0)
    plain = np.stack([*(graph.columns[name].astype(np.int64) for name in _STRUCTURE), relative], axis=1)
    counts = np.stack([graph.columns[name] for name in _COUNTS], axis=1)
    result: dict[Segment, tuple[Key, ...]] = {}
    by_place: dict[tuple[int, int], tuple[Key, ...]] = {}
    segments = _segments(graph)
    for segment in segments:
        rows = communications_of(graph, segment) if of_communications else slice(segment.begin, segment.end)
        digest = hashlib.blake2b(plain[rows].tobytes(), digest_size=16)
        without = digest.digest()
        digest.update(counts[rows].tobytes())
        result[segment] = (segment.rank, digest.digest()), (segment.rank, without)
        if turns > 1:
            digest.update(b"turn %d" % (segment.step % turns))
            result[segment] = (segment.rank, digest.digest()), *result[segment]
        begin = int(graph.offsets[graph.ranks.index(segment.rank)]) if stands_for else 0
        by_place[segment.rank, segment.begin - begin] = result[segment]
    for segment in segments if stands_for else ():
        other = (stands_for or {}).get(segment.rank, segment.rank)
        begin = int(graph.offsets[graph.ranks.index(segment.rank)])
        result[segment] = by_place.get((other, segment.begin - begin), result[segment])
    return result


def communications_of(graph: JobGraph, segment: Segment) -> Int64Array:
    """The rows of a segment that communicate."""
    return segment.begin + np.flatnonzero(graph.event_of_row[segment.begin : segment.end] >= 0)


class Samples:
    """The measured steps of one (rank, structure): a matrix of steps by rows for each weight."""

    def __init__(self) -> None:
        self.sources: list[tuple[int, int]] = []
        self.is_warm: list[bool] = []
        self.values: dict[str, list[Int64Array]] = {name: [] for name in _FIELDS}

    def add(self, measurement: Measurement, segment: Segment, *, slice_index: int, is_warm: bool) -> None:
        self.sources.append((slice_index, segment.step))
        self.is_warm.append(is_warm)
        for name in _FIELDS:
            self.values[name].append(getattr(measurement, name)[segment.begin : segment.end])

    def means(self, drawn: dict[tuple[int, int], int] | None) -> tuple[dict[str, Int64Array], int]:
        """The mean of each weight by row, over the measured steps or (``drawn``) as often as each was drawn."""
        usable = [i for i, warm in enumerate(self.is_warm) if not warm] or list(range(len(self.is_warm)))
        if drawn is not None:
            usable = [i for i in usable for _ in range(drawn.get(self.sources[i], 0))] or usable
        means = {name: mean_known(np.stack([rows[i] for i in usable])) for name, rows in self.values.items()}
        return means, len(usable)

    def one(self, step_place: float, run_place: float) -> dict[str, Int64Array]:
        """The weights of one measured step; ABSENT where it has none.

        Both places are from 0 to 1: among the numbers of the measured steps, and among the runs that show that step.
        """
        usable = [i for i, warm in enumerate(self.is_warm) if not warm] or list(range(len(self.is_warm)))
        numbers = sorted({self.sources[i][1] for i in usable})
        shown = [i for i in usable if self.sources[i][1] == numbers[int(step_place * len(numbers))]]
        chosen = shown[int(run_place * len(shown))]
        return {name: rows[chosen] for name, rows in self.values.items()}


def collect_samples(slices: Sequence[JobGraph], *, warmup_steps: int, turns: int) -> tuple[dict[Key, Samples], int]:
    """The measured steps of all slices by rank and structure, and how many values were clipped."""
    samples: dict[Key, Samples] = {}
    clipped = 0
    for slice_index, graph in enumerate(slices):
        measurement = measure(graph)
        clipped += measurement.num_clipped
        first = int(graph.columns["step"].min()) if len(graph) else 0
        for segment, keys in structures_of(graph, turns=turns).items():
            for key in keys:
                samples.setdefault(key, Samples()).add(
                    measurement, segment, slice_index=slice_index, is_warm=segment.step < first + warmup_steps
                )
    return samples, clipped


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A bare graph with the weights that slices showed."""

    graph: JobGraph
    timing: Timing
    timeline: Schedule
    #: Rows whose compute duration or transfer was measured; of the others the bare graph's own values are kept.
    is_measured: npt.NDArray[np.bool_]
    #: On how many steps the values of a row rest.
    num_samples: npt.NDArray[np.int32]
    num_clipped: int

    @property
    def unmeasured_compute(self) -> Int64Array:
        """Compute rows that no slice showed: their times are those of the bare graph, which switching disturbed."""
        return np.flatnonzero((self.graph.columns["kind"] == UnitKind.COMPUTE) & ~self.is_measured)

    def columns(self, rank: int) -> dict[str, Int64Array]:
        """The columns of a rank that calibration replaces, for a TraceWriter."""
        rows = self.graph.rows(rank)
        is_wait = self.graph.columns["kind"][rows] == UnitKind.WAIT
        is_compute = self.graph.columns["kind"][rows] == UnitKind.COMPUTE
        gap = self.timing.gap_ns[rows]
        transfer = np.where(is_wait, self.timing.duration_ns[rows], self.timing.transfer_ns[rows])
        return {
            "start_ns": self.timeline.start_ns[rows],
            "end_ns": self.timeline.end_ns[rows],
            "transfer_ns": np.where(is_compute, ABSENT, transfer),
            "gap_ns": np.where(is_compute | is_wait | (gap > 0), gap, ABSENT),
            **({"prism.lead_ns": np.where(gap < 0, -gap, ABSENT)} if (gap < 0).any() else {}),
        }


def merge_slices(
    bare_graph: JobGraph,
    slice_graphs: Sequence[JobGraph],
    *,
    warmup_steps: int = 1,
    default_transfer_ns: int | Int64Array | None = None,
    stands_for: Mapping[int, int] | None = None,
) -> Calibration:
    """Put what the slices measured into the bare graph, and compute its timeline.

    Args:
        bare_graph: all ranks; values that no slice measured are kept from it.
        slice_graphs: graphs of the ranks that ran for real, one a slice (an observed graph of all ranks is one too).
        warmup_steps: how many steps at the start of a slice do not count.
        default_transfer_ns: for transfers that are in no slice and not in the bare graph; one value, or one a row.
        stands_for: by rank the one that was measured in its place.

    Raises:
        GraphError: no slice shows any step of the bare graph.
        MissingTimingError: a duration is in no slice and not in the bare graph.
    """
    turns = turns_of(slice_graphs, warmup_steps=warmup_steps)
    samples, clipped = collect_samples(slice_graphs, warmup_steps=warmup_steps, turns=turns)
    structures = structures_of(bare_graph, stands_for=stands_for, turns=turns)
    return merge_samples(
        bare_graph, samples, clipped=clipped, default_transfer_ns=default_transfer_ns, structures=structures
    )


def merge_samples(
    graph: JobGraph, samples: dict[Key, Samples], *, clipped: int,
    default_transfer_ns: int | Int64Array | None, drawn: dict[tuple[int, int], int] | None = None,
    places: Callable[[int, int], tuple[float, float]] | None = None, structures: Structures | None = None,
) -> Calibration:  # fmt: skip
    """`merge_slices` of collected samples: the means of all or, by how often each was ``drawn``, of some steps.

    With ``places``, a step has the weights of one measured step, at ``places(slice, step)`` (`Samples.one`).
    ``structures`` are those of ``graph``, for whoever merges it again and again.
    """
    c = graph.columns
    kind = c["kind"]
    found = {name: np.full(len(graph), ABSENT, dtype=np.int64) for name in _FIELDS}
    num_samples = np.zeros(len(graph), dtype=np.int32)
    known: dict[Key, tuple[dict[str, Int64Array], int]] = {}
    for segment, keys in (structures or structures_of(graph)).items():
        key = next((key for key in keys if key in samples), None)
        if key is None:
            continue
        if key not in known:
            known[key] = samples[key].means(drawn)
        means, count = known[key]
        for name in _FIELDS:
            found[name][segment.begin : segment.end] = means[name]
        if places is not None:
            entry = samples[key]
            for name, values in entry.one(*places(entry.sources[0][0], segment.step)).items():
                rows = found[name][segment.begin : segment.end]
                rows[:] = np.where(values == ABSENT, rows, values)
        num_samples[segment.begin : segment.end] = count
    if not num_samples.any():
        raise GraphError(f"no slice shows any step of {graph.source}",
                         hint="slices must run the script of the recording with its arguments and its adapters, "
                              "as they were: names cut computing into units")  # fmt: skip
    is_compute, is_wait = kind == UnitKind.COMPUTE, kind == UnitKind.WAIT
    duration, transfer = found["duration_ns"], found["transfer_ns"]
    is_measured = np.where(is_compute, duration != ABSENT, np.where(is_wait, num_samples > 0, transfer != ABSENT))
    timed = (c["start_ns"] != ABSENT) & (c["end_ns"] != ABSENT)
    duration = np.where(is_compute & (duration == ABSENT) & timed, c["end_ns"] - c["start_ns"], duration)
    lacking = is_compute & (duration == ABSENT)
    if lacking.any():
        Timing.from_graph(graph, default_transfer_ns=0)  # names the first of them
    duration = np.where(is_wait & (duration == ABSENT) & (num_samples == 0), c["transfer_ns"], duration)
    transfer = np.where(is_wait | is_compute, 0, np.where(transfer == ABSENT, c["transfer_ns"], transfer))
    if (transfer == ABSENT).any():
        if default_transfer_ns is None:
            Timing.from_graph(graph)  # names the first of them
            raise AssertionError("unreachable: the transfer is absent in the graph")
        transfer = np.where(transfer == ABSENT, default_transfer_ns, transfer)
    gap = np.where((found["gap_ns"] == ABSENT) & (num_samples == 0), c["gap_ns"], found["gap_ns"])
    timing = Timing(
        gap_ns=np.where(gap == ABSENT, 0, gap),
        duration_ns=np.where(duration == ABSENT, 0, duration),
        transfer_ns=transfer,
    )
    for array in (timing.gap_ns, timing.duration_ns, timing.transfer_ns, is_measured, num_samples):
        array.setflags(write=False)
    return Calibration(
        graph=graph, timing=timing, timeline=schedule(graph, timing=timing), is_measured=is_measured,
        num_samples=num_samples, num_clipped=clipped,
    )  # fmt: skip


def whole_steps_ns(timeline: Schedule) -> Int64Array:
    """The times of the job's whole steps (`job_steps_ns`), the first step left out.

    A step is whole where a rank ran its optimizer; what comes after the last optimizer step is the end of the job.
    """
    found = [timeline.step_ends_ns(rank) for rank in timeline.graph.ranks]
    steps, ends = (np.concatenate(parts) for parts in zip(*found, strict=True))
    place = np.repeat(np.arange(len(found)), [len(of_rank) for of_rank, _ in found])
    return job_steps_ns(steps, ends, whole_steps(timeline.graph, place, steps))[1]


def step_time_ns(timeline: Schedule) -> float:
    """The predicted step time: the mean of `whole_steps_ns`, or the length of the job where it has one step."""
    times = whole_steps_ns(timeline)
    return float(times.mean()) if len(times) else float(timeline.end_of_job_ns)


def relative_change(before: Schedule, after: Schedule) -> float:
    """The largest change of any step that `step_time_ns` counts between two timelines of a graph, in parts of the mean.

    The first step is not among them: it has the start of the libraries in it, whose times no pass makes steadier.
    """
    times = [whole_steps_ns(timeline) for timeline in (before, after)]
    if not len(times[1]):
        times = [np.array([timeline.end_of_job_ns]) for timeline in (before, after)]
    return int(np.abs(times[1] - times[0]).max()) / max(step_time_ns(after), 1.0)
