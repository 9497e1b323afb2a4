"""Runs many ranks over few slots: the recording side of rank switching.

Responsible for slots, for who runs next, and for noticing that nobody can; matching.py knows the operations.

A rank holds a slot while it computes and gives it up when it must wait.  Results depend only on what the ranks
contribute, summed in rank order, so a recording is the same whatever the number of slots and the timing.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prism_sdk.errors import CollectiveMismatchError, DeadlockError, RankPlace
from prism_sdk.runtime.host import Policy
from prism_sdk.runtime.keyvalue import KeyValues
from prism_sdk.runtime.matching import Key, Matcher, Operation, Post, describe

_STALL_NS = 300_000_000  # a slot holder that used no CPU for this long lends its slot
_STACK_TIMEOUT_NS = 3_000_000_000
_MAX_PLACES = 32

NEW, RUNNING, WAITING, READY, LENT, DONE = "new", "running", "waiting", "ready", "lent", "done"


@dataclass(slots=True)
class RankState:
    """Where a rank stands in the schedule."""

    rank: int
    state: str = NEW
    slot: int | None = None
    waits_for: tuple[Any, ...] | None = None  # the message it is parked with
    reply: tuple[Any, ...] | None = None  # what it gets when it has a slot again
    released: list[tuple[int, int]] = field(default_factory=list)  # its arena regions that nobody needs any more
    cpu_ticks: int = -1
    cpu_since_ns: int = 0
    stack: tuple[str, ...] | None = None
    step: int = 0


class Coordinator(Policy):
    """Policy that multiplexes the ranks over `num_slots` slots; slot i is CPU i of those this process may use."""

    def __init__(self, num_slots: int, *, pin: bool = True) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        self.num_slots = num_slots
        self._cpus = [cpus[i % len(cpus)] for i in range(num_slots)] if pin else []
        self._free = list(range(num_slots - 1, -1, -1))
        self._matcher = Matcher()
        self._store = KeyValues()
        self._ready: deque[int] = deque()
        self._states: dict[int, RankState] = {}
        self._waiters: dict[Key, list[int]] = {}
        self._num_running = 0
        self._deadlock_since = 0
        self.num_switches = 0
        self._last_switches = (0, time.monotonic_ns())

    # -- life of ranks ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._states = {rank: RankState(rank) for rank in self.host.specs}
        self._ready.extend(self.host.specs)
        self._grant()

    def connected(self, rank: int) -> None:
        self._pin(self._states[rank])

    def ended(self, rank: int) -> None:
        state = self._states[rank]
        self._leave_slot(state)
        state.state = DONE
        self._grant()

    def status(self) -> str:
        if not self._states:
            return "torch is being loaded"
        counts = {name: 0 for name in (NEW, RUNNING, WAITING, READY, LENT, DONE)}
        for state in self._states.values():
            counts[state.state] += 1
        now = time.monotonic_ns()
        rate = (self.num_switches - self._last_switches[0]) / max((now - self._last_switches[1]) / 1e9, 1e-9)
        self._last_switches = (self.num_switches, now)
        steps = [state.step for state in self._states.values()]
        return (
            f"running {counts[RUNNING] + counts[LENT]}, parked {counts[WAITING] + counts[READY]}, "
            f"not started {counts[NEW]}, done {counts[DONE]}; step {min(steps)}..{max(steps)}; {rate:.0f} switches/s"
        )

    # -- slots ------------------------------------------------------------------------------------------------------

    def _leave_slot(self, state: RankState) -> None:
        if state.slot is not None:
            self._free.append(state.slot)
            state.slot = None
            self._num_running -= 1

    def _grant(self) -> None:
        """Give free slots to ranks that can run, first come first served."""
        while self._free and self._ready:
            state = self._states[self._ready.popleft()]
            if state.state not in (NEW, READY):
                continue
            state.slot = self._free.pop()
            self._num_running += 1
            if state.state == NEW:
                state.state = RUNNING
                self.host.spawn(state.rank)
            else:
                state.state = RUNNING
                self.num_switches += 1
                self._pin(state)
                self._answer(state)
            state.cpu_ticks, state.cpu_since_ns = -1, time.monotonic_ns()

    def _pin(self, state: RankState) -> None:
        pid = self.host.ranks[state.rank].pid
        if self._cpus and pid and state.slot is not None:
            with suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(task), {self._cpus[state.slot]})

    def _answer(self, state: RankState) -> None:
        reply, state.reply, state.waits_for = state.reply, None, None
        assert reply is not None
        released, state.released = state.released, []
        self.host.send(state.rank, (*reply, released))

    def _fulfil(self, rank: int, reply: tuple[Any, ...]) -> None:
        """The rank's wait is over: it goes on at once if it still holds a slot, else when it gets one."""
        state = self._states[rank]
        state.reply = reply
        if state.slot is not None or state.state == LENT:
            self._answer(state)
        else:
            state.state = READY
            self._ready.append(rank)

    def _park(self, rank: int, message: tuple[Any, ...]) -> None:
        state = self._states[rank]
        state.state, state.waits_for = WAITING, message
        self._leave_slot(state)

    # -- messages ---------------------------------------------------------------------------------------------------

    def message(self, rank: int, message: tuple[Any, ...]) -> None:
        handler = getattr(self, f"_on_{message[0]}", None)
        if handler is None:
            super().message(rank, message)
            return
        try:
            handler(rank, message)
        except CollectiveMismatchError as error:
            self.host.fail(error)
        self._grant()

    def _on_group(self, rank: int, message: tuple[Any, ...]) -> None:
        self._matcher.add_group(*message[1:])

    def _on_step(self, rank: int, message: tuple[Any, ...]) -> None:
        self._states[rank].step = message[1]

    def _on_post(self, rank: int, message: tuple[Any, ...]) -> None:
        _, key, size, group_rank, signature, contribution, send_bytes, where = message
        self._matcher.post(key, size, group_rank, signature, Post(rank, contribution, send_bytes, where))
        self._serve_waiters(key)

    def _on_wait(self, rank: int, message: tuple[Any, ...]) -> None:
        _, key, _needs, _root = message
        reply = None if key[0] == "a" else self._try(rank, message)
        if reply is not None:
            self._fulfil(rank, reply)
            return
        self._waiters.setdefault(key, []).append(rank)
        self._park(rank, message)

    def _on_poll(self, rank: int, message: tuple[Any, ...]) -> None:
        """A look without waiting. The slot is given up in between, or a polling loop would starve the others."""
        _, key, needs, root = message
        done = key[0] != "a" and self._try(rank, ("wait", key, needs, root), claim=False) is not None
        self._park(rank, message)
        self._fulfil(rank, ("poll", done))

    def _on_combined(self, rank: int, message: tuple[Any, ...]) -> None:
        _, key, contribution, digest = message
        self._matcher.operations[key].result = (rank, contribution, digest)
        self._serve_waiters(key)

    def _on_taken(self, rank: int, message: tuple[Any, ...]) -> None:
        for owner, region in self._matcher.take(message[1]):
            self._states[owner].released.append(region)

    def _on_store(self, rank: int, message: tuple[Any, ...]) -> None:
        reply = self._store.run(message)
        if reply is None:
            self._park(rank, message)
            return
        self._fulfil(rank, reply)
        for other, state in self._states.items():
            if state.state == WAITING and state.waits_for is not None and state.waits_for[0] == "store":
                reply = self._store.run(state.waits_for)
                if reply is not None:
                    self._fulfil(other, reply)

    def _on_stack(self, rank: int, message: tuple[Any, ...]) -> None:
        self._states[rank].stack = tuple(message[1])

    # -- completion -------------------------------------------------------------------------------------------------

    def _serve_waiters(self, key: Key) -> None:
        waiters = self._waiters.pop(key, None)
        if waiters is None:
            return
        left = []
        for rank in waiters:
            message = self._states[rank].waits_for
            assert message is not None
            reply = self._try(rank, message)
            if reply is None:
                left.append(rank)
            else:
                self._fulfil(rank, reply)
        if left:
            self._waiters.setdefault(key, []).extend(left)

    def _try(self, rank: int, message: tuple[Any, ...], *, claim: bool = True) -> tuple[Any, ...] | None:
        """The reply to a wait, or None while something is missing."""
        _, key, needs, root = message
        operation = self._matcher.operations.get(key)
        if operation is None or needs == "none":
            return ("ready", {}, None) if needs == "none" else None
        if needs == "root":
            post = operation.posts.get(root)
            return None if post is None else ("ready", {root: (post.contribution, None)}, None)
        if key[0] == "p":
            return ("ready", {0: (operation.posts[0].contribution, None)}, None)
        if not operation.complete:
            return None
        if operation.is_reduction:
            return self._try_reduction(rank, operation, claim)
        return ("ready", {g: (p.contribution, p.send_bytes) for g, p in operation.posts.items()}, None)

    def _try_reduction(self, rank: int, operation: Operation, claim: bool) -> tuple[Any, ...] | None:
        if operation.result is not None:
            return ("ready", {-1: (operation.result[1], None)}, operation.result[2])
        if operation.combiner is None:
            if claim:
                operation.combiner = rank
            return ("combine", {g: (p.contribution, None) for g, p in operation.posts.items()}, None)
        return None

    # -- when nobody can run ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        if not self._states:
            return
        if self._ready and not self._free:
            self._lend_stalled_slots()
        if self._num_running or self._ready or any(s.state == LENT for s in self._states.values()):
            self._deadlock_since = 0
            return
        waiting = [state for state in self._states.values() if state.state == WAITING]
        if waiting and not self._match_any_source(waiting) and not self._expire_store(waiting):
            self._report_deadlock(waiting)

    def _lend_stalled_slots(self) -> None:
        """A rank can block where we do not see it (a TCPStore of its own, a lock, a pipe): let another one run meanwhile."""
        now = time.monotonic_ns()
        for state in self._states.values():
            if state.slot is None:
                continue
            ticks = _cpu_ticks(self.host.ranks[state.rank].pid)
            if ticks != state.cpu_ticks:
                state.cpu_ticks, state.cpu_since_ns = ticks, now
            elif now - state.cpu_since_ns > _STALL_NS:
                self._leave_slot(state)
                state.state = LENT
                with suppress(OSError):
                    os.sched_setaffinity(self.host.ranks[state.rank].pid, os.sched_getaffinity(0))
        self._grant()

    def _match_any_source(self, waiting: list[RankState]) -> bool:
        """Receives from any source are matched when all else stands still: then the lowest source is the same each time."""
        for state in sorted(waiting, key=lambda s: s.rank):
            message = state.waits_for
            if message is None or message[0] != "wait" or message[1][0] != "a":
                continue
            key = self._matcher.match_any(message[1])
            if key is not None:
                self._waiters.pop(message[1], None)
                contribution = self._matcher.operations[key].posts[0].contribution
                self._fulfil(state.rank, ("ready", {0: (contribution, None)}, key))
                self._grant()
                return True
        return False

    def _expire_store(self, waiting: list[RankState]) -> bool:
        """A store wait with a short timeout of the program's own runs into it, as it would for real."""
        for state in waiting:
            if state.waits_for is not None and state.waits_for[0] == "store":
                reply = self._store.expire(state.waits_for)
                if reply is not None:
                    self._fulfil(state.rank, reply)
                    self._grant()
                    return True
        return False

    def _report_deadlock(self, waiting: list[RankState]) -> None:
        now = time.monotonic_ns()
        if not self._deadlock_since:
            self._deadlock_since = now
            for state in waiting:
                state.stack = None
                self.host.send(state.rank, ("stack", []))
            return
        if any(state.stack is None for state in waiting) and now - self._deadlock_since < _STACK_TIMEOUT_NS:
            return
        places = [self._place(state) for state in waiting]
        self.host.fail(DeadlockError(places[:_MAX_PLACES]))

    def _place(self, state: RankState) -> RankPlace:
        message = state.waits_for or ("",)
        stack = state.stack or ()
        if message[0] == "store":
            return RankPlace(state.rank, f"store {message[1]} {message[2]!r}", "store", stack=stack)
        key = message[1]
        group = self._matcher.group_name(key[1])
        ranks = self._matcher.group_ranks(key[1])
        if key[0] == "p":
            return RankPlace(state.rank, f"recv tag {key[4]}", group, key[5], (key[2],), stack)
        if key[0] == "a":
            return RankPlace(state.rank, f"recv from any source, tag {key[3]}", group, stack=stack)
        operation = self._matcher.operations.get(key)
        name = "collective" if operation is None else describe(operation.signature, 0)
        missing = ranks if operation is None else operation.missing(ranks)
        return RankPlace(state.rank, name, group, key[2], missing, stack)


def _cpu_ticks(pid: int) -> int:
    """User and system time of a process in clock ticks; -1 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return -1
