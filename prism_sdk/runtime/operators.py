"""From the arguments of each `c10d::` operator to a `Call`.

Responsible for knowing the operators' schemas (torch 2.9 to 2.14) and nothing else; intercept.py installs the kernels.
The lists of lists in the schemas are a relic of several devices per process: the first element is the only one used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from prism_sdk.runtime import refusals
from prism_sdk.runtime.calls import COMBINED, Call, Delivery, GroupState, LateDeliveries
from prism_sdk.runtime.reductions import code_of
from prismtrace.model import DType, Op, ReduceOp

# c10d::ReduceOp::RedOpType
REDUCE_OPS = {
    0: ReduceOp.SUM, 1: ReduceOp.AVG, 2: ReduceOp.PRODUCT, 3: ReduceOp.MIN, 4: ReduceOp.MAX,
    5: ReduceOp.BAND, 6: ReduceOp.BOR, 7: ReduceOp.BXOR, 8: ReduceOp.PREMUL_SUM,
}  # fmt: skip

DTYPES = {getattr(torch, member.name.lower()): member for member in DType if hasattr(torch, member.name.lower())}

Native = Callable[[], Any]
Parser = Callable[[GroupState, Native, tuple[Any, ...]], Call]


def dtype_of(tensors: Sequence[torch.Tensor]) -> DType:
    return DTYPES.get(tensors[0].dtype, DType.UNSPECIFIED) if tensors else DType.UNSPECIFIED


def _argument(args: tuple[Any, ...], index: int, default: Any) -> Any:
    """Trailing arguments equal to their default may be left out by the dispatcher."""
    return args[index] if len(args) > index else default


def _slices(tensors: Sequence[torch.Tensor], source: int, start_bytes: int = 0) -> list[Delivery]:
    """Deliveries that fill `tensors` one after the other from `start_bytes` of one source."""
    deliveries = []
    for tensor in tensors:
        deliveries.append(Delivery(tensor, source, start_bytes))
        start_bytes += tensor.nbytes
    return deliveries


def _all_reduce(group: GroupState, native: Native, args: tuple[Any, ...], async_index: int) -> Call:
    tensors = args[0]
    return Call(
        Op.ALL_REDUCE, group, native, contribution=list(tensors), outputs=list(tensors),
        deliveries=_slices(tensors, COMBINED), reduce_op=REDUCE_OPS[code_of(args[2])],
        is_async=_argument(args, async_index, True), dtype=dtype_of(tensors),
    )  # fmt: skip


def _broadcast(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    tensors, root = args[0], args[2]
    mine = group.group_rank == root
    return Call(
        Op.BROADCAST, group, native, contribution=list(tensors) if mine else [], outputs=list(tensors),
        deliveries=[] if mine else _slices(tensors, root), root=root, is_async=_argument(args, 4, True),
        dtype=dtype_of(tensors),
    )  # fmt: skip


def _reduce(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    tensors, root = args[0], args[3]
    mine = group.group_rank == root
    return Call(
        Op.REDUCE, group, native, contribution=list(tensors), outputs=list(tensors) if mine else [],
        deliveries=_slices(tensors, COMBINED) if mine else [], reduce_op=REDUCE_OPS[code_of(args[2])], root=root,
        is_async=_argument(args, 5, True), dtype=dtype_of(tensors),
    )  # fmt: skip


def _gathered(outputs_by_member: Sequence[Sequence[torch.Tensor]]) -> list[Delivery]:
    return [d for member, tensors in enumerate(outputs_by_member) for d in _slices(tensors, member)]


def _all_gather_list(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    outputs, inputs = args[0][0], args[1]
    return Call(
        Op.ALL_GATHER, group, native, contribution=list(inputs), outputs=list(outputs),
        deliveries=_gathered([[t] for t in outputs]), is_async=_argument(args, 3, True), dtype=dtype_of(inputs),
        equal_counts=len({t.numel() for t in outputs}) <= 1, sizes_differ=_list_misfit(outputs, group),
        misfit=lambda: refusals.unequal(outputs, inputs[0]), through_one_tensor=list(outputs),
    )  # fmt: skip


def _all_gather_coalesced(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    by_member, inputs = args[0], args[1]
    return Call(
        Op.ALL_GATHER, group, native, contribution=list(inputs), outputs=[t for ts in by_member for t in ts],
        deliveries=_gathered(by_member), is_async=_argument(args, 3, True), dtype=dtype_of(inputs),
        misfit=lambda: refusals.lists_misfit(by_member, inputs),
    )  # fmt: skip


def _all_gather_tensors(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    """`_allgather_base_` (one pair) and `allgather_into_tensor_coalesced_` (lists)."""
    outputs, inputs = args[0], args[1]
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    size = len(group.ranks)

    def deliveries() -> list[Delivery]:
        made: list[Delivery] = []
        offset = 0
        for output, tensor in zip(outputs, inputs, strict=True):
            parts = output.reshape(-1).chunk(size) if output.is_contiguous() else _rows(output, size)
            made += [Delivery(part, member, offset) for member, part in enumerate(parts)]
            offset += tensor.nbytes
        return made

    late = LateDeliveries(deliveries)
    if not all(output.is_contiguous() for output in outputs):
        len(late)  # says now if the rows cannot be told apart
    return Call(
        Op.ALL_GATHER, group, native, contribution=list(inputs), outputs=list(outputs), deliveries=late,
        is_async=_argument(args, 3, True), dtype=dtype_of(inputs),
        sizes_differ=_misfit((o.numel(), t.numel() * size) for o, t in zip(outputs, inputs, strict=True)),
        misfit=lambda: refusals.chunks_misfit(zip(outputs, inputs, strict=True), size),
    )  # fmt: skip


def _misfit(pairs: Iterable[tuple[int, int]]) -> str | None:
    """What to say of sizes (found, wanted) of which some are not equal."""
    for found, wanted in pairs:
        if found != wanted:
            return f"a tensor has {found} elements and must have {wanted}"
    return None


def _list_misfit(tensors: Sequence[torch.Tensor], group: GroupState) -> str | None:
    """What to say of a list that must have one tensor for each member."""
    if len(tensors) == len(group.ranks):
        return None
    return f"a list has {len(tensors)} tensors and must have {len(group.ranks)}, one for each rank of the group"


def _rows(tensor: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Split a non-contiguous tensor along its first dimension, keeping views."""
    return tensor.chunk(size, dim=0)


