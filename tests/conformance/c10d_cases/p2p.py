"""Cases of point-to-point messages: order, tags, wildcards, batches and groups; collectives have their own modules."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from . import Context, case, expect
from .collectives import whole


def neighbours(ctx: Context) -> tuple[int, int]:
    return (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size


@case()
def send_recv_ring(ctx: Context) -> Any:
    left, right = neighbours(ctx)
    received = torch.zeros(6)
    if ctx.rank == 0:
        dist.send(whole(ctx), right)
        source = dist.recv(received, left)
    else:
        source = dist.recv(received, left)
        dist.send(whole(ctx), right)
    return received, source


@case()
def send_recv_every_dtype(ctx: Context) -> Any:
    results = []
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64):
        tensor = whole(ctx, dtype=dtype)
        if ctx.rank == 0:
            dist.send(tensor, 1)
        elif ctx.rank == 1:
            dist.recv(tensor, 0)
        results.append(tensor)
    return results


@case()
def tags_received_out_of_order(ctx: Context) -> Any:
    received = [torch.zeros(6) for _ in range(3)]
    if ctx.rank == 0:
        works = [dist.isend(whole(ctx, offset=tag), 1, tag=tag) for tag in range(3)]
        for work in works:
            work.wait()
    elif ctx.rank == 1:
        for tag in (2, 0, 1):
            dist.recv(received[tag], 0, tag=tag)
    return received


@case()
def messages_of_one_tag_keep_their_order(ctx: Context) -> Any:
    received = [torch.zeros(6) for _ in range(10)]
    if ctx.rank == 0:
        for index in range(10):
            dist.send(whole(ctx, offset=index), 1)
    elif ctx.rank == 1:
        for tensor in received:
            dist.recv(tensor, 0)
    return received


@case()
def irecv_before_isend(ctx: Context) -> Any:
    left, right = neighbours(ctx)
    received = torch.zeros(6)
    incoming = dist.irecv(received, left)
    outgoing = dist.isend(whole(ctx), right)
    incoming.wait()
    outgoing.wait()
    return received


@case()
def irecvs_waited_in_reverse(ctx: Context) -> Any:
    left, right = neighbours(ctx)
    received = [torch.zeros(6) for _ in range(4)]
    incoming = [dist.irecv(tensor, left, tag=index) for index, tensor in enumerate(received)]
    outgoing = [dist.isend(whole(ctx, offset=index), right, tag=index) for index in range(4)]
    for work in reversed(incoming):
        work.wait()
    for work in outgoing:
        work.wait()
    return received


@case()
def recv_from_any_source(ctx: Context) -> Any:
    """The order of arrival is free; what arrives from whom is not."""
    received: dict[int, torch.Tensor] = {}
    if ctx.rank == 0:
        for _ in range(ctx.world_size - 1):
            tensor = torch.zeros(6)
            source = dist.recv(tensor)
            received[source] = tensor
    else:
        dist.send(whole(ctx), 0)
    return dict(sorted(received.items()))


@case()
def recv_from_any_source_by_tag(ctx: Context) -> Any:
    received: list[Any] = []
    if ctx.rank == 0:
        for peer in reversed(range(1, ctx.world_size)):
            tensor = torch.zeros(6)
            received.append((dist.recv(tensor, tag=peer), tensor))
    else:
        dist.send(whole(ctx), 0, tag=ctx.rank)
    return received


@case(optional=True)
def send_to_self(ctx: Context) -> Any:
    received = torch.zeros(6)
    work = dist.isend(whole(ctx), ctx.rank)
    dist.recv(received, ctx.rank)
    work.wait()
    expect(received, whole(ctx))
    return received


@case()
def batch_ring(ctx: Context) -> Any:
    left, right = neighbours(ctx)
    received = torch.zeros(6)
    operations = [dist.P2POp(dist.isend, whole(ctx), right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@case()
def batch_with_everybody(ctx: Context) -> Any:
    received = {peer: torch.zeros(6) for peer in ctx.peers if peer != ctx.rank}
    operations = [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in received.items()]
    operations += [dist.P2POp(dist.isend, whole(ctx, offset=peer), peer) for peer in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@case()
def batch_in_a_group(ctx: Context) -> Any:
    group = dist.new_group([0, 1])
    received = torch.zeros(6)
    if ctx.rank < 2:
        other = 1 - ctx.rank
        operations = [
            dist.P2POp(dist.isend, whole(ctx), other, group=group),
            dist.P2POp(dist.irecv, received, group=group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    dist.barrier()
    return received


@case()
def send_by_group_rank(ctx: Context) -> Any:
    members = [ctx.world_size - 1, 0]
    group = dist.new_group(members)
    received = torch.zeros(6)
    if ctx.rank == 0:
        dist.send(whole(ctx), group=group, group_dst=dist.get_group_rank(group, ctx.world_size - 1))
    elif ctx.rank == ctx.world_size - 1:
        dist.recv(received, group=group, group_src=dist.get_group_rank(group, 0))
    dist.barrier()
    return received


@case()
def send_into_a_view(ctx: Context) -> Any:
    buffer = torch.zeros(12)
    if ctx.rank == 0:
        dist.send(whole(ctx, 12)[3:9], 1)
    elif ctx.rank == 1:
        dist.recv(buffer[4:10], 0)
    return buffer


@case()
def sender_may_change_its_tensor_after_wait(ctx: Context) -> Any:
    received = torch.zeros(6)
    if ctx.rank == 0:
        tensor = whole(ctx)
        dist.isend(tensor, 1).wait()
        tensor.fill_(99)
    elif ctx.rank == 1:
        time.sleep(0.1)
        dist.recv(received, 0)
    return received


@case()
def send_of_nothing(ctx: Context) -> Any:
    tensor = torch.zeros(0)
    if ctx.rank == 0:
        dist.send(tensor, 1)
    elif ctx.rank == 1:
        dist.recv(tensor, 0)
    dist.barrier()
    return tensor


@case(optional=True)
def send_of_a_strided_tensor(ctx: Context) -> Any:
    received = torch.zeros(4, 3)
    if ctx.rank == 0:
        dist.send(whole(ctx, 12).view(3, 4).t().contiguous(), 1)
        try:
            dist.send(whole(ctx, 12).view(3, 4).t(), 1, tag=1)
            verdict = "sent"
        except Exception as error:
            verdict = type(error).__name__
            dist.send(torch.zeros(4, 3), 1, tag=1)
        return verdict
    if ctx.rank == 1:
        dist.recv(received, 0)
        dist.recv(torch.zeros(4, 3), 0, tag=1)
    return received


@case()
def messages_between_collectives(ctx: Context) -> Any:
    left, right = neighbours(ctx)
    received = torch.zeros(6)
    outgoing = dist.isend(whole(ctx), right)
    reduced = whole(ctx, offset=1)
    dist.all_reduce(reduced)
    dist.recv(received, left)
    outgoing.wait()
    return reduced, received
