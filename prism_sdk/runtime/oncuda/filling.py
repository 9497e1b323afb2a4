"""Puts recorded values that lie on the device into the tensors of an operation, in stream order.

Responsible for what comes from where and for the compensation of reductions; it makes no allocation and waits for
nothing, so that memory peaks are the program's own.  Nothing here needs a GPU: on CPU tensors it does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from prism_sdk.runtime.calls import COMBINED, Call
from prism_sdk.runtime.manifest import OWN, Expected
from prism_sdk.runtime.oncuda.staging import flat_bytes
from prismtrace import Op, ReduceOp

SMALL_BYTES = 65_536
"""Tensors up to this size may steer a program; larger ones of floating-point numbers do not."""

_RANDOM = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_SCALE = 1e-6
_FROM_OTHERS = frozenset({Op.RECV, Op.BROADCAST, Op.SCATTER})  # this rank's own part cannot stand for what they bring

Pieces = Sequence[torch.Tensor]  # flat bytes, one after the other
#: (flat output; flat bytes of result, live and recorded contribution; operation; members) -> whether it was done
Compensate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ReduceOp, int], bool]


@dataclass(frozen=True)
class Recorded:
    """A recorded payload on the device: flat bytes from `start` of it on, and room of a byte for each element."""

    start: int
    data: torch.Tensor
    scratch: torch.Tensor


def can_fill(call: Call) -> bool:
    """Whether the operation's tensors are laid out as this module (and NCCL) wants them."""
    return all(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() for tensor in call.contribution)


def needs_filling(call: Call, one: Expected) -> bool:
    """Whether anything is to be copied: nothing is where no values were recorded, and the operation is in place."""
    if not call.deliveries and not call.receive_tensors:
        return False
    if one.sources or call.receive_tensors or len(call.contribution) != 1:
        return True
    start = call.contribution[0].data_ptr()
    return any(
        delivery.tensor.data_ptr() != start + delivery.offset_bytes or delivery.source != COMBINED
        for delivery in call.deliveries
    )


def plain_copies(
    call: Call, one: Expected, recorded: Mapping[int, tuple[int, int]]
) -> list[tuple[int, int, int]] | None:
    """How to fill the outputs of `call` where it takes nothing but copies of whole pieces: it costs the host least.

    Args:
        call: the operation.
        one: what it meets in the recording.
        recorded: address and size of payloads by source, as of `fill_from`.

    Returns:
        Address to copy to, address to copy from, and bytes, of each copy; None where `fill_from` is needed.
    """
    if call.receive_tensors or COMBINED in recorded or (not recorded and call.op in _FROM_OTHERS):
        return None
    me, copies = call.group.group_rank, []
    own = None if len(call.contribution) != 1 else (call.contribution[0].data_ptr(), call.contribution[0].nbytes)
    for delivery in call.deliveries:
        span, member, tensor = own, delivery.source, delivery.tensor
        if recorded:
            if member == COMBINED:
                return None
            if call.op is Op.RECV or member != me:
                span = recorded.get(one.giver(member), own)
        num_bytes = tensor.nbytes
        if span is None or delivery.offset_bytes + num_bytes > span[1] or not tensor.is_contiguous():
            return None
        target, source = tensor.data_ptr(), span[0] + delivery.offset_bytes
        if num_bytes and target != source:
            copies.append((target, source, num_bytes))
    return copies


@torch.inference_mode()
def fill_from(
    call: Call, one: Expected, recorded: Mapping[int, Recorded], compensate: Compensate | None = None
) -> None:
    """Fill the outputs of `call` on the current stream.

    Args:
        call: the operation.
        one: what it meets in the recording.
        recorded: payloads by source (group rank, COMBINED or OWN); empty where no values were recorded.
        compensate: a quicker way, where there is one.
    """
    own = [flat_bytes(tensor) for tensor in call.contribution]
    me = call.group.group_rank
    if not recorded:
        if call.op is Op.SCATTER and me == call.root:
            _deliver(call, lambda member: own, lambda member: ())
        elif call.op is Op.RECV:
            make_up(call.outputs)
        elif call.op is not Op.BROADCAST:  # what this rank gives stands for what others gave, and zeros for the rest
            _deliver(call, lambda member: own, lambda member: call.send_bytes or ())
        return
    if COMBINED in recorded:
        _reduce(call, recorded[COMBINED], recorded.get(OWN), compensate)
        return

    def pieces(member: int) -> Pieces:
        known = recorded.get(one.giver(member)) if call.op is Op.RECV or member != me else None
        return own if known is None else [known.data]

    def send_bytes(member: int) -> Sequence[int]:
        return call.send_bytes or () if member == me else one.send_bytes[one.giver(member)]

    _deliver(call, pieces, send_bytes, is_recorded=True)


@torch.inference_mode()
def make_up(tensors: Sequence[torch.Tensor]) -> None:
    """Fill what nobody knows: zeros, but small random numbers where there are many.

    Products of zeros take so little power that the GPU's clock stays higher than in the job, by a tenth and more. As
    gradients or activations numbers of this size do no harm.
    """
    for tensor in tensors:
        if tensor.nbytes > SMALL_BYTES and tensor.dtype in _RANDOM:
            tensor.data.normal_(std=_SCALE, generator=_generator(tensor.device))
        else:
            tensor.data.zero_()


@cache
def _generator(device: torch.device) -> torch.Generator:
    """Of Prism's own: the program's random numbers stay as they are."""
    return torch.Generator(device)


@torch.inference_mode()
def fill_alone(call: Call) -> bool:
    """Fill the outputs of an operation in a group of one, on the current stream; False where the host has to."""
    if not can_fill(call):
        return False
    own = [flat_bytes(tensor) for tensor in call.contribution]
    _deliver(call, lambda member: own, lambda member: call.send_bytes or ())
    return True


