"""Reductions and deliveries of the recording, against plain torch."""

from __future__ import annotations

import functools
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from prism_sdk.runtime import tensors  # noqa: E402
from prism_sdk.runtime.calls import COMBINED, Call, Delivery, GroupState  # noqa: E402
from prism_sdk.runtime.oncuda import staging  # noqa: E402
from prism_sdk.runtime.tensors import (  # noqa: E402
    Bytes,
    combine,
    copy_bytes,
    deliver,
    deliver_locally,
    fill,
    memory_of,
)
from prismtrace.model import Op, ReduceOp  # noqa: E402

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def group(size: int, group_rank: int = 0) -> GroupState:
    return GroupState(
        name="g", ranks=tuple(range(size)), group_rank=group_rank, backend="gloo", description="", group_id=1
    )


def call(op: Op, members: int, given_tensors: list[Any], **more: Any) -> Call:
    return Call(op, group(members, more.pop("group_rank", 0)), lambda: None, contribution=given_tensors, **more)


def reader(contributions: list[list[Any]]) -> Any:
    joined = [bytes(Bytes(row).joined()) for row in contributions]

    def read_into(member: int, offset: int, view: memoryview) -> None:
        view[:] = joined[member][offset : offset + len(view)]

    return read_into


def values(dtype: Any, shape: tuple[int, ...], seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


FOLDS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def wanted(reduce_op: ReduceOp, parts: list[Any]) -> Any:
    if reduce_op is not ReduceOp.AVG:
        return functools.reduce(FOLDS[reduce_op], parts)
    total = functools.reduce(torch.add, parts)
    exact = total.is_floating_point() or total.is_complex()
    return total / len(parts) if exact else torch.div(total, len(parts), rounding_mode="trunc")


def allowed(reduce_op: ReduceOp, dtype: Any) -> bool:
    if reduce_op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        return dtype in INTEGERS
    return not (dtype.is_complex and reduce_op in (ReduceOp.MIN, ReduceOp.MAX))


@settings(max_examples=150, deadline=None)
@given(
    reduce_op=st.sampled_from([*FOLDS, ReduceOp.AVG]),
    dtype=st.sampled_from(FLOATS + INTEGERS),
    members=st.integers(1, 5),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
    is_strided=st.booleans(),
    piece_bytes=st.sampled_from([1, 24, 1 << 20]),
    is_in_place=st.booleans(),
)
def test_combine_is_the_fold_in_rank_order_bit_for_bit(  # type: ignore[no-untyped-def]
    reduce_op, dtype, members, shapes, seed, is_strided, piece_bytes, is_in_place
):
    if not allowed(reduce_op, dtype):
        return
    contributions = [[values(dtype, s, seed + 31 * m + i) for i, s in enumerate(shapes)] for m in range(members)]
    if is_strided:
        contributions = [[t.transpose(0, -1) if t.dim() else t for t in row] for row in contributions]
    read = reader(contributions)
    outputs = contributions[0] if is_in_place else [t.clone() for t in contributions[0]]
    parts = [[t.clone() for t in row] for row in contributions]
    this = call(Op.ALL_REDUCE, members, contributions[0], reduce_op=reduce_op, outputs=outputs)
    with mock.patch.object(tensors, "_PIECE_BYTES", piece_bytes):
        totals = combine(this, members, read)
    for index, total in enumerate(totals):
        expected = wanted(reduce_op, [row[index].contiguous() for row in parts])
        assert total.dtype == dtype
        if outputs[index].is_contiguous() and total.numel():
            assert total.data_ptr() == outputs[index].data_ptr()  # nothing is left to be delivered
        assert torch.equal(total.view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(members=st.integers(1, 5), data=st.data())
def test_all_to_all_takes_each_member_s_piece(members: int, data: st.DataObject) -> None:
    rows = [[data.draw(st.integers(0, 4)) for _ in range(members)] for _ in range(members)]  # [source][destination]
    inputs = [values(torch.float32, (sum(row), 3), 7 + source) for source, row in enumerate(rows)]
    for me in range(members):
        output = torch.zeros(sum(row[me] for row in rows), 3)
        receiving = list(output.split([row[me] for row in rows]))
        this = call(Op.ALL_TO_ALL, members, [inputs[me]], group_rank=me, receive_tensors=receiving)
        deliver(this, reader([[t] for t in inputs]), lambda member: [n * 12 for n in rows[member]])
        assert torch.equal(output, torch.cat([t.split(row)[me] for t, row in zip(inputs, rows, strict=True)]))


def test_fill_keeps_views_and_leaves_the_rest_alone() -> None:
    whole = torch.zeros(4, 4)
    source = torch.arange(8.0)
    fill(whole[:, ::2], lambda _, view: copy_bytes(view, memoryview(Bytes([source]).joined())))
    assert torch.equal(whole[:, ::2], source.view(4, 2))
    assert not whole[:, 1::2].any()


def test_a_filled_storage_can_still_be_resized() -> None:
    tensor = torch.zeros(8)
    deliver_locally(call(Op.ALL_REDUCE, 2, [], deliveries=[Delivery(tensor, COMBINED, 0)]), [torch.ones(8)])
    tensor.untyped_storage().resize_(0)  # FSDP1 does this
    assert tensor.untyped_storage().size() == 0


def test_conjugated_views_travel_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert bytes(Bytes([tensor.conj()]).joined()) == bytes(Bytes([tensor.conj().resolve_conj()]).joined())


def test_bytes_outlive_the_tensors_they_were_copied_from() -> None:
    view = memoryview(Bytes([torch.arange(4096.0).view(64, 64).t()]).joined())
    torch.full((64, 64), 7.0)  # would take the memory of the copy if that were free
    assert bytes(view) == bytes(Bytes([torch.arange(4096.0).view(64, 64).t().contiguous()]).joined())


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([*FLOATS, *INTEGERS, torch.bool]),
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4),
    room_bytes=st.integers(1, 40), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_what_goes_through_a_piece_of_host_memory_arrives(dtype, shapes, room_bytes, seed):  # type: ignore[no-untyped-def]
    """As tensors of a GPU go, here with those of the host."""
    sources = [values(dtype, shape, seed + i) for i, shape in enumerate(shapes)]
    targets = [torch.zeros_like(source) for source in sources]
    room = torch.empty(room_bytes, dtype=torch.uint8)
    rooms = mock.patch.object(staging, "room", lambda: room)
    stages = mock.patch.object(tensors, "can_stage", lambda tensor: tensor.numel() > 0)
    on_host = mock.patch.object(tensors, "is_plain", lambda tensor: False)
    with rooms, stages, on_host, mock.patch.object(staging, "_BYTES", room_bytes):
        moved = b"".join(bytes(piece) for piece in Bytes(sources).pieces())
        assert moved == bytes(Bytes(sources).joined())
        deliveries = [Delivery(target, 0, sum(s.nbytes for s in sources[:i])) for i, target in enumerate(targets)]
        this = call(Op.ALL_GATHER, 1, sources, deliveries=deliveries)
        deliver(this, reader([sources]), lambda member: (), in_pieces=True)
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))


