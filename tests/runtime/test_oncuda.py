"""What can be said of ranks on GPUs without one: device numbers, clocks, accounts, matching, peaks; see test_gpu.py."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from prism_sdk.runtime.oncuda import durations, footprint, peaks  # noqa: E402
from prism_sdk.runtime.oncuda.clock import DeviceClock, Mark  # noqa: E402
from prism_sdk.runtime.oncuda.ledger import Footprint, Ledger  # noqa: E402
from prismtrace import Op  # noqa: E402
from tests.runtime.pretended_gpu import Gpu, entry  # noqa: E402

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
    assert "60.00 GiB, contexts, libraries and other programs take 2.00 GiB, and one more needs 31.00" in str(error)
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


def test_the_recorder_is_asked_before_it_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[dict[str, Any]] = []
    num_asked = [0]

    def last_entries() -> list[dict[str, Any]]:
        num_asked[0] += 1
        return entries[-1024:]

    monkeypatch.setattr(durations, "_entries", last_entries)
    known = durations.Durations()
    for unit in range(3000):  # wanted: none is lost
        entries.append(entry(unit, "all_reduce", float(unit)))
        known.expect(unit, "0", Op.ALL_REDUCE)
    known.collect()
    assert known.known == {unit: unit * 1_000_000 for unit in range(3000)}
    for unit in range(3000, 8000):  # nobody wants to know: nothing piles up, nobody is asked
        entries.append(entry(unit, "all_reduce", 1.0))
        known.expect(unit, "0", Op.ALL_REDUCE, wanted=False)
    assert not any(known._expected.values()) and num_asked == [6]
    entries.append(entry(8000, "all_reduce", 7.0))
    known.expect(8000, "0", Op.ALL_REDUCE)
    known.collect()
    assert known.known[8000] == 7_000_000


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
