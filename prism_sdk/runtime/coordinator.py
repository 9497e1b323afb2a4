"""Runs many ranks over few slots: the recording side of rank switching.

Responsible for slots, for who runs next, and for noticing that nobody can; matching.py knows the operations.

A rank holds a slot while it computes and gives it up when it must wait.  Results depend only on what the ranks
contribute, summed in rank order, so a recording is the same whatever the number of slots and the timing.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Any

from prism_sdk.errors import CollectiveMismatchError
from prism_sdk.runtime.host import Policy
from prism_sdk.runtime.keyvalue import KeyValues
from prism_sdk.runtime.matching import Key, Matcher, Post
from prism_sdk.runtime.oncuda.residence import Residence
from prism_sdk.runtime.progress import Snapshot
from prism_sdk.runtime.slots import Slots
from prism_sdk.runtime.standing import (
    DONE,
    LENT,
    MAX_PLACES,
    NEW,
    READY,
    RUNNING,
    WAITING,
    RankState,
    deadlock_error,
    snapshot_of,
)

_STALL_NS = 300_000_000  # a slot holder that used no CPU for this long lends its slot
_STACK_TIMEOUT_NS = 3_000_000_000
_LOOK_NS = 100_000_000  # how often slot holders are looked at
_STUCK_NS = 10_000_000_000  # a rank that blocks outside torch.distributed for so long is named
_THREADS_NS = 5_000_000_000  # how long threads that do not communicate now are given to do so
_MAX_YIELDS = 16  # in a row without progress, before a rank of several threads counts as one that waits
_STORE_LOOKS = frozenset({"check", "add", "num_keys", "compare_set", "list_keys"})  # programs poll with these
_STORE_WRITES = frozenset({"set", "add", "append", "compare_set", "multi_set"})  # may let a waiting rank go on


class Coordinator(Policy):
    """Policy that multiplexes the ranks over `num_slots` slots, each with its share of the CPUs."""

    def __init__(self, num_slots: int, *, pin: bool = True) -> None:
        self.slots = Slots(num_slots, pin=pin)
        self._holders: dict[int, RankState] = {}  # slot -> who has it
        self._lent: set[int] = set()  # ranks that run or are stuck without a slot
        self._in_store: dict[int, None] = {}  # ranks that wait for a key, in the order in which they came
        self._next_look_ns = 0
        self._warned: set[int] = set()
        self._matcher = Matcher()
        self._store = KeyValues()
        self._devices = Residence(lambda: self.moves, host=lambda: self.host, resumed=self._grant)
        self._ready: deque[int] = deque()
        self._states: dict[int, RankState] = {}
        self._waiters: dict[Key, list[int]] = {}
        self._deadlock_since = 0
        self.num_switches = 0

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
        self._lent.discard(rank)
        self._in_store.pop(rank, None)
        state.state = DONE
        self._devices.ended(rank)
        self._grant()

    def snapshot(self) -> Snapshot | None:
        states = list(self._states.values())  # at once: the progress display asks from another thread
        pager = self._devices.pager
        return snapshot_of(
            states, num_switches=self.num_switches, num_away=pager.num_away(), away_bytes=sum(pager.out_bytes.values())
        )

    # -- slots ------------------------------------------------------------------------------------------------------

    def _leave_slot(self, state: RankState) -> None:
        if state.slot is not None:
            self.slots.give_back(state.slot)
            del self._holders[state.slot]
            state.slot = None

    def _grant(self) -> None:
        """Give free slots to ranks that can run, first come first served among those whose memory is there."""
        while self._ready and (self.slots.are_free or self._devices.is_used):
            rank = self._devices.first_in(self.slots.fitting(self._ready))
            if rank is None or not self.slots.are_free:
                return
            state = self._states[rank]
            if state.state == NEW and not self._devices.may_start(rank):
                return
            self._ready.remove(rank)
            if state.state not in (NEW, READY):
                continue
            state.slot = self.slots.take(rank)
            self._holders[state.slot] = state
            if state.state == NEW:
                state.state = RUNNING
                self.host.spawn(state.rank)
            else:
                state.state = RUNNING
                self._devices.pager.runs(rank)
                self.num_switches += 1
                self._pin(state)
                self._answer(state)
            state.cpu_ticks, state.cpu_since_ns = -1, time.monotonic_ns()

    def _pin(self, state: RankState) -> None:
        """Move a rank to the CPUs of its slot, all of its threads; most of the time it is there already."""
        pid = self.host.ranks[state.rank].pid
        cpus = () if state.slot is None else self.slots.cpus(state.slot)
        if pid and cpus and state.pinned != cpus:
            state.pinned = cpus
            self.host.set_affinity(state.rank, cpus)

    def _answer(self, state: RankState) -> None:
        reply, state.reply, state.waits_for = state.reply, None, None
        assert reply is not None
        released, state.released = state.released, []
        self.host.send(state.rank, (*reply, released))

    def _fulfil(self, rank: int, reply: tuple[Any, ...]) -> None:
        """The rank's wait is over: it goes on at once if it still holds a slot, else when it gets one."""
        state = self._states[rank]
        state.reply = reply
        if reply[0] != "again":
            state.num_yields = 0
        if state.slot is not None or state.state == LENT:
            state.stuck_since_ns = time.monotonic_ns()
            self._answer(state)
        else:
            state.state = READY
            self._ready.append(rank)
            self._devices.pager.ready(rank)

    def _park(self, rank: int, message: tuple[Any, ...]) -> None:
        state = self._states[rank]
        state.state, state.waits_for = WAITING, message
        self._lent.discard(rank)
        self._leave_slot(state)
        self._devices.pager.parked(rank)

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

    def _on_device(self, rank: int, message: tuple[Any, ...]) -> None:
        self._devices.note(rank, message[1])

    def _on_pages(self, rank: int, message: tuple[Any, ...]) -> None:
        self._devices.pager.holds(rank, message[1], message[2], stays=message[3])

    def attach(self, rank: int, sock: socket.socket, begun: bytes) -> None:
        self._devices.attach(rank, sock, begun)

    def close(self) -> None:
        text = self._devices.report()
        if text is not None:
            self.host.report(text)
        self._devices.close()

    def _on_step(self, rank: int, message: tuple[Any, ...]) -> None:
        self._states[rank].step = message[1]

    def _on_post(self, rank: int, message: tuple[Any, ...]) -> None:
        _, key, size, group_rank, signature, contribution, send_bytes, where, clock = message
        post = Post(rank, contribution, send_bytes, where, clock)
        operation = self._matcher.post(key, size, group_rank, signature, post)
        # most posts complete nothing: asking every waiter each time would be quadratic in the size of the group
        if key[0] != "c" or operation.complete or operation.root == group_rank:
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
        _, key, needs, root, *before = message  # sent before a logical time only
        reply = None if key[0] == "a" else self._try(rank, ("wait", key, needs, root), claim=False)
        done = reply is not None and (not before or reply[3] < before[0])
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
            self._in_store[rank] = None
            return
        if message[1] in _STORE_LOOKS:  # a loop of these would starve the others, as one of polls
            self._park(rank, message)
        self._fulfil(rank, reply)
        if message[1] not in _STORE_WRITES:
            return
        for other in list(self._in_store):
            request = self._states[other].waits_for
            reply = None if request is None else self._store.run(request)
            if reply is not None:
                del self._in_store[other]
                self._fulfil(other, reply)

    def _on_yield(self, rank: int, message: tuple[Any, ...]) -> None:
        """The thread that waits keeps other threads of its rank from speaking: it is to ask again, after them."""
        state = self._states[rank]
        state.stack = tuple(message[1])
        waits_for = state.waits_for
        if state.state != WAITING or waits_for is None:
            return  # its answer is on the way already
        state.num_yields += 1
        if state.num_yields > _MAX_YIELDS:
            return  # all of its threads have asked, and again: none of them can go on
        self._in_store.pop(rank, None)
        if waits_for[0] == "wait" and rank in self._waiters.get(waits_for[1], ()):
            self._waiters[waits_for[1]].remove(rank)
        self._deadlock_since = 0
        self._fulfil(rank, ("again",))

    def _on_stack(self, rank: int, message: tuple[Any, ...]) -> None:
        state = self._states[rank]
        state.stack, state.has_threads = tuple(message[1]), message[2]

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
            return ("ready", {}, None, 0) if needs == "none" else None
        if needs == "root":
            post = operation.posts.get(root)
            return None if post is None else ("ready", {root: (post.contribution, None)}, None, post.clock)
        if key[0] == "p":
            return ("ready", {0: (operation.posts[0].contribution, None)}, None, operation.clock)
        if not operation.complete:
            return None
        if operation.is_reduction:
            return operation.reduced(rank, claim=claim)
        return ("ready", operation.packed(), None, operation.clock)

    # -- when nobody can run ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        if not self._states:
            return
        now = time.monotonic_ns()
        if now >= self._next_look_ns:
            self._next_look_ns = now + _LOOK_NS
            self._devices.pager.tick()
            if self._ready and self.slots.are_short_for(self._ready):
                self._lend_stalled_slots(now)
            if self._lent and not self._holders and not self._ready:
                self._name_stuck(now)
        if self._holders or self._ready or self._lent:
            self._deadlock_since = 0
            return
        waiting = [state for state in self._states.values() if state.state == WAITING]
        if waiting and not self._match_any_source(waiting) and not self._expire_store(waiting):
            self._report_deadlock(waiting)

    def _lend_stalled_slots(self, now: int) -> None:
        """A rank can block where we do not see it (its own TCPStore, a lock, a pipe): let another one run meanwhile."""
        for state in list(self._holders.values()):
            pid = self.host.ranks[state.rank].pid
            ticks = self.host.cpu_ticks(state.rank)
            if not pid or ticks != state.cpu_ticks:  # not forked yet, or at work
                state.cpu_ticks, state.cpu_since_ns = ticks, now
            elif now - state.cpu_since_ns > _STALL_NS:
                self._leave_slot(state)
                state.state = LENT
                self._lent.add(state.rank)
                state.stuck_since_ns = now
                state.pinned = ()
                self.host.set_affinity(state.rank, None)
        self._grant()

    def _name_stuck(self, now: int) -> None:
        """Nothing moves and some ranks block on something of their own: no proof of a deadlock, but worth a line."""
        for rank in self._lent - self._warned:
            state = self._states[rank]
            ticks = self.host.cpu_ticks(rank)
            if ticks != state.cpu_ticks:
                state.cpu_ticks, state.stuck_since_ns = ticks, now
            elif now - state.stuck_since_ns > _STUCK_NS:
                self._warned.add(rank)
                self.host.report(
                    f"rank {rank} has been waiting outside torch.distributed for {_STUCK_NS // 10**9} s, and no other "
                    f"rank can run (py-spy dump --pid {self.host.ranks[rank].pid} shows where)"
                )

    def _match_any_source(self, waiting: list[RankState]) -> bool:
        """Receives from any source are matched when all else stands still: the source is the same each time."""
        for state in sorted(waiting, key=lambda s: s.rank):
            message = state.waits_for
            if message is None or message[0] != "wait" or message[1][0] != "a":
                continue
            key = self._matcher.match_any(message[1])
            if key is not None:
                self._waiters.pop(message[1], None)
                post = self._matcher.operations[key].posts[0]
                self._fulfil(state.rank, ("ready", {0: (post.contribution, None)}, key, post.clock))
                self._grant()
                return True
        return False

    def _expire_store(self, waiting: list[RankState]) -> bool:
        """A store wait with a short timeout of the program's own runs into it, as it would for real."""
        for state in waiting:
            if state.waits_for is not None and state.waits_for[0] == "store":
                reply = self._store.expire(state.waits_for)
                if reply is not None:
                    self._in_store.pop(state.rank, None)
                    self._fulfil(state.rank, reply)
                    self._grant()
                    return True
        return False

    def _report_deadlock(self, waiting: list[RankState]) -> None:
        now = time.monotonic_ns()
        if not self._deadlock_since:
            self._deadlock_since = now
            for state in waiting[:MAX_PLACES]:
                state.stack = None
                self.host.send(state.rank, ("stack", []))
            return
        unheard = any(state.stack is None for state in waiting[:MAX_PLACES])
        if unheard and now - self._deadlock_since < _STACK_TIMEOUT_NS:
            return
        threaded = [state for state in waiting if state.has_threads]
        if threaded and now - self._deadlock_since < _THREADS_NS:
            for state in threaded:  # one of its threads may want to speak by now
                self.host.send(state.rank, ("stack", []))
            return
        self.host.fail(deadlock_error(waiting, list(self._states.values()), self._matcher))
