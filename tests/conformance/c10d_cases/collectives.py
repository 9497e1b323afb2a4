"""Cases of the plain collectives: every kind, reduce operation, data type and root; not shapes, not async handles."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import Context, case, expect

_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


def whole(ctx: Context, size: int = 6, dtype: torch.dtype = torch.float32, *, offset: int = 0) -> torch.Tensor:
    """Small whole numbers that differ by rank: their sums are exact in every order and in every data type."""
    return ((torch.arange(size) * 3 + ctx.rank * 5 + offset) % 7).to(dtype)


def of_rank(ctx: Context, rank: int, size: int = 6, *, offset: int = 0) -> torch.Tensor:
    """What ``whole`` gives on another rank."""
    return whole(Context(rank=rank, world_size=ctx.world_size, scratch=ctx.scratch), size, offset=offset)


def _register_all_reduce_ops() -> None:
    for op_name in _OPS:

        def run(ctx: Context, op_name: str = op_name) -> Any:
            bitwise = op_name in ("BAND", "BOR", "BXOR")
            tensor = whole(ctx, dtype=torch.int64 if bitwise else torch.float32, offset=1)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op_name))
            return tensor

        case(f"all_reduce_op_{op_name.lower()}", tolerance=1e-6)(run)


def _register_all_reduce_dtypes() -> None:
    for label, dtype in _DTYPES.items():

        def run(ctx: Context, dtype: torch.dtype = dtype) -> Any:
            tensor = whole(ctx, dtype=dtype)
            if dtype.is_complex:
                tensor = tensor + 1j * ctx.rank
            dist.all_reduce(tensor)
            return tensor

        case(f"all_reduce_dtype_{label}")(run)


_register_all_reduce_ops()
_register_all_reduce_dtypes()


@case(optional=True)
def all_reduce_premul_sum(ctx: Context) -> Any:
    tensor = whole(ctx)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(2.0))
    expect(tensor, sum(2 * of_rank(ctx, peer) for peer in ctx.peers))
    return tensor


@case()
def all_reduce_max_of_integers(ctx: Context) -> Any:
    results = []
    for dtype in (torch.int64, torch.int32, torch.uint8):
        tensor = whole(ctx, dtype=dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        results.append(tensor)
    return results


@case()
def all_reduce_many_in_a_row(ctx: Context) -> Any:
    tensors = [whole(ctx, offset=index) for index in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    return tensors


@case()
def broadcast_every_root(ctx: Context) -> Any:
    results = []
    for root in ctx.peers:
        tensor = whole(ctx, offset=root)
        dist.broadcast(tensor, src=root)
        results.append(tensor)
    return results


@case()
def broadcast_every_dtype(ctx: Context) -> Any:
    results = []
    for dtype in _DTYPES.values():
        tensor = whole(ctx, dtype=dtype) if not ctx.rank else torch.zeros(6, dtype=dtype)
        dist.broadcast(tensor, src=0)
        results.append(tensor)
    return results


@case()
def broadcast_by_group_rank(ctx: Context) -> Any:
    tensor = whole(ctx)
    dist.broadcast(tensor, group=dist.group.WORLD, group_src=1)
    return tensor


@case()
def reduce_every_root(ctx: Context) -> Any:
    results = []
    for root in ctx.peers:
        tensor = whole(ctx, offset=root)
        dist.reduce(tensor, dst=root)
        if ctx.rank == root:  # elsewhere the content is undefined
            results.append(tensor)
    return results


@case()
def reduce_max(ctx: Context) -> Any:
    tensor = whole(ctx)
    dist.reduce(tensor, dst=ctx.world_size - 1, op=dist.ReduceOp.MAX)
    return tensor if ctx.rank == ctx.world_size - 1 else None


@case()
def all_gather_list(ctx: Context) -> Any:
    outputs = [torch.zeros(2, 3) for _ in ctx.peers]
    dist.all_gather(outputs, whole(ctx).view(2, 3))
    return outputs


@case()
def all_gather_every_dtype(ctx: Context) -> Any:
    results = []
    for dtype in _DTYPES.values():
        outputs = [torch.zeros(6, dtype=dtype) for _ in ctx.peers]
        dist.all_gather(outputs, whole(ctx, dtype=dtype))
        results.append(outputs)
    return results


@case(optional=True)
def all_gather_uneven(ctx: Context) -> Any:
    outputs = [torch.zeros(peer + 1) for peer in ctx.peers]
    dist.all_gather(outputs, whole(ctx, ctx.rank + 1))
    expect(outputs, [of_rank(ctx, peer, peer + 1) for peer in ctx.peers])
    return outputs


@case()
def all_gather_into_tensor_flat(ctx: Context) -> Any:
    output = torch.zeros(6 * ctx.world_size)
    dist.all_gather_into_tensor(output, whole(ctx))
    return output


@case(optional=True)
def all_gather_into_tensor_stacked(ctx: Context) -> Any:
    output = torch.zeros(ctx.world_size, 2, 3)
    dist.all_gather_into_tensor(output, whole(ctx).view(2, 3))
    expect(output, torch.stack([of_rank(ctx, peer).view(2, 3) for peer in ctx.peers]))
    return output


@case()
def gather_every_root(ctx: Context) -> Any:
    results = []
    for root in ctx.peers:
        outputs = [torch.zeros(6) for _ in ctx.peers] if ctx.rank == root else None
        dist.gather(whole(ctx, offset=root), outputs, dst=root)
        results.append(outputs)
    return results


@case()
def scatter_every_root(ctx: Context) -> Any:
    results = []
    for root in ctx.peers:
        inputs = [whole(ctx, offset=peer) for peer in ctx.peers] if ctx.rank == root else None
        output = torch.zeros(6)
        dist.scatter(output, inputs, src=root)
        results.append(output)
    return results


@case()
def reduce_scatter_list(ctx: Context) -> Any:
    output = torch.zeros(6)
    dist.reduce_scatter(output, [whole(ctx, offset=peer) for peer in ctx.peers])
    return output


@case()
def reduce_scatter_uneven(ctx: Context) -> Any:
    output = torch.zeros(ctx.rank + 1)
    dist.reduce_scatter(output, [whole(ctx, peer + 1) for peer in ctx.peers])
    return output


@case()
def reduce_scatter_tensor_flat(ctx: Context) -> Any:
    output = torch.zeros(4)
    dist.reduce_scatter_tensor(output, whole(ctx, 4 * ctx.world_size))
    return output


@case(tolerance=1e-6)
def reduce_scatter_tensor_average(ctx: Context) -> Any:
    output = torch.zeros(4)
    dist.reduce_scatter_tensor(output, whole(ctx, 4 * ctx.world_size), op=dist.ReduceOp.AVG)
    return output


@case()
def reduce_scatter_tensor_max(ctx: Context) -> Any:
    output = torch.zeros(1, 2, 2)
    dist.reduce_scatter_tensor(output, whole(ctx, 4 * ctx.world_size).view(-1, 2, 2), op=dist.ReduceOp.MAX)
    return output


@case(needs_torch="2.11")
def all_to_all_list(ctx: Context) -> Any:
    outputs = [torch.zeros(6) for _ in ctx.peers]
    dist.all_to_all(outputs, [whole(ctx, offset=peer) for peer in ctx.peers])
    return outputs


@case(optional=True)
def all_to_all_list_uneven(ctx: Context) -> Any:
    outputs = [torch.zeros(peer + ctx.rank + 1) for peer in ctx.peers]
    dist.all_to_all(outputs, [whole(ctx, ctx.rank + peer + 1) for peer in ctx.peers])
    expect(outputs, [of_rank(ctx, peer, ctx.rank + peer + 1) for peer in ctx.peers])
    return outputs


@case()
def all_to_all_single_even(ctx: Context) -> Any:
    output = torch.zeros(2 * ctx.world_size)
    dist.all_to_all_single(output, whole(ctx, 2 * ctx.world_size))
    return output


@case()
def all_to_all_single_uneven(ctx: Context) -> Any:
    send = [ctx.rank + peer for peer in ctx.peers]  # rank 0 sends itself nothing
    output = torch.zeros(sum(send), 3)
    dist.all_to_all_single(output, whole(ctx, 3 * sum(send)).view(-1, 3), send, send)
    return output


@case()
def barriers(ctx: Context) -> Any:
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
    return "passed"


@case()
def barrier_holds_back(ctx: Context) -> Any:
    """Nobody leaves a barrier before everybody has come."""
    (ctx.scratch / f"came-{ctx.rank}").touch()
    dist.barrier()
    return sorted(path.name for path in ctx.scratch.glob("came-*"))


@case()
def monitored_barrier(ctx: Context) -> Any:
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    return "passed"


@case(optional=True)
def all_gather_float8(ctx: Context) -> Any:
    value = whole(ctx).to(torch.float8_e4m3fn)
    output = torch.zeros(6 * ctx.world_size, dtype=torch.float8_e4m3fn)
    dist.all_gather_into_tensor(output, value)
    expect(output.float(), torch.cat([of_rank(ctx, peer) for peer in ctx.peers]))
    return output.float()
