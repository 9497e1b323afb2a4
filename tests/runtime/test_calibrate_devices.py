"""What calibration on GPUs does beside the GPU: transfers and where they come from, and what stands in for values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prism_sdk.builtin.device_transfers import cluster_transfers, fitted_cluster, has_mixed_messages, sizes_of
from prism_sdk.builtin.slices import Slices
from prism_sdk.cluster.estimate import estimate
from prism_sdk.cluster.profile import Shape, load_cluster
from prism_sdk.errors import CalibrationError
from prism_sdk.graph.job import JobGraph
from prism_sdk.runtime.gpus import uses_gpus
from prism_sdk.testing import ScriptedCalibration
from prismtrace import DType, GraphKind, Op, ProcessGroup, TraceReader, TraceWriter, UnitKind
from tests.graph.jobs import Program

H200 = load_cluster("h200-sxm")


class OnDevices(ScriptedCalibration):
    """An invented job on invented GPUs."""

    num_devices = 1


def test_transfers_of_a_slice_of_one_gpu_are_modelled_and_say_so(tmp_path: Path) -> None:
    context = OnDevices(tmp_path, world_size=2, num_slots=1)
    Slices().calibrate(context)
    expected = estimate(
        H200, Op.ALL_REDUCE, num_bytes=8 * DType.UNSPECIFIED.itemsize_bytes, shape=Shape(ranks=2, nodes=1)
    )
    with TraceReader(context.output) as reader:
        assert reader.metadata["calibration.transfers"] == "profile h200-sxm"
        assert reader.metadata["calibration.devices"] == "1"
        for rank in (0, 1):
            units = reader.units(rank)
            is_collective = units.kind == 2
            assert set(units.transfer_ns[is_collective].tolist()) == {round(expected.time_ns)}
            assert set(units["prism.provenance"][is_collective].tolist()) == {3}
            assert set(units["prism.provenance"][units.kind == 1].tolist()) == {1}
    assert any("transfers are modelled" in message for message in context.messages)


def test_transfers_of_an_observed_run_are_taken_over(tmp_path: Path) -> None:
    seen = OnDevices(tmp_path / "seen", world_size=2, num_slots=2, step_ns=[2_000_000])
    observed = seen.run_slice((0, 1), graph_path=seen.graph_path, label="observed")
    context = OnDevices(tmp_path / "job", world_size=2, num_slots=1, options={"transfers": str(observed)})
    Slices().calibrate(context)
    with TraceReader(context.output) as reader:
        units = reader.units(0)
        assert set(units.transfer_ns[units.kind == 2].tolist()) == {200_000}
        assert set(units["prism.provenance"][units.kind == 2].tolist()) == {1}
        assert reader.metadata["calibration.transfers"] == str(observed)


def test_a_slice_of_all_ranks_needs_no_model(tmp_path: Path) -> None:
    context = OnDevices(tmp_path, world_size=2, num_slots=2)
    Slices().calibrate(context)
    with TraceReader(context.output) as reader:
        assert reader.metadata["calibration.transfers"] == "slices"
        assert set(reader.units(1)["prism.provenance"][reader.units(1).kind == 2].tolist()) == {1}


def test_how_long_operations_are_held_is_an_earlier_pass_to_say(tmp_path: Path) -> None:
    context = OnDevices(tmp_path, world_size=2, num_slots=1)
    Slices().calibrate(context)
    with TraceReader(context.output) as reader:
        units = reader.units(1)
    takes_time = (units.kind != UnitKind.COMPUTE) & (units.kind != UnitKind.WAIT) & (units.is_async == 0)
    found = held_ns(context.output, 1)
    assert takes_time.any() and found[takes_time].tolist() == (units.end_ns - units.start_ns)[takes_time].tolist()
    assert not found[(units.kind == UnitKind.COMPUTE) | (units.kind == UnitKind.WAIT)].any()
    for times, rank in ((None, 1), (context.graph_path, 1), (context.output, 7)):  # a bare graph has no times
        assert not len(held_ns(times, rank))


def test_an_operation_is_held_from_the_end_of_the_one_before_it_on_its_stream(tmp_path: Path) -> None:
    path = tmp_path / "times.prism"
    rows = [  # kind, group, asynchronous, begin, end, held
        (UnitKind.COMPUTE, 0, 0, 0, 100, 0),
        (UnitKind.COLLECTIVE, 7, 1, 100, 150, 50),
        (UnitKind.COLLECTIVE, 7, 1, 110, 170, 20),
        (UnitKind.COLLECTIVE, 8, 1, 110, 170, 60),
        (UnitKind.COLLECTIVE, 7, 1, 120, 165, 0),
        (UnitKind.COLLECTIVE, 7, 0, 160, 180, 20),
        (UnitKind.WAIT, 0, 0, 180, 190, 0),
        (UnitKind.RECV, 7, 1, 200, 230, 30),
    ]
    names = ("kind", "group_id", "is_async", "start_ns", "end_ns", "held_ns")
    columns = dict(zip(names, np.array(rows).T, strict=True))
    expected = columns.pop("held_ns")
    with TraceWriter(path, graph_kind=GraphKind.CALIBRATED, world_size=1) as writer:
        writer.add_units(0, columns)
    assert held_ns(path, 0).tolist() == expected.tolist()


def test_on_cpus_nothing_is_added(tmp_path: Path) -> None:
    context = ScriptedCalibration(tmp_path, world_size=2, num_slots=2)
    Slices().calibrate(context)
    with TraceReader(context.output) as reader:
        assert "prism.provenance" not in reader.units(0).column_names
        assert "prism.lead_ns" not in reader.units(0).column_names
        assert "calibration.devices" not in reader.metadata


def test_more_ranks_than_the_profile_has_gpus_is_refused() -> None:
    p = Program(3, {1: (0, 1, 2)})
    p.collective(1, lambda _: 5)
    small = load_cluster("h200-sxm").__class__(
        name="small", num_nodes=1, gpus_per_node=2, nvlink=H200.nvlink, network=H200.network
    )
    with pytest.raises(CalibrationError, match="3 ranks, small 2 GPUs"):
        cluster_transfers(p.graph(), small, source="")


def messages_of(groups: dict[int, tuple[int, ...]], *, source: int, destination: int) -> JobGraph:
    p = Program(4, groups)
    p.send(1, source, destination, 0, 10)
    p.recv(1, source, destination, 0, 10)
    return p.graph()


@pytest.mark.parametrize(
    ("groups", "slices", "expected"),
    [({1: (0, 1, 2, 3)}, [(0, 1), (2, 3)], True), ({1: (0, 1)}, [(0, 1), (2, 3)], False),
     ({1: (0, 1, 2, 3)}, [(0,), (1,), (2,), (3,)], False), ({1: (0, 1, 2, 3)}, [(0, 1, 2, 3)], False)],
)  # fmt: skip
def test_messages_within_a_slice_in_a_group_beyond_it(
    groups: dict[int, tuple[int, ...]], slices: Sequence[tuple[int, ...]], expected: bool
) -> None:
    assert has_mixed_messages(messages_of(groups, source=0, destination=1), slices) is expected


def test_a_message_counts_where_it_is_received() -> None:
    graph = messages_of({1: (0, 1, 2, 3)}, source=0, destination=1)
    found = cluster_transfers(graph, H200, source="x")
    kind = graph.columns["kind"]
    assert found.transfer_ns[kind == 3].tolist() == [0]
    assert (found.transfer_ns[kind == 4] > 0).all()
    assert sizes_of(graph) == {"recv": [4 * DType(1).itemsize_bytes]}


def test_a_probe_replaces_the_profile_where_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "probe.prism"
    count, transfer = 1 << 20, 123_456
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=2) as writer:
        writer.add_group(ProcessGroup(1, "0", "default_pg", "nccl", (0, 1)))
        for rank in (0, 1):
            writer.add_units(rank, {
                "kind": [2], "op": [int(Op.ALL_REDUCE)], "group_id": [1], "seq": [0], "step": [0],
                "dtype": [int(DType.FLOAT32)], "num_elements_in": [count], "num_elements_out": [count],
                "start_ns": [1000 + rank], "end_ns": [1001 + transfer],
            })  # fmt: skip
    cluster = fitted_cluster(H200, path)
    shape = Shape(ranks=2, nodes=1)
    measured = estimate(cluster, Op.ALL_REDUCE, num_bytes=4 * count, shape=shape)
    assert measured.time_ns == pytest.approx(transfer, rel=0.01) and measured.provenance == 2
    larger = estimate(cluster, Op.ALL_REDUCE, num_bytes=4 * count, shape=Shape(ranks=8, nodes=1))
    assert larger.provenance == 3 and "scaled" in larger.basis
    assert estimate(cluster, Op.ALL_GATHER, num_bytes=4 * count, shape=shape).provenance == 3


@pytest.mark.parametrize(
    ("backend", "recorded", "asked", "expected"),
    [("nccl", "", None, True), ("cpu:gloo,cuda:nccl", "", None, True), ("gloo", "", None, False),
     ("nccl", "cpu", None, False), ("nccl", "", "cpu", False)],
)  # fmt: skip
def test_a_job_over_nccl_uses_gpus(
    tmp_path: Path, backend: str, recorded: str, asked: str | None, expected: bool
) -> None:
    path = tmp_path / "job.prism"
    metadata = {"job.device": recorded}
    with TraceWriter(path, graph_kind=GraphKind.BARE, world_size=1, metadata=metadata) as writer:
        writer.add_group(ProcessGroup(1, "0", "", backend, (0,)))
    with TraceReader(path) as reader:
        assert uses_gpus(reader, device=asked) is expected


# -- what stands in for values --------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from prism_sdk.runtime.calls import COMBINED, Call, Delivery, GroupState  # noqa: E402
from prism_sdk.runtime.oncuda.filling import SMALL_BYTES  # noqa: E402
from prism_sdk.runtime.oncuda.slicing import (  # noqa: E402
    FirstValues,
    SliceSeam,
    give_own,
    held_ns,
    is_large_number,
    place,
)

LARGE = SMALL_BYTES  # elements of four bytes


def call(op: Op, contribution: list[Any], deliveries: list[Delivery], **more: Any) -> Call:
    group = GroupState(name="g", ranks=(0, 1), group_rank=1, backend="nccl", description="", group_id=1)
    outputs = [delivery.tensor for delivery in deliveries] + list(more.get("receive_tensors") or [])
    return Call(op, group, lambda: None, contribution=contribution, deliveries=deliveries, outputs=outputs, **more)


def test_a_gather_takes_its_own_part_for_everybodys() -> None:
    whole, own = torch.zeros(2, LARGE), torch.arange(LARGE, dtype=torch.float32)
    one = call(Op.ALL_GATHER, [own], [Delivery(whole[0], 0, 0), Delivery(whole[1], 1, 0)])
    assert is_large_number(one)
    give_own(one)
    assert torch.equal(whole, own.expand(2, -1))


def test_a_reduce_scatter_takes_its_own_chunk_and_an_all_reduce_stays() -> None:
    own = torch.arange(2 * LARGE, dtype=torch.float32)
    part = torch.zeros(LARGE)
    give_own(call(Op.REDUCE_SCATTER, [own], [Delivery(part, COMBINED, part.nbytes)]))
    assert torch.equal(part, own[LARGE:])
    give_own(call(Op.ALL_REDUCE, [own], [Delivery(own, COMBINED, 0)]))
    assert torch.equal(own, torch.arange(2 * LARGE, dtype=torch.float32))


def test_a_strided_result_and_one_that_is_longer_than_what_there_is() -> None:
    own = torch.arange(6, dtype=torch.float32)
    strided = torch.zeros(3, 2).t()
    give_own(call(Op.ALL_GATHER, [own], [Delivery(strided, 0, 0)]))
    assert torch.equal(strided, own.view(2, 3))
    longer = torch.full((8,), 9.0)
    give_own(call(Op.ALL_TO_ALL, [own], [], receive_tensors=[longer]))
    assert torch.equal(longer, torch.tensor([0.0, 1, 2, 3, 4, 5, 9, 9]))


@pytest.mark.parametrize(
    ("op", "tensor", "expected"),
    [(Op.ALL_REDUCE, torch.zeros(LARGE), True), (Op.ALL_REDUCE, torch.zeros(4), False),
     (Op.ALL_REDUCE, torch.zeros(LARGE, dtype=torch.int64), False), (Op.BROADCAST, torch.zeros(LARGE), False)],
)  # fmt: skip
def test_what_steers_the_program_is_the_recorded_value(op: Op, tensor: Any, expected: bool) -> None:
    more = {"root": 0} if op is Op.BROADCAST else {}
    own = [] if op is Op.BROADCAST else [tensor]
    assert is_large_number(call(op, own, [Delivery(tensor, 0, 0)], **more)) is expected


def test_recorded_bytes_are_placed_and_padded() -> None:
    target = torch.full((4,), 7, dtype=torch.int32)
    place(target, memoryview(np.array([1, 2, 3], dtype=np.int32).tobytes()))
    assert target.tolist() == [1, 2, 3, 0]


class _Pool:
    """Payload i is LARGE times the number i; remembers what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def announce(self, first: int) -> None:
        assert first >= 0

    def release(self, first: int, count: int) -> None:
        assert first >= 0 and count == 1

    def take(self, first: int, count: int) -> list[memoryview]:
        self.read.append(first)
        return [memoryview(np.full(LARGE, first, dtype=np.float32).tobytes())]


