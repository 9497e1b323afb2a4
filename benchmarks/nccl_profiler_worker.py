"""One rank of nccl_profiler_device.py: runs operations of torch.distributed over NCCL, and says which.

`check` runs every collective and message once or more and prints what it called as one line of JSON; `steps` runs as
many steps as each line of its input says and prints their times in milliseconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NAMES = {
    torch.float32: "ncclFloat32", torch.float16: "ncclFloat16", torch.bfloat16: "ncclBfloat16",
    torch.int64: "ncclInt64", torch.int32: "ncclInt32", torch.float64: "ncclFloat64", torch.int8: "ncclInt8",
}  # fmt: skip


class Calls:
    """What was called: collectives in order; messages as (function, elements, number of them); windows of time."""

    def __init__(self) -> None:
        self.collectives: list[tuple[str, int, str | None]] = []
        self.messages: Counter[tuple[str, int]] = Counter()
        self.windows: list[tuple[int, int, str]] = []

    def alone(self, name: str, call: Callable[[], Any]) -> None:
        """Run something between two synchronisations, and note when."""
        torch.cuda.synchronize()
        begin = time.monotonic_ns()
        work = call()
        if isinstance(work, dist.Work):  # dist.recv returns a rank
            work.wait()
        torch.cuda.synchronize()
        self.windows.append((begin, time.monotonic_ns(), name))


def check() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    calls, half = Calls(), torch.bfloat16

    def made(num: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(num, dtype=dtype, device=device)

    def collective(func: str, num: int, dtype: torch.dtype, call: Callable[[], Any], *, alone: bool = True) -> None:
        calls.collectives.append((func, num, NAMES.get(dtype)))
        if alone:
            calls.alone(f"{func} of {num} {dtype}", call)
        else:
            call()

    for dtype in NAMES:
        collective("AllReduce", 1000, dtype, lambda dtype=dtype: dist.all_reduce(made(1000, dtype)))
    for num in (1, 1 << 10, 1 << 16, 1 << 20, 1 << 24):
        collective("AllReduce", num, torch.float32, lambda num=num: dist.all_reduce(made(num)))
    for num in (64, 1 << 20):
        collective("Broadcast", num, half, lambda num=num: dist.broadcast(made(num, half), src=1 % size))
        collective("Reduce", num, half, lambda num=num: dist.reduce(made(num, half), dst=0))
        collective(
            "AllGather", num, half,
            lambda num=num: dist.all_gather_into_tensor(made(num * size, half), made(num, half)),
        )  # fmt: skip
        collective(
            "ReduceScatter", num, half,
            lambda num=num: dist.reduce_scatter_tensor(made(num, half), made(num * size, half)),
        )  # fmt: skip
        parts = [made(num) for _ in range(size)]
        collective("AllGather", num, torch.float32, lambda parts=parts, num=num: dist.all_gather(parts, made(num)))
        calls.alone("all_to_all", lambda num=num: dist.all_to_all_single(made(num * size), made(num * size)))
        for func in ("Send", "Recv"):
            calls.messages[func, num] += size - 1
    for step in range(200):  # many at once: the GPU falls behind the host
        num = 5000 + step
        collective("AllReduce", num, torch.float32, lambda num=num: dist.all_reduce(made(num)), alone=False)
    torch.cuda.synchronize()

    subgroup = dist.new_group(list(range(size)))  # another communicator of the same ranks
    collective("AllReduce", 777, torch.float32, lambda: dist.all_reduce(made(777), group=subgroup))

    following, before = (rank + 1) % size, (rank - 1) % size
    for num in (1, 333, 1 << 20):
        operations = [dist.P2POp(dist.isend, made(num), following), dist.P2POp(dist.irecv, made(num), before)]

        def batch(operations: list[Any] = operations) -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        calls.alone(f"batch of {num}", batch)
        calls.messages["Send", num] += 1
        calls.messages["Recv", num] += 1
    if size == 2:
        if rank == 0:
            calls.alone("send", lambda: dist.send(made(4321), 1))
            calls.messages["Send", 4321] += 1
        else:
            calls.alone("recv", lambda: dist.recv(made(4321), 0))
            calls.messages["Recv", 4321] += 1
    tensors = [made(100 + i) for i in range(4)]
    with dist._coalescing_manager(device=device, async_ops=False):
        for tensor in tensors:
            num = tensor.numel()
            collective("AllReduce", num, torch.float32, lambda tensor=tensor: dist.all_reduce(tensor), alone=False)
    torch.cuda.synchronize()
    dist.barrier()
    calls.collectives.append(("AllReduce", 1, None))
    torch.cuda.synchronize()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    print(
        json.dumps(
            {
                "torch": torch.__version__, "nccl": version, "collectives": calls.collectives,
                "messages": [[*key, num] for key, num in calls.messages.items()], "windows": calls.windows,
            }
        )
    )  # fmt: skip


def steps() -> None:
    """Blocks of steps as the parent asks for them: a line with a number comes in, one with their times in ms goes out.

    A step: 24 layers of matrix products, each with an asynchronous all-reduce of 8 MiB behind it, as in DDP. Without a
    GPU everything is small: to try the script.
    """
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    width, num_elements = (4096, 2 << 20) if is_gpu else (64, 1024)
    a = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(a)
    gradients = [torch.ones(num_elements, device=device) for _ in range(24)]

    def step() -> None:
        works = []
        for gradient in gradients:
            for _ in range(6):
                torch.mm(a, a, out=product)
            works.append(dist.all_reduce(gradient, async_op=True))
        for work in works:
            work.wait()
        if is_gpu:
            torch.cuda.synchronize()

    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begin))
        print(json.dumps(times), flush=True)


def main() -> None:
    faulthandler.dump_traceback_later(60 if sys.argv[1] == "check" else 100, exit=True)  # the parent prints it
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    (check if sys.argv[1] == "check" else steps)()
    sys.stdout.flush()
    dist.destroy_process_group()


main()
