"""Loads what every analysis starts from: the columns of the ranks, the steps, and when each communication began.

It calculates no figure, and matches and reads nothing itself: ``prism_sdk.graph`` does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.folded import Fold, load_folded
from prism_sdk.errors import UsageError
from prism_sdk.graph import GraphError, JobGraph, measure
from prism_sdk.graph.job import COLUMN_TYPES, note_on_steps, read_columns
from prism_sdk.keys import PURPOSE_KEY
from prism_sdk.wording import counted
from prismtrace import ABSENT, ABSENT32, GraphKind, ProcessGroup, TraceReader, UnitKind

__all__ = ["Job", "StepWindows", "blocking_rows", "group_titles", "load_job"]

Int64Array = npt.NDArray[np.int64]

#: Rows above which an analysis takes the last steps only, unless told which: about 130 bytes of memory a row.
MAX_ROWS = 6_000_000


@dataclass(frozen=True, kw_only=True)
class StepWindows:
    """The time of each step of each rank, (W,) each; ``step`` is ABSENT32 where a trace has no steps."""

    position: Int64Array
    rank: Int64Array
    step: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array

    def __len__(self) -> int:
        return len(self.step)

    @property
    def length_ns(self) -> Int64Array:
        """(W,) end less start."""
        return self.end_ns - self.start_ns

    @cached_property
    def is_steady(self) -> npt.NDArray[np.bool_]:
        """(W,) False for the first step, which has warm-up in it, where there are others."""
        steps = np.unique(self.step)
        return self.step > steps[0] if len(steps) > 1 else np.ones(len(self), dtype=np.bool_)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One trace, loaded. Rows are those of ``graph``.

    A *folded* job has one rank of each class in its graph, and the others by ``fold``; windows are of all ranks always.
    """

    path: str
    graph: JobGraph
    #: False where the communication of different ranks could not be joined; ``notes`` say why.
    is_matched: bool
    windows: StepWindows
    #: (N,) when a communication was complete: its own end, or that of the WAIT for it; ABSENT where neither is known.
    completion_ns: Int64Array = field(repr=False)
    #: (N,) the last arrival of all members, ABSENT where unknown. A send's is its post.
    arrival_ns: Int64Array = field(repr=False)
    notes: tuple[str, ...]
    #: What groups are called, by id (`group_titles`).
    titles: Mapping[int, str] = field(repr=False)
    #: Whom the ranks of the graph stand for; None: it has all.
    fold: Fold | None = field(default=None, repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were loaded."""
        return self.graph.ranks if self.fold is None else self.fold.ranks

    @cached_property
    def place(self) -> Int64Array:
        """(R,) for each rank the position in the graph of the rank whose rows it has: its own, or one like it."""
        return np.arange(len(self.graph.ranks)) if self.fold is None else self.fold.place

    @cached_property
    def window_bounds(self) -> Int64Array:
        """(R + 1,) the windows of rank p are ``window_bounds[p]:window_bounds[p + 1]``."""
        return np.searchsorted(self.windows.position, np.arange(len(self.ranks) + 1))

    @property
    def num_units(self) -> int:
        """How many rows all ranks have."""
        return len(self.graph) if self.fold is None else int(self.fold.offsets[-1])

    @property
    def num_events(self) -> int:
        """How many collectives and messages all ranks have."""
        graph, fold = self.graph, self.fold
        if fold is None or not graph.num_events:
            return graph.num_events
        lanes = fold.lane_of_pair[fold.pair_of_row[graph.event_rows[graph.event_offsets[:-1]]]]
        return int(fold.num_lanes[fold.class_of_lane[lanes]].sum())

    @property
    def groups(self) -> Mapping[int, ProcessGroup]:
        """The groups of the trace."""
        return self.graph.groups if self.fold is None else self.fold.groups

    @cached_property
    def is_timed(self) -> npt.NDArray[np.bool_]:
        """(N,) whether a row has start and end."""
        c = self.graph.columns
        timed: npt.NDArray[np.bool_] = (c["start_ns"] != ABSENT) & (c["end_ns"] != ABSENT)
        return timed

    @cached_property
    def is_blocking(self) -> npt.NDArray[np.bool_]:
        """(N,) see ``blocking_rows``."""
        return blocking_rows(self.graph)


def blocking_rows(graph: JobGraph) -> npt.NDArray[np.bool_]:
    """(N,) communication that contains the waiting for it: not asynchronous, of ranks that have no WAIT rows.

    Some formats record a blocking operation as one span in place of a communication and a WAIT.
    """
    kind = graph.columns["kind"]
    has_waits = np.zeros(len(graph.ranks), dtype=np.bool_)
    waits = np.flatnonzero(kind == UnitKind.WAIT)
    has_waits[np.searchsorted(graph.offsets, waits, side="right") - 1] = True
    communicates = (kind >= UnitKind.COLLECTIVE) & (kind <= UnitKind.RECV) & ~graph.columns["is_async"]
    blocking: npt.NDArray[np.bool_] = communicates & ~np.repeat(has_waits, np.diff(graph.offsets))
    return blocking


def load_job(
    source: str | os.PathLike[str] | TraceReader,
    *,
    ranks: Sequence[int] | None = None,
    steps: range | None = None,
    max_rows: int = MAX_ROWS,
    folded: bool = False,
) -> Job:
    """Read a trace for analysis.

    Args:
        source: a path, or an open reader.
        ranks: only these.
        steps: only these; without it all steps, or the last ones that make up ``max_rows`` rows.
        max_rows: see ``steps``; at least one step is read whatever its size.
        folded: of ranks that are alike read one, where the trace stores them by roles and they fit together.

    Raises:
        UsageError: the trace has no times, no such ranks or no such steps.
        PrismTraceError: the file cannot be read.
    """
    if not isinstance(source, TraceReader):
        with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
            return load_job(reader, ranks=ranks, steps=steps, max_rows=max_rows, folded=folded)
    reader, notes, present = source, [], set(source.ranks)
    chosen = [rank for rank in (reader.ranks if ranks is None else sorted(set(ranks))) if rank in present]
    if ranks is not None and len(chosen) < len(set(ranks)):
        unknown = sorted(set(ranks) - set(chosen))
        raise UsageError(f"{reader.path} has no rank {unknown[0]}", hint=f"it has {len(reader.ranks)} ranks")
    with_units = [rank for rank in chosen if reader.num_units(rank)]
    if not with_units:
        hint = "it is unfinished: it ends before the first unit" if reader.unfinished else None
        raise UsageError(f"{reader.path} has no units: there is nothing to analyse", hint=hint)
    if reader.unfinished:
        notes.append("the file is unfinished: what was written before the end is analysed")
    if reader.graph_kind is GraphKind.BARE:
        notes.append("a bare graph has the right structure and no real times: calibrate it, or observe the job")
    if steps is None:
        steps = _fitting_steps(reader, with_units, max_rows)
        if steps is not None:
            notes.append(f"the trace is large: steps {steps.start} to {steps.stop - 1} are analysed")
    found = load_folded(reader, ranks=with_units, steps=steps) if folded else None
    fold: Fold | None = None
    if found is not None:
        (graph, fold), problem = found, ""
    else:
        graph, problem = _graph(reader, with_units, steps)
    if not len(graph):
        raise UsageError(f"{reader.path} has no units in steps {steps.start}:{steps.stop}" if steps is not None
                         else f"{reader.path} has no units of these ranks")  # fmt: skip
    if problem:
        notes.append(f"communication of different ranks is not joined: {problem}")
    timed = (graph.columns["start_ns"] != ABSENT) & (graph.columns["end_ns"] != ABSENT)
    if not timed.any():
        raise UsageError(f"{reader.path}: no unit has a time",
                         hint="a bare graph has none: calibrate it, or observe the job")  # fmt: skip
    if reader.world_size > len(with_units):
        notes.append(f"{len(with_units)} of {counted(reader.world_size, 'rank')} are analysed: the figures are not "
                     "those of the whole job")  # fmt: skip
    notes += note_on_steps(reader, ranks=with_units, phase=graph.columns["phase"])
    completion = _completions(graph)
    arrival = _arrivals(graph, completion)
    unknown = (completion != ABSENT) & (arrival == ABSENT)
    num_unknown = int(
        unknown.sum() if fold is None else (unknown * np.repeat(fold.counts, np.diff(graph.offsets))).sum()
    )
    if num_unknown:
        notes.append(f"{num_unknown} communications do not tell when all members had arrived: waiting for them counts "
                     "as exposed communication")  # fmt: skip
    return Job(
        path=reader.path, graph=graph, is_matched=not problem, windows=_windows(reader, graph, steps, fold),
        completion_ns=completion, arrival_ns=arrival, notes=tuple(notes), fold=fold,
        titles=group_titles(reader.groups, reader.metadata),
    )  # fmt: skip


def group_titles(groups: Mapping[int, ProcessGroup], metadata: Mapping[str, str]) -> dict[int, str]:
    """What groups are called: by their description, or what the adapter says they are for; and by name if many are so.

    Args:
        groups: of a trace, by id.
        metadata: of that trace.
    """
    kinds = {number: group.description or metadata.get(PURPOSE_KEY.format(number), "")
             for number, group in groups.items()}  # fmt: skip
    alike = Counter(kinds.values())
    return {number: " ".join(filter(None, (kinds[number], group.name if alike[kinds[number]] > 1 else "")))
            or group.name for number, group in groups.items()}  # fmt: skip


def _fitting_steps(reader: TraceReader, ranks: Sequence[int], max_rows: int) -> range | None:
    num_rows = sum(reader.num_units(rank) for rank in ranks)
    spans = [found for found in map(reader.step_range, ranks) if found is not None]
    if num_rows <= max_rows or not spans:
        return None
    first, last = min(s[0] for s in spans), max(s[1] for s in spans)
    fitting = max(1, int(max_rows * (last - first + 1) / num_rows))
    # rows behind the last step (a final barrier) have a number of their own: the last step with a row of steps counts
    numbers = [int(table.step[-1]) for table in (reader.steps(rank, columns=["step"]) for rank in ranks[:8])
               if len(table)]  # fmt: skip
    last = min(numbers) if numbers else last
    return None if fitting > last - first else range(max(first, last - fitting + 1), last + 1)


def _graph(reader: TraceReader, ranks: Sequence[int], steps: range | None) -> tuple[JobGraph, str]:
    """The graph with its communication joined; else one without events, and why."""
    try:
        return JobGraph.load(reader, ranks=ranks, steps=steps), ""
    except GraphError as error:
        problem = str(error).splitlines()[0].removeprefix(f"{reader.path}: ")
    names = list(COLUMN_TYPES)
    tables = {rank: reader.units(rank, steps=steps, columns=names) for rank in ranks}
    sizes = [len(tables[rank]) for rank in ranks]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    by_rank = [read_columns(tables[rank], names) for rank in ranks]
    columns = {name: np.concatenate([mine[name] for mine in by_rank]) for name in names}
    num_rows = int(offsets[-1])
    awaited = np.full(num_rows, -1, dtype=np.int64)
    for position, rank in enumerate(ranks):
        index = tables[rank].row_index
        rows = np.flatnonzero(columns["awaits"][offsets[position] : offsets[position + 1]] != ABSENT)
        wanted = columns["awaits"][offsets[position] + rows]
        at = np.minimum(np.searchsorted(index, wanted), max(len(index) - 1, 0))
        found = (index[at] == wanted) & (at < rows)
        awaited[offsets[position] + rows[found]] = offsets[position] + at[found]
    none: Int64Array = np.zeros(0, dtype=np.int64)
    graph = JobGraph(
        graph_kind=reader.graph_kind, world_size=reader.world_size, groups=dict(reader.groups), ranks=tuple(ranks),
        offsets=offsets, first_index=np.array([tables[r].first_index for r in ranks], dtype=np.int64), columns=columns,
        source=reader.path, awaited_row=awaited, event_of_row=np.full(num_rows, -1, dtype=np.int64),
        event_offsets=np.zeros(1, dtype=np.int64), event_rows=none, event_previous=none,
        event_is_whole=np.zeros(0, dtype=np.bool_),
    )  # fmt: skip
    return graph, problem


def _completions(graph: JobGraph) -> Int64Array:
    kind, end = graph.columns["kind"], graph.columns["end_ns"]
    communicates = (kind >= UnitKind.COLLECTIVE) & (kind <= UnitKind.RECV)
    completion = np.where(communicates, end, ABSENT)
    waits = np.flatnonzero((graph.awaited_row >= 0) & (end != ABSENT))
    target = graph.awaited_row[waits]
    unknown = completion[target] == ABSENT
    # of several waits the first counts: write it last
    completion[target[unknown][::-1]] = end[waits[unknown][::-1]]
    return completion


def _arrivals(graph: JobGraph, completion: Int64Array) -> Int64Array:
    measured = measure(graph).transfer_ns
    transfer = np.where(measured != ABSENT, measured, graph.columns["transfer_ns"])
    known = (completion != ABSENT) & (transfer != ABSENT) & (graph.columns["kind"] != UnitKind.WAIT)
    post = graph.columns["start_ns"]
    arrival = np.where(known, np.maximum(completion - np.where(known, transfer, 0), post), ABSENT)
    if graph.num_events:
        # members of one event have one arrival, also those whose own completion is not known
        members, begins = graph.event_rows, graph.event_offsets[:-1]
        posts = np.where(post[members] == ABSENT, np.iinfo(np.int64).max, post[members])
        last = np.maximum.reduceat(posts, begins)
        shared = np.repeat(np.where(graph.event_is_whole, last, ABSENT), np.diff(graph.event_offsets))
        shared = np.where(shared == np.iinfo(np.int64).max, ABSENT, shared)
        is_send = graph.columns["kind"][members] == UnitKind.SEND
        missing = (arrival[members] == ABSENT) & ~is_send
        arrival[members[missing]] = shared[missing]
    _meet(graph, completion, arrival)
    return arrival


def _meet(graph: JobGraph, completion: Int64Array, arrival: Int64Array) -> None:
    """Blocking sends wait for their receivers, and messages of one batch (same rank, start and end) for each other."""
    c = graph.columns
    messages = blocking_rows(graph) & ((c["kind"] == UnitKind.SEND) | (c["kind"] == UnitKind.RECV))
    rows = np.flatnonzero(messages & (completion != ABSENT) & (c["start_ns"] != ABSENT))
    event = graph.event_of_row[rows]
    rows, event = rows[event >= 0], event[event >= 0]
    pairs = graph.event_offsets[event]
    whole = graph.event_is_whole[event]
    rows, pairs = rows[whole], pairs[whole]
    posts = c["start_ns"]
    both = np.maximum(posts[graph.event_rows[pairs]], posts[graph.event_rows[pairs + 1]])
    arrival[rows] = np.clip(both, posts[rows], np.maximum(completion[rows], posts[rows]))
    key = np.stack([graph.rank_of_row[rows].astype(np.int64), posts[rows], completion[rows]], axis=1)
    _, batch = np.unique(key, axis=0, return_inverse=True)
    latest = np.full(len(rows), ABSENT, dtype=np.int64)
    np.maximum.at(latest, batch.reshape(-1), arrival[rows])
    arrival[rows] = latest[batch.reshape(-1)]


def _windows(reader: TraceReader, graph: JobGraph, steps: range | None, fold: Fold | None) -> StepWindows:
    parts: list[npt.NDArray[Any]] = []
    c = graph.columns
    for position, rank in enumerate(graph.ranks):
        rows = slice(int(graph.offsets[position]), int(graph.offsets[position + 1]))
        first, last = _extent(c["step"][rows], c["start_ns"][rows], c["end_ns"][rows])
        table = reader.steps(rank, columns=["step", "start_ns", "end_ns"]) if reader.num_steps(rank) else None
        found: dict[int, tuple[int, int]] = {}
        if table is not None:
            for number, start, end in zip(table.step.tolist(), table.start_ns.tolist(), table.end_ns.tolist(),
                                          strict=True):  # fmt: skip
                if steps is not None and number not in steps:
                    continue
                begin = start if start != ABSENT else first.get(number, ABSENT)
                if begin != ABSENT and begin <= end:
                    found[number] = (begin, end)
        if not found:
            found = {number: (first[number], last[number]) for number in first if number != ABSENT32}
        if not found and first:
            found = {ABSENT32: (min(first.values()), max(last.values()))}
        mine = np.array([(position, rank, n, *found[n]) for n in sorted(found)], dtype=np.int64).reshape(-1, 5)
        # a step ends where the next one begins, whatever was still under way (damaged tables are put in order likewise)
        mine[:, 3] = np.maximum.accumulate(mine[:, 3])
        mine[:-1, 4] = np.minimum(mine[:-1, 4], mine[1:, 3])
        mine[:, 4] = np.maximum(mine[:, 4], mine[:, 3])
        parts.append(mine)
    if fold is not None:
        parts = [parts[place] for place in fold.place.tolist()]
    table_of = np.concatenate(parts)
    if fold is not None:
        table_of[:, 0] = np.repeat(np.arange(len(parts)), [len(mine) for mine in parts])
        table_of[:, 1] = np.array(fold.ranks)[table_of[:, 0]]
    return StepWindows(**{name: table_of[:, i] for i, name in enumerate(("position", "rank", "step", "start_ns",
                                                                          "end_ns"))})  # fmt: skip


def _extent(step: Any, start: Int64Array, end: Int64Array) -> tuple[dict[int, int], dict[int, int]]:
    """Earliest start and latest end of the rows of each step."""
    known = (start != ABSENT) & (end != ABSENT)
    if not known.any():
        return {}, {}
    numbers, place = np.unique(step[known], return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(first, place, start[known])
    np.maximum.at(last, place, end[known])
    return dict(zip(numbers.tolist(), first.tolist(), strict=True)), dict(
        zip(numbers.tolist(), last.tolist(), strict=True)
    )
