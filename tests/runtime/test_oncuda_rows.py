"""Rows of a rank on a GPU without one: whose times, whose waits, what is captured; see test_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from prism_sdk.errors import UnsupportedError  # noqa: E402
from prism_sdk.runtime import observe  # noqa: E402
from prism_sdk.runtime.calls import Call, GroupState  # noqa: E402
from prism_sdk.runtime.intercept import _refuse_capture  # noqa: E402
from prism_sdk.runtime.observe import ObserveSeam  # noqa: E402
from prism_sdk.runtime.oncuda import clock, durations, metering, tracing  # noqa: E402
from prism_sdk.runtime.oncuda.clock import Mark  # noqa: E402
from prism_sdk.runtime.tracer import open_shard  # noqa: E402
from prismtrace import ABSENT, DType, GraphKind, Op, ProcessGroup, ReduceOp, TraceReader, UnitKind, validate  # noqa: E402
from tests.runtime.pretended_gpu import Gpu, entry  # noqa: E402

GROUP = GroupState(name="0", ranks=(0, 1), group_rank=0, backend="nccl", description="", group_id=77)


@pytest.fixture
def observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Gpu, tracing.DeviceTracer, list[dict[str, Any]], Callable[[], Any]]:
    gpu = Gpu(monkeypatch)
    entries: list[dict[str, Any]] = []
    monkeypatch.setattr(durations, "_entries", lambda: entries)
    monkeypatch.setattr(metering, "PeakMeter", lambda: SimpleNamespace(take=lambda: (gpu.host % 1000 + 5, 9)))
    tracer = tracing.DeviceTracer(0, open_shard(tmp_path, 0, GraphKind.OBSERVED, 2, {}))
    tracer.add_group(ProcessGroup(group_id=77, name="0", description="", backend="nccl", ranks=(0, 1)))

    def read() -> Any:
        gpu.synchronize()
        tracer.finish("complete")
        path = tmp_path / "rank-00000.prism"
        assert [finding for finding in validate(path) if finding.severity == "error"] == []
        with TraceReader(path) as reader:
            return reader.units(0), reader.steps(0)

    return gpu, tracer, entries, read


def test_a_collective_beside_computation_has_its_own_times(observed: Any) -> None:
    gpu, tracer, entries, read = observed
    begin = tracer.now()
    gpu.launch(3_000_000)  # forward
    tracer.backward_begins([1.0])
    gpu.launch(5_000_000)
    call = Call(Op.ALL_REDUCE, GROUP, lambda: None, is_async=True, reduce_op=ReduceOp.SUM, dtype=DType.FLOAT32)
    posted = tracer.now()
    unit = tracer.communication(call, posted, 0)
    tracer.runs(unit, call, in_block=False)
    entries.append(entry(0, "all_reduce", 4.0))
    gpu.launch(10_000_000)  # more of backward, on the program's stream
    start = tracer.now()
    tracer.wait(unit, start, tracer.now(), blocked=False)
    tracer.backward_ends()
    tracer.optimizer_begins()
    gpu.launch(1_000_000)
    tracer.optimizer_ends()
    assert gpu.host - int(begin) < 1_000_000  # the host was ahead all the time
    units, steps = read()
    one = units.kind.tolist().index(UnitKind.COLLECTIVE)
    origin = int(begin)
    assert units.start_ns[one] - origin == pytest.approx(8_000_000, abs=10_000)
    assert units.end_ns[one] - units.start_ns[one] == 4_000_000
    computing = units.kind == UnitKind.COMPUTE
    lengths = sorted((units.end_ns - units.start_ns)[computing].tolist())  # the longest is what came before the GPU
    assert lengths[-2] == pytest.approx(10_000_000, abs=10_000)
    assert steps.end_ns[0] - origin == pytest.approx(19_000_000, abs=20_000)
    assert steps.memory_peak_bytes.tolist() != [ABSENT]
    assert steps.columns()[metering.RESERVED_COLUMN].tolist() == [9]


def test_a_recorded_step_has_the_peak_of_device_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host holds meanwhile is Prism's own affair, and many times that."""
    Gpu(monkeypatch)
    peaks = iter([(700, 900), (650, 900), (800, 1000)])
    monkeypatch.setattr(metering, "PeakMeter", lambda: SimpleNamespace(take=lambda: next(peaks)))
    tracer = metering.MeteredTracer(0, open_shard(tmp_path, 0, GraphKind.BARE, 1, {}))
    for num_parts in (1, 2):  # an optimizer in two parts: one step
        tracer.backward_begins([])
        tracer.backward_ends()
        for _ in range(num_parts):
            tracer.optimizer_begins()
            tracer.optimizer_ends()
    tracer.finish("complete")
    with TraceReader(tmp_path / "rank-00000.prism") as reader:
        steps, units = reader.steps(0), reader.units(0)
    assert steps.memory_peak_bytes.tolist() == [700, 800]
    assert steps.columns()[metering.RESERVED_COLUMN].tolist() == [900, 1000]
    assert set(units.memory_bytes.tolist()) == {ABSENT}


