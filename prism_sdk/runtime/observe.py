"""The observing seam: every call runs on the script's own backend and is timed.

It adds no synchronisation: the completion of an asynchronous operation is dated only where the rank waited for it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.futures import DrivenFuture, install_futures
from prism_sdk.runtime.intercept import Seam
from prism_sdk.runtime.tracer import Tracer, now_ns
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
        wait = _timed_wait(inner, tracer, unit, call, posted_ns, self)
        super().__init__(wait, inner.is_completed, call.outputs, is_async=call.is_async)
        self._inner: Work | None = inner

    def _release(self) -> None:
        self._inner = None
        super()._release()

    def get_future(self) -> Any:
        """The backend's own future; the wait for it is made visible where that is possible."""
        inner = self._inner
        if inner is None or not hasattr(inner, "get_future"):
            return super().get_future()
        if torch._C._current_graph_task_id() != -1:
            wait_before_backward_ends(self)
            return inner.get_future()
        # waiting for it goes through the handle, for the times; completing it and its callbacks stay with the backend
        future = DrivenFuture(self.wait, lambda: False)
        inner.get_future().add_done_callback(lambda done: future.take(lambda real: real.value(), done))
        return future


def _timed_wait(
    inner: Work, tracer: Tracer, unit: int, call: Call, posted_ns: int, handle: TimedWork
) -> Callable[[timedelta | None], None]:
    is_async = call.is_async
    any_source = call.is_p2p and call.peer is None
    group = call.group

    def complete(timeout: timedelta | None) -> None:
        start = now_ns() if is_async else posted_ns
        blocked = not is_async or not inner.is_completed()
        if timeout:
            inner.wait(timeout)
        else:
            inner.wait()
        tracer.wait(unit, start, now_ns(), blocked=blocked)
        if any_source:
            handle.source = inner._source_rank()
            settle_any_source(tracer, unit, group, handle.source, call.tag or 0)

    return complete


def settle_any_source(tracer: Tracer, unit: int, group: GroupState, source: int, tag: int) -> None:
    """Fill in peer and seq of a receive from any source once it was matched with group rank `source`."""
    from prism_sdk.runtime import tracer as rows

    me, peer = group.ranks[group.group_rank], group.ranks[source]
    tracer.amend(unit, rows.PEER, peer)
    tracer.amend(unit, rows.SEQ, group.take_p2p_seq(peer, me, tag))


class ObserveSeam(Seam):
    """Pass through and time."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def install(self) -> None:
        install_futures()

    def group_created(self, group: GroupState) -> None:
        trace_group(self.tracer, group)

    def issue(self, call: Call) -> Any:
        posted = now_ns()
        seq = take_number(call)
        unit = self.tracer.communication(call, posted, seq)
        work = call.native()
        if work is None:  # it has waited itself (monitored_barrier; NCCL unless asynchronous)
            self.tracer.wait(unit, posted, now_ns(), blocked=True)
            return None
        return TimedWork(work, self.tracer, unit, call, posted)
