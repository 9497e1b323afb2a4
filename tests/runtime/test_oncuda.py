"""What can be said of ranks on GPUs without one: device numbers, clocks, accounts, matching, peaks; see test_gpu.py."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from prism_sdk.errors import UnsupportedError  # noqa: E402
from prism_sdk.runtime import observe  # noqa: E402
from prism_sdk.runtime.calls import Call, GroupState  # noqa: E402
from prism_sdk.runtime.intercept import _refuse_capture  # noqa: E402
from prism_sdk.runtime.observe import ObserveSeam  # noqa: E402
from prism_sdk.runtime.oncuda import clock, durations, footprint, peaks, tracing  # noqa: E402
from prism_sdk.runtime.oncuda.clock import DeviceClock, Mark  # noqa: E402
from prism_sdk.runtime.oncuda.ledger import Footprint, Ledger  # noqa: E402
from prism_sdk.runtime.tracer import open_shard  # noqa: E402
from prismtrace import ABSENT, DType, GraphKind, Op, ProcessGroup, ReduceOp, TraceReader, UnitKind, validate  # noqa: E402

GIB = 1 << 30

DEVICES = """
import torch
from prism_sdk.runtime.oncuda import devices
from torch.nn.parallel import distributed

class Refused(Exception): pass
devices.install(num_logical=4, num_real=2)
assert torch.cuda.device_count() == 4
assert torch.device("cuda:3").index == 1 and torch.device("cuda", 2).index == 0 and torch.device("cuda").index is None
assert torch.device("cpu").type == "cpu" and torch.device("cuda:1").index == 1
assert devices.real(3) == 1 and devices.real("cuda:3") == "cuda:1" and devices.real("cuda") == "cuda"
assert devices.real(-1) == -1 and devices.real(None) is None and devices.real("meta") == "meta"
assert torch._utils._get_device_index(3) == 1 and torch.cuda._utils._get_device_index(torch.device("cuda:3")) == 1
assert distributed._get_device_index(2, True) == 0 and torch.cuda._get_device_index("cuda:3") == 1
assert torch.cuda.device(3).idx == 1
assert torch.zeros(2, device="meta").to("meta").device.type == "meta"  # what is no GPU is left alone
assert torch.zeros(2).to(torch.float64).dtype == torch.float64
assert torch.zeros(2).to("cpu", torch.int32).dtype == torch.int32
seen = []
class Probe(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append((func, args, kwargs))
        if func in (torch.Tensor.cuda, torch.Tensor.to, torch.empty):
            raise Refused
        return func(*args, **(kwargs or {}))
with Probe(), devices.OnRealDevices():
    for call in (
        lambda: torch.zeros(1).cuda(3), lambda: torch.zeros(1).to("cuda:3"), lambda: torch.empty(2, device="cuda:3"),
        lambda: torch.zeros(1).to(device=torch.device("cuda:3")),
    ):
        try:
            call()
        except Refused:
            _, args, kwargs = seen[-1]
            assert args[1:] in ((1,), ("cuda:1",)) or str((kwargs or {}).get("device")) == "cuda:1", (args, kwargs)
        else:
            raise AssertionError("not seen")
print("good")
"""


def test_a_rank_may_name_the_device_that_it_has_in_the_job() -> None:
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


# -- the account of device memory -------------------------------------------------------------------------------------


def note(ledger: Ledger, rank: int, *, reserved: int, held_by_all: int, num_devices: int = 1, device: int = 0) -> None:
    ledger.note(rank, Footprint(device, num_devices, 80 * GIB - held_by_all, 80 * GIB, reserved))


def test_a_rank_that_cannot_fit_is_refused_and_one_that_may_is_not() -> None:
    ledger = Ledger()
    assert ledger.refusal(0) is None  # nothing is known yet
    note(ledger, 0, reserved=30 * GIB, held_by_all=31 * GIB)
    assert ledger.refusal(1) is None
    note(ledger, 1, reserved=30 * GIB, held_by_all=62 * GIB)
    assert ledger.context_bytes(0) == GIB
    error = ledger.refusal(2)
    assert error is not None
    assert (error.rank, error.device, error.free_bytes) == (2, 0, 18 * GIB)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), vars(again), str(again)) == (type(error), vars(error), str(error))
    assert "2 ranks stay on it with 60.00 GiB and a context of 1.00 GiB each" in str(error)
    assert ledger.refusal(1) is None  # it is there already
    ledger.ended(0)
    assert ledger.refusal(2) is None
    assert ledger.ranks_on(0) == [1]


def test_devices_are_accounted_for_apart() -> None:
    ledger = Ledger()
    note(ledger, 0, reserved=70 * GIB, held_by_all=71 * GIB, num_devices=2)
    note(ledger, 1, reserved=2 * GIB, held_by_all=3 * GIB, num_devices=2, device=1)
    assert ledger.refusal(2) is not None
    assert ledger.refusal(3) is None


# -- the clock --------------------------------------------------------------------------------------------------------


class Gpu:
    """A GPU with a clock of its own: events are passed when the queue before them is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ppm: float = 0.0) -> None:
        self.host = time.monotonic_ns() + 10_000_000_000  # after the rank has started
        self.busy: dict[int, int] = defaultdict(int)  # stream -> host time at which what was launched on it is done
        self.ppm = ppm
        self.stream = 0  # address of the stream that is current
        gpu = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.at = -1

            def record(self, stream: Any = None) -> None:
                self.at = max(gpu.host, gpu.busy[gpu.address(stream)])

            def query(self) -> bool:
                return self.at <= gpu.host

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) * (1 + gpu.ppm / 1e6) / 1e6

        class ProgramEvent(Event):
            def record(self, stream: Any = None) -> None:
                super().record(stream)

            def wait(self, stream: Any = None) -> None:
                gpu.busy[gpu.address(stream)] = max(gpu.busy[gpu.address(stream)], self.at)

        self.event = ProgramEvent
        monkeypatch.setattr(torch.cuda, "Event", ProgramEvent)
        monkeypatch.setattr(clock, "Event", Event)
        monkeypatch.setattr(clock, "current_device", lambda: 0)
        monkeypatch.setattr(clock, "current_stream", lambda _device: self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=self.stream))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(clock.time, "monotonic_ns", lambda: self.host)

    def address(self, stream: Any) -> int:
        return self.stream if stream is None else int(stream.cuda_stream)

    @property
    def busy_until(self) -> int:
        return self.busy[self.stream]

    def launch(self, duration: int) -> None:
        self.host += 1_000
        self.busy[self.stream] = max(self.host, self.busy_until) + duration

    def synchronize(self) -> None:
        self.host = max(self.host, *self.busy.values())


