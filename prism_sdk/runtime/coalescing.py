"""Follows what a program coalesces explicitly, as pipelines do with `batch_isend_irecv`.

Responsible for the one handle that such a block of operations has; the operations are the business of the mode.  NCCL's
backend gives none for each of them: what is not waited for where it was asked for is waited for at the block's handle.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from prism_sdk.runtime.tracer import Tracer
from prism_sdk.runtime.work import PrismWork, outstanding_works

if TYPE_CHECKING:
    from prism_sdk.runtime.observe import TimedWork


class Part(NamedTuple):
    """An operation in a block."""

    unit: int
    work: TimedWork | None = None
    beside: Any = None


class Blocks:
    """What is coalesced explicitly is waited for by one handle, which the backend makes at the end of the block."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[str, list[Part]] = {}  # group name -> what is coalesced in it now

    def has_open(self, group_name: str) -> bool:
        """Whether what the group is asked for now is coalesced."""
        return group_name in self._open

    def add(self, group_name: str, unit: int, *, work: TimedWork | None = None, beside: Any = None) -> bool:
        """Whether an operation belongs to an open block of the group; it is waited for with that then.

        `beside`: the mark of the stream beside the main one that it was asked for on.
        """
        parts = self._open.get(group_name)
        if parts is not None:
            parts.append(Part(unit, work, beside))
        return parts is not None

    def install(self, *, is_real: Callable[[tuple[int, ...]], bool] | None = None) -> None:
        """Follow the blocks of all groups; or of those whose ranks are `is_real`, and make lists of the others'."""
        group_class: Any = dist.ProcessGroup
        start, end = group_class._start_coalescing, group_class._end_coalescing
        if is_real is not None:
            install_lists()
        start_list, end_list = group_class._start_coalescing, group_class._end_coalescing

        def start_coalescing(group: Any, device: torch.device) -> None:
            if is_real is None or (is_real(tuple(dist.get_process_group_ranks(group))) and _can(group, device)):
                start(group, device)
                self._open[group.group_name] = []
            else:
                start_list(group, device)

        def end_coalescing(group: Any, device: torch.device) -> Any:
            parts = self._open.pop(group.group_name, None)
            if parts is None and is_real is not None:
                return end_list(group, device)
            inner, ended = end(group, device), self._tracer.now()
            if inner is not None:
                return TimedBlock(inner, self._tracer, parts or [])
            for part in parts or []:  # they ran on the program's own stream
                if part.work is not None:
                    part.work.give_up()
                if part.beside is None:
                    self._tracer.wait(part.unit, ended, ended, blocked=True)
                else:
                    self._tracer.ends_beside(part.unit, part.beside)  # type: ignore[attr-defined]  # of DeviceTracer
            return None

        group_class._start_coalescing, group_class._end_coalescing = start_coalescing, end_coalescing


def _can(group: Any, device: torch.device) -> bool:
    return bool(group._get_backend(device).supports_coalescing)


class TimedBlock(PrismWork):
    """The backend's handle of a coalesced block; waiting for it is waiting for each of its operations."""

    def __init__(self, inner: Work, tracer: Tracer, parts: list[Part]) -> None:
        for part in parts:
            if part.work is not None:
                part.work.give_up()  # nobody waits for it alone

        def complete(timeout: timedelta | None) -> None:
            start = tracer.now()
            inner.wait()
            end = tracer.now()
            for part in parts:  # a recording waits for one after the other, with rows of computing between
                tracer.wait(part.unit, start, end, blocked=False)
                start = end = tracer.now()

        def again() -> None:
            inner.wait()

        super().__init__(complete, inner.is_completed, [], again=again)


def install_lists() -> None:
    """Make explicit coalescing a list of operations: torch's fake backend would drop them (it does so silently)."""
    group_class: Any = dist.ProcessGroup
    open_lists: dict[str, list[Any]] = {}

    def start(self: Any, device: torch.device) -> None:
        open_lists[self.group_name] = outstanding_works()

    def end(self: Any, device: torch.device) -> Any:
        before = {id(work) for work in open_lists.pop(self.group_name, [])}
        return _Several([work for work in outstanding_works() if id(work) not in before])

    group_class._start_coalescing = start
    group_class._end_coalescing = end


class _Several(PrismWork):
    """The work of a coalesced block: all of its operations."""

    def __init__(self, works: list[PrismWork]) -> None:
        def complete(timeout: timedelta | None) -> None:
            for work in works:
                work.wait(timeout)

        super().__init__(complete, lambda: all(work.is_completed() for work in works), [], late_wait=lambda: None)
        self.kept = [one for work in works for one in work.kept]  # who waits for its future waits for no handle
        for work in works:
            work.kept = ()
