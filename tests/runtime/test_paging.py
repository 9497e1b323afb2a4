"""Who leaves the device and who comes back: the pager over ranks that are played (test_pages_library.py: real ones)."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.errors import PrismError, RunError
from prism_sdk.runtime.oncuda.paging.hostpool import HostPool
from prism_sdk.runtime.oncuda.paging.links import MOVED, NEED, OUT, PREPARE, ROOM, Link, Message
from prism_sdk.runtime.oncuda.paging.pager import Pager
from prism_sdk.runtime.oncuda.paging.tenants import IN_HOST_MEMORY, Request, Suspension


class FakeLink(Link):
    """Answers as a rank's thread does, when the test lets it."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank = machine, rank

    def send(self, kind: int, argument: int = 0) -> None:
        if kind != PREPARE:
            self.machine.orders.append((self.rank, kind, argument))
        else:
            self.machine.prepared.append((self.rank, self.machine.pool.bytes_of(self.rank)))

    def whole(self) -> list[Message]:
        return []


class Machine:
    """One device of so many units, and ranks that hold some of them; one rank runs at a time."""

    def __init__(
        self, capacity: int, *, host: int = 2000, disk: bool = False, ahead: int = 0, unit_bytes: int = 1
    ) -> None:
        self.capacity, self.host = capacity, host
        self.pool = HostPool(2000 * unit_bytes, block_bytes=unit_bytes)
        self.held: dict[int, int] = {}  # on the device
        self.away: dict[int, int] = {}
        self.orders: deque[tuple[int, int, int]] = deque()
        self.moves: list[tuple[str, int]] = []
        self.rooms: list[tuple[int, int]] = []
        self.prepared: list[tuple[int, int]] = []
        self.failure: PrismError | None = None
        self.num_resumed = 0
        self.pager = Pager(
            fail=self.fail, resumed=self.resumed, refused=self.refused, has_disk=lambda: disk,
            room_in_host=lambda: self.host - self.pager.host_bytes, ahead_bytes=lambda: ahead, pool=lambda: self.pool,
        )  # fmt: skip

    def __del__(self) -> None:
        self.pool.close()

    def touch(self, rank: int) -> int:
        """As a rank does it with the blocks that it has; how much of them is fresh."""
        before = self.pool.promised_bytes
        self.pool._is_there[self.pool._owners == rank + 1] = True
        return before - self.pool.promised_bytes

    def fail(self, error: PrismError) -> None:
        self.failure = self.failure or error

    def resumed(self) -> None:
        self.num_resumed += 1

    def refused(self, request: Request, why: str) -> PrismError:
        return RunError(f"no room for rank {request.rank}: {why}", rank=request.rank)

    @property
    def free(self) -> int:
        return self.capacity - sum(self.held.values())

    def start(self, rank: int) -> None:
        self.held[rank] = 0
        self.pager.attach(rank, FakeLink(self, rank))

    def allocate(self, rank: int, size: int) -> bool:
        """As cudaMalloc does it: ask for room until there is, or the answer is no."""
        while self.free < size:
            self.pager.heard(rank, Message(NEED, num_bytes=size - self.free, copy_ns=self.held[rank]))
            self.obey()
            if not self.rooms or self.rooms.pop() != (rank, 1):
                return False
        self.held[rank] += size
        return True

    def park(self, rank: int) -> None:
        self.pager.holds(rank, 0, self.held.get(rank, 0))
        self.pager.parked(rank)
        self.obey()

    def bring(self, rank: int) -> bool:
        self.pager.bring([rank])
        self.obey()
        return self.pager.is_in(rank)

    def obey(self) -> None:
        """Carry out all that was asked of ranks."""
        while self.orders:
            rank, kind, argument = self.orders.popleft()
            if kind == ROOM:
                self.rooms.append((rank, argument))
                continue
            status, size, fresh = 0, 0, 0
            if kind == OUT:
                size = self.held[rank]
                is_to_host = self.pager._tenants[rank].goes_to == IN_HOST_MEMORY
                if is_to_host and self.pool.bytes_of(rank) < size:
                    status = 2
                elif size:
                    fresh = self.touch(rank) if is_to_host else 0
                    self.held[rank], self.away[rank] = 0, size
                    self.moves.append(("out", rank))
            elif self.away[rank] > self.free:
                status, size = 1, self.away[rank] - self.free
            else:
                size = self.held[rank] = self.away.pop(rank)
                self.moves.append(("in", rank))
            self.pager.heard(rank, Message(MOVED, kind, status, 0, size, 1, 1, fresh))


