"""Cases that end the job and start it anew; they run last, since each leaves a process group of its own behind."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import Context, attempt, case
from .collectives import whole
from .stores import free_port


def _agreed_port() -> int:
    """A port that is free on rank 0's machine.

    Every new start needs a rendezvous of its own: where gloo meets its own old addresses it waits for ever. And
    torchrun's variable must go: while it is set, no rank serves the store of a new address.
    """
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    port: list[Any] = [free_port() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(port, src=0)
    return int(port[0])


def _start_again(ctx: Context, **arguments: Any) -> None:
    dist.init_process_group(timeout=timedelta(seconds=60), **arguments)


@case()
def destroyed_and_started_from_a_file(ctx: Context) -> Any:
    dist.barrier()
    dist.destroy_process_group()
    without = [
        dist.is_initialized(),
        attempt(lambda: dist.get_rank()),
        attempt(lambda: dist.all_reduce(whole(ctx))),
        attempt(lambda: dist.destroy_process_group(), text=False),
    ]
    _start_again(
        ctx,
        backend="gloo",
        init_method=f"file://{ctx.scratch}/rendezvous",
        rank=ctx.rank,
        world_size=ctx.world_size,
    )
    tensor = whole(ctx)
    dist.all_reduce(tensor)
    return without, tensor, dist.get_rank()


@case()
def destroyed_and_started_from_a_store(ctx: Context) -> Any:
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(ctx.scratch / "store"), ctx.world_size)
    _start_again(ctx, backend="gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
    tensor = whole(ctx)
    dist.all_reduce(tensor)
    return tensor, dist.get_backend()


@case()
def destroyed_and_started_from_an_address(ctx: Context) -> Any:
    port = _agreed_port()
    dist.destroy_process_group()
    _start_again(ctx, backend="gloo", init_method=f"tcp://127.0.0.1:{port}", rank=ctx.rank, world_size=ctx.world_size)
    tensor = whole(ctx)
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1])
    if ctx.rank < 2:
        dist.broadcast(tensor, src=0, group=group)
    return tensor, dist.get_world_size()


@case()
def destroyed_and_started_from_the_environment(ctx: Context) -> Any:
    port = _agreed_port()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    _start_again(ctx, backend="gloo")
    tensor = whole(ctx)
    dist.all_reduce(tensor)
    return tensor, dist.get_rank(), dist.get_world_size()


@case()
def backend_not_named(ctx: Context) -> Any:
    """Without a name torch makes a group for every device that it has; on a CPU that means gloo."""
    port = _agreed_port()
    dist.destroy_process_group()
    _start_again(ctx, init_method=f"tcp://127.0.0.1:{port}", rank=ctx.rank, world_size=ctx.world_size)
    tensor = whole(ctx)
    dist.all_reduce(tensor)
    return tensor


@case()
def backend_named_by_device(ctx: Context) -> Any:
    port = _agreed_port()
    dist.destroy_process_group()
    _start_again(
        ctx, backend="cpu:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=ctx.rank, world_size=ctx.world_size
    )
    tensor = whole(ctx)
    dist.all_reduce(tensor)
    return tensor, dist.get_backend()
