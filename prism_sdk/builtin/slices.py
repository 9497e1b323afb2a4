"""The calibration strategy `slices`: runs as many ranks for real at once as there are slots, all others virtual.

Responsible for the order of slices and passes and for writing the calibrated graph; the arithmetic is in
prism_sdk.graph.calibrate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prism_sdk.abc import CalibrationContext, CalibrationPass, CalibrationResult, CalibrationStrategy
from prism_sdk.builtin.device_transfers import (
    Transfers,
    cluster_transfers,
    fitted_cluster,
    has_mixed_messages,
    sizes_of,
)
from prism_sdk.builtin.local import check_occupy
from prism_sdk.builtin.transfer_model import TransferModel, modelled_transfers, plausible_transfers
from prism_sdk.cluster.profile import load_cluster
from prism_sdk.graph.calibrate import Calibration, relative_change
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.observed_transfers import observed_transfers
from prism_sdk.graph.prediction import Prediction, predict_step_time
from prism_sdk.graph.unlike import first_difference
from prism_sdk.hookspecs import hookimpl
from prism_sdk.interop.options import at_least
from prism_sdk.runtime.oncuda.usage import OTHERS_KEY, others_of
from prismtrace import ABSENT, GraphKind, TraceReader, TraceWriter, UnitKind
from prismtrace.rewriting import atomic_output

_MAX_PASSES = 4
MEASURED, UNSPECIFIED = 1, 0  # of the registry's Provenance
# a pass that changes no step time by more than the half width of the interval is the last; the half width counts
# between these bounds, or a noisy machine would call anything converged
_SMALLEST_NOISE, _LARGEST_NOISE = 0.001, 0.05
_BUSY_PERCENT = 5.0  # of their time that ranks are ready and have no CPU, from which on it is said
# of draws and of resamples for the prediction: fewer for large graphs, to keep its cost bounded
_MOST_TIMELINES, _ROWS_SCHEDULED = 100, 1_000_000


@dataclass(frozen=True)
class Options:
    """What `-O key=value` may set."""

    passes: int = _MAX_PASSES
    warmup_steps: int = 1
    transfers: str = "probe"  # "profile" (on GPUs), or a trace of the job observed on the real machine
    cluster: str = "h200-sxm"  # the profile that transfers of GPUs come from where nothing is measured

    @property
    def observed(self) -> Path | None:
        """The observed trace that transfers come from, if they do."""
        return None if self.transfers in ("probe", "profile") else Path(self.transfers)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """Raises UsageError for a value that has no meaning."""
        return cls(
            passes=at_least(options, "passes", default=cls.passes, low=1),
            warmup_steps=at_least(options, "warmup_steps", default=cls.warmup_steps, low=0),
            transfers=options.get("transfers", cls.transfers),
            cluster=options.get("cluster", cls.cluster),
        )


class Slices(CalibrationStrategy):
    """Slice by slice, with means over steps, waiting stripped from transfers, repeated until nothing changes."""

    name = "slices"
    option_names = ("cluster", "occupy", "passes", "transfers", "warmup_steps")
    description = "run as many ranks at once as there are slots, the others virtual; repeat until times are stable"

    def check_options(self, options: Mapping[str, str]) -> None:
        Options.parse(options)
        check_occupy(options)

    def calibrate(self, context: CalibrationContext) -> CalibrationResult:
        options = Options.parse(context.options)
        context.progress(0, 1, doing="reading the graph")
        job = _job(context)
        graph = JobGraph.load(job.path)
        slices = _slices_of(graph, job, context)
        modelled = self._transfers(graph, slices, context, options, job)
        graph_path, base = job.path, graph
        if modelled is not None:
            graph_path = context.work_dir / "modelled.prism"
            columns = {rank: {"transfer_ns": modelled.transfer_ns[graph.rows(rank)]} for rank in graph.ranks}
            write_times(job.path, columns, graph_path, GraphKind.BARE, {}, with_payloads=False)
            base = replace(JobGraph.load(graph_path), source=graph.source)
        measured: list[JobGraph] = []
        passes: list[CalibrationPass] = []
        prediction: Prediction | None = None
        provenance: np.ndarray | None = None
        converged = False
        waited: float | None = None
        num_timelines = min(max(_ROWS_SCHEDULED // max(len(base), 1), 8), _MOST_TIMELINES)
        for index in range(max(options.passes, 1)):
            traces = context.run_slices(slices, graph_path=graph_path, label=f"pass {index + 1}")
            if index == 1 and context.num_devices and modelled is not None:
                measured.clear()  # nobody was waited for: computing beside waits was too fast
            measured += [JobGraph.load(trace) for trace in traces]
            if index == 0:
                difference = first_difference(base, measured, stands_for=job.stands_for)
                if difference is not None:
                    context.report(
                        f"slices do not do what was recorded: {difference}; times of the recording, which mean little, "
                        "stand in for steps that no slice shows"
                    )
            waited = _cpu_wait_percent(traces)
            if waited is not None and waited > _BUSY_PERCENT:
                context.report(
                    f"this machine is busy: ranks were ready and had no CPU for {waited:.0f} % of their time; "
                    "what is measured holds for that load, small transfers most of all"
                )
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
            if context.num_devices:
                provenance = _provenance(prediction.calibration, modelled)
            converged = change is not None and change <= max(noise, _SMALLEST_NOISE)
            graph_path = context.work_dir / f"pass{index}.prism"
            write_calibrated(
                job.path, prediction.calibration, graph_path, {}, with_payloads=False, provenance=provenance
            )
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
            "calibration.transfers": modelled.source if modelled is not None else "slices",
        }  # fmt: skip
        if waited is not None:
            facts["calibration.cpu_wait_percent"] = f"{waited:.1f}"
        if context.num_devices:
            facts["calibration.devices"] = str(context.num_devices)
            facts |= {f"rank.{rank}.times": "device" for rank in graph.ranks}
            if modelled is not None and options.observed is not None:
                facts |= {OTHERS_KEY.format(rank): str(size) for rank, size in others_of(options.observed).items()}
        context.progress(0, 1, doing="writing the calibrated graph")
        if job.by_roles:
            _write_by_roles(context, prediction.calibration, facts, provenance)
        else:
            write_calibrated(context.graph_path, prediction.calibration, context.output, facts, with_payloads=True,
                             provenance=provenance)  # fmt: skip
        return CalibrationResult(
            context.output, tuple(passes), last.predicted_step_ns, last.step_low_ns, last.step_high_ns, converged
        )

    def _transfers(
        self, graph: JobGraph, slices: Sequence[Sequence[int]], context: CalibrationContext, options: Options, job: _Job
    ) -> Transfers | None:
        """Transfers of what no slice runs as a whole; None when every group fits into one slice."""
        sets = [frozenset(ranks) for ranks in slices]
        if not job.by_roles and all(any(s.issuperset(group.ranks) for s in sets) for group in graph.groups.values()):
            return None
        if options.observed is not None:
            transfers = observed_transfers(
                graph, JobGraph.load(options.observed), warmup_steps=options.warmup_steps, stands_for=job.stands_for
            )
            is_shown = transfers != ABSENT
            transfers = np.where(is_shown | (graph.event_of_row < 0), transfers, 0)
            known = np.where(is_shown, MEASURED, UNSPECIFIED).astype(np.uint8)
            if context.num_devices:  # what the observed run does not show has to come from somewhere that says so
                other = cluster_transfers(graph, load_cluster(options.cluster), group_sizes=job.group_sizes)
                transfers = np.where(is_shown, transfers, other.transfer_ns)
                assert other.provenance is not None
                known = np.where(is_shown, known, other.provenance).astype(np.uint8)
            return Transfers(transfers, known, options.transfers)
        if context.num_devices:
            return self._of_cluster(graph, context, options, job)
        context.progress(0, 1, doing="measuring the transport")
        context.report("measuring this machine's transport, for groups larger than a slice")
        trace = context.run_module("prism_sdk.builtin.transfer_probe", [], num_ranks=2, label="transport")
        model = TransferModel.fit(JobGraph.load(trace))
        return Transfers(modelled_transfers(graph, model, group_sizes=job.group_sizes), None, options.transfers)

    def _of_cluster(self, graph: JobGraph, context: CalibrationContext, options: Options, job: _Job) -> Transfers:
        """From NCCL between two GPUs where there are two, extended by the profile; else from the profile alone."""
        cluster = load_cluster(options.cluster)
        source = f"profile {options.cluster}"
        if options.transfers == "probe" and context.num_devices > 1:
            context.progress(0, 1, doing="measuring NCCL")
            context.report("measuring NCCL between two GPUs, for groups larger than a slice")
            arguments = [json.dumps(sizes_of(graph))]
            trace = context.run_module("prism_sdk.builtin.nccl_probe", arguments, num_ranks=2, label="transport")
            cluster, source = fitted_cluster(cluster, trace), f"probe, extended by {source}"
        else:
            context.report(f"transfers are modelled: {source}; -O transfers=FILE takes those of an observed run")
        return cluster_transfers(graph, cluster, source=source, group_sizes=job.group_sizes)


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


def _write_by_roles(
    context: CalibrationContext, calibration: Calibration, facts: Mapping[str, str], provenance: np.ndarray | None
) -> None:
    """All ranks of a role get what its representative was found to take."""
    from prism_sdk.runtime.roles.recorded import write_times_by_roles

    ends = {rank: calibration.timeline.step_ends_ns(rank) for rank in calibration.graph.ranks}
    write_times_by_roles(
        context.graph_path, context.output, graph_kind=GraphKind.CALIBRATED,
        times=lambda rank: columns_of(calibration, rank, provenance),
        steps=lambda reader, rank: _steps(reader, rank, ends), metadata=facts,
    )  # fmt: skip


def _cpu_wait_percent(traces: Sequence[Path]) -> float | None:
    """For which share of their time the ranks of these slices had no CPU when they could have run."""
    found: list[float] = []
    for trace in traces:
        with TraceReader(trace) as reader:
            known = (reader.metadata.get(f"rank.{rank}.cpu_wait_percent") for rank in reader.ranks)
            found += [float(value) for value in known if value]
    return float(np.mean(found)) if found else None


def _slices_of(graph: JobGraph, job: _Job, context: CalibrationContext) -> list[tuple[int, ...]]:
    """Which ranks run at once. On GPUs one alone where ranks of a slice would send messages in a group beyond it."""
    slices = partition(job.ranks, context.num_slots)
    if context.num_devices and has_mixed_messages(graph, slices):
        context.report("one rank at a time: ranks send messages in groups that are larger than a slice")
        return partition(job.ranks, 1)
    return slices


def _provenance(calibration: Calibration, modelled: Transfers | None) -> np.ndarray:
    """Where the time of each row comes from, as the registry numbers it."""
    is_wait = calibration.graph.columns["kind"] == UnitKind.WAIT
    known = np.where(calibration.is_measured & ~is_wait, MEASURED, UNSPECIFIED)
    if modelled is not None and modelled.provenance is not None:
        known = np.where((known == 0) & (calibration.graph.event_of_row >= 0), modelled.provenance, known)
    return known.astype(np.uint8)


def columns_of(calibration: Calibration, rank: int, provenance: np.ndarray | None) -> dict[str, np.ndarray]:
    """The columns of a rank that calibration gives, with where its times come from if that is known."""
    columns: dict[str, np.ndarray] = dict(calibration.columns(rank))
    if provenance is not None:
        columns["prism.provenance"] = provenance[calibration.graph.rows(rank)]
    return columns


def write_calibrated(
    source: Path, calibration: Calibration, output: Path, metadata: Mapping[str, str], *, with_payloads: bool,
    provenance: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Write `source` with the calibrated times in place of its own."""
    columns = {rank: columns_of(calibration, rank, provenance) for rank in calibration.graph.ranks}
    steps = {rank: calibration.timeline.step_ends_ns(rank) for rank in calibration.graph.ranks}
    write_times(source, columns, output, GraphKind.CALIBRATED, metadata, with_payloads=with_payloads, steps=steps)


def write_times(
    source: Path, columns: Mapping[int, Mapping[str, np.ndarray]], output: Path, kind: GraphKind,
    metadata: Mapping[str, str], *, with_payloads: bool,
    steps: Mapping[int, tuple[np.ndarray, np.ndarray]] | None = None,
) -> None:  # fmt: skip
    """Write a copy of `source` in which `columns` (by rank) replace its own; whole or not at all."""
    with atomic_output(os.fspath(output), overwrite=True) as temporary, TraceReader(source) as reader:
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
    change = "" if one.change_percent is None else f", steps changed by up to {one.change_percent:.2f} %"
    return f"pass {one.index + 1}: step {one.predicted_step_ns / 1e6:.3f} ms{change}"


@hookimpl
def prism_register_strategies() -> list[CalibrationStrategy]:
    return [Slices()]
