"""Takes the spans of one step of some ranks out of a loaded trace, reduced to what a screen can show.

It chooses no ranks and draws nothing. Times are relative to the start of the step on its earliest rank.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis import CriticalPath, Job
from prismtrace import ABSENT, ABSENT32, Op, Phase, UnitKind

__all__ = ["MAX_SPANS", "Spans", "packed", "step_spans"]

Int64Array = npt.NDArray[np.int64]
Spans = dict[str, Any]

#: Spans of one page, over all ranks: more than a screen of 4,000 pixels shows in 256 rows is merged.
MAX_SPANS = 120_000
_CRITICAL, _MERGED = 1, 2


def packed(values: npt.ArrayLike, kind: str) -> dict[str, str]:
    """An array as JSON: its type (``i4``, ``u2``, ``f8``...) and its bytes in base64, little-endian."""
    data = np.ascontiguousarray(values, dtype=np.dtype("<" + kind))
    return {"type": kind, "data": base64.b64encode(data.tobytes()).decode("ascii")}


def step_spans(
    job: Job, *, step: int, ranks: Sequence[int], path: CriticalPath | None = None, max_spans: int = MAX_SPANS
) -> Spans:
    """The units of a step, row by row.

    Args:
        job: the loaded trace.
        step: which step; ABSENT32 for traces without steps.
        ranks: the rows, in order.
        path: marks what is critical, and gives slack.
        max_spans: above, spans that are too short to be seen are merged with their neighbours.

    Returns:
        ``origin_ns``, ``length_ns``, ``classes`` (what a span is), and packed columns: ``offsets`` of rows, and for
        each span ``start`` and ``duration`` (float64 ns), ``klass``, ``unit``, ``slack`` (float64, -1 unknown),
        ``flags``, ``count`` of units that it stands for, ``lane`` (0 host, 1 communication).
    """
    windows = job.windows
    inside = windows.step == step
    origin = int(windows.start_ns[inside].min()) if inside.any() else 0
    last = int(windows.end_ns[inside].max()) if inside.any() else 1
    critical = np.zeros(len(job.graph), dtype=np.bool_)
    if path is not None and len(path.rows):
        critical[path.rows] = True
    budget = max(16, max_spans // max(1, len(ranks)))
    names = _ClassTable(job)
    parts, offsets = [], [0]
    for rank in ranks:
        part = _of_rank(job, rank, step, origin, last, critical, path, names, budget)
        parts.append(part)
        offsets.append(offsets[-1] + len(part["start"]))
    columns = {name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0)
               for name in ("start", "duration", "klass", "unit", "slack", "flags", "count", "lane")}  # fmt: skip
    kinds = {"start": "f8", "duration": "f8", "klass": "u4", "unit": "f8", "slack": "f8", "flags": "u1", "count": "u4",
             "lane": "u1"}  # fmt: skip
    return {
        "origin_ns": str(origin), "length_ns": last - origin, "step": None if step == ABSENT32 else step,
        "ranks": list(ranks), "classes": names.entries, "offsets": packed(offsets, "u4"),
        **{name: packed(values, kinds[name]) for name, values in columns.items()},
    }  # fmt: skip


class _ClassTable:
    """What spans have in common, each once: kind, operation, phase, microbatch, stage, chunk, group."""

    def __init__(self, job: Job) -> None:
        self._columns = job.graph.columns
        self._groups = job.graph.groups
        self._number: dict[tuple[int, ...], int] = {}
        self.entries: list[dict[str, Any]] = []

    def of(self, rows: Int64Array) -> npt.NDArray[np.uint32]:
        names = ("kind", "op", "phase", "microbatch", "stage", "model_chunk", "group_id")
        keys = np.stack([self._columns[name][rows].astype(np.int64) for name in names], axis=1)
        unique, place = np.unique(keys, axis=0, return_inverse=True)
        numbers = [self._of_key(tuple(key)) for key in unique.tolist()]
        return np.array(numbers, dtype=np.uint32)[place.reshape(-1)] if numbers else np.zeros(0, dtype=np.uint32)

    def _of_key(self, key: tuple[int, ...]) -> int:
        found = self._number.get(key)
        if found is not None:
            return found
        kind, op, phase, microbatch, stage, chunk, group_id = key
        entry: dict[str, Any] = {"kind": _name(UnitKind, kind)}
        if op:
            entry["op"] = _name(Op, op)
        if phase:
            entry["phase"] = _name(Phase, phase)
        numbers: Mapping[str, int] = {"microbatch": microbatch, "stage": stage, "chunk": chunk}
        entry |= {name: value for name, value in numbers.items() if value != ABSENT32}
        group = self._groups.get(group_id % (1 << 64))
        if group is not None:
            entry["group"] = group.description or group.name
            entry["members"] = group.size
        self._number[key] = len(self.entries)
        self.entries.append(entry)
        return self._number[key]


def _name(enum: Any, value: int) -> str:
    return str(enum(value).name.lower()) if value in enum._value2member_map_ else f"{enum.__name__.lower()} {value}"


def _of_rank(
    job: Job, rank: int, step: int, origin: int, last: int, critical: npt.NDArray[np.bool_], path: CriticalPath | None,
    names: _ClassTable, budget: int,
) -> dict[str, npt.NDArray[Any]]:  # fmt: skip
    c = job.graph.columns
    bounds = job.graph.rows(rank)
    rows = np.arange(bounds.start, bounds.stop)
    kind = c["kind"][rows]
    communicates = (kind >= UnitKind.COLLECTIVE) & (kind <= UnitKind.RECV)
    start, end = c["start_ns"][rows], np.where(communicates, job.completion_ns[rows], c["end_ns"][rows])
    shown = (start != ABSENT) & (end != ABSENT) & (end >= origin) & (start <= last)
    if step != ABSENT32:
        shown &= c["step"][rows] == step
    rows, start, end, communicates = rows[shown], start[shown], end[shown], communicates[shown]
    order = np.lexsort((start, communicates))
    rows, start, end, lane = rows[order], start[order], end[order], communicates[order].astype(np.uint8)
    klass = names.of(rows)
    flags = np.where(critical[rows], _CRITICAL, 0).astype(np.uint8)
    slack = path.slack_ns[rows].astype(np.float64) if path is not None else np.full(len(rows), -1.0)
    count = np.ones(len(rows), dtype=np.uint32)
    if len(rows) > budget:
        keep, start, end, flags, count = _merge(start, end, lane, flags, (last - origin) / budget, origin)
        rows, lane, klass, slack = rows[keep], lane[keep], klass[keep], slack[keep]
    position = int(np.searchsorted(job.graph.offsets, bounds.start, side="right")) - 1
    unit = rows - job.graph.offsets[position] + job.graph.first_index[position]
    return {"start": (start - origin).astype(np.float64), "duration": (end - start).astype(np.float64), "klass": klass,
            "unit": unit, "slack": slack, "flags": flags, "count": count, "lane": lane}  # fmt: skip


def _merge(
    start: Int64Array, end: Int64Array, lane: npt.NDArray[np.uint8], flags: npt.NDArray[np.uint8], width: float,
    origin: int,
) -> tuple[Int64Array, Int64Array, Int64Array, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:  # fmt: skip
    """Short spans of one lane and one field of ``width`` become one, which is shown as the longest of them."""
    length = end - start
    field = ((start - origin) / width).astype(np.int64)
    key = np.where(length < width, field * 2 + lane, -1 - np.arange(len(start)))
    _, place = np.unique(key, return_inverse=True)
    num = int(place.max()) + 1
    longest = np.lexsort((length, place))
    keep = longest[np.flatnonzero(np.append(place[longest][1:] != place[longest][:-1], True))]
    first, stop = np.full(num, np.iinfo(np.int64).max), np.full(num, np.iinfo(np.int64).min)
    np.minimum.at(first, place, start)
    np.maximum.at(stop, place, end)
    count = np.bincount(place, minlength=num).astype(np.uint32)
    joined = np.zeros(num, dtype=np.uint8)
    np.bitwise_or.at(joined, place, flags)
    joined |= np.where(count > 1, _MERGED, 0).astype(np.uint8)
    where = place[keep]
    order = np.lexsort((first[where], lane[keep]))
    keep, where = keep[order], where[order]
    return keep, first[where], stop[where], joined[where], count[where]
