"""Operations on a device: values from the pool, the order of what a stream is told, and what is handed back.

The device is one that does everything at once on the CPU, and blocks whoever tells it to wait; the releaser is real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from prism_sdk.errors import UnsupportedError  # noqa: E402
from prism_sdk.graph.plan import START, BoundaryPlan, Stream  # noqa: E402
from prism_sdk.runtime.calls import Call, GroupState  # noqa: E402
from prism_sdk.runtime.engine import BoundaryEngine  # noqa: E402
from prism_sdk.runtime.manifest import OWN, Expected, Script  # noqa: E402
from prism_sdk.runtime.oncuda import holding, occupying  # noqa: E402
from prism_sdk.runtime.oncuda.clock import Mark  # noqa: E402
from prism_sdk.runtime.oncuda.holdtable import HoldTable, create_table  # noqa: E402
from prism_sdk.runtime.oncuda.occupying import HoldKernel  # noqa: E402
from prism_sdk.runtime.oncuda.releaser import MAX_LEAD_NS, Releaser  # noqa: E402
from prism_sdk.runtime.operators import OPERATORS  # noqa: E402
from prism_sdk.runtime.prefetch import Consumer, Item, PayloadSequence, Ring, create_ring  # noqa: E402
from prismtrace import GraphKind, TraceReader, TraceWriter, UnitKind  # noqa: E402
from tests.runtime.played_gpu import Device, Queue, memory_at  # noqa: E402

pytestmark = pytest.mark.timeout(60)
SIZE, ME = 3, 1
TRANSFER_NS = 200_000
GROUP = GroupState(name="0", ranks=(0, 1, 2), group_rank=ME, backend="nccl", description="", group_id=77)


class Reduce:
    """An operator's reduction as the dispatcher boxes it."""

    def __init__(self, op: int) -> None:
        self._op = op

    def op(self) -> int:
        return self._op


SUM, AVG, MAX = Reduce(0), Reduce(1), Reduce(4)


