"""Cases of process groups and device meshes: making, asking and using them; not of what the collectives compute."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import Context, case, expect
from .collectives import of_rank, whole


def mesh_shape(ctx: Context) -> tuple[int, int]:
    return (2, 2) if ctx.world_size == 4 else (1, ctx.world_size)


@case()
def answers_about_the_world(ctx: Context) -> Any:
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "backend_config": dist.get_backend_config(),
        "ranks": dist.get_process_group_ranks(dist.group.WORLD),
        "ranks_of_none": dist.get_process_group_ranks(None),
        "initialized": dist.is_initialized(),
        "available": dist.is_available(),
        "gloo": dist.is_gloo_available(),
        "global_rank": dist.get_global_rank(dist.group.WORLD, 1),
        "group_rank": dist.get_group_rank(dist.group.WORLD, 1),
        "group_name": dist.group.WORLD.group_name,
        "group_desc": dist.group.WORLD.group_desc,
        "size": dist.group.WORLD.size(),
        "rank_of_group": dist.group.WORLD.rank(),
        "type": type(dist.group.WORLD).__name__,
    }


@case()
def answers_about_the_launcher(ctx: Context) -> Any:
    """Programs ask whether torchrun started them; Prism's launcher takes its place."""
    return dist.is_torchelastic_launched(), dist.get_node_local_rank(fallback_rank=-1)


@case()
def new_group_of_some(ctx: Context) -> Any:
    members = [0, ctx.world_size - 1]
    group = dist.new_group(members, timeout=timedelta(seconds=60), group_desc="ends")
    tensor = whole(ctx)
    inside = ctx.rank in members
    if inside:
        dist.all_reduce(tensor, group=group)
    answers = [
        dist.get_rank(group),
        dist.get_world_size(group),
        group is dist.GroupMember.NON_GROUP_MEMBER,
        dist.get_process_group_ranks(group) if inside else None,
        group.group_desc if inside else None,
        dist.get_backend(group) if inside else None,
    ]
    dist.barrier()
    if inside:
        dist.destroy_process_group(group)
    return answers, tensor


@case()
def new_group_keeps_or_sorts_order(ctx: Context) -> Any:
    members = list(reversed(ctx.peers))
    group = dist.new_group(members)
    gathered = [torch.zeros(6) for _ in ctx.peers]
    dist.all_gather(gathered, whole(ctx), group=group)
    answers = dist.get_process_group_ranks(group), dist.get_rank(group), dist.get_group_rank(group, 0)
    dist.destroy_process_group(group)
    return answers, gathered


@case()
def overlapping_groups(ctx: Context) -> Any:
    pairs = [[peer, (peer + 1) % ctx.world_size] for peer in ctx.peers]
    groups = [(sorted(set(pair)), dist.new_group(sorted(set(pair)))) for pair in pairs]
    results = []
    for members, group in groups:
        if ctx.rank in members:
            tensor = whole(ctx, offset=members[0])
            dist.all_reduce(tensor, group=group)
            results.append(tensor)
    return results


@case()
def group_local_synchronization(ctx: Context) -> Any:
    """Only the members make the group."""
    members = [0, 1]
    tensor = whole(ctx)
    if ctx.rank in members:
        group = dist.new_group(members, use_local_synchronization=True)
        dist.all_reduce(tensor, group=group)
    return tensor


@case()
def new_subgroups(ctx: Context) -> Any:
    size = 2 if ctx.world_size % 2 == 0 else ctx.world_size
    mine, groups = dist.new_subgroups(size)
    tensor = whole(ctx)
    dist.all_reduce(tensor, group=mine)
    return tensor, len(groups), dist.get_process_group_ranks(mine)


@case()
def new_subgroups_by_enumeration(ctx: Context) -> Any:
    lists = [[0, ctx.world_size - 1], list(range(1, ctx.world_size - 1))]
    mine, groups = dist.new_subgroups_by_enumeration([ranks for ranks in lists if ranks])
    tensor = whole(ctx)
    dist.all_reduce(tensor, group=mine)
    return tensor, len(groups)


@case(optional=True)
def split_group(ctx: Context) -> Any:
    group = dist.split_group(split_ranks=[[0], list(range(1, ctx.world_size))])
    tensor = whole(ctx)
    dist.all_reduce(tensor, group=group)
    members = [0] if ctx.rank == 0 else list(range(1, ctx.world_size))
    expect(tensor, sum(of_rank(ctx, peer) for peer in members))
    return tensor


@case()
def rooted_collectives_in_a_group(ctx: Context) -> Any:
    """Roots are global ranks, or group ranks when asked for as such."""
    members = list(range(1, ctx.world_size))
    group = dist.new_group(members)
    results: list[Any] = []
    if ctx.rank in members:
        by_global, by_group = whole(ctx), whole(ctx, offset=1)
        dist.broadcast(by_global, src=ctx.world_size - 1, group=group)
        dist.broadcast(by_group, group=group, group_src=0)
        reduced = whole(ctx)
        dist.reduce(reduced, dst=1, group=group)
        objects: list[Any] = [f"from {ctx.rank}"]
        dist.broadcast_object_list(objects, src=1, group=group)
        results = [by_global, by_group, reduced if ctx.rank == 1 else None, objects]
    dist.barrier()
    return results


@case()
def group_of_one(ctx: Context) -> Any:
    groups = [dist.new_group([peer]) for peer in ctx.peers]
    mine = groups[ctx.rank]
    tensor, gathered = whole(ctx), torch.zeros(6)
    dist.all_reduce(tensor, group=mine)
    dist.all_gather_into_tensor(gathered, whole(ctx), group=mine)
    dist.barrier(group=mine)
    return tensor, gathered, dist.get_rank(mine)


@case()
def many_groups(ctx: Context) -> Any:
    results = []
    for index in range(8):
        group = dist.new_group(list(ctx.peers), group_desc=f"number {index}")
        tensor = whole(ctx, offset=index)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
        results.append(tensor)
    return results


@case()
def device_mesh_of_one_dimension(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", (ctx.world_size,), mesh_dim_names=("dp",))
    tensor = whole(ctx)
    dist.all_reduce(tensor, group=mesh.get_group())
    return tensor, mesh.get_local_rank(), mesh.size(), mesh.get_coordinate(), mesh.mesh


@case()
def device_mesh_of_two_dimensions(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape(ctx), mesh_dim_names=("dp", "tp"))
    rows, columns = whole(ctx), whole(ctx, offset=1)
    dist.all_reduce(rows, group=mesh.get_group("dp"))
    dist.all_reduce(columns, group=mesh["tp"].get_group())
    answers = [
        mesh.get_coordinate(),
        dist.get_process_group_ranks(mesh.get_group("dp")),
        dist.get_process_group_ranks(mesh.get_group("tp")),
        mesh["dp"].size(),
    ]
    return rows, columns, answers


@case()
def device_mesh_flattened(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape(ctx), mesh_dim_names=("dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    tensor = whole(ctx)
    dist.all_reduce(tensor, group=flat.get_group())
    return tensor, flat.size()


@case()
def device_mesh_from_a_group(ctx: Context) -> Any:
    group = dist.new_group(list(ctx.peers))
    mesh = DeviceMesh.from_group(group, "cpu")
    tensor = whole(ctx)
    dist.all_reduce(tensor, group=mesh.get_group())
    return tensor, mesh.mesh


@case()
def group_backend_by_device(ctx: Context) -> Any:
    group = dist.new_group(list(ctx.peers), backend="cpu:gloo")
    tensor = whole(ctx)
    dist.all_reduce(tensor, group=group)
    return tensor, str(dist.get_backend(group))
