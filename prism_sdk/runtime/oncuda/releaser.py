"""Releases the held streams of a sandbox rank when the boundary engine says so: a process beside the rank.

Responsible for seeing the GPU arrive, for the time of the release and for how exact it was.  It opens no GPU: what it
shares with one is memory (holdtable.py).  `python -m prism_sdk.runtime.oncuda.releaser` is that process.

It polls, on a CPU of its own where there is one: nothing of the rank's interpreter lock, and no system call, stands
between an arrival and its release.  A release takes some microseconds to reach the stream, and where it lets a
collective of a library begin, as long as that takes; it is written that much ahead of time, as measured on the releases
of its like before.

A call that takes all the time that the operation takes in the job begins as it does there: who stands for the others
joins when they arrive, whether the sandbox rank is there or not.  Else it would join late by what a release takes.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from prism_sdk.graph.plan import BoundaryPlan
from prism_sdk.runtime.engine import BoundaryEngine, PostBoard
from prism_sdk.runtime.oncuda import holdtable as fields
from prism_sdk.runtime.oncuda.holdtable import HoldTable
from prism_sdk.runtime.parents import die_with_parent

_FIRST_LEAD_NS = 6_000
MAX_LEAD_NS = 60_000  # of what the device does by itself
_MAX_CALL_NS = 1_000_000_000  # of a collective that a release lets begin
_WINDOW = 63  # releases that the lead is learnt from
_IDLE_S = 0.0002  # between looks while nothing is under way
_IDLE_AFTER_NS = 2_000_000_000


class Held:
    """An operation that was issued and is not done."""

    __slots__ = (
        "arrived", "done", "due_ns", "handle", "like", "number", "others_ns", "posted_ns", "release", "released_ns",
        "ticket",
    )  # fmt: skip

    def __init__(self, number: int, handle: tuple[int, int], like: int = 0) -> None:
        self.number, self.handle, self.ticket, self.like = number, handle, HoldTable.ticket(number), like
        self.arrived = HoldTable.word(number, fields.ARRIVED)
        self.release = HoldTable.word(number, fields.RELEASE)
        self.done = HoldTable.word(number, fields.DONE)
        self.posted_ns = self.due_ns = self.released_ns = 0
        self.others_ns: int | None = None


class _Lead:
    """By how much operations that are alike are released ahead of time: the median of what they took before."""

    def __init__(self, first_ns: int, most_ns: int) -> None:
        self.ns, self._most_ns = first_ns, most_ns
        self._delays: deque[int] = deque(maxlen=_WINDOW)

    def learn(self, delay_ns: int) -> None:
        if delay_ns < 2 * self._most_ns:  # else something else held the stream up
            self._delays.append(delay_ns)
            ordered = sorted(self._delays)
            self.ns = min(ordered[len(ordered) // 2], self._most_ns)


class Releaser:
    """What the process does, one look after the other."""

    def __init__(
        self, table: HoldTable, engine: BoundaryEngine, *,
        publish: Callable[[tuple[int, int], int], None] | None = None, clock: Callable[[], int] = time.monotonic_ns,
        lead_ns: int | None = None,
    ) -> None:  # fmt: skip
        """`publish` tells other sandbox ranks of an arrival; `lead_ns`: by how much to be early, absent: as learnt."""
        self.table, self.engine = table, engine
        engine.is_told_all = True
        self._publish, self._clock = publish, clock
        self._taken = 0
        self._lanes: dict[int, deque[Held]] = {}  # streams that arrive: operations to come, in order
        self._arrived: list[Held] = []  # whose due time is not known yet
        self._due: list[tuple[int, int, Held]] = []  # heap, by the time of release
        self._released: list[Held] = []
        self._learns = lead_ns is None
        self._first_lead_ns = _FIRST_LEAD_NS if lead_ns is None else lead_ns
        self._leads: dict[int, _Lead] = {0: _Lead(self._first_lead_ns, MAX_LEAD_NS)}

    def lead_ns(self, like: int = 0) -> int:
        """By how much operations of that number are released ahead of time."""
        return self._lead(like).ns

    def _lead(self, like: int) -> _Lead:
        lead = self._leads.get(like)
        if lead is None:
            lead = self._leads[like] = _Lead(self._first_lead_ns, _MAX_CALL_NS)
        return lead

    @property
    def num_open(self) -> int:
        """Operations that were issued and are not done."""
        waiting = sum(map(len, self._lanes.values()))
        return waiting + len(self._arrived) + len(self._due) + len(self._released)

    def look(self) -> None:
        """Take what was issued, note arrivals, release what is due, note what is done."""
        if self.table.issued != self._taken:
            self._take()
        words, clock = self.table.words, self._clock
        for lane in self._lanes.values():
            while lane and words[lane[0].arrived] == lane[0].ticket:
                self._arrive(lane.popleft(), clock())
            if lane and lane[0].like and not lane[0].released_ns and self._learns:
                self._let_join(lane[0], clock())
        if self._arrived:
            self._settle()
        due = self._due
        while due and due[0][0] <= clock():
            self._release(heapq.heappop(due)[2])
        for held in self._released:
            if words[held.done] == held.ticket:
                self._finish(held, clock())
                break  # the list has changed

    def _take(self) -> None:
        table = self.table
        while self._taken < table.issued:
            number = self._taken
            word = table.word(number, 0)
            kind = table.kind(number)
            handle = table.words[word + fields.INDEX], table.words[word + fields.SHIFT]
            posted_ns = table.longs[table.long(number, fields.POSTED)]
            if kind == fields.HELD:
                held = Held(number, handle, table.like(number))
                self.engine.post_later(handle, lambda held=held: held.posted_ns)  # type: ignore[misc]
                self.engine.prepare(handle)
                self._lanes.setdefault(table.lane(number), deque()).append(held)
            elif kind == fields.HOST_POST:
                self.engine.post_at(handle, posted_ns)
            else:
                self.engine.stand_in(self.engine.handle_of(posted_ns), handle)
            self._taken = table.taken = number + 1
        self.engine.start_at(table.origin_ns)

    def _let_join(self, held: Held, now: int) -> None:
        """Release a call for which the rank has not arrived yet, where that is what the others would do."""
        if self._lead(held.like).ns + MAX_LEAD_NS < self.engine.transfer(held.handle):
            return
        if held.others_ns is None:
            held.others_ns = self.engine.arrival_of_others(held.handle)
        if held.others_ns is not None and held.others_ns <= now:
            self._write(held)

    def _write(self, held: Held) -> None:
        self.table.words[held.release] = held.ticket
        held.released_ns = self._clock()

    def _arrive(self, held: Held, now: int) -> None:
        held.posted_ns = now
        self.table.longs[self.table.long(held.number, fields.POSTED)] = now
        if self._publish is not None:
            self._publish(held.handle, now)
        self._arrived.append(held)

    def _settle(self) -> None:
        still = []
        for held in self._arrived:
            arrival = self.engine.arrival(held.handle)
            if arrival is None:
                still.append(held)
                continue
            held.due_ns = arrival + self.engine.transfer(held.handle)
            if held.released_ns:
                self._release(held)
            else:
                heapq.heappush(self._due, (held.due_ns - self._lead(held.like).ns, held.number, held))
        self._arrived = still

    def _release(self, held: Held) -> None:
        if not held.released_ns:
            self._write(held)
        longs, at = self.table.longs, self.table.long(held.number, 0)
        longs[at + fields.DUE], longs[at + fields.RELEASED] = held.due_ns, held.released_ns
        self._released.append(held)

    def _finish(self, held: Held, now: int) -> None:
        self.table.longs[self.table.long(held.number, fields.DONE_AT)] = now
        self._released.remove(held)
        if self._learns:
            self._lead(held.like).learn(now - max(held.released_ns, held.posted_ns))

    def run(self, *, is_over: Callable[[], bool]) -> None:
        """Look again and again until the rank has ended and nothing is open, or `is_over`."""
        last = self._clock()
        looks = 0
        while True:
            self.look()
            looks += 1
            if self.num_open:
                last = self._clock()
            elif self.table.is_closed or is_over():
                return
            elif self._clock() - last > _IDLE_AFTER_NS:
                time.sleep(_IDLE_S)
            if not looks & 0xFFFF and is_over():
                return


def main(argv: Sequence[str]) -> int:
    """Arguments: parent's id, table's descriptor, plan, rank, board's descriptor or -1, CPUs (with commas)."""
    parent_id, table_fd, plan_path, rank, board_fd, cpus = argv
    parent = int(parent_id)
    die_with_parent(parent)
    if cpus:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    with contextlib.suppress(OSError):  # needs a privilege
        os.nice(-10)
    plan = BoundaryPlan.load(Path(plan_path))
    board = PostBoard(int(board_fd), len(plan.sandbox_ranks)) if int(board_fd) >= 0 else None
    engine = BoundaryEngine(plan, int(rank), board)
    table = HoldTable(int(table_fd))
    me = plan.sandbox_ranks.index(int(rank))

    def publish(handle: tuple[int, int], posted_ns: int) -> None:
        assert board is not None
        board.publish(engine.row(*handle), me, posted_ns)

    gc.disable()
    gc.freeze()
    table.set_ready()
    while not table.issued and not table.is_closed and os.getppid() == parent:
        time.sleep(10 * _IDLE_S)
    Releaser(table, engine, publish=publish if board is not None else None).run(is_over=lambda: os.getppid() != parent)
    while os.getppid() == parent:  # who ends before the rank does is missed
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
