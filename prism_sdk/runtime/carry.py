"""The sandbox rank's end of a backend that moves bytes: plays the rank's full schedule beside the program.

Responsible for buffers, threads and results of one rank; the schedules are prism_sdk.pruning's, the bytes
transport.py's, and the times the boundary engine's.

A thread for each group plays its collectives in the order of their issue, as a backend's own thread does. Messages
need none. Every issue is announced to the assistant, which plays the virtual members (virtual.py).
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from prism_sdk.abc import Carriage, CarriedOperation
from prism_sdk.errors import RunError
from prism_sdk.pruning import Action, Move, Pending, play, traffic
from prism_sdk.runtime.announce import (
    DIFFERENT,
    REDUCTIONS,
    SAME,
    Announcement,
    SameBoard,
    announcement,
    bounds_of,
    by_shards,
    message_size,
    steps_of,
)
from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.manifest import Expected
from prism_sdk.runtime.oncuda.staging import flat_bytes
from prism_sdk.runtime.tensors import FOLD, deliver, fill, memory_differs, memory_of, plain
from prism_sdk.runtime.transport import Communicator
from prism_sdk.runtime.wire import Channel
from prismtrace import Op, ReduceOp


class Carrier:
    """Carries the operations of one sandbox rank."""

    def __init__(
        self, rank: int, sandbox: tuple[int, ...], *, communicators: Mapping[int, Communicator], control: socket.socket,
        board: SameBoard,
    ) -> None:  # fmt: skip
        """`communicators`: by group; `control`: to the assistant."""
        self.column = sandbox.index(rank)
        self.sandbox = sandbox
        self.board = board
        self._rank = rank
        self._communicators = communicators
        self._control = Channel(control)
        self._workers: dict[int, queue.SimpleQueue[CollectiveCarriage]] = {}
        self._under_way: set[CollectiveCarriage] = set()
        self._error: RunError | None = None
        self._numbers: dict[tuple[Any, ...], int] = {}  # of lanes of messages
        self.counts = dict.fromkeys(
            ("carried_operations", "scheduled_messages_sent", "scheduled_messages_received", "scheduled_sent_bytes",
             "scheduled_received_bytes", "reductions_live", "operations_not_carried"), 0,
        )  # fmt: skip

    def carry(self, operation: CarriedOperation) -> Carriage | None:
        """Start to move an operation; None for what is not carried."""
        call: Call = operation.call
        one: Expected = operation.expected
        communicator = self._communicators.get(one.group_id)
        told = announcement(call, one, rank=self._rank, handle=operation.handle) if communicator else None
        if communicator is None or told is None:
            self.counts["operations_not_carried"] += 1
            return None
        self.counts["carried_operations"] += 1
        if call.is_p2p:
            return self._message(call, one, told, communicator)
        carriage = CollectiveCarriage(self, operation, told, communicator)
        self._control.send(("issue", told))
        self._under_way.add(carriage)
        if self._error is not None:
            carriage.let_go(self._error)
            return carriage
        worker = self._workers.get(one.group_id)
        if worker is None:
            worker = self._workers[one.group_id] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(worker,), daemon=True, name="prism-carry").start()
        worker.put(carriage)
        return carriage

    def ended(self, carriage: CollectiveCarriage, error: RunError | None) -> None:
        """An operation is over. What breaks off leaves messages behind, so whatever the rank waits for ends with it."""
        self._under_way.discard(carriage)
        self._error = self._error or error
        for other in (carriage, *(tuple(self._under_way) if self._error is not None else ())):
            other.let_go(self._error)

    def _message(self, call: Call, one: Expected, told: Announcement, communicator: Communicator) -> Carriage | None:
        assert one.stream is not None and call.peer is not None
        number = self._numbers.setdefault((one.group_id, *one.stream), len(self._numbers))
        told = replace(told, number=number)
        self._control.send(("issue", told))
        lane = communicator.message_lane(number)
        sends = call.op is Op.SEND
        tensor = (call.contribution if sends else call.outputs)[0].detach()
        if not told.count:
            work = None
        elif sends:
            work = communicator.send_on(lane, call.peer, tensor)
        else:
            work = communicator.receive_on(lane, call.peer, tensor)
        kind = "sent" if sends else "received"
        self.counts[f"scheduled_messages_{kind}"] += bool(told.count)
        self.counts[f"scheduled_{kind}_bytes"] += told.count
        return MessageCarriage(work)

    def summary(self) -> dict[str, object]:
        """What was carried, and what the full schedules of all groups would have this rank carry."""
        used = self._communicators.values()
        return {
            **self.counts, "messages_sent": sum(c.num_sent for c in used),
            "messages_received": sum(c.num_received for c in used), "sent_bytes": sum(c.sent_bytes for c in used),
            "received_bytes": sum(c.received_bytes for c in used),
        }  # fmt: skip


class MessageCarriage:
    """A message to or from a virtual rank, straight from or into the program's tensor (implements Carriage)."""

    def __init__(self, work: Pending | None) -> None:
        self._work = work

    def is_done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())  # type: ignore[attr-defined]

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def deliver(self) -> bool:
        return True


