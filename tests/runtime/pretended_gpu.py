"""A GPU without one: streams with clocks of their own under torch.cuda's names, and what NCCL's recorder says.

It holds no test.
"""

from __future__ import annotations

import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism_sdk.runtime.oncuda import clock


class Gpu:
    """A GPU with a clock of its own: events are passed when the queue before them is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ppm: float = 0.0) -> None:
        self.host = time.monotonic_ns() + 10_000_000_000  # after the rank has started
        self.busy: dict[int, int] = defaultdict(int)  # stream -> host time at which what was launched on it is done
        self.ppm = ppm
        self.stream = 0  # address of the stream that is current
        gpu = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.at = -1

            def record(self, stream: Any = None) -> None:
                self.at = max(gpu.host, gpu.busy[gpu.address(stream)])

            def query(self) -> bool:
                return self.at <= gpu.host

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) * (1 + gpu.ppm / 1e6) / 1e6

        class ProgramEvent(Event):
            def record(self, stream: Any = None) -> None:
                super().record(stream)

            def wait(self, stream: Any = None) -> None:
                gpu.busy[gpu.address(stream)] = max(gpu.busy[gpu.address(stream)], self.at)

        self.event = ProgramEvent
        monkeypatch.setattr(torch.cuda, "Event", ProgramEvent)
        monkeypatch.setattr(clock, "Event", Event)
        monkeypatch.setattr(clock, "current_device", lambda: 0)
        monkeypatch.setattr(clock, "current_stream", lambda _device: self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=self.stream))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(clock.time, "monotonic_ns", lambda: self.host)

    def address(self, stream: Any) -> int:
        return self.stream if stream is None else int(stream.cuda_stream)

    @property
    def busy_until(self) -> int:
        return self.busy[self.stream]

    def launch(self, duration: int) -> None:
        self.host += 1_000
        self.busy[self.stream] = max(self.host, self.busy_until) + duration

    def synchronize(self) -> None:
        self.host = max(self.host, *self.busy.values())


def entry(record: int, name: str, milliseconds: float | None = None, group: str = "0") -> dict[str, Any]:
    name = f"nccl:{name}"
    return {"record_id": record, "process_group": (group, "x"), "profiling_name": name, "duration_ms": milliseconds}