@pytest.mark.parametrize(
    ("limit_bytes", "read", "later"),
    [(1 << 30, [0, 1, 2], [0, 1, 2]), (8 * LARGE, [0, 1], [0, 1, 0]), (1, [0], [0, 0, 0])],
)
def test_each_message_of_a_step_has_its_own_first_value(limit_bytes: int, read: list[int], later: list[int]) -> None:
    """An activation and a gradient of one sender and one size: taken for each other they would end in NaN."""
    seam: Any = SliceSeam.__new__(SliceSeam)
    seam._firsts, seam.pool = FirstValues(limit_bytes), _Pool()
    one: Any = SimpleNamespace(op=Op.RECV, peer=1, sources=(1,), send_bytes={}, first_item=0, step=0)
    found: list[list[float]] = []
    for step in range(3):  # the recording has two
        one.step = min(step, 1)
        seam.cursor = SimpleNamespace(step_of=lambda one, step=step: step)
        outputs = [torch.full((LARGE // 4, 4), -1.0) for _ in range(3)]
        for number, output in enumerate(outputs):
            one.first_item = 3 * step + number
            message = call(Op.RECV, [], [Delivery(output, 1, 0)], peer=1)
            seam._give_recorded(message, one, 0)
        found.append([output.unique().item() for output in outputs])
    assert found == [later] * 3 and seam.pool.read == read
