"""The jobs of the table of real and emulated steps: one of each kind of parallelism, with steps of 100 ms and more.

    python benchmarks/gpu_table_job.py KIND STEPS [--small]

KIND: dense and moe (FSDP2), hsdp (FSDP2 in groups of half the ranks, replicated twice), ddp, 1f1b and interleaved
(torch's pipelining), tp (DTensor). Written for any even number of GPUs and NCCL, and for `prism`: pipelines and tensor
parallelism are at most four wide, and what is left of the ranks replicates that (DDP). TABLE_BLOCKS and TABLE_BATCH
are other numbers of layers and of sequences. It says its steps, losses and
bytes after each step, and what it held where the device had no more; and it waits for the file GATE before it opens a
GPU, if that is set: the next run can load torch meanwhile.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

SMALL = "--small" in sys.argv
LENGTH, WIDTH, HEADS = (16, 64, 4) if SMALL else (4096, 4096, 32)
EXPERTS, TOP, HIDDEN, MOE_WIDTH = (8, 2, 32, 64) if SMALL else (128, 8, 768, 2048)  # Qwen3-30B-A3B
MICRO_BATCHES = 4
NUM_BLOCKS = {"dense": 4, "hsdp": 8, "moe": 2, "ddp": 6, "1f1b": 8, "interleaved": 8, "tp": 7}
if "TABLE_BLOCKS" in os.environ:
    NUM_BLOCKS = dict.fromkeys(NUM_BLOCKS, int(os.environ["TABLE_BLOCKS"]))
BATCH = {"dense": 4, "hsdp": 2, "moe": 16, "ddp": 3, "1f1b": MICRO_BATCHES, "interleaved": MICRO_BATCHES, "tp": 4}
if "TABLE_BATCH" in os.environ:
    BATCH = dict.fromkeys(BATCH, int(os.environ["TABLE_BATCH"]))
WIDEST = int(os.environ.get("TABLE_WIDEST", "4"))  # pipelines and tensor parallelism


def say(kind: str, **values: object) -> None:
    os.write(1, f"{kind} {json.dumps({'rank': dist.get_rank(), **values})}\n".encode())


class Block(nn.Module):
    """A transformer layer; attention and a perceptron whose inner width can be cut over ranks."""

    def __init__(self, width: int, heads: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.head = width // heads
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.inner = inner or nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        q, k, v = (part(y).view(batch, length, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        out: torch.Tensor = x + self.inner(self.second(x))
        return out


class Experts(nn.Module):
    """A mixture of experts; each takes as many tokens, so that shapes are the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(MOE_WIDTH, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, MOE_WIDTH, HIDDEN) / 64) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, MOE_WIDTH) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, MOE_WIDTH)
        scores = self.router(tokens).softmax(-1)
        capacity = tokens.shape[0] * TOP // EXPERTS
        weight, index = scores.t().topk(capacity, dim=-1)  # each expert takes its best tokens
        taken = tokens[index.reshape(-1)].view(EXPERTS, capacity, MOE_WIDTH)
        done = torch.bmm(F.silu(torch.bmm(taken, self.gate)) * torch.bmm(taken, self.up), self.down)
        done = done * weight.unsqueeze(-1).to(done.dtype)
        out = torch.zeros_like(tokens).index_add(0, index.reshape(-1), done.reshape(-1, MOE_WIDTH).to(tokens.dtype))
        return out.view_as(x)