def test_a_stream_that_is_held_up_says_when_a_communication_ended(observed: Any) -> None:
    gpu, tracer, _, read = observed
    tracer.now()
    call = Call(Op.ALL_REDUCE, GROUP, lambda: None, is_async=True, reduce_op=ReduceOp.SUM, dtype=DType.FLOAT32)
    unit = tracer.communication(call, tracer.now(), 0)
    tracer._beside.add(unit)  # NCCL's recorder knows nothing of it
    start = tracer.now()
    gpu.launch(2_000_000)  # stands for the stream that waits
    tracer.wait(unit, start, tracer.now(), blocked=False)
    units, _ = read()
    one = units.kind.tolist().index(UnitKind.COLLECTIVE)
    assert units.end_ns[one] - units.start_ns[one] == pytest.approx(2_000_000, abs=20_000)


def test_a_stream_of_the_programs_own_holds_up_nobody_before_the_main_one_waits_for_it(observed: Any) -> None:
    """As FSDP2 does it: a synchronous gather on a side stream, an event behind it, a wait for that later."""
    gpu, tracer, _, read = observed
    seam = ObserveSeam(tracer)
    side = SimpleNamespace(cuda_stream=7)
    begin = int(tracer.now())
    gpu.launch(2_000_000)

    def gather() -> None:
        gpu.launch(9_000_000)

    waits = []
    for seq in range(2):
        gpu.stream, tensor = 7, torch.empty(8)
        call = Call(Op.ALL_GATHER, GROUP, gather, is_async=False, dtype=DType.FLOAT32, outputs=[tensor])
        with pytest.MonkeyPatch.context() as patch:
            for module in (observe, tracing):
                patch.setattr(module, "device_of", lambda _call: torch.device("cuda"))
            assert seam.issue(call) is None
        event = gpu.event()
        event.record(side)
        gpu.stream = 0
        gpu.launch(4_000_000)
        if seq == 0:
            other = gpu.event()
            event.wait(SimpleNamespace(cuda_stream=8))  # a third stream passes it on
            other.record(SimpleNamespace(cuda_stream=8))
            event = other
        waits.append(event)
    waits[0].wait()
    gpu.launch(1_000_000)
    waits[1].wait(SimpleNamespace(cuda_stream=0))
    waits[1].wait()  # is there already
    gpu.launch(3_000_000)
    tracer.now()
    units, _ = read()
    start, end, kind = (np.asarray(column) for column in (units.start_ns - begin, units.end_ns - begin, units.kind))
    one, two = np.flatnonzero(kind == UnitKind.COLLECTIVE)
    assert [start[one], end[one], end[two]] == pytest.approx([0, 9_000_000, 18_000_000], abs=30_000)
    assert units.is_async[[one, two]].all()
    held = np.flatnonzero(kind == UnitKind.WAIT)
    assert units.awaits[held].tolist() == [one, two]
    # the main stream computed for 10 ms when it came to the first wait, which was over, then for 1 ms
    assert (end - start)[held] == pytest.approx([0, 7_000_000], abs=30_000)
    computing = (kind == UnitKind.COMPUTE) & (start >= 0)
    assert int((end - start)[computing].sum()) == pytest.approx(12_000_000, abs=50_000)  # all but the first 2 ms


