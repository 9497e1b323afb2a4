"""The seam of a slice on a GPU: ranks run their steps on the device, communication with virtual ranks is stood in for.

Responsible for keeping the streams busy as the job would; times are the device tracer's, and what follows from them the
calibration strategy's.

Nothing may make the host wait for the device, or the stream runs dry and what is measured is the cost of launching.  So
results are made on the device where they are large numbers: a rank takes its own contribution for everybody's.  What
may steer the program (integers, small tensors, what only others know) is the recorded value, through pinned memory and
without looking at what this rank contributes.  A kernel holds the stream for the transfer of the graph, once an earlier
pass has shown it also for the wait for other ranks before that, and takes what NCCL's would take from computing beside
it; so the host gets as far ahead as in the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prism_sdk.runtime.calls import COMBINED, Call
from prism_sdk.runtime.emulate import EmulateSeam
from prism_sdk.runtime.futures import is_in_background
from prism_sdk.runtime.manifest import Expected
from prism_sdk.runtime.observe import settle_any_source
from prism_sdk.runtime.oncuda.filling import SMALL_BYTES, make_up
from prism_sdk.runtime.oncuda.occupying import Occupier, blocks_of
from prism_sdk.runtime.oncuda.order import device_of
from prism_sdk.runtime.oncuda.scratch import nccl_scratch, uses_nccl
from prism_sdk.runtime.oncuda.staging import flat_bytes
from prism_sdk.runtime.oncuda.tracing import DeviceTracer
from prism_sdk.runtime.tensors import memory_of
from prism_sdk.runtime.tracer import now_ns
from prism_sdk.runtime.work import PrismWork
from prismtrace import ABSENT, GraphKind, Op, TraceReader, UnitKind

_MOST_PINNED_BYTES = 4 << 30


def held_ns(times: Path | None, rank: int) -> NDArray[np.int64]:
    """For how long each operation of a rank keeps its stream, the wait for others included, by a calibrated graph.

    That is from where the program has come to it, and what its group was asked for before it is over. Empty without
    such a graph.
    """
    if times is None:
        return np.zeros(0, np.int64)
    with TraceReader(times) as reader:
        if reader.graph_kind is not GraphKind.CALIBRATED or rank not in reader.ranks:
            return np.zeros(0, np.int64)
        units = reader.units(rank, columns=["kind", "start_ns", "end_ns", "group_id", "is_async"])
    found = np.zeros(len(units), np.int64)
    is_open = np.isin(units.kind, (UnitKind.COMPUTE, UnitKind.WAIT)) | (units.end_ns == ABSENT)
    free_from: dict[int, int] = {}  # group -> when its stream is free again
    for row in np.flatnonzero(~is_open).tolist():
        group, begin, end = int(units.group_id[row]), int(units.start_ns[row]), int(units.end_ns[row])
        if units.is_async[row]:  # else it has the program's own stream
            begin = max(begin, free_from.get(group, begin))
            free_from[group] = max(begin, end)
        found[row] = max(end - begin, 0)
    return found


class SliceSeam(EmulateSeam):
    """Elides what virtual ranks take part in; among the ranks of the slice communication is real."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lanes: dict[int, torch.cuda.Stream] = {}  # group -> the stream that stands for NCCL's
        self._occupier = Occupier(num_blocks=blocks_of(self.facts.options.get("occupy")))
        self._firsts = FirstValues()

    def _holds_streams(self) -> bool:
        return False  # nothing is released by the graph's times

    def issue(self, call: Call) -> Any:
        device = device_of(call)
        if device is None:
            return super().issue(call)
        posted, _, unit, one, moved = self.begin(call)
        self.cursor.stand_ins.clear()
        if call.is_p2p and call.peer is None:
            call.peer = call.group.ranks.index(one.peer or 0)
            settle_any_source(self.tracer, unit, call.group, call.peer, call.tag or 0)
        if one.stream is None:
            if isinstance(self.tracer, DeviceTracer) and len(call.group.ranks) > 1 and uses_nccl(call.group.backend):
                self.tracer.runs(unit, call, in_block=self._blocks.has_open(call.group.name))
            return self._issue_real(call, unit, posted)
        handle = self.engine.post(one.stream, one.seq, now_ns(), shift=self.cursor.shift_of(one))
        transfer_ns = dict(self.engine.plan.members(handle[0])).get(self.spec.rank, 0)
        return self._stand_in(call, one, moved, unit, posted, transfer_ns, device)

    def _stand_in(
        self, call: Call, one: Expected, moved: int, unit: int, posted: int, transfer_ns: int, device: torch.device
    ) -> PrismWork:  # fmt: skip
        if call.op is Op.BARRIER:
            torch.cuda.current_stream(device).synchronize()  # as over NCCL
        current = torch.cuda.current_stream(device)
        lane = current
        if call.is_async:
            if call.group.group_id not in self._lanes:
                self._lanes[call.group.group_id] = torch.cuda.Stream(device)
            lane = self._lanes[call.group.group_id]
            lane.wait_stream(current)
        scratch = nccl_scratch(call, device)
        with torch.cuda.stream(lane):
            held_ns = int(self._held_ns[one.unit_index]) if one.unit_index < len(self._held_ns) else 0
            self._occupier.occupy(transfer_ns, wait_ns=held_ns - transfer_ns, call=call)
            self._give(call, one, moved)
        done = torch.cuda.Event()
        done.record(lane)
        held = [scratch]

        def again() -> None:
            stream = torch.cuda.current_stream(device)
            if stream != lane:
                stream.wait_event(done)

        def complete(timeout: timedelta | None) -> None:
            start = self.tracer.now() if call.is_async else posted
            again()
            held.clear()
            if not is_in_background():
                self.tracer.wait(unit, start, self.tracer.now(), blocked=False)

        work = PrismWork(complete, done.query, call.outputs, is_async=call.is_async, again=again,
                         late_wait=self._late_wait(unit))  # fmt: skip
        work.source = -1 if call.peer is None else call.peer
        if call.op is Op.BARRIER and not call.is_async:
            work.wait()
        return work

    @cached_property
    def _held_ns(self) -> NDArray[np.int64]:
        return held_ns(self.facts.times, self.spec.rank)

    def _late_wait(self, unit: int) -> Callable[[], None]:
        return lambda: self.tracer.wait(unit, self.tracer.now(), self.tracer.now(), blocked=False)

    def summary(self) -> dict[str, object]:
        return {**super().summary(), "occupied_by": self._occupier.kind or "nothing"}

    # -- values -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _give(self, call: Call, one: Expected, moved: int) -> None:
        """Put results in place on the current stream."""
        if not is_large_number(call):
            if one.sources:
                self._give_recorded(call, one, moved)
            else:
                if call.op is Op.RECV:  # this rank has nothing of its own for it
                    make_up(call.outputs)
                else:
                    give_own(call)
                self.num_without_values += bool(call.deliveries or call.receive_tensors)
            return
        if one.sources:
            self.pool.announce(one.first_item + moved)
            self.pool.release(one.first_item + moved, len(one.sources))
        give_own(call)

    def _give_recorded(self, call: Call, one: Expected, moved: int) -> None:
        first = one.first_item + moved
        self.pool.announce(first)
        is_large = sum(tensor.nbytes for tensor in call.outputs) > SMALL_BYTES
        # not the tracer's step, which changes some operations later where they are asked for ahead
        key = self._firsts.next(call, one, step=self.cursor.step_of(one))
        known = self._firsts.known(key) if is_large else None
        by_source: dict[int, memoryview] = {}
        if known is None:
            by_source = dict(zip(one.sources, self.pool.take(first, len(one.sources)), strict=True))
        placed: list[torch.Tensor | None] = []
        for number, (tensor, source, offset) in enumerate(_pieces(call, one)):
            pinned = None if known is None else known[number]
            if pinned is not None:
                tensor.data.copy_(pinned.view(tensor.shape), non_blocking=True)
            elif source in by_source:
                pinned = place(tensor, by_source[source][offset : offset + tensor.nbytes])
            else:
                _copy_own(call, tensor, offset)
            placed.append(pinned)
        if is_large and known is None:
            self._firsts.keep(key, placed)
        self.pool.release(first, len(one.sources))


