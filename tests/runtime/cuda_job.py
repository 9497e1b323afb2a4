"""A training script as written for GPUs: nccl, .cuda(), streams, events, autocast, a custom function.

It holds no test; with `prism ... --device cpu` it runs, and its losses are those of the same script that says cpu.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DEVICE = sys.argv[1]


class Doubled(torch.autograd.Function):
    """Makes a tensor on the device inside the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.full((1,), 2.0, device=DEVICE)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full((1,), 2.0, device=DEVICE)


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = DEVICE == "cuda"
    if on_gpu:
        torch.cuda.set_device(local_rank)
        assert torch.cuda.is_available() and torch.cuda.current_device() == local_rank
        assert torch.accelerator.current_device_index() == local_rank
        assert torch.accelerator.current_stream() == torch.cuda.current_stream()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE)
    if on_gpu:
        model = model.cuda()
        ddp = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    else:
        ddp = nn.parallel.DistributedDataParallel(model)
    sharded = fully_shard(nn.Linear(8, 8, device=DEVICE), mesh=init_device_mesh(DEVICE, (dist.get_world_size(),)))
    optimizer = torch.optim.SGD([*ddp.parameters(), *sharded.parameters()], lr=0.1)
    generator = torch.Generator(device=DEVICE).manual_seed(dist.get_rank())
    if on_gpu:
        side = torch.cuda.Stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    for step in range(2):
        x = torch.randn(4, 8, device=DEVICE, generator=generator)
        if on_gpu:
            with torch.cuda.stream(side):
                x = x.pin_memory().cuda(non_blocking=True)
                x.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            assert x.type() == "torch.cuda.FloatTensor"
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            y = ddp(x)
        loss = Doubled.apply(sharded(y.float())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        dist.all_reduce(value)
        if dist.get_rank() == 0:
            print(f"step {step} loss {value.item()!r}", flush=True)
    if on_gpu:
        end.record()
        torch.cuda.synchronize()
        assert begin.elapsed_time(end) > 0
        dist.barrier(device_ids=[local_rank])
    dist.destroy_process_group()


main()
