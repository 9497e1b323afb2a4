"""The calibration strategy `slices`: runs as many ranks for real at once as there are slots, all others virtual.

Responsible for the order of slices and passes and for writing the calibrated graph; the arithmetic is in
prism_sdk.graph.calibrate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism_sdk.abc import CalibrationContext, CalibrationPass, CalibrationResult, CalibrationStrategy
from prism_sdk.builtin.transfer_model import TransferModel, modelled_transfers, plausible_transfers
from prism_sdk.graph.calibrate import Calibration, merge_slices, relative_change
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.prediction import Prediction, predict_step_time
from prism_sdk.hookspecs import hookimpl
from prism_sdk.interop.options import at_least
from prismtrace import ABSENT, GraphKind, TraceReader, TraceWriter

_MAX_PASSES = 4
# a pass that changes no step time by more than the half width of the interval is the last; the half width counts
# between these bounds, or a noisy machine would call anything converged
_SMALLEST_NOISE, _LARGEST_NOISE = 0.001, 0.05
# of draws and of resamples for the prediction: fewer for large graphs, to keep its cost bounded
_MOST_TIMELINES, _ROWS_SCHEDULED = 100, 1_000_000


@dataclass(frozen=True)
class Options:
    """What `-O key=value` may set."""

    passes: int = _MAX_PASSES
    warmup_steps: int = 1
    transfers: str = "probe"  # or a trace of the job observed on the real machine

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """Raises UsageError for a value that has no meaning."""
        return cls(
            passes=at_least(options, "passes", default=cls.passes, low=1),
            warmup_steps=at_least(options, "warmup_steps", default=cls.warmup_steps, low=0),
            transfers=options.get("transfers", cls.transfers),
        )


class Slices(CalibrationStrategy):
    """Slice by slice, with means over steps, waiting stripped from transfers, repeated until nothing changes."""

    name = "slices"
    option_names = ("passes", "transfers", "warmup_steps")
    description = "run as many ranks at once as there are slots, the others virtual; repeat until times are stable"

    def calibrate(self, context: CalibrationContext) -> CalibrationResult:
        options = Options.parse(context.options)
        context.progress(0, 1, doing="reading the graph")
        job = _job(context)
        slices = partition(job.ranks, context.num_slots)
        bare = self._with_transfers(context, options, job, slices)
        graph_path = job.path if bare is None else bare
        base = JobGraph.load(graph_path)
        measured: list[JobGraph] = []
        passes: list[CalibrationPass] = []
        prediction: Prediction | None = None
        converged = False
        num_timelines = min(max(_ROWS_SCHEDULED // max(len(base), 1), 8), _MOST_TIMELINES)
        for index in range(max(options.passes, 1)):
            traces = context.run_slices(slices, graph_path=graph_path, label=f"pass {index + 1}")
            measured += [JobGraph.load(trace) for trace in traces]
            context.progress(len(slices), len(slices), doing=f"pass {index + 1}: joining the slices")
            default = plausible_transfers(base, measured)
            before = prediction
            prediction = predict_step_time(
                base, measured, warmup_steps=options.warmup_steps, default_transfer_ns=default,
                num_draws=num_timelines, num_resamples=num_timelines, stands_for=job.stands_for,
            )  # fmt: skip
            change = None
            if before is not None:
                change = relative_change(before.means.timeline, prediction.means.timeline)
            interval = prediction.interval
            predicted, low, high = round(interval.estimate), round(interval.low), round(interval.high)
            passes.append(CalibrationPass(index, None if change is None else 100 * change, predicted, low, high))
            context.report(_progress(passes[-1]))
            noise = min((high - low) / 2 / max(predicted, 1), _LARGEST_NOISE)
            converged = change is not None and change <= max(noise, _SMALLEST_NOISE)
            graph_path = context.work_dir / f"pass{index}.prism"
            write_calibrated(job.path, prediction.calibration, graph_path, {}, with_payloads=False)
            if converged or (len(slices) == 1 and index >= 1):
                break
        assert prediction is not None
        last = passes[-1]
        facts = {
            "calibration.strategy": self.name, "calibration.passes": str(len(passes)),
            "calibration.slices": str(len(slices)), "calibration.converged": str(converged).lower(),
            "calibration.step_ns": str(last.predicted_step_ns),
            "calibration.interval_ns": f"{last.step_low_ns}:{last.step_high_ns}",
            "calibration.change_percent": ",".join(
                "" if p.change_percent is None else f"{p.change_percent:.3f}" for p in passes
            ),
            "calibration.unmeasured_units": str(len(prediction.means.unmeasured_compute)),
            "calibration.transfers": options.transfers if bare is not None else "slices",
        }  # fmt: skip
        context.progress(0, 1, doing="writing the calibrated graph")
        if job.by_roles:
            _write_by_roles(context, prediction.calibration, facts)
        else:
            write_calibrated(context.graph_path, prediction.calibration, context.output, facts, with_payloads=True)
        return CalibrationResult(
            context.output, tuple(passes), last.predicted_step_ns, last.step_low_ns, last.step_high_ns, converged
        )

    def _with_transfers(
        self, context: CalibrationContext, options: Options, job: _Job, slices: Sequence[Sequence[int]]
    ) -> Path | None:
        """A copy of the bare graph whose transfers are modelled; None when every group fits into one slice."""
        graph = JobGraph.load(job.path)
        sets = [frozenset(ranks) for ranks in slices]
        if not job.by_roles and all(any(s.issuperset(group.ranks) for s in sets) for group in graph.groups.values()):
            return None
        if options.transfers == "probe":
            context.progress(0, 1, doing="measuring the transport")
            context.report("measuring this machine's transport, for groups larger than a slice")
            trace = context.run_module("prism_sdk.builtin.transfer_probe", [], num_ranks=2, label="transport")
            model = TransferModel.fit(JobGraph.load(trace))
            transfers = modelled_transfers(graph, model, group_sizes=job.group_sizes)
        else:
            observed = JobGraph.load(options.transfers)
            found = merge_slices(
                graph, [observed], warmup_steps=options.warmup_steps, default_transfer_ns=0, stands_for=job.stands_for
            )
            transfers = np.where(graph.event_of_row >= 0, found.timing.transfer_ns, ABSENT)
        path = context.work_dir / "modelled.prism"
        columns = {rank: {"transfer_ns": transfers[graph.rows(rank)]} for rank in graph.ranks}
        write_times(job.path, columns, path, GraphKind.BARE, {}, with_payloads=False)
        return path


@dataclass(frozen=True)
class _Job:
    """What is calibrated: the ranks that run in slices, and the graph that their times are put into.

    Of a recording by roles that graph is a small one, with one rank of each kind; `stands_for` says whose times the
    ranks have that do not run, and `group_sizes` how large the groups really are.
    """

    path: Path
    ranks: Sequence[int]
    by_roles: bool = False
    stands_for: Mapping[int, int] | None = None
    group_sizes: Mapping[int, int] | None = None


def _job(context: CalibrationContext) -> _Job:
    from prism_sdk.runtime.roles.recorded import small_job

    small = small_job(context.graph_path, context.work_dir / "alike.prism")
    if small is None:
        return _Job(context.graph_path, range(context.world_size))
    context.report(f"recorded by roles: {len(small.ranks)} of {context.world_size} ranks run for real, in slices")
    return _Job(small.path, small.ranks, by_roles=True, stands_for=small.stands_for, group_sizes=small.group_sizes)


def partition(ranks: Sequence[int], num_slots: int) -> list[tuple[int, ...]]:
    """The ranks in slices of at most `num_slots`, neighbours together."""
    return [tuple(ranks[first : first + num_slots]) for first in range(0, len(ranks), num_slots)]


def _write_by_roles(context: CalibrationContext, calibration: Calibration, facts: Mapping[str, str]) -> None:
    """All ranks of a role get what its representative was found to take."""
    from prism_sdk.runtime.roles.recorded import write_times_by_roles

    ends = {rank: calibration.timeline.step_ends_ns(rank) for rank in calibration.graph.ranks}
    write_times_by_roles(
        context.graph_path, context.output, times=calibration.columns, graph_kind=GraphKind.CALIBRATED,
        steps=lambda reader, rank: _steps(reader, rank, ends), metadata=facts,
    )  # fmt: skip


def write_calibrated(
    source: Path, calibration: Calibration, output: Path, metadata: Mapping[str, str], *, with_payloads: bool
) -> None:
    """Write `source` with the calibrated times in place of its own."""
    columns = {rank: calibration.columns(rank) for rank in calibration.graph.ranks}
    steps = {rank: calibration.timeline.step_ends_ns(rank) for rank in calibration.graph.ranks}
    write_times(source, columns, output, GraphKind.CALIBRATED, metadata, with_payloads=with_payloads, steps=steps)


def write_times(
    source: Path, columns: Mapping[int, Mapping[str, np.ndarray]], output: Path, kind: GraphKind,
    metadata: Mapping[str, str], *, with_payloads: bool,
    steps: Mapping[int, tuple[np.ndarray, np.ndarray]] | None = None,
) -> None:  # fmt: skip
    """Write a copy of `source` in which `columns` (by rank) replace its own; whole or not at all."""
    temporary = output.with_name(output.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with TraceReader(source) as reader:
            facts = {**reader.metadata, **metadata}
            with TraceWriter(temporary, graph_kind=kind, world_size=reader.world_size, metadata=facts) as writer:
                for group in reader.groups.values():
                    writer.add_group(group)
                for rank in reader.ranks:
                    writer.add_units(rank, {**reader.units(rank).columns(), **columns.get(rank, {})})
                    writer.add_steps(rank, _steps(reader, rank, steps))
                    writer.add_scalars(rank, reader.scalars(rank))
                for digest in reader.payload_digests if with_payloads else ():
                    writer.add_payload(reader.payload(digest))
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _steps(reader: TraceReader, rank: int, ends: Mapping[int, tuple[np.ndarray, np.ndarray]] | None) -> dict[str, Any]:
    table = reader.steps(rank)
    columns: dict[str, Any] = dict(table.columns())
    if ends is not None and rank in ends and len(table):
        known = dict(zip(*(values.tolist() for values in ends[rank]), strict=True))
        wanted = table.step.tolist()
        columns["end_ns"] = np.array([known.get(step, ABSENT) for step in wanted], dtype=np.int64)
        columns["start_ns"] = np.array([known.get(step - 1, ABSENT) for step in wanted], dtype=np.int64)
    return columns


def _progress(one: CalibrationPass) -> str:
    change = "" if one.change_percent is None else f", change {one.change_percent:.2f} %"
    return f"pass {one.index + 1}: step {one.predicted_step_ns / 1e6:.3f} ms{change}"


@hookimpl
def prism_register_strategies() -> list[CalibrationStrategy]:
    return [Slices()]
