"""Cases of unusual tensors: empty, zero-dimensional, strided, views, large; what is summed is not the question here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import Context, case, expect
from .collectives import of_rank, whole


@case()
def empty_tensors(ctx: Context) -> Any:
    reduced = torch.zeros(0)
    dist.all_reduce(reduced)
    sent = torch.zeros(0, 4)
    dist.broadcast(sent, src=0)
    gathered = torch.zeros(0)
    dist.all_gather_into_tensor(gathered, torch.zeros(0))
    return reduced, sent, gathered


@case()
def zero_dimensional(ctx: Context) -> Any:
    reduced = torch.tensor(float(ctx.rank + 1))
    dist.all_reduce(reduced)
    sent = torch.tensor(ctx.rank + 5)
    dist.broadcast(sent, src=1)
    gathered = [torch.tensor(0.0) for _ in ctx.peers]
    dist.all_gather(gathered, torch.tensor(float(ctx.rank)))
    return reduced, sent, gathered


@case(optional=True)
def zero_dimensional_into_tensor(ctx: Context) -> Any:
    into = torch.zeros(ctx.world_size)
    dist.all_gather_into_tensor(into, torch.tensor(float(ctx.rank)))
    expect(into, torch.arange(ctx.world_size).float())
    return into


@case()
def transposed_all_reduce(ctx: Context) -> Any:
    base = whole(ctx, 12).view(3, 4)
    view = base.t()
    dist.all_reduce(view)
    return view, base


@case(optional=True)
def strided_all_reduce(ctx: Context) -> Any:
    """gloo takes the first elements of the memory for those of the view."""
    base = whole(ctx, 12)
    wanted = base.clone()
    wanted[::2] = sum(of_rank(ctx, peer, 12)[::2] for peer in ctx.peers)
    dist.all_reduce(base[::2])
    expect(base, wanted)
    return base


@case()
def transposed_broadcast(ctx: Context) -> Any:
    base = whole(ctx, 12).view(3, 4)
    dist.broadcast(base.t(), src=0)
    return base


@case()
def transposed_all_gather_input(ctx: Context) -> Any:
    outputs = [torch.zeros(4, 3) for _ in ctx.peers]
    dist.all_gather(outputs, whole(ctx, 12).view(3, 4).t())
    return outputs


@case()
def all_reduce_middle_of_a_buffer(ctx: Context) -> Any:
    base = whole(ctx, 12)
    dist.all_reduce(base[3:9])
    return base


@case()
def all_gather_outputs_in_one_buffer(ctx: Context) -> Any:
    buffer = torch.zeros(6 * ctx.world_size + 2)
    outputs = list(buffer[1:-1].chunk(ctx.world_size))
    dist.all_gather(outputs, whole(ctx))
    return buffer


@case()
def all_gather_in_place(ctx: Context) -> Any:
    """The input is a slice of the output, as FSDP does it."""
    output = torch.zeros(6 * ctx.world_size)
    mine = output[6 * ctx.rank : 6 * (ctx.rank + 1)]
    mine.copy_(whole(ctx))
    dist.all_gather_into_tensor(output, mine)
    return output


@case()
def reduce_scatter_into_a_slice_of_its_input(ctx: Context) -> Any:
    tensor = whole(ctx, 4 * ctx.world_size)
    mine = tensor[4 * ctx.rank : 4 * (ctx.rank + 1)]
    dist.reduce_scatter_tensor(mine.clone(), tensor.clone())
    output = mine.clone()
    dist.reduce_scatter_tensor(output, tensor)
    return output


@case()
def tensors_that_require_grad(ctx: Context) -> Any:
    parameter = torch.nn.Parameter(whole(ctx))
    parameter.grad = whole(ctx, offset=2)
    dist.all_reduce(parameter.grad)
    with torch.no_grad():
        dist.broadcast(parameter, src=0)
    return parameter, parameter.grad


@case()
def inference_mode(ctx: Context) -> Any:
    with torch.inference_mode():
        tensor = whole(ctx)
        dist.all_reduce(tensor)
        return tensor.clone()


@case()
def large_all_reduce(ctx: Context) -> Any:
    tensor = (torch.arange(2_097_152) % 97).float() + ctx.rank  # 8 MiB
    dist.all_reduce(tensor)
    return tensor.double().sum(), tensor[::65_537].clone()


@case()
def large_all_gather(ctx: Context) -> Any:
    output = torch.zeros(ctx.world_size * 2_097_152)
    dist.all_gather_into_tensor(output, (torch.arange(2_097_152) % 97).float() + ctx.rank)
    return output.double().sum(), output[::65_537].clone()


@case()
def large_all_to_all(ctx: Context) -> Any:
    size = 2_097_152 // ctx.world_size * ctx.world_size
    output = torch.zeros(size)
    dist.all_to_all_single(output, (torch.arange(size) % 97).float() + 1000 * ctx.rank)
    return output.double().sum(), output[::65_537].clone()


@case()
def large_send_both_ways(ctx: Context) -> Any:
    """Each rank sends 8 MiB to the next one before anybody receives."""
    work = dist.isend((torch.arange(2_097_152) % 97).float() + ctx.rank, (ctx.rank + 1) % ctx.world_size)
    received = torch.zeros(2_097_152)
    dist.recv(received, (ctx.rank - 1) % ctx.world_size)
    assert work is not None
    work.wait()
    return received.double().sum(), received[::65_537].clone()


@case()
def storage_can_still_be_resized(ctx: Context) -> Any:
    """FSDP frees and regrows storages between collectives; a backend must not pin them."""
    tensor = whole(ctx)
    dist.all_reduce(tensor)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    storage.resize_(24)
    tensor.copy_(whole(ctx))
    output = torch.zeros(6 * ctx.world_size)
    dist.all_gather_into_tensor(output, tensor)
    output.untyped_storage().resize_(0)
    return tensor, storage.nbytes()


@case()
def version_counters(ctx: Context) -> Any:
    """Autograd notices that a collective wrote into a tensor that it had saved."""
    leaf = torch.ones(3, requires_grad=True)
    product = leaf * 2
    loss = (product * product).sum()
    saved = product.detach()
    before = saved._version
    dist.all_reduce(saved)
    changed = saved._version > before
    try:
        loss.backward()
    except RuntimeError as error:
        return changed, "modified by an inplace operation" in str(error)
    return changed, False
