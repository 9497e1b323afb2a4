"""The tracer of an observed rank on a GPU: rows get the device's times in place of the host's.

Responsible for turning marks into times, and for the ends of what NCCL runs beside the program's streams.  It adds no
wait for the GPU before the program has ended.

COMPUTE and WAIT rows are those of the program's main stream; a communication starts where the stream that was current
had got to when the program asked for it, and ends when it was done on NCCL's stream, or on a stream of the program's
own beside the main one: then the main stream's later wait for that stream is the wait for it.  A rank that has not
opened a GPU yet, or never does, is traced as on a CPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.oncuda.clock import DeviceClock, Mark
from prism_sdk.runtime.oncuda.durations import Durations
from prism_sdk.runtime.oncuda.metering import MeteredTracer
from prism_sdk.runtime.oncuda.order import device_of
from prism_sdk.runtime.oncuda.scratch import uses_nccl
from prism_sdk.runtime.oncuda.streams import SideWaits
from prism_sdk.runtime.oncuda.usage import OTHERS_KEY, process_bytes
from prism_sdk.runtime.rows import ASYNC, AWAITS, END, GROUP, KIND, PEER, START
from prismtrace import ABSENT, Op, TraceWriter, UnitKind

ISSUED_COLUMN = "prism.issued_ns"
"""Named column of units: when the program, on the host, came to what `start_ns` gives in the device's time."""

_SETTLED_STEP = 1  # in the first step libraries still load kernels, and communicators connect
_BLOCKED_NS = 20_000  # a stream that waited for longer was held up, so what it waited for ended then
_HUNG_S = 1.0  # so long a GPU is waited for that may wait itself for a rank that is gone; the launcher waits longer
_WATCHDOG_S = 1.0  # torch's looks ten times a second
_COMPUTE, _WAIT, _COLLECTIVE = int(UnitKind.COMPUTE), int(UnitKind.WAIT), int(UnitKind.COLLECTIVE)


