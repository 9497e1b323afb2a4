"""Cases of wrong arguments: what the user is told must not depend on the backend; nothing here communicates.

Only refusals that every rank meets by itself belong here: a mismatch between ranks is undefined under gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import Context, attempt, case
from .collectives import whole


@case()
def refused_types(ctx: Context) -> Any:
    return [
        attempt(lambda: dist.all_reduce([whole(ctx)])),
        attempt(lambda: dist.all_reduce("text")),
        attempt(lambda: dist.broadcast(None, src=0)),
        attempt(lambda: dist.all_gather(whole(ctx), whole(ctx))),
        attempt(lambda: dist.all_to_all([whole(ctx)], whole(ctx))),
        attempt(lambda: dist.P2POp(dist.all_reduce, whole(ctx), 0)),
        attempt(lambda: dist.batch_isend_irecv([])),
        attempt(lambda: dist.batch_isend_irecv([None])),
    ]


@case()
def refused_dtypes(ctx: Context) -> Any:
    doubles = [torch.zeros(6, dtype=torch.float64) for _ in ctx.peers]
    return [
        attempt(lambda: dist.all_gather(doubles, whole(ctx))),
        attempt(lambda: dist.gather(whole(ctx), doubles if ctx.rank == 0 else None, dst=0)) if ctx.rank == 0 else "",
        attempt(lambda: dist.reduce_scatter(whole(ctx), doubles)),
        attempt(lambda: dist.all_to_all([whole(ctx) for _ in ctx.peers], doubles)),
    ]


@case()
def refused_roots(ctx: Context) -> Any:
    return [
        attempt(lambda: dist.broadcast(whole(ctx))),
        attempt(lambda: dist.broadcast(whole(ctx), src=0, group_src=0)),
        attempt(lambda: dist.send(whole(ctx), ctx.rank)),
        attempt(lambda: dist.gather(whole(ctx), None, dst=ctx.rank)),
        attempt(lambda: dist.scatter(whole(ctx), None, src=ctx.rank)),
        attempt(lambda: dist.scatter_object_list([], None, src=0)),
    ]


@case()
def refused_ranks_out_of_range(ctx: Context) -> Any:
    """No send or recv here: gloo waits out its time limit for such a peer and then crashes the process."""
    return [
        attempt(lambda: dist.broadcast(whole(ctx), src=ctx.world_size), text=False),
        attempt(lambda: dist.reduce(whole(ctx), dst=99), text=False),
    ]


@case()
def refused_sizes(ctx: Context) -> Any:
    return [
        attempt(lambda: dist.all_gather_into_tensor(torch.zeros(5), whole(ctx)), text=False),
        attempt(lambda: dist.all_gather([torch.zeros(6)], whole(ctx)), text=False),
        attempt(lambda: dist.all_to_all_single(torch.zeros(6), whole(ctx), [1], [1]), text=False),
    ]


def strided(*shape: int) -> torch.Tensor:
    """Not contiguous, and of this shape."""
    return torch.arange(2.0 * torch.Size(shape).numel()).view(*shape, 2)[..., 0]


@case()
def refused_shapes_of_gathers(ctx: Context) -> Any:
    """The numbers of elements fit in most of these; gloo wants equal shapes."""
    size = ctx.world_size
    unequal = [torch.zeros(6 - min(member, 1)) for member in range(size)]
    return [
        attempt(lambda: dist.all_gather(unequal, whole(ctx)), text=False),
        attempt(lambda: dist.all_gather([torch.zeros(8) for _ in range(size)], whole(ctx)), text=False),
        attempt(lambda: dist.all_gather([torch.zeros(3, 2) for _ in range(size)], whole(ctx)), text=False),
        attempt(lambda: dist.all_gather([torch.zeros(6) for _ in range(size + 1)], whole(ctx)), text=False),
        attempt(lambda: dist.all_gather_into_tensor(torch.zeros(size * 6), whole(ctx).view(3, 2)), text=False),
        attempt(lambda: dist.all_gather_into_tensor(torch.zeros(size, 6), whole(ctx)), text=False),
        attempt(lambda: dist.all_gather_into_tensor(torch.zeros(size), torch.tensor(1.0)), text=False),
        attempt(lambda: dist.all_gather_into_tensor(torch.zeros(size * 6).double(), whole(ctx)), text=False),
        attempt(lambda: dist.all_gather_coalesced([[torch.zeros(6)] for _ in range(size)], [whole(ctx), whole(ctx)]),
                text=False),
        attempt(lambda: dist.all_gather_coalesced([[torch.zeros(3, 2)] for _ in range(size)], [whole(ctx)]),
                text=False),
    ]  # fmt: skip


@case(needs_torch="2.10")
def refused_shapes_of_a_scattered_tensor(ctx: Context) -> Any:
    size = ctx.world_size
    return [
        attempt(lambda: dist.reduce_scatter_tensor(torch.zeros(5), whole(ctx)), text=False),
        attempt(lambda: dist.reduce_scatter_tensor(torch.zeros(2, 3), torch.ones(size * 6)), text=False),
        attempt(lambda: dist.reduce_scatter_tensor(torch.zeros(3, 4), torch.ones(size * 3, 2, 2)), text=False),
        attempt(lambda: dist.reduce_scatter_tensor(torch.zeros(6).double(), torch.ones(size * 6)), text=False),
    ]


@case(needs_torch="2.10")
def refused_shapes_of_scattered_reductions(ctx: Context) -> Any:
    size = ctx.world_size
    return [
        attempt(lambda: dist.reduce_scatter(torch.zeros(5), [whole(ctx) for _ in range(size)]), text=False),
        attempt(lambda: dist.reduce_scatter(torch.zeros(3, 2), [whole(ctx) for _ in range(size)]), text=False),
        attempt(lambda: dist.reduce_scatter(torch.zeros(6), [whole(ctx) for _ in range(size - 1)]), text=False),
    ]


@case(needs_torch="2.10")
def refused_exchanges(ctx: Context) -> Any:
    size = ctx.world_size
    ones = [1] * size
    return [
        attempt(lambda: dist.all_to_all_single(torch.zeros(size, 3), strided(size, 3))),
        attempt(lambda: dist.all_to_all_single(torch.zeros(size, 3), strided(size, 3), ones, ones)),
        attempt(lambda: dist.all_to_all_single(torch.zeros(size, 2), torch.ones(size, 3)), text=False),
        attempt(lambda: dist.all_to_all_single(torch.zeros(size, 6), torch.ones(size, 3), ones, ones), text=False),
        attempt(lambda: dist.all_to_all([torch.zeros(5) for _ in range(size)], [whole(ctx) for _ in range(size)]),
                text=False),
        attempt(lambda: dist.all_to_all([torch.zeros(3, 2) for _ in range(size)], [whole(ctx) for _ in range(size)]),
                text=False),
        attempt(lambda: dist.all_to_all([torch.zeros(6)], [whole(ctx)]), text=False) if size > 1 else "",
    ]  # fmt: skip


@case(needs_torch="2.10")
def refused_types_of_numbers(ctx: Context) -> Any:
    """gloo has no word for these; where the call is not waited for, its error comes later than ours."""
    peers = range(ctx.world_size)
    found = []
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn):
        few, many = torch.zeros(2).to(dtype), torch.zeros(2 * ctx.world_size).to(dtype)
        found += [
            attempt(lambda: dist.all_reduce(few), text=False),  # noqa: B023 - called at once
            attempt(lambda: dist.broadcast(few, src=0), text=False),  # noqa: B023
            attempt(lambda: dist.all_gather([few.clone() for _ in peers], few), text=False),  # noqa: B023
            attempt(lambda: dist.all_gather_into_tensor(many, few), text=False),  # noqa: B023
            attempt(lambda: dist.reduce_scatter_tensor(few, many), text=False),  # noqa: B023
            attempt(lambda: dist.all_to_all_single(many.clone(), many), text=False),  # noqa: B023
        ]
    whole_numbers, complex_ones = torch.ones(2).long(), torch.ones(2).to(torch.complex64)
    average = dist.ReduceOp.AVG
    found += [
        attempt(lambda: dist.all_reduce(whole_numbers, op=average), text=False),
        attempt(lambda: dist.reduce(whole_numbers, dst=0, op=average), text=False),
        attempt(lambda: dist.reduce_scatter_tensor(whole_numbers, whole_numbers.repeat(ctx.world_size), op=average),
                text=False),
        attempt(lambda: dist.reduce(complex_ones, dst=0, op=dist.ReduceOp.MAX), text=False),
        attempt(lambda: dist.reduce_scatter_tensor(complex_ones, complex_ones.repeat(ctx.world_size),
                                                   op=dist.ReduceOp.PRODUCT), text=False),
    ]  # fmt: skip
    return found


@case(needs_torch="2.11")
def refused_groups(ctx: Context) -> Any:
    return [
        attempt(lambda: dist.new_group([0, ctx.world_size])),
        attempt(lambda: dist.new_group([0, 0])),
        attempt(lambda: dist.new_subgroups(ctx.world_size + 1)),
        attempt(lambda: dist.get_group_rank(dist.group.WORLD, 99)),
        attempt(lambda: dist.get_global_rank(dist.group.WORLD, 99)),
        attempt(lambda: dist.init_process_group("gloo")),
    ]


@case()
def refused_to_strangers(ctx: Context) -> Any:
    """A rank that is no member gets warnings and defaults, or the same refusal."""
    group = dist.new_group([0])
    if ctx.rank == 0:
        return None
    tensor = whole(ctx)
    return [
        attempt(lambda: dist.all_reduce(tensor, group=group)),
        attempt(lambda: dist.barrier(group=group)),
        dist.get_rank(group),
        dist.get_world_size(group),
        attempt(lambda: dist.get_process_group_ranks(group), text=False),
        tensor,
    ]


@case(optional=True)
def refused_sparse(ctx: Context) -> Any:
    return attempt(lambda: dist.broadcast(torch.eye(3).to_sparse(), src=0), text=False)