def _gather(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    outputs, inputs, root = args[0], args[1], args[3]
    mine = group.group_rank == root
    gathered = list(outputs[0]) if mine and outputs else []
    return Call(
        Op.GATHER, group, native, contribution=list(inputs), outputs=gathered,
        deliveries=_gathered([[t] for t in gathered]), root=root, is_async=_argument(args, 4, True),
        dtype=dtype_of(inputs), sizes_differ=_list_misfit(gathered, group) if mine else None,
        misfit=lambda: refusals.unequal(gathered, inputs[0]),
    )  # fmt: skip


def _scatter(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    outputs, inputs, root = args[0], args[1], args[3]
    mine = group.group_rank == root
    pieces = list(inputs[0]) if mine and inputs else []
    offset = outputs[0].nbytes * group.group_rank
    return Call(
        Op.SCATTER, group, native, contribution=pieces, outputs=list(outputs),
        deliveries=_slices(outputs, root, offset), root=root, is_async=_argument(args, 4, True),
        dtype=dtype_of(outputs), sizes_differ=_list_misfit(pieces, group) if mine else None,
        misfit=lambda: refusals.unequal(pieces, outputs[0]),
    )  # fmt: skip


def _reduce_scatter_tensors(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    """`_reduce_scatter_base_` (one pair) and `reduce_scatter_tensor_coalesced_` (lists)."""
    outputs, inputs = args[0], args[1]
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    deliveries, offset = [], 0
    for output, tensor in zip(outputs, inputs, strict=True):
        deliveries.append(Delivery(output, COMBINED, offset + output.nbytes * group.group_rank))
        offset += tensor.nbytes
    return Call(
        Op.REDUCE_SCATTER, group, native, contribution=list(inputs), outputs=list(outputs), deliveries=deliveries,
        reduce_op=REDUCE_OPS[code_of(args[3])], is_async=_argument(args, 4, True), dtype=dtype_of(inputs),
        sizes_differ=_misfit((t.numel(), o.numel() * len(group.ranks)) for o, t in zip(outputs, inputs, strict=True)),
        misfit=lambda: refusals.scattered_misfit(zip(outputs, inputs, strict=True), len(group.ranks)),
    )  # fmt: skip


def _reduce_scatter_list(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    output, inputs = args[0][0], list(args[1][0])
    offset = sum(t.nbytes for t in inputs[: group.group_rank])
    return Call(
        Op.REDUCE_SCATTER, group, native, contribution=inputs, outputs=[output],
        deliveries=[Delivery(output, COMBINED, offset)], reduce_op=REDUCE_OPS[code_of(args[3])],
        is_async=_argument(args, 4, True), dtype=dtype_of(inputs), sizes_differ=_list_misfit(inputs, group),
        misfit=lambda: refusals.unequal(inputs[group.group_rank : group.group_rank + 1], output),
        through_one_tensor=inputs,
    )  # fmt: skip


def _all_to_all_list(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    outputs, inputs = list(args[0]), list(args[1])
    return Call(
        Op.ALL_TO_ALL, group, native, contribution=inputs, outputs=outputs, receive_tensors=outputs,
        send_bytes=[t.nbytes for t in inputs], splits_in=[t.numel() for t in inputs],
        splits_out=[t.numel() for t in outputs], is_async=_argument(args, 3, True), dtype=dtype_of(inputs),
        equal_counts=False, sizes_differ=_list_misfit(inputs, group) or _list_misfit(outputs, group),
        misfit=lambda: refusals.unequal([*inputs, *outputs], inputs[0]) if inputs else None,
    )  # fmt: skip


def _all_to_all_tensor(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    output, tensor, splits_out, splits_in = args[0], args[1], list(args[3]), list(args[4])
    size = len(group.ranks)
    rows_in = splits_in or [tensor.size(0) // size] * size if tensor.dim() else [0] * size
    rows_out = splits_out or [output.size(0) // size] * size if output.dim() else [0] * size
    row_bytes = tensor[0].nbytes if tensor.dim() and tensor.size(0) else 0
    per_row = tensor[0].numel() if row_bytes else 0
    out_per_row = output[0].numel() if output.dim() and output.size(0) else 0
    even = not (splits_in or splits_out)
    fits = output.dim() > 0 and sum(rows_out) == output.size(0) and min(rows_out) >= 0  # else check() refuses the call
    sent, received = [n * per_row for n in rows_in], [n * out_per_row for n in rows_out]
    return Call(
        Op.ALL_TO_ALL, group, native, contribution=[tensor], outputs=[output],
        receive_tensors=list(output.split(rows_out, dim=0)) if fits else [],
        send_bytes=[n * row_bytes for n in rows_in], splits_in=sent, splits_out=received,
        is_async=_argument(args, 5, True), dtype=dtype_of([tensor]), equal_counts=even,
        sizes_differ=_misfit([(sum(rows_in), _length(tensor)), (sum(rows_out), _length(output))]),
        misfit=lambda: refusals.exchange_misfit(
            output, tensor, even=even, sent=sent, received=received, me=group.group_rank, size=size
        ),
    )  # fmt: skip


def _length(tensor: torch.Tensor) -> int:
    return tensor.size(0) if tensor.dim() else 0


def _barrier(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    return Call(Op.BARRIER, group, native, is_async=_argument(args, 3, True), device=args[0].device)


def _monitored_barrier(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    return Call(Op.BARRIER, group, native, is_async=False)


def _send(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    return Call(
        Op.SEND, group, native, contribution=list(args[0]), peer=args[2], tag=args[3], dtype=dtype_of(args[0])
    )  # fmt: skip


def _recv(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    return Call(
        Op.RECV, group, native, outputs=list(args[0]), deliveries=_slices(args[0], 0), peer=args[2], tag=args[3],
        dtype=dtype_of(args[0]),
    )  # fmt: skip


def _recv_any(group: GroupState, native: Native, args: tuple[Any, ...]) -> Call:
    return Call(
        Op.RECV, group, native, outputs=list(args[0]), deliveries=_slices(args[0], 0), peer=None, tag=args[2],
        dtype=dtype_of(args[0]),
    )  # fmt: skip


# operator name -> parser; where the process group stands and what is returned follows from the schema
OPERATORS: dict[str, Parser] = {
    "allreduce_": lambda group, native, args: _all_reduce(group, native, args, 4),
    "allreduce_coalesced_": lambda group, native, args: _all_reduce(group, native, args, 3),
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "_allgather_base_": _all_gather_tensors,
    "allgather_": _all_gather_list,
    "allgather_coalesced_": _all_gather_coalesced,
    "allgather_into_tensor_coalesced_": _all_gather_tensors,
    "_reduce_scatter_base_": _reduce_scatter_tensors,
    "reduce_scatter_": _reduce_scatter_list,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_tensors,
    "scatter_": _scatter,
    "gather_": _gather,
    "alltoall_base_": _all_to_all_tensor,
    "alltoall_": _all_to_all_list,
    "barrier": _barrier,
    "monitored_barrier_": _monitored_barrier,
    "send": _send,
    "recv_": _recv,
    "recv_any_source_": _recv_any,
}
