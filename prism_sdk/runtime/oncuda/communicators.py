"""The reduced communicators of an emulation over NCCL, as both ends make them.

Responsible for which there are, for connecting them in one order, and for the device memory that their calls use; what
a call carries is `reduced`'s, when it is made joining.py's and neighbours.py's.

A group has a communicator of its sandbox members and the assistant; messages have one for each direction between two
ranks, since those of one communicator stand in one line whatever stream they are on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from prism_sdk.pruning import Pending
from prism_sdk.runtime.manifest import Expected
from prism_sdk.runtime.oncuda.driver import DeviceMemory, Driver
from prism_sdk.runtime.oncuda.nccl import NcclGroup
from prism_sdk.runtime.reduced import Room, Shape, needs_values
from prism_sdk.runtime.reducedgroups import ReducedGroup
from prismtrace import Op, ReduceOp

Key = tuple[int, int, int]
"""A group, and of messages the ranks that send and receive, else -1 and -1."""

ALIGNMENT = 512
_WARM_UP_ELEMENTS, _WARM_UP_BYTES = 1024, 2 << 20


def key_of(one: Expected) -> Key:
    """The communicator of an operation with virtual members."""
    assert one.stream is not None
    if one.op in (Op.SEND, Op.RECV):
        return one.group_id, one.stream.source_rank, one.stream.destination_rank
    return one.group_id, -1, -1


def keys_of(expected: Iterable[Expected]) -> dict[Key, tuple[int, ...]]:
    """All that these operations need, with the ranks of the whole group, or the two that a message is between."""
    found = {}
    for one in expected:
        if one.stream is not None:
            key = key_of(one)
            found[key] = one.group_ranks if key[1] < 0 else key[1:]
    return found


class Scratch:
    """Device memory outside torch's allocator for one call after the other (implements reduced.Room)."""

    def __init__(self, driver: Driver, device: torch.device, *, is_weight: bool = False) -> None:
        """`is_weight`: nobody looks at what is in it, so all pieces are the same memory."""
        self._driver, self._device, self._is_weight = driver, device, is_weight
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._kept: list[torch.Tensor] = []  # what was too small; calls may still use it
        self._used = 0
        self.num_bytes = 0

    def restart(self) -> None:
        """What was handed out is handed out again."""
        self._used = 0

    def __call__(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        self._used = 0 if self._is_weight else self._used
        if self._used + size > self._memory.numel():
            self.grow(max(self._used + size, 2 * self._memory.numel()))
            self._used = 0
        start = self._used
        self._used = -(-(start + size) // ALIGNMENT) * ALIGNMENT
        return self._memory[start : start + size].view(dtype)

    def grow(self, num_bytes: int) -> None:
        """Have so much from now on."""
        if num_bytes <= self._memory.numel():
            return
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._kept.append(self._memory)
        block = DeviceMemory(self._driver.allocate(num_bytes), num_bytes)
        self._memory = torch.as_tensor(block, device=self._device)
        self.num_bytes += num_bytes


@dataclass
class Communicator:
    """One of them, at one end."""

    key: Key
    shape: Shape
    group: ReducedGroup
    values: Scratch
    """For calls that carry values; those that only weigh share one scratch."""
    last: Any = None
    """An event behind the last call: the next one waits for it, whatever stream it is on."""

    def begin(self, stream: Any) -> None:
        """The next call is made on `stream`, which is current, behind the last one."""
        if self.last is not None:
            stream.wait_event(self.last)
        self.group.stream = stream  # type: ignore[attr-defined]

    def end(self, stream: Any) -> None:
        """The call, and what comes of it, is on `stream`."""
        self.last = stream.record_event()


def connect(
    groups: Mapping[Key, tuple[int, ...]], sandbox: Sequence[int], folder: Path, *, rank: int | None, stream: Any,
    make_scratch: Callable[[], Scratch], patience_s: float,
) -> dict[Key, Communicator]:  # fmt: skip
    """The communicators that `rank` belongs to; with rank None, the assistant's, which are all.

    They are made in one order at all ends, and each is used once: a first call finds out whether it works, and connects
    what the library connects only then.

    Raises:
        RunError: the library refuses, or another end does not come within `patience_s`.
    """
    made: dict[Key, Communicator] = {}
    scratch = make_scratch()
    scratch.grow(_WARM_UP_BYTES)
    for key, ranks in sorted(groups.items()):
        members = [other for other in ranks if other in sandbox]
        if rank is not None and rank not in members:
            continue
        position = len(members) if rank is None else members.index(rank)
        size = len(members) + 1
        name = "-".join(f"{part:x}" for part in (key if key[1] >= 0 else key[:1]))
        group = NcclGroup(folder, name, position=position, size=size, stream=stream, patience_s=patience_s)
        made[key] = Communicator(key, _shape(ranks, sandbox), group, make_scratch())
        scratch.restart()
        for pending in first_calls(group, scratch, position=position, size=size, is_lane=key[1] >= 0,
                                   sender=0 if key[1] in sandbox else 1):  # fmt: skip
            pending.wait()
    return made


def first_calls(
    group: ReducedGroup, room: Room, *, position: int, size: int, is_lane: bool, sender: int
) -> Iterable[Pending]:
    """One small call of each kind; of a lane of messages one message."""

    def part(times: int = 1) -> torch.Tensor:
        return room(_WARM_UP_ELEMENTS * times, torch.float32).zero_()

    if is_lane:
        one = (1 - position, part())
        yield group.exchange([one] if position == sender else [], [] if position == sender else [one])
        return
    yield group.all_reduce(part(), ReduceOp.SUM)
    yield group.all_gather(part(size), part())
    yield group.reduce_scatter(part(), part(size), ReduceOp.SUM)
    yield group.broadcast(part(), size - 1)
    yield group.reduce(part(), 0, ReduceOp.SUM)
    others = [other for other in range(size) if other != position]
    yield group.exchange([(other, part()) for other in others], [(other, part()) for other in others])


def weight_bytes(one: Expected, sandbox: Sequence[int]) -> int:
    """The largest piece of memory that an operation's reduced call needs where it only weighs."""
    if one.stream is None:
        return 0
    item = max(one.dtype.itemsize_bytes, 1)
    shape = _shape(one.group_ranks, sandbox)
    if one.op is Op.ALL_REDUCE:
        return shape.scaled(one.op, one.num_elements_in) * item
    if one.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        total = one.num_elements_out if one.op is Op.ALL_GATHER else one.num_elements_in
        return shape.scaled(one.op, Fraction(total, shape.size)) * shape.num_ranks * item
    return max(one.num_elements_in, one.num_elements_out) * item


def _shape(ranks: Sequence[int], sandbox: Sequence[int]) -> Shape:
    return Shape(len(ranks), tuple(member for member, rank in enumerate(ranks) if rank in sandbox))


def dtype_of(one: Expected) -> torch.dtype | None:
    """The type of an operation's elements; absent where torch has none of that name."""
    found = getattr(torch, one.dtype.name.lower(), None)
    return found if isinstance(found, torch.dtype) else None


def carries_values(one: Expected, sandbox: Sequence[int]) -> bool:
    """Whether an operation's reduced call must carry values (`needs_values`), as far as the recording says."""
    if one.stream is None:
        return False
    return needs_values(one.op, one.reduce_op, dtype_of(one), _shape(one.group_ranks, sandbox))
