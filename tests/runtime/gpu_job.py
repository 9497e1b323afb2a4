"""A job as written for GPUs and NCCL, which checks its own results and says after each part what memory it holds.

It holds no test: test_gpu.py and benchmarks/gpu_checks.py run it, over NCCL and under `prism`, and compare.
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
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

SIZE = 1 << 20
_parts: list[tuple[str, int, int, int]] = []


def say(kind: str, **values: object) -> None:
    """One line in one write: other ranks share the pipe."""
    os.write(1, f"{kind} {json.dumps({'rank': dist.get_rank(), **values})}\n".encode())


def note(part: str) -> None:
    allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    _parts.append((part, allocated, peak, torch.cuda.memory_reserved()))


def full(value: float, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), float(value), device="cuda")


def check(part: str, tensor: torch.Tensor, value: float) -> None:
    wrong = int((tensor != value).sum())
    assert not wrong, f"{part}: {wrong} of {tensor.numel()} elements are not {value}, the first is {tensor.view(-1)[0]}"
    del tensor
    note(part)


def operations() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    x = full(rank + 1)
    dist.all_reduce(x)
    check("all_reduce", x, total)

    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    x = full(0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the value is there only after a while
        if hasattr(torch._C, "_cuda_sleep"):
            torch.cuda._sleep(20_000_000)
        x.fill_(rank + 1)
        work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(other):
        work.wait()
        y = x * 2
    torch.cuda.current_stream().wait_stream(other)
    check("async all_reduce over three streams", y, 2 * total)
    work.wait()  # a second wait, from another stream
    check("a second wait", x, total)
    del y, work

    outputs = [full(-1) for _ in range(size)]
    work = dist.all_gather(outputs, full(rank), async_op=True)
    note("all_gather of a list is under way")
    work.wait()
    for index, output in enumerate(outputs):
        check("all_gather of a list", output, index)
    outputs = [full(-1) for _ in range(size)]
    dist.all_gather(outputs, full(rank))
    check("all_gather of a list, sync", outputs[-1], size - 1)
    del outputs, output, work
    out = full(-1, SIZE * size)
    dist.all_gather_into_tensor(out, full(rank))
    check("all_gather_into_tensor", out[SIZE * (size - 1) :], size - 1)
    out = full(-1)
    dist.reduce_scatter_tensor(out, full(rank + 1, SIZE * size))
    check("reduce_scatter_tensor", out, total)
    dist.reduce_scatter(out, [full(rank + i) for i in range(size)], op=dist.ReduceOp.SUM)
    check("reduce_scatter of a list", out, total - size + size * rank)
    work = dist.reduce_scatter(out, [full(rank + i) for i in range(size)], async_op=True)
    note("reduce_scatter of a list is under way")
    work.wait()
    check("async reduce_scatter of a list", out, total - size + size * rank)
    del work
    x = full(rank)
    dist.broadcast(x, 1)
    check("broadcast", x, 1)
    x = full(rank + 1)
    dist.reduce(x, 0, op=dist.ReduceOp.MAX)
    check("reduce", x if rank == 0 else full(0), size if rank == 0 else 0)
    dist.scatter(x, [full(i) for i in range(size)] if rank == 0 else None, src=0)
    check("scatter", x, rank)
    gathered = [full(-1) for _ in range(size)] if rank == 0 else None
    dist.gather(x, gathered, dst=0)
    check("gather", gathered[-1] if gathered else full(0), size - 1 if rank == 0 else 0)
    del gathered
    sent = torch.cat([full(rank, 10 * (i + 1)) for i in range(size)])
    out = full(-1, 10 * (rank + 1) * size)
    dist.all_to_all_single(out, sent, [10 * (rank + 1)] * size, [10 * (i + 1) for i in range(size)])
    check("all_to_all_single", out[-10:], size - 1)
    outs = [full(-1) for _ in range(size)]
    dist.all_to_all(outs, [full(rank * 10 + i) for i in range(size)])
    check("all_to_all", outs[0], rank)
    del outs, out, sent
    dist.barrier()
    note("barrier")
    right, left = (rank + 1) % size, (rank - 1) % size
    got = full(-1)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, full(rank), right), dist.P2POp(dist.irecv, got, left)]):
        work.wait()
    check("batch_isend_irecv", got, left)
    if rank % 2 == 0 and rank + 1 < size:
        dist.send(full(7), rank + 1)
    elif rank % 2:
        dist.recv(got, rank - 1)
        check("recv", got, 7)
    pair = [full(rank + 1), full(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in pair:
            dist.all_reduce(x)
    manager.wait()
    check("coalesced all_reduce", pair[1], 2 * size)
    big = [full(-1, SIZE * size) for _ in range(2)]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
        for out, x in zip(big, pair, strict=True):
            dist.all_gather_into_tensor(out, x)
    manager.wait()
    check("coalesced all_gather", big[1], 2 * size)
    check("functional all_reduce", funcol.all_reduce(full(1), "sum", dist.group.WORLD) + 0, size)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": i} for i in range(size)]
    note("all_gather_object")
    group = dist.new_group([0, 1])
    if rank < 2:
        x = full(1)
        dist.all_reduce(x, group=group)
        check("a group of two", x, 2)


class Gathered(nn.Module):
    """A layer that overlaps communication as FSDP2 does, with any number of ranks, one too: gathers and scatters run
    on streams of their own, and the main stream waits for events of them."""

    def __init__(
        self, inner: nn.Module, device: torch.device, gathers: torch.cuda.Stream, scatters: torch.cuda.Stream
    ) -> None:
        super().__init__()
        self.inner, self.gathers, self.scatters = inner, gathers, scatters
        self.size = sum(p.numel() for p in inner.parameters()) // dist.get_world_size()
        self.shard = torch.zeros(self.size, device=device, dtype=torch.bfloat16)
        self.scattered = torch.zeros(self.size, device=device)
        self.register_forward_pre_hook(lambda *_: self.gather())
        self.register_full_backward_pre_hook(lambda *_: self.gather())
        self.register_full_backward_hook(lambda *_: self.scatter())

    def gather(self) -> None:
        self.gathers.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.gathers):
            out = self.shard.new_empty(self.size * dist.get_world_size())
            dist.all_gather_into_tensor(out, self.shard)
            event = self.gathers.record_event()
        torch.cuda.current_stream().wait_event(event)
        out.record_stream(torch.cuda.current_stream())

    def scatter(self) -> None:
        full = self.scattered.new_zeros(self.size * dist.get_world_size())
        self.scatters.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.scatters):
            dist.reduce_scatter_tensor(self.scattered, full)
        full.record_stream(self.scatters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def train(wrap: str, steps: int, width: int, batch: int) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    device = torch.device("cuda", rank)
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)]
    model: nn.Module = nn.Sequential(*layers).to(device)
    if wrap == "streams":
        streams = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        model = nn.Sequential(*(Gathered(layer, device, *streams) for layer in layers)).to(torch.bfloat16)
    elif wrap == "ddp":
        model = DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=width * width / 100_000)
    else:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(device=device).manual_seed(dist.get_rank())
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    for _ in range(steps):
        x = torch.randn(batch, width, device=f"cuda:{rank}", generator=generator)
        if wrap == "streams":
            x = x.to(torch.bfloat16).requires_grad_()
        loss = model(x).float().square().mean()
        loss.backward()
        if wrap == "streams":
            torch.cuda.current_stream().wait_stream(streams[1])
        optimizer.step()
        optimizer.zero_grad()
        if "--timed" in sys.argv:
            torch.cuda.synchronize()
            times.append(time.perf_counter())
        note("step")
    say("LOSS", loss=loss.item())
    if len(times) > 1:
        milliseconds = [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
        say("STEPS", ms=milliseconds)


def graph() -> None:
    """Captures an all_reduce with what is computed around it, and replays both."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = full(rank + 1), full(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x)  # communicators are not made inside a capture
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        dist.all_reduce(x)
        y.add_(x)
    x.fill_(rank + 1)
    for _ in range(3):
        captured.replay()
    total = size * (size + 1) / 2
    check("replayed all_reduce", x, total * size**2)
    check("what was computed from it", y, total * (1 + size + size**2))


