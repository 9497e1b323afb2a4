"""What is put into the tensors of operations on a device, on CPU tensors: it is the same there."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")

from prism_sdk.runtime.calls import COMBINED, Call, GroupState  # noqa: E402
from prism_sdk.runtime.making_up import compensate  # noqa: E402
from prism_sdk.runtime.manifest import Expected  # noqa: E402
from prism_sdk.runtime.oncuda.filling import Recorded, can_fill, fill_alone, fill_from, plain_copies  # noqa: E402
from prism_sdk.runtime.operators import OPERATORS  # noqa: E402
from tests.runtime.test_holding import AVG, GROUP, SUM, Job, floats, operations, tensor  # noqa: E402
from tests.runtime.test_holding import job as job  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def test_tensors_that_are_not_contiguous_are_left_to_the_host() -> None:
    call = OPERATORS["allreduce_"](GROUP, lambda: None, ([torch.zeros(2, 2).t()], None, SUM))
    assert not can_fill(call) and not fill_alone(call)


def _restore(call: Call, before: list[torch.Tensor]) -> None:
    for changed, was in zip((*call.contribution, *call.outputs), before, strict=True):
        changed.copy_(was)


def test_plain_copies_do_what_filling_does(job: Job) -> None:
    """For every kind of operation, and both where the rank's own part stands for the others' and where it does not."""
    num_plain = 0
    message = job.add("recv_", ([torch.zeros(3)], None, 2, 0), {2: floats(1, 2, 3)})
    calls = [message, *(call for call, _ in operations(job))]
    job.script()
    for call in calls:
        for without in (False, True):
            one = job.expected[job.calls.index(call)]
            sizes = [job.items[one.first_item + i].num_bytes for i in range(len(one.sources))]
            values = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
            given = {} if without else dict(zip(one.sources, values, strict=True))
            room = {s: Recorded(0, data, torch.zeros(data.numel(), dtype=torch.uint8)) for s, data in given.items()}
            before = [each.clone() for each in (*call.contribution, *call.outputs)]
            if not can_fill(call):
                continue
            copies = plain_copies(call, one, {s: (data.data_ptr(), data.numel()) for s, data in given.items()})
            if copies is None:
                continue
            num_plain += bool(copies)
            for target, source, num_bytes in copies:
                ctypes.memmove(target, source, num_bytes)
            found = [output.clone() for output in call.outputs]
            _restore(call, before)
            fill_from(call, one, room)
            for output, plain in zip(call.outputs, found, strict=True):
                assert output.numpy().tobytes() == plain.numpy().tobytes(), (call.op, without)
            _restore(call, before)
    assert num_plain >= 8


@pytest.mark.parametrize("is_made_in_it", [True, False])
def test_filling_is_no_change_that_autograd_sees(*, is_made_in_it: bool) -> None:
    """As NCCL's: also of tensors that were made in inference mode, outside of it."""
    with torch.inference_mode(mode=is_made_in_it):
        total = tensor(1, 2)
    before = None if is_made_in_it else total._version
    world = GroupState(name="g", ranks=(0, 1), group_rank=0, backend="nccl", description="", group_id=1)
    call = OPERATORS["allreduce_"](world, lambda: None, ([total], None, SUM))
    values = torch.tensor([5.0, 7.0]).view(torch.uint8)
    one = Expected(0, 0, call.op, call.reduce_op, call.dtype, 1, (0, 1), 0, None, 0, 2, 2, None, sources=(COMBINED,))
    fill_from(call, one, {COMBINED: Recorded(0, values, values)})
    assert total.tolist() == [5.0, 7.0]
    was, now = (memoryview(floats(*row)) for row in ((1, 2), (2, 4)))
    compensate(call, total, memoryview(floats(5, 7)), then=was, now=now)
    assert total.tolist() == [6.0, 9.0]
    assert before is None or before == total._version


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_message_that_nobody_recorded_is_small_random_numbers(dtype: torch.dtype) -> None:
    """And takes none of the program's."""
    state = torch.get_rng_state()
    large, few, whole = (torch.full(shape, 7, dtype=dtype) for shape in ((300, 300), (5,), (40_000,)))
    number = torch.full((40_000,), 7)
    for out in (large, few, whole, number):
        message = OPERATORS["recv_"](GROUP, lambda: None, ([out], None, 2, 0))
        fill_from(message, object.__new__(Expected), {})
    for out in (large, whole):
        assert 0 < out.float().abs().max() < 1e-4 and out.unique().numel() > 10
    assert not few.any() and not number.any()
    assert torch.equal(torch.get_rng_state(), state)


def test_alone_in_a_group() -> None:
    alone = GroupState(name="1", ranks=(5,), group_rank=0, backend="nccl", description="", group_id=78)
    out = torch.zeros(2)
    assert fill_alone(OPERATORS["_allgather_base_"](alone, lambda: None, (out, tensor(1, 2))))
    assert out.tolist() == [1, 2]
    assert fill_alone(OPERATORS["_reduce_scatter_base_"](alone, lambda: None, (out, tensor(3, 4), None, AVG)))
    assert out.tolist() == [3, 4]