@given(
    st.lists(st.integers(1_000, 90_000_000), min_size=1, max_size=60), st.integers(1, 9),
    st.sampled_from([-30.0, 0.0, 30.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_marks_get_the_time_at_which_the_gpu_passed_them(durations_ns: list[int], every: int, ppm: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gpu = Gpu(patch, ppm=ppm)
        dates = DeviceClock()
        marks, truth = [dates.mark()], [gpu.host]
        for index, duration in enumerate(durations_ns):
            gpu.launch(duration)
            marks.append(dates.mark())
            truth.append(max(gpu.host, gpu.busy_until))
            if index % every == 0:
                gpu.synchronize()
                gpu.host += 10_000
                marks.append(dates.mark())  # the GPU is idle, as after a loss was read
                truth.append(gpu.host)
            dates.settle()
        gpu.synchronize()
        dates.settle(wait=True)
        for mark, at in zip(marks, truth, strict=True):
            assert isinstance(mark, Mark)
            assert mark.time_ns is not None
            # between two looks at an idle GPU clocks part by `ppm`
            assert abs(mark.time_ns - at) <= 40_000 + sum(durations_ns) * 100 // 1_000_000


def test_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    dates = DeviceClock()
    for _ in range(1000):
        gpu.launch(1_000_000)
        gpu.synchronize()
        dates.mark()
        dates.settle()
    assert len(dates._spare) < 500


def test_before_the_program_opens_the_gpu_time_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert DeviceClock().mark() == gpu.host
    assert not isinstance(DeviceClock().mark(), Mark)


# -- NCCL's durations -------------------------------------------------------------------------------------------------


def entry(record: int, name: str, milliseconds: float | None = None, group: str = "0") -> dict[str, Any]:
    name = f"nccl:{name}"
    return {"record_id": record, "process_group": (group, "x"), "profiling_name": name, "duration_ms": milliseconds}


def test_durations_go_to_the_units_they_belong_to(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(0, "all_reduce", 1.0, group="7"), entry(1, "_all_gather_base", 2.0)]
    monkeypatch.setattr(durations, "_entries", lambda: entries)
    known = durations.Durations()
    for unit, op in ((5, Op.ALL_GATHER), (6, Op.SEND), (7, Op.RECV), (8, Op.ALL_REDUCE)):
        known.expect(unit, "0", op, in_block=op in (Op.SEND, Op.RECV))
    known.expect(9, "0", Op.ALL_TO_ALL)  # which has no entry, for a reason that nobody knows
    known.expect(10, "0", Op.ALL_GATHER, num_entries=2)
    known.collect()
    assert known.known == {5: 2_000_000}
    # entries of the future, one that nobody asked for, a block whose times are those of its last entry
    entries += [entry(2, "broadcast", 9.0), entry(3, "send 0->1"), entry(4, "recv 0<-1"), entry(5, "coalesced", 3.0)]
    entries += [entry(6, "all_reduce")]
    known.collect()
    assert known.known == {5: 2_000_000, 6: 3_000_000, 7: 3_000_000}
    entries[-1]["duration_ms"] = 4.0
    known.collect()
    assert known.known[8] == 4_000_000
    entries += [entry(7, "_all_gather_base"), entry(8, "_all_gather_base"), entry(9, "coalesced", 5.0)]
    known.collect()
    assert known.known[10] == 5_000_000
    assert 9 not in known.known


# -- rows -------------------------------------------------------------------------------------------------------------

GROUP = GroupState(name="0", ranks=(0, 1), group_rank=0, backend="nccl", description="", group_id=77)


@pytest.fixture
def observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Gpu, tracing.DeviceTracer, list[dict[str, Any]], Callable[[], Any]]:
    gpu = Gpu(monkeypatch)
    entries: list[dict[str, Any]] = []
    monkeypatch.setattr(durations, "_entries", lambda: entries)
    monkeypatch.setattr(tracing, "PeakMeter", lambda: SimpleNamespace(take=lambda: (gpu.host % 1000 + 5, 9)))
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
    assert steps.columns()[tracing.RESERVED_COLUMN].tolist() == [9]


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


# -- peaks ------------------------------------------------------------------------------------------------------------


def test_the_program_reads_its_own_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"current": 5, "peak": 9}

    def read(_device: int) -> dict[str, Any]:
        return {name: {"all": dict(state)} for name in ("allocated_bytes", "reserved_bytes")}

    monkeypatch.setattr(torch._C, "_cuda_memoryStats", read, raising=False)
    def reset(_device: int) -> None:
        state["peak"] = state["current"]

    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", reset, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    meter = peaks.PeakMeter()
    program: Any = torch._C
    assert meter.take() == (9, 9)
    state["peak"] = 7
    assert program._cuda_memoryStats(0)["allocated_bytes"]["all"] == {"current": 5, "peak": 9}
    assert meter.take() == (7, 7)
    state["peak"] = 8
    program._cuda_resetPeakMemoryStats(0)  # the program's business: the step keeps its peak
    assert program._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"] == 5
    assert meter.take() == (8, 8)


def test_running_out_of_memory_is_prisms_business_only_where_others_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(footprint, "footprint", lambda: Footprint(0, 1, GIB, 80 * GIB, 20 * GIB))
    error = footprint.out_of_memory(torch.OutOfMemoryError("CUDA out of memory"), 3)
    assert error is not None
    assert "it holds 20.00 GiB, the other ranks and all contexts 59.00 GiB" in str(error)
    monkeypatch.setattr(footprint, "footprint", lambda: Footprint(0, 1, GIB, 80 * GIB, 78 * GIB))
    assert footprint.out_of_memory(torch.OutOfMemoryError("CUDA out of memory"), 3) is None
    assert footprint.out_of_memory(ValueError("no"), 3) is None
