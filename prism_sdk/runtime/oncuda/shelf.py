"""Keeps tensors of operations for as long as torch's NCCL backend keeps them, so that memory peaks are the same.

Responsible for when they are let go of; who waits for what is work.py's.

As of torch 2.9 to 2.14 (ProcessGroupNCCL): an asynchronous operation holds its inputs and outputs until its *handle* is
waited for.  Who waits for its future only, as DDP does, leaves them to the backend's watchdog.  That looks every 100 ms
for operations that are done; the next operation of the same group then lets go of what it has seen.
`benchmarks/gpu_alone.py shelf` shows it.  Tensors of messages it does not hold: it tells the allocator which stream
uses them (`record_stream`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.oncuda.scratch import uses_nccl

DEVICE_TYPE = "cuda"

SEEN_NS = 50_000_000
"""After so long the watchdog, which looks every 100 ms, has more likely than not seen that an operation is done."""


class Kept:
    """What is held of one operation."""

    def __init__(self, tensors: Sequence[torch.Tensor], ended: Callable[[], int | None] | None) -> None:
        self.tensors: list[torch.Tensor] = list(tensors)
        self.ended = ended

    def drop(self) -> None:
        """Somebody has waited for the handle."""
        self.tensors = []


class Shelf:
    """What NCCL's backend would hold of the operations of one rank."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Kept]] = {}  # by group
        self._lock = threading.RLock()  # threads of a program may communicate, and so may what ends with a tensor
        self._paused_ns = 0

    def now(self) -> int:
        """The rank's own time in ns: the host's, without what Prism took to bring results."""
        return time.monotonic_ns() - self._paused_ns

    def brought(self, kept: Sequence[Kept], took_ns: int = 0) -> None:
        """The results of an operation are in place; bringing them took a time that a real job would not spend."""
        self._paused_ns += took_ns
        now = self.now()
        for one in kept:
            one.ended = lambda: now

    def add(
        self, call: Call, scratch: Sequence[torch.Tensor] = (), *, ended: Callable[[], int | None] | None = None
    ) -> tuple[Kept, ...]:
        """Let go of what was seen to be done, then hold what `call` works on: nothing, where its backend would not.

        Args:
            call: the operation that was just asked for
            scratch: what NCCL's backend has allocated for it
            ended: when it was done, on the clock of `now`, or None while it is not; without it `brought` tells
        """
        if not uses_nccl(call.group.backend):
            return ()
        tensors = [*_on_device(call), *scratch]
        new = (Kept(tensors, ended),) if tensors and call.is_async and not call.is_p2p else ()
        group_id = call.group.group_id
        with self._lock:
            now, known = self.now(), self._kept.get(group_id, ())
            left = [one for one in known if one.tensors and not _is_seen(one, now)]
            if left or new or known:
                self._kept[group_id] = [*left, *new]
        return new

    def forget(self, group_id: int) -> None:
        """A group was destroyed: what is done is let go of; what is under way stays, for nobody will ask for more."""
        with self._lock:
            now = self.now() + SEEN_NS
            known = self._kept.get(group_id, ())
            self._kept[group_id] = [one for one in known if one.tensors and not _is_seen(one, now)]


def forget_message(call: Call) -> None:
    """Over NCCL nobody but the program holds the tensor of a message, even while it is on its way."""
    if call.is_p2p and uses_nccl(call.group.backend) and _on_device(call):
        call.forget_tensors()


def _on_device(call: Call) -> list[torch.Tensor]:
    return [one for one in (*call.contribution, *call.outputs) if one.device.type == DEVICE_TYPE]


def _is_seen(kept: Kept, now_ns: int) -> bool:
    ended = None if kept.ended is None else kept.ended()
    if ended is None or now_ns - ended < SEEN_NS:
        return False
    kept.drop()
    return True
