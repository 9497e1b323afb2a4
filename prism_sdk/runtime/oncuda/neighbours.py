"""The assistant process of backend `nccl`: the end of all virtual neighbours, on a GPU of its own or a sandbox rank's.

Responsible for making the assistant's part of every reduced call; when it begins is the releaser's, which lets the
stream go on by a word in memory that both share, and what a sandbox rank does joining.py's.

    python -m prism_sdk.runtime.oncuda.neighbours FACTS

A call is put on its stream as soon as the sandbox members have announced it, behind waits for the releases of all of
them. So a collective of the library ends when the graph says: a kernel of NCCL ends when the last rank has come and the
bytes have moved, and the last to come is the assistant. What virtual members send needs no room of its own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import prismtrace
from prism_sdk.errors import PrismError
from prism_sdk.pruning import COMBINED
from prism_sdk.runtime.announce import REDUCTIONS, Announcement, by_shards
from prism_sdk.runtime.assisting import listen, run
from prism_sdk.runtime.manifest import Script
from prism_sdk.runtime.oncuda import holdtable as fields
from prism_sdk.runtime.oncuda.communicators import (
    Communicator,
    Key,
    Scratch,
    carries_values,
    connect,
    keys_of,
    weight_bytes,
)
from prism_sdk.runtime.oncuda.driver import Driver
from prism_sdk.runtime.oncuda.holdtable import HoldTable
from prism_sdk.runtime.oncuda.lines import MOST_STREAMS, Lines
from prism_sdk.runtime.oncuda.nccl import share_device
from prism_sdk.runtime.reduced import WHOLE, join_as_virtual, message
from prism_sdk.runtime.supply import Supplies, Supply
from prism_sdk.runtime.virtual import fit, neutral
from prism_sdk.runtime.wire import Channel
from prismtrace import Op

_PATIENCE_S = 3600.0  # until the last sandbox rank has come to its first operation on a GPU


@dataclass(frozen=True)
class NeighbourFacts:
    """What the assistant is told when it starts."""

    graph: Path
    folder: Path
    """The launch's own: scripts, and where communicators meet."""
    sandbox: tuple[int, ...]
    hold_fds: tuple[int, ...]
    control_fds: tuple[int, ...]
    cpus: tuple[int, ...]
    limit_bytes: int
    device: int | None = None
    """The GPU to use, which may be a sandbox rank's; absent: the first that no sandbox rank uses."""
    has_values: bool = False


Told = dict[int, tuple[Announcement, int, bool]]
"""What members have told of one call: what it is, its entry in the rank's table, whether it carries values."""