def test_nothing_moves_while_there_is_room() -> None:
    machine = Machine(100)
    for rank in range(4):
        machine.start(rank)
        assert machine.allocate(rank, 25)
        machine.park(rank)
    assert machine.moves == [] and all(map(machine.pager.is_in, range(4)))


def test_the_rank_that_parked_first_makes_room_and_comes_back() -> None:
    machine = Machine(100)
    for rank in range(4):
        machine.start(rank)
        assert machine.allocate(rank, 40)
        machine.park(rank)
    assert machine.moves == [("out", 0), ("out", 1)]
    assert not machine.pager.is_in(0) and machine.pager.out_bytes[1] == 80
    machine.pager.ready(0)
    assert machine.bring(0)
    assert machine.moves[2:] == [("out", 2), ("in", 0)]
    assert machine.pager.away_bytes(0) == 80 and machine.pager.num_away() == 2


def test_a_rank_that_is_to_return_waits_for_one_that_runs() -> None:
    machine = Machine(100)
    for rank in (0, 1):
        machine.start(rank)
        assert machine.allocate(rank, 60)
        if rank == 0:
            machine.park(0)
    machine.pager.ready(0)
    assert not machine.bring(0) and machine.failure is None
    machine.park(1)
    assert machine.pager.is_in(0) and machine.num_resumed == 1


def test_a_running_rank_comes_before_one_that_is_to_return() -> None:
    machine = Machine(100)
    machine.start(0)
    assert machine.allocate(0, 60)
    machine.park(0)
    for rank, size in ((1, 50), (2, 40)):
        machine.start(rank)
        assert machine.allocate(rank, size)
    machine.pager.ready(0)
    assert not machine.bring(0) and machine.moves == [("out", 0)]
    machine.pager.heard(1, Message(NEED, num_bytes=20, copy_ns=50))
    machine.park(2)
    assert machine.rooms == [(1, 1)] and machine.moves == [("out", 0), ("out", 2)]


def test_what_fits_nowhere_is_refused_where_it_is_asked_for() -> None:
    machine = Machine(100)
    machine.start(0)
    assert not machine.allocate(0, 101) and machine.failure is None  # the program gets its own error


def test_without_room_in_the_host_the_reason_is_said() -> None:
    machine = Machine(100, host=0)
    for rank in (0, 1):
        machine.start(rank)
        if rank == 0:
            assert machine.allocate(0, 60)
            machine.park(0)
    assert not machine.allocate(1, 60)
    assert machine.pager.why_not == "the host has no memory for it"
    machine = Machine(100, host=0, disk=True)
    machine.start(0)
    assert machine.allocate(0, 60)
    machine.park(0)
    machine.start(1)
    assert machine.allocate(1, 60)
    assert machine.pager.out_bytes == {1: 0, 2: 60}


def test_what_the_pool_has_is_used_also_where_the_host_is_fuller_than_it_should_be() -> None:
    machine = Machine(100)
    for rank in range(3):
        machine.start(rank)
        assert machine.allocate(rank, 60)
        machine.park(rank)
    machine.pager.ready(0)
    assert machine.bring(0) and machine.pool.held_bytes == 180
    machine.host = 100  # others have taken memory since
    machine.park(0)
    machine.pager.ready(1)
    assert machine.bring(1) and machine.moves[-2:] == [("out", 0), ("in", 1)]
    assert machine.pager.tally.fresh_bytes == 180 and machine.failure is None


