"""Cases of DTensor, functional collectives (eager, differentiable, compiled) and ``distributed.nn``; no training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from . import Context, case
from .collectives import whole
from .groups import mesh_shape


def grid(ctx: Context, rows: int = 8, columns: int = 12) -> torch.Tensor:
    return (torch.arange(rows * columns) % 13).float().view(rows, columns)


@case()
def dtensor_distribute_and_gather(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    full = grid(ctx) if ctx.rank == 0 else torch.zeros(8, 12)  # only rank 0's values count
    results = []
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(full, mesh, [placement])
        results.append((tensor.to_local(), tensor.full_tensor()))
    return results


@case()
def dtensor_redistribute(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    tensor = distribute_tensor(grid(ctx), mesh, [Shard(0)])
    by_columns = tensor.redistribute(placements=[Shard(1)])
    everywhere = by_columns.redistribute(placements=[Replicate()])
    return by_columns.to_local(), everywhere.to_local(), everywhere.redistribute(placements=[Shard(0)]).to_local()


@case()
def dtensor_uneven_shards(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    tensor = distribute_tensor(grid(ctx, 5, 3), mesh, [Shard(0)])
    return tensor.to_local(), tensor.full_tensor(), tensor.redistribute(placements=[Shard(1)]).to_local()


@case()
def dtensor_partial(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    partial = DTensor.from_local(grid(ctx) + ctx.rank, mesh, [Partial()])
    return partial.redistribute(placements=[Replicate()]).to_local(), partial.redistribute(
        placements=[Shard(0)]
    ).to_local()


@case()
def dtensor_two_dimensions(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape(ctx), mesh_dim_names=("dp", "tp"))
    tensor = distribute_tensor(grid(ctx), mesh, [Shard(0), Shard(1)])
    return tensor.to_local(), tensor.redistribute(placements=[Replicate(), Shard(0)]).to_local(), tensor.full_tensor()


@case()
def dtensor_matmul(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    left = distribute_tensor(grid(ctx, 4, 12), mesh, [Shard(1)])
    right = distribute_tensor(grid(ctx, 12, 5), mesh, [Shard(0)])
    return (left @ right).full_tensor(), left.sum().full_tensor(), left.max().full_tensor()


@case()
def functional_collectives(ctx: Context) -> Any:
    group = dist.group.WORLD
    tensor = whole(ctx, 2 * ctx.world_size)
    return [
        funcol.all_reduce(tensor, "sum", group) + 0,
        funcol.all_reduce(tensor, "max", group) + 0,
        funcol.all_gather_tensor(tensor, gather_dim=0, group=group) + 0,
        funcol.all_gather_tensor(tensor.view(2, -1), gather_dim=1, group=group) + 0,
        funcol.reduce_scatter_tensor(tensor, "sum", scatter_dim=0, group=group) + 0,
        funcol.all_to_all_single(tensor, None, None, group) + 0,
        funcol.broadcast(tensor, 1, group) + 0,
        tensor,
    ]


@case()
def functional_waited_late(ctx: Context) -> Any:
    pending = [funcol.all_reduce(whole(ctx, offset=index), "sum", dist.group.WORLD) for index in range(4)]
    return [funcol.wait_tensor(tensor) for tensor in reversed(pending)]


@case()
def functional_coalesced(ctx: Context) -> Any:
    group = dist.group.WORLD
    tensors = [whole(ctx), whole(ctx, 4, offset=1)]
    wide = [whole(ctx, 2 * ctx.world_size), whole(ctx, 3 * ctx.world_size, offset=1)]
    return [
        [value + 0 for value in funcol.all_reduce_coalesced(tensors, "sum", group)],
        [value + 0 for value in funcol.all_gather_into_tensor_coalesced(tensors, group)],
        [value + 0 for value in funcol.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0], group)],
    ]


@case()
def functional_permute(ctx: Context) -> Any:
    targets = [(peer + 1) % ctx.world_size for peer in ctx.peers]
    return funcol.permute_tensor(whole(ctx), targets, dist.group.WORLD) + 0


@case()
def functional_with_gradients(ctx: Context) -> Any:
    leaf = whole(ctx, 2 * ctx.world_size).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(leaf, gather_dim=0, group=dist.group.WORLD)
    exchanged = funcol.all_to_all_single_autograd(leaf, None, None, dist.group.WORLD)
    weights = torch.arange(gathered.numel()).float()
    ((gathered * weights).sum() + (exchanged * (ctx.rank + 1)).sum()).backward()
    return leaf.grad


@case(slow=True)
def functional_compiled(ctx: Context) -> Any:
    group = dist.group.WORLD

    def step(tensor: torch.Tensor) -> torch.Tensor:
        reduced = funcol.all_reduce(tensor * 2, "sum", group)
        gathered = funcol.all_gather_tensor(reduced + 1, gather_dim=0, group=group)
        return funcol.reduce_scatter_tensor(gathered, "sum", scatter_dim=0, group=group) - 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    return step(whole(ctx)) + 0, compiled(whole(ctx)) + 0, compiled(whole(ctx, offset=2)) + 0


@case(slow=True)
def plain_collectives_compiled(ctx: Context) -> Any:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled + 1

    return torch.compile(step, backend="aot_eager")(whole(ctx))


@case()
def distributed_nn_all_reduce(ctx: Context) -> Any:
    leaf = whole(ctx).requires_grad_()
    (dist_nn.all_reduce(leaf) * (ctx.rank + 1)).sum().backward()
    return leaf.grad


@case()
def distributed_nn_all_gather(ctx: Context) -> Any:
    leaf = whole(ctx).requires_grad_()
    gathered = dist_nn.all_gather(leaf)
    sum((index + 1) * part.sum() for index, part in enumerate(gathered)).backward()
    return gathered, leaf.grad


@case()
def distributed_nn_others(ctx: Context) -> Any:
    sent, reduced = whole(ctx).requires_grad_(), whole(ctx).requires_grad_()
    (dist_nn.broadcast(sent, src=0) * (ctx.rank + 1)).sum().backward()
    dist_nn.reduce(reduced, dst=0).sum().backward()
    inputs = whole(ctx, 2 * ctx.world_size).requires_grad_()
    outputs = dist_nn.all_to_all_single(torch.zeros(2 * ctx.world_size), inputs)
    (outputs * (ctx.rank + 1)).sum().backward()
    return sent.grad, reduced.grad, outputs, inputs.grad


@case()
def distributed_nn_reduce_scatter(ctx: Context) -> Any:
    leaf = whole(ctx, 2 * ctx.world_size).requires_grad_()
    output = dist_nn.reduce_scatter(torch.zeros(2), list(leaf.chunk(ctx.world_size)))
    (output * (ctx.rank + 1)).sum().backward()
    return output, leaf.grad
