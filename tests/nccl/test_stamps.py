"""Stamps that NCCL reads from the wrong slot: proven wrong, put back, or left out; the clock is right in any case.

A small NCCL is played: works are numbered on each channel by the GPU, and by the host without messages to oneself; both
use 64 slots a channel, as src/device/common.h and src/transport/profiler.cc of NCCL 2.28 do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_recordwriter import RecordWriter

from prism_sdk.nccl.job import NcclJob, load_job
from prism_sdk.nccl.stamps import make_ceiling
from prismtrace import ABSENT

UUID = b"0123456789abcdef"
NUM_CHANNELS = 4
SLOTS = 64


@dataclass
class Gpu:
    """One communicator of two ranks seen from rank 0; times are the host's, `offset_ns` leads to the GPU's."""

    rng: np.random.Generator
    offset_ns: int
    drift: float
    now_ns: int = 10_000_000_000
    free_ns: int = 0
    written: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    device_number: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    host_number: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    truth: list[tuple[int, int]] = field(default_factory=list)

    def gpu(self, host_ns: int) -> int:
        return host_ns - self.offset_ns - round((host_ns - 10**10) * self.drift)

    def launch(self, launched_ns: int) -> tuple[int, int]:
        """When the next kernel of the stream runs."""
        begin = max(launched_ns + 3000 + int(self.rng.exponential(3000)), self.free_ns + 500)
        end = begin + 2000 + int(self.rng.exponential(20_000))
        self.free_ns = end
        return begin, end

    def work(self, channel: int, begin: int, end: int, *, counted: bool) -> int:
        """The GPU numbers a work and writes its stamps; the host's number, 0 if it counts none."""
        self.device_number[channel] += 1
        number = self.device_number[channel]
        self.written[channel, number % SLOTS].append((number, begin, end))
        if not counted:
            return 0
        self.host_number[channel] += 1
        return self.host_number[channel]

    def read(self, channel: int, number: int, launched_ns: int) -> tuple[int, int, int]:
        """What the host finds for its number, and when: the slot's last content once that is as new as the number."""
        told = launched_ns + 4000 + int(self.rng.exponential(1000))
        slot = [work for work in self.written[channel, number % SLOTS] if work[0] >= number]
        told = max(told, slot[0][2] + 200 + int(self.rng.exponential(1500)))
        _, begin, end = [work for work in slot if work[2] <= told][-1]
        return begin, end, told


def played(path: Path, *, seed: int, num: int, wait: float, offset_ns: int, drift: float, to_itself: float) -> Gpu:
    """Write a file of `num` launches; the host waits after each with probability `wait`."""
    rng = np.random.default_rng(seed)
    gpu, writer = Gpu(rng, offset_ns, drift), RecordWriter()
    comm = writer.comm(1, 99, ranks=2, rank=0, uuid=UUID)
    later: list[tuple[int, int, int, int]] = []
    threshold = sorted(int(size) for size in rng.integers(1, 8000, NUM_CHANNELS - 1))
    for seq in range(num):
        at = gpu.now_ns
        api = writer.start(8, comm, at)
        writer.stop(writer.start(11, comm, at, parent=api, more=(0, 0, 0)), at + 10)
        group = writer.start(0, comm, at + 20)
        begin, end = gpu.launch(at)
        if rng.random() < to_itself:
            size = int(rng.integers(1, 2000))
            for func in ("Send", "Recv"):
                call = writer.task(10, comm, at, func, size, parent=api, algo="", proto="")
                writer.task(2, comm, at + 20, func, size, parent=call, group=group, peer=0, algo="", proto="")
            used = sum(size * 4 >= least for least in [0, *threshold])  # larger messages use more channels
            for channel in range(used):
                gpu.work(channel, begin, end, counted=False)
            numbers = [gpu.work(NUM_CHANNELS + channel, begin, end, counted=True) for channel in range(used)]
            for func in ("Send", "Recv"):
                call = writer.task(10, comm, at, func, size, parent=api, algo="", proto="")
                task = writer.task(2, comm, at + 20, func, size, parent=call, group=group, peer=1, algo="", proto="")
                later += [(task, NUM_CHANNELS + channel, number, at) for channel, number in enumerate(numbers)]
        else:
            call = writer.task(9, comm, at, "AllReduce", 100 + seq, parent=api, algo="", proto="")
            channels = int(rng.integers(1, 2 * NUM_CHANNELS + 1))
            task = writer.task(1, comm, at + 20, "AllReduce", 100 + seq, parent=call, group=group, seq=seq,
                               channels=channels)  # fmt: skip
            gpu.truth.append((begin, end))
            for channel in range(channels):
                number = gpu.work(channel, begin, end, counted=True)
                later.append((task, channel, number, at))
        gpu.now_ns = at + 5000 + int(rng.exponential(10_000))
        if rng.random() < wait:
            gpu.now_ns = max(gpu.now_ns, gpu.free_ns + 5000)
    for task, channel, number, at in later:
        begin, end, told = gpu.read(channel, number, at)
        writer.kernel(comm, task, (gpu.gpu(begin), gpu.gpu(end)), told, channel=channel)
    writer.write(path)
    return gpu


