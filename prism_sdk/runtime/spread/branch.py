"""What runs on each machine of a spread recording: forks the ranks there and passes on what they say.

Responsible for this machine's processes, shared memory and CPUs; who runs and what operations mean is decided where the
coordinator is, at the other end of the link.  It ends with the link, and with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prism_sdk.errors import PrismError, UsageError
from prism_sdk.runtime.arena import Arena, create_arena
from prism_sdk.runtime.cpus import slot_cpus
from prism_sdk.runtime.host import Policy, RankHost, RankProcess
from prism_sdk.runtime.interrupts import Interrupted
from prism_sdk.runtime.parents import die_with_parent
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.spread import links
from prism_sdk.runtime.wire import Channel, ChannelClosed

PIECE_BYTES = 16 << 20  # of a region, in one message
_READ_BYTES = 1 << 16
_LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class Begin:
    """What a branch is told first."""

    environment: Mapping[str, str]  # of the ranks
    adapters: tuple[str, ...]  # to prepare
    world_size: int
    parts_dir: Path  # where ranks write, on a file system that all machines have
    mark: str  # name of a file in it, by which the machine sees that it is the same folder


class Relay(Policy):
    """Tells the launcher what ranks do."""

    host: BranchHost

    def start(self) -> None:
        self.host.tell(("ready",))

    def connected(self, rank: int) -> None:
        self.host.tell(("hello", rank, self.host.ranks[rank].pid))

    def ended(self, rank: int) -> None:
        self.host.tell(("ended", rank))


class BranchHost(RankHost):
    """Runs the ranks of this machine as the launcher at the other end of `link` says."""

    def __init__(self, begin: Begin, link: Channel) -> None:
        self._link, self._is_over, self._was_told = link, False, False
        self._token = secrets.token_hex(16)
        self._arena_fd = create_arena(begin.world_size)
        self._arena = Arena(self._arena_fd, 0, num_ranks=begin.world_size)
        environment = {**begin.environment, "CUDA_VISIBLE_DEVICES": ""}
        with _captured_output() as self._outputs:
            super().__init__(
                (), token=self._token, policy=Relay(), environment=environment, descriptors=[self._arena_fd],
                adapters=begin.adapters,
            )  # fmt: skip

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send to the launcher; without one there is nothing left to do here."""
        try:
            self._link.send(message)
        except ChannelClosed:
            self._is_over = True

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self._was_told:
                self._pass_on_last_words()
                self.tell(("over",))

    def fail(self, error: PrismError) -> None:
        if not self._is_over and self.interrupts.number is None:  # else it is our doing
            self.tell(("failed", error))

    def _all_ended(self) -> bool:
        return self._is_over

    def _open(self) -> None:
        super()._open()
        self._selector.register(self._link.sock, selectors.EVENT_READ, self._from_launcher)
        for shown, fd in self._outputs.items():
            self._selector.register(fd, selectors.EVENT_READ, lambda shown=shown, fd=fd: self._pass_on(shown, fd))

    def _heard(self, process: RankProcess, message: tuple[Any, ...]) -> None:
        if message[0] == "finished":
            process.finished = True
        self.tell(("said", process.rank, message))

    def _pass_on(self, shown: int, fd: int) -> bool:
        data = os.read(fd, _READ_BYTES)
        if data:
            self.tell(("output", shown, data))
        else:
            self._selector.unregister(fd)
        return bool(data)

    def _pass_on_last_words(self) -> None:
        until = time.monotonic() + _LAST_WORDS_S
        for shown, fd in self._outputs.items():
            os.set_blocking(fd, False)
            while time.monotonic() < until:
                try:
                    data = os.read(fd, _READ_BYTES)
                except BlockingIOError:  # a process that the program left behind has it open
                    break
                if not data:
                    break
                self.tell(("output", shown, data))

    # -- what the launcher says -------------------------------------------------------------------------------------

    def _from_launcher(self) -> None:
        try:
            messages = self._link.receive_ready()
        except ChannelClosed:
            self._is_over = True
            return
        for name, *details in messages:
            getattr(self, f"_on_{name}")(*details)

    def _on_fork(self, spec: RankSpec) -> None:
        self.add(replace(spec, token=self._token, arena_fd=self._arena_fd))
        self.spawn(spec.rank)

    def _on_to(self, rank: int, message: tuple[Any, ...]) -> None:
        self.send(rank, message)

    def _on_read(self, offset: int, num_bytes: int, machine: int) -> None:
        for position in range(0, num_bytes, PIECE_BYTES):
            piece = bytearray(min(PIECE_BYTES, num_bytes - position))
            self._arena.read_into(offset + position, memoryview(piece))
            self.tell(("bytes", offset, num_bytes, machine, position, bytes(piece)))

    def _on_put(self, offset: int, data: bytes) -> None:
        self._arena.write(offset, [memoryview(data)])

    def _on_drop(self, offset: int, num_bytes: int) -> None:
        self._arena.give_up(offset, num_bytes)

    def _on_pin(self, rank: int, slot: tuple[int, int] | None) -> None:
        self.set_affinity(rank, None if slot is None else slot_cpus(*slot))

    def _on_look(self, ranks: Sequence[int]) -> None:
        self.tell(("ticks", {rank: self.cpu_ticks(rank) for rank in ranks if rank in self.ranks}))

    def _on_end(self) -> None:
        self._is_over = self._was_told = True


@contextlib.contextmanager
def _captured_output() -> Any:
    """What the processes started inside write to stdout and stderr: 1 and 2 -> where it can be read."""
    readable: dict[int, int] = {}
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    try:
        for fd in saved:
            readable[fd], writable = os.pipe()
            os.dup2(writable, fd)
            os.close(writable)
        yield readable
    finally:
        for fd, old in saved.items():
            os.dup2(old, fd)
            os.close(old)


def serve(address: str, port: int, number: int, key: bytes) -> None:
    """Be machine `number` of the launcher at `address`. Raises PrismError where that cannot be."""
    link = links.connect(address, port, key)
    try:
        link.send(("here", number, socket.gethostname()))
        kind, begin = link.receive()
        assert kind == "begin" and isinstance(begin, Begin)
        if (begin.parts_dir / begin.mark).is_file():
            with contextlib.suppress(Interrupted):
                BranchHost(begin, link).run()
            return
        error = UsageError(
            f"machine {socket.gethostname()} does not see the folder of the output, {begin.parts_dir.parent}",
            hint="write to a file system that all machines of the cluster share",
        )  # fmt: skip
        link.send(("refused", error))
    finally:
        link.close()


def main(argv: Sequence[str]) -> int:
    die_with_parent(signal_number=signal.SIGTERM)
    address, port, number = argv
    try:
        serve(address, int(port), int(number), bytes.fromhex(sys.stdin.readline().strip()))
    except (PrismError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    from prism_sdk.runtime.spread import branch  # what is pickled has this name

    sys.exit(branch.main(sys.argv[1:]))
