"""Brings the clocks of ranks together, by collectives that all their members finish together.

Does not join files; `merge` does, and calls this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.clock_fit import Observations, components, fit
from prismtrace.errors import TraceResultError, TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, Op, UnitKind
from prismtrace.reader import TraceReader
from prismtrace.rewriting import TABLES, TIME_COLUMNS, add_rows, copy_payload, iter_tables, new_trace
from prismtrace.source import TraceInput

SYNCHRONISING: Final = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BARRIER)
"""Collectives that no member can finish before every member has started, and that members finish together."""

_COLUMNS: Final = ("kind", "op", "group_id", "seq", "start_ns", "end_ns", "peer", "tag")
_KEY: Final = np.dtype([("group", "<u8"), ("seq", "<i8")])
_LANE: Final = np.dtype([("group", "<u8"), ("src", "<i4"), ("dst", "<i4"), ("tag", "<i8"), ("seq", "<i8")])


@dataclass(frozen=True)
class ClockCorrection:
    """What to add to the times of one clock: `offset_ns`, and `drift` nanoseconds for each one since `since_ns`."""

    clock: str
    ranks: tuple[int, ...]
    offset_ns: int
    drift: float
    since_ns: int

    def apply(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Corrected times; absent ones stay absent."""
        known = times != ABSENT
        moved = times + np.int64(self.offset_ns)
        if self.drift:
            moved = moved + np.rint((times - np.int64(self.since_ns)) * self.drift).astype(np.int64)
        return np.where(known, moved, ABSENT)


@dataclass(frozen=True)
class Alignment:
    """Corrections by rank, and how well they fit.

    Residuals are distances of the ends of one collective from their mean, after correction. `num_early_receives`
    counts messages received before they were sent, `num_apart` collectives of which one member ended before another
    began, both by more than `tolerance_ns`; `worst_early_ns` and `worst_apart_ns` are the largest found, 0 for none.
    """

    reference: str
    corrections: tuple[ClockCorrection, ...]
    num_collectives: int
    num_outliers: int
    residual_median_ns: int
    residual_max_ns: int
    residual_by_rank: Mapping[int, tuple[int, int]]
    before_median_ns: int
    num_messages: int
    num_early_receives: int
    worst_early_ns: int
    num_apart: int
    worst_apart_ns: int
    tolerance_ns: int
    with_drift: bool

    @property
    def is_causal(self) -> bool:
        """Whether no receive is before its send and no collective is torn apart, within the tolerance."""
        return not self.num_early_receives and not self.num_apart

    def of_rank(self, rank: int) -> ClockCorrection:
        """The correction of a rank's clock."""
        return next(item for item in self.corrections if rank in item.ranks)

    def metadata(self) -> dict[str, str]:
        """The `clock.*` entries of an aligned trace (spec/registry.md)."""
        offsets = ",".join(f"{item.clock}={item.offset_ns}" for item in self.corrections)
        pairs = {
            "clock.method": "ends of collectives, least squares" + (", with drift" if self.with_drift else ""),
            "clock.reference": self.reference,
            "clock.offsets_ns": offsets,
            "clock.num_collectives": str(self.num_collectives),
            "clock.residual_median_ns": str(self.residual_median_ns),
            "clock.residual_max_ns": str(self.residual_max_ns),
        }
        if self.with_drift:
            pairs["clock.drift_ppb"] = ",".join(f"{item.clock}={item.drift * 1e9:.3f}" for item in self.corrections)
        return pairs


