"""The library's own collectives over a reduced communicator give sandbox members the whole group's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.pruning import reduced_size, ring_sends, scaled_count
from prism_sdk.runtime.announce import Announcement
from prism_sdk.runtime.reduced import WHOLE, Room, Shape, join_as_member, join_as_virtual, weighed
from prism_sdk.runtime.reducedgroups import TorchGroup
from prismtrace import Op, ReduceOp
from tests.pruning.members import FOLDS, Array, Job
from tests.pruning.test_pruning import COLLECTIVES, REDUCTIONS, assert_equal, jobs, reference


@cache
def gloo_groups(size: int) -> list[TorchGroup]:
    """All ranks of a communicator of gloo, in this process."""
    from torch._C import _distributed_c10d as c10d

    store = c10d.HashStore()

    def one(rank: int) -> TorchGroup:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._threads = 1
        return TorchGroup(c10d.ProcessGroupGloo(c10d.PrefixStore(str(size), store), rank, size, options))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.fixture(scope="module", autouse=True)
def _release() -> Iterator[None]:
    yield
    gloo_groups.cache_clear()


def room(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count,), 7, dtype=dtype)  # what lies in scratch memory must not matter


def one_memory() -> Room:
    """Room whose pieces are all the same memory, for an end that only weighs."""
    memory = torch.full((1 << 20,), 7, dtype=torch.uint8)
    return lambda count, dtype: memory[: count * dtype.itemsize].view(dtype)


def announced(job: Job, member: int) -> Announcement:
    size, inputs = job.size, job.inputs
    reduces = job.op in REDUCTIONS
    count, sizes, received = 1, (), ()  # type: tuple[Any, ...]
    if reduces:
        count = len(inputs[member])
    elif job.op is Op.BROADCAST:
        count = inputs[job.root or 0].nbytes
    elif job.op is Op.SCATTER:
        count = inputs[job.root or 0].nbytes // size
    elif job.op is Op.ALL_TO_ALL:
        sizes = tuple(block.nbytes for block in job.blocks(member))
        received = tuple(job.blocks(source)[member].nbytes for source in range(size))
    elif job.op in (Op.ALL_GATHER, Op.GATHER):
        sizes = tuple(one.nbytes for one in inputs)
    dtype = torch.from_numpy(inputs[member]).dtype if reduces else torch.uint8
    return Announcement(
        rank=member, member=member, handle=(0, 0), group_id=1, seq=0, op=job.op, reduce_op=job.reduce_op, dtype=dtype,
        root=job.root, count=count, sizes=sizes, received=received,
    )  # fmt: skip


def in_bytes(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(values.tobytes(), np.uint8).copy())


def contribution(job: Job, member: int) -> torch.Tensor:
    if job.op in REDUCTIONS:
        return torch.from_numpy(job.inputs[member].copy())
    gives = job.op not in (Op.BARRIER, Op.BROADCAST, Op.SCATTER) or member == job.root
    return in_bytes(job.inputs[member] if gives and job.op is not Op.BARRIER else np.empty(0, np.uint8))


def virtual_parts(job: Job, shape: Shape) -> dict[int, torch.Tensor]:
    if job.op in REDUCTIONS:
        total = job.inputs[shape.virtual[0]].copy()
        for member in shape.virtual[1:]:
            total = FOLDS[job.reduce_op](total, job.inputs[member])
        return {WHOLE: torch.from_numpy(total.astype(job.inputs[0].dtype))}
    if job.op is Op.ALL_TO_ALL:  # only blocks of equal sizes can be cut without the splits; the test has such
        return {m: contribution(job, m) for m in shape.virtual}
    return {m: contribution(job, m) for m in shape.virtual if len(contribution(job, m))}


def run(job: Job, sandbox: list[int], *, weighs: bool = False) -> dict[int, dict[int, torch.Tensor]]:
    """What each sandbox member holds when all ends of the call have run, each in a thread of its own.

    `weighs`: nobody gives anything.
    """
    shape = Shape(job.size, tuple(sandbox))
    groups = gloo_groups(shape.num_ranks)
    told = {member: announced(job, member) for member in sandbox}
    if weighs:
        told = {member: weighed(one) for member, one in told.items()}
    ends: list[Callable[[], object]] = []
    found: dict[int, dict[int, torch.Tensor]] = {}

    def sandbox_end(member: int, group: TorchGroup) -> None:
        own = contribution(job, member)
        scratch = one_memory() if weighs else room
        running = join_as_member(told[member], group, shape, own[:0] if weighs else own, scratch)
        running.work.wait()
        found[member] = dict(running.parts)

    for position, member in enumerate(sandbox):
        ends.append(lambda m=member, g=groups[position]: sandbox_end(m, g))
    if shape.virtual:
        parts = {} if weighs else virtual_parts(job, shape)
        scratch = one_memory() if weighs else room
        ends.append(lambda: join_as_virtual(told, groups[-1], shape, parts, scratch).wait())
    with ThreadPoolExecutor(len(ends)) as pool:
        for done in [pool.submit(end) for end in ends]:
            done.result(30)
    return found


@pytest.mark.parametrize("op", COLLECTIVES, ids=lambda op: op.name.lower())
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_sandbox_members_get_the_result_of_the_whole_group(op: Op, data: st.DataObject) -> None:
    job, sandbox = data.draw(jobs(op))
    assert run(job, sandbox, weighs=True).keys() == set(sandbox)  # sizes agree: it comes to an end
    if op is Op.ALL_TO_ALL:
        count = data.draw(st.integers(1, 4))
        inputs = [np.arange(count * job.size, dtype=np.int32) + 1000 * m for m in range(job.size)]
        job = Job(op, job.reduce_op, inputs, None, [[count] * job.size] * job.size)
    found = run(job, sandbox)
    for member in sandbox:
        expected = reference(job, member)
        if op in REDUCTIONS:
            wanted = [piece for piece in expected if piece is not None]
            if wanted:
                total = np.concatenate(wanted) if op is Op.ALL_REDUCE else wanted[0]
                assert_equal(found[member][WHOLE].numpy(), total)
            continue
        for source, part in found[member].items():
            if op is Op.BARRIER:
                continue
            at = {Op.BROADCAST: 0, Op.SCATTER: member}.get(op, source)
            assert part.numpy().tobytes() == expected[at].tobytes()  # type: ignore[union-attr]
        if op in (Op.ALL_TO_ALL, Op.SCATTER, Op.BROADCAST):
            assert found[member]  # nothing is left to the recording
        if op is Op.ALL_GATHER:
            assert set(found[member]) == set(sandbox)


@settings(max_examples=300, deadline=None)
@given(
    op=st.sampled_from([Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER]), size=st.integers(2, 20_000),
    share=st.floats(0, 1), count=st.integers(1, 1 << 34),
)  # fmt: skip
def test_a_reduced_call_carries_what_the_full_one_does(op: Op, size: int, share: float, count: int) -> None:
    num_sandbox = 1 + int(share * (size - 1))
    scaled = scaled_count(op, size=size, num_sandbox=num_sandbox, count=count)
    reduced = reduced_size(size, num_sandbox)
    full, sent = ring_sends(op, size, count), ring_sends(op, reduced, scaled)
    assert scaled >= count  # the program's own values have room
    assert 0 <= sent - full <= 2 * reduced  # rounded up by one element of each message
    if full > 200 * reduced:
        assert sent <= full * Fraction(101, 100)


def test_a_group_that_is_all_sandbox_is_called_as_it_is() -> None:
    assert reduced_size(3, 3) == 3
    assert scaled_count(Op.ALL_REDUCE, size=3, num_sandbox=3, count=100) == 100
    job = Job(Op.ALL_REDUCE, ReduceOp.SUM, [np.arange(5.0) * m for m in range(3)], None, None)
    assert all(part[WHOLE].tolist() == [0, 3, 6, 9, 12] for part in run(job, [0, 1, 2]).values())


@pytest.mark.parametrize("num_sandbox", [0, 5])
def test_a_group_without_sandbox_members_has_no_reduced_call(num_sandbox: int) -> None:
    with pytest.raises(ValueError, match="sandbox members in a group of 4"):
        reduced_size(4, num_sandbox)


def test_other_operations_are_no_rings_of_equal_parts() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        ring_sends(Op.BROADCAST, 4, 1)
