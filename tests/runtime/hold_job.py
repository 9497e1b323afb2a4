"""A job for GPUs whose steps are long, for the times of an emulation: chains of known length, FSDP2 and DDP.

It holds no test: benchmarks/gpu_hold.py runs it under `prism` and compares, gpu_alone.py without too.  Arguments: KIND
STEPS.  Environment: GPU_JOB_SHARES lets ranks share a GPU, HOLD_JOB_MORE multiplies the rows, HOLD_JOB_LIGHT divides
those of all ranks but the first, and it waits for the file GATE before it opens a GPU.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

CHAIN = 12  # collectives a step


def say(kind: str, **values: object) -> None:
    os.write(1, f"{kind} {json.dumps({'rank': dist.get_rank(), **values})}\n".encode())


class Chain(nn.Module):
    """Computing and collectives in turn; each collective is waited for at once, or behind `num_beside` products."""

    def __init__(self, num_before: int, num_beside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 0.5))
        self.num_before, self.num_beside = num_before, num_beside
        self.a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
        self.value = torch.ones(1 << 18, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a
        for _ in range(CHAIN):
            for _ in range(self.num_before):
                y = self.a @ y
            value = self.value * (dist.get_rank() + 1)
            work = dist.all_reduce(value, async_op=self.num_beside > 0)
            for _ in range(self.num_beside):
                y = self.a @ y
            if work is not None:
                work.wait()
            x = x * self.weight + value[:1].mean() + y[0, 0].float() * 0
        return x


def model_of(kind: str, device: torch.device) -> tuple[nn.Module, int]:
    """The model, and how many rows it is fed; 0 for a chain."""
    if kind in ("chain", "beside"):
        return Chain(8, 12 if kind == "beside" else 0).to(device), 0
    width, batch = (1024, 229_376) if kind == "fsdp2" else (1024, 32_768)
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)]
    model: nn.Module = nn.Sequential(*layers).to(device)
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index], bucket_cap_mb=12), batch
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, batch


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("GPU_JOB_SECONDS", "80")), exit=True)
    gate = os.environ.get("GATE")
    while gate and not os.path.exists(gate):
        time.sleep(0.05)
    local = int(os.environ["LOCAL_RANK"])
    if "GPU_JOB_SHARES" in os.environ:  # NCCL lets ranks share a GPU that say they are on different hosts
        local %= torch.cuda.device_count()
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    kind, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    device = torch.device("cuda", local)
    model, batch = model_of(kind, device)
    batch *= int(os.environ.get("HOLD_JOB_MORE", "1"))
    if dist.get_rank():
        batch //= int(os.environ.get("HOLD_JOB_LIGHT", "1"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator(device=device).manual_seed(dist.get_rank())
    torch.cuda.synchronize()
    times, losses = [time.perf_counter()], []
    memory = []
    for _ in range(steps):
        if batch:
            x = torch.randn(batch, 1024, device=f"cuda:{local}", generator=generator)
        else:
            x = torch.ones(1, device=f"cuda:{local}")
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del x
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        memory.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(),
                       torch.cuda.max_memory_reserved()))  # fmt: skip
    if "HOLD_JOB_LIGHT" not in os.environ:
        check_values()
    say("LOSS", losses=losses)
    say("STEPS", ms=[(b - a) * 1e3 for a, b in itertools.pairwise(times)])
    say("MEMORY", parts=memory)
    dist.destroy_process_group()


def check_values() -> None:
    """What is gathered and summed at the end has the values of all ranks."""
    seen: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, {"rank": dist.get_rank()})
    assert [one["rank"] for one in seen if isinstance(one, dict)] == list(range(dist.get_world_size()))
    count = torch.tensor([dist.get_rank() + 1], device="cuda")
    dist.all_reduce(count)
    assert count.item() == dist.get_world_size() * (dist.get_world_size() + 1) // 2
    dist.barrier()


main()
