"""Jobs in which ranks wait for what others do. It holds no test.

    overlap_job.py chain NUM     rank 0 has asked for NUM reductions before rank 1 does what they wait for; four ranks,
                                 on GPUs where there are some
    overlap_job.py killed WORD   rank 1 kills the launch's process with WORD in its command line while all wait for it

Each rank checks all that it gets.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(got: torch.Tensor, wanted: float, what: object) -> None:
    if got.item() != wanted:
        raise SystemExit(f"rank {dist.get_rank()} got {got.item()} of {what}, not {wanted}")


def chain(num: int) -> None:
    """Rank 0 waits for 2, which waits for 1, which waits for 3 before, and asks when rank 0 has asked for all."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    first, second, third = ((1, 3), (1, 2), (0, 2))
    groups = {ranks: dist.new_group(ranks) for ranks in (first, second, third)}
    dist.all_reduce(torch.ones(1, device=DEVICE))  # sandbox ranks connect at their first operation
    if rank == 1:
        store.wait(["asked"])
    for ranks in (first, second):
        if rank in ranks:
            tensor = torch.tensor([float(rank)], device=DEVICE)
            dist.all_reduce(tensor, group=groups[ranks])
            check(tensor, sum(ranks), ranks)
    if rank in third:
        tensors = [torch.tensor([float(rank + i)], device=DEVICE) for i in range(num)]
        works = [dist.all_reduce(one, dist.ReduceOp.MAX, group=groups[third], async_op=True) for one in tensors]
        store.set("asked" if rank == 0 else "asked too", "yes")
        for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            work.wait()
            check(tensor, 2 + i, (third, i))


def killed(word: str) -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1 and word:
        time.sleep(0.5)
        for number in helpers(word):
            os.kill(number, signal.SIGKILL)
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def helpers(word: str) -> list[int]:
    """Processes that the launcher of this rank has started: the rank's parent is one of them."""

    def parent(number: int) -> int:
        return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])

    launcher = parent(os.getppid())
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children if word in Path(f"/proc/{child}/cmdline").read_text()]


if __name__ == "__main__":
    what, value = sys.argv[1:]
    on_gpus = what == "chain" and DEVICE == "cuda"
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if on_gpus else "gloo")
    if what == "killed":
        killed(value)
    else:
        chain(int(value))
    print(f"rank {dist.get_rank()} checked all", flush=True)
    dist.destroy_process_group()
