"""Measures the peak of a rank's device memory in each step, unnoticed by the program, which has peaks of its own.

Responsible for reading and resetting the allocator's peaks and for giving the program those it would have read.
"""

from __future__ import annotations

from typing import Any

import torch


class PeakMeter:
    """torch keeps one peak, which anybody may reset; here there are two, the program's and the step's."""

    def __init__(self) -> None:
        bindings: Any = torch._C
        self._read, self._reset = bindings._cuda_memoryStats, bindings._cuda_resetPeakMemoryStats
        self._before: dict[int, dict[str, Any]] = {}  # device -> the program's statistics when a step ended
        bindings._cuda_memoryStats, bindings._cuda_resetPeakMemoryStats = self._program_reads, self._program_resets
        self._missed: dict[int, list[int]] = {}  # device -> peaks that the program's reset took from the step

    def take(self) -> tuple[int, int]:
        """Peaks of allocated and reserved bytes of the current device since this was last called."""
        device = torch.cuda.current_device()
        now = self._read(device)
        allocated, reserved = self._peaks(device, now)
        before = self._before.get(device)
        self._before[device] = now if before is None else _with_peaks(now, before)
        self._reset(device)
        self._missed.pop(device, None)
        return allocated, reserved

    def _peaks(self, device: int, now: dict[str, Any]) -> tuple[int, int]:
        missed = self._missed.get(device, [0, 0])
        peaks = (now[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes"))
        allocated, reserved = (max(pair) for pair in zip(peaks, missed, strict=True))
        return allocated, reserved

    def _program_reads(self, device: int) -> dict[str, Any]:
        now: dict[str, Any] = self._read(device)
        before = self._before.get(device)
        return now if before is None else _with_peaks(now, before)

    def _program_resets(self, device: int) -> None:
        self._missed[device] = list(self._peaks(device, self._read(device)))
        self._before.pop(device, None)
        self._reset(device)


def _with_peaks(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """`now` with the greater peak of the two, at every depth."""
    merged = dict(now)
    for name, value in now.items():
        other = before.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            merged[name] = _with_peaks(value, other)
        elif name == "peak" and isinstance(other, int):
            merged[name] = max(value, other)
    return merged