def estimate_clocks(
    sources: Sequence[TraceInput],
    *,
    clocks: str = "file",
    drift: bool = False,
    allow_unfinished: bool = False,
) -> Alignment:
    """The corrections that bring the ends of collectives together best.

    Args:
        sources: traces of one job; one is open at a time. A rank is taken from the last that has it.
        clocks: "file": the ranks of one source share a clock, named by the place of the source ("0", "1", ...);
            "rank": every rank has its own, named by the rank.
        drift: also lets clocks run at different speeds; wants collectives at both ends of the trace.
        allow_unfinished: also reads files without an index.

    Raises:
        TraceUsageError: nothing to align: there is only one clock.
        TraceResultError: some clocks share no collective with the others (named).
        TraceFormatError: a source is broken.
    """
    if clocks not in ("file", "rank"):
        raise TraceUsageError(f"clocks must be 'file' or 'rank', not {clocks!r}")
    tables: dict[int, _Times] = {}
    owner: dict[int, int] = {}
    for number, source in enumerate(sources):
        with TraceReader(source, allow_unfinished=allow_unfinished) as reader:
            for rank in reader.ranks:
                tables[rank], owner[rank] = _Times(reader, rank), number
    ranks = sorted(tables)
    names = {rank: str(owner[rank]) if clocks == "file" else str(rank) for rank in ranks}
    distinct = list(dict.fromkeys(names.values()))
    if len(distinct) < 2:
        raise TraceUsageError(
            "there is only one clock, so there is nothing to align; clocks='rank' gives each rank one"
        )
    number_of = {name: number for number, name in enumerate(distinct)}
    clock = np.array([number_of[names[rank]] for rank in ranks], np.int64)
    seen = _observations([tables[rank] for rank in ranks], clock, len(distinct))
    _check_connected(seen, distinct, [[rank for rank in ranks if names[rank] == name] for name in distinct])
    result = fit(seen, drift=drift)
    corrections = tuple(
        ClockCorrection(
            name,
            tuple(rank for rank in ranks if names[rank] == name),
            int(result.offset_ns[number]),
            float(result.drift[number]),
            int(seen.base_ns[number]),
        )
        for name, number in number_of.items()
    )
    residual = np.abs(result.residual_ns)
    by_rank = {}
    for number, rank in enumerate(ranks):
        mine = residual[seen.member == number]
        if len(mine):
            by_rank[rank] = (int(np.median(mine)), int(mine.max()))
    tolerance = int(max(1000, 5 * np.median(residual)))
    early, apart, num_messages = _causality(ranks, tables, {c: item for item in corrections for c in item.ranks})
    return Alignment(
        distinct[0],
        corrections,
        seen.num_events,
        result.num_outliers,
        int(np.median(residual)),
        int(residual.max()),
        MappingProxyType(by_rank),
        int(np.median(np.abs(result.before_ns))),
        num_messages,
        int(np.count_nonzero(early > tolerance)),
        int(max(0, early.max(initial=0))),
        int(np.count_nonzero(apart > tolerance)),
        int(max(0, apart.max(initial=0))),
        tolerance,
        drift,
    )


def apply_clocks(source: TraceInput, output: str | os.PathLike[str], alignment: Alignment) -> None:
    """Writes a copy of a trace with all points in time corrected, and the `clock.*` metadata; durations stay."""
    of_rank = {rank: item for item in alignment.corrections for rank in item.ranks}
    with TraceReader(source) as reader:
        pairs = {**reader.metadata, **alignment.metadata()}
        with new_trace(output, like=reader, metadata=pairs, overwrite=True) as writer:
            for _, group in sorted(reader.groups.items()):
                writer.add_group(group)
            for rank in reader.ranks:
                for kind in TABLES:
                    for table in iter_tables(reader, kind, rank):
                        columns = table.columns()
                        for name in TIME_COLUMNS & columns.keys():
                            columns[name] = of_rank[rank].apply(np.asarray(columns[name]))
                        add_rows(writer, kind, rank, columns)
            for digest in reader.payload_digests:
                copy_payload(reader, writer, digest)


class _Times:
    """The communication of one rank: synchronising collectives, sends and receives."""

    def __init__(self, reader: TraceReader, rank: int) -> None:
        units = reader.units(rank, columns=_COLUMNS)
        timed = (units.start_ns != ABSENT) & (units.end_ns != ABSENT) & (units.seq != ABSENT)
        rows = np.flatnonzero(timed & (units.kind == UnitKind.COLLECTIVE) & np.isin(units.op, SYNCHRONISING))
        self.key = np.zeros(len(rows), _KEY)
        self.key["group"], self.key["seq"] = units.group_id[rows], units.seq[rows]
        self.start, self.end = units.start_ns[rows], units.end_ns[rows]
        self.lanes: dict[bool, tuple[NDArray[Any], NDArray[np.int64]]] = {}
        known = (units.seq != ABSENT) & (units.peer != ABSENT32)
        for is_send, kind, times in ((True, UnitKind.SEND, units.start_ns), (False, UnitKind.RECV, units.end_ns)):
            rows = np.flatnonzero(known & (units.kind == kind) & (times != ABSENT))
            lane = np.zeros(len(rows), _LANE)
            lane["group"], lane["tag"], lane["seq"] = units.group_id[rows], units.tag[rows], units.seq[rows]
            lane["src"], lane["dst"] = (rank, units.peer[rows]) if is_send else (units.peer[rows], rank)
            self.lanes[is_send] = lane, times[rows]


