"""Jobs on CPU that train one small model under each data parallelism in turn: two microbatches, two steps each.

    prism record --nproc-per-node 4 ... -- data_parallel_job.py ddp fsdp1 fsdp2 hsdp grouped twice tensor

It holds no test, and nothing in it knows about Prism.
"""

import contextlib
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, LAYERS, MICROBATCHES, STEPS = 16, 2, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sharded(model: Model, mesh: object = None) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def build(kind: str) -> nn.Module:
    model, world_size = Model(), dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
        )  # fmt: skip
    if kind == "fsdp2":
        return sharded(model)
    if kind == "hsdp":
        return sharded(model, init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    if kind in ("grouped", "twice"):
        fully_shard([model.norm, model.head])
        return sharded(model)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh["dp"])


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    step = 0
    for kind in sys.argv[1:]:
        model = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(1 + dist.get_rank() // 2)
        for _ in range(STEPS):
            losses = []
            for microbatch in range(MICROBATCHES):
                x = torch.randn(4, WIDTH, generator=data)
                is_last = microbatch == MICROBATCHES - 1
                quiet = kind == "ddp" and not is_last
                with model.no_sync() if quiet else contextlib.nullcontext():
                    output = model(x)
                    if kind == "twice":  # two forward passes for one backward pass
                        output = (output + model(x)) / 2
                    loss = (output - x.tanh()).square().mean()
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step} loss {sum(losses) / len(losses)!r}", flush=True)
            step += 1
        with torch.no_grad():
            model(torch.zeros(1, WIDTH))  # an evaluation is no microbatch
    if "TORCH_FR_BUFFER_SIZE" in os.environ and dist.get_rank() == 0:  # what torch's own flight recorder saw of gloo
        seen = json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])
        print("flight recorder", json.dumps([entry["profiling_name"] for entry in seen]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
