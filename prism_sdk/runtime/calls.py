"""One communication call in a normal form, whatever operator it came through.

Responsible for describing *what* a call contributes and where its results go; how the bytes travel is the business of
the modes (observe, record, emulate).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.refusals import refuse_like_gloo
from prism_sdk.wording import ranks_text
from prismtrace.model import DType, Op, ReduceOp

COMBINED = -1  # source of a delivery: the reduced contributions of all members


@dataclass(slots=True)
class GroupState:
    """A process group as this rank sees it, with the counters that number its operations."""

    name: str
    ranks: tuple[int, ...]
    group_rank: int
    backend: str
    description: str
    group_id: int
    generation: int = 0  # how often its name and ranks were made before
    is_urgent: bool = False  # the program asked for NCCL's kernels on a stream of high priority
    next_seq: int = 0
    next_p2p: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.description or f"of ranks {ranks_text(self.ranks)}"

    def take_seq(self) -> int:
        """Number of the next collective in the group."""
        seq = self.next_seq
        self.next_seq = seq + 1
        return seq

    def take_p2p_seq(self, source: int, destination: int, tag: int) -> int:
        """Number of the next message from `source` to `destination` (global ranks) under `tag`."""
        key = (source, destination, tag)
        seq = self.next_p2p.get(key, 0)
        self.next_p2p[key] = seq + 1
        return seq


@dataclass(slots=True)
class Delivery:
    """Copy `tensor.nbytes` bytes at `offset_bytes` of a member's (or the combined) contribution into `tensor`."""

    tensor: torch.Tensor
    source: int  # group rank, or COMBINED
    offset_bytes: int


class LateDeliveries(Sequence[Delivery]):
    """Deliveries that are made when somebody asks: a mode that keeps the backend never does."""

    def __init__(self, make: Callable[[], list[Delivery]]) -> None:
        self._make = make
        self._made: list[Delivery] | None = None

    def _all(self) -> list[Delivery]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


@dataclass(slots=True)
class Call:
    """A collective or point-to-point call of this rank."""

    op: Op
    group: GroupState
    native: Callable[[], Any]  # runs the call on torch's own backend; returns the operator's result
    contribution: list[torch.Tensor] = field(default_factory=list)
    deliveries: Sequence[Delivery] = field(default_factory=list)
    is_async: bool = True
    reduce_op: ReduceOp = ReduceOp.UNSPECIFIED
    root: int | None = None  # group rank
    peer: int | None = None  # group rank of the other end; None for any source
    tag: int | None = None
    # all-to-all: bytes for each member (contribution order), and the tensors that take what each member sends
    send_bytes: list[int] | None = None
    receive_tensors: list[torch.Tensor] | None = None
    splits_in: list[int] | None = None
    splits_out: list[int] | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    dtype: DType = DType.UNSPECIFIED
    equal_counts: bool = True  # members must contribute the same number of elements
    sizes_differ: str | None = None  # what does not fit between inputs and outputs
    misfit: Callable[[], Exception | str | None] | None = None  # what gloo would not take, asked where gloo is not
    through_one_tensor: list[torch.Tensor] = field(default_factory=list)  # a list that NCCL joins in memory of its own
    device: torch.device | None = None  # of an operation without tensors

    def check(self) -> None:
        """Raise RuntimeError for what every backend refuses; the modes that replace the backend call this."""
        size = len(self.group.ranks)
        for what, rank in (("root", self.root), ("peer", self.peer)):
            if rank is not None and not 0 <= rank < size:
                raise RuntimeError(f"{self.op.name.lower()}: invalid {what} rank {rank} in a group of {size}")
        if self.reduce_op is ReduceOp.PREMUL_SUM:
            if self.group.backend == "gloo":
                raise RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo")
            reason = "ReduceOp.PREMUL_SUM: its factor does not reach the operator"
            raise UnsupportedError(reason, hint="scale, then sum")
        tensors = [*self.contribution, *self.outputs]
        if self.reduce_op in _BITWISE and any(t.is_floating_point() or t.is_complex() for t in tensors):
            raise RuntimeError(f"Cannot use ReduceOp.{self.reduce_op.name} with non-integral dtype")
        if self.is_p2p and not all(t.is_contiguous() for t in tensors):
            raise RuntimeError(f"{self.op.name.lower()}: the tensor has to be contiguous")
        if self.op is Op.SEND and self.peer == self.group.group_rank:
            raise RuntimeError("send: a rank cannot send to itself")
        refuse_like_gloo(self)
        if self.sizes_differ is not None:
            raise RuntimeError(f"{self.op.name.lower()}: {self.sizes_differ}")
        if any(torch._debug_has_internal_overlap(t) == 1 for t in self.outputs if not t.is_contiguous()):
            raise RuntimeError(f"{self.op.name.lower()}: elements of an output share their memory (an expanded tensor)")

    def forget_tensors(self) -> None:
        """Hold nothing that the program may have let go of: whoever still needs the tensors holds them."""
        self.native = _done
        self.contribution, self.outputs, self.through_one_tensor = [], [], []
        self.deliveries, self.receive_tensors = (), None

    @property
    def other_rank(self) -> int | None:
        """Group rank of the root of a rooted collective or of the other end of a message; None where there is none."""
        return self.peer if self.root is None else self.root

    @property
    def num_elements_in(self) -> int:
        return sum(t.numel() for t in self.contribution)

    @property
    def num_elements_out(self) -> int:
        return sum(t.numel() for t in self.outputs)

    @property
    def is_p2p(self) -> bool:
        return self.op is Op.SEND or self.op is Op.RECV

    @property
    def has_contribution(self) -> bool:
        """False for a member that only receives (a broadcast's or scatter's non-root, a recv, a barrier)."""
        if self.op is Op.BROADCAST or self.op is Op.SCATTER:
            return self.group.group_rank == self.root
        return self.op is not Op.RECV and self.op is not Op.BARRIER

    @property
    def is_reduction(self) -> bool:
        return self.op in _REDUCTIONS

    @property
    def needs(self) -> str:
        """Whose contributions this member's result depends on: "all", "root" or "none".

        Like gloo with its buffered transport, a member that receives nothing does not wait for those that do.
        """
        if self.op in _ROOT_GIVES:
            return "none" if self.group.group_rank == self.root else "root"
        if self.op in _ROOT_TAKES:
            return "all" if self.group.group_rank == self.root else "none"
        return "all"

    def signature(self) -> tuple[Any, ...]:
        """What members must agree on: operation, reduction, dtype, root, element count (None where it may differ)."""
        if self.op is Op.BROADCAST:
            count: int | None = self.num_elements_out
        elif self.op is Op.SCATTER:
            count = self.num_elements_out
        else:
            count = self.num_elements_in if self.equal_counts else None
        return (int(self.op), int(self.reduce_op), int(self.dtype), self.root, count)


def _done() -> None:
    return None


_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_REDUCTIONS = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})
_ROOT_GIVES = frozenset({Op.BROADCAST, Op.SCATTER})
_ROOT_TAKES = frozenset({Op.REDUCE, Op.GATHER})
