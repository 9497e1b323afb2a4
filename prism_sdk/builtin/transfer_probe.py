"""A program that communicates and does nothing else: observed, it shows how long this machine's transport takes.

Responsible for running each operation at some sizes; fitting a model to its trace is transfer_model.py's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

SIZES = (4, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)  # bytes


def main(repetitions: int) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # torch renames its functions from version to version
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([member]) for member in range(size)][rank]  # what a call costs without a neighbour
    for num_bytes in SIZES:
        for _ in range(repetitions if num_bytes < SIZES[-1] else max(repetitions // 3, 3)):
            _collectives(num_bytes, alone)
            _collectives(num_bytes, None)
            dist.barrier()
            data = torch.zeros(max(num_bytes // 4, 1))
            if rank == 0:
                dist.send(data, 1)
            elif rank == 1:
                dist.recv(data, 0)
    dist.destroy_process_group()


def _collectives(num_bytes: int, group: Any) -> None:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size(group)
    root = dist.get_global_rank(group, 0) if group is not None else 0
    data = torch.zeros(max(num_bytes // 4 // size * size, size))
    whole, part = torch.zeros(len(data) * size), torch.zeros(len(data) // size)
    calls: tuple[Callable[[], object], ...] = (
        lambda: dist.all_reduce(data, group=group),
        lambda: dist.all_gather_into_tensor(whole, data, group=group),
        lambda: dist.reduce_scatter_tensor(part, data, group=group),
        lambda: dist.broadcast(data, root, group=group),
        lambda: dist.reduce(data, root, group=group),
        lambda: dist.all_to_all_single(torch.empty_like(data), data, group=group),
    )
    for call in calls:
        dist.barrier()
        call()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
