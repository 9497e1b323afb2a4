"""Turns what a rank does into units, steps and scalars of a trace shard.

Responsible for the rows and their order, for phases and step boundaries; it takes no part in communication.

The hot path appends one small list per event; all else (columns, compression, writing) is done at a step boundary
when enough rows have gathered.  Clock: CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.ending import undisturbed
from prism_sdk.runtime.names import PASSES, Names, Notes, name_columns
from prism_sdk.runtime.resident import ResidentMemory
from prism_sdk.runtime.rows import ASYNC, END, MEMORY, NAMES, PHASE, columns_of
from prismtrace import ABSENT, TraceWriter
from prismtrace.model import Op, Phase, ProcessGroup, UnitKind

if TYPE_CHECKING:
    from prism_sdk.runtime.oncuda.streams import SideWaits

now_ns = time.monotonic_ns

FLUSH_ROWS = 8192
FLUSH_INTERVAL_NS = 5_000_000_000

_ABSENT32 = int(np.iinfo(np.int32).min)

_KIND_OF = {int(Op.SEND): int(UnitKind.SEND), int(Op.RECV): int(UnitKind.RECV)}
_OTHER = int(Phase.OTHER)
_COMPUTE, _WAIT, _COLLECTIVE = int(UnitKind.COMPUTE), int(UnitKind.WAIT), int(UnitKind.COLLECTIVE)


class Tracer:
    """Collects the rows of one rank and writes them to its shard."""

    def __init__(self, rank: int, writer: TraceWriter, *, memory: Callable[[], int] | None = None) -> None:
        self.rank = rank
        self.writer = writer
        self._memory = memory or ResidentMemory()
        self.now: Callable[[], int] = now_ns  # points of the program; see oncuda/tracing.py for others
        self._lock = threading.RLock()  # threads of the program may communicate
        self._rows: list[list[Any]] = []
        self._flushed = 0  # unit_index of _rows[0]
        self.first_ns = self._last_ns = now_ns()  # start of the first row; end of the last host row
        self.phase = int(Phase.OTHER)
        self._other_since = 0  # unit_index from which OTHER rows may turn out to be the next microbatch's forward
        self._boundary: tuple[int, int, int] | None = None  # (unit_index, time, cpu time) after the last optimizer step
        self._open_losses: list[float | Callable[[], float]] = []
        self._losses_at_boundary = 0
        self._num_backwards = 0  # in the open step: a step without any is none (a dummy optimizer step at start-up)
        self._bounds: list[tuple[int, int]] = []  # (unit_index, step): rows from there on belong to the step
        self._steps: list[tuple[int, int, int, list[float | Callable[[], float]], int, int]] = []
        self._memory_peak = 0
        self.names: Names | None = None
        self.assumed: Names | None = None  # where no stretch is open
        self.num_optimizer_steps = 0
        self.num_backward_passes = 0
        self.named_phase = int(Phase.OTHER)  # of the innermost stretch that said one: torch's own phases end there
        self.queued: list[tuple[int, Names | None]] | None = None  # for the next communications, last one first
        self.at_optimizer: Callable[[], None] = lambda: None
        self.at_group: Callable[[], None] = lambda: None
        self._within: tuple[Names | None] | None = None  # around an optimizer that steps in a backward pass
        self.parts_of_groups: dict[tuple[str, int], Names] = {}
        self.groups: dict[int, ProcessGroup] = {}
        self._notes = Notes()
        self._memory_since = 0
        self._open: dict[int, int] = {}  # communication nobody has waited for yet -> its step; may still be amended
        self.streams: SideWaits | None = None  # on a GPU: whose rows these are, and who waits for whom
        self.step = 0
        self.step_cell: memoryview | None = None  # where the launcher looks for it
        self._step_start = ABSENT
        self._step_cpu = 0
        self._last_flush = now_ns()
        self.finished = False

    # -- events -----------------------------------------------------------------------------------------------------

    @property
    def num_units(self) -> int:
        return self._flushed + len(self._rows)

    def compute_until(self, end_ns: int) -> None:
        """Close the compute row that began where the last host row ended."""
        if end_ns > self._last_ns:
            self._rows.append([_COMPUTE, self.phase, self._last_ns, end_ns, self.names, ABSENT])
            self._last_ns = end_ns

    def communication(self, call: Call, posted_ns: int, seq: int) -> int:
        """Add the row of a communication posted at `posted_ns`; returns its unit_index."""
        return self.post(
            posted_ns, self._start_of(call), call.group, seq, int(call.op), int(call.reduce_op), int(call.dtype),
            call.num_elements_in, call.num_elements_out, call.other_rank, call.tag, call.is_async, call.splits_in,
            call.splits_out,
        )  # fmt: skip

    def _start_of(self, call: Call) -> int | None:
        """Where a call starts, if that is another point than the one at which the program came to it."""
        return None

    def post(
        self, posted_ns: int, start_ns: int | None, group: GroupState, seq: int, op: int, reduce_op: int, dtype: int,
        num_in: int, num_out: int, other: int | None, tag: int | None, is_async: bool,
        splits_in: list[int] | None, splits_out: list[int] | None,
    ) -> int:  # fmt: skip
        """As `communication`, from the figures of a call; `other` is the group rank of root or peer.

        The program came to it at `posted_ns`, and it starts there unless `start_ns` is given.
        """
        with self._lock:
            rows, phase, names, last = self._rows, self.phase, self.names, self._last_ns
            if posted_ns > last:  # as compute_until
                rows.append([_COMPUTE, phase, last, posted_ns, names, ABSENT])
                self._last_ns = posted_ns
            elif posted_ns < last:
                posted_ns = last  # another thread has been at work since: one line of time a rank
            row = [
                _KIND_OF.get(op, _COLLECTIVE), phase, posted_ns if start_ns is None else start_ns, ABSENT, names,
                ABSENT, ABSENT, group.group_id, seq, op, reduce_op, dtype, num_in, num_out,
                group.ranks[other] if other is not None and 0 <= other < len(group.ranks) else _ABSENT32,
                ABSENT if tag is None else tag, 1 if is_async else 0, None, None, splits_in, splits_out,
            ]  # fmt: skip
            unit = self._flushed + len(rows)
            rows.append(row)
            if self.queued:
                named_phase, row[NAMES] = self.queued.pop()
                row[PHASE] = named_phase or phase
            elif self.parts_of_groups:
                part = self.parts_of_groups.get((group.name, phase))
                if part is not None and (names is None or names.part in PASSES):
                    row[NAMES] = part if names is None else names.with_part_of(part)
            self._open[unit] = self.step
            return unit

    def wait(self, unit: int, start_ns: int, end_ns: int, *, blocked: bool, is_of_main: bool = False) -> None:
        """Add the row of a wait for communication row `unit`; a wait that blocked also dates that row's completion.

        `is_of_main`: it is the main stream of a GPU that waits, whichever stream is current.
        """
        with self._lock:
            if self.streams is None or is_of_main or not self.streams.takes(unit):
                self._wait(unit, start_ns, end_ns, blocked=blocked)
            else:
                self.amend(unit, ASYNC, 1)
                if blocked:
                    self.amend(unit, END, self._end_beside(end_ns))

    def _end_beside(self, end_ns: int) -> int:
        """The time of the stream that is current, which is not the main one."""
        return end_ns

    def _wait(self, unit: int, start_ns: int, end_ns: int, *, blocked: bool) -> None:
        rows, phase, names, last = self._rows, self.phase, self.names, self._last_ns
        if start_ns > last:  # as compute_until
            rows.append([_COMPUTE, phase, last, start_ns, names, ABSENT])
        elif start_ns < last:
            start_ns = last
        if end_ns < start_ns:  # the end if they are equal: it may be a point on a device
            end_ns = start_ns
        awaited = unit - self._flushed
        if awaited >= 0:
            row = rows[awaited]
            if blocked:
                row[END] = end_ns
            if names is None or names.part is None:  # a wait is for what is waited for, unless it says more itself
                of_row = row[NAMES]
                if of_row is not None:
                    names = of_row
                    phase = row[PHASE] if phase == _OTHER else phase
        rows.append([_WAIT, phase, start_ns, end_ns, names, ABSENT, unit])
        self._last_ns = end_ns
        self._open.pop(unit, None)

    def complete(self, unit: int, end_ns: int) -> None:
        """Date the completion of communication row `unit`, for which nobody waits."""
        self._open.pop(unit, None)
        self.amend(unit, END, end_ns)

    def resume(self) -> None:
        """The time since the last row was Prism's own: it belongs to no row."""
        self._last_ns = now_ns()

    @property
    def last_ns(self) -> int:
        """Where the last host row ended."""
        return self._last_ns

    def amend(self, unit: int, position: int, value: Any) -> None:
        """Fill in one field of a row that is not written yet."""
        with self._lock:
            index = unit - self._flushed
            if index >= 0:
                self._rows[index][position] = value

    @property
    def next_step(self) -> int:
        """The step that units belong to which come behind the last step of an optimizer."""
        return self.step + (self._boundary is not None)

    # -- phases and steps -------------------------------------------------------------------------------------------

    def backward_begins(self, losses: list[float | Callable[[], float]]) -> None:
        self._enter(Phase.BACKWARD)
        self._close_step_if_due()
        for row in self._rows[max(self._other_since - self._flushed, 0) :]:
            if row[PHASE] == Phase.OTHER:
                row[PHASE] = int(Phase.FORWARD)
        self._open_losses += losses
        self._num_backwards += 1
        self.num_backward_passes += 1

    def backward_ends(self) -> None:
        self._enter(self.named_phase)
        self._other_since = self.num_units

    def optimizer_begins(self) -> None:
        if self.streams is not None:
            self.streams.follow()
        if self.phase == Phase.BACKWARD:  # for a parameter whose gradient is there: the backward pass goes on behind it
            self._enter(Phase.OPTIMIZER)
            self._within, self.names = (self.names,), None
            return
        self.at_optimizer()
        self._enter(Phase.OPTIMIZER)
        if self.names is self.assumed:  # of the last microbatch
            self.names = None
        self.assumed = None

    def optimizer_ends(self) -> None:
        """A step may end here; it does once the next backward begins (several optimizers may step in a row)."""
        self._enter(self.named_phase if self._within is None else Phase.BACKWARD)
        if self._within is not None:
            (self.names,), self._within = self._within, None
        self._other_since = self.num_units
        self.num_optimizer_steps += 1
        if self._num_backwards:
            self._boundary = (self.num_units, self._last_ns, time.process_time_ns())
            self._losses_at_boundary = len(self._open_losses)

    def switch(self, phase: int, named_phase: int, names: Names | None) -> None:
        """From now on units have `names`, and `phase` unless 0; torch's own phases then end in `named_phase`.

        Without a phase those of torch stay. Memory is looked at once in a millisecond: looking costs a microsecond.
        """
        now = self.now()
        last = self._last_ns
        if now > last:  # as compute_until, without a call
            self._rows.append([_COMPUTE, self.phase, last, now, self.names, ABSENT])
            self._last_ns = now
            if now - self._memory_since > 1_000_000:
                self._memory_since = now
                resident = self._rows[-1][MEMORY] = self._memory()
                if resident > self._memory_peak:
                    self._memory_peak = resident
        if phase:
            self.phase, self.named_phase = phase, named_phase
            if phase == _OTHER:
                self._other_since = self._flushed + len(self._rows)  # never less than it was
        self.names = names

    def note(self, column: str, value: Any, failed: Callable[[str], None]) -> None:
        """Put a list of integers, or a callable that gives one later, into a named column of the next unit."""
        self._notes.add(self.num_units, column, value, failed)

    def settle_notes(self) -> None:
        """Ask all callables among the notes now; `failed` of each that cannot be written is told."""
        self._notes.settle()

    def _enter(self, phase: int) -> None:
        before = len(self._rows)
        self.compute_until(self.now())
        resident = self._memory()
        if resident > self._memory_peak:
            self._memory_peak = resident
        if len(self._rows) > before:
            self._rows[-1][MEMORY] = resident
        self.phase = int(phase)

    def _close_step_if_due(self) -> None:
        if self._boundary is not None:
            with self._lock:
                self._close_step(*self._boundary)

    def _close_step(self, unit: int, end_ns: int, cpu_ns: int) -> None:
        self._boundary = None
        losses = self._fetch(self._open_losses[: self._losses_at_boundary])
        del self._open_losses[: self._losses_at_boundary]
        self._steps.append((self.step, self._step_start, end_ns, losses, self._take_peak(), cpu_ns - self._step_cpu))
        self._step_start, self._step_cpu, self._num_backwards = end_ns, cpu_ns, 0
        self.step += 1
        if self.step_cell is not None:
            self.step_cell[0] = self.step
        self._bounds.append((unit, self.step))
        if len(self._rows) >= FLUSH_ROWS or now_ns() - self._last_flush > FLUSH_INTERVAL_NS:
            self._open = {unit: step for unit, step in self._open.items() if step >= self.step - 1}  # else given up
            self.flush(everything=False, open_unit=min(self._open, default=None))

    def _fetch(self, losses: list[float | Callable[[], float]]) -> list[float | Callable[[], float]]:
        """The values of the step that ends, as far as they are wanted now; the rest when it is written."""
        return [float(value() if callable(value) else value) for value in losses]

    def _take_peak(self) -> int:
        """The memory peak of the step that ends."""
        peak, self._memory_peak = self._memory_peak, 0
        return peak

    # -- writing ----------------------------------------------------------------------------------------------------

    def add_group(self, group: ProcessGroup) -> None:
        self.groups[group.group_id] = group
        self.writer.add_group(group)
        self.at_group()

    def flush(self, *, everything: bool = True, open_unit: int | None = None) -> None:
        """Write rows out: all, or those before the current step (and before `open_unit`, still to be amended)."""
        with undisturbed(), self._lock:
            self._flush(everything=everything, open_unit=open_unit)

    def _flush(self, *, everything: bool, open_unit: int | None) -> None:
        num = len(self._rows)
        if not everything:
            num = min(num, self._bounds[-1][0] - self._flushed if self._bounds else 0)
        if open_unit is not None:
            num = min(num, open_unit - self._flushed)
        if num > 0:
            rows, self._rows = self._rows[:num], self._rows[num:]
            self.writer.add_units(self.rank, self._columns(rows))
            self._flushed += num
        self._write_steps(everything=everything)
        self.writer.flush()
        self._last_flush = now_ns()

    def _write_steps(self, *, everything: bool) -> None:
        steps, scalars = [], []
        for step, start_ns, end_ns, losses, peak, cpu_ns in self._steps:
            values = [float(v() if callable(v) else v) for v in losses]
            loss = math.fsum(values) / len(values) if values else math.nan
            scalars += [(step, "loss", value) for value in values]
            steps.append((step, start_ns, end_ns, loss, len(values), peak, cpu_ns))
        if steps:
            names = ("step", "start_ns", "end_ns", "loss", "num_losses", "memory_peak_bytes", "cpu_time_ns")
            columns: dict[str, Any] = dict(zip(names, zip(*steps, strict=True), strict=True))
            self.writer.add_steps(self.rank, {**columns, **self._more_of_steps(columns["step"])})
        if scalars:
            self.writer.add_scalars(
                self.rank, dict(zip(("step", "name", "value"), zip(*scalars, strict=True), strict=True))
            )
        self._steps = []

    def _more_of_steps(self, steps: Sequence[int]) -> dict[str, Any]:
        return {}  # further columns of these steps

    def _columns(self, rows: list[list[Any]]) -> dict[str, Any]:
        columns = columns_of(rows)
        columns |= name_columns(columns.pop("names"))
        columns |= self._notes.columns(self._flushed, len(rows))
        columns["step"] = self._step_column(len(rows))
        return columns

    def _step_column(self, num: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        first = self._flushed
        starts = np.array([0] + [unit for unit, _ in self._bounds], dtype=np.int64)
        steps = np.array([self._bounds[0][1] - 1 if self._bounds else self.step] + [s for _, s in self._bounds])
        column = steps[np.searchsorted(starts, np.arange(first, first + num), side="right") - 1]
        passed = [bound for bound in self._bounds if bound[0] <= first + num]
        if passed:
            self._bounds = [passed[-1], *[b for b in self._bounds if b[0] > first + num]]
        return column.astype(np.int64)

    def finish(self, status: str) -> None:
        """Close the open step, write everything and finalise the shard. Safe to call twice."""
        with self._lock:
            if self.finished:
                return
            self.finished = True
            self.compute_until(self.now())
            self._close_step_if_due()
            self.flush()
            self.writer.set_metadata(f"rank.{self.rank}.status", status)
            self.writer.close()


def open_shard(directory: Path, rank: int, graph_kind: Any, world_size: int, metadata: dict[str, str]) -> TraceWriter:
    """Create the shard of `rank` in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    return TraceWriter(
        directory / f"rank-{rank:05d}.prism", graph_kind=graph_kind, world_size=world_size, metadata=metadata
    )
