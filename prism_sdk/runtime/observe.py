"""The observing seam: every call runs on the script's own backend and is timed.

It adds no synchronisation: the completion of an asynchronous operation is dated only where the rank waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.coalescing import Blocks
from prism_sdk.runtime.eager import uncompiled
from prism_sdk.runtime.futures import DrivenFuture, install_futures
from prism_sdk.runtime.intercept import Seam
from prism_sdk.runtime.oncuda.order import device_of
from prism_sdk.runtime.oncuda.tracing import DeviceTracer, num_nccl_calls
from prism_sdk.runtime.outlines import OUTLINES, Outline
from prism_sdk.runtime.tracer import Tracer
from prism_sdk.runtime.work import PrismWork, keep_until_waited_for, wait_before_backward_ends
from prismtrace.model import ABSENT, Op, ProcessGroup

_SEND, _RECV = Op.SEND, Op.RECV


def take_number(call: Call) -> int:
    """The `seq` of a call: ordinal in its group, or ordinal of the message between two ranks under a tag."""
    return _take_number(call.group, call.op, call.peer, call.tag)


def _take_number(group: GroupState, op: Op, peer: int | None, tag: int | None) -> int:
    if op is not _SEND and op is not _RECV:
        return group.take_seq()
    if peer is None:
        return ABSENT  # known once the message is matched
    ranks = group.ranks
    if not 0 <= peer < len(ranks):
        return ABSENT  # the backend refuses it
    mine, other = ranks[group.group_rank], ranks[peer]
    source, destination = (mine, other) if op is _SEND else (other, mine)
    return group.take_p2p_seq(source, destination, tag or 0)


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

    def __init__(
        self, inner: Work, tracer: Tracer, unit: int, posted_ns: int, *, is_async: bool,
        outputs: Sequence[torch.Tensor], on_device: bool, any_source: tuple[GroupState, int] | None = None,
    ) -> None:  # fmt: skip
        """`any_source`: group and tag of a receive that nobody knows the sender of."""
        Work.__init__(self)  # one of these is on the way of every call: what follows is all that it needs
        self.waits_for: Any = inner
        self.unit = unit
        self._inner: Work | None = inner
        self._tracer = tracer
        self._posted_ns = posted_ns
        self._is_async = is_async
        self._outputs = outputs
        self._on_device = on_device
        self._any_source = any_source
        self._complete = _TIMED
        self._poll = inner.is_completed
        keep_until_waited_for(self)

    @classmethod
    def of(cls, inner: Work, tracer: Tracer, unit: int, call: Call, posted_ns: int) -> TimedWork:
        """The handle of a call that `inner` stands for."""
        any_source = (call.group, call.tag or 0) if call.is_p2p and call.peer is None else None
        return cls(inner, tracer, unit, posted_ns, is_async=call.is_async, outputs=call.outputs,
                   on_device=device_of(call) is not None, any_source=any_source)  # fmt: skip

    def _run(self, complete: Callable[[timedelta | None], None], timeout: timedelta | None) -> None:
        tracer, inner = self._tracer, self._inner
        assert inner is not None
        if self._is_async:
            start = tracer.now()
            blocked = not self._on_device and not inner.is_completed()  # of a stream nobody knows it yet
        else:
            start, blocked = self._posted_ns, True
        if timeout:
            inner.wait(timeout)
        else:
            self.waits_for.wait()
        tracer.wait(self.unit, start, tracer.now(), blocked=blocked)
        if self._any_source is not None:
            self.source = inner._source_rank()
            settle_any_source(tracer, self.unit, self._any_source[0], self.source, self._any_source[1])

    @uncompiled
    def _wait(self, timeout: timedelta | None = None) -> None:
        """Each wait makes the stream that is current then wait, so on a GPU the backend's handle is needed again."""
        if self._complete is None and self._inner is not None and self._error is None:
            self._inner.wait()
        PrismWork._wait(self, timeout)

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


def _timed(timeout: timedelta | None) -> None:
    """Stands for the completion of a `TimedWork`, which knows by itself what to do."""
    raise AssertionError


_TIMED: Callable[[timedelta | None], None] = _timed


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
        self._device = tracer if isinstance(tracer, DeviceTracer) else None
        self._blocks = Blocks(tracer)

    def install(self) -> None:
        install_futures()
        self._blocks.install()

    def group_created(self, group: GroupState) -> None:
        trace_group(self.tracer, group)

    def parse(self, name: str, group: GroupState, native: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        outliner = OUTLINES.get(name)
        outline = None if outliner is None else outliner(group, args)
        return super().parse(name, group, native, args) if outline is None else (group, native, outline)

    def issue(self, call: Any) -> Any:
        """Of a `Call`, or of group, native call and outline."""
        group, native, outline = call if type(call) is tuple else (call.group, call.native, _outline_of(call))
        (op, reduce_op, dtype, num_in, num_out, other, tag, is_async, splits_in, splits_out, outputs, num_calls,
         on_device) = outline  # fmt: skip
        tracer = self.tracer
        device = self._device if on_device else None
        posted, beside = (tracer.now(), None) if device is None else device.points()
        seq = _take_number(group, op, other, tag)
        unit = tracer.post(
            posted, beside, group, seq, op, reduce_op, dtype, num_in, num_out, other, tag, is_async, splits_in,
            splits_out,
        )  # fmt: skip
        work = native()
        if work is None and not self._blocks.add(group.name, unit, beside=beside):
            # it has waited itself (monitored_barrier; NCCL unless asynchronous: on the program's stream)
            if beside is not None:
                assert device is not None
                device.ends_beside(unit, beside)
            else:
                tracer.wait(unit, posted, tracer.now(), blocked=True, is_of_main=device is not None)
        if device is not None:
            in_block = self._blocks.has_open(group.name)
            device.expect(unit, group, op, num_calls, is_async=is_async, in_block=in_block)
        if work is None:
            return None
        any_source = (group, tag or 0) if other is None and op is _RECV else None
        timed = TimedWork(work, tracer, unit, posted, is_async=is_async, outputs=outputs, on_device=on_device,
                          any_source=any_source)  # fmt: skip
        self._blocks.add(group.name, unit, work=timed)
        return timed


def _outline_of(call: Call) -> Outline:
    return (
        call.op, call.reduce_op, call.dtype, call.num_elements_in, call.num_elements_out, call.other_rank, call.tag,
        call.is_async, call.splits_in, call.splits_out, call.outputs, num_nccl_calls(call), device_of(call) is not None,
    )  # fmt: skip