@pytest.mark.parametrize("is_made_in_it", [True, False])
@pytest.mark.parametrize("is_asked_in_it", [True, False])
def test_tensors_of_inference_mode_get_results_in_and_out_of_it(*, is_made_in_it: bool, is_asked_in_it: bool) -> None:
    """Backends write to them as to any other."""
    with torch.inference_mode(mode=is_made_in_it):
        output, strided, gathered, staged = torch.ones(5), torch.ones(3, 4).t()[1:], torch.zeros(2, 5), torch.zeros(5)
    before = None if is_made_in_it else [t._version for t in (output, strided, gathered, staged)]
    with torch.inference_mode(mode=is_asked_in_it):
        this = call(Op.ALL_REDUCE, 2, [output], reduce_op=ReduceOp.SUM, outputs=[output])
        combine(this, 2, reader([[torch.ones(5)], [torch.ones(5)]]))
        deliver_locally(call(Op.REDUCE, 2, [], deliveries=[Delivery(strided, COMBINED, 0)]), [torch.full((9,), 2.0)])
        this = call(Op.ALL_GATHER, 2, [output], outputs=[gathered])
        assert tensors.deliver_repeated(this, np.zeros(2, dtype=np.int32), reader([[output]] * 2))
        for _, piece in staging.unstaged(staged):
            piece.view(torch.float32).fill_(2.0)
    for tensor in (output, strided, gathered, staged):
        assert torch.equal(tensor, torch.full_like(tensor, 2.0))
    assert before is None or before == [t._version for t in (output, strided, gathered, staged)]


def test_the_room_of_a_thread_serves_in_and_out_of_inference_mode() -> None:
    with mock.patch.object(staging, "_local", threading.local()):
        with torch.inference_mode():
            assert [bytes(memory_of(piece)) for piece in staging.staged(torch.tensor([1, 2], dtype=torch.uint8))]
        for mode in (False, True):
            with torch.inference_mode(mode=mode):
                pieces = [bytes(memory_of(piece)) for piece in staging.staged(torch.tensor([1, 2], dtype=torch.uint8))]
            assert pieces == [b"\x01\x02"]


def test_empty_tensors_contribute_nothing() -> None:
    data = Bytes([torch.zeros(0), torch.ones(2), torch.zeros(3, 0)])
    assert data.num_bytes == 8
    assert len(data.joined()) == 8


def test_results_do_not_count_as_changes_of_the_program_s_tensors() -> None:
    """A backend writes past autograd, which compares versions of what it has saved."""
    output = torch.ones(5)
    before = output._version
    this = call(Op.ALL_REDUCE, 2, [output], reduce_op=ReduceOp.SUM, outputs=[output])
    combine(this, 2, reader([[torch.ones(5)], [torch.ones(5)]]))
    assert output.tolist() == [2.0] * 5
    for _, piece in staging.unstaged(output):
        piece.zero_()
    assert output.tolist() == [0.0] * 5
    assert output._version == before
