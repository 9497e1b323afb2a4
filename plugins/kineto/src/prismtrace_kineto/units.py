"""Derives the units and steps of one rank from its timeline and communications. Does not read or write files.

The device is the rank's line of execution. Kernels and copies become COMPUTE units; where they overlap, the later one
begins when the earlier ends, so that their lengths add up to the time in which the device computed. NCCL kernels are
communication units. Where the device computes nothing at the end of a communication, the time up to there is a WAIT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, ABSENT32, Op, UnitKind
from prismtrace_kineto import naming
from prismtrace_kineto.communication import Communication
from prismtrace_kineto.timeline import Timeline

Ints = NDArray[np.int64]


_DEFAULTS: Final = {
    "step": ABSENT32, "group_id": 0, "seq": ABSENT, "op": 0, "reduce_op": 0, "dtype": 0, "num_elements_in": ABSENT,
    "num_elements_out": ABSENT, "peer": ABSENT32, "is_async": False, "awaits": ABSENT,
}  # fmt: skip


@dataclass
class RankUnits:
    """Columns for `add_units` and `add_steps`, and the unit of each event (ABSENT = none)."""

    units: dict[str, Any]
    steps: dict[str, Any]
    unit_of: Ints
    counts: dict[str, int] = field(default_factory=dict)


def steps_of(line: Timeline) -> tuple[Ints, Ints, Ints, int]:
    """Step numbers, starts and ends by ProfilerStep annotations of the CPU, and how many were left out."""
    strings = line.columns.strings
    wanted: dict[int, int] = {}
    for code, text in enumerate(strings):
        found = naming.STEP_NAME.match(text)
        if found and len(found[1]) < 10:
            wanted[code] = int(found[1])
    device = line.in_categories(frozenset({"gpu_user_annotation"}))
    rows = np.flatnonzero(np.isin(line.name, list(wanted)) & ~device & (line.end_ns != ABSENT))
    rows = rows[np.argsort(line.start_ns[rows], kind="stable")]
    kept: list[int] = []
    last_step, last_end = -1, None
    for row in rows.tolist():
        step = wanted[int(line.name[row])]
        if step > last_step and (last_end is None or line.start_ns[row] >= last_end):
            kept.append(row)
            last_step, last_end = step, line.end_ns[row]
    numbers = np.array([wanted[int(line.name[row])] for row in kept], np.int64)
    return numbers, line.start_ns[kept], line.end_ns[kept], len(rows) - len(kept)


def derive(
    line: Timeline, launch: Ints, device: Ints, communications: Sequence[Communication], *, labels: bool = True
) -> RankUnits:
    """All units of a rank."""
    numbers, begins, ends, num_dropped = steps_of(line)
    counts: dict[str, int] = {}
    if num_dropped:
        counts["ProfilerStep annotations repeat or overlap and were left out of the steps"] = num_dropped
    is_communication = np.zeros(len(line), np.bool_)
    is_communication[[item.row for item in communications]] = True
    timed = device[(line.end_ns[device] != ABSENT)]
    if len(timed) < len(device):
        counts["device events have no time and are no units"] = len(device) - len(timed)
    compute = timed[~is_communication[timed]]
    compute = compute[np.lexsort((line.end_ns[compute], line.start_ns[compute]))]
    start, end, clipped = _one_after_another(line.start_ns[compute], line.end_ns[compute])
    if clipped:
        counts["device events overlap others: their units begin when those end"] = clipped
    known = [item for item in communications if line.end_ns[item.row] != ABSENT]
    waits = _waits(start, end, [(int(line.start_ns[c.row]), int(line.end_ns[c.row])) for c in known])
    num_comms, num_waits = len(known), len(waits)
    rows = np.array([c.row for c in known] + [known[w[0]].row for w in waits], np.int64)
    starts = np.concatenate([line.start_ns[rows[:num_comms]], np.array([w[1] for w in waits], np.int64), start])
    stops = np.concatenate([line.end_ns[rows[:num_comms]], np.array([w[2] for w in waits], np.int64), end])
    kind = np.repeat([0, int(UnitKind.WAIT), int(UnitKind.COMPUTE)], [num_comms, num_waits, len(compute)])
    kinds = {Op.SEND: UnitKind.SEND, Op.RECV: UnitKind.RECV}
    kind[:num_comms] = [int(kinds.get(c.op, UnitKind.COLLECTIVE)) for c in known]
    events = np.concatenate([rows, compute])
    priority = np.repeat([0, 1, 2], [num_comms, num_waits, len(compute)])
    order = np.lexsort((stops, priority, starts))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    waited = {index for index, _, _ in waits}

    def column(values: Sequence[int | None], absent: int = ABSENT) -> Ints:
        result = np.full(len(order), absent, np.int64)
        result[:num_comms] = [absent if value is None else value for value in values]
        return result[order]

    awaits = np.full(len(order), ABSENT, np.int64)
    awaits[num_comms : num_comms + num_waits] = place[[w[0] for w in waits]] if waits else []
    units: dict[str, Any] = {
        "kind": kind[order].astype(np.uint8),
        "step": _step_of(line, launch, events[order], numbers, begins, ends).astype(np.int32),
        "start_ns": starts[order],
        "end_ns": stops[order],
        "group_id": np.array(_spread([c.group_id for c in known], len(order)), np.uint64)[order],
        "seq": column([c.seq for c in known]),
        "op": column([int(c.op) for c in known], 0).astype(np.uint8),
        "reduce_op": column([int(c.reduce_op) for c in known], 0).astype(np.uint8),
        "dtype": column([int(c.dtype) for c in known], 0).astype(np.uint8),
        "num_elements_in": column([c.num_in for c in known]),
        "num_elements_out": column([c.num_out for c in known]),
        "peer": np.maximum(column([c.peer for c in known], ABSENT32), ABSENT32).astype(np.int32),
        "is_async": np.array(_spread([index not in waited for index in range(num_comms)], len(order)), np.bool_)[order],
        "awaits": awaits[order],
    }
    for name, absent in _DEFAULTS.items():
        if (units[name] == absent).all():
            del units[name]
    splits = [(c.splits_in, c.splits_out) for c in known]
    if any(one or two for one, two in splits):
        for number, name in enumerate(("splits_in", "splits_out")):
            lists = _spread([pair[number] for pair in splits], len(order), None)
            units[name] = [lists[index] for index in order.tolist()]
    if labels:
        strings = line.columns.strings
        texts = [_printable(strings[code]) if code >= 0 else None for code in line.name[events[order]].tolist()]
        units["label"] = [None if k == UnitKind.WAIT else t for k, t in zip(kind[order].tolist(), texts, strict=True)]
    unit_of = np.full(len(line), ABSENT, np.int64)
    own = priority[order] != 1
    unit_of[events[order][own]] = np.flatnonzero(own)
    steps = {"step": numbers.astype(np.int32), "start_ns": begins, "end_ns": ends} if len(numbers) else {}
    counts["units"] = len(order)
    return RankUnits(units, steps, unit_of, counts)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _spread(values: Sequence[Any], count: int, rest: Any = 0) -> list[Any]:
    return [*values, *([rest] * (count - len(values)))]


def _one_after_another(start: Ints, end: Ints) -> tuple[Ints, Ints, int]:
    if not len(start):
        return start, end, 0
    before = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    begin = np.maximum(start, before)
    return begin, np.maximum(end, begin), int((begin != start).sum())


def _waits(start: Ints, end: Ints, comms: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(communication, start, end) of the times in which the device only waits for the end of a communication."""
    waits: list[tuple[int, int, int]] = []
    last = min((begin for begin, _ in comms), default=0)
    for index in sorted(range(len(comms)), key=lambda number: comms[number][1]):
        begin, stop = comms[index]
        place = int(np.searchsorted(start, stop, side="left")) - 1
        busy = int(end[place]) if place >= 0 else begin
        first = max(busy, last, begin)
        if first < stop:
            waits.append((index, first, stop))
            last = stop
    return waits


def _step_of(line: Timeline, launch: Ints, rows: Ints, numbers: Ints, begins: Ints, ends: Ints) -> Ints:
    """The step in which each event was launched, or in which it ran when its launch is not known."""
    if not len(numbers):
        return np.full(len(rows), ABSENT32, np.int64)
    time = np.where(launch[rows] >= 0, line.start_ns[np.maximum(launch[rows], 0)], line.start_ns[rows])
    place = np.searchsorted(begins, time, side="right") - 1
    inside = (place >= 0) & (time <= ends[np.maximum(place, 0)])
    return np.where(inside, numbers[np.maximum(place, 0)], ABSENT32)
