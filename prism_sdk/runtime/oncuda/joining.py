"""The sandbox rank's end of backend `nccl`: makes reduced calls of NCCL on the streams of the program.

Responsible for what is told to the assistant and for the values that a call brings; when a call ends is the business of
the assistant, whose end the releaser lets begin (neighbours.py), and the order on streams holding.py's.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.announce import REDUCTIONS, Announcement, announcement, by_shards
from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.manifest import Expected, Script
from prism_sdk.runtime.oncuda.communicators import Communicator, Key, Scratch, connect, key_of, keys_of, weight_bytes
from prism_sdk.runtime.oncuda.driver import Driver
from prism_sdk.runtime.oncuda.filling import copy_pieces
from prism_sdk.runtime.oncuda.holdtable import MOST_ALIKE
from prism_sdk.runtime.oncuda.nccl import share_device
from prism_sdk.runtime.oncuda.staging import flat_bytes
from prism_sdk.runtime.reduced import WHOLE, join_as_member, message, needs_values, sent_bytes, weighed
from prism_sdk.runtime.wire import Channel
from prismtrace import Op, ReduceOp

HINT = "`--backend local` needs no second GPU"
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class JoiningFacts:
    """What a sandbox rank is told of the assistant."""

    folder: Path
    sandbox: tuple[int, ...]
    control_fd: int
    has_values: bool
    """Whether calls may carry what virtual members contributed: all of it was recorded."""


class Joint:
    """A reduced call of this rank under way."""

    def __init__(self, communicator: Communicator, told: Announcement, *, like: int, is_live: bool) -> None:
        self.communicator, self.told, self.like, self.is_live = communicator, told, like, is_live
        self.own: torch.Tensor | None = None
        """What this rank contributes, where the call carries values."""


class Joining:
    """All reduced calls of one sandbox rank."""

    def __init__(self, rank: int, script: Script, facts: JoiningFacts, device: torch.device) -> None:
        """Connect with the assistant, over the device that is current.

        Raises:
            UnsupportedError: there is no device for the assistant.
            RunError: NCCL refuses something.
        """
        self._rank, self._facts = rank, facts
        self._control = Channel(socket.socket(fileno=facts.control_fd))
        self._driver = driver = Driver()
        torch.cuda.current_stream(device).query()  # the context is there and current
        self._control.send(("here", rank, device.index or 0))
        answer = self._control.receive()
        if answer[0] == "no":
            raise UnsupportedError(f"backend nccl: {answer[1]}", rank=rank, hint=HINT)
        _, self._sharing, is_second = answer
        if self._sharing:
            share_device(as_other_host=is_second)
        before = driver.free_bytes()
        stream = torch.cuda.ExternalStream(driver.create_stream(is_urgent=True), device=device)

        def make_scratch() -> Scratch:
            return Scratch(driver, device)

        with torch.cuda.stream(stream):
            self._communicators = connect(
                keys_of(script.expected), facts.sandbox, facts.folder, rank=rank, stream=stream,
                make_scratch=make_scratch, patience_s=_PATIENCE_S,
            )  # fmt: skip
        self.communicator_bytes = max(before - driver.free_bytes(), 0)
        self._weight = Scratch(driver, device, is_weight=True)
        self._weight.grow(max((weight_bytes(one, facts.sandbox) for one in script.expected), default=0))
        self._likes: dict[tuple[Key, Op, int], int] = {}
        self.num_carried = self.num_not_carried = self.num_live = 0
        self._sent: dict[str, Fraction] = {"scheduled": Fraction(0), "reduced": Fraction(0)}

    # -- one operation ----------------------------------------------------------------------------------------------

    def begin(self, call: Call, one: Expected, handle: tuple[int, int]) -> Joint | None:
        """What stands for an operation; None where it has no reduced call, and is held alone."""
        communicator = self._communicators.get(key_of(one))
        told = announcement(call, one, rank=self._rank, handle=handle)
        if communicator is None or told is None or (call.is_p2p and not told.count):
            self.num_not_carried += 1
            return None
        shape = communicator.shape
        is_live = self._facts.has_values and needs_values(told.op, told.reduce_op, told.dtype, shape)
        if not is_live:
            told = weighed(told)
        full, reduced = sent_bytes(told, shape)
        self._sent["scheduled"] += full
        self._sent["reduced"] += reduced
        self.num_carried += 1
        self.num_live += is_live
        size = max(told.count, sum(told.sizes), sum(told.received)) * told.dtype.itemsize
        like = self._likes.setdefault((communicator.key, told.op, size), len(self._likes) + 1)
        return Joint(communicator, told, like=min(like, MOST_ALIKE - 1), is_live=is_live)

    def announce(self, joint: Joint, number: int) -> None:
        """Tell the assistant, which joins when entry `number` of the rank's table is released."""
        self._control.send(("issue", joint.communicator.key, joint.told, number, joint.is_live))

    def take_in(self, joint: Joint, call: Call, stream: Any) -> None:
        """Take what the program contributes, on `stream`, which is current, before its outputs are filled."""
        communicator, told = joint.communicator, joint.told
        if communicator.last is not None:
            stream.wait_event(communicator.last)
        communicator.values.restart()
        if told.op in REDUCTIONS:
            flat = [tensor.detach().reshape(-1) for tensor in call.contribution]
        else:
            flat = [flat_bytes(tensor) for tensor in call.contribution]
        own = communicator.values(sum(part.numel() for part in flat), told.dtype)
        if flat:
            torch.cat(flat, out=own)
        joint.own = by_shards(own, told.tensor_counts, communicator.shape.size)

    def join(self, joint: Joint, call: Call, stream: Any) -> None:
        """Make the call on `stream`, which is current; what it brings is put into the program's tensors behind it."""
        communicator, told = joint.communicator, joint.told
        communicator.begin(stream)
        if joint.own is None:
            if call.is_p2p:
                message(told, communicator.group, self._weight, is_virtual=False)
            else:
                nothing = self._weight(0, told.dtype)
                join_as_member(told, communicator.group, communicator.shape, nothing, self._weight)
        else:
            running = join_as_member(told, communicator.group, communicator.shape, joint.own, communicator.values)
            put_results(call, told, running.parts)
        communicator.end(stream)

    def summary(self) -> dict[str, object]:
        """Facts for the trace's metadata."""
        return {
            "ranks_share_gpus": int(self._sharing), "carried_operations": self.num_carried,
            "operations_not_carried": self.num_not_carried, "operations_live": self.num_live,
            "communicators": len(self._communicators), "communicator_bytes": self.communicator_bytes,
            "call_bytes": self._weight.num_bytes + sum(c.values.num_bytes for c in self._communicators.values()),
            "sent_bytes": round(self._sent["reduced"]), "scheduled_sent_bytes": round(self._sent["scheduled"]),
        }  # fmt: skip


