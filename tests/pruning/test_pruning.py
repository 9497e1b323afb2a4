"""A pruned group gives its sandbox members what the whole group would, with the same traffic."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.pruning import Action, Move, Traffic, closing, program, traffic
from prismtrace import Op, ReduceOp
from tests.pruning.members import FOLDS, Array, Job, play_full, play_pruned

COLLECTIVES = (
    Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER,
    Op.BARRIER,
)  # fmt: skip
REDUCTIONS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
ROOTED = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
INTEGERS = ("int8", "int32", "int64", "uint8")
FLOATS = ("float16", "float32", "float64")
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


@st.composite
def jobs(draw: st.DrawFn, op: Op) -> tuple[Job, list[int]]:
    size = draw(st.integers(2, 64))
    num_sandbox = draw(st.integers(1, min(size - 1, 6)))
    first = draw(st.integers(0, size - 1))
    contiguous = [(first + i) % size for i in range(num_sandbox)]
    scattered = st.lists(st.integers(0, size - 1), min_size=num_sandbox, max_size=num_sandbox, unique=True)
    sandbox = sorted(draw(st.one_of(st.just(contiguous), scattered)))
    dtype = draw(st.sampled_from(INTEGERS + FLOATS))
    kinds = [r for r in FOLDS if dtype in INTEGERS or r not in BITWISE]
    reduce_op = draw(st.sampled_from(kinds)) if op in REDUCTIONS else ReduceOp.UNSPECIFIED
    root = draw(st.integers(0, size - 1)) if op in ROOTED else None
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = 1 if op is Op.BARRIER else draw(st.integers(1, 40))
    counts = None
    if op is Op.REDUCE_SCATTER:
        count *= size
    if op is Op.ALL_TO_ALL:
        counts = random.integers(0, 4, (size, size)).tolist()
    lengths = [sum(counts[m]) if counts else count * (size if op is Op.SCATTER else 1) for m in range(size)]
    if op in (Op.ALL_GATHER, Op.GATHER) and draw(st.booleans()):  # contributions of different sizes
        lengths = random.integers(0, 5, size).tolist()
    # products stay within what a half can hold
    low, high = (1, 3) if reduce_op is ReduceOp.PRODUCT else (0, 100)
    inputs = [random.integers(low, high, n).astype(dtype) for n in lengths]
    if reduce_op is ReduceOp.PRODUCT and dtype in FLOATS:
        inputs = [
            np.where(random.random(n) < 0.9, 1, one).astype(dtype) for n, one in zip(lengths, inputs, strict=True)
        ]
    elif dtype in FLOATS and op in REDUCTIONS:
        inputs = [(one / 7).astype(dtype) for one in inputs]
    return Job(op, reduce_op, inputs, root, counts), sandbox


def reference(job: Job, member: int) -> list[Array | None]:
    """What each piece of a member holds in the end, from numpy; None where the collective says nothing."""
    size, inputs = job.size, job.inputs
    if job.op in REDUCTIONS:
        dtype = inputs[0].dtype
        wide = [one.astype("float64") if dtype.kind == "f" else one for one in inputs]
        total = reduce(FOLDS[job.reduce_op], wide).astype(dtype)
        if job.op is Op.REDUCE:
            return [total if member == job.root else None]
        pieces = [total[len(total) * i // size : len(total) * (i + 1) // size] for i in range(size)]
        return [p if job.op is Op.ALL_REDUCE or i == member else None for i, p in enumerate(pieces)]
    if job.op is Op.BROADCAST:
        return [inputs[job.root or 0]]
    if job.op is Op.ALL_TO_ALL:
        return [job.blocks(source)[member] for source in range(size)]
    if job.op is Op.ALL_GATHER or (job.op is Op.GATHER and member == job.root):
        return list(inputs)
    if job.op is Op.SCATTER:
        return [job.blocks(job.root or 0)[member] if i == member else None for i in range(size)]
    return [None] * size


def assert_equal(found: Array, expected: Array) -> None:
    if expected.dtype.kind == "f":
        tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[expected.dtype.itemsize]
        np.testing.assert_allclose(found, expected, rtol=tolerance * 4)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("op", COLLECTIVES, ids=lambda op: op.name.lower())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sandbox_members_get_the_result_and_the_traffic_of_the_whole_group(op: Op, data: st.DataObject) -> None:
    job, sandbox = data.draw(jobs(op))
    pieces, counted = play_pruned(job, sandbox)
    _, whole = play_full(job) if job.size <= 16 else (None, None)
    for member in sandbox:
        for found, expected in zip(pieces[member], reference(job, member), strict=False):
            if expected is not None:
                assert_equal(found, expected)
        steps = program(op, size=job.size, member=member, root=job.root)

        def size_of(action: Action, member: int = member) -> int:
            ends = (member, action.peer) if action.move is Move.SEND else (action.peer, member)
            return job.elements(*ends, action.piece) * job.inputs[0].itemsize

        assert counted.of(member) == traffic(steps, size_of)
        if whole is not None:
            assert counted.of(member) == whole.of(member)


@pytest.mark.parametrize("op", COLLECTIVES, ids=lambda op: op.name.lower())
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_full_schedule_is_the_collective(op: Op, data: st.DataObject) -> None:
    job, _ = data.draw(jobs(op))
    pieces, _ = play_full(job)
    for member in range(job.size):
        for found, expected in zip(pieces[member], reference(job, member), strict=False):
            if expected is not None:
                assert_equal(found, expected)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_a_ring_carries_what_the_formula_says(size: int) -> None:
    count = 60 * size
    inputs = [np.arange(count) for _ in range(size)]
    for op, share in ((Op.ALL_REDUCE, 2), (Op.REDUCE_SCATTER, 1)):
        _, counted = play_pruned(Job(op, ReduceOp.SUM, inputs), [1])
        amount = share * (size - 1) * count * 8 // size
        assert counted.of(1) == Traffic(share * (size - 1), amount, share * (size - 1), amount)


@pytest.mark.parametrize(("size", "sandbox"), [(4, [1]), (8, [6, 7, 0]), (64, [3]), (9, [0, 2, 5])])
def test_nobody_sends_between_virtual_members_and_only_neighbours_are_met(size: int, sandbox: list[int]) -> None:
    plan = closing(Op.ALL_REDUCE, size=size, sandbox=sandbox)
    gaps = [m for m in sandbox if (m + 1) % size not in sandbox]
    assert {(one.source, one.destination) for one in plan.intakes} == {(m, (m + 1) % size) for m in gaps}
    assert {one.destination for one in plan.emissions} <= set(sandbox)
    assert {one.source for one in plan.emissions} == {(m - 1) % size for m in sandbox if (m - 1) % size not in sandbox}
    # what the first messages of a gap hold comes from nobody, what the last ones would carry on goes nowhere
    for member in sandbox:
        received = [one for one in plan.emissions if one.destination == member]
        if received:
            gap = next(d for d in range(size) if (member - 1 - d) % size in sandbox)
            assert [bool(one.takes) for one in received] == [i >= gap for i in range(2 * (size - 1))]


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="member 4 or root None is not in a group of 4"):
        program(Op.ALL_REDUCE, size=4, member=4)
    with pytest.raises(ValueError, match="broadcast needs a root"):
        program(Op.BROADCAST, size=4, member=1)
    with pytest.raises(ValueError, match="send is no collective"):
        program(Op.SEND, size=4, member=1)
