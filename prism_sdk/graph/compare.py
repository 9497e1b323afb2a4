"""Compares the traces of a job with those of another run of it: times, units, order, losses, memory, rank by rank.

It runs nothing and judges nothing: it puts numbers beside the real runs' own spread. What a trace does not hold is
named in ``missing``; no number is made from nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.kernels import KernelComparison, compare_kernels
from prism_sdk.graph.runs import Run, read_run
from prism_sdk.wording import ranks_text
from prismtrace import ABSENT, ABSENT32, DType, GraphKind, Op, Phase, TraceReader, UnitKind

__all__ = ["Comparison", "LossComparison", "MemoryComparison", "OrderComparison", "RankComparison",
           "StepTimeComparison", "UnitComparison", "compare_traces"]  # fmt: skip

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StepTimeComparison:
    """Step times over the steps that all runs measured, without the first; spreads are over repeated runs."""

    num_steps: int
    real_mean_ns: float
    real_median_ns: float
    real_std_ns: float
    other_mean_ns: float
    other_median_ns: float
    other_std_ns: float
    error_percent: float
    median_error_percent: float
    #: Largest less smallest of the repeats' means, in percent of their mean (None with one run).
    real_spread_percent: float | None
    other_spread_percent: float | None
    #: Whether the other mean lies between the smallest and the largest real mean (None with one real run).
    is_within_real_range: bool | None


@dataclass(frozen=True, kw_only=True)
class UnitComparison:
    """The lengths (end - start) of the units of one kind, operation and phase. None: no timed unit of it."""

    kind: str
    op: str
    phase: str
    num_real: int
    num_other: int
    real_median_ns: float | None
    other_median_ns: float | None
    error_percent: float | None


@dataclass(frozen=True, kw_only=True)
class OrderComparison:
    """Whether a rank communicates in the same order; else the first difference, ``None`` for a side that ended."""

    is_equal: bool
    num_compared: int
    rank: int
    first_difference_index: int | None = None
    real: str | None = None
    other: str | None = None


@dataclass(frozen=True, kw_only=True)
class LossComparison:
    """Losses of the common steps, the first other run against the first real run."""

    steps: tuple[int, ...]
    real: tuple[float, ...]
    other: tuple[float, ...]
    max_abs_difference: float
    max_rel_difference: float
    is_bit_equal: bool
    #: The largest difference between the real runs themselves (None with one run).
    real_max_abs_difference: float | None


@dataclass(frozen=True, kw_only=True)
class MemoryComparison:
    """The highest memory peak of the common steps, of each run."""

    real_peak_bytes: tuple[int, ...]
    other_peak_bytes: tuple[int, ...]
    difference_bytes: int
    error_percent: float | None


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """One rank. None: the traces do not hold what it takes, see ``Comparison.missing``."""

    rank: int
    step_time: StepTimeComparison | None
    units: tuple[UnitComparison, ...]
    order: OrderComparison | None
    loss: LossComparison | None
    memory: MemoryComparison | None
    kernels: tuple[KernelComparison, ...] = ()
    """Empty where not all traces have recorded kernels (`--kernels`) of a common step."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Other runs of a job beside the real ones; ranks are those of the other runs."""

    real: tuple[str, ...]
    other: tuple[str, ...]
    ranks: tuple[RankComparison, ...]
    mean_abs_error_percent: float | None
    worst_abs_error_percent: float | None
    missing: tuple[str, ...]
    #: Ranks that some traces have and others lack (an emulation has its own ranks alone: these do not count).
    missing_ranks: tuple[int, ...] = ()
    #: Traces that end before their end.
    unfinished: tuple[str, ...] = ()

    @property
    def is_order_equal(self) -> bool | None:
        """Whether all compared ranks communicate in the same order (None: nothing to compare)."""
        known = [rank.order.is_equal for rank in self.ranks if rank.order is not None]
        return all(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON knows it."""
        from prism_sdk.graph.report import plain_values

        return {**plain_values(asdict(self)), "is_order_equal": self.is_order_equal}

    def format_table(self) -> str:
        """The comparison as plain text."""
        from prism_sdk.graph.report import format_comparison

        return format_comparison(self)


def compare_traces(
    real_paths: Sequence[str | os.PathLike[str]], other_paths: Sequence[str | os.PathLike[str]]
) -> Comparison:
    """Compare other runs (emulated, say) with real runs of the same job; several files on a side are repeats.

    Raises GraphError where a side is empty or the runs have no rank in common.
    """
    if not real_paths or not other_paths:
        raise GraphError("a comparison needs at least one real and one other trace")
    real_names, other_names = ([os.fspath(p) for p in paths] for paths in (real_paths, other_paths))
    missing, unfinished = list[str](), list[str]()
    emulated, lost, with_ranks = set[str](), set[int](), {}
    with ExitStack() as files:
        readers = {
            name: files.enter_context(TraceReader(name, allow_unfinished=True))
            for name in dict.fromkeys([*real_names, *other_names])
        }
        having = {name: set(reader.ranks) for name, reader in readers.items()}
        wanted = sorted(set[int]().union(*(having[name] for name in other_names)))
        # of a job of thousands of ranks an emulation has one: the others need not be read
        needed = set(wanted).intersection(set[int]().union(*(having[name] for name in real_names)))
        for name, reader in readers.items():
            with_ranks[name] = {rank: read_run(reader, name, rank) for rank in reader.ranks if rank in needed}
            if reader.unfinished:
                unfinished.append(name)
                missing.append(f"{name} is unfinished: what was written before its end is compared")
            elif reader.graph_kind is GraphKind.EMULATED:
                emulated.add(name)
    everyone = sorted(set[int]().union(*having.values()))
    for name, present in having.items():
        absent = [rank for rank in everyone if rank not in present]
        lost.update(() if name in emulated else absent)
        if absent:
            missing.append(f"rank{'s' * (len(absent) > 1)} {ranks_text(absent)}: not in {name}")
    ranks = []
    for rank in wanted:
        sides = [[with_ranks[n][rank] for n in names if rank in with_ranks[n]] for names in (real_names, other_names)]
        if sides[0]:
            ranks.append(_compare_rank(rank, sides[0], sides[1], missing))
    if not ranks:
        raise GraphError(f"the real traces have none of the ranks {wanted} of the other ones",
                         hint="compare traces of the same job")  # fmt: skip
    errors = [abs(r.step_time.error_percent) for r in ranks if r.step_time is not None]
    return Comparison(
        real=tuple(real_names), other=tuple(other_names), ranks=tuple(ranks), missing=tuple(dict.fromkeys(missing)),
        mean_abs_error_percent=float(np.mean(errors)) if errors else None,
        worst_abs_error_percent=max(errors) if errors else None,
        missing_ranks=tuple(sorted(lost)), unfinished=tuple(unfinished),
    )  # fmt: skip


def _compare_rank(rank: int, real: list[Run], other: list[Run], missing: list[str]) -> RankComparison:
    runs = [*real, *other]

    def lacks(what: str, having: list[bool]) -> bool:
        without = [run.path for run, has in zip(runs, having, strict=True) if not has]
        missing.extend(f"rank {rank}: no {what} in {path}" for path in without)
        return not all(having)

    def usable(what: str, known: npt.NDArray[np.bool_]) -> bool:
        if lacks(what, [bool(row.any()) for row in known]):
            return False
        num = int(known.all(axis=0).sum())
        if num < known.shape[1]:
            missing.append(f"rank {rank}: only {num} of {known.shape[1]} common steps have a {what} in all traces")
        return num > 0

    common = np.array(sorted(set.intersection(*(set(run.steps.tolist()) for run in runs))), dtype=np.int64)
    step_time = loss = memory = order = None
    units: tuple[UnitComparison, ...] = ()
    if not lacks("steps", [len(run.steps) > 0 for run in runs]):
        if not len(common):
            missing.append(f"rank {rank}: no step that all traces have")
        else:
            step_time = _compare_step_times(rank, real, other, common, missing)
            known = np.stack([~np.isnan(_at(run.steps, run.loss, common)) for run in runs])
            if usable("loss", known):
                loss = _compare_losses(real, other, common[known.all(axis=0)])
            known = np.stack([_at(run.steps, run.memory_bytes, common) != ABSENT for run in runs])
            if usable("memory peak", known):
                memory = _compare_memory(real, other, common[known.all(axis=0)])
    if not lacks("units", [run.graph is not None for run in runs]):
        graphs = [[run.graph for run in side if run.graph is not None] for side in (real, other)]
        units = _compare_units(graphs[0], graphs[1])
        for u in units:
            sides = [s for s, m in (("real", u.real_median_ns), ("other", u.other_median_ns)) if m is None]
            if sides:
                name = f"{u.kind} {u.op}".rstrip()
                missing.append(f"rank {rank}: no timed {name} units of phase {u.phase} in {' and '.join(sides)}")
        compared = [_compare_order(rank, graphs[0][0], graph) for graph in graphs[1]]
        order = next((result for result in compared if not result.is_equal), compared[0])
    kernels: tuple[KernelComparison, ...] = ()
    if any(run.kernels for run in runs) and not lacks("recorded kernels", [bool(run.kernels) for run in runs]):
        kernels = compare_kernels([run.kernels for run in real], [run.kernels for run in other])
        if not kernels:
            missing.append(f"rank {rank}: no step whose kernels all traces recorded")
    return RankComparison(
        rank=rank, step_time=step_time, units=units, order=order, loss=loss, memory=memory, kernels=kernels
    )


def _at(steps: Int64Array, values: npt.NDArray[Any], wanted: Int64Array) -> npt.NDArray[Any]:
    """The values of some steps; of a step that was written twice the later one."""
    picked: npt.NDArray[Any] = values[np.searchsorted(steps, wanted, side="right") - 1]
    return picked


def _percent(value: float, reference: float) -> float | None:
    return 100.0 * (value - reference) / reference if reference else None


def _compare_step_times(
    rank: int, real: list[Run], other: list[Run], common: Int64Array, missing: list[str]
) -> StepTimeComparison | None:
    # the first step of any run has warm-up in it
    firsts = {int(run.steps[0]) for run in [*real, *other]}
    steps = np.array([s for s in common.tolist() if s not in firsts], dtype=np.int64)
    sides = [[_at(run.steps, run.time_ns, steps) for run in side] for side in (real, other)]
    timed = np.logical_and.reduce([times != ABSENT for side in sides for times in side])
    if not timed.any():
        missing.append(f"rank {rank}: no step after the first that all traces timed")
        return None
    means = [np.array([times[timed].mean() for times in side]) for side in sides]
    pooled = [np.concatenate([times[timed] for times in side]).astype(np.float64) for side in sides]
    spreads = [100.0 * float(np.ptp(m) / m.mean()) if len(m) > 1 and m.mean() else None for m in means]
    mean, median = [float(m.mean()) for m in means], [float(np.median(p)) for p in pooled]
    error, median_error = _percent(mean[1], mean[0]), _percent(median[1], median[0])
    if error is None or median_error is None:
        missing.append(f"rank {rank}: the real step time is 0 ns, an error in percent has no meaning")
        return None
    return StepTimeComparison(
        num_steps=int(timed.sum()), real_mean_ns=mean[0], real_median_ns=median[0], real_std_ns=float(pooled[0].std()),
        other_mean_ns=mean[1], other_median_ns=median[1], other_std_ns=float(pooled[1].std()), error_percent=error,
        median_error_percent=median_error, real_spread_percent=spreads[0], other_spread_percent=spreads[1],
        is_within_real_range=bool(means[0].min() <= mean[1] <= means[0].max()) if len(real) > 1 else None,
    )  # fmt: skip


def _compare_losses(real: list[Run], other: list[Run], common: Int64Array) -> LossComparison:
    all_real = np.stack([_at(run.steps, run.loss, common) for run in real])
    theirs = _at(other[0].steps, other[0].loss, common)
    ours = all_real[0]
    difference = np.abs(np.subtract(theirs, ours, where=theirs != ours, out=np.zeros(len(ours))))
    scale = np.maximum(np.abs(ours), np.finfo(np.float64).tiny)
    return LossComparison(
        steps=tuple(common.tolist()), real=tuple(ours.tolist()), other=tuple(theirs.tolist()),
        max_abs_difference=float(difference.max()), max_rel_difference=float((difference / scale).max()),
        is_bit_equal=ours.tobytes() == theirs.tobytes(),
        real_max_abs_difference=float(np.ptp(all_real, axis=0).max()) if len(real) > 1 else None,
    )  # fmt: skip


def _compare_memory(real: list[Run], other: list[Run], common: Int64Array) -> MemoryComparison:
    peaks = [[int(_at(run.steps, run.memory_bytes, common).max()) for run in side] for side in (real, other)]
    return MemoryComparison(
        real_peak_bytes=tuple(peaks[0]), other_peak_bytes=tuple(peaks[1]),
        difference_bytes=max(peaks[1]) - max(peaks[0]), error_percent=_percent(max(peaks[1]), max(peaks[0])),
    )  # fmt: skip


def _compare_units(real: list[JobGraph], other: list[JobGraph]) -> tuple[UnitComparison, ...]:
    sides: list[dict[tuple[int, int, int], list[Int64Array]]] = [{}, {}]
    counts: list[dict[tuple[int, int, int], int]] = [{}, {}]
    for side, graphs in enumerate((real, other)):
        for graph in graphs:
            c = graph.columns
            # the first step has warm-up in it
            first = c["step"].min() if len(np.unique(c["step"])) > 1 else c["step"].min() - 1
            rows = np.flatnonzero(c["step"] > first)
            keys = np.stack([c[name][rows].astype(np.int64) for name in ("kind", "op", "phase")], axis=1)
            unique, index = np.unique(keys, axis=0, return_inverse=True)
            timed = (c["start_ns"][rows] != ABSENT) & (c["end_ns"][rows] != ABSENT)
            length = c["end_ns"][rows] - c["start_ns"][rows]
            for at, (kind, op, phase) in enumerate(unique.tolist()):
                chosen = index.reshape(-1) == at
                counts[side][kind, op, phase] = counts[side].get((kind, op, phase), 0) + int(chosen.sum())
                sides[side].setdefault((kind, op, phase), []).append(length[chosen & timed])
    result = []
    for key in sorted(counts[0].keys() | counts[1].keys()):
        pooled = [np.concatenate(side[key]) if key in side else np.zeros(0) for side in sides]
        medians = [float(np.median(p)) if len(p) else None for p in pooled]
        error = None if medians[0] is None or medians[1] is None else _percent(medians[1], medians[0])
        result.append(
            UnitComparison(
                kind=_name(UnitKind, key[0]), op=_name(Op, key[1]) if key[1] else "", phase=_name(Phase, key[2]),
                num_real=counts[0].get(key, 0), num_other=counts[1].get(key, 0), real_median_ns=medians[0],
                other_median_ns=medians[1], error_percent=error,
            )
        )  # fmt: skip
    return tuple(result)


def _name(enum: Any, value: int) -> str:
    try:
        return str(enum(value).name.lower()) if value else "unspecified"
    except ValueError:
        return f"unknown {value}"


def _compare_order(rank: int, real: JobGraph, other: JobGraph) -> OrderComparison:
    """Compare the communication of the steps that both have; values that a side leaves absent are no difference."""
    common = np.intersect1d(real.columns["step"], other.columns["step"])
    rows = [np.flatnonzero((g.event_of_row >= 0) & np.isin(g.columns["step"], common)) for g in (real, other)]
    num = min(len(rows[0]), len(rows[1]))
    differs = np.zeros(num, dtype=np.bool_)
    absent = {"kind": None, "op": None, "dtype": 0, "peer": ABSENT32, "num_elements_in": ABSENT,
              "num_elements_out": ABSENT}  # fmt: skip
    for name, nothing in absent.items():
        a, b = (g.columns[name][r[:num]] for g, r in zip((real, other), rows, strict=True))
        differs |= (a != b) & ((a != nothing) & (b != nothing) if nothing is not None else True)
    codes: dict[tuple[str, tuple[int, ...]], int] = {}
    groups = []
    for g, r in zip((real, other), rows, strict=True):
        ids, inverse = np.unique(g.columns["group_id"][r[:num]], return_inverse=True)
        keys = [(g.groups[int(i)].name, tuple(g.groups[int(i)].ranks)) for i in ids]
        groups.append(np.array([codes.setdefault(k, len(codes)) for k in keys], dtype=np.int64)[inverse.reshape(-1)])
    differs |= groups[0] != groups[1]
    found = np.flatnonzero(differs)
    index = int(found[0]) if len(found) else num
    if index == num and len(rows[0]) == len(rows[1]):
        return OrderComparison(is_equal=True, num_compared=num, rank=rank)
    texts = [_describe(g, int(r[index])) if index < len(r) else None for g, r in zip((real, other), rows, strict=True)]
    return OrderComparison(
        is_equal=False, num_compared=num, rank=rank, first_difference_index=index, real=texts[0], other=texts[1]
    )


def _describe(graph: JobGraph, row: int) -> str:
    numbers = [int(graph.columns[name][row]) for name in ("num_elements_in", "num_elements_out")]
    counts = ["?" if number == ABSENT else str(number) for number in numbers]
    dtype = _name(DType, int(graph.columns["dtype"][row]))
    return f"{graph.describe(row)}, {dtype}, {counts[0]} elements in, {counts[1]} out"
