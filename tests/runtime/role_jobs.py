"""Small jobs for recordings by roles, and the comparison of a recording by roles with one of all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prismtrace import TraceReader
from prismtrace.structure import column_numbers

MIXED = '''
"""Every operation once, then two steps with hybrid sharding."""
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if "--late" in sys.argv:
    dist.barrier()  # so that ranks communicate before there are groups
half = [dist.new_group(list(range(at, world, 2)), group_desc="DATA_PARALLEL_GROUP") for at in range(2)][rank % 2]
pair = [dist.new_group([at, at + 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP") for at in range(0, world, 2)][rank // 2]
mine = float(1 + rank % 2)  # what replicas have in common
seen = {}
for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN),
                 ("product", dist.ReduceOp.PRODUCT)):
    for where, group in (("half", half), ("pair", pair), ("world", None)):
        tensor = torch.full((3,), mine)
        dist.all_reduce(tensor, op, group=group)
        seen[name, where] = tensor.tolist()
whole = torch.full((2,), rank % 2 + 3)
dist.all_reduce(whole, group=half)
seen["integers"] = whole.tolist()
flag = torch.tensor([rank == 0])
dist.broadcast(flag, 0)
seen["flag"] = flag.tolist()
last = torch.tensor([mine])
dist.broadcast(last, group_src=world // 2 - 1, group=half)
seen["from the last replica"] = last.tolist()
for where, group, size in (("half", half, world // 2), ("pair", pair, 2)):
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), mine), group=group)
    seen["gathered", where] = [part.tolist() for part in parts]
    out = torch.empty(2 * size)
    dist.all_gather_into_tensor(out, torch.full((2,), mine), group=group)
    seen["gathered into one", where] = out.tolist()
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, torch.arange(2.0 * size) * 0 + mine, group=group)
    seen["reduced and scattered", where] = scattered.tolist()
counts = torch.tensor([1, 3]) if rank % 2 == 0 else torch.tensor([2, 1])
theirs = torch.empty_like(counts)
dist.all_to_all_single(theirs, counts, group=pair)
arrived = torch.empty(int(theirs.sum()))
dist.all_to_all_single(arrived, torch.arange(float(counts.sum())) + 10 * mine, theirs.tolist(), counts.tolist(),
                       group=pair)
seen["exchanged"] = arrived.tolist()
objects = [None] * 2
dist.all_gather_object(objects, {"side": rank % 2}, group=pair)
seen["objects"] = objects
box = torch.empty(2)
if rank % 2 == 0:
    dist.send(torch.tensor([mine, 7.0]), rank + 1, group=pair)
    dist.recv(box, rank + 1, group=pair)
else:
    dist.recv(box, rank - 1, group=pair)
    dist.send(box + mine, rank - 1, group=pair)
seen["message"] = box.tolist()
ring = torch.empty(1)
if "--no-ring" not in sys.argv:
    works = [dist.isend(torch.tensor([mine]), (rank + 2) % world), dist.irecv(ring, (rank - 2) % world)]
    for work in works:
        work.wait()
else:
    ring.zero_()
seen["ring"] = ring.tolist()
dist.barrier()
with open(f"{sys.argv[1]}/seen-{rank}", "w") as file:
    file.write(repr(seen))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(1 + rank % 2)  # the same on all replicas
for step in range(2):
    x, y = torch.randn(4, 16, generator=data), torch.randint(8, (4,), generator=data)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
'''

_COLUMNS = (
    "kind", "phase", "step", "op", "reduce_op", "dtype", "num_elements_in", "num_elements_out", "peer", "tag",
    "is_async", "seq", "awaits", "group_id", "splits_in", "splits_out",
)  # fmt: skip


def structure_differences(one: Path, other: Path) -> list[str]:
    """In which ranks and columns the structure of two traces differs, and their losses."""
    found = []
    with TraceReader(one) as a, TraceReader(other) as b:
        if a.ranks != b.ranks or a.world_size != b.world_size or dict(a.groups) != dict(b.groups):
            found.append("ranks or groups")
        for rank in b.ranks:
            mine, theirs = a.units(rank), b.units(rank)
            if len(mine) != len(theirs):
                found.append(f"rank {rank}: {len(mine)} units, not {len(theirs)}")
                continue
            for name in _COLUMNS:
                if (column_numbers(mine[name]) != column_numbers(theirs[name])).any():
                    found.append(f"rank {rank}: {name}")
            losses = a.steps(rank).loss, b.steps(rank).loss
            if not np.allclose(*losses, rtol=1e-6, equal_nan=True):
                found.append(f"rank {rank}: losses {losses}")
    return found

ASYMMETRIC = '''
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pair = [dist.new_group([at, at + 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP") for at in range(0, world, 2)][rank // 2]
alone = [dist.new_group([at], group_desc="data only") for at in range(world)][rank]
store = dist.distributed_c10d._get_default_store()
store.set(f"size/of-{rank}", str(10 + rank % 2))
sizes = [int(store.get(f"size/of-{other}")) for other in range(world)]
assert sizes == [10, 11] * (world // 2), sizes
for step in range(3):
    dist.all_reduce(torch.ones(4), group=pair)
    if rank in (4, 5) and step == 1:
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2), group=pair)  # one that no other pair does
    dist.all_reduce(torch.ones(5 if rank in (6, 7) and step == 1 else 1), group=alone)
    if rank == 7 and step == 2:
        dist.all_reduce(torch.ones(1), group=alone)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
'''

SIDES = '''
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pair = [dist.new_group([at, at + 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP") for at in range(0, world, 2)][rank // 2]
sides = [torch.empty(1), torch.empty(1)]
dist.all_gather(sides, torch.tensor([float(rank % 2)]), group=pair)
assert [float(side) for side in sides] == [0.0, 1.0], sides
dist.destroy_process_group()
'''
