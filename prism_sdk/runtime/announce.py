"""What a sandbox rank tells the assistant of an operation that it has issued, and what each message of it holds.

Responsible for sizes and names; tensors stay where they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from prism_sdk.pruning import Step, program, split
from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.manifest import Expected
from prismtrace import Op, ReduceOp

REDUCTIONS = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})
SAME, DIFFERENT = 1, 2  # what a member contributes against the recording; of the virtual ones: known, not known


@dataclass(frozen=True, slots=True)
class Announcement:
    """An operation as one sandbox member issued it. Ranks are those in the group, but for `rank`."""

    rank: int
    member: int
    handle: tuple[int, int]
    group_id: int
    seq: int  # of the recorded operation that it meets
    op: Op
    reduce_op: ReduceOp
    dtype: torch.dtype  # of the elements that sizes are in: bytes, but for reductions
    root: int | None = None
    peer: int | None = None
    number: int = 0  # of a message's lane
    count: int = 0
    sizes: tuple[int, ...] = ()  # gathers, uneven reduce-scatter: of each member's part; all-to-all: sent to each
    received: tuple[int, ...] = ()  # all-to-all: from each
    tensor_counts: tuple[int, ...] = ()  # reduce-scatter of several tensors, each of which is scattered


def announcement(call: Call, one: Expected, *, rank: int, handle: tuple[int, int]) -> Announcement | None:
    """Describe a call; None for what no transport carries (tensors of several types in one reduction)."""
    size, me = len(call.group.ranks), call.group.group_rank
    count = 1
    sizes: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    dtype = torch.uint8
    if call.op in REDUCTIONS:
        if len({tensor.dtype for tensor in call.contribution}) != 1:
            return None
        dtype, count = call.contribution[0].dtype, call.num_elements_in
        each = tuple(tensor.numel() for tensor in call.contribution)
        if call.op is Op.REDUCE_SCATTER and len(call.deliveries) == len(each) > 1:
            counts = each
        elif call.op is Op.REDUCE_SCATTER and len(each) == size and len(set(each)) > 1:
            sizes = each
    elif call.op is Op.BROADCAST or call.op is Op.SCATTER or call.op is Op.RECV:
        count = sum(tensor.nbytes for tensor in call.outputs)
    elif call.op is Op.SEND:
        count = sum(tensor.nbytes for tensor in call.contribution)
    elif call.op is Op.ALL_TO_ALL:
        sizes = tuple(call.send_bytes or ())
        received = tuple(tensor.nbytes for tensor in call.receive_tensors or ())
        if len(sizes) != size or len(received) != size:
            return None
    elif call.op is Op.ALL_GATHER or call.op is Op.GATHER:
        parts = [0] * size
        for delivery in call.deliveries:
            parts[delivery.source] += delivery.tensor.nbytes
        parts[me] = sum(tensor.nbytes for tensor in call.contribution)
        sizes = tuple(parts)
    return Announcement(
        rank=rank, member=me, handle=handle, group_id=one.group_id, seq=one.seq, op=call.op, reduce_op=call.reduce_op,
        dtype=dtype, root=call.root, peer=call.peer, count=count, sizes=sizes, received=received, tensor_counts=counts,
    )  # fmt: skip


def message_size(announced: Mapping[int, Announcement], size: int, source: int, destination: int, piece: int) -> int:
    """Elements of one message of a collective, from what one of its ends announced (by rank in the group)."""
    one = announced.get(source) or announced[destination]
    if one.op is Op.ALL_REDUCE or one.op is Op.REDUCE_SCATTER:
        bounds = bounds_of(one, size)
        return bounds[piece + 1] - bounds[piece]
    if one.op is Op.ALL_TO_ALL:
        return one.sizes[destination] if one.member == source else one.received[source]
    return one.sizes[piece] if one.sizes else one.count


def bounds_of(one: Announcement, size: int) -> tuple[int, ...]:
    """Where the pieces of an all-reduce or reduce-scatter begin, and the last one's end."""
    if one.op is Op.REDUCE_SCATTER and one.sizes:
        return (0, *accumulate(one.sizes))
    return _chunk_bounds(one.count, size)


@lru_cache(256)
def _chunk_bounds(count: int, size: int) -> tuple[int, ...]:
    """`split`, remembered."""
    return split(count, size)


@lru_cache(256)
def steps_of(op: Op, size: int, member: int, root: int | None) -> tuple[Step, ...]:
    """`program`, remembered."""
    return program(op, size=size, member=member, root=root)


def by_shards(whole: torch.Tensor, counts: tuple[int, ...], size: int) -> torch.Tensor:
    """Tensors one after the other, each of which is scattered, in the order of the members that get the parts."""
    if not counts:
        return whole
    rows = [part.view(size, part.numel() // size) for part in whole.split(counts)]  # of an empty one -1 says nothing
    return torch.cat(rows, dim=1).reshape(-1)


class SameBoard:
    """Whether what each sandbox member, and the virtual ones together, put into an operation is known or as recorded.

    In a sparse anonymous file that all of them share. A flag is there before its owner's first message is.
    """

    def __init__(self, fd: int, num_members: int, num_operations: int) -> None:
        self._fd, self._width, self._num_operations = fd, num_members + 1, num_operations

    def publish(self, handle: tuple[int, int], column: int, value: int) -> None:
        """`column`: position among the sandbox ranks; behind them, the virtual members'."""
        os.pwrite(self._fd, bytes([value]), self._row(handle) + column)

    def read(self, handle: tuple[int, int]) -> bytes:
        """All flags of an operation; 0 where there is none yet."""
        return os.pread(self._fd, self._width, self._row(handle)).ljust(self._width, b"\0")

    def _row(self, handle: tuple[int, int]) -> int:
        return (handle[0] + handle[1] * self._num_operations) * self._width
