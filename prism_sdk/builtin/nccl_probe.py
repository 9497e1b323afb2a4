"""A program that runs NCCL's operations between GPUs beside computing: observed, it shows how long they take.

Responsible for running each operation at the sizes it is given; fitting tables to its trace is prism_sdk.cluster's.

Each is asked for asynchronously, so that it has a stream of its own, and matrices are multiplied beside it: NCCL shares
the processors and the memory with what a job computes meanwhile, and takes two to three times as long as alone.

    -m prism_sdk.builtin.nccl_probe '{"all_reduce": [4, 1048576]}' [REPETITIONS]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

_WIDTH = 8192  # of matrices: 1.1 TFLOP a product, 1.5 ms on a Hopper GPU
_GB_PER_S = 100.0  # slower than links are, so that there is computing beside the whole operation
_PRODUCT_S = 0.0014


def main(sizes: dict[str, list[int]], repetitions: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    size = dist.get_world_size()
    matrix = torch.randn(_WIDTH, _WIDTH, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    for name, contributions in sizes.items():
        for num_bytes in contributions:
            call = _call(name, num_bytes, size)
            if call is None:
                continue
            for _ in range(repetitions):
                work = call()
                for _ in range(1 + int(num_bytes * size / _GB_PER_S / 1e9 / _PRODUCT_S)):
                    torch.mm(matrix, matrix, out=product)
                if work is not None:
                    work.wait()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def _call(name: str, num_bytes: int, size: int) -> Callable[[], Any] | None:
    """The operation with so many bytes contributed by each rank."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    count = max(num_bytes // 4 // size, 1) * size
    data = torch.zeros(count, device="cuda")
    if name == "all_reduce":
        return lambda: dist.all_reduce(data, async_op=True)
    if name == "all_gather":
        whole = torch.zeros(count * size, device="cuda")
        return lambda: dist.all_gather_into_tensor(whole, data, async_op=True)
    if name == "reduce_scatter":
        part = torch.zeros(count // size, device="cuda")
        return lambda: dist.reduce_scatter_tensor(part, data, async_op=True)
    if name == "broadcast":
        return lambda: dist.broadcast(data, 0, async_op=True)
    if name == "reduce":
        return lambda: dist.reduce(data, 0, async_op=True)
    if name == "all_to_all":
        other = torch.empty_like(data)
        return lambda: dist.all_to_all_single(other, data, async_op=True)
    if name == "recv" and rank < 2:
        return lambda: dist.isend(data, 1) if rank == 0 else dist.irecv(data, 0)
    return None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6)
