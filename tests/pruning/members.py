"""Members of a group that play their schedules in one process, with numpy buffers and counted messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.pruning import Closing, Emission, Traffic, closing, play, play_closing, program, split
from prismtrace import Op, ReduceOp

Array = npt.NDArray[Any]

FOLDS: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add, ReduceOp.AVG: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum, ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}  # fmt: skip


def neutral_of(reduce_op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    if reduce_op is ReduceOp.PRODUCT:
        return 1
    if reduce_op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype.kind == "f":
            return np.inf if reduce_op is ReduceOp.MIN else -np.inf
        return np.iinfo(dtype).max if reduce_op is ReduceOp.MIN else np.iinfo(dtype).min
    return -1 if reduce_op is ReduceOp.BAND else 0


@dataclass
class Message:
    """A message under way: complete once both ends are there."""

    is_done: bool = False
    room: Array | None = None

    def wait(self) -> None:
        assert self.is_done


@dataclass
class Counted:
    """What each member has sent and received."""

    sent: dict[int, list[int]] = field(default_factory=dict)
    received: dict[int, list[int]] = field(default_factory=dict)

    def of(self, member: int) -> Traffic:
        sent, received = self.sent.get(member, []), self.received.get(member, [])
        return Traffic(len(sent), sum(sent), len(received), sum(received))


class Wires:
    """Lanes between all members, in order, unbounded; a message moves when both ends are there (rendezvous)."""

    def __init__(self) -> None:
        self.counted = Counted()
        self._sent: dict[tuple[int, int], deque[tuple[Message, Array]]] = {}
        self._wanted: dict[tuple[int, int], deque[Message]] = {}

    def send(self, source: int, destination: int, buffer: Array) -> Message:
        self.counted.sent.setdefault(source, []).append(buffer.nbytes)
        message = Message()
        self._sent.setdefault((source, destination), deque()).append((message, buffer))
        self._match(source, destination)
        return message

    def receive(self, source: int, destination: int, buffer: Array) -> Message:
        self.counted.received.setdefault(destination, []).append(buffer.nbytes)
        message = Message(room=buffer)
        self._wanted.setdefault((source, destination), deque()).append(message)
        self._match(source, destination)
        return message

    def _match(self, *lane: int) -> None:
        sent, wanted = self._sent.get(lane, deque()), self._wanted.get(lane, deque())
        while sent and wanted:
            (one, data), other = sent.popleft(), wanted.popleft()
            assert other.room is not None and data.shape == other.room.shape and data.dtype == other.room.dtype, lane
            other.room[:] = data
            one.is_done = other.is_done = True

    @property
    def is_empty(self) -> bool:
        return not any(self._sent.values()) and not any(self._wanted.values())


def run_together(members: Sequence[Iterator[Message]]) -> None:
    """Play all to their ends; fails where all of them wait."""
    waiting: list[tuple[Iterator[Message], Message | None]] = [(member, None) for member in members]
    while waiting:
        still, moved = [], False
        for member, message in waiting:
            while message is None or message.is_done:
                moved = True
                message = next(member, None)
                if message is None:
                    break
            else:
                still.append((member, message))
        assert moved, "all members wait for each other"
        waiting = still


@dataclass
class Job:
    """One collective of a group: what each member puts in, and how it is played."""

    op: Op
    reduce_op: ReduceOp
    inputs: list[Array]  # by member; a scatter's root: all blocks; an all-to-all: blocks one after the other
    root: int | None = None
    counts: list[list[int]] | None = None  # all-to-all: elements from [source] to [destination]

    @property
    def size(self) -> int:
        return len(self.inputs)

    def elements(self, source: int, destination: int, piece: int) -> int:
        """Elements of a message, for the virtual side."""
        count = len(self.inputs[0])
        if self.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            bounds = split(count, self.size)
            return bounds[piece + 1] - bounds[piece]
        if self.op is Op.ALL_TO_ALL:
            assert self.counts is not None
            return self.counts[source][destination]
        if self.op is Op.SCATTER:
            return len(self.inputs[self.root or 0]) // self.size
        return len(self.inputs[piece]) if self.op in (Op.ALL_GATHER, Op.GATHER) else count

    def fold(self, a: Array, b: Array) -> None:
        FOLDS[self.reduce_op](a, b, out=a)

    def blocks(self, member: int) -> list[Array]:
        """What a member sends to each, of an all-to-all or scatter."""
        if self.op is Op.SCATTER:
            return np.split(self.inputs[member], self.size)
        assert self.counts is not None
        ends = np.cumsum(self.counts[member])
        return [self.inputs[member][end - n : end] for end, n in zip(ends, self.counts[member], strict=True)]

    def start(self, member: int, lanes: Wires) -> tuple[list[Array], Iterator[Message]]:
        """A member's result (pieces, filled as it plays) and its player."""
        own, dtype = self.inputs[member], self.inputs[member].dtype
        if self.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            whole, bounds = own.copy(), split(len(own), self.size)
            pieces = [whole[a:b] for a, b in pairwise(bounds)]
            outgoing = pieces
        elif self.op in (Op.ALL_TO_ALL, Op.SCATTER):
            outgoing = self.blocks(member) if self.op is Op.ALL_TO_ALL or member == self.root else []
            pieces = [np.zeros(self.elements(p, member, p), dtype) for p in range(self.size)]
            if outgoing:
                pieces[member][:] = outgoing[member]
        elif self.op in (Op.ALL_GATHER, Op.GATHER):
            pieces = [np.zeros_like(one) for one in self.inputs]
            pieces[member][:] = own
            outgoing = pieces
        else:
            gives = self.op is not Op.BROADCAST or member == self.root
            outgoing = pieces = [own.copy() if gives else np.zeros_like(own)]
        steps = program(self.op, size=self.size, member=member, root=self.root)
        player = play(
            steps, member=member, lanes=lanes, outgoing=lambda p: outgoing[p], incoming=lambda p: pieces[p],
            fold=self.fold, like=np.empty_like,
        )  # fmt: skip
        return pieces, player  # type: ignore[return-value]

    def start_virtual(self, sandbox: Sequence[int], lanes: Wires, recorded: list[Array]) -> Iterator[Message]:
        """The virtual side, which knows the recorded contributions of virtual members alone."""
        dtype = self.inputs[0].dtype
        virtual = [member for member in range(self.size) if member not in sandbox]
        plan: Closing = closing(self.op, size=self.size, sandbox=sandbox, root=self.root)

        def combined() -> Array:
            total = recorded[virtual[0]].copy()
            for member in virtual[1:]:
                self.fold(total, recorded[member])
            return total

        def supply(emission: Emission) -> Array:
            if self.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
                bounds = split(len(self.inputs[0]), self.size)
                return combined()[bounds[emission.piece] : bounds[emission.piece + 1]]
            if self.op is Op.REDUCE:
                return combined()
            if self.op in (Op.ALL_TO_ALL, Op.SCATTER):
                return self.blocks(emission.source)[emission.destination]
            assert emission.supply in virtual
            return recorded[emission.supply]

        return play_closing(  # type: ignore[return-value]
            plan, lanes=lanes, size_of=self.elements, empty=lambda n: np.empty(n, dtype),
            neutral=lambda n: np.full(n, neutral_of(self.reduce_op, dtype), dtype), supply=supply, fold=self.fold,
            pace=lambda emission: None,
        )  # fmt: skip


def play_full(job: Job) -> tuple[list[list[Array]], Counted]:
    """All members for real."""
    wires = Wires()
    started = [job.start(member, wires) for member in range(job.size)]
    run_together([player for _, player in started])
    assert wires.is_empty
    return [pieces for pieces, _ in started], wires.counted


def play_pruned(job: Job, sandbox: Sequence[int]) -> tuple[dict[int, list[Array]], Counted]:
    """Sandbox members for real, the others virtual."""
    wires = Wires()
    recorded = [one if m not in sandbox else np.full_like(one, 77) for m, one in enumerate(job.inputs)]
    started = {member: job.start(member, wires) for member in sandbox}
    virtual = job.start_virtual(sandbox, wires, recorded)
    run_together([virtual, *(player for _, player in started.values())])
    assert wires.is_empty
    return {member: pieces for member, (pieces, _) in started.items()}, wires.counted