class FirstValues:
    """Large values that only others know, in pinned memory: call by call every step has those of the first one.

    They are to be such as the job has: what a gradient is multiplied with, and how large it is, decides how much power
    the products take, and so the GPU's clock.  Beyond a limit a call has those of the first one like it.
    """

    def __init__(self, limit_bytes: int = _MOST_PINNED_BYTES) -> None:
        self._limit, self._held_bytes = limit_bytes, 0
        self._values: dict[tuple[Any, ...], list[torch.Tensor | None]] = {}
        self._step = -1
        self._num_alike: Counter[tuple[Any, ...]] = Counter()  # calls of this step

    def next(self, call: Call, one: Expected, *, step: int) -> tuple[Any, ...]:
        """What identifies the step's next call: what it does, and its place among the step's calls that do the same."""
        if step != self._step:
            self._step = step
            self._num_alike.clear()
        alike = (call.group.group_id, one.op, one.peer, call.num_elements_in, call.num_elements_out)
        self._num_alike[alike] += 1
        return (*alike, self._num_alike[alike])

    def known(self, key: tuple[Any, ...]) -> list[torch.Tensor | None] | None:
        """The values of each of its tensors, None for this rank's own; None: to be read."""
        found = self._values.get(key)
        if found is None and self._held_bytes >= self._limit:
            found = self._values.get((*key[:-1], 1))
        return found

    def keep(self, key: tuple[Any, ...], values: list[torch.Tensor | None]) -> None:
        """Remember what was read."""
        self._values[key] = values
        self._held_bytes += sum(0 if one is None else one.nbytes for one in values)


