"""The assistant process that plays the virtual members of all groups that overlap the sandbox.

Responsible for sending sandbox ranks what their virtual neighbours would send, at the times of the calibrated graph,
and for taking in what they send; which messages those are is prism_sdk.pruning's.

    python -m prism_sdk.runtime.virtual FACTS

A thread for each stream carries out its operations in order. An operation begins when all its sandbox members have
announced it. What they send is received at once, however far ahead of the schedule (the closing member is elastic).
Message i of the m that a member receives is sent when i/m of its transfer has passed since the last arrival, less a
lead for the way: the rank is held until the operation is due, so what comes early is not early for the program.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import prismtrace
from prism_sdk.graph.plan import BoundaryPlan
from prism_sdk.pruning import COMBINED, Emission, closing, play_closing
from prism_sdk.runtime.announce import (
    DIFFERENT,
    SAME,
    Announcement,
    SameBoard,
    bounds_of,
    by_shards,
    message_size,
)
from prism_sdk.runtime.assisting import listen, run
from prism_sdk.runtime.engine import BoundaryEngine, PostBoard
from prism_sdk.runtime.manifest import Script
from prism_sdk.runtime.supply import Supplies, Supply
from prism_sdk.runtime.tensors import FOLD
from prism_sdk.runtime.transport import Communicator, GlooTransport
from prism_sdk.runtime.wire import Channel
from prismtrace import Op, ReduceOp

_POLL_S = 0.0001


@dataclass(frozen=True)
class VirtualFacts:
    """What the assistant is told when it starts."""

    graph: Path
    folder: Path  # the launch's own: plan, scripts, and where communicators meet
    sandbox: tuple[int, ...]
    groups: Mapping[int, tuple[int, ...]]  # those that overlap the sandbox, with all their ranks
    board_fd: int
    same_fd: int
    control_fds: tuple[int, ...]  # of each sandbox rank
    cpus: tuple[int, ...]
    limit_bytes: int
    lead_ns: int


def connect_groups(
    groups: Mapping[int, tuple[int, ...]], sandbox: Sequence[int], folder: Path, *, rank: int | None
) -> dict[int, Communicator]:
    """The reduced communicators that `rank` belongs to; with rank None, the assistant's, which are all."""
    made = {}
    for group_id, ranks in sorted(groups.items()):
        members = [other for other in ranks if other in sandbox]
        if rank is not None and rank not in members:
            continue
        position = len(members) if rank is None else members.index(rank)
        transport = GlooTransport(folder, f"{group_id:x}", position=position, size=len(members) + 1)
        made[group_id] = Communicator(transport, ranks, sandbox)
    return made


@dataclass
class _Operation:
    """An operation of which some members have told."""

    announced: dict[int, Announcement] = field(default_factory=dict)


