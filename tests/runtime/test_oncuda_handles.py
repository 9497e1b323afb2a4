"""Handles of operations on GPUs, without one: whose stream waits, and what they keep alive."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prism_sdk.runtime import coalescing, observe  # noqa: E402
from prism_sdk.runtime.calls import Call, GroupState  # noqa: E402
from prism_sdk.runtime.oncuda.order import HostOrder, order_of  # noqa: E402
from prism_sdk.runtime.oncuda.scratch import nccl_scratch, place_scratch, results_of  # noqa: E402
from prism_sdk.runtime.work import outstanding_works  # noqa: E402
from prismtrace import Op  # noqa: E402

GROUP = GroupState(name="0", ranks=(0, 1), group_rank=0, backend="nccl", description="", group_id=77)


class Backend(torch._C._distributed_c10d.Work):
    """A handle as NCCL's backend makes it: holds its outputs, and each wait is for the stream that is current."""

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self.outputs = outputs
        self.num_waits = 0

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        self.num_waits += 1
        return True


class Quiet:
    """A tracer that nobody reads."""

    now = staticmethod(time.monotonic_ns)

    def wait(self, *_: Any, **__: Any) -> None:
        pass


def test_a_handle_on_a_gpu_waits_each_time_and_holds_nothing_longer_than_the_program_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observe, "device_of", lambda call: torch.device("cuda", 0))
    gc.disable()  # nothing may depend on the cycle collector
    try:
        tensor = torch.zeros(4)
        gone = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()).expired
        inner = Backend([tensor])
        call = Call(Op.ALL_REDUCE, GROUP, lambda: None, contribution=[tensor], outputs=[tensor])
        work = observe.TimedWork.of(inner, Quiet(), 0, call, 0)  # type: ignore[arg-type]
        del tensor, call
        work.wait()
        work.wait()
        assert inner.num_waits == 2
        del inner
        assert not gone()
        del work
        assert gone()
    finally:
        gc.enable()


def test_a_stream_that_waits_for_a_future_later_waits_for_the_backend_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "device_of", lambda call: torch.device("cuda", 0))
    waits: list[str] = []
    inner: Any = SimpleNamespace(wait=lambda: waits.append("backend"), is_completed=lambda: True)  # it has no future
    call = Call(Op.ALL_GATHER, GROUP, lambda: None)
    work = observe.TimedWork.of(inner, Quiet(), 0, call, 0)  # type: ignore[arg-type]
    work.wait()
    work.get_future().wait()
    assert waits == ["backend"] * 2


def test_a_coalesced_block_is_waited_for_as_one_and_its_parts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "device_of", lambda call: torch.device("cuda", 0))
    waits: list[int] = []
    tracer: Any = SimpleNamespace(now=time.monotonic_ns, wait=lambda unit, *_, **__: waits.append(unit))
    before = outstanding_works()
    call = Call(Op.SEND, GROUP, lambda: None)
    parts = [observe.TimedWork.of(Backend([]), tracer, unit, call, 0) for unit in (3, 4)]
    inner = Backend([])
    block = coalescing.TimedBlock(inner, tracer, parts)
    block.wait()
    block.wait()
    assert waits == [3, 4]
    assert inner.num_waits == 2
    assert outstanding_works() == before


@pytest.mark.parametrize(("ranks", "can"), [((0, 1), True), ((0, 1), False), ((0, 1, 2), True)])
def test_blocks_of_groups_with_a_backend_of_their_own_are_that_backends(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], can: bool
) -> None:
    """In a slice both ranks of a message may be there: NCCL then is told of the block, or both would send first."""
    said: list[str] = []
    waits: list[int] = []
    inner = Backend([])
    backend = SimpleNamespace(supports_coalescing=can)

    class Group:
        group_name = "0"

        def _get_backend(self, device: Any) -> Any:
            return backend

        def _start_coalescing(self, device: Any) -> None:
            said.append("start")

        def _end_coalescing(self, device: Any) -> Any:
            said.append("end")
            return inner

    monkeypatch.setattr(coalescing.dist, "ProcessGroup", Group)
    monkeypatch.setattr(coalescing.dist, "get_process_group_ranks", lambda group: list(ranks))
    tracer: Any = SimpleNamespace(now=time.monotonic_ns, wait=lambda unit, *_, **__: waits.append(unit))
    blocks = coalescing.Blocks(tracer)
    blocks.install(is_real={0, 1}.issuperset)
    group: Any = Group()
    is_real = can and len(ranks) == 2
    group._start_coalescing(torch.device("cpu"))
    assert blocks.has_open("0") == is_real
    call = Call(Op.SEND, GROUP, lambda: None, peer=1)
    parts = [observe.TimedWork.of(Backend([]), tracer, unit, call, 0) for unit in (3, 4)]
    for part in parts:
        blocks.add("0", part)
    work = group._end_coalescing(torch.device("cpu"))
    assert not blocks.has_open("0")
    work.wait()
    assert waits == [3, 4]  # one after the other in both, as they are recorded
    assert said == (["start", "end"] if is_real else [])
    assert inner.num_waits == is_real


def test_what_nccl_gathers_through_is_what_its_handle_gives() -> None:
    outputs = [torch.full((2, 3), float(i)) for i in range(4)]
    gathered = Call(Op.ALL_GATHER, GROUP, lambda: None, outputs=outputs, through_one_tensor=outputs)
    flat = torch.empty(4, 2, 3)
    place_scratch(gathered, [flat])
    assert torch.equal(flat, torch.stack(outputs))
    assert results_of(gathered, [flat])[0] is flat
    assert results_of(gathered, []) is outputs
    scattered = Call(Op.REDUCE_SCATTER, GROUP, lambda: None, outputs=outputs[:1])
    assert results_of(scattered, [flat]) == outputs[:1]
    assert nccl_scratch(gathered, torch.device("meta"))[0].shape == (4, 2, 3)
    assert type(order_of(gathered)) is HostOrder
    assert order_of(gathered).results is outputs
