"""Selects units by what they are: ``rank=0,4-7&phase=backward``.

It changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.errors import UsageError
from prism_sdk.simulate.job import SimJob
from prismtrace import Op, Phase, UnitKind

__all__ = ["Selection"]

BoolArray = npt.NDArray[np.bool_]
_KINDS: Mapping[str, tuple[int, ...]] = {
    "compute": (UnitKind.COMPUTE,), "wait": (UnitKind.WAIT,), "collective": (UnitKind.COLLECTIVE,),
    "message": (UnitKind.SEND, UnitKind.RECV),
    "communication": (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV),
}  # fmt: skip
_KEYS = ("rank", "stage", "kind", "phase", "op", "group", "step", "label")


def _numbers(text: str, whole: str) -> tuple[tuple[int, int], ...]:
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise UsageError(f"{part!r} in {whole!r} is not a number or a range", hint="write 0,4-7") from None
        if high < low:
            raise UsageError(f"the range {part!r} in {whole!r} runs backwards")
        ranges.append((low, high))
    return tuple(ranges)


@dataclass(frozen=True)
class Selection:
    """Which units: all conditions must hold; a condition that is not given always holds."""

    text: str
    ranks: tuple[tuple[int, int], ...] | None = None
    stages: tuple[tuple[int, int], ...] | None = None
    steps: tuple[tuple[int, int], ...] | None = None
    kinds: frozenset[int] | None = None
    phases: frozenset[int] | None = None
    ops: frozenset[int] | None = None
    groups: frozenset[str] | None = None
    labels: frozenset[str] | None = None
    inverted: bool = field(default=False)

    @classmethod
    def parse(cls, text: str) -> Selection:
        """``KEY=VALUE&KEY=VALUE``; ``all`` selects everything. Raises UsageError that names the part that is wrong."""
        found: dict[str, Any] = {}
        for part in text.split("&") if text != "all" else ():
            key, equals, value = part.partition("=")
            if not equals or key not in _KEYS or not value:
                raise UsageError(
                    f"{part!r} in {text!r} is no condition", hint=f"write KEY=VALUE; keys are {', '.join(_KEYS)}"
                )
            if key in ("rank", "stage", "step"):
                found[f"{key}s"] = _numbers(value, text)
                continue
            words = [word.strip().lower() for word in value.split(",")]
            if key == "kind":
                _check(words, _KINDS, text)
                found["kinds"] = frozenset(kind for word in words for kind in _KINDS[word])
            elif key == "phase":
                names = {phase.name.lower(): int(phase) for phase in Phase}
                _check(words, names, text)
                found["phases"] = frozenset(names[word] for word in words)
            elif key == "op":
                names = {op.name.lower(): int(op) for op in Op}
                _check(words, names, text)
                found["ops"] = frozenset(names[word] for word in words)
            else:
                found[f"{key}s"] = frozenset(value.split(","))
        return cls(text, **found)

    @property
    def is_of_ranks_only(self) -> bool:
        """Whether it says nothing but which ranks."""
        return all(getattr(self, name) is None for name in ("steps", "kinds", "phases", "ops", "groups", "labels"))

    def rank_key(self, job: SimJob, position: int) -> bool:
        """Whether the rank is among those meant."""
        rank, stage = int(job.ranks[position]), int(job.stage[position])
        return _within(self.ranks, rank) and _within(self.stages, stage)

    def mask(self, job: SimJob, position: int) -> BoolArray:
        """Which rows of a rank position are meant."""
        p = job.programs
        program = int(job.program[position])
        rows = p.rows(program)
        size = rows.stop - rows.start
        if not self.rank_key(job, position):
            return np.zeros(size, dtype=np.bool_)
        mask = np.ones(size, dtype=np.bool_)
        if self.kinds is not None:
            mask &= np.isin(p.kind[rows], list(self.kinds))
        if self.phases is not None:
            mask &= np.isin(p.phase[rows], list(self.phases))
        if self.ops is not None:
            op = np.where(p.kind[rows] == UnitKind.SEND, Op.SEND, np.where(p.kind[rows] == UnitKind.RECV, Op.RECV,
                          p.op[rows]))  # fmt: skip
            mask &= np.isin(op, list(self.ops))
        if self.labels is not None:
            codes = [code for code, name in enumerate(p.labels) if name in self.labels]
            mask &= np.isin(p.label[rows], codes)
        if self.steps is not None:
            bounds = p.bounds_of(program)
            good = np.array([_within(self.steps, int(step)) for step in p.bound_step[bounds]], dtype=np.bool_)
            mask &= np.repeat(good, np.diff(p.bounds[bounds], prepend=0))
        if self.groups is not None:
            lanes = job.lanes.lane[job.lanes.offsets[position] : job.lanes.offsets[position + 1]]
            names = [job.groups[int(g)].name if int(g) in job.groups else "" for g in job.lanes.group_id[lanes]]
            chosen = np.array([name in self.groups for name in names] + [False], dtype=np.bool_)
            mask &= chosen[p.lane_of[rows]]
        return mask


def _check(words: list[str], known: Mapping[str, object], text: str) -> None:
    for word in words:
        if word not in known:
            raise UsageError(f"{word!r} in {text!r} is unknown; there are {', '.join(known)}")


def _within(ranges: tuple[tuple[int, int], ...] | None, value: int) -> bool:
    return ranges is None or any(low <= value <= high for low, high in ranges)
