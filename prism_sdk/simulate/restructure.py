"""What-if changes of what ranks do: units removed, another number of microbatches, another schedule.

They work on the columns of one rank before it is taken up (the argument ``change`` of ``load``).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from prism_sdk.errors import UsageError
from prism_sdk.simulate.loading import RankColumns
from prism_sdk.simulate.memory import rearranged_memory
from prism_sdk.simulate.selection import Selection
from prismtrace import ABSENT, ABSENT32, Op, Phase, UnitKind

__all__ = ["Microbatches", "Remove", "combined"]

Int64Array = npt.NDArray[np.int64]
Schedule = Literal["1f1b", "gpipe"]


def combined(changes: list[Callable[[int, RankColumns], RankColumns]]) -> Callable[[int, RankColumns], RankColumns]:
    """All changes, one after the other."""

    def change(rank: int, columns: RankColumns) -> RankColumns:
        for one in changes:
            columns = one(rank, columns)
        return columns

    return change


def _take(columns: RankColumns, rows: Int64Array, awaits: Int64Array) -> RankColumns:
    taken = {name: values[rows] for name, values in columns.items()}
    taken["awaits"] = awaits
    return taken


@dataclass(frozen=True)
class Remove:
    """Leave out units: kind, phase and operation say which. With a communication unit go the waits for it."""

    where: Selection
    group_ids: frozenset[int] | None = None
    #: How many units each call found; none at all is a mistake.
    found: list[int] = field(default_factory=list, compare=False)

    def __call__(self, rank: int, columns: RankColumns) -> RankColumns:
        """The columns without the units; all ranks must lose the same operations of a group."""
        where, kind, op = self.where, columns["kind"], columns["op"]
        if where.labels is not None:
            raise UsageError(f"{where.text!r}: labels do not say what is removed", hint="use kind, phase, op or group")
        gone = np.ones(len(kind), dtype=np.bool_)
        if where.kinds is not None:
            gone &= np.isin(kind, list(where.kinds))
        if where.phases is not None:
            gone &= np.isin(columns["phase"], list(where.phases))
        if where.ops is not None:
            own = np.where(kind == UnitKind.SEND, Op.SEND, np.where(kind == UnitKind.RECV, Op.RECV, op))
            gone &= np.isin(own, list(where.ops))
        if self.group_ids is not None:
            gone &= np.isin(columns["group_id"].view(np.uint64), np.array(sorted(self.group_ids), dtype=np.uint64))
        if where.ranks is not None or where.stages is not None or where.steps is not None:
            raise UsageError(
                f"{where.text!r}: units are removed on all ranks", hint="to slow or speed up some, use --scale"
            )
        self.found.append(int(gone.sum()))
        is_wait = kind == UnitKind.WAIT
        awaits = columns["awaits"]
        waits = np.flatnonzero(is_wait & (awaits != ABSENT) & (awaits < len(kind)) & (awaits >= 0))
        if where.kinds is None or UnitKind.WAIT not in where.kinds:
            gone &= ~is_wait
            gone[waits] = gone[awaits[waits]]
        kept = np.flatnonzero(~gone)
        place = np.cumsum(~gone) - 1
        target = np.where((awaits[kept] >= 0) & (awaits[kept] < len(kind)), awaits[kept], 0)
        return _take(columns, kept, np.where(awaits[kept] == ABSENT, ABSENT, place[target]))


_MOST_ROWS = 1_000_000
_REST = (-1, -1)  # in place of a pass: what follows the last one of a step


@dataclass(frozen=True)
class Microbatches:
    """Another number of microbatches, or another schedule, for a pipeline whose units name microbatch and stage.

    Each step keeps what is before its first and behind its last microbatch. In between the forward and backward parts
    of each microbatch are put into the order of the schedule; where there are more than the trace has, they are taken
    again from the start.
    """

    num_stages: int
    count: int | None = None
    schedule: Schedule | None = None

    def __call__(self, rank: int, columns: RankColumns) -> RankColumns:
        """The columns in the new order, with sequence numbers and awaits renewed."""
        step = np.maximum.accumulate(columns["step"]) if len(columns["step"]) else columns["step"]
        bounds = [0, *(np.flatnonzero(step[1:] != step[:-1]) + 1).tolist(), len(step)]
        order: list[int] = []
        numbers: list[int] = []
        awaits: list[int] = []
        latest: dict[int, int] = {}
        for begin, end in itertools.pairwise(bounds):
            for row, number in self._step(rank, columns, begin, end):
                latest[row] = len(order)
                awaited = int(columns["awaits"][row])
                order.append(row)
                numbers.append(number)
                awaits.append(ABSENT if awaited == ABSENT else latest.get(awaited, ABSENT))
        taken = _take(columns, np.array(order, dtype=np.int64), np.array(awaits, dtype=np.int64))
        taken["seq"] = _renumbered(taken)
        taken["microbatch"] = np.array(numbers, dtype=columns["microbatch"].dtype)
        taken["memory_bytes"] = rearranged_memory(columns, taken, np.array(order, dtype=np.int64))
        return taken

    def _step(self, rank: int, columns: RankColumns, begin: int, end: int) -> list[tuple[int, int]]:
        """Rows of the step in their new order, each with its microbatch."""
        microbatch, phase = columns["microbatch"][begin:end], columns["phase"][begin:end]
        late = _waits_for_sends(columns, begin, end)
        named = np.flatnonzero((microbatch != ABSENT32) & ~late)
        if not len(named):
            return [(row, ABSENT32) for row in range(begin, end)]
        first, last = int(named[0]), int(named[-1]) + 1
        late &= columns["awaits"][begin:end] - begin >= first
        owner = _owners(rank, columns, begin, named)
        microbatch, phase = microbatch[owner], phase[owner]
        way = np.where(phase == Phase.BACKWARD, int(Phase.BACKWARD), int(Phase.FORWARD))
        keys = list(zip(way.tolist(), microbatch.tolist(), strict=True))
        parts: dict[tuple[int, int], list[int]] = {}
        for row in range(first, last):
            if not late[row]:
                parts.setdefault(keys[row], []).append(begin + row)
        old = sorted({number for _, number in parts})
        keys += [_REST] * (end - begin - last)
        parts[_REST] = [row for row in range(begin + last, end) if not late[row - begin]]
        waits = _deferred(columns["awaits"][begin:end] - begin, np.flatnonzero(late), keys, parts, begin)
        stage = columns["stage"][begin:end][named]
        if len(np.unique(stage)) != 1:
            raise UsageError(f"rank {rank} has units of several stages: interleaved schedules cannot be changed yet")
        count = self.count or len(old)
        if count * len(named) // len(old) > _MOST_ROWS:
            raise UsageError(f"{count} microbatches make more than {_MOST_ROWS:,} units in a step of rank {rank}",
                             hint="take fewer: beyond some hundred a step only grows in proportion")  # fmt: skip
        warmup = count if self.schedule == "gpipe" else min(self.num_stages - int(stage[0]) - 1, count)
        sequence = [(int(Phase.FORWARD), m) for m in range(warmup)]
        for m in range(warmup, count):
            sequence += [(int(Phase.FORWARD), m), (int(Phase.BACKWARD), m - warmup)]
        sequence += [(int(Phase.BACKWARD), m) for m in range(count - warmup, count)]
        rows = [(row, ABSENT32) for row in range(begin, begin + first)]
        due: dict[int, list[tuple[int, int, int]]] = {}  # place in the sequence -> offset, row, microbatch
        for place, (direction, m) in enumerate([*sequence, _REST]):
            key = (direction, old[m % len(old)]) if place < len(sequence) else _REST
            number = key[1] + m // len(old) * (old[-1] + 1) if key != _REST else ABSENT32
            for passes, offset, row in waits.get(key, []):
                there = min(place + passes, len(sequence))
                due.setdefault(there, []).append((offset if there == place + passes else 0, row, number))
            own = [(row, number) for row in parts.get(key, [])]
            for offset, row, sent in sorted(due.get(place, []), reverse=True):  # from behind: offsets stay right
                own.insert(offset, (row, sent))
            rows += own
        return rows


def _waits_for_sends(columns: RankColumns, begin: int, end: int) -> npt.NDArray[np.bool_]:
    """Which rows of a step wait for a message that the rank sent in the same step."""
    kind, awaits = columns["kind"][begin:end], columns["awaits"][begin:end] - begin
    inside: npt.NDArray[np.bool_] = (kind == UnitKind.WAIT) & (awaits >= 0) & (awaits < len(kind))
    inside[inside] = kind[awaits[inside]] == UnitKind.SEND
    return inside


def _deferred(
    awaits: Int64Array, late: npt.NDArray[np.intp], keys: list[tuple[int, int]],
    parts: dict[tuple[int, int], list[int]], begin: int,
) -> dict[tuple[int, int], list[tuple[int, int, int]]]:  # fmt: skip
    """For each pass the waits for what it sends: how many passes later, behind how many rows of that pass, which row.

    A program asks for the end of a send when it needs the buffer, often only in its next pass. Were the wait put right
    behind the send, the rank would wait for a transfer that its computing hid.
    """
    place = {key: index for index, key in enumerate(parts)}
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for row in late.tolist():
        sender, where = keys[int(awaits[row])], keys[row]
        offset = bisect.bisect_left(parts[where], begin + row)
        passes = place[where] - place[sender]
        found.setdefault(sender, []).append((max(passes, 0), offset if passes >= 0 else len(parts[where]), begin + row))
    return found


def _owners(rank: int, columns: RankColumns, begin: int, named: npt.NDArray[np.intp]) -> Int64Array:
    """For each row of a step up to its last that names a microbatch, the one whose microbatch is its own.

    `named` are those, counted from `begin`. What a schedule computes between its passes names none: it goes with what
    follows, a wait with the receive or collective it waits for (of sends: ``_deferred``). Raises UsageError for
    communication between them that names none: nobody can say whether each microbatch has it or the step.
    """
    num = int(named[-1]) + 1
    owner = named[np.searchsorted(named, np.arange(num))]
    rows = slice(begin, begin + num)
    kind, awaits = columns["kind"][rows], columns["awaits"][rows] - begin
    names_none = columns["microbatch"][rows] == ABSENT32
    talks = np.flatnonzero(names_none & (kind != UnitKind.COMPUTE) & (kind != UnitKind.WAIT))
    talks = talks[talks >= named[0]]
    if len(talks):
        unit = begin + int(talks[0])
        raise UsageError(f"rank {rank} communicates between its microbatches without naming one (unit {unit})",
                         hint="record the job with an adapter that names microbatches and stages")  # fmt: skip
    waits = np.flatnonzero(names_none & (kind == UnitKind.WAIT) & (awaits >= 0) & (awaits < num))
    waits = waits[~names_none[awaits[waits]] & (kind[awaits[waits]] != UnitKind.SEND)]
    owner[waits] = awaits[waits]
    return owner


def _renumbered(columns: RankColumns) -> Int64Array:
    """Sequence numbers counted anew from 0 in each lane. Communication that had none meets nobody, and gets none."""
    kind = columns["kind"]
    rows = np.flatnonzero((kind >= UnitKind.COLLECTIVE) & (kind <= UnitKind.RECV) & (columns["seq"] != ABSENT))
    is_message = kind[rows] != UnitKind.COLLECTIVE
    peer, tag = (np.where(is_message, columns[name][rows], 0) for name in ("peer", "tag"))
    keys = np.stack([kind[rows].astype(np.int64), columns["group_id"][rows], peer, tag])
    order = np.lexsort((rows, *keys))
    changed = np.ones(len(rows), dtype=np.bool_)
    changed[1:] = (keys[:, order][:, 1:] != keys[:, order][:, :-1]).any(axis=0)
    starts = np.maximum.accumulate(np.where(changed, np.arange(len(rows)), 0))
    seq = np.full(len(kind), ABSENT, dtype=np.int64)
    seq[rows[order]] = np.arange(len(rows)) - starts
    return seq
