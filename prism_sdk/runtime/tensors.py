"""Tensor bytes in and out of contributions, and the reduction of contributions in rank order.

Responsible for memory layout and arithmetic; where the bytes come from is the caller's.

Results are computed by adding up in ascending rank order, in the tensors' own dtype, so they do not depend on who
computes them or when. They are written as a backend writes, past autograd: through `Tensor.data`, as `detach` would
count as a change of the program's tensor, and in inference mode, whose tensors torch lets nobody else change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from prism_sdk.runtime.arena import tensor_memory
from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.oncuda.staging import can_stage, staged, unstaged
from prismtrace.model import Op, ReduceOp

_PIECE_BYTES = 1 << 20

ReadInto = Callable[[int, int, memoryview], None]  # (member, offset in its contribution, destination)

FOLD: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], object]] = {
    ReduceOp.SUM: lambda total, part: total.add_(part),
    ReduceOp.AVG: lambda total, part: total.add_(part),
    ReduceOp.PREMUL_SUM: lambda total, part: total.add_(part),
    ReduceOp.PRODUCT: lambda total, part: total.mul_(part),
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.BAND: lambda total, part: total.bitwise_and_(part),
    ReduceOp.BOR: lambda total, part: total.bitwise_or_(part),
    ReduceOp.BXOR: lambda total, part: total.bitwise_xor_(part),
}


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a view that keeps the tensor alive and leaves its storage resizable."""
    view = tensor_memory(tensor.data_ptr(), tensor.nbytes)
    view.obj.tensor = tensor  # type: ignore[attr-defined]  # the ctypes array behind the view
    return view


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, on the CPU, without pending conjugation or negation."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.cpu().contiguous()


class Bytes:
    """The bytes of some tensors one after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)

    def pieces(self) -> Iterator[memoryview]:
        """All of them in order; each piece is good until the next one is asked for."""
        for tensor in self._tensors:
            if can_stage(tensor):
                yield from map(memory_of, staged(tensor))
            else:
                yield memory_of(plain(tensor))

    def joined(self) -> memoryview | bytes:
        """All in one buffer, without a copy when there is only one."""
        views = [memory_of(plain(tensor)) for tensor in self._tensors]
        return views[0] if len(views) == 1 else b"".join(views)


def fill(tensor: torch.Tensor, read: Callable[[int, memoryview], None], *, in_pieces: bool = False) -> None:
    """Overwrite `tensor` with what `read(offset, memory)` puts into memory of its size, or piece by piece."""
    if tensor.numel() == 0:
        return
    target = tensor.data
    if is_plain(target):
        read(0, memory_of(target))
    elif in_pieces and can_stage(target):
        for offset, piece in unstaged(target):
            read(offset, memory_of(piece))
    else:
        buffer = torch.empty(target.shape, dtype=target.dtype, device="cpu")  # programs change the default device
        read(0, memory_of(buffer))
        with torch.inference_mode():
            target.copy_(buffer)


def combine(call: Call, num_members: int, read_into: ReadInto) -> list[torch.Tensor]:
    """Reduce all contributions to `call` in rank order; one flat tensor for each tensor of the contribution.

    Those of an all-reduce are its outputs where these can be written to: nothing is to be delivered then.
    """
    fold = FOLD[call.reduce_op]

    def reduce(piece: torch.Tensor, room: torch.Tensor, offset: int) -> None:
        for member in range(num_members):
            target = room if member else piece
            read_into(member, offset, memory_of(target))
            if member:
                fold(piece, room)
        if call.reduce_op is ReduceOp.AVG:
            piece.div_(num_members, rounding_mode=None if _is_exact(piece) else "trunc")

    return _in_pieces(call, reduce)


def combine_weighted(
    call: Call, parts: Sequence[tuple[int, int]], num_members: int, read_into: ReadInto
) -> list[torch.Tensor]:
    """As `combine`, where each part is (a member, for how many members its contribution stands)."""
    fold = FOLD[call.reduce_op]

    def reduce(piece: torch.Tensor, room: torch.Tensor, offset: int) -> None:
        for number, (member, weight) in enumerate(parts):
            target = room if number else piece
            read_into(member, offset, memory_of(target))
            # the average is weighted at once: the sum of a thousand half-precision values may be too large
            is_mean = call.reduce_op is ReduceOp.AVG and _is_exact(piece)
            _repeat(target, call.reduce_op, weight / num_members if is_mean else weight)
            if number:
                fold(piece, room)
        if call.reduce_op is ReduceOp.AVG and not _is_exact(piece):
            piece.div_(num_members, rounding_mode="trunc")

    return _in_pieces(call, reduce)


@torch.inference_mode()
def _in_pieces(call: Call, reduce: Callable[[torch.Tensor, torch.Tensor, int], None]) -> list[torch.Tensor]:
    """`reduce(piece, room of its size, offset in a contribution)` for pieces that stay in the processor's cache.

    Room for a whole contribution beside the result would be new memory each time, which the system clears first: half
    of what a large reduction took.
    """
    totals, offset = [], 0
    outputs = call.outputs if call.op is Op.ALL_REDUCE and len(call.outputs) == len(call.contribution) else []
    for index, like in enumerate(call.contribution):
        output = outputs[index].data if outputs else like
        is_own = bool(outputs) and is_plain(output) and output.dtype == like.dtype and output.numel() == like.numel()
        total = output.view(-1) if is_own else torch.empty(like.numel(), dtype=like.dtype, device="cpu")
        each = max(_PIECE_BYTES // like.itemsize, 1)
        room = torch.empty(min(each, like.numel()), dtype=like.dtype, device="cpu")
        for piece in total.split(each) if like.numel() else ():
            reduce(piece, room[: piece.numel()], offset)
            offset += piece.nbytes
        totals.append(total)
    return totals


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is its values one after the other, on the host."""
    return (
        tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    )  # fmt: skip