def test_ranks_that_all_run_and_all_want_more_do_not_block_each_other() -> None:
    machine = Machine(100)
    for rank in (0, 1):
        machine.start(rank)
        assert machine.allocate(rank, 40)
    machine.pager.heard(0, Message(NEED, num_bytes=20, copy_ns=40))
    machine.obey()
    assert machine.rooms == []  # rank 1 runs, and will park
    machine.pager.heard(1, Message(NEED, num_bytes=20, copy_ns=40))
    machine.obey()
    assert machine.rooms == [(0, 1)] and machine.moves == [("out", 1)]
    machine.held[0] += 40
    machine.park(0)
    assert machine.moves[1:] == [("out", 0), ("in", 1)] and machine.rooms[1:] == [(1, 1)]


def test_a_rank_that_ends_leaves_no_account_and_no_request() -> None:
    machine = Machine(100)
    for rank in (0, 1):
        machine.start(rank)
        assert machine.allocate(rank, 60)
        machine.park(rank)
    machine.pager.ended(0)
    del machine.away[0]
    assert machine.pager.out_bytes[1] == 0
    machine.start(2)
    machine.pager.heard(2, Message(NEED, num_bytes=60))  # rank 1 is asked to leave, and dies
    assert machine.orders.pop()[:2] == (1, OUT)
    machine.held[1] = 0
    machine.pager.ended(1)
    machine.obey()
    assert machine.failure is None


def test_a_rank_whose_threads_may_compute_is_left_alone() -> None:
    machine = Machine(100)
    machine.start(0)
    assert machine.allocate(0, 60)
    machine.pager.holds(0, 0, 60, stays=True)
    machine.pager.parked(0)
    machine.start(1)
    assert not machine.allocate(1, 60) and machine.moves == []


def test_a_rank_that_has_more_than_it_said_leaves_with_all_of_it() -> None:
    machine = Machine(100)
    for rank in (0, 1):
        machine.start(rank)
    assert machine.allocate(0, 60)
    machine.park(0)
    machine.pager.holds(0, 0, 20)
    assert machine.allocate(1, 60) and machine.moves == [("out", 0)] and machine.pager.out_bytes[1] == 60


def test_a_move_that_breaks_ends_the_launch_and_names_the_rank() -> None:
    machine = Machine(100)
    for rank in (0, 1):
        machine.start(rank)
    assert machine.allocate(0, 60)
    machine.park(0)
    machine.pager.heard(1, Message(NEED, num_bytes=20))
    machine.orders.clear()
    machine.pager.heard(0, Message(MOVED, OUT, 4, 700))
    assert machine.failure is not None and "rank 0" in str(machine.failure) and "700" in str(machine.failure)


def test_a_context_gets_room_before_a_rank_starts() -> None:
    machine = Machine(100)
    machine.start(0)
    assert machine.allocate(0, 95)
    machine.park(0)
    assert not machine.pager.may_start(1, 0, 5)
    machine.obey()
    assert machine.pager.may_start(1, 0, 5) and machine.moves == [("out", 0)] and machine.num_resumed == 1
    assert machine.pager.may_start(2, 0, 0)


class Processes:
    """Whole processes that leave: each has so much beside its pages."""

    def __init__(self, machine: Machine, kept: int, *, error: int = 0) -> None:
        self.machine, self.kept, self.error, self.orders = machine, kept, error, deque[tuple[str, int]]()
        self.on_device: set[int] = set()
        machine.pager._suspension = Suspension(self.order, self.kept_bytes, self.free)

    def kept_bytes(self, rank: int) -> int:
        return self.kept if rank in self.on_device else 0

    def free(self, device: int) -> int:
        return self.machine.free

    def start(self, rank: int) -> None:
        self.machine.capacity -= self.kept
        self.on_device.add(rank)
        self.machine.start(rank)

    def order(self, what: str, rank: int, done: Callable[[int], None]) -> None:
        self.orders.append((what, rank))
        if not self.error:
            self.machine.capacity += self.kept if what == "out" else -self.kept
            assert self.machine.free >= 0, "a restoration without room never ends"
            (self.on_device.discard if what == "out" else self.on_device.add)(rank)
        done(self.error)


