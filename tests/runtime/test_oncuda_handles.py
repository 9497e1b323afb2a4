"""Handles of operations on GPUs, without one: whose stream waits, and what they keep alive."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prism_sdk.runtime import coalescing, observe  # noqa: E402
from prism_sdk.runtime.calls import Call, GroupState  # noqa: E402
from prism_sdk.runtime.oncuda.order import HostOrder, order_of  # noqa: E402
from prism_sdk.runtime.oncuda.scratch import nccl_scratch, place_scratch, results_of  # noqa: E402
from prism_sdk.runtime.tracer import Tracer, open_shard  # noqa: E402
from prism_sdk.runtime.work import outstanding_works  # noqa: E402
from prismtrace import DType, GraphKind, Op, ProcessGroup, TraceReader, UnitKind  # noqa: E402

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
    block = coalescing.TimedBlock(inner, tracer, [coalescing.Part(part.unit, part) for part in parts])
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
        assert blocks.add("0", part.unit, work=part) == is_real
    work = group._end_coalescing(torch.device("cpu"))
    assert not blocks.has_open("0")
    work.wait()
    assert waits == [3, 4]  # one after the other in both, as they are recorded
    assert said == (["start", "end"] if is_real else [])
    assert inner.num_waits == is_real


class Blocky:
    """A process group whose backend gives one handle for a block, or none where it is not asynchronous."""

    group_name = "0"
    handle: Any = None

    def _start_coalescing(self, device: Any) -> None:
        pass

    def _end_coalescing(self, device: Any) -> Any:
        return self.handle


@pytest.mark.parametrize("is_async", [True, False])
def test_messages_without_handles_are_waited_for_with_their_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_async: bool
) -> None:
    """NCCL's backend gives none within a block: what came in between the messages and the wait is no part of them."""
    monkeypatch.setattr(coalescing.dist, "ProcessGroup", Blocky)
    tracer = Tracer(0, open_shard(tmp_path, 0, GraphKind.OBSERVED, 2, {}))
    tracer.add_group(ProcessGroup(group_id=77, name="0", description="", backend="nccl", ranks=(0, 1)))
    seam = observe.ObserveSeam(tracer)
    seam._blocks.install()
    group: Any = Blocky()
    group.handle = Backend([]) if is_async else None
    group._start_coalescing(torch.device("cpu"))
    for op in (Op.SEND, Op.RECV):
        assert seam.issue(Call(op, GROUP, lambda: None, peer=1, is_async=True, dtype=DType.FLOAT32)) is None
    time.sleep(0.01)
    work = group._end_coalescing(torch.device("cpu"))
    if work is not None:
        time.sleep(0.01)
        work.wait()
    tracer.finish("complete")
    with TraceReader(tmp_path / "rank-00000.prism") as reader:
        units = reader.units(0)
    kinds = [UnitKind(kind) for kind in units.kind]
    waits = [index for index, kind in enumerate(kinds) if kind is UnitKind.WAIT]
    posts = [kinds.index(UnitKind.SEND), kinds.index(UnitKind.RECV)]
    assert [int(units.awaits[index]) for index in waits] == posts
    assert min(waits) > max(posts)
    between = units.start_ns[waits[0]] - units.start_ns[posts[1]]
    assert between > (20_000_000 if is_async else 10_000_000)


def test_a_block_on_a_stream_beside_ends_there() -> None:
    said: list[tuple[int, str]] = []
    tracer: Any = SimpleNamespace(now=time.monotonic_ns, ends_beside=lambda unit, mark: said.append((unit, mark)))
    blocks = coalescing.Blocks(tracer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalescing.dist, "ProcessGroup", Blocky)
        blocks.install()
        group: Any = Blocky()
        group._start_coalescing(torch.device("cpu"))
        assert blocks.add("0", 5, beside="mark") and not blocks.add("1", 6)
        assert group._end_coalescing(torch.device("cpu")) is None
    assert said == [(5, "mark")]


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
