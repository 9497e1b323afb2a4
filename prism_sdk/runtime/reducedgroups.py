"""Calls a library's collectives among the ranks of a reduced communicator.

Responsible for the interface, and for libraries by way of torch; what is in the buffers is `reduced`'s, NCCL without
torch `oncuda/nccl`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from prism_sdk.pruning import Pending
from prismtrace import ReduceOp

Part = tuple[int, torch.Tensor]
"""A position in the communicator, and what it gets or gives."""


class ReducedGroup(ABC):
    """The collectives of a library among the ranks of a reduced communicator. Calls start in order and do not block."""

    @abstractmethod
    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> Pending: ...

    @abstractmethod
    def reduce(self, buffer: torch.Tensor, root: int, op: ReduceOp) -> Pending: ...

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor, root: int) -> Pending: ...

    @abstractmethod
    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Pending: ...

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, op: ReduceOp) -> Pending: ...

    @abstractmethod
    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Pending:
        """Messages, all at once; those between two positions keep their order."""


class TorchGroup(ReducedGroup):
    """Over a process group of torch (gloo on the CPU, NCCL on GPUs)."""

    def __init__(self, group: Any) -> None:
        """`group`: a ``torch.distributed`` ProcessGroup or a backend of one."""
        self._group = group

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> Pending:
        options = _options("AllreduceOptions", reduceOp=_torch_op(op))
        return self._group.allreduce([buffer], options)

    def reduce(self, buffer: torch.Tensor, root: int, op: ReduceOp) -> Pending:
        options = _options("ReduceOptions", reduceOp=_torch_op(op), rootRank=root, rootTensor=0)
        return self._group.reduce([buffer], options)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Pending:
        return self._group.broadcast([buffer], _options("BroadcastOptions", rootRank=root, rootTensor=0))

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Pending:
        return self._group._allgather_base(output, part)

    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, op: ReduceOp) -> Pending:
        options = _options("ReduceScatterOptions", reduceOp=_torch_op(op))
        return self._group._reduce_scatter_base(output, parts, options)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Pending:
        works = [self._group.recv([tensor], position, 0) for position, tensor in receives]
        return _All([*works, *(self._group.send([tensor], position, 0) for position, tensor in sends)])


class _All:
    """Several operations as one (implements Pending)."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> object:
        return [work.wait() for work in self._works]


def _options(kind: str, **fields: Any) -> Any:
    from torch._C import _distributed_c10d

    options = getattr(_distributed_c10d, kind)()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _torch_op(op: ReduceOp) -> Any:
    from torch.distributed import ReduceOp as TorchReduceOp

    return getattr(TorchReduceOp, op.name)