class CollectiveCarriage:
    """A collective under way (implements Carriage)."""

    def __init__(
        self, carrier: Carrier, operation: CarriedOperation, told: Announcement, communicator: Communicator
    ) -> None:
        self.call: Call = operation.call
        self._carrier, self._operation, self._told, self._communicator = carrier, operation, told, communicator
        self._ended = threading.Event()
        self._error: RunError | None = None
        self._whole: torch.Tensor | None = None  # a reduction's buffer, a broadcast's
        self._parts: list[torch.Tensor] = []  # by member

    # -- the rank's own thread --------------------------------------------------------------------------------------

    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def let_go(self, error: RunError | None) -> None:
        """It is over, or another one broke off."""
        self._error = error
        self._ended.set()

    def deliver(self) -> bool:
        call, carrier = self.call, self._carrier
        if call.op in REDUCTIONS:
            flags = carrier.board.read(self._told.handle)
            here = [carrier.sandbox.index(rank) for rank in call.group.ranks if rank in carrier.sandbox]
            if flags[-1] == DIFFERENT or all(flags[column] == SAME for column in here):
                return False
            carrier.counts["reductions_live"] += 1
            self._deliver_reduction()
            return True
        me = call.group.group_rank

        def read_into(member: int, offset: int, view: memoryview) -> None:
            if call.op is Op.SCATTER:  # offsets are those in the root's list
                offset -= self._told.count * me
                member = me
            source = self._whole if self._whole is not None else self._parts[member]
            view[:] = memory_of(source)[offset : offset + len(view)]

        deliver(call, read_into, lambda member: ())
        return True

    def _deliver_reduction(self) -> None:
        call, whole = self.call, self._whole
        assert whole is not None
        result = self._parts[call.group.group_rank] if call.op is Op.REDUCE_SCATTER else whole
        if call.reduce_op is ReduceOp.AVG:
            is_exact = result.is_floating_point() or result.is_complex()
            result.div_(len(call.group.ranks), rounding_mode=None if is_exact else "trunc")
        memory, position = memory_of(result), 0
        for delivery in call.deliveries:
            part = memory[position : position + delivery.tensor.nbytes]
            fill(delivery.tensor, lambda _, view, p=part: view.__setitem__(slice(None), p))  # type: ignore[misc]
            position += delivery.tensor.nbytes

    # -- the group's thread -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Play this rank's schedule to its end."""
        broken: RunError | None = None
        try:
            self._run()
        except Exception as error:
            what = f"{self.call.op.name.lower()} in a group of {len(self.call.group.ranks)} with virtual members"
            broken = RunError(f"{what} broke off: {error}", hint="an end of the assistant's shows on stderr")
            broken.__cause__ = error
        self._carrier.ended(self, broken)

    def _run(self) -> None:
        call, told = self.call, self._told
        size, me = len(call.group.ranks), call.group.group_rank
        outgoing, incoming = self._buffers(size, me)
        if call.op in REDUCTIONS:
            self._carrier.board.publish(told.handle, self._carrier.column, self._compare())
        steps = steps_of(call.op, size, me, call.root)
        member_fold = FOLD.get(call.reduce_op)

        def fold(a: torch.Tensor, b: torch.Tensor) -> None:
            assert member_fold is not None
            member_fold(a, b)

        with torch.no_grad():
            for pending in play(
                steps, member=me, lanes=self._communicator, outgoing=outgoing, incoming=incoming, fold=fold,
                like=torch.empty_like,
            ):  # fmt: skip
                pending.wait()
        self._count(steps, size, me)

    def _count(self, steps: Any, size: int, me: int) -> None:
        announced, itemsize = {me: self._told}, self._told.dtype.itemsize

        def size_of(action: Action) -> int:
            ends = (me, action.peer) if action.move is Move.SEND else (action.peer, me)
            return message_size(announced, size, *ends, action.piece) * itemsize

        full, counts = traffic(steps, size_of), self._carrier.counts
        counts["scheduled_messages_sent"] += full.num_sent
        counts["scheduled_messages_received"] += full.num_received
        counts["scheduled_sent_bytes"] += full.sent
        counts["scheduled_received_bytes"] += full.received

    def _compare(self) -> int:
        recorded = self._operation.recorded()
        if recorded is None:
            return DIFFERENT
        position = 0
        for tensor in self.call.contribution:
            flat = plain(tensor)
            part = recorded[position : position + flat.nbytes]
            if flat.nbytes and memory_differs(memory_of(flat), part):
                return DIFFERENT
            position += flat.nbytes
        return SAME

    def _buffers(self, size: int, me: int) -> tuple[Callable[[int], torch.Tensor], Callable[[int], torch.Tensor]]:
        call, told = self.call, self._told
        if call.op in REDUCTIONS:
            joined = torch.cat([plain(tensor).reshape(-1) for tensor in call.contribution])
            self._whole = by_shards(joined, told.tensor_counts, size)
            if call.op is Op.REDUCE:
                return _one(self._whole), _one(self._whole)
            bounds = bounds_of(told, size)
            self._parts = [self._whole[a:b] for a, b in pairwise(bounds)]
            return self._parts.__getitem__, self._parts.__getitem__
        own = _joined_bytes(call.contribution)
        if call.op is Op.BARRIER:
            token = torch.zeros(1, dtype=torch.uint8)
            return _one(token), _one(torch.zeros_like(token))
        if call.op is Op.BROADCAST:
            self._whole = own if me == call.root else _room(told.count)
            return _one(self._whole), _one(self._whole)
        if call.op is Op.SCATTER:
            sent = list(own.split(told.count)) if me == call.root and told.count else [_room(0)] * size
            self._parts = [_room(told.count) if member == me else _room(0) for member in range(size)]
            if me == call.root:
                self._parts[me] = sent[me]
            return sent.__getitem__, self._parts.__getitem__
        if call.op is Op.ALL_TO_ALL:
            blocks = list(own.split(list(told.sizes)))
            self._parts = [_room(num_bytes) for num_bytes in told.received]
            self._parts[me] = blocks[me]
            return blocks.__getitem__, self._parts.__getitem__
        self._parts = [_room(num_bytes) for num_bytes in told.sizes]
        self._parts[me] = own
        return self._parts.__getitem__, self._parts.__getitem__


def _work(carriages: queue.SimpleQueue[CollectiveCarriage]) -> None:
    while True:
        carriages.get().run()


def _one(tensor: torch.Tensor) -> Callable[[int], torch.Tensor]:
    return lambda piece: tensor


def _room(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _joined_bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All bytes in a buffer of their own: the program may change its tensors once it holds the result."""
    flat = [flat_bytes(plain(tensor)) for tensor in tensors]
    return torch.cat(flat) if flat else _room(0)
