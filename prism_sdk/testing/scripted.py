"""Contexts that write real trace files without running a job, for tests of strategies and backends.

Their times are the ones that the test asks for; nothing is measured and no rank is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import prismtrace
from prism_sdk.abc import Assistance, CalibrationContext
from prism_sdk.errors import UsageError
from prism_sdk.runtime.config import LaunchConfig, LaunchMode
from prismtrace import GraphKind, Op, Phase, ReduceOp, UnitKind

__all__ = ["ScriptedCalibration", "ScriptedReplay", "write_trace"]

_GROUP_ID = 1


def write_trace(
    path: Path, *, kind: GraphKind, world_size: int, ranks: Sequence[int], num_steps: int, step_ns: int | None
) -> Path:
    """Write a trace of a job whose step is: compute, an all_reduce of all ranks, compute. Without times when bare."""
    with prismtrace.TraceWriter(path, graph_kind=kind, world_size=world_size) as writer:
        group = prismtrace.ProcessGroup(
            group_id=_GROUP_ID, name="0", description="default_pg", backend="gloo", ranks=tuple(range(world_size))
        )
        writer.add_group(group)
        for rank in ranks:
            writer.add_units(rank, _units(num_steps, step_ns=step_ns))
            numbers = list(range(num_steps))
            length = step_ns or 1
            starts = [prismtrace.ABSENT if number == 0 or step_ns is None else number * length for number in numbers]
            ends = [(number + 1) * length for number in numbers]
            writer.add_steps(rank, {"step": numbers, "start_ns": starts, "end_ns": ends})
    return path


def _units(num_steps: int, *, step_ns: int | None) -> Mapping[str, Any]:
    absent = prismtrace.ABSENT
    columns: dict[str, list[int]] = {
        name: []
        for name in ("kind", "phase", "step", "start_ns", "end_ns", "group_id", "seq", "op", "reduce_op",
                     "num_elements_in", "num_elements_out", "awaits", "transfer_ns", "gap_ns")
    }  # fmt: skip
    for step in range(num_steps):
        begin, tenth = step * (step_ns or 0), (step_ns or 0) // 10
        middle, done = begin + 6 * tenth, begin + 7 * tenth
        end = begin + (step_ns or 0)
        collective = 4 * step + 1
        rows: tuple[dict[str, int], ...] = (
            {"kind": UnitKind.COMPUTE, "phase": Phase.FORWARD, "start_ns": begin, "end_ns": middle},
            {"kind": UnitKind.COLLECTIVE, "phase": Phase.BACKWARD, "start_ns": middle, "end_ns": done,
             "group_id": _GROUP_ID, "seq": step, "op": Op.ALL_REDUCE, "reduce_op": ReduceOp.SUM,
             "num_elements_in": 8, "num_elements_out": 8, "transfer_ns": tenth},
            {"kind": UnitKind.WAIT, "phase": Phase.BACKWARD, "start_ns": middle, "end_ns": done, "awaits": collective},
            {"kind": UnitKind.COMPUTE, "phase": Phase.OPTIMIZER, "start_ns": done, "end_ns": end},
        )  # fmt: skip
        for row in rows:
            timeless = step_ns is None
            for name, values in columns.items():
                missing = 0 if name in ("kind", "phase", "group_id", "op", "reduce_op") else absent
                value = step if name == "step" else row.get(name, missing)
                values.append(absent if timeless and name.endswith("_ns") else value)
    return columns


class ScriptedCalibration(CalibrationContext):
    """A calibration of an invented job: ``run_slice`` writes a trace whose steps take the next of ``step_ns``.

    Args:
        folder: where everything is written; empty.
        world_size: ranks of the job.
        num_slots: ranks that may run at once.
        step_ns: step times of the runs, in order; repeated when used up.
        num_steps: steps of every run.
        options: what the user would give with ``-O``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world_size: int = 2,
        num_slots: int = 2,
        step_ns: Sequence[int] = (1_000_000,),
        num_steps: int = 4,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._world_size, self._num_slots = folder, world_size, num_slots
        self._num_steps, self._options = num_steps, dict(options or {})
        self._step_ns: Iterator[int] = cycle(step_ns)
        self.slices: list[tuple[tuple[int, ...], str]] = []
        """Every slice that was run: its ranks and label."""
        self.messages: list[str] = []
        """Everything that was reported."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        write_trace(
            self.graph_path, kind=GraphKind.BARE, world_size=world_size, ranks=range(world_size),
            num_steps=num_steps, step_ns=None,
        )  # fmt: skip

    @property
    def graph_path(self) -> Path:
        """The bare graph."""
        return self._folder / "bare.prism"

    @property
    def output(self) -> Path:
        """Where the calibrated graph goes."""
        return self._folder / "calibrated.prism"

    @property
    def work_dir(self) -> Path:
        """For intermediate files."""
        return self._folder / "work"

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self._world_size

    @property
    def num_slots(self) -> int:
        """Ranks that may run at once."""
        return self._num_slots

    @property
    def options(self) -> Mapping[str, str]:
        """What the user gave with ``-O``."""
        return self._options

    def run_slice(self, ranks: Sequence[int], *, graph_path: Path, label: str) -> Path:
        """Write the trace of an invented run of ``ranks``; refuses what the runtime would refuse."""
        chosen = tuple(ranks)
        if not chosen or len(chosen) > self._num_slots or len(set(chosen)) != len(chosen):
            raise UsageError(f"a slice of ranks {chosen} does not fit {self._num_slots} slots")
        if min(chosen) < 0 or max(chosen) >= self._world_size:
            raise UsageError(f"a slice of ranks {chosen} is not within the world of {self._world_size}")
        with prismtrace.TraceReader(graph_path) as reader:
            assert reader.world_size == self._world_size
        self.slices.append((chosen, label))
        return write_trace(
            self.work_dir / f"slice{len(self.slices)}.prism", kind=GraphKind.EMULATED, world_size=self._world_size,
            ranks=chosen, num_steps=self._num_steps, step_ns=next(self._step_ns),
        )  # fmt: skip

    def run_module(self, module: str, arguments: Sequence[str], *, num_ranks: int, label: str) -> Path:
        """Observe ``module`` for real (this needs torch): measurements beside the job cannot be invented."""
        from prism_sdk.runtime.launcher import launch

        output = self.work_dir / f"{label}.prism"
        config = LaunchConfig(
            mode=LaunchMode.OBSERVE, target=module, is_module=True, arguments=tuple(arguments), output=output,
            nproc_per_node=num_ranks, quiet=True,
        )  # fmt: skip
        launch(config)
        return output

    def report(self, message: str) -> None:
        """Keep a line of progress in ``messages``."""
        self.messages.append(message)


@dataclass(frozen=True)
class ScriptedReplay:
    """What a replay backend sees, with the graph of an invented job."""

    graph_path: Path
    rank: int = 0
    sandbox: Sequence[int] = (0,)
    world_size: int = 2
    options: Mapping[str, str] = field(default_factory=dict)
    assistance: Assistance = field(default_factory=Assistance)

    @classmethod
    def create(cls, folder: Path, *, world_size: int = 2) -> ScriptedReplay:
        """Write a calibrated graph into ``folder`` and make the context of its rank 0."""
        path = write_trace(
            folder / "calibrated.prism", kind=GraphKind.CALIBRATED, world_size=world_size, ranks=range(world_size),
            num_steps=4, step_ns=1_000_000,
        )  # fmt: skip
        return cls(graph_path=path, world_size=world_size)
