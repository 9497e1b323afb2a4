"""What gloo refuses, for the modes in which no gloo is there to do so: what fails for real must not pass here.

Responsible for the rules of one rank's arguments; what members must agree on is matching.py's.

The rules are those of torch 2.13's ProcessGroupGloo, found by calling it; tests/conformance holds both to the same.
Errors have the type of gloo's. Some of them gloo raises only where the operation is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from prismtrace.model import Op, ReduceOp

if TYPE_CHECKING:
    from prism_sdk.runtime.calls import Call

_DTYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
})  # fmt: skip
_FOR_COMPLEX = frozenset({ReduceOp.UNSPECIFIED, ReduceOp.SUM, ReduceOp.AVG})


def runs_on_gloo(backend: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a group made with `backend` (as the script named it) would use gloo for these tensors."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return on_cpu and (backend in ("gloo", "undefined") or "cpu:gloo" in backend)


def refuse_like_gloo(call: Call) -> None:
    """Raise RuntimeError or ValueError where gloo does."""
    tensors = [*call.contribution, *call.outputs]
    if call.is_p2p or not tensors or not runs_on_gloo(call.group.backend, tensors):
        return
    if call.misfit is not None and (error := call.misfit()) is not None:
        raise error if isinstance(error, Exception) else RuntimeError(f"{call.op.name.lower()}: {error}")
    dtype = tensors[0].dtype
    name = f"{call.op.name.lower()} over gloo"
    if dtype not in _DTYPES or (dtype.is_complex and call.op is Op.GATHER):
        raise RuntimeError(f"{name}: invalid scalar type {dtype}")
    if dtype.is_complex and call.reduce_op not in _FOR_COMPLEX:
        raise RuntimeError(f"{name}: ReduceOp.{call.reduce_op.name} is not supported on complex tensors")
    if call.reduce_op is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"{name}: ReduceOp.AVG of {dtype}: result type Float can't be cast to it")


def unequal(tensors: Iterable[torch.Tensor], like: torch.Tensor) -> str | None:
    """What to say of tensors that must have the shape and dtype of another."""
    for index, tensor in enumerate(tensors):
        if tensor.shape != like.shape:
            return f"invalid tensor size at index {index} (expected {tuple(like.shape)}, got {tuple(tensor.shape)})"
        if tensor.dtype != like.dtype:
            return f"invalid tensor type at index {index} (expected {like.dtype}, got {tensor.dtype})"
    return None


def chunks_misfit(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], size: int) -> str | None:
    """Gathering into one tensor: cut along the first dimension it must give what each of `size` members contributes."""
    for output, tensor in pairs:
        parts = output.chunk(size) if output.dim() else (output,)
        if len(parts) != size:
            return f"the output has {len(parts)} parts for {size} members"
        if (found := unequal(parts, tensor)) is not None:
            return found
    return None


def lists_misfit(by_member: Iterable[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> str | None:
    """Gathering several tensors at once: what each member contributes has its own outputs."""
    for outputs in by_member:
        if len(outputs) != len(inputs):
            return f"invalid output size: (expected length {len(inputs)}, got {len(outputs)})"
        for output, tensor in zip(outputs, inputs, strict=True):
            if (found := unequal([output], tensor)) is not None:
                return found
    return None


def scattered_misfit(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], size: int) -> str | None:
    """Reducing and scattering one tensor: its first dimension is `size` times that of the output, the others equal."""
    for output, tensor in pairs:
        if output.dtype != tensor.dtype:
            return f"the output is {output.dtype}, the input {tensor.dtype}"
        if output.dim() and (output.shape[0] * size, *output.shape[1:]) != tuple(tensor.shape)[: output.dim()]:
            return f"an output of shape {tuple(output.shape)} does not fit an input of shape {tuple(tensor.shape)}"
    return None


def exchange_misfit(
    output: torch.Tensor, tensor: torch.Tensor, *, even: bool, sent: Sequence[int], received: Sequence[int], me: int,
    size: int,
) -> Exception | str | None:  # fmt: skip
    """All-to-all of one tensor: member `me` of `size` sends and receives these numbers of elements to and from each."""
    if not tensor.is_contiguous():
        return ValueError("Tensors must be contiguous")
    if even and output.numel() != tensor.numel():
        return f"the output has {output.numel()} elements, the input {tensor.numel()}"
    if min(*sent, *received, 0) < 0:
        return "a split size is negative"
    if len(sent) != size or len(received) != size:
        return f"{len(sent)} and {len(received)} splits for {size} members"
    if not even and sent[me] != received[me]:
        return f"this rank sends itself {sent[me]} elements and expects {received[me]}"
    return None
