"""Makes the dumps in data/ with PyTorch itself: four ranks, gloo, pickle and JSON. Not a test.

    python make_fixtures.py

Stack frames are left out, so that no path of a machine is in a dump.
"""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(__file__).parent / "data"


def worker(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29612", TORCH_FR_BUFFER_SIZE="2000")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    groups = [dist.new_group([0, 1], group_desc="dp"), dist.new_group([2, 3], group_desc="dp")]
    group = groups[rank // 2]
    vector = torch.ones(8)
    dist.all_reduce(torch.ones(8, 8))
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    dist.all_gather([torch.empty(8) for _ in range(2)], vector, group=group)
    dist.broadcast(vector, src=(rank // 2) * 2 + 1, group=group)
    dist.all_to_all_single(torch.empty(8), vector, output_split_sizes=[2] * 4, input_split_sizes=[2] * 4)
    dist.reduce(vector, dst=3)
    dist.barrier()
    (DATA / f"gloo_trace_{rank}").write_bytes(c10d._dump_fr_trace(True, False, False))
    if rank == 0:
        (DATA / f"gloo_trace_{rank}.json").write_bytes(c10d._dump_fr_trace_json(True, False))
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing

    DATA.mkdir(exist_ok=True)
    torch.multiprocessing.spawn(worker, args=(4,), nprocs=4)