@torch.inference_mode()
def put_results(call: Call, told: Announcement, parts: Mapping[int, torch.Tensor]) -> None:
    """Put what a call brought over what was recorded, on the current stream; of a gather, what sandbox ranks gave."""
    if told.op in REDUCTIONS:
        if WHOLE in parts:
            _put_reduction(call, told, parts[WHOLE])
        return
    for member, tensor in enumerate(call.receive_tensors or ()):
        if member in parts:
            copy_pieces(tensor, [parts[member]], 0)
    for delivery in call.deliveries:
        if told.op is not Op.ALL_TO_ALL and delivery.source in parts:
            offset = delivery.offset_bytes - (told.count * told.member if told.op is Op.SCATTER else 0)
            copy_pieces(delivery.tensor, [parts[delivery.source]], offset)


def _put_reduction(call: Call, told: Announcement, result: torch.Tensor) -> None:
    if call.reduce_op is ReduceOp.AVG:
        is_exact = result.is_floating_point() or result.is_complex()
        result.div_(len(call.group.ranks), rounding_mode=None if is_exact else "trunc")
    pieces: Sequence[torch.Tensor] = [flat_bytes(result)]
    position = 0
    for delivery in call.deliveries:
        copy_pieces(delivery.tensor, pieces, position)
        position += delivery.tensor.nbytes