def fill(gib: float) -> None:
    """Holds that much memory, and meets the others."""
    kept = torch.empty(int(gib * (1 << 30)), dtype=torch.uint8, device="cuda")
    dist.barrier()
    del kept


def states(gib: float, steps: int) -> None:
    """A small model trained by DDP beside a state of that size, which is changed and checked in every step."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda(rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes, left = [], int(gib * (1 << 30))
    while left:
        sizes.append(min(left, 512 << 20))
        left -= sizes[-1]
    kept = [torch.full((size // 4,), rank * 100 + i, dtype=torch.int32, device="cuda") for i, size in enumerate(sizes)]
    addresses = [tensor.data_ptr() for tensor in kept]
    generator = torch.Generator(device="cuda").manual_seed(rank)
    stream = torch.cuda.Stream()
    for step in range(steps):
        loss = model(torch.randn(64, 512, device="cuda", generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i, tensor in enumerate(kept):
                wrong = int((tensor != rank * 100 + i + step).sum())
                assert not wrong, f"rank {rank}, step {step}, tensor {i}: {wrong} elements are not what they were"
                tensor.add_(1)
        torch.cuda.current_stream().wait_stream(stream)
        note("step")
    assert addresses == [tensor.data_ptr() for tensor in kept]
    say("LOSS", loss=loss.item())


def switch(times: int) -> None:
    """Meets the others again and again, and does nothing else."""
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    began = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(value)
    say("STEPS", ms=[(time.perf_counter() - began) * 1e3 / times])


def turns(times: int) -> None:
    """Meets the others in an operation on the host, with a device in use: when each call began, and when it ended."""
    kept = full(dist.get_rank())
    torch.cuda.synchronize()
    group = dist.new_group(backend="gloo")
    value, entered, left = torch.ones(1), [], []
    for _ in range(times):
        entered.append(time.monotonic_ns())
        dist.all_reduce(value, group=group)
        left.append(time.monotonic_ns())
        value.fill_(1)
    check("turns", kept, dist.get_rank())
    say("TURNS", entered=entered, left=left)


def grow(mib: int) -> None:
    """Allocates until it is refused, and says how often it was not."""
    kept: list[torch.Tensor] = []
    try:
        while True:
            kept.append(torch.empty(mib << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        say("GROWN", num=len(kept), text=str(error)[:300], free=free, total=total, seen=properties.total_memory)
        if "--caught" not in sys.argv:
            raise


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("GPU_JOB_SECONDS", "80")), exit=True)
    if "GPU_JOB_SHARES" in os.environ:  # NCCL lets ranks share a GPU that say they are on different hosts
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    name, *numbers = (word for word in sys.argv[1:] if not word.startswith("--"))
    if name == "operations":
        operations()
    elif name == "graph":
        graph()
    elif name == "fill":
        fill(float(numbers[0]))
    elif name == "states":
        states(float(numbers[0]), int(numbers[1]))
    elif name in ("switch", "grow", "turns"):
        {"switch": switch, "grow": grow, "turns": turns}[name](int(numbers[0]))
    else:
        train(name, *map(int, numbers))
    torch.cuda.synchronize()
    say("MEMORY", parts=_parts)
    dist.destroy_process_group()


main()
