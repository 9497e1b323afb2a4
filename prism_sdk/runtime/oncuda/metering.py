"""The tracer of a recorded rank on a GPU: each step has the peak of the rank's device memory.

Responsible for whose memory a step's peak is of: the device's, once the rank has opened one, in place of the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prism_sdk.runtime.oncuda.peaks import PeakMeter
from prism_sdk.runtime.resident import ResidentMemory
from prism_sdk.runtime.tracer import Tracer
from prismtrace import ABSENT, TraceWriter

RESERVED_COLUMN = "prism.device_reserved_peak_bytes"
"""Named column of steps: the peak of what the allocator has reserved; `memory_peak_bytes` is of what it gave out."""


class MeteredTracer(Tracer):
    """As Tracer, with the device's memory."""

    def __init__(self, rank: int, writer: TraceWriter) -> None:
        resident = ResidentMemory()
        super().__init__(rank, writer, memory=lambda: ABSENT if torch.cuda.is_initialized() else resident())
        self._meter: PeakMeter | None = None
        self._peaks = (0, 0)
        self._reserved: dict[int, int] = {}  # step -> peak of reserved bytes

    def optimizer_ends(self) -> None:
        super().optimizer_ends()
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            self._meter = self._meter or PeakMeter()
            allocated, reserved = self._meter.take()
            self._peaks = max(allocated, self._peaks[0]), max(reserved, self._peaks[1])

    def _take_peak(self) -> int:
        resident = super()._take_peak()
        if self._meter is None:
            return resident
        (allocated, self._reserved[self.step]), self._peaks = self._peaks, (0, 0)
        return allocated

    def _more_of_steps(self, steps: Sequence[int]) -> dict[str, Any]:
        if not self._reserved:
            return {}
        reserved = [self._reserved.pop(step, ABSENT) for step in steps]
        return {RESERVED_COLUMN: np.array(reserved, dtype=np.int64)}
