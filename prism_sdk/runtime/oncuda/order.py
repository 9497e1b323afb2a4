"""Keeps the order of CUDA streams that NCCL keeps: when an operation may touch its tensors, and who sees the results.

Responsible for events and streams of one operation; the bytes are moved by whoever asks.

NCCL reads and writes on a stream of its own, after what the caller's stream had at the call, and `wait()` lets the
stream that is current then go on behind the results.  Here results come from the host, inside the wait, and are copied
on the stream that is current then.  So that stream first waits for what the caller's stream had at the call, and each
later wait, which may come from another stream, for the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.oncuda.scratch import nccl_scratch, place_scratch, results_of
from prismtrace.model import Op


class HostOrder:
    """One operation on the CPU, where things happen in the order of the program; inside `with` results are placed."""

    again: Callable[[], None] | None = None
    """What each wait after the first does."""

    def __init__(self, call: Call) -> None:
        self.results = call.outputs
        """What the work handle holds for as long as the program holds it."""
        self.scratch: list[torch.Tensor] = []
        """What NCCL would have allocated for it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class StreamOrder(HostOrder):
    """The place of one operation in the order of the streams of its device, and what NCCL would hold for it."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call, self._device = call, device
        self.scratch = nccl_scratch(call, device)
        self.results = results_of(call, self.scratch)
        self._issued: Any = self._mark()
        self._placed: Any = None
        self.again = self.see

    def _mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def __enter__(self) -> Self:
        """The results are about to be copied on the current stream."""
        torch.cuda.current_stream(self._device).wait_event(self._issued)
        return self

    def __exit__(self, *_: object) -> None:
        """They were given to the current stream."""
        place_scratch(self._call, self.scratch)
        self._placed = self._mark()
        self._call, self.scratch, self.results = None, [], []  # type: ignore[assignment]

    def see(self) -> None:
        """The current stream waits for the results, whichever stream they were copied on."""
        if self._placed is not None:
            torch.cuda.current_stream(self._device).wait_event(self._placed)


def device_of(call: Call) -> torch.device | None:
    """The CUDA device that a call's tensors are on; None for a call on the CPU."""
    for tensor in (*call.outputs, *call.contribution):
        return tensor.device if tensor.device.type == "cuda" else None
    return call.device if call.device is not None and call.device.type == "cuda" else None


def order_of(call: Call) -> HostOrder:
    """The order of a call that is about to start. A barrier over NCCL blocks the host until the stream is there."""
    device = device_of(call)
    if device is None:
        return HostOrder(call)
    if call.op is Op.BARRIER:
        torch.cuda.current_stream(device).synchronize()
    return StreamOrder(call, device)
