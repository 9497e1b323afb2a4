"""Shows memory over time, and what a rank held at its peak. It predicts nothing.

A trace has high waters, not allocations: ``memory_bytes`` of a unit is the most that was allocated while it ran,
``memory_peak_bytes`` of a step likewise. What is held at the peak is therefore said in microbatches: those whose
forward pass began and whose backward pass has not ended, for each of which a stage keeps the activations.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from prismtrace import ABSENT, ABSENT32, Phase, TraceReader, UnitKind, UnitTable

__all__ = ["RankMemory", "memory_of"]

Int64Array = npt.NDArray[np.int64]

_NAMES = ("kind", "phase", "step", "start_ns", "end_ns", "memory_bytes", "microbatch", "stage", "model_chunk")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank. The timeline is of units where they have it, else of steps."""

    rank: int
    peak_bytes: int
    #: Where the peak is: the unit's row, or None where only steps have memory; and its step.
    peak_unit: int | None
    peak_step: int | None
    peak_phase: str | None
    peak_time_ns: int | None
    #: (microbatch, stage or model chunk) pairs in flight at the peak, as many as there are.
    microbatches_held: tuple[tuple[int, int], ...]
    #: Median growth of the high water from one forward unit to the next one in flight; None without.
    bytes_per_microbatch: float | None
    times_ns: Int64Array = field(repr=False)
    high_water_bytes: Int64Array = field(repr=False)


def memory_of(
    source: str | os.PathLike[str] | TraceReader, *, ranks: Sequence[int] | None = None, steps: range | None = None
) -> tuple[RankMemory, ...]:
    """The memory of each (chosen) rank that has any recorded."""
    if not isinstance(source, TraceReader):
        with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
            return memory_of(reader, ranks=ranks, steps=steps)
    wanted = sorted(set(source.ranks) if ranks is None else set(source.ranks) & set(ranks))
    known: dict[bytes, RankMemory | None] = {}
    found = [_of_rank(source, rank, steps, known) for rank in wanted]
    return tuple(item for item in found if item is not None)


def _of_rank(
    reader: TraceReader, rank: int, steps: range | None, known: dict[bytes, RankMemory | None]
) -> RankMemory | None:  # fmt: skip
    """`known`: what units like these gave, by a digest of their columns: ranks of one role have the same."""
    if not reader.num_units(rank):
        return _of_steps(reader, rank, steps)
    units = reader.units(rank, steps=steps, columns=_NAMES)
    digest = hashlib.blake2b(units.row_index[:1].tobytes(), digest_size=16)
    for name in _NAMES:
        digest.update(units[name].tobytes())
    key = digest.digest()
    if key not in known:
        known[key] = _of_units(units)
    found = known[key]
    return _of_steps(reader, rank, steps) if found is None else replace(found, rank=rank)


def _of_units(units: UnitTable) -> RankMemory | None:
    """The memory that the units of a rank say; None where they say nothing."""
    rows = np.flatnonzero((units.memory_bytes != ABSENT) & (units.end_ns != ABSENT))
    if not len(rows):
        return None
    peak = int(rows[np.argmax(units.memory_bytes[rows])])
    chunk = np.where(units.model_chunk != ABSENT32, units.model_chunk, units.stage)
    held: dict[tuple[int, int], None] = {}
    growth: list[int] = []
    previous: int | None = None
    computes = np.flatnonzero((units.kind == UnitKind.COMPUTE) & (units.microbatch != ABSENT32))
    at_peak: tuple[tuple[int, int], ...] = ()
    phases, microbatches, levels = units.phase.tolist(), units.microbatch.tolist(), units.memory_bytes.tolist()
    for row in computes.tolist():
        if row > peak and not at_peak:
            at_peak = tuple(held)
        key = (microbatches[row], max(int(chunk[row]), 0))
        level = levels[row]
        if phases[row] == Phase.FORWARD:
            if previous is not None and level != ABSENT and key not in held:
                growth.append(level - previous)
            held[key] = None
            previous = level if level != ABSENT else None
        elif phases[row] == Phase.BACKWARD:
            if row == peak:
                at_peak = tuple(held)
            held.pop(key, None)
            previous = None
    if not at_peak:
        at_peak = tuple(held)
    return RankMemory(
        rank=units.rank, peak_bytes=int(units.memory_bytes[peak]), peak_unit=int(units.row_index[peak]),
        peak_step=int(units.step[peak]) if units.step[peak] != ABSENT32 else None,
        peak_phase=_phase(int(units.phase[peak])), peak_time_ns=int(units.end_ns[peak]), microbatches_held=at_peak,
        bytes_per_microbatch=float(np.median(growth)) if growth else None, times_ns=units.end_ns[rows],
        high_water_bytes=units.memory_bytes[rows],
    )  # fmt: skip


def _of_steps(reader: TraceReader, rank: int, steps: range | None) -> RankMemory | None:
    if not reader.num_steps(rank):
        return None
    table = reader.steps(rank)
    kept = np.flatnonzero(table.memory_peak_bytes != ABSENT)
    if steps is not None:
        kept = kept[(table.step[kept] >= steps.start) & (table.step[kept] < steps.stop)]
    if not len(kept):
        return None
    peak = int(kept[np.argmax(table.memory_peak_bytes[kept])])
    return RankMemory(
        rank=rank, peak_bytes=int(table.memory_peak_bytes[peak]), peak_unit=None, peak_step=int(table.step[peak]),
        peak_phase=None, peak_time_ns=None, microbatches_held=(), bytes_per_microbatch=None,
        times_ns=table.end_ns[kept], high_water_bytes=table.memory_peak_bytes[kept],
    )  # fmt: skip


def _phase(value: int) -> str | None:
    return Phase(value).name.lower() if value in Phase._value2member_map_ and value else None