class Assistant:
    """All virtual members."""

    def __init__(self, facts: VirtualFacts) -> None:
        self._facts = facts
        self.plan = BoundaryPlan.load(facts.folder / "plan")
        self._engine = BoundaryEngine(self.plan, facts.sandbox[0], PostBoard(facts.board_fd, len(facts.sandbox)))
        self._engine_lock = threading.Lock()
        self._same = SameBoard(facts.same_fd, len(facts.sandbox), len(self.plan))
        scripts = [Script.load(facts.folder / f"script-{rank}") for rank in facts.sandbox]
        reader = prismtrace.TraceReader(facts.graph)
        self.supplies = Supplies(reader, scripts, facts.sandbox, limit_bytes=facts.limit_bytes)
        self._communicators = connect_groups(facts.groups, facts.sandbox, facts.folder, rank=None)
        self._open: dict[tuple[int, int], _Operation] = {}
        self._streams: dict[Any, queue.SimpleQueue[_Operation]] = {}
        self.num_operations = 0
        self.late_ns: list[int] = []

    def serve(self) -> None:
        """Until all sandbox ranks are gone."""
        channels = [Channel(socket.socket(fileno=fd)) for fd in self._facts.control_fds]
        listen(channels, lambda message: self._told(message[1]))

    def _told(self, one: Announcement) -> None:
        operation = self._open.setdefault(one.handle, _Operation())
        operation.announced[one.member] = one
        if len(operation.announced) < len(self.plan.members(one.handle[0])):
            return
        del self._open[one.handle]
        self.num_operations += 1
        # a rank numbers its own lanes
        stream = (one.rank, one.number) if one.op in (Op.SEND, Op.RECV) else one.group_id
        if stream not in self._streams:
            self._streams[stream] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._streams[stream],), daemon=True).start()
        self._streams[stream].put(operation)

    def _work(self, operations: queue.SimpleQueue[_Operation]) -> None:
        while True:
            operation = operations.get()
            try:
                with torch.no_grad():
                    self._run(operation.announced)
            except Exception:  # sandbox ranks learn of it from the connections
                traceback.print_exc()
                os._exit(1)

    def _run(self, announced: dict[int, Announcement]) -> None:
        one = next(iter(announced.values()))
        communicator = self._communicators[one.group_id]
        if one.op is Op.SEND:
            if one.count:
                room = torch.empty(one.count, dtype=torch.uint8)
                communicator.receive_on(communicator.message_lane(one.number), one.member, room).wait()
        elif one.op is Op.RECV:
            self._send_message(one, communicator)
        else:
            self._collective(one, announced, communicator)

    def _send_message(self, one: Announcement, communicator: Communicator) -> None:
        stream = self.plan.stream(one.handle[0])
        tag = max(stream.tag, 0) if stream.tag != prismtrace.ABSENT else 0
        value = self.supplies.message(one.group_id, stream.source_rank, stream.destination_rank, tag, one.seq)
        value = fit(torch.empty(0, dtype=torch.uint8) if value is None else value, one.count)
        self._arrival(one.handle)
        if one.count:
            communicator.send_on(communicator.message_lane(one.number), one.member, value).wait()

    def _collective(self, one: Announcement, announced: dict[int, Announcement], communicator: Communicator) -> None:
        size = communicator.size
        plan = closing(one.op, size=size, sandbox=communicator.members, root=one.root)
        supply = Supply() if one.op is Op.BARRIER else self.supplies.take((one.group_id, one.seq))
        self._same.publish(one.handle, len(self._facts.sandbox), SAME if supply.is_complete else DIFFERENT)
        combined = supply.by_member.get(COMBINED)
        if combined is not None:
            combined = fit(by_shards(combined, one.tensor_counts, size), one.count)
        bounds = bounds_of(one, size)
        transfers = dict(self.plan.members(one.handle[0]))
        begun: list[int] = []

        def supplied(emission: Emission) -> torch.Tensor:
            count = message_size(announced, size, emission.source, emission.destination, emission.piece)
            if emission.supply == COMBINED:
                if combined is None:
                    return neutral(one.reduce_op, count, one.dtype)
                is_whole = one.op is Op.REDUCE
                return combined if is_whole else combined[bounds[emission.piece] : bounds[emission.piece + 1]]
            member = emission.source if one.op is Op.ALL_TO_ALL else emission.supply
            part = supply.by_member.get(member, torch.empty(0, dtype=torch.uint8))
            if one.op is Op.ALL_TO_ALL:
                sizes = supply.splits.get(member) or (part.nbytes // size,) * size
                start = sum(sizes[: emission.destination])
                part = part[start : start + sizes[emission.destination]]
            elif one.op is Op.SCATTER:
                part = part[count * emission.destination : count * (emission.destination + 1)]
            return fit(part, count)

        def pace(emission: Emission) -> None:
            if not begun:
                begun.append(self._arrival(one.handle))
            transfer = transfers[announced[emission.destination].rank]
            self._sleep_until(begun[0] + transfer * emission.ordinal // emission.num_received - self._facts.lead_ns)

        fold = FOLD.get(one.reduce_op)
        for pending in play_closing(
            plan, lanes=communicator, size_of=lambda *message: message_size(announced, size, *message),
            empty=lambda count: torch.empty(count, dtype=one.dtype),
            neutral=lambda count: neutral(one.reduce_op, count, one.dtype), supply=supplied,
            fold=fold or _no_fold, pace=pace,
        ):  # fmt: skip
            pending.wait()

    def _arrival(self, handle: tuple[int, int]) -> int:
        """When the operation's last member arrived; waits until that is known and has come."""
        while True:
            with self._engine_lock:
                arrival = self._engine.arrival(handle)
            if arrival is not None:
                self._sleep_until(arrival)
                return arrival
            time.sleep(_POLL_S)

    def _sleep_until(self, time_ns: int) -> None:
        left = time_ns - time.monotonic_ns()
        if left > 0:
            time.sleep(left / 1e9)

    def summary(self) -> dict[str, int]:
        """Facts for the launcher's report."""
        used = self._communicators.values()
        return {
            "num_operations": self.num_operations, "supply_hits": self.supplies.hits,
            "supply_misses": self.supplies.misses, "sent_bytes": sum(c.sent_bytes for c in used),
            "received_bytes": sum(c.received_bytes for c in used), "num_communicators": len(self._communicators),
        }  # fmt: skip


def _no_fold(a: torch.Tensor, b: torch.Tensor) -> None:
    raise AssertionError("nothing is combined in an operation that does not reduce")


def fit(part: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` elements, with zeros behind a part that is shorter (pickled objects of another size)."""
    if part.numel() >= count:
        return part[:count]
    return torch.cat([part, torch.zeros(count - part.numel(), dtype=part.dtype)])


def neutral(reduce_op: ReduceOp, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements that change nothing in a reduction."""
    value: float | int | bool = 0
    if reduce_op in (ReduceOp.SUM, ReduceOp.AVG) and dtype.is_floating_point:
        value = -0.0  # 0.0 would turn a sum of -0.0 into 0.0
    elif reduce_op is ReduceOp.PRODUCT:
        value = 1
    elif reduce_op in (ReduceOp.MIN, ReduceOp.MAX):
        is_min = reduce_op is ReduceOp.MIN
        if dtype is torch.bool:
            value = is_min
        elif dtype.is_floating_point:
            value = float("inf") if is_min else float("-inf")
        else:
            value = torch.iinfo(dtype).max if is_min else torch.iinfo(dtype).min
    elif reduce_op is ReduceOp.BAND:
        return torch.full((count,), -1, dtype=torch.int8).to(dtype) if dtype != torch.uint8 else torch.full(
            (count,), 255, dtype=dtype
        )  # fmt: skip
    return torch.full((count,), value, dtype=dtype)


def main(argv: Sequence[str]) -> int:
    """The assistant process: a file with its facts."""
    return run(argv, Assistant)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
