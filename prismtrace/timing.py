"""Compares how long things took in two traces, by operation, rank and step.

Does not align single units; it compares medians and totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.model import ABSENT, ABSENT32, Op, Phase, UnitKind
from prismtrace.reader import TraceReader

_COLUMNS: Final = ("kind", "op", "phase", "start_ns", "end_ns")


@dataclass(frozen=True)
class TimingChange:
    """Durations of one operation, rank or step (`by`) in both traces; medians are None where a side has none.

    For `by` "op" they are those of units, for "rank" and "step" those of completed steps.
    """

    by: str
    name: str
    num_a: int
    num_b: int
    median_a_ns: int | None
    median_b_ns: int | None
    total_a_ns: int
    total_b_ns: int

    @property
    def change_ns(self) -> int:
        """By how much the total changed."""
        return self.total_b_ns - self.total_a_ns

    @property
    def change_percent(self) -> float | None:
        """By how much the median changed; None where it cannot be said."""
        if not self.median_a_ns or self.median_b_ns is None:
            return None
        return 100.0 * (self.median_b_ns - self.median_a_ns) / self.median_a_ns


Durations = dict[tuple[str, str], list[NDArray[np.int64]]]


def timing_changes(a: TraceReader, b: TraceReader, ranks: Sequence[int], *, max_items: int) -> tuple[TimingChange, ...]:
    """The largest changes of the given ranks, `max_items` of each kind, largest first."""
    sides = [_collect(reader, ranks) for reader in (a, b)]
    changes = []
    for key in {**sides[0], **sides[1]}:
        parts = [np.concatenate(side[key]) if key in side else np.zeros(0, np.int64) for side in sides]
        medians = [int(np.median(part)) if len(part) else None for part in parts]
        totals = [int(part.sum()) for part in parts]
        changes.append(TimingChange(*key, len(parts[0]), len(parts[1]), medians[0], medians[1], *totals))
    changes = [change for change in changes if change.change_ns or change.median_a_ns != change.median_b_ns]
    result: list[TimingChange] = []
    for by in ("op", "rank", "step"):
        mine = sorted((change for change in changes if change.by == by), key=lambda change: -abs(change.change_ns))
        result += mine[:max_items]
    return tuple(result)


def _collect(reader: TraceReader, ranks: Sequence[int]) -> Durations:
    found: Durations = {}
    for rank in ranks:
        for units in reader.iter_units(rank, columns=_COLUMNS):
            timed = (units.start_ns != ABSENT) & (units.end_ns != ABSENT)
            code = units.kind.astype(np.int64) << 16 | units.op.astype(np.int64) << 8 | units.phase
            length = units.end_ns - units.start_ns
            for value in np.unique(code[timed]).tolist():
                found.setdefault(("op", _op_name(value)), []).append(length[timed & (code == value)])
        steps = reader.steps(rank, columns=("step", "start_ns", "end_ns"))
        timed = (steps.start_ns != ABSENT) & (steps.step != ABSENT32)
        if timed.any():
            length = (steps.end_ns - steps.start_ns)[timed]
            found[("rank", str(rank))] = [length]
            for step, duration in zip(steps.step[timed].tolist(), length, strict=True):
                found.setdefault(("step", str(step)), []).append(np.array([duration], np.int64))
    return found


def _op_name(code: int) -> str:
    kind, op, phase = code >> 16, code >> 8 & 255, code & 255
    words = [_name(UnitKind, kind) if not op else _name(Op, op)]
    if kind == UnitKind.COMPUTE and phase:
        words.append(_name(Phase, phase))
    return " ".join(words)


def _name(enum: Any, value: int) -> str:
    return str(enum(value).name.lower()) if value in enum._value2member_map_ else str(value)