class Neighbours:
    """All virtual neighbours, on one device."""

    def __init__(self, facts: NeighbourFacts, *, num_devices: Callable[[], int] = torch.cuda.device_count) -> None:
        self._facts, self._num_devices = facts, num_devices
        self._scripts = [Script.load(facts.folder / f"script-{rank}") for rank in facts.sandbox]
        self._tables = [HoldTable(fd) for fd in facts.hold_fds]
        self._here: dict[int, int] = {}  # sandbox ranks that have come -> their device
        self._open: dict[tuple[Key, tuple[int, int]], Told] = {}  # calls of which some members have told
        self._communicators: dict[Key, Communicator] = {}
        self._lines: Lines[Key, Told] = Lines((), self._issue)  # without a stream nothing is made
        self.supplies = self._make_supplies() if facts.has_values else None
        self.num_calls = self.num_live = 0
        self.device_index = -1
        self.communicator_bytes = 0

    def _make_supplies(self) -> Supplies | None:
        """What virtual members contribute to the calls that carry values; None where there are none."""
        sandbox = self._facts.sandbox
        wanted = [
            replace(script, expected=tuple(one for one in script.expected if carries_values(one, sandbox)))
            for script in self._scripts
        ]
        if not any(script.expected for script in wanted):
            return None
        return Supplies(prismtrace.TraceReader(self._facts.graph), wanted, sandbox, limit_bytes=self._facts.limit_bytes)

    # -- the beginning ----------------------------------------------------------------------------------------------

    def come(self, rank: int, device: int) -> str | None:
        """A sandbox rank is there, on a device; with the last one ours is chosen. Returns why there is none.

        None is also the answer while ranks are missing: `is_complete` tells.
        """
        self._here[rank] = device
        if not self.is_complete:
            return None
        num, taken = self._num_devices(), set(self._here.values())
        if self._facts.device is not None:
            self.device_index = self._facts.device
            return None if self.device_index < num else f"there is no GPU {self.device_index} for the assistant"
        free = [index for index in range(num) if index not in taken]
        if not free:
            used = ", ".join(map(str, sorted(taken)))
            return f"this machine has {num} GPUs and its sandbox ranks use {used}: none is left for the assistant"
        self.device_index = free[0]
        return None

    @property
    def sharing(self) -> bool:
        """Whether some of the sandbox ranks and the assistant are on the same GPU."""
        return len({self.device_index, *self._here.values()}) <= len(self._here)

    def _is_second(self, rank: int) -> bool:
        """Whether a sandbox rank is on the GPU of one before it."""
        sandbox = self._facts.sandbox
        return self._here[rank] in [self._here[other] for other in sandbox[: sandbox.index(rank)]]

    @property
    def is_complete(self) -> bool:
        """Whether all sandbox ranks have come."""
        return len(self._here) == len(self._facts.sandbox)

    def open(self) -> None:
        """Open the device, share the tables with it and connect with all sandbox ranks."""
        torch.cuda.set_device(self.device_index)
        self._device = device = device_at(self.device_index)
        torch.cuda.current_stream(device).query()
        # the context is made, and what fills is loaded: later that would wait for streams that wait for another rank
        torch.zeros(16, dtype=torch.uint8, device=device)[1:] = 0
        self._driver = driver = Driver()
        self._flags = [
            driver.register(ctypes.addressof(ctypes.c_char.from_buffer(table.map)), fields.TABLE_BYTES)
            for table in self._tables
        ]
        before = driver.free_bytes()
        stream = torch.cuda.ExternalStream(driver.create_stream(is_urgent=True), device=device)
        expected = [one for script in self._scripts for one in script.expected]
        with torch.cuda.stream(stream):
            self._communicators = connect(
                keys_of(expected), self._facts.sandbox, self._facts.folder, rank=None, stream=stream,
                make_scratch=lambda: Scratch(driver, device), patience_s=_PATIENCE_S,
            )  # fmt: skip
        self.communicator_bytes = max(before - driver.free_bytes(), 0)
        streams = [
            torch.cuda.ExternalStream(driver.create_stream(is_urgent=True), device=device)
            for _ in range(min(len(self._communicators), MOST_STREAMS))
        ]
        self._lines = Lines(streams, self._issue)
        self._weight = Scratch(driver, device, is_weight=True)
        self._weight.grow(max((weight_bytes(one, self._facts.sandbox) for one in expected), default=0))

    # -- one call ---------------------------------------------------------------------------------------------------

    def told(self, key: Key, one: Announcement, number: int, is_live: bool) -> None:
        """A sandbox rank has issued an operation, entry `number` of its table."""
        place = key, one.handle
        known = self._open.setdefault(place, {})
        known[one.member] = (one, number, is_live)
        num_members = 1 if one.op in (Op.SEND, Op.RECV) else len(self._communicators[key].shape.members)
        if len(known) == num_members:
            self._lines.add(key, self._open.pop(place))

    def _issue(self, key: Key, stream: Any, known: Told) -> tuple[Any, object]:
        """Make a call; returns the event behind it, and what it reads."""
        communicator, driver = self._communicators[key], self._driver
        announced = {member: told for member, (told, _, _) in known.items()}
        one, _, is_live = next(iter(known.values()))
        parts, splits = self._parts(one, communicator) if is_live else ({}, {})
        self.num_calls += 1
        self.num_live += is_live
        with torch.no_grad(), torch.cuda.stream(stream):
            communicator.begin(stream)
            room = self._weight
            if is_live:
                room = communicator.values
                room.restart()
            for told, number, _ in known.values():
                column = self._facts.sandbox.index(told.rank)
                address = self._flags[column] + 4 * HoldTable.word(number, fields.RELEASE)
                driver.stream_wait(stream.cuda_stream, address, HoldTable.ticket(number))
            if one.op in (Op.SEND, Op.RECV):
                message(one, communicator.group, room, is_virtual=True)
            else:
                join_as_virtual(announced, communicator.group, communicator.shape, parts, room, splits=splits)
            communicator.end(stream)
        return communicator.last, parts

    def _parts(
        self, one: Announcement, communicator: Communicator
    ) -> tuple[dict[int, torch.Tensor], Mapping[int, Sequence[int]]]:
        """What virtual members contribute, on the device."""
        supply = Supply() if self.supplies is None else self.supplies.take((one.group_id, one.seq))
        if one.op not in REDUCTIONS:
            # without any part a call would only weigh
            parts = {m: part.to(self._device) for m, part in supply.by_member.items()}
            return parts or {-2: torch.empty(0, dtype=torch.uint8, device=self._device)}, supply.splits
        combined = supply.by_member.get(COMBINED)
        if combined is None:
            combined = neutral(one.reduce_op, one.count, one.dtype)
        combined = fit(by_shards(combined, one.tensor_counts, communicator.shape.size), one.count)
        return {WHOLE: combined.to(self._device)}, {}

    # -- the process ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until all sandbox ranks are gone."""
        channels = [Channel(socket.socket(fileno=fd)) for fd in self._facts.control_fds]

        def heard(message: tuple[Any, ...]) -> None:
            what, *values = message
            if what == "here":
                self._welcome(values[0], values[1], channels)
            else:
                self.told(*values)

        try:
            listen(channels, heard, look=lambda: self._lines.look())  # they are made on the way
        except PrismError as error:
            sys.stderr.write(f"prism: the assistant with the virtual neighbours: {error}\n")
            sys.stderr.flush()
            os._exit(1)

    def _welcome(self, rank: int, device: int, channels: Sequence[Channel]) -> None:
        refusal = self.come(rank, device)
        if not self.is_complete:
            return
        for rank, channel in zip(self._facts.sandbox, channels, strict=True):
            answer = ("there", self.sharing, self._is_second(rank)) if refusal is None else ("no", refusal)
            channel.send(answer)
        if refusal is None:
            if self.sharing:
                share_device(as_other_host=self.device_index in self._here.values())
            self.open()

    def summary(self) -> dict[str, int]:
        """Facts for the launcher's report."""
        return {
            "num_calls": self.num_calls, "num_live": self.num_live, "num_communicators": len(self._communicators),
            "device": self.device_index, "communicator_bytes": self.communicator_bytes,
            "sharing": self.sharing,
        }  # fmt: skip


def device_at(index: int) -> torch.device:
    """The device of a number."""
    return torch.device("cuda", index)


def main(argv: Sequence[str]) -> int:
    """The assistant process: a file with its facts."""
    return run(argv, Neighbours)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