def test_what_is_captured_is_a_unit_and_gets_no_event(observed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, tracer, _, read = observed
    before = tracer.now()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        call = Call(Op.ALL_REDUCE, GROUP, lambda: None, is_async=False, dtype=DType.FLOAT32)
        gpu.host += 1_000
        tracer.wait(tracer.communication(call, tracer.now(), 0), tracer.now(), tracer.now(), blocked=True)
        tracer.runs(0, call, in_block=False)
        tracer.flush(everything=False)
        assert not isinstance(tracer.now(), Mark)
        with pytest.raises(UnsupportedError, match="allreduce while a CUDA graph is captured"):
            _refuse_capture("allreduce_")
    _refuse_capture("allreduce_")
    gpu.launch(1_000_000)
    after = tracer.now()
    units, _ = read()
    assert isinstance(before, Mark) and isinstance(after, Mark)
    assert (units.kind == UnitKind.COLLECTIVE).sum() == 1 and not tracer._durations._expected


def test_a_gpu_that_hangs_loses_nothing_that_it_has_passed(
    observed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu, tracer, _, _ = observed
    monkeypatch.setattr(tracing, "_HUNG_S", 0.05)
    monkeypatch.setattr(gpu, "synchronize", lambda: pytest.fail("waits for ever"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: gpu.synchronize())
    for _ in range(2):
        tracer.now()
        gpu.launch(3_000_000)
        tracer.backward_begins([LateLoss(gpu)])
        tracer.optimizer_begins()
        tracer.optimizer_ends()
        gpu.host = gpu.busy_until
    tracer.backward_begins([])  # the third step waits for a rank that is gone
    gpu.launch(10**18)
    tracer.optimizer_begins()
    tracer.finish("aborted")
    with TraceReader(tmp_path / "rank-00000.prism") as reader:
        units, steps = reader.units(0), reader.steps(0)
    assert steps.loss[:2].tolist() == [7.0, 7.0]
    longest = np.sort(units.end_ns - units.start_ns)[-2]  # but for the one that began before the GPU was opened
    assert longest == pytest.approx(3_000_000, abs=20_000)
    assert np.diff(steps.end_ns[:2]).tolist() == pytest.approx([3_000_000], abs=20_000)


class LateLoss:
    """A loss that is there when the GPU has done what it has got so far."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._at = gpu, gpu.busy_until

    def is_there(self) -> bool:
        return self._gpu.host >= self._at

    def __call__(self) -> float:
        assert self.is_there()
        return 7.0


def test_a_gpu_that_has_failed_loses_nothing_that_was_known(
    observed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu, tracer, _, _ = observed
    gpu.launch(3_000_000)
    tracer.backward_begins([1.0])
    tracer.optimizer_begins()
    tracer.optimizer_ends()
    tracer.backward_begins([2.0])

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("record", "query"):
        monkeypatch.setattr(clock.Event, name, fails)
    for name in ("synchronize", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, fails)
    tracer.finish("failed")
    with TraceReader(tmp_path / "rank-00000.prism") as reader:
        assert reader.steps(0).loss.tolist()[0] == 1.0 and len(reader.units(0))
        assert reader.metadata["rank.0.status"] == "failed"


def test_who_waits_for_the_future_does_not_wait_for_the_handle(observed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's handle lets go of its tensors when it is waited for; its future does not, and DDP waits for futures."""
    gpu, tracer, _, read = observed
    monkeypatch.setattr(observe, "device_of", lambda _call: torch.device("cuda"))
    waits: list[str] = []

    class Inner:
        def wait(self) -> bool:
            waits.append("handle")
            return True

        def is_completed(self) -> bool:
            return True

        def get_future(self) -> Any:
            future: torch.futures.Future[list[Any]] = torch.futures.Future()
            future.add_done_callback(lambda _: waits.append("future"))
            future.set_result([])
            return future

    handles = []
    for seq, asks_future in enumerate((True, False)):
        call = Call(Op.ALL_REDUCE, GROUP, Inner, is_async=True, reduce_op=ReduceOp.SUM, dtype=DType.FLOAT32)
        work = ObserveSeam(tracer).issue(call)
        gpu.launch(1_000_000)
        if asks_future:
            work.get_future().wait()
            assert waits == ["future"]
        else:
            work.wait()
            assert waits == ["future", "handle"]
        handles.append((seq, work))
    handles[0][1].wait()  # the program may do both, from another stream too
    assert waits == ["future", "handle", "handle"]
    units, _ = read()
    assert (units.kind == UnitKind.WAIT).sum() == 2