def wrong(job: NcclJob, gpu: Gpu) -> tuple[int, int]:
    """(tasks whose stamps are another's, tasks without stamps)."""
    (one,) = job.ranks
    truth = np.array([gpu.gpu(begin) for begin, _ in gpu.truth])
    tasks = ~one.tasks.is_message
    start = one.tasks.gpu_start_ns[tasks]
    known = start != ABSENT
    return int(np.count_nonzero(start[known] != truth[known])), int(np.count_nonzero(~known))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), num=st.integers(20, 400), to_itself=st.sampled_from([0.0, 0.05, 0.4]),
    offset_ns=st.integers(-(10**15), 10**9), drift_ppm=st.floats(-50, 50),
)  # fmt: skip
def test_each_kernel_gets_its_own_stamps_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num: int, to_itself: float, offset_ns: int, drift_ppm: float
) -> None:
    path = tmp_path_factory.mktemp("played") / "x.ncclrec"
    gpu = played(path, seed=seed, num=num, wait=1.0, offset_ns=offset_ns, drift=drift_ppm * 1e-6, to_itself=to_itself)
    job = load_job([path])
    if not job.num_tasks or not gpu.truth:
        return
    num_wrong, num_absent = wrong(job, gpu)
    assert num_wrong == 0
    # what stood under later events that never came
    num_hidden = max((gpu.device_number[c] - gpu.host_number[c] for c in range(NUM_CHANNELS)), default=0)
    assert num_absent <= min(num_hidden, SLOTS)
    for fit in job.clocks.values():
        assert fit.num_violations == 0 and fit.uncertainty_ns is not None
        tasks = job.ranks[0].tasks
        known = (tasks.kernel_start_ns != ABSENT) & ~tasks.is_message
        truth = np.array([begin for begin, _ in gpu.truth])[known[~tasks.is_message]]
        assert np.abs(tasks.kernel_start_ns[known] - truth).max(initial=0) <= fit.uncertainty_ns + 3


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), to_itself=st.sampled_from([0.05, 0.4]), wait=st.sampled_from([0.1, 0.5]))
def test_each_kernel_gets_its_own_stamps_from_a_gpu_that_falls_behind(
    tmp_path_factory: pytest.TempPathFactory, seed: int, to_itself: float, wait: float
) -> None:
    path = tmp_path_factory.mktemp("played") / "x.ncclrec"
    gpu = played(path, seed=seed, num=300, wait=wait, offset_ns=77, drift=1e-6, to_itself=to_itself)
    job = load_job([path])
    assert wrong(job, gpu)[0] == 0
    assert all(fit.num_violations == 0 for fit in job.clocks.values())


def test_a_gap_in_the_records_leaves_out_what_is_proven_wrong(tmp_path: Path) -> None:
    gpu = played(tmp_path / "x.ncclrec", seed=3, num=120, wait=1.0, offset_ns=0, drift=0.0, to_itself=0.1)
    data = bytearray((tmp_path / "x.ncclrec").read_bytes())
    data[52:56] = (10).to_bytes(4, "little")  # as with PRISM_NCCL_SAMPLE=10
    (tmp_path / "sampled.ncclrec").write_bytes(data)
    job = load_job([tmp_path / "sampled.ncclrec"])
    assert job.ranks[0].file.sample_every == 10
    num_wrong, num_absent = wrong(job, gpu)
    assert num_wrong == 0 and num_absent > 20
    assert job.ranks[0].stamps.num_moved == 0 and job.ranks[0].stamps.num_dropped > 50
    assert any("left out" in text for text in job.notes())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), drift_ppm=st.floats(-90, 90), span_s=st.sampled_from([0.01, 3.0, 600.0]))
def test_the_ceiling_is_never_below_the_clock(seed: int, drift_ppm: float, span_s: float) -> None:
    rng = np.random.default_rng(seed)
    at = np.sort(rng.uniform(0, span_s * 1e9, 200)).astype(np.int64)
    offset = np.rint(at * drift_ppm * 1e-6).astype(np.int64) + 10**9
    heard = rng.random(200) < 0.3
    heard[0] = True
    ceiling = make_ceiling(at[heard], at[heard] + offset[heard] + rng.integers(200, 10**6, np.count_nonzero(heard)))
    assert not ceiling.exceeded_by(at, at + offset).any()
    # and a time that the host cannot have launched at is above it
    assert ceiling.exceeded_by(at, at + offset + 10**6 + round(span_s * 1e9 * 2e-4) + 2000).all()
