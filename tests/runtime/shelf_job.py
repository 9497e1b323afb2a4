"""Shows for how long the tensors of an operation live that the program has let go of: a job for `prism`, and for NCCL.

It holds no test: test_shelf.py runs it on CPUs, benchmarks/gpu_alone.py on a GPU, where the numbers are the device's
allocated bytes.  Each line is a case: the bytes that are still there after the operation, after another operation that
comes at once, some time later (torch's watchdog looks every 100 ms), and after another operation then.  Environment:
SHELF_LATER (seconds), GPU_JOB_SHARES and GATE as in hold_job.py.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

BYTES = 1 << 20
LATER = float(os.environ.get("SHELF_LATER", "0.35"))
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Bytes:
    """Bytes that are there more than when it was made."""

    def __init__(self) -> None:
        self._before, self._made = self._allocated(), list[Any]()

    @staticmethod
    def _allocated() -> int:
        if DEVICE.type == "cpu":
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def new(self) -> torch.Tensor:
        tensor = torch.ones(BYTES // 4, device=DEVICE)
        if DEVICE.type == "cpu":
            self._made.append(weakref.ref(tensor))
        return tensor

    def now(self) -> int:
        return self._allocated() - self._before + sum(one() is not None for one in self._made) * BYTES


def case(name: str, ask: Callable[[Bytes], object], then: Callable[[], object]) -> None:
    """Say what is held by an operation that `ask` asks for; `then` asks for another."""
    time.sleep(LATER)
    small()  # what the last case left is let go of
    held = Bytes()
    ask(held)
    found = [held.now()]
    for pause in (0.0, LATER):
        if pause:
            time.sleep(pause)
            found.append(held.now())
        then()
        found.append(held.now())
    say("HELD", case=name, bytes=found)


def say(kind: str, **values: object) -> None:
    os.write(1, f"{kind} {json.dumps({'rank': dist.get_rank(), **values})}\n".encode())


def small(group: Any = None) -> None:
    dist.all_reduce(ONE, group=group)


def reduced(held: Bytes) -> Any:
    return dist.all_reduce(held.new(), async_op=True)


def in_one(held: Bytes) -> Any:
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
        dist.all_reduce(held.new())
        dist.all_reduce(held.new())
    return manager


def gathered(held: Bytes) -> Any:
    part = held.new()[: BYTES // 4 // dist.get_world_size()]
    return dist.all_gather_into_tensor(held.new(), part, async_op=True)


def sent(held: Bytes) -> None:
    """The first rank sends and never waits; the other one's receive is waited for."""
    if dist.get_rank():
        dist.recv(torch.empty(BYTES // 4, device=DEVICE), 0)
    else:
        dist.isend(held.new(), 1)


def buckets(pause: float) -> None:
    """Allocated bytes after each step of a job whose buckets are made anew before the second."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(DEVICE))
    held, found = Bytes(), []
    for _ in range(4):
        time.sleep(pause)
        model(torch.ones(64, 1024, device=DEVICE)).square().mean().backward()
        model.zero_grad()
        found.append(held.now())
    say("HELD", case=f"DDP, {pause} s before each step", bytes=found)


def main() -> None:
    global ONE
    gate = os.environ.get("GATE")
    while gate and not os.path.exists(gate):
        time.sleep(0.05)
    if DEVICE.type == "cpu":
        from prism_sdk.runtime.oncuda import shelf

        shelf.DEVICE_TYPE = "cpu"
    else:
        torch.cuda.set_device(DEVICE)
    if "GPU_JOB_SHARES" in os.environ:
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "cpu:gloo,cuda:nccl")
    other = dist.new_group()
    ONE = torch.ones(1, device=DEVICE)
    for _ in range(2):
        small()
        small(other)
    case("synchronous", lambda held: dist.all_reduce(held.new()), small)
    case("its handle is waited for", lambda held: reduced(held).wait(), small)
    case("its future is waited for", lambda held: reduced(held).get_future().wait(), small)
    case("nothing is waited for", lambda held: reduced(held) and None, small)
    case("then one of another group", lambda held: reduced(held).get_future().wait(), lambda: small(other))
    case("gathered, its future", lambda held: gathered(held).get_future().wait(), small)
    case("several as one, the handle", lambda held: in_one(held).wait(), small)
    case("several as one, the future", lambda held: in_one(held).works[0].get_future().wait(), small)
    case("functional", lambda held: functional.all_reduce(held.new(), "sum", dist.group.WORLD).sum(), small)
    case("sent, nobody waits", sent, small)
    if DEVICE.type == "cuda":
        case("a barrier", lambda held: dist.barrier(), dist.barrier)
        for pause in (0.0, LATER):
            buckets(pause)
    dist.destroy_process_group()


main()