class DeviceTracer(MeteredTracer):
    """Keeps rows until the GPU has passed them, one whole step behind the program."""

    def __init__(self, rank: int, writer: TraceWriter, *, is_real: bool = False) -> None:
        """`is_real`: nothing of the job is emulated, so what the device holds is what it holds in the job."""
        super().__init__(rank, writer)
        self._clock = DeviceClock()
        self.now, self.points = self._clock.mark, self._clock.points
        self._durations = Durations()
        self.streams: SideWaits = SideWaits(self, self._clock)
        self._beside: set[int] = set()  # units that run on a stream of NCCL's
        self._chain_ns = 0  # where the last COMPUTE or WAIT row ended
        self._lane_ends: dict[tuple[int, int], int] = {}  # stream of NCCL's -> end of the last unit on it
        self._is_real = is_real

    def runs(self, unit: int, call: Call, *, in_block: bool) -> None:
        """A backend was asked for `unit`; `in_block`: between the begin and the end of explicit coalescing."""
        self.expect(unit, call.group, call.op, num_nccl_calls(call), is_async=call.is_async, in_block=in_block)

    def expect(
        self, unit: int, group: GroupState, op: Op, num_entries: int, *, is_async: bool, in_block: bool
    ) -> None:  # fmt: skip
        """As `runs`, from the figures of a call; `num_entries`: as so many calls of NCCL."""
        if not uses_nccl(group.backend) or torch.cuda.is_current_stream_capturing():
            return  # NCCL's recorder does not see what is captured
        if is_async:  # else it runs on the stream that is current
            self._beside.add(unit)
        self._durations.expect(
            unit, group.name, op, num_entries=num_entries, in_block=in_block, wanted=bool(self._beside)
        )

    # -- streams beside the main one --------------------------------------------------------------------------------

    def _start_of(self, call: Call) -> int | None:
        """One that is asked for on a stream of its own starts where that one came to it."""
        return None if device_of(call) is None else self._clock.beside()

    def ends_beside(self, unit: int, start: Mark) -> None:
        """`unit` ran on the stream of `start` and ends here: it holds up nobody before the main stream waits for it."""
        with self._lock:
            end = self._clock.again(start)
            self.streams.add(end.stream, unit)
            index = unit - self._flushed
            if index >= 0:
                row = self._rows[index]
                row[ASYNC], row[END] = 1, end

    def _end_beside(self, end_ns: int) -> int:
        if isinstance(end_ns, Mark) and end_ns.stream != self._clock.main:
            return end_ns
        return self._clock.beside() or end_ns

    # -- memory -----------------------------------------------------------------------------------------------------

    def _take_peak(self) -> int:
        if self._is_real and self._meter is not None and self.step == _SETTLED_STEP:
            self._note_others()
        return super()._take_peak()

    def _note_others(self) -> None:
        """What the device holds of this process beside torch's memory: by now NCCL has connected."""
        device = torch.cuda.current_device()
        used = process_bytes(device)
        if used is not None:
            others = used - torch.cuda.memory_reserved(device)
            self.writer.set_metadata(OTHERS_KEY.format(self.rank), str(max(others, 0)))

    def _fetch(self, losses: list[float | Callable[[], float]]) -> list[float | Callable[[], float]]:
        return losses  # asking now could hold up the program

    # -- writing ----------------------------------------------------------------------------------------------------

    def _flush(self, *, everything: bool, open_unit: int | None) -> None:
        if not everything and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # looking at events would break the capture
        self._clock.settle(wait=False)
        if not everything:  # what the last step did may be under way
            settled = self._bounds[-2][0] if len(self._bounds) > 1 else self._flushed
            settled = min(settled, self._first_open(settled))
            open_unit = settled if open_unit is None else min(settled, open_unit)
        if self._beside:  # else all ends are known without it
            self._durations.collect()
        super()._flush(everything=everything, open_unit=open_unit)

    def _first_open(self, stop: int) -> int:
        """The first row up to `stop` with a mark that has no time yet."""
        for index, row in enumerate(self._rows[: max(stop - self._flushed, 0)]):
            if _is_open(row[START]) or _is_open(row[END]):
                return self._flushed + index
        return stop

    def _write_steps(self, *, everything: bool) -> None:
        kept = []
        if not everything:
            done = [not _is_open(step[2]) and all(map(_is_there, step[3])) for step in self._steps]
            first = done.index(False) if False in done else len(done)
            self._steps, kept = self._steps[:first], self._steps[first:]
        self._steps = [
            (step, ABSENT if start == ABSENT else self._when(start), self._when(end), [*filter(_is_there, losses)],
             peak, cpu_ns)
            for step, start, end, losses, peak, cpu_ns in self._steps
        ]  # fmt: skip
        super()._write_steps(everything=everything)
        self._steps = kept

    def _columns(self, rows: list[list[Any]]) -> dict[str, Any]:
        waited = {row[AWAITS]: row for row in rows if row[KIND] == _WAIT}
        issued = np.array([int(row[START]) for row in rows], dtype=np.int64)
        for row in rows:
            if row[KIND] in (_COMPUTE, _WAIT):
                start = max(self._chain_ns, self._when(row[START]))
                self._chain_ns = max(start, self._when(row[END]))
                row[START], row[END] = start, self._chain_ns
        for index, row in enumerate(rows):
            if row[KIND] not in (_COMPUTE, _WAIT):
                self._date(self._flushed + index, row, waited.get(self._flushed + index))
        return {**super()._columns(rows), ISSUED_COLUMN: issued}

    def _date(self, unit: int, row: list[Any], wait: list[Any] | None) -> None:
        """Start and end of a communication, from NCCL's duration or from who was held up by it."""
        start = row[START] = self._when(row[START])
        duration = self._durations.known.pop(unit, None)
        end = ABSENT if row[END] == ABSENT else self._when(row[END])
        if unit in self._beside:
            self._beside.discard(unit)
            lane = (row[GROUP], 0 if row[KIND] == _COLLECTIVE else int(row[PEER]) + 1)
            if duration is not None:
                end = self._lane_ends[lane] = max(start, self._lane_ends.get(lane, 0)) + duration
            elif wait is not None and wait[END] - wait[START] > _BLOCKED_NS:
                end = wait[END]
        if end != ABSENT:
            end = max(end if wait is None else min(end, wait[END]), start)
        row[END] = end

    def _when(self, value: int) -> int:
        """The time of a point of the program. Points that the GPU did not see, once it is in use, have that before."""
        if isinstance(value, Mark):
            return self._chain_ns if value.time_ns is None else value.time_ns
        is_host = not self._clock.first_host_ns or value <= self._clock.first_host_ns
        return int(value) if is_host else self._chain_ns

    def finish(self, status: str) -> None:
        if not self.finished and torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):  # of a GPU that has failed: what is known is written
                self._settle(is_complete=status == "complete")
            self._clock.stop()
            self.writer.set_metadata(f"rank.{self.rank}.times", "device")
        super().finish(status)

    def _settle(self, *, is_complete: bool) -> None:
        self.compute_until(self.now())
        self._clock.settle(wait=True, patience_s=None if is_complete else _HUNG_S)
        if not is_complete:
            self._durations.collect()
            return
        until = time.monotonic() + _WATCHDOG_S
        while time.monotonic() < until:
            self._durations.collect()
            if self._beside <= self._durations.known.keys():
                return
            time.sleep(0.05)


def num_nccl_calls(call: Call) -> int:
    """How many entries NCCL's flight recorder has for a call."""
    if listed := call.through_one_tensor:
        return 1 if len({tensor.shape for tensor in listed}) == 1 else len(listed)
    return len(call.contribution) if call.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) else 1


def _is_open(value: int) -> bool:
    return isinstance(value, Mark) and value.time_ns is None


def _is_there(loss: float | Callable[[], float]) -> bool:
    try:
        return not callable(loss) or bool(getattr(loss, "is_there", lambda: True)())
    except RuntimeError:  # of a GPU that has failed
        return False
