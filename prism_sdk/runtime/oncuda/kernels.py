"""Records the kernels of chosen steps through torch's profiler, as events on tracks of the device's streams.

Responsible for turning the profiler on and off at the ends of steps and for the rows; what the kernels of two runs have
to do with each other is graph/kernels.py's.  It has no part in the times of units.

Each step is a session of its own between two waits for the GPU: a kernel's step is then known without comparing clocks,
and the GPU is as idle at the start of the step in a real run as in an emulated one.  Recorded steps and those after
them are longer for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.config import StepRange
from prismtrace import ABSENT, EventKind, TraceWriter, TrackKind

STEP_COLUMN = "prism.step"
"""Named column of events: the step in which a kernel ran."""

_CATEGORIES = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}  # by the first word of a name, as Kineto writes it


class KernelRecorder:
    """One rank's kernels, from `at_boundary` to `at_boundary`."""

    def __init__(self, rank: int, steps: StepRange) -> None:
        """Raises UnsupportedError where torch's profiler sees no kernels."""
        import torch.profiler

        if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
            raise UnsupportedError("--kernels without a GPU", rank=rank, hint="leave --kernels out")
        self._rank, self._steps = rank, steps
        self._session: Any = None
        self._step = -1
        self._offset_ns = 0
        self._done: list[tuple[int, int, Any]] = []  # step, real time less the trace's, the profiler's results
        self._gave_up = False

    def at_boundary(self, step: int) -> None:
        """`step` begins here: the optimizer has just made the last step of the one before."""
        if step == self._step or torch.cuda.is_current_stream_capturing():
            return
        self._stop()
        if step in self._steps and not self._gave_up:
            self._start(step)

    def _start(self, step: int) -> None:
        torch.cuda.synchronize()
        session = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        try:
            session.start()
        except RuntimeError as error:  # the program's own profiler is on, say
            self._gave_up = True
            sys.stderr.write(f"prism: rank {self._rank}: kernels are not recorded: {error}\n")
            return
        self._session, self._step = session, step
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def _stop(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        torch.cuda.synchronize()
        try:
            session.stop()
        except RuntimeError as error:
            sys.stderr.write(f"prism: rank {self._rank}: kernels of step {self._step} are lost: {error}\n")
            return
        self._done.append((self._step, self._offset_ns, session.profiler.kineto_results))

    def write(self, writer: TraceWriter, *, is_complete: bool = True) -> int:
        """End what is open and add all rows to the trace; returns how many kernels there are.

        Where the program is not complete, what is open is given up: to end it the GPU would have to come to its end.
        """
        if is_complete:
            self._stop()
        self._session = None
        done, self._done = self._done, []
        events = [(step, offset, event) for step, offset, results in done for event in device_events(results.events())]
        if events:
            _write(writer, self._rank, events)
        return len(events)


def device_events(events: Sequence[Any]) -> list[Any]:
    """Of the profiler's events those that a device ran."""
    return [event for event in events if "CUDA" in str(event.device_type())]


def _write(writer: TraceWriter, rank: int, events: list[tuple[int, int, Any]]) -> None:
    streams = sorted({(event.device_index(), event.device_resource_id()) for _, _, event in events})
    num = len(streams)
    first = writer.add_tracks(rank, {
        "name": [f"stream {stream}" for _, stream in streams], "process": [f"rank {rank}"] * num,
        "kind": np.full(num, int(TrackKind.DEVICE_STREAM)), "process_id": np.full(num, ABSENT),
        "thread_id": np.full(num, ABSENT), "device": np.array([device for device, _ in streams]),
        "stream": np.array([stream for _, stream in streams]),
    })  # fmt: skip
    numbers = {stream: first + number for number, stream in enumerate(streams)}
    names = [event.name() for _, _, event in events]
    start = np.array([event.start_ns() - offset for _, offset, event in events], dtype=np.int64)
    writer.add_events(rank, {
        "name": names, "category": [_CATEGORIES.get(name.partition(" ")[0], "kernel") for name in names],
        "kind": np.full(len(events), int(EventKind.SPAN)),
        "track": np.array([numbers[event.device_index(), event.device_resource_id()] for _, _, event in events]),
        "start_ns": start, "end_ns": start + np.array([event.duration_ns() for _, _, event in events], dtype=np.int64),
        "correlation_id": np.array([event.correlation_id() for _, _, event in events], dtype=np.int64),
        STEP_COLUMN: np.array([step for step, _, _ in events], dtype=np.int64),
    })  # fmt: skip
