"""Makes the allocations on the GPU that torch's NCCL backend makes for an operation, so that memory peaks are the same.

Responsible for sizes and lifetimes; when they are made and let go is order.py's.

As of torch 2.9 to 2.14 (ProcessGroupNCCL): gathering into a list of equal tensors and scattering from one go through
one tensor that holds the list, and a barrier reduces one element.  Those of an asynchronous operation stay for as long
as its inputs and outputs (shelf.py).
"""

from __future__ import annotations

import torch

from prism_sdk.runtime.calls import Call
from prismtrace.model import Op


def nccl_scratch(call: Call, device: torch.device) -> list[torch.Tensor]:
    """What NCCL's backend would allocate on `device` for `call`; to be held with its tensors."""
    if not uses_nccl(call.group.backend):
        return []
    if call.op is Op.BARRIER:
        return [torch.empty(1, dtype=torch.float32, device=device)]
    listed = call.through_one_tensor
    if not listed or len({tensor.shape for tensor in listed}) != 1:  # unequal ones are broadcast one by one
        return []
    like = listed[0]
    sizes, strides = [len(listed), *like.shape], [like.numel(), *like.stride()]
    return [torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)]


def results_of(call: Call, scratch: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the work handle holds for as long as the program holds it: what NCCL wrote to."""
    return list(scratch) if scratch and call.op is not Op.REDUCE_SCATTER else call.outputs


def place_scratch(call: Call, scratch: list[torch.Tensor]) -> None:
    """Put what was gathered where NCCL would have put it first, for those who ask the work handle for its results."""
    if scratch and call.op is Op.ALL_GATHER:
        torch.stack(call.outputs, out=scratch[0])


def uses_nccl(backend: str) -> bool:
    """Whether a group made with `backend` (as the script named it) uses NCCL for CUDA tensors."""
    return backend in ("nccl", "undefined") or "cuda:nccl" in backend
