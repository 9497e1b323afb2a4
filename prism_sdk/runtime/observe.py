"""The observing seam: every call runs on the script's own backend and is timed.

It adds no synchronisation: the completion of an asynchronous operation is dated only where the rank waited for it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.futures import DrivenFuture, install_futures
from prism_sdk.runtime.intercept import Seam
from prism_sdk.runtime.oncuda.order import device_of
from prism_sdk.runtime.oncuda.tracing import DeviceTracer
from prism_sdk.runtime.tracer import Tracer
from prism_sdk.runtime.work import PrismWork, wait_before_backward_ends
from prismtrace.model import ABSENT, ProcessGroup


def take_number(call: Call) -> int:
    """The `seq` of a call: ordinal in its group, or ordinal of the message between two ranks under a tag."""
    group = call.group
    if not call.is_p2p:
        return group.take_seq()
    if call.peer is None:
        return ABSENT  # known once the message is matched
    if not 0 <= call.peer < len(group.ranks):
        return ABSENT  # the backend refuses it
    me, peer = group.ranks[group.group_rank], group.ranks[call.peer]
    source, destination = (me, peer) if call.op.name == "SEND" else (peer, me)
    return group.take_p2p_seq(source, destination, call.tag or 0)


def trace_group(tracer: Tracer, group: GroupState) -> None:
    """Put a process group into the trace."""
    tracer.add_group(
        ProcessGroup(
            group_id=group.group_id, name=group.name, description=group.description, backend=group.backend,
            ranks=group.ranks,
        )
    )  # fmt: skip


class TimedWork(PrismWork):
    """Wraps a backend's own work handle and dates the waits for it."""

    def __init__(self, inner: Work, tracer: Tracer, unit: int, call: Call, posted_ns: int) -> None:
        on_device = device_of(call) is not None
        wait = _timed_wait(inner, tracer, unit, call, posted_ns, self, on_device)
        super().__init__(wait, inner.is_completed, call.outputs, is_async=call.is_async)
        self._inner: Work | None = inner
        self._on_device = on_device
        self.waits_for: Any = inner
        self.unit = unit

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Each wait makes the stream that is current then wait, so on a GPU the backend's handle is needed again."""
        if self._complete is None and self._inner is not None and self._error is None:
            self._inner.wait()
        return super().wait(timeout)

    def _release(self) -> None:
        self.waits_for = None
        if not self._on_device:
            self._inner = None
        super()._release()

    def give_up(self) -> None:
        self._on_device = False
        super().give_up()

    def __del__(self) -> None:
        if self._complete is None:
            self._inner = None
        super().__del__()

    def get_future(self) -> Any:
        """The backend's own future; the wait for it is made visible where that is possible.

        Who waits for the future does not wait for the handle: NCCL's then holds its tensors for longer, and so here.
        """
        inner = self._inner
        if inner is None or not hasattr(inner, "get_future"):
            return super().get_future()
        real = inner.get_future()

        def wait() -> None:
            if self._on_device and self._complete is not None:
                self.waits_for = real
            self.wait()

        if torch._C._current_graph_task_id() != -1:
            wait_before_backward_ends(wait)
            return real
        # waiting for it goes through the handle, for the times; completing it and its callbacks stay with the backend
        future = DrivenFuture(wait, lambda: False)
        real.add_done_callback(lambda done: future.take(lambda real: real.value(), done))
        return future


def _timed_wait(
    inner: Work, tracer: Tracer, unit: int, call: Call, posted_ns: int, handle: TimedWork, on_device: bool
) -> Callable[[timedelta | None], None]:
    is_async, tag = call.is_async, call.tag or 0
    any_source = call.is_p2p and call.peer is None
    group = call.group

    def complete(timeout: timedelta | None) -> None:
        start = tracer.now() if is_async else posted_ns
        blocked = not is_async or (not on_device and not inner.is_completed())  # of a stream nobody knows it yet
        if timeout:
            inner.wait(timeout)
        else:
            handle.waits_for.wait()
        tracer.wait(unit, start, tracer.now(), blocked=blocked)
        if any_source:
            handle.source = inner._source_rank()
            settle_any_source(tracer, unit, group, handle.source, tag)

    return complete


def settle_any_source(tracer: Tracer, unit: int, group: GroupState, source: int, tag: int) -> None:
    """Fill in peer and seq of a receive from any source once it was matched with group rank `source`."""
    from prism_sdk.runtime import rows

    me, peer = group.ranks[group.group_rank], group.ranks[source]
    tracer.amend(unit, rows.PEER, peer)
    tracer.amend(unit, rows.SEQ, group.take_p2p_seq(peer, me, tag))


class ObserveSeam(Seam):
    """Pass through and time."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._blocks: dict[str, list[TimedWork]] = {}  # group name -> what is coalesced in it now

    def install(self) -> None:
        install_futures()
        self._follow_blocks()

    def _follow_blocks(self) -> None:
        """What is coalesced explicitly is waited for by one handle, which the backend makes at the end of the block."""
        group_class: Any = dist.ProcessGroup
        start, end = group_class._start_coalescing, group_class._end_coalescing

        def start_coalescing(group: Any, device: torch.device) -> None:
            start(group, device)
            self._blocks[group.group_name] = []

        def end_coalescing(group: Any, device: torch.device) -> Any:
            works = self._blocks.pop(group.group_name, [])
            inner, ended = end(group, device), self.tracer.now()
            if inner is not None:
                return TimedBlock(inner, self.tracer, works)
            for work in works:  # they ran on the program's own stream
                work.give_up()
                self.tracer.wait(work.unit, ended, ended, blocked=True)
            return None

        group_class._start_coalescing, group_class._end_coalescing = start_coalescing, end_coalescing

    def group_created(self, group: GroupState) -> None:
        trace_group(self.tracer, group)

    def issue(self, call: Call) -> Any:
        tracer = self.tracer
        posted = tracer.now()
        unit = tracer.communication(call, posted, take_number(call))
        device = tracer if isinstance(tracer, DeviceTracer) and device_of(call) is not None else None
        work = call.native()
        block = self._blocks.get(call.group.name) if self._blocks else None
        if device is not None:
            device.runs(unit, call, in_block=block is not None)
        if work is None:  # it has waited itself (monitored_barrier; NCCL unless asynchronous: on the program's stream)
            if device is not None and (beside := device.beside()) is not None:
                device.ends_beside(unit, beside)
            else:
                tracer.wait(unit, posted, tracer.now(), blocked=True)
            return None
        timed = TimedWork(work, self.tracer, unit, call, posted)
        if block is not None:
            block.append(timed)
        return timed


class TimedBlock(PrismWork):
    """The backend's handle of a coalesced block; waiting for it is waiting for each of its operations."""

    def __init__(self, inner: Work, tracer: Tracer, works: list[TimedWork]) -> None:
        units = [work.unit for work in works]
        for work in works:
            work.give_up()  # nobody waits for it alone

        def complete(timeout: timedelta | None) -> None:
            start = tracer.now()
            inner.wait()
            end = tracer.now()
            for unit in units:
                tracer.wait(unit, start, end, blocked=False)
                start = end

        def again() -> None:
            inner.wait()

        super().__init__(complete, inner.is_completed, [], again=again)