def is_large_number(call: Call) -> bool:
    """Whether the values of a call are numbers that steer nothing, and this rank has some of its own in their place."""
    tensors = [tensor for tensor in (*call.outputs, *call.contribution) if tensor.numel()]
    return (
        call.has_contribution
        and bool(tensors)
        and all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        and max(sum(t.nbytes for t in call.outputs), sum(t.nbytes for t in call.contribution)) > SMALL_BYTES
    )


def place(tensor: torch.Tensor, values: memoryview) -> torch.Tensor:
    """Copy bytes into a tensor of a GPU without waiting for it; returns the pinned memory that holds them."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    view = memory_of(pinned)
    view[: len(values)] = values
    if len(values) < len(view):  # sizes that differ from step to step: zeros behind
        view[len(values) :] = bytes(len(view) - len(values))
    tensor.data.copy_(pinned, non_blocking=True)
    return pinned


def give_own(call: Call) -> None:
    """Fill the outputs of a call as if every member contributed what this one does, on the device."""
    for delivery in call.deliveries:
        _copy_own(call, delivery.tensor, delivery.offset_bytes)
    for tensor in call.receive_tensors or ():
        _copy_own(call, tensor, 0)


def _pieces(call: Call, one: Expected) -> list[tuple[torch.Tensor, int, int]]:
    """What is to be filled: tensor, the member (or COMBINED) whose bytes it takes, and where in these they begin."""
    pieces, done = [], 0
    for delivery in call.deliveries:
        # a recorded result holds what this rank received, not everybody's
        offset = done if delivery.source == COMBINED else delivery.offset_bytes
        pieces.append((delivery.tensor, delivery.source, offset))
        done += delivery.tensor.nbytes
    me = call.group.group_rank
    for member, tensor in enumerate(call.receive_tensors or ()):
        splits = (call.send_bytes or ()) if member == me else one.send_bytes.get(member, ())
        pieces.append((tensor, member, sum(splits[:me])))
    return pieces


def _copy_own(call: Call, tensor: torch.Tensor, offset_bytes: int) -> None:
    """Copy bytes of this rank's contribution, from an offset in it on, as far as there are any."""
    target = tensor.data
    for part in call.contribution:
        if offset_bytes >= part.nbytes:
            offset_bytes -= part.nbytes
            continue
        if part.data_ptr() + offset_bytes == target.data_ptr():
            return  # in place
        source = flat_bytes(part.contiguous())[offset_bytes:]
        if target.is_contiguous():
            flat = flat_bytes(target)
            count = min(flat.numel(), source.numel())
            flat[:count].copy_(source[:count])
        elif source.numel() >= target.nbytes:
            target.copy_(source[: target.nbytes].view(target.dtype).view(target.shape))
        return