def _is_exact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


_SUMS = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM})


def _repeat(tensor: torch.Tensor, op: ReduceOp, times: float) -> None:
    """In place: what `times` equal contributions come to."""
    if times == 1:
        return
    if op in _SUMS and tensor.dtype != torch.bool:
        tensor.mul_(times)
    elif op is ReduceOp.PRODUCT and tensor.dtype != torch.bool:
        tensor.pow_(times)
    elif op is ReduceOp.BXOR and times % 2 == 0:
        tensor.zero_()


def deliver(
    call: Call, read_into: ReadInto, send_bytes: Callable[[int], Sequence[int]], *, in_pieces: bool = False
) -> None:
    """Fill the outputs of `call`. Of an all-to-all, `send_bytes(member)` says how a contribution is split.

    `in_pieces`: a contribution may be read in pieces.
    """
    places = [(one.tensor, one.source, one.offset_bytes) for one in call.deliveries]
    if call.receive_tensors is not None:
        me = call.group.group_rank
        places += [(tensor, member, sum(send_bytes(member)[:me])) for member, tensor in enumerate(call.receive_tensors)]
    for tensor, source, start in places:
        fill(tensor, lambda at, view, m=source, o=start: read_into(m, o + at, view),  # type: ignore[misc]
             in_pieces=in_pieces)  # fmt: skip


def deliver_repeated(call: Call, of_member: NDArray[np.int32], read_into: ReadInto) -> bool:
    """As `deliver`, for a gather of which many members give the same: each different part is read once, and repeated.

    `of_member`: equal numbers for members that give the same. False, and nothing done, where outputs are not the
    members' parts one after the other.
    """
    if call.op is not Op.ALL_GATHER or not _is_regular(call):
        return False
    _, first, inverse = np.unique(of_member, return_index=True, return_inverse=True)
    part_of = torch.from_numpy(inverse.reshape(-1))
    offset = 0
    for output, like in zip(call.outputs, call.contribution, strict=True):
        parts = torch.empty((len(first), like.numel()), dtype=like.dtype, device="cpu")
        for part, member in zip(parts, first.tolist(), strict=True):
            read_into(member, offset, memory_of(part))
        rows = output.data.view(len(call.group.ranks), like.numel())
        with torch.inference_mode():
            rows.copy_(parts.expand(len(rows), -1) if len(first) == 1 else parts[part_of])
        offset += like.nbytes
    return True


def _is_regular(call: Call) -> bool:
    """Whether each output holds the members' parts one after the other."""
    size = len(call.group.ranks)
    return len(call.outputs) == len(call.contribution) and all(
        output.is_contiguous() and like.numel() > 0 and output.numel() == size * like.numel()
        and not output.is_conj() and not output.is_neg()
        for output, like in zip(call.outputs, call.contribution, strict=True)
    )  # fmt: skip


def deliver_locally(call: Call, source: Sequence[torch.Tensor]) -> None:
    """Fill the outputs of `call` from one source at hand (`combine`'s result), without shared memory."""
    data = Bytes(source)
    view = memoryview(data.joined())

    def read_into(_source: int, offset: int, target: memoryview) -> None:
        copy_bytes(target, view[offset : offset + len(target)])

    deliver(call, read_into, lambda member: (), in_pieces=True)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """memcpy without the interpreter lock, so that a second thread of the rank goes on; nothing onto itself."""
    if not len(target):
        return
    destination = (ctypes.c_char * len(target)).from_buffer(target)
    if source.readonly:
        target[:] = source
        return
    origin = (ctypes.c_char * len(source)).from_buffer(source)
    if ctypes.addressof(origin) != ctypes.addressof(destination):
        ctypes.memmove(destination, origin, len(target))


def memory_differs(a: memoryview, b: memoryview) -> bool:
    """Whether two pieces of memory differ, compared in one pass without a copy."""
    count = len(a)
    if count != len(b):
        return True
    whole = count - count % 8
    first = torch.frombuffer(a, dtype=torch.int64, count=whole // 8) if whole else None
    if first is not None and not torch.equal(first, torch.frombuffer(b, dtype=torch.int64, count=whole // 8)):
        return True
    return bytes(a[whole:]) != bytes(b[whole:])
