"""Who gets host memory before its device memory has to leave: the pager over ranks that are played."""

from __future__ import annotations

import pytest

from prism_sdk.runtime.oncuda.paging.ahead import Ahead
from prism_sdk.runtime.oncuda.paging.links import READY, Message
from prism_sdk.runtime.oncuda.paging.placing import find_place
from prism_sdk.runtime.oncuda.paging.tenants import Tenant
from tests.runtime.test_paging import FakeLink, Machine

GIB = 1 << 30


def ready(machine: Machine, rank: int) -> None:
    machine.pager.heard(rank, Message(READY, num_bytes=30 * GIB, fresh_bytes=machine.touch(rank)))


def test_who_leaves_next_has_its_host_memory_before() -> None:
    machine = Machine(100 * GIB, host=1000 * GIB, ahead=75 * GIB, unit_bytes=GIB)
    for rank in range(4):
        machine.start(rank)
        assert machine.allocate(rank, 30 * GIB)
        if rank == 3:
            assert machine.moves == [("out", 0)]
        machine.park(rank)
        # the device is found full by rank 3 only; then rank 1 is the next that leaves, and only one is asked at a time
        assert machine.prepared == ([] if rank < 3 else [(1, 30 * GIB)])
    ready(machine, 1)
    assert machine.prepared[1:] == [(2, 30 * GIB)]
    ready(machine, 2)
    assert len(machine.prepared) == 2  # the third would be beyond the budget
    machine.start(4)
    assert machine.allocate(4, 40 * GIB) and machine.moves == [("out", 0), ("out", 1)]
    machine.park(4)
    assert machine.prepared[2:] == [(3, 30 * GIB)]  # what rank 1 had ahead is used
    machine.pager.ready(1)
    assert machine.bring(1) and machine.moves[2:] == [("out", 2), ("in", 1)]
    machine.park(1)
    assert len(machine.prepared) == 3  # rank 3 has not said that it is done
    machine.pager.ended(3)
    machine.park(1)
    assert machine.prepared[3:] == [(4, 40 * GIB)] and machine.pool.promised_bytes == 10 * GIB  # beside rank 1's
    said = str(machine.pager.tally)  # rank 0 went into fresh memory, 1 and 2 into what they had ahead
    assert "96.6 GB of host memory taken, 64.4 GB of it ahead, out into what was taken 64.4 GB at" in said


@pytest.mark.parametrize(("host", "ahead"), [(1000, 0), (1000, 20), (110, 75)])
def test_host_memory_is_not_taken_ahead_beyond_its_limits(host: int, ahead: int) -> None:
    machine = Machine(100 * GIB, host=host * GIB, ahead=ahead * GIB, unit_bytes=GIB)
    for rank in range(4):
        machine.start(rank)
        assert machine.allocate(rank, 45 * GIB)
        machine.park(rank)
    assert machine.moves == [("out", 0), ("out", 1)] and machine.prepared == []


def test_what_the_pool_has_is_mapped_ahead_also_where_the_host_has_no_more() -> None:
    machine = Machine(100 * GIB, host=90 * GIB, ahead=75 * GIB, unit_bytes=GIB)
    for rank in range(3):
        machine.start(rank)
        assert machine.allocate(rank, 45 * GIB)
        machine.park(rank)
    assert machine.prepared == []  # rank 1 would need half of what the host has left, and more
    machine.pager.ready(0)
    assert machine.bring(0) and machine.moves == [("out", 0), ("out", 1), ("in", 0)]
    machine.park(0)
    assert machine.prepared == [(2, 45 * GIB)] and machine.pool.held_bytes == 90 * GIB


def test_a_device_that_is_nearly_full_is_seen_before_anybody_finds_no_room() -> None:
    machine = Machine(0, unit_bytes=GIB)
    tenant, free = Tenant(0, link=FakeLink(machine, 0), num_bytes=30 * GIB, parked_as=1), 31 * GIB
    ahead = Ahead(
        lambda: 40 * GIB, pool=lambda: machine.pool, room_in_host=lambda: 60 * GIB, free_bytes=lambda device: free
    )
    ahead.look(0, [tenant])
    assert machine.prepared == []
    ahead._looked_ns.clear()
    free = 29 * GIB
    ahead.look(1, [tenant])
    ahead.look(0, [tenant])
    ahead.look(0, [tenant])
    assert machine.prepared == [(0, 30 * GIB)]
    other = Tenant(1, num_bytes=100 * GIB)
    assert not find_place(other, [tenant, other], pool=machine.pool, room_in_host=lambda: 10 * GIB)
    assert machine.pool.held_bytes == 0  # what was given ahead is taken back for who leaves now
