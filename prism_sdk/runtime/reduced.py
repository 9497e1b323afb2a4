"""A collective of a large group as one call of the library's own collective among few ranks, both ends of it.

Responsible for what goes into the reduced call at a sandbox rank and at the assistant that stands for all virtual
members, and for the results in it. Sizes are prism_sdk.pruning.native's; when the assistant joins, which is what makes
a call last as long as the full one, is its caller's; a `ReducedGroup` is how a library is called.

A reduced communicator has the k sandbox members of a group at positions 0 to k - 1, and the assistant at k. In a
reduction the assistant contributes what all virtual members do together, so results are right whatever the sandbox
ranks contribute. Of a gather only the sandbox members' parts travel in front of what merely weighs: the virtual ones'
are those of the recording, which a sandbox rank has at hand. Where nobody needs the values both ends give nothing, and
the call only weighs: it is as long and loads the links as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache

import torch

from prism_sdk.pruning import Pending, reduced_size, ring_sends, scaled_count
from prism_sdk.runtime.announce import REDUCTIONS, Announcement, bounds_of
from prism_sdk.runtime.reducedgroups import Part, ReducedGroup
from prismtrace import Op, ReduceOp

Room = Callable[[int, torch.dtype], torch.Tensor]
"""Makes a flat tensor that a call may use until it has ended: (elements, type)."""

WHOLE = -1
"""Key of the combined result among the parts of a call."""


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
        own: what it contributes, flat: elements of a reduction (of a reduce-scatter by shards), else bytes. With
            nothing the call only weighs, and its parts mean nothing.
        room: makes scratch memory.

    Returns:
        The call with the parts that come from sandbox members, and what a broadcast's, scatter's or all-to-all's
        virtual members sent. Reductions have `WHOLE` (this member's shard of a reduce-scatter; nothing but at the root
        of a reduce), not yet divided for an average.

    Raises:
        ValueError: an operation that has no reduced form.
    """
    if one.op in (Op.ALL_REDUCE, Op.BARRIER):
        buffer = room(shape.scaled(Op.ALL_REDUCE, max(one.count, 1)), one.dtype)
        buffer[: own.numel()] = own
        return Running(group.all_reduce(buffer, _sum_of(one)), {WHOLE: buffer[: one.count]})
    if one.op is Op.REDUCE:
        assert one.root is not None
        buffer = _filled(room, own, count=one.count, dtype=one.dtype)
        work = group.reduce(buffer, shape.position(one.root), _sum_of(one))
        return Running(work, {WHOLE: buffer} if one.member == one.root else {})
    if one.op is Op.REDUCE_SCATTER:
        bounds = bounds_of(one, shape.size)
        shards = [own[bounds[member] : bounds[member + 1]] for member in shape.members] if own.numel() else []
        output, work = _reduce_scatter(one, group, shape, shards, room)
        return Running(work, {WHOLE: output[: bounds[one.member + 1] - bounds[one.member]]})
    if one.op is Op.ALL_GATHER:
        output, work = _all_gather(one, group, shape, own, room)
        rows = output.view(shape.num_ranks, output.numel() // shape.num_ranks)
        return Running(work, {m: rows[at][: one.sizes[m]] for at, m in enumerate(shape.members)})
    if one.op is Op.BROADCAST:
        assert one.root is not None
        is_root = one.member == one.root
        buffer = _filled(room, own, count=one.count) if is_root else room(one.count, torch.uint8)
        return Running(group.broadcast(buffer, shape.position(one.root)), {one.root: buffer})
    sent, taken = _messages(one, shape.size)
    weighs = not own.numel()  # then nothing is copied: all pieces of the room may be the same memory
    if weighs:
        own = room(sum(sent), torch.uint8)
    offsets = _offsets(sent)
    blocks = {m: own[offsets[m] : offsets[m] + sent[m]] for m in range(shape.size) if sent[m]}
    return _exchange(group, shape, blocks=blocks, sizes=taken, own=one.member, room=room, weighs=weighs)


def join_as_virtual(
    announced: Mapping[int, Announcement], group: ReducedGroup, shape: Shape, parts: Mapping[int, torch.Tensor],
    room: Room, *, splits: Mapping[int, Sequence[int]] | None = None,
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
        whole = parts[WHOLE] if WHOLE in parts else room(0, one.dtype)
        buffer = _filled(room, whole, count=one.count, dtype=one.dtype)
        return group.reduce(buffer, shape.position(one.root), _sum_of(one))
    if one.op is Op.REDUCE_SCATTER:
        bounds = bounds_of(one, shape.size)
        known = [parts[WHOLE]] if WHOLE in parts else []
        shards = [whole[bounds[member] : bounds[member + 1]] for whole in known for member in shape.members]
        return _reduce_scatter(one, group, shape, shards, room)[1]
    if one.op is Op.ALL_GATHER:
        return _all_gather(one, group, shape, room(0, torch.uint8), room)[1]
    if one.op is Op.BROADCAST:
        assert one.root is not None
        has_root = one.root in parts
        buffer = _filled(room, parts[one.root], count=one.count) if has_root else room(one.count, torch.uint8)
        return group.broadcast(buffer, shape.position(one.root))
    sends, receives = [], []
    for member in shape.members:
        told = announced[member]
        sent, taken = _messages(told, shape.size)
        at = shape.position(member)
        if length := sum(sent[m] for m in shape.virtual):
            receives.append((at, room(length, torch.uint8)))
        if length := sum(taken[m] for m in shape.virtual):
            leaving, offset = room(length, torch.uint8), 0
            for giver in shape.virtual if parts else ():
                block = leaving[offset : offset + taken[giver]]
                _put_block(block, told.op, parts.get(giver), member, shape.size, (splits or {}).get(giver))
                offset += taken[giver]
            sends.append((at, leaving))
    return group.exchange(sends, receives)


def _sum_of(one: Announcement) -> ReduceOp:
    """An average is a sum that is divided where it arrives: the library would divide by the few that are there."""
    return ReduceOp.SUM if one.reduce_op is ReduceOp.AVG or one.op is Op.BARRIER else one.reduce_op


def _filled(
    room: Room, source: torch.Tensor, *, count: int | None = None, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Room for `count` elements (as many as `source` has) that begins with those of `source`."""
    buffer = room(source.numel() if count is None else count, source.dtype if source.numel() else dtype)
    num = min(source.numel(), buffer.numel())
    buffer[:num] = source[:num]
    return buffer


def _reduce_scatter(
    one: Announcement, group: ReducedGroup, shape: Shape, shards: Sequence[torch.Tensor], room: Room
) -> tuple[torch.Tensor, Pending]:
    bounds = bounds_of(one, shape.size)
    largest = max(bounds[m + 1] - bounds[m] for m in shape.members)
    count = max(shape.scaled(Op.REDUCE_SCATTER, Fraction(one.count, shape.size)), largest)
    parts = room(count * shape.num_ranks, one.dtype)
    for row, shard in zip(parts.view(shape.num_ranks, count), shards, strict=False):
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
    group: ReducedGroup, shape: Shape, *, blocks: Mapping[int, torch.Tensor], sizes: Sequence[int], own: int,
    room: Room, weighs: bool,
) -> Running:  # fmt: skip
    """Messages with sandbox members one by one, with all virtual members as one."""

    def copied(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        joined = room(sum(part.numel() for part in parts), torch.uint8)
        return joined if weighs else torch.cat(list(parts), out=joined)

    sends: list[Part] = []
    receives: list[Part] = []
    parts: dict[int, torch.Tensor] = {}
    for member in shape.members:
        if member == own:
            if sizes[own]:
                parts[own] = copied([blocks[own]])
            continue
        if member in blocks:
            sends.append((shape.position(member), copied([blocks[member]])))
        if sizes[member]:
            parts[member] = room(sizes[member], torch.uint8)
            receives.append((shape.position(member), parts[member]))
    assistant = len(shape.members)
    if leaving := [blocks[m] for m in shape.virtual if m in blocks]:
        sends.append((assistant, copied(leaving)))
    if length := sum(sizes[m] for m in shape.virtual):
        coming, offset = room(length, torch.uint8), 0
        receives.append((assistant, coming))
        for member in filter(sizes.__getitem__, shape.virtual):
            parts[member] = coming[offset : offset + sizes[member]]
            offset += sizes[member]
    return Running(group.exchange(sends, receives), parts)


def _put_block(
    target: torch.Tensor, op: Op, part: torch.Tensor | None, member: int, size: int, splits: Sequence[int] | None
) -> None:
    """What a virtual member sends to a sandbox one; zeros where the recording does not have it."""
    source = target[:0] if part is None else part
    if op is not Op.GATHER:
        sizes = splits or (source.numel() // size,) * size
        start = sum(sizes[:member])
        source = source[start : start + sizes[member]]
    num = min(source.numel(), target.numel())
    target[:num] = source[:num]
    target[num:] = 0


def message(
    one: Announcement, group: ReducedGroup, room: Room, *, is_virtual: bool, own: torch.Tensor | None = None
) -> Pending:
    """Start a message between a sandbox rank (position 0) and a virtual one (position 1), from either end.

    Args:
        own: what the sender sends, flat bytes; absent: it only weighs.
    """
    sends = (one.op is Op.SEND) != is_virtual
    tensor = own if sends and own is not None else room(one.count, torch.uint8)
    part = (0 if is_virtual else 1, tensor)
    return group.exchange([part] if sends else [], [] if sends else [part])


def needs_values(op: Op, reduce_op: ReduceOp, dtype: torch.dtype | None, shape: Shape) -> bool:
    """Whether the call must carry values: what comes of it cannot be had from the recording and one rank's own part.

    All ends say the same. A sum or an average with one sandbox member is the recorded one, plus what that member
    contributes now, less what it did then. What a library like NCCL does not reduce is not carried.
    """
    if op in (Op.BARRIER, Op.SEND, Op.RECV):
        return False
    if op in REDUCTIONS and (reduce_op not in _REDUCED or dtype not in _CARRIED):
        return False
    return len(shape.members) > 1 or (op in REDUCTIONS and reduce_op not in (ReduceOp.SUM, ReduceOp.AVG))


_REDUCED = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT})
_CARRIED = frozenset(
    {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16}
)


def weighed(one: Announcement) -> Announcement:
    """The call as one that only weighs: a sum, of bytes where a library like NCCL does not have the type."""
    if one.op not in REDUCTIONS:
        return one
    if one.dtype in _CARRIED:
        return replace(one, reduce_op=ReduceOp.SUM)
    return replace(one, reduce_op=ReduceOp.SUM, dtype=torch.uint8, count=one.count * one.dtype.itemsize)


def sent_bytes(one: Announcement, shape: Shape) -> tuple[Fraction, Fraction]:
    """Bytes that a sandbox rank sends in the whole group's ring, and in the reduced call."""
    if one.op in (Op.SEND, Op.RECV):
        size = Fraction(one.count if one.op is Op.SEND else 0)
        return size, size
    if one.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER):
        count = sum(one.sizes) if one.op is Op.ALL_GATHER else one.count
        return _sent_in_rings(one.op, count, one.dtype.itemsize, shape)
    if one.op in (Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER):
        sent = _messages(one, shape.size)[0]
        size = Fraction(sum(sent) - sent[one.member])
        return size, size
    return Fraction(0), Fraction(0)


@lru_cache(1024)  # a program asks for the same again and again, and fractions take long
def _sent_in_rings(op: Op, num_elements: int, item: int, shape: Shape) -> tuple[Fraction, Fraction]:
    """`num_elements` of a gather: of all parts together."""
    count = Fraction(num_elements)
    if op is not Op.ALL_REDUCE:
        count /= shape.size
    scaled = ring_sends(op, shape.num_ranks, shape.scaled(op, count)) if count else Fraction(0)
    return ring_sends(op, shape.size, count) * item, scaled * item


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += size
    return offsets
