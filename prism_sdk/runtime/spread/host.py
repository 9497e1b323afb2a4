"""Runs the rank processes of one launch on several machines, as host.py does on one.

Responsible for the links to the machines, for which message goes where, and for bytes that have to be on a machine
before a message about them; how a machine is started is a `Starter`'s.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism_sdk.errors import PrismError, RankKilledError, RunError
from prism_sdk.runtime.host import Policy, RankHost, RankProcess, adapters_of
from prism_sdk.runtime.interrupts import Interrupts
from prism_sdk.runtime.peers import Peer
from prism_sdk.runtime.processes import GRACE_S, allow_descriptors
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.spread import links
from prism_sdk.runtime.spread.branch import Begin
from prism_sdk.runtime.spread.mirrors import Mirrors
from prism_sdk.runtime.spread.places import Places
from prism_sdk.runtime.wire import ChannelClosed, wait_readable

_GREETING_S = 30.0
_START_S = 300.0  # until every machine has to be there, with torch loaded
_SAY_S = 15.0
_LOOK_S = 0.5
_STALE_NS = 250_000_000


class MachineLostError(RunError):
    """A machine of a spread recording went away, or never came; the recording can begin again without it."""

    def __init__(self, message: str, *, number: int) -> None:
        super().__init__(message)
        self.number = number


class Starter(ABC):
    """Starts the process of a machine; one for each recording, over all of its attempts."""

    address: str
    """Where this process can be reached from all machines."""

    @abstractmethod
    def start(self, name: str, arguments: Sequence[str], key: bytes) -> None:
        """Run the module ``prism_sdk.runtime.spread.branch`` with `arguments` on the machine `name`, `key` on stdin."""

    @abstractmethod
    def why_ended(self, name: str) -> str | None:
        """What the process on a machine said when it ended; None while it runs or waits for room."""

    @abstractmethod
    def stop(self, name: str) -> None:
        """End the process if it is still there."""


@dataclass
class Machine(Peer):
    """One machine as the launcher sees it."""

    number: int
    name: str
    num_slots: int
    is_ready: bool = False
    is_over: bool = False  # has ended its processes, as it was told


@dataclass
class _Held:
    """A message that waits for bytes to be on the machine of its rank."""

    message: tuple[Any, ...]
    offsets: set[int] = field(default_factory=set)


class SpreadHost(RankHost):
    """Event loop over the machines of one launch."""

    def __init__(
        self, specs: Sequence[RankSpec], *, token: str, policy: Policy, environment: Mapping[str, str],
        starter: Starter, machines: Sequence[tuple[str, int]], places: Places,
        descriptors: Sequence[int] = (), report: Callable[[str], None] = lambda text: None,
        interrupts: Interrupts | None = None, library: Path | None = None,
    ) -> None:  # fmt: skip
        self.interrupts = interrupts or Interrupts()
        self.specs = {spec.rank: spec for spec in specs}
        self.ranks = {spec.rank: RankProcess(spec.rank) for spec in specs}
        self.policy = policy
        policy.host = self
        self.report = report
        self._selector = selectors.DefaultSelector()
        self._failure: PrismError | None = None
        self._num_exited = 0
        self._places, self._starter = places, starter
        self._mirrors = Mirrors(places.machine_of)
        self._machines = [Machine(number, name, slots) for number, (name, slots) in enumerate(machines) if slots]
        self._by_number = {machine.number: machine for machine in self._machines}
        self._held: dict[int, deque[_Held]] = {}
        self._ticks: dict[int, tuple[int, int]] = {}  # rank -> (CPU time, when that was said)
        self._wanted: set[int] = set()
        self._key = secrets.token_bytes(links.KEY_BYTES)  # the token names a socket, which others can see
        self._listener = links.listen(starter.address)
        parts_dir = specs[0].parts_dir
        mark = f"spread-{token[:8]}"
        (parts_dir / mark).touch()
        self._begin = Begin(dict(environment), tuple(adapters_of(specs)), specs[0].world_size, parts_dir, mark)
        self._began = self._said = time.monotonic()
        self._next_look = 0.0
        allow_descriptors(len(machines))

    # -- for policies -----------------------------------------------------------------------------------------------

    def spawn(self, rank: int) -> None:
        self._tell(self._machine(rank), ("fork", self.specs[rank]))

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        machine, queue = self._machine(rank), self._held.get(rank)
        if isinstance(message[-1], list) and message[0] != "stack":
            self._release(message[-1])
        needed = self._mirrors.needed(message, machine.number)
        for offset, num_bytes in needed.items():
            if self._mirrors.order(offset, machine.number):
                self._tell(self._by_number[self._mirrors.home(offset)], ("read", offset, num_bytes, machine.number))
        if not needed and not queue:
            self._tell(machine, ("to", rank, message))
        else:
            self._held.setdefault(rank, deque()).append(_Held(message, set(needed)))

    def cpu_ticks(self, rank: int) -> int:
        """As its machine said last; always another number where that is long ago, as of a rank at work."""
        self._wanted.add(rank)
        ticks, said_ns = self._ticks.get(rank, (0, 0))
        now = time.monotonic_ns()
        return ticks if now - said_ns < _STALE_NS else -now

    def set_affinity(self, rank: int, cpus: tuple[int, ...] | None) -> None:
        self._tell(self._machine(rank), ("pin", rank, cpus))

    # -- regions ----------------------------------------------------------------------------------------------------

    def _release(self, regions: Sequence[tuple[int, int]]) -> None:
        for offset, num_bytes in regions:
            for number in self._mirrors.drop(offset):
                self._tell(self._by_number[number], ("drop", offset, num_bytes))

    def _on_bytes(self, machine: Machine, offset: int, size: int, number: int, position: int, data: bytes) -> None:
        there = self._by_number[number]
        self._tell(there, ("put", offset + position, data))
        if position + len(data) < size:
            return
        self._mirrors.arrived(offset, number)
        for rank, queue in list(self._held.items()):
            if self._places.machine_of(rank) != number:
                continue
            for held in queue:
                held.offsets.discard(offset)
            while queue and not queue[0].offsets:
                self._tell(there, ("to", rank, queue.popleft().message))
            if not queue:
                del self._held[rank]

    # -- machines ---------------------------------------------------------------------------------------------------

    def _machine(self, rank: int) -> Machine:
        return self._by_number[self._places.machine_of(rank)]

    def _tell(self, machine: Machine, message: tuple[Any, ...]) -> None:
        machine.tell(self._selector, message)

    def _open(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        port = self._listener.getsockname()[1]
        for machine in self._machines:
            self._starter.start(machine.name, [self._starter.address, str(port), str(machine.number)], self._key)

    def _accept(self) -> None:
        channel = links.accept(self._listener, self._key)
        if channel is None:
            return
        machine = None
        try:
            if wait_readable(channel.sock, _GREETING_S):
                _, number, _where = channel.receive()
                machine = self._by_number.get(number)
        except (ChannelClosed, ValueError):
            pass
        if machine is None or machine.channel is not None:
            channel.close()
            return
        machine.meet(self._selector, channel)
        self._tell(machine, ("begin", self._begin))

    def _turn(self, timeout_s: float) -> None:
        self._select(timeout_s)
        self.policy.tick()
        if self._wanted:
            for machine in self._machines:
                mine = [rank for rank in self._wanted if self._places.machine_of(rank) == machine.number]
                if mine:
                    self._tell(machine, ("look", mine))
            self._wanted.clear()
        now = time.monotonic()
        if now >= self._next_look and not all(machine.is_ready for machine in self._machines):
            self._next_look = now + _LOOK_S
            self._look_for_missing(now)

    def _select(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.data, Machine):
                self._from_machine(key.data, events)
            else:
                key.data()

    def _look_for_missing(self, now: float) -> None:
        missing = [machine for machine in self._machines if machine.channel is None]
        for machine in missing:
            why = self._starter.why_ended(machine.name)
            if why is not None:
                self.fail(MachineLostError(f"no ranks can be started on machine {machine.name}: {why}",
                                           number=machine.number))  # fmt: skip
        if missing and now - self._began > _START_S:
            self.fail(MachineLostError(f"machine {missing[0].name} did not answer within {_START_S:.0f} s",
                                       number=missing[0].number))  # fmt: skip
        if missing and now - self._said > _SAY_S:
            self._said = now
            names = ", ".join(machine.name for machine in missing)
            self.report(f"waiting for {names}: `ray status` says what is there")

    def _from_machine(self, machine: Machine, events: int) -> None:
        messages = machine.hear(self._selector, events)
        if messages is None and not machine.is_over:
            self.fail(MachineLostError(f"machine {machine.name} went away", number=machine.number))
        for name, *details in messages or ():
            getattr(self, f"_on_{name}")(machine, *details)

    # -- what machines say ------------------------------------------------------------------------------------------

    def _on_ready(self, machine: Machine) -> None:
        machine.is_ready = True
        if all(one.is_ready for one in self._machines):
            self.policy.start()

    def _on_hello(self, machine: Machine, rank: int, pid: int) -> None:
        process = self.ranks[rank]
        process.channel, process.pid = machine.channel, pid
        self.policy.connected(rank)

    def _on_said(self, machine: Machine, rank: int, message: tuple[Any, ...]) -> None:
        self._heard(self.ranks[rank], message)

    def _on_ended(self, machine: Machine, rank: int) -> None:
        self.ranks[rank].exited = True
        self._num_exited += 1
        self.policy.ended(rank)

    def _on_failed(self, machine: Machine, error: PrismError) -> None:
        self.fail(error)

    def _on_refused(self, machine: Machine, error: PrismError) -> None:
        machine.is_over = True
        self.fail(error)

    def _on_ticks(self, machine: Machine, ticks: Mapping[int, int]) -> None:
        now = time.monotonic_ns()
        self._ticks.update({rank: (value, now) for rank, value in ticks.items()})

    def _on_output(self, machine: Machine, shown: int, data: bytes) -> None:
        stream = sys.stdout if shown == 1 else sys.stderr
        stream.buffer.write(data)
        stream.flush()

    def _on_over(self, machine: Machine) -> None:
        machine.is_over = True

    # -- the end ----------------------------------------------------------------------------------------------------

    def _was_killed(self) -> bool:
        return isinstance(self._failure, MachineLostError | RankKilledError)

    def _end_processes(self) -> None:
        """Let each machine end its ranks; a machine that does not say so in time is given up."""
        self.policy.close()
        for machine in self._machines:
            self._tell(machine, ("end",))
        failure, presses, until = self._failure, self.interrupts.count, time.monotonic() + 3 * GRACE_S
        while time.monotonic() < until and self.interrupts.count == presses and self._num_left():
            self._only_listen()
        self._failure = failure  # what ends now does so because of us
        for machine in self._machines:
            if machine.channel is not None:
                machine.channel.close()
            self._starter.stop(machine.name)
        self._selector.close()
        self._listener.close()

    def _num_left(self) -> int:
        return sum(machine.channel is not None and not machine.is_over for machine in self._machines)

    def _only_listen(self) -> None:
        """Pass on what is printed, and wait for the machines; ranks are no longer answered."""
        for key, events in self._selector.select(0.05):
            machine = key.data
            if not isinstance(machine, Machine):
                continue
            for name, *details in machine.hear(self._selector, events) or ():
                if name in ("output", "over"):
                    getattr(self, f"_on_{name}")(machine, *details)


def address_towards(host: str) -> str:
    """The address of this machine as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # of a datagram socket: sends nothing
        return str(sock.getsockname()[0])
