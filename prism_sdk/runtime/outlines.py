"""What a trace keeps of a call, straight from the arguments of the frequent `c10d::` operators.

Responsible for the figures of these operators and nothing else; operators.py knows all of them, and what a mode needs
that moves the data itself.  Observing is on the way of every call, and a `Call` with its deliveries costs more than
the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from prism_sdk.runtime.calls import GroupState
from prism_sdk.runtime.operators import DTYPES, REDUCE_OPS
from prism_sdk.runtime.reductions import code_of
from prismtrace.model import DType, Op, ReduceOp

Outline = tuple[
    Op, ReduceOp, DType, int, int, int | None, int | None, bool, list[int] | None, list[int] | None,
    Sequence[torch.Tensor], int, bool,
]  # fmt: skip
"""Operation, reduction, type of elements, their number in and out, group rank of root or peer, tag, whether it is
asynchronous, elements for and from each member, tensors that take the result, calls of NCCL that it becomes, and
whether it runs on a GPU."""

Outliner = Callable[[GroupState, tuple[Any, ...]], Outline | None]

_NO_REDUCTION, _UNSPECIFIED = ReduceOp.UNSPECIFIED, DType.UNSPECIFIED
_REDUCTION_OF = tuple(REDUCE_OPS[code] for code in range(len(REDUCE_OPS)))
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER = Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER
_BROADCAST, _ALL_TO_ALL, _SEND, _RECV = Op.BROADCAST, Op.ALL_TO_ALL, Op.SEND, Op.RECV


def _all_reduce(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    tensors = args[0]
    if len(tensors) != 1:
        return None
    tensor = tensors[0]
    num = tensor.numel()
    return (
        _ALL_REDUCE, _REDUCTION_OF[code_of(args[2])], DTYPES.get(tensor.dtype, _UNSPECIFIED), num, num, None, None,
        args[4] if len(args) > 4 else True, None, None, (tensor,), 1, tensor.is_cuda,
    )  # fmt: skip


def _broadcast(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    tensors, root = args[0], args[2]
    if len(tensors) != 1:
        return None
    tensor = tensors[0]
    num = tensor.numel()
    return (
        _BROADCAST, _NO_REDUCTION, DTYPES.get(tensor.dtype, _UNSPECIFIED), num if group.group_rank == root else 0, num,
        root, None, args[4] if len(args) > 4 else True, None, None, (tensor,), 1, tensor.is_cuda,
    )  # fmt: skip


def _all_gather(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    output, tensor = args[0], args[1]
    if not output.is_contiguous():
        return None  # may have rows that cannot be told apart
    return (
        _ALL_GATHER, _NO_REDUCTION, DTYPES.get(tensor.dtype, _UNSPECIFIED), tensor.numel(), output.numel(), None, None,
        args[3] if len(args) > 3 else True, None, None, (output,), 1, output.is_cuda,
    )  # fmt: skip


def _all_gather_coalesced(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    outputs, inputs = args[0], args[1]
    if not outputs or len(outputs) != len(inputs) or not all(output.is_contiguous() for output in outputs):
        return None
    return (
        _ALL_GATHER, _NO_REDUCTION, DTYPES.get(inputs[0].dtype, _UNSPECIFIED), sum([t.numel() for t in inputs]),
        sum([t.numel() for t in outputs]), None, None, args[3] if len(args) > 3 else True, None, None, tuple(outputs),
        len(inputs), outputs[0].is_cuda,
    )  # fmt: skip


def _reduce_scatter(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    output, tensor = args[0], args[1]
    return (
        _REDUCE_SCATTER, _REDUCTION_OF[code_of(args[3])], DTYPES.get(tensor.dtype, _UNSPECIFIED), tensor.numel(),
        output.numel(), None, None, args[4] if len(args) > 4 else True, None, None, (output,), 1, output.is_cuda,
    )  # fmt: skip


def _reduce_scatter_coalesced(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    outputs, inputs = args[0], args[1]
    if not outputs or len(outputs) != len(inputs):
        return None
    return (
        _REDUCE_SCATTER, _REDUCTION_OF[code_of(args[3])], DTYPES.get(inputs[0].dtype, _UNSPECIFIED),
        sum([t.numel() for t in inputs]), sum([t.numel() for t in outputs]), None, None,
        args[4] if len(args) > 4 else True, None, None, tuple(outputs), len(inputs), outputs[0].is_cuda,
    )  # fmt: skip


def _all_to_all(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    output, tensor = args[0], args[1]
    if not tensor.dim() or not output.dim():
        return None
    size = len(group.ranks)
    rows_in, rows_out = tensor.size(0), output.size(0)
    num_in, num_out = tensor.numel(), output.numel()
    per_row, out_per_row = num_in // rows_in if rows_in else 0, num_out // rows_out if rows_out else 0
    return (
        _ALL_TO_ALL, _NO_REDUCTION, DTYPES.get(tensor.dtype, _UNSPECIFIED), num_in, num_out, None, None,
        args[5] if len(args) > 5 else True,
        [n * per_row for n in args[4]] if args[4] else [rows_in // size * per_row] * size,
        [n * out_per_row for n in args[3]] if args[3] else [rows_out // size * out_per_row] * size,
        (output,), 1, output.is_cuda,
    )  # fmt: skip


def _send(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    tensors = args[0]
    if len(tensors) != 1:
        return None
    tensor = tensors[0]
    return (
        _SEND, _NO_REDUCTION, DTYPES.get(tensor.dtype, _UNSPECIFIED), tensor.numel(), 0, args[2], args[3], True, None,
        None, (), 1, tensor.is_cuda,
    )  # fmt: skip


def _recv(group: GroupState, args: tuple[Any, ...]) -> Outline | None:
    tensors = args[0]
    if len(tensors) != 1:
        return None
    tensor = tensors[0]
    return (
        _RECV, _NO_REDUCTION, DTYPES.get(tensor.dtype, _UNSPECIFIED), 0, tensor.numel(), args[2], args[3], True, None,
        None, (tensor,), 1, tensor.is_cuda,
    )  # fmt: skip


OUTLINES: dict[str, Outliner] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": _all_gather,
    "allgather_into_tensor_coalesced_": _all_gather_coalesced,
    "_reduce_scatter_base_": _reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "alltoall_base_": _all_to_all,
    "send": _send,
    "recv_": _recv,
}
"""Operator name -> its outline, or None for a call that only a `Call` describes."""
