"""A program that communicates and does nothing else: observed, it shows how long this machine's transport takes.

Responsible for running each operation at some sizes; fitting a model to its trace is transfer_model.py's.
"""

from __future__ import annotations

import sys
import warnings

SIZES = (4, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)  # bytes


def main(repetitions: int) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # torch renames its functions from version to version
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for num_bytes in SIZES:
        data = torch.zeros(max(num_bytes // 4 // size * size, size))
        whole = torch.zeros(len(data) * size)
        part = torch.zeros(len(data) // size)
        for _ in range(repetitions if num_bytes < SIZES[-1] else max(repetitions // 3, 3)):
            dist.barrier()
            dist.all_reduce(data)
            dist.barrier()
            dist.all_gather_into_tensor(whole, data)
            dist.barrier()
            dist.reduce_scatter_tensor(part, data)
            dist.barrier()
            dist.broadcast(data, 0)
            dist.barrier()
            dist.reduce(data, 0)
            dist.barrier()
            dist.all_to_all_single(torch.empty_like(data), data)
            dist.barrier()
            if rank == 0:
                dist.send(data, 1)
            elif rank == 1:
                dist.recv(data, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