def _deliver(
    call: Call, pieces: Callable[[int], Pieces], send_bytes: Callable[[int], Sequence[int]], *,
    is_recorded: bool = False,
) -> None:  # fmt: skip
    for delivery in call.deliveries:
        copy_pieces(delivery.tensor, pieces(delivery.source) if delivery.source != COMBINED else pieces(0),
              delivery.offset_bytes)  # fmt: skip
    me = call.group.group_rank
    for member, tensor in enumerate(call.receive_tensors or ()):
        given, sizes = pieces(member), send_bytes(member)
        offset = sum(sizes[:me])
        if is_recorded and member != me and sizes[me] != tensor.nbytes:
            given, offset = _resized(_cut(given, offset, sizes[me]), tensor.nbytes), 0
        copy_pieces(tensor, given, offset)


def _resized(pieces: Pieces, num_bytes: int) -> Pieces:
    """What was recorded for this rank in another size: cut, or repeated from its beginning (making_up.fill_resized)."""
    size = sum(piece.numel() for piece in pieces)
    return [*pieces] * -(-num_bytes // size) if size else []


def copy_pieces(target: torch.Tensor, pieces: Pieces, offset: int) -> None:
    """Fill `target` from byte `offset` of `pieces` on; zeros where they end before it does."""
    if target.numel() == 0:
        return
    if not target.is_contiguous():
        (piece,) = (p for p in _cut(pieces, offset, target.nbytes))  # one message has one tensor
        target.data.copy_(piece.view(target.dtype).view(target.shape))
        return
    flat, at = flat_bytes(target), 0
    for piece in _cut(pieces, offset, target.nbytes):
        part = flat[at : at + piece.numel()]
        if part.data_ptr() != piece.data_ptr():  # gathered in place
            part.copy_(piece)
        at += piece.numel()
    if at < flat.numel():
        flat[at:].zero_()


def _cut(pieces: Pieces, offset: int, num_bytes: int) -> list[torch.Tensor]:
    """`num_bytes` from `offset` on, in as many parts as there are; fewer where they end before."""
    parts = []
    for piece in pieces:
        if num_bytes and offset < piece.numel():
            part = piece[offset : offset + num_bytes]
            parts.append(part)
            num_bytes -= part.numel()
            offset = 0
        else:
            offset = max(offset - piece.numel(), 0)
    return parts


def _reduce(call: Call, total: Recorded, then: Recorded | None, compensate: Compensate | None) -> None:
    """The recorded result; elements that this rank contributes otherwise than then are compensated for it."""
    position = 0
    own = [flat_bytes(tensor) for tensor in call.contribution]
    for delivery in call.deliveries:
        output = delivery.tensor
        size = output.nbytes
        part = total.data[position : position + size]
        position += size
        if not size:
            continue
        live = _cut(own, delivery.offset_bytes, size)
        start = delivery.offset_bytes - then.start if then is not None else -1
        if then is None or start < 0 or start + size > then.data.numel() or len(live) != 1 or not _can_differ(call):
            copy_pieces(output, [part], 0)
            continue
        item = output.element_size()
        mask = then.scratch[start // item : (start + size) // item].view(torch.bool)
        was = then.data[start : start + size]
        num_members = len(call.group.ranks)
        is_flat = output.is_contiguous()
        flat = flat_bytes(output).view(output.dtype) if is_flat else was.view(output.dtype)
        if is_flat and compensate is not None and compensate(flat, part, live[0], was, call.reduce_op, num_members):
            continue
        _compensate_flat(flat, part, live[0], was, mask, call.reduce_op, num_members=num_members)
        if not is_flat:
            output.data.copy_(flat.view(output.shape))


@torch.no_grad()
def warm_up(memory: torch.Tensor) -> None:
    """Run what compensates once on memory that nobody uses: loading a kernel waits for the whole device."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts = [memory[512 * i : 512 * i + dtype.itemsize] for i in range(3)]
        if memory.numel() < 2048:
            return
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            same = memory[1536:1537].view(torch.bool)
            _compensate_flat(parts[0].view(dtype), parts[0], parts[1], parts[2], same, op, num_members=2)


def _can_differ(call: Call) -> bool:
    output = call.outputs[0]
    if output.is_floating_point() and output.element_size() == 1:  # torch does not add them
        return False
    if call.reduce_op is ReduceOp.AVG:
        return output.is_floating_point() or output.is_complex()
    return call.reduce_op in _COMPENSATED and output.dtype is not torch.bool


_COMPENSATED = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN})
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _compensate_flat(
    output: torch.Tensor, result: torch.Tensor, live: torch.Tensor, then: torch.Tensor, same: torch.Tensor,
    op: ReduceOp, *, num_members: int,
) -> None:  # fmt: skip
    """As emulate.py does on the host, but element by element: what is equal bit by bit stays as recorded to the bit.

    `output` is flat; `result`, `live` and `then` are flat bytes; `then` and `same` (a byte each element) are used up.
    """
    dtype = output.dtype
    bits = _BITS.get(output.element_size())
    if bits is not None:
        torch.eq(live.view(bits), then.view(bits), out=same)
    else:
        torch.eq(live.view(dtype), then.view(dtype), out=same)
    total, mine, was = result.view(dtype), live.view(dtype), then.view(dtype)
    if op is ReduceOp.MAX:
        torch.maximum(total, mine, out=was)
    elif op is ReduceOp.MIN:
        torch.minimum(total, mine, out=was)
    else:
        torch.sub(mine, was, out=was)
        if op is ReduceOp.AVG:
            was.div_(num_members)
        was.add_(total)
    torch.where(same, total, was, out=output)