class Job:
    """A few operations of one rank, their payloads, and the trace that they are read from."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "values.prism"
        self._writer = TraceWriter(self.path, graph_kind=GraphKind.BARE, world_size=SIZE)
        self.items: list[Item] = []
        self.expected: list[Expected] = []
        self.calls: list[Call] = []

    def add(self, name: str, args: tuple[Any, ...], given: dict[int, bytes], **facts: Any) -> Call:
        """`given`: payload by source."""
        call = OPERATORS[name](GROUP, lambda: None, args)
        first = len(self.items)
        for blob in given.values():
            self.items.append(Item(self._writer.add_payload(blob), len(blob)))
        self.expected.append(Expected(
            len(self.expected), 0, call.op, call.reduce_op, call.dtype, GROUP.group_id, GROUP.ranks, len(self.expected),
            None, 0, call.num_elements_in, call.num_elements_out, Stream(int(UnitKind.COLLECTIVE), GROUP.group_id),
            sources=tuple(given), first_item=first, **facts,
        ))  # fmt: skip
        self.calls.append(call)
        return call

    def script(self) -> Script:
        self._writer.close()
        sequence = PayloadSequence(tuple(self.items), len(self.items))
        return Script(ME, tuple(self.expected), 0, len(self.expected), 0, sequence, True)

    def plan(self) -> BoundaryPlan:
        num = len(self.expected)
        many = np.arange(num)

        def full(value: int, dtype: type) -> Any:
            return np.full(num, value, dtype=dtype)

        return BoundaryPlan(
            world_size=SIZE, sandbox_ranks=(ME,), period_ns=1, last_step=0, kind=full(UnitKind.COLLECTIVE, np.uint8),
            group_id=full(GROUP.group_id, np.uint64), source_rank=full(np.iinfo(np.int32).min, np.int32),
            destination_rank=full(np.iinfo(np.int32).min, np.int32), tag=full(np.iinfo(np.int64).min, np.int64),
            seq=many.astype(np.int64), step=full(0, np.int32), term_offsets=np.arange(num + 1),
            term_source=full(START, np.int32), term_weight_ns=full(0, np.int64), member_offsets=np.arange(num + 1),
            member_rank=full(ME, np.int32), member_transfer_ns=full(TRANSFER_NS, np.int64),
        )  # fmt: skip


def fill_ring(fd: int, script: Script, path: Path, *, capacity: int) -> None:
    """What the assistant does, for a ring that holds everything."""
    ring, offset = Ring(fd), 0
    with TraceReader(path) as reader:
        for index, item in enumerate(script.sequence.items):
            if item.num_bytes > capacity:
                ring.set_entry(index, -1, 0)
                continue
            if item.num_bytes:
                reader.read_payload_into(item.digest, ring.data(offset, item.num_bytes))
            ring.set_entry(index, offset, item.num_bytes)
            offset += item.num_bytes
    ring.produced = len(script.sequence.items)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def tensor(*values: float) -> Any:
    return torch.tensor(values, dtype=torch.float32)


def operations(job: Job) -> list[tuple[Call, list[list[float]]]]:
    """Operations with what their outputs must be."""
    wanted: list[tuple[Call, list[list[float]]]] = []

    def expect(call: Call, *outputs: list[float]) -> None:
        wanted.append((call, list(outputs)))

    x = tensor(1, 2, 3)
    expect(job.add("allreduce_", ([x], None, SUM), {-1: floats(10, 20, 30), OWN: floats(1, 2, 3)}), [10, 20, 30])
    x = tensor(1, 5, 3)  # the second element is not what it was
    expect(job.add("allreduce_", ([x], None, SUM), {-1: floats(10, 20, 30), OWN: floats(1, 2, 3)}), [10, 23, 30])
    x = tensor(1, 5, 3)
    expect(job.add("allreduce_", ([x], None, AVG), {-1: floats(10, 20, 30), OWN: floats(1, 2, 3)}), [10, 21, 30])
    x = tensor(1, 50, 3)
    expect(job.add("allreduce_", ([x], None, MAX), {-1: floats(10, 20, 30), OWN: floats(1, 2, 3)}), [10, 50, 30])
    x = tensor(float("inf"), 2)
    given = {-1: floats(float("inf"), -0.0), OWN: floats(float("inf"), 2)}
    expect(job.add("allreduce_", ([x], None, SUM), given), [float("inf"), -0.0])
    pair = [tensor(1, 2), tensor(3)]
    given = {-1: floats(10, 20, 30), OWN: floats(1, 1, 3)}
    expect(job.add("allreduce_coalesced_", (pair, None, SUM), given), [10, 21], [30])
    out = tensor(0, 0)
    source = tensor(0, 0, 1, 2, 0, 0)
    given = {-1: floats(7, 8), OWN: floats(9, 9, 1, 1, 9, 9)}
    expect(job.add("_reduce_scatter_base_", (out, source, None, SUM), given), [7, 9])
    parts = [tensor(0, 0, 0), tensor(5), tensor(0, 0, 0, 0)]  # uneven
    out, given = tensor(0), {-1: floats(7), OWN: floats(9, 9, 9, 1, 9, 9, 9, 9)}
    expect(job.add("reduce_scatter_", ([out], [parts], None, SUM), given), [11])
    lone = torch.zeros(2)[::2]  # contiguous, with a stride
    expect(job.add("allreduce_", ([lone], None, SUM), {-1: floats(10), OWN: floats(1)}), [9])
    lone = torch.zeros(2)[::2]
    expect(job.add("broadcast_", ([lone], None, 0, 0), {0: floats(8)}), [8])
    out = torch.zeros(6)
    out[2:4] = tensor(3, 4)
    expect(job.add("_allgather_base_", (out, out[2:4]), {0: floats(1, 2), 2: floats(5, 6)}), [1, 2, 3, 4, 5, 6])
    outs = [torch.zeros(2) for _ in range(SIZE)]
    expect(job.add("allgather_", ([outs], [tensor(3, 4)]), {0: floats(1, 2), 2: floats(5, 6)}), [1, 2], [3, 4], [5, 6])
    x = torch.zeros(2)
    expect(job.add("broadcast_", ([x], None, 0, 0), {0: floats(8, 9)}), [8, 9])
    wide = torch.zeros(2, 2).t()  # not contiguous
    expect(job.add("broadcast_", ([wide], None, 0, 0), {0: floats(1, 2, 3, 4)}), [1, 2, 3, 4])
    out = torch.zeros(4)
    given = {0: floats(9, 1, 9), 2: floats(9, 9, 4)}
    call = job.add("alltoall_base_", (out, tensor(0, 5, 6, 7), None, [1, 2, 1], [1, 2, 1]), given,
                   send_bytes={0: (4, 4, 4), 2: (4, 4, 4)})  # fmt: skip
    expect(call, [1, 5, 6, 9])
    # routed otherwise than then: what the others gave for this rank is cut, or repeated, and what was for others is not
    out = torch.zeros(7)
    given = {0: floats(9, 1, 2, 9), 2: floats(9, 4, 5, 6, 9)}
    call = job.add("alltoall_base_", (out, tensor(0, 5, 6, 7), None, [3, 2, 2], [1, 2, 1]), given,
                   send_bytes={0: (4, 8, 4), 2: (4, 12, 4)})  # fmt: skip
    expect(call, [1, 2, 1, 5, 6, 4, 5])
    out = torch.ones(4)
    call = job.add("alltoall_base_", (out, tensor(5, 6), None, [1, 2, 1], [0, 2, 0]), {0: floats(9, 9), 2: floats(3)},
                   send_bytes={0: (4, 0, 4), 2: (0, 4, 0)})  # fmt: skip
    expect(call, [0, 5, 6, 3])
    x = torch.zeros(2)
    expect(job.add("scatter_", ([x], [], None, 0), {0: floats(0, 0, 3, 4, 0, 0)}), [3, 4])
    outs = [torch.zeros(2) for _ in range(SIZE)]
    given = {0: floats(1, 2), 2: floats(5, 6)}
    expect(job.add("gather_", ([outs], [tensor(3, 4)], None, ME), given), [1, 2], [3, 4], [5, 6])
    x = torch.zeros(4)  # the object was shorter then
    expect(job.add("broadcast_", ([x], None, 0, 0), {0: floats(8, 9)}, size_may_differ=True), [8, 9, 0, 0])
    outs = [torch.full((2,), -1.0) for _ in range(SIZE)]  # nothing was recorded
    expect(job.add("allgather_", ([outs], [tensor(3, 4)]), {}), [3, 4], [3, 4], [3, 4])
    expect(job.add("barrier", (torch.zeros(1), None, 0), {}))
    return wanted


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    program = Queue()
    monkeypatch.setattr(holding, "Driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: program)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Queue)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(holding, "DeviceMemory", memory_at)
    return made


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@contextlib.contextmanager
def released(table_fd: int, plan: BoundaryPlan) -> Iterator[Releaser]:
    """The releaser, in a thread."""
    table, over = HoldTable(table_fd), threading.Event()
    releaser = Releaser(table, BoundaryEngine(plan, ME, None))
    table.set_ready()
    thread = threading.Thread(target=lambda: releaser.run(is_over=over.is_set))
    thread.start()
    try:
        yield releaser
    finally:
        over.set()
        table.close()
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("is_async", [False, True])
def test_every_operation_gets_its_values_at_its_time(job: Job, device: Device, is_async: bool) -> None:
    wanted = operations(job)
    script, plan = job.script(), job.plan()
    ring_fd, table_fd = create_ring(1 << 16), create_table()
    fill_ring(ring_fd, script, job.path, capacity=1 << 16)
    engine = BoundaryEngine(plan, ME, None)
    with TraceReader(job.path) as reader, released(table_fd, plan):
        source = Consumer(ring_fd, reader, script.sequence)
        table = HoldTable(table_fd)
        table.origin_ns = time.monotonic_ns()
        engine.start(table.origin_ns)
        hold = holding.StreamHold(table, engine, script, source, torch.device("cpu"), {"device_pool_bytes": "1"})
        ends = []
        for one, (call, outputs) in zip(script.expected, wanted, strict=True):
            call.is_async = is_async
            assert hold.takes(call, torch.device("cpu"))
            started = time.monotonic_ns()
            mark = Mark(started)
            held = hold.issue(call, one, one.first_item, (one.seq, 0), posted=mark)
            # this device blocks whoever asks it to wait
            assert time.monotonic_ns() - started > TRANSFER_NS - MAX_LEAD_NS
            assert hold.is_done(held)
            hold.wait(held, call)
            hold.see(held)
            for output, values in zip(call.outputs, outputs, strict=True):
                expected = torch.tensor(values, dtype=torch.float32)
                assert torch.equal(output.reshape(-1).view(torch.int32), expected.view(torch.int32)), call.op
            ends.append((held, mark))
        hold.finish(is_complete=True)
        facts = hold.summary(0)
        for held, mark in ends:
            assert held.end.time_ns is not None and held.end.time_ns - mark.seen_ns > TRANSFER_NS - MAX_LEAD_NS
        assert facts["held_operations"] == len(wanted)
        assert (facts["prefetch_hits"], facts["prefetch_misses"]) == (len(script.sequence.items), 0)
        assert Ring(ring_fd).consumed == len(script.sequence.items)
        # what the host would hold later on can be worked out from what the device has passed
        assert engine.completion((len(wanted) - 1, 0)) <= ends[-1][0].end.time_ns + MAX_LEAD_NS
    assert device.said[:4] == [("wait", 0), ("write", 0), ("wait", 1), ("write", 1)]  # whether it can
    side = 0 if not is_async else 3  # the second copies
    per_call = [("write", 0), ("wait", side), ("write", side)]
    assert [said for said in device.said[4:] if said[0] != "copy"] == per_call * len(wanted)
    assert device.said.count(("copy", 4)) == 8  # on the stream that fills: two of gathers, of broadcasts, a scatter
    os.close(ring_fd)
    os.close(table_fd)


def test_capturing_is_refused(job: Job, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    call = job.add("broadcast_", ([torch.zeros(2)], None, 0, 0), {0: floats(8, 9)})
    script, plan = job.script(), job.plan()
    ring_fd, table_fd = create_ring(1 << 16), create_table()
    HoldTable(table_fd).set_ready()
    with TraceReader(job.path) as reader:
        source = Consumer(ring_fd, reader, script.sequence)
        hold = holding.StreamHold(
            HoldTable(table_fd), BoundaryEngine(plan, ME, None), script, source, torch.device("cpu"), {}
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedError, match=r"broadcast .* captured into a CUDA graph"):
            hold.takes(call, torch.device("cpu"))
    os.close(ring_fd)
    os.close(table_fd)


def test_an_emulated_kernel_competes_as_nccls_does(job: Job) -> None:
    """torch gives NCCL an ordinary stream by itself; a bare wait takes no SM, and may as well be urgent."""
    call = job.add("broadcast_", ([torch.zeros(2)], None, 0, 0), {0: floats(8, 9)})
    job.script()
    urgent = dataclasses.replace(call, group=dataclasses.replace(GROUP, is_urgent=True, group_id=78))
    hold = object.__new__(holding.StreamHold)
    hold._hold_kernel, hold._joining = None, None
    assert hold._is_urgent(call)
    hold._joining = object()
    assert (hold._is_urgent(call), hold._is_urgent(urgent)) == (False, True)


def test_a_kernel_holds_as_many_sms_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    words = torch.zeros(8, dtype=torch.int32)

    def compile_kernel(source: str, name: str) -> Any:
        assert f"__launch_bounds__(640) {name}(" in source
        return SimpleNamespace(func=name)

    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile_kernel, raising=False)
    driver = SimpleNamespace(launch=lambda *given: launches.append(given))
    monkeypatch.setattr(occupying, "Driver", lambda: driver)
    gates = torch.zeros(4, dtype=torch.int32)
    memory = torch.zeros(64, dtype=torch.uint8)
    kernel = HoldKernel(words, gates, memory, 24)
    collective = OPERATORS["allreduce_"](GROUP, lambda: None, ([torch.zeros(3 * 24 * 640 * 4)], None, SUM))
    message = OPERATORS["send"](GROUP, lambda: None, ([torch.zeros(4 * 16 * 640 * 4 + 1)], None, 2, 0))
    barrier = OPERATORS["barrier"](GROUP, lambda: None, (torch.zeros(1), None, 0))
    for word, call in enumerate((collective, message, barrier)):
        kernel.hold(call, Queue(3), 5 + word, release=word, done=word + 4)
    for i, (launch, blocks) in enumerate(zip(launches, (24, 16, 1), strict=True)):
        assert launch[:4] == ("prism_hold", blocks, 640, 3)
        flag, done, ticket, gate, room, num_elements, num_moves = (value.value for value in launch[4])
        assert (flag, done) == (words.data_ptr() + 4 * i, words.data_ptr() + 4 * (4 + i))
        assert (ticket, gate) == (5 + i, gates.data_ptr() + 4 * (1 + i))
        # each thread moves 16 bytes at a time, and all of them together what the operation brings
        assert (room, num_elements, num_moves) == (memory.data_ptr(), 4, (3, 4, 0)[i])
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda source, name: None)
    with pytest.raises(UnsupportedError, match=r"-O occupy: torch .* does not say where its kernels are"):
        HoldKernel(words, gates, memory, 24)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", None, raising=False)
    with pytest.raises(UnsupportedError, match=r"-O occupy: torch .* does not compile kernels"):
        HoldKernel(words, gates, memory, 24)
