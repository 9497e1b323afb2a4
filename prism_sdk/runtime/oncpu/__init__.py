"""Lets programs that say `cuda` and `nccl` run on CPUs, for structure and numbers and not for times.

Responsible for answering what a program asks of `torch.cuda`, for putting tensors on the CPU instead, and for gloo in
place of nccl. It is installed in a rank before the program starts, only when `--device cpu` asks for it, and stays.
What only a GPU can do (CUDA graphs, kernels of one's own) stays an error of torch.
"""

from __future__ import annotations

from prism_sdk.runtime.oncpu import functions, groups, namespace

__all__ = ["install"]


def install(*, num_devices: int) -> None:
    """Replace what has to be replaced in this process.

    Args:
        num_devices: what `torch.cuda.device_count()` says.
    """
    namespace.install(num_devices=num_devices)
    functions.install()
    groups.install()