def _observations(tables: list[_Times], clock: NDArray[np.int64], num_clocks: int) -> Observations:
    """Ends of collectives that at least two clocks saw."""
    keys = np.concatenate([table.key for table in tables])
    ends = np.concatenate([table.end for table in tables])
    member = np.repeat(np.arange(len(tables)), [len(table.key) for table in tables])
    _, event = np.unique(keys, return_inverse=True)
    clocks = clock[member]
    num_events = int(event.max(initial=-1)) + 1
    low, high = np.full(num_events, num_clocks, np.int64), np.full(num_events, -1, np.int64)
    np.minimum.at(low, event, clocks)
    np.maximum.at(high, event, clocks)
    shared = (low != high)[event]
    _, event = np.unique(event[shared], return_inverse=True)
    base = np.full(num_clocks, np.iinfo(np.int64).max)
    np.minimum.at(base, clocks[shared], ends[shared])
    base[base == np.iinfo(np.int64).max] = 0
    return Observations(event.astype(np.int64), clocks[shared], member[shared], ends[shared], base)


def _check_connected(seen: Observations, names: list[str], ranks: list[list[int]]) -> None:
    parts = components(seen)
    if len(parts) == 1:
        return
    texts = []
    for part in parts[:4]:
        words = [f"{names[number]} (ranks {_short(ranks[number])})" for number in part[:4]]
        texts.append(", ".join(words) + (f" and {len(part) - 4} more" if len(part) > 4 else ""))
    more = f"; and {len(parts) - 4} more sets" if len(parts) > 4 else ""
    raise TraceResultError(
        f"these clocks share no collective with each other, so they cannot be aligned: {'; '.join(texts)}{more}. "
        "Needed are all_reduce, all_gather, reduce_scatter, all_to_all or barrier with times and seq on both sides"
    )


def _short(ranks: list[int]) -> str:
    return ",".join(map(str, ranks[:4])) + (f" .. {ranks[-1]}" if len(ranks) > 4 else "")


def _causality(
    ranks: list[int], tables: Mapping[int, _Times], of_rank: Mapping[int, ClockCorrection]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """By how much receives are before their sends, and members of one collective apart, after correction."""
    corrected = {
        rank: (of_rank[rank].apply(tables[rank].start), of_rank[rank].apply(tables[rank].end)) for rank in ranks
    }
    keys = np.concatenate([tables[rank].key for rank in ranks])
    _, event = np.unique(keys, return_inverse=True)
    num_events = int(event.max(initial=-1)) + 1
    last_start, first_end = np.full(num_events, ABSENT), np.full(num_events, np.iinfo(np.int64).max)
    np.maximum.at(last_start, event, np.concatenate([corrected[rank][0] for rank in ranks]))
    np.minimum.at(first_end, event, np.concatenate([corrected[rank][1] for rank in ranks]))
    sides = []
    for is_send in (True, False):
        lanes = np.concatenate([tables[rank].lanes[is_send][0] for rank in ranks])
        times = np.concatenate([of_rank[rank].apply(tables[rank].lanes[is_send][1]) for rank in ranks])
        lanes, first = np.unique(lanes, return_index=True)
        sides.append((lanes, times[first]))
    joined = np.concatenate([sides[0][0], sides[1][0]])
    _, inverse, count = np.unique(joined, return_inverse=True, return_counts=True)
    both = count[inverse] == 2
    sent = sides[0][1][both[: len(sides[0][0])]]
    received = sides[1][1][both[len(sides[0][0]) :]]
    return sent - received, last_start - first_end, len(sent)