def test_a_whole_process_leaves_where_no_pages_are_left() -> None:
    machine = Machine(100)
    processes = Processes(machine, 10)
    for rank in range(3):
        processes.start(rank)
        assert machine.allocate(rank, 50)
        machine.park(rank)
    assert not processes.orders and machine.pager.tally.num_suspended == 0
    processes.start(3)
    assert machine.allocate(3, 70)  # 60 beside four contexts
    assert processes.orders == deque([("out", 0)]) and not machine.pager.is_in(0)
    assert machine.pager.out_bytes[1] == 150 + 10
    machine.park(3)
    machine.pager.ready(0)
    assert machine.bring(0)
    assert machine.pager.tally.num_suspended == 1 and machine.pager.out_bytes[1] == 50 + 50 + 70
    assert machine.pager.host_bytes == machine.pool.held_bytes == 150 + 70  # rank 0's blocks are kept for the next one


def test_a_driver_that_cannot_is_asked_once() -> None:
    machine = Machine(100)
    processes = Processes(machine, 10, error=801)
    for rank in range(3):
        processes.start(rank)
        machine.park(rank)
    processes.start(3)
    assert not machine.allocate(3, 70)
    assert len(processes.orders) == 1 and "801" in machine.pager.why_not


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=9), rounds=st.integers(1, 4),
    order=st.randoms(use_true_random=False), extra=st.integers(0, 40), ahead=st.integers(0, 90),
    spare=st.integers(0, 60), disk=st.booleans(),
)  # fmt: skip
def test_all_ranks_of_any_job_get_their_turns(
    sizes: list[int], rounds: int, order: object, extra: int, ahead: int, spare: int, disk: bool
) -> None:
    # without a disk the host has room for all but the one that runs
    host = spare + (0 if disk else sum(sizes))
    machine = Machine(60 + extra, host=host, disk=disk, ahead=ahead)
    for rank, size in enumerate(sizes):
        machine.start(rank)
        assert machine.allocate(rank, size)
        machine.park(rank)
    for _ in range(rounds):
        turns = list(range(len(sizes)))
        order.shuffle(turns)  # type: ignore[attr-defined]
        for rank in turns:
            machine.pager.ready(rank)
        while turns:
            rank = next((rank for rank in turns if machine.pager.is_in(rank)), turns[0])
            assert machine.pager.is_in(rank) or machine.bring(rank)
            machine.pager.runs(rank)
            assert machine.held[rank] == sizes[rank]
            turns.remove(rank)
            machine.park(rank)
            assert sum(machine.held.values()) <= machine.capacity and machine.pager.host_bytes <= host
            assert all(machine.pool.bytes_of(rank) in (0, sizes[rank]) for rank in machine.away)
        assert machine.pager.away_bytes(0) == sum(machine.away.values()) == sum(machine.pager.out_bytes.values())
    assert machine.failure is None and (disk or machine.pager.out_bytes[2] == 0)
    for rank in range(len(sizes)):
        machine.pager.ended(rank)
    assert machine.pool.promised_bytes == 0 and not any(map(machine.pool.bytes_of, range(len(sizes))))


@pytest.mark.parametrize("cut", [1, 47, 48, 49])
def test_messages_that_arrive_in_pieces_are_put_together(cut: int) -> None:
    raw = b"".join(struct.pack("=IIIIQQQQ", kind, 0, 0, 0, 7, 8, 9, 10) for kind in (NEED, MOVED))
    link = Link.__new__(Link)
    link._buffer = bytearray(raw[:cut])
    first = link.whole()
    link._buffer += raw[cut:]
    found = first + link.whole()
    assert found == [Message(kind, num_bytes=7, copy_ns=8, total_ns=9, fresh_bytes=10) for kind in (NEED, MOVED)]
