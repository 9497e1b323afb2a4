"""A collective of a large group as one call of the library's own collective among few ranks, both ends of it.

Responsible for what goes into the reduced call at a sandbox rank and at the assistant that stands for all virtual
members, and for the results in it. Sizes are prism_sdk.pruning.native's; when the assistant joins, which is what makes
a call last as long as the full one, is its caller's; a `ReducedGroup` is how a library is called.

A reduced communicator has the k sandbox members of a group at positions 0 to k - 1, and the assistant at k. In a
reduction the assistant contributes what all virtual members do together, so results are right whatever the sandbox
ranks contribute. Of a gather only the sandbox members' parts travel in front of what merely weighs: the virtual ones'
are those of the recording, which a sandbox rank has at hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from prism_sdk.pruning import Pending, reduced_size, scaled_count
from prism_sdk.runtime.announce import Announcement, chunk_bounds
from prismtrace import Op, ReduceOp

Room = Callable[[int, torch.dtype], torch.Tensor]
"""Makes a flat tensor that a call may use until it has ended: (elements, type)."""

Part = tuple[int, torch.Tensor]
"""A position in the communicator, and what it gets or gives."""

WHOLE = -1
"""Key of the combined result among the parts of a call."""


class ReducedGroup(ABC):
    """The collectives of a library among the ranks of a reduced communicator. Calls start in order and do not block."""

    @abstractmethod
    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> Pending: ...

    @abstractmethod
    def reduce(self, buffer: torch.Tensor, root: int, op: ReduceOp) -> Pending: ...

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor, root: int) -> Pending: ...

    @abstractmethod
    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Pending: ...

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, op: ReduceOp) -> Pending: ...

    @abstractmethod
    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Pending:
        """Messages, all at once; those between two positions keep their order."""


@dataclass(frozen=True)
class Shape:
    """A group and who of it is in the sandbox (ranks in the group, ascending)."""

    size: int
    members: tuple[int, ...]
    virtual: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "virtual", tuple(m for m in range(self.size) if m not in self.members))

    @property
    def num_ranks(self) -> int:
        return reduced_size(self.size, len(self.members))

    def position(self, member: int) -> int:
        return self.members.index(member) if member in self.members else len(self.members)

    def scaled(self, op: Op, count: int | Fraction) -> int:
        return scaled_count(op, size=self.size, num_sandbox=len(self.members), count=count)


@dataclass
class Running:
    """A reduced call under way. `parts` is to be read once `work` is done: by member, or `WHOLE`."""

    work: Pending
    parts: Mapping[int, torch.Tensor]


def join_as_member(one: Announcement, group: ReducedGroup, shape: Shape, own: torch.Tensor, room: Room) -> Running:
    """Start the reduced call at a sandbox rank.

    Args:
        one: what the rank announces of its call.
        group: the reduced communicator.
        shape: the whole group.
        own: what it contributes, flat: elements of a reduction (of a reduce-scatter by shards), else bytes.
        room: makes scratch memory.

    Returns:
        The call with the parts that come from sandbox members, and what a broadcast's, scatter's or all-to-all's
        virtual members sent. Reductions have `WHOLE` (this member's shard of a reduce-scatter; nothing but at the root
        of a reduce), not yet divided for an average.

    Raises:
        ValueError: an operation that has no reduced form.
    """
    me = shape.position(one.member)
    if one.op in (Op.ALL_REDUCE, Op.BARRIER):
        count = 1 if one.op is Op.BARRIER else one.count
        buffer = room(shape.scaled(Op.ALL_REDUCE, count), one.dtype)
        buffer[: own.numel()] = own
        return Running(group.all_reduce(buffer, _sum_of(one)), {WHOLE: buffer[:count]})
    if one.op is Op.REDUCE:
        assert one.root is not None
        buffer = _filled(room, own)
        work = group.reduce(buffer, shape.position(one.root), _sum_of(one))
        return Running(work, {WHOLE: buffer} if one.member == one.root else {})
    if one.op is Op.REDUCE_SCATTER:
        bounds = chunk_bounds(one.count, shape.size)
        shards = [own[bounds[member] : bounds[member + 1]] for member in shape.members]
        output, work = _reduce_scatter(one, group, shape, shards, room)
        return Running(work, {WHOLE: output[: bounds[one.member + 1] - bounds[one.member]]})
    if one.op is Op.ALL_GATHER:
        output, work = _all_gather(one, group, shape, own, room)
        rows = output.view(shape.num_ranks, -1)
        return Running(work, {m: rows[at][: one.sizes[m]] for at, m in enumerate(shape.members)})
    if one.op is Op.BROADCAST:
        assert one.root is not None
        buffer = _filled(room, own) if one.member == one.root else room(one.count, torch.uint8)
        return Running(group.broadcast(buffer, shape.position(one.root)), {one.root: buffer})
    sent, taken = _messages(one, shape.size)
    offsets = _offsets(sent)
    blocks = {m: own[offsets[m] : offsets[m] + sent[m]] for m in range(shape.size) if sent[m]}
    return _exchange(group, shape, me, blocks=blocks, sizes=taken, own=one.member, room=room)


def join_as_virtual(
    announced: Mapping[int, Announcement], group: ReducedGroup, shape: Shape, parts: Mapping[int, torch.Tensor],
    room: Room,
) -> Pending:  # fmt: skip
    """Start the reduced call at the assistant.

    Args:
        announced: what the sandbox members announced, by member.
        group: the reduced communicator, in which this is the last position.
        shape: the whole group.
        parts: `WHOLE`: of a reduction the combined contribution of all virtual members (neutral elements where it is
            not known), else the bytes each virtual member contributes, by member. Its memory must last to the end.
        room: makes scratch memory.
    """
    one = next(iter(announced.values()))
    if one.op in (Op.ALL_REDUCE, Op.BARRIER):
        whole = parts[WHOLE] if WHOLE in parts else room(0, one.dtype)
        buffer = room(shape.scaled(Op.ALL_REDUCE, max(one.count, 1)), one.dtype)
        buffer[: whole.numel()] = whole
        return group.all_reduce(buffer, _sum_of(one))
    if one.op is Op.REDUCE:
        assert one.root is not None
        return group.reduce(_filled(room, parts[WHOLE]), shape.position(one.root), _sum_of(one))
    if one.op is Op.REDUCE_SCATTER:
        bounds = chunk_bounds(one.count, shape.size)
        shards = [parts[WHOLE][bounds[member] : bounds[member + 1]] for member in shape.members]
        return _reduce_scatter(one, group, shape, shards, room)[1]
    if one.op is Op.ALL_GATHER:
        return _all_gather(one, group, shape, room(0, torch.uint8), room)[1]
    if one.op is Op.BROADCAST:
        assert one.root is not None
        buffer = _filled(room, parts[one.root]) if one.root in parts else room(one.count, torch.uint8)
        return group.broadcast(buffer, shape.position(one.root))
    sends, receives = [], []
    for member in shape.members:
        told = announced[member]
        sent, taken = _messages(told, shape.size)
        at = shape.position(member)
        if length := sum(sent[m] for m in shape.virtual):
            receives.append((at, room(length, torch.uint8)))
        blocks = [_block(told.op, parts.get(m), member, taken[m], shape.size) for m in shape.virtual if taken[m]]
        if blocks:
            sends.append((at, torch.cat(blocks)))
    return group.exchange(sends, receives)


def _sum_of(one: Announcement) -> ReduceOp:
    """An average is a sum that is divided where it arrives: the library would divide by the few that are there."""
    return ReduceOp.SUM if one.reduce_op is ReduceOp.AVG or one.op is Op.BARRIER else one.reduce_op


def _filled(room: Room, source: torch.Tensor) -> torch.Tensor:
    buffer = room(source.numel(), source.dtype)
    buffer.copy_(source)
    return buffer


def _reduce_scatter(
    one: Announcement, group: ReducedGroup, shape: Shape, shards: Sequence[torch.Tensor], room: Room
) -> tuple[torch.Tensor, Pending]:
    bounds = chunk_bounds(one.count, shape.size)
    largest = max(bounds[m + 1] - bounds[m] for m in shape.members)
    count = max(shape.scaled(Op.REDUCE_SCATTER, Fraction(one.count, shape.size)), largest)
    parts = room(count * shape.num_ranks, one.dtype)
    for row, shard in zip(parts.view(shape.num_ranks, -1), shards, strict=False):
        row[: shard.numel()] = shard
    output = room(count, one.dtype)
    return output, group.reduce_scatter(output, parts, _sum_of(one))


def _all_gather(
    one: Announcement, group: ReducedGroup, shape: Shape, own: torch.Tensor, room: Room
) -> tuple[torch.Tensor, Pending]:
    largest = max(one.sizes[m] for m in shape.members)
    count = max(shape.scaled(Op.ALL_GATHER, Fraction(sum(one.sizes), shape.size)), largest)
    part = room(count, torch.uint8)
    part[: own.numel()] = own
    output = room(count * shape.num_ranks, torch.uint8)
    return output, group.all_gather(output, part)


def _messages(one: Announcement, size: int) -> tuple[list[int], list[int]]:
    """Bytes that a member sends to each other one, and takes from each; what it keeps for itself is in both."""
    if one.op is Op.ALL_TO_ALL:
        return list(one.sizes), list(one.received)
    sent, taken = [0] * size, [0] * size
    is_root = one.member == one.root
    assert one.root is not None
    if one.op is Op.GATHER:
        own = one.sizes[one.member]
        sent[one.root] = own
        taken = list(one.sizes) if is_root else taken
    elif one.op is Op.SCATTER:
        sent = [one.count] * size if is_root else sent
        taken[one.root] = one.count
    else:
        raise ValueError(f"{one.op.name.lower()} has no reduced form")
    return sent, taken


def _exchange(
    group: ReducedGroup, shape: Shape, me: int, *, blocks: Mapping[int, torch.Tensor], sizes: Sequence[int], own: int,
    room: Room,
) -> Running:  # fmt: skip
    """Messages with sandbox members one by one, with all virtual members as one."""
    sends: list[Part] = []
    receives: list[Part] = []
    parts: dict[int, torch.Tensor] = {}
    for member in shape.members:
        if member == own:
            if sizes[own]:
                parts[own] = _filled(room, blocks[own])
            continue
        if member in blocks:
            sends.append((shape.position(member), _filled(room, blocks[member])))
        if sizes[member]:
            parts[member] = room(sizes[member], torch.uint8)
            receives.append((shape.position(member), parts[member]))
    assistant = len(shape.members)
    if leaving := [blocks[m] for m in shape.virtual if m in blocks]:
        joined = room(sum(block.numel() for block in leaving), torch.uint8)
        torch.cat(leaving, out=joined)
        sends.append((assistant, joined))
    if length := sum(sizes[m] for m in shape.virtual):
        coming, offset = room(length, torch.uint8), 0
        receives.append((assistant, coming))
        for member in filter(sizes.__getitem__, shape.virtual):
            parts[member] = coming[offset : offset + sizes[member]]
            offset += sizes[member]
    return Running(group.exchange(sends, receives), parts)


def _block(op: Op, part: torch.Tensor | None, member: int, num_bytes: int, size: int) -> torch.Tensor:
    """What a virtual member sends to a sandbox one; zeros where the recording does not have it."""
    if part is None or part.numel() == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=None if part is None else part.device)
    if op is Op.GATHER:
        return part[:num_bytes]
    each = part.numel() // size
    return part[each * member : each * member + num_bytes]


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += size
    return offsets


class TorchGroup(ReducedGroup):
    """Over a process group of torch (gloo on the CPU, NCCL on GPUs)."""

    def __init__(self, group: Any) -> None:
        """`group`: a ``torch.distributed`` ProcessGroup or a backend of one."""
        self._group = group

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> Pending:
        options = _options("AllreduceOptions", reduceOp=_torch_op(op))
        return self._group.allreduce([buffer], options)

    def reduce(self, buffer: torch.Tensor, root: int, op: ReduceOp) -> Pending:
        options = _options("ReduceOptions", reduceOp=_torch_op(op), rootRank=root, rootTensor=0)
        return self._group.reduce([buffer], options)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Pending:
        return self._group.broadcast([buffer], _options("BroadcastOptions", rootRank=root, rootTensor=0))

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Pending:
        return self._group._allgather_base(output, part)

    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, op: ReduceOp) -> Pending:
        options = _options("ReduceScatterOptions", reduceOp=_torch_op(op))
        return self._group._reduce_scatter_base(output, parts, options)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Pending:
        works = [self._group.recv([tensor], position, 0) for position, tensor in receives]
        return _All([*works, *(self._group.send([tensor], position, 0) for position, tensor in sends)])


class _All:
    """Several operations as one (implements Pending)."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> object:
        return [work.wait() for work in self._works]


def _options(kind: str, **fields: Any) -> Any:
    from torch._C import _distributed_c10d

    options = getattr(_distributed_c10d, kind)()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _torch_op(op: ReduceOp) -> Any:
    from torch.distributed import ReduceOp as TorchReduceOp

    return getattr(TorchReduceOp, op.name)