def blocks(kind: str, device: torch.device) -> list[nn.Module]:
    """The layers of a job on the device."""
    made: list[nn.Module] = []
    deeper = max(min(dist.get_world_size(), WIDEST) // 2, 1) if kind == "tp" else 1  # each rank does less of a layer
    with device:
        for _ in range(NUM_BLOCKS[kind] * deeper):
            if kind == "moe":
                made.append(Block(MOE_WIDTH, max(MOE_WIDTH // 128, 1), Experts()))
            else:
                made.append(Block(WIDTH, HEADS))
    return made


Step = Callable[[torch.Tensor], torch.Tensor]


def sharded(kind: str, device: torch.device) -> tuple[list[nn.Parameter], Step]:
    """FSDP2 over all ranks, in bf16, reduced in fp32."""
    layers = blocks(kind, device)
    shape = (2, dist.get_world_size() // 2) if kind == "hsdp" else (dist.get_world_size(),)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model = nn.Sequential(*layers)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return list(model.parameters()), simple(model)


def simple(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        return loss.detach()

    return step


def replicated(kind: str, device: torch.device) -> tuple[list[nn.Parameter], Step]:
    """DDP, whose buckets are reduced beside the backward pass."""
    model = DistributedDataParallel(nn.Sequential(*blocks(kind, device)).to(torch.bfloat16),
                                    device_ids=None if device.type == "cpu" else [device.index])  # fmt: skip
    return list(model.parameters()), simple(model)


def tensor_parallel(kind: str, device: torch.device) -> tuple[list[nn.Parameter], Step]:
    """Heads and inner width are cut over some ranks; over the others parameters are replicated."""
    mesh = grid(device, "tp")
    layers = blocks(kind, device)
    plan = {
        "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel(),
        "inner.0": ColwiseParallel(), "inner.2": RowwiseParallel(),
    }  # fmt: skip
    model = nn.Sequential(*layers).to(torch.bfloat16)
    for layer in layers:
        parallelize_module(layer, mesh["tp"], plan)
    if mesh["dp"].size() > 1:
        fully_shard(model, mesh=mesh["dp"])  # DDP takes no parameters that are cut already
    return list(model.parameters()), simple(model)


def grid(device: torch.device, name: str) -> DeviceMesh:
    """Ranks as replicas times `name`, which is at most four wide."""
    size = dist.get_world_size()
    wide = min(size, WIDEST)
    return init_device_mesh(device.type, (size // wide, wide), mesh_dim_names=("dp", name))


def pipelined(kind: str, device: torch.device) -> tuple[list[nn.Parameter], Step]:
    """Ranks with one stage each, or with two."""
    mesh = grid(device, "pp")
    rank, size, num_replicas = mesh["pp"].get_local_rank(), mesh["pp"].size(), mesh["dp"].size()
    per_rank = 2 if kind == "interleaved" else 1
    num_stages = size * per_rank
    layers = blocks(kind, device)
    each = len(layers) // num_stages
    stages, parameters = [], []
    for number in range(rank, num_stages, size):
        part = nn.Sequential(*layers[number * each : (number + 1) * each]).to(torch.bfloat16)
        parameters += list(part.parameters())
        whole: nn.Module = part
        if num_replicas > 1 and per_rank == 1:  # torch's interleaved schedules take no DDP
            whole = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
        stages.append(PipelineStage(whole, number, num_stages, device, group=mesh["pp"].get_group()))

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).float().square().mean()

    schedule = (
        Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=loss_of) if per_rank == 1
        else ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss_of)
    )  # fmt: skip

    def step(x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        arguments = (x,) if rank == 0 else ()
        target = {"target": torch.zeros_like(x), "losses": losses} if rank == size - 1 else {}
        schedule.step(*arguments, **target)
        if num_replicas > 1 and per_rank > 1:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
                parameter.grad /= num_replicas
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)

    return parameters, step


KINDS = {
    "dense": sharded, "hsdp": sharded, "moe": sharded, "ddp": replicated, "1f1b": pipelined, "interleaved": pipelined,
    "tp": tensor_parallel,
}  # fmt: skip


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("GPU_JOB_SECONDS", "110")), exit=True)
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
    device = torch.device("cuda", local)
    torch.manual_seed(0)
    parameters, step = KINDS[kind](kind, device)
    # of tensor parallelism some parameters are DTensors and some are not, which one fused step does not take
    optimizer = torch.optim.SGD(parameters, lr=1e-4, foreach=kind != "tp")
    # ranks of one model read the same tokens
    wide = min(dist.get_world_size(), WIDEST) if kind in ("1f1b", "interleaved", "tp") else 1
    generator = torch.Generator(device=device).manual_seed(dist.get_rank() // wide)
    width = MOE_WIDTH if kind == "moe" else WIDTH
    dtype = torch.float32 if kind in ("dense", "hsdp", "moe") else torch.bfloat16
    torch.cuda.synchronize()
    times, losses, memory = [time.perf_counter()], [], []

    def one_step() -> None:
        x = torch.randn(BATCH[kind], LENGTH, width, device=device, generator=generator).to(dtype)
        loss = step(x)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        memory.append([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()])

    try:
        for _ in range(steps):
            one_step()
    except torch.OutOfMemoryError as error:
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        say("REFUSED", step=len(losses), allocated=held[0], reserved=held[1], text=str(error).partition(". GPU")[0])
        raise
    say("STEPS", ms=[(b - a) * 1e3 for a, b in itertools.pairwise(times)])
    say("LOSS", losses=losses)
    retries = torch.cuda.memory_stats().get("num_alloc_retries")
    say("MEMORY", parts=memory, retries=retries)
    dist.destroy_process_group()


main()
