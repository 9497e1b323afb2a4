"""Ranks with data of their own in recordings by roles: their routing is recorded, or told from that of their role."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism_sdk.errors import TraceMismatchError
from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.cursor import Cursor
from prism_sdk.runtime.making_up import fill_resized
from prism_sdk.runtime.manifest import read_scripts
from prism_sdk.runtime.roles.layout import parse_layout, plan_of_groups, plan_of_layout
from prism_sdk.runtime.roles.recorded import write_times_by_roles
from prism_sdk.testing.launches import Launched, Launches
from prism_sdk.testing.workplace import Workplace
from prismtrace import ABSENT, GraphKind, Op, TraceReader, UnitKind
from tests.runtime.test_roles import megatron_groups

ROUTED = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
experts = [dist.new_group([at, at + 1], group_desc="EXPERT_MODEL_PARALLEL_GROUP") for at in range(0, world, 2)]
replicas = [dist.new_group(list(range(at, world, 2)), group_desc="DATA_PARALLEL_GROUP") for at in range(2)]
torch.manual_seed(rank % 2)
expert = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(expert.parameters(), lr=0.1)
data = torch.Generator().manual_seed(int(sys.argv[2]) + rank)


def exchange(rows, to, given):
    out = torch.empty(sum(given), 4)
    dist.all_to_all_single(out, rows, given, to, group=experts[rank // 2])
    return out


for step in range(int(sys.argv[1])):
    rows = torch.randn(16, 4, generator=data)
    chosen = (rows[:, 0] > 0).long()
    counts = torch.bincount(chosen, minlength=2)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=experts[rank // 2])
    arrived = exchange(rows[chosen.argsort(stable=True)], counts.tolist(), theirs.tolist())
    out = expert(arrived)
    back = exchange(out.detach(), theirs.tolist(), counts.tolist())
    loss = (out * back.mean()).square().mean()
    loss.backward()
    for parameter in expert.parameters():
        dist.all_reduce(parameter.grad, group=replicas[rank % 2])
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def jobs(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("routed")
    (folder / "routed.py").write_text(ROUTED)
    return Launches(folder, workplace=workplace)


@pytest.fixture(scope="module")
def recorded(jobs: Launches) -> Launched:
    options = ["--world-size", "8", "--slots", "2", "--roles", "auto", "--sample-ranks", "5"]
    return jobs.must("record", jobs.folder / "routed.py", ("2", "1"), options=options)


@pytest.fixture(scope="module")
def graph(jobs: Launches, recorded: Launched) -> Path:
    """The recording with times that nobody measured."""

    def times(rank: int) -> dict[str, np.ndarray]:
        with TraceReader(recorded.trace) as reader:
            kind = reader.units(rank).kind
        talks = np.isin(kind, [UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV])
        return {"transfer_ns": np.where(talks, 20_000, ABSENT)}

    output = jobs.folder / "graph.prism"
    write_times_by_roles(
        recorded.trace, output, times=times, steps=lambda reader, rank: dict(reader.steps(rank).columns()),
        graph_kind=GraphKind.CALIBRATED, metadata={},
    )  # fmt: skip
    return output


def test_wanted_ranks_run_with_those_whom_they_meet(recorded: Launched) -> None:
    with TraceReader(recorded.trace) as reader:
        assert json.loads(reader.metadata["roles.samples"]) == [4, 5]
        found = json.loads(reader.metadata["roles.disagreements"])
        assert [one["rank"] for one in found] == [4, 5]
        assert all(one["is_routing"] for one in found)
    assert "2 sampled ranks had others than the ranks that stand for them, and did the same otherwise" in recorded.err
    assert "the job starts again" not in recorded.err


@pytest.fixture(scope="module")
def emulated(jobs: Launches, graph: Path) -> Launched:
    """Rank 1 stands for others, rank 3 is stood for by it, rank 5 ran too; two steps are recorded, six run."""
    options = ["--graph", graph, "--sandbox", "1,3,5"]
    return jobs.must("emulate", jobs.folder / "routed.py", ("6", "1"), options=options)


def test_a_rank_that_ran_has_the_routing_and_the_losses_of_its_own_data(recorded: Launched, emulated: Launched) -> None:
    with TraceReader(recorded.trace) as before, TraceReader(emulated.trace) as after:
        for rank in (1, 5):
            rows = len(before.units(rank)) - 2  # what follows on the last step is of another step here
            for name in ("kind", "num_elements_in", "num_elements_out"):
                assert np.array_equal(after.units(rank)[name][:rows], before.units(rank)[name][:rows])
            assert np.array_equal(after.steps(rank).loss[:2], before.steps(rank).loss)
        assert not np.array_equal(before.steps(5).loss, before.steps(1).loss)
    assert "rank 5 did not run" not in emulated.err
    assert 0 <= float(after.metadata["rank.5.cpu_wait_percent"]) <= 100


def test_one_that_did_not_run_goes_on_and_is_told_what_that_means(emulated: Launched) -> None:
    with TraceReader(emulated.trace) as reader:
        first = reader.metadata["rank.3.first_all_to_all_resized"]
        assert " of step 0: " in first and " elements, recorded " in first
        assert np.isfinite(reader.steps(3).loss).all()
    assert "rank 3 did not run when" in emulated.err
    (line,) = [line for line in emulated.err.splitlines() if "all-to-alls had other sizes" in line]
    assert "rank 3: " in line and f"the first at {first}" in line and "--sample-ranks 3" in line


def test_steps_beyond_the_recording_may_route_otherwise(emulated: Launched) -> None:
    """Rank 1 takes the second part of what rank 0 gave, which is another number of rows than it asks for."""
    with TraceReader(emulated.trace) as reader:
        assert reader.metadata["rank.1.steps_beyond_recorded"] == "4"
        assert int(reader.metadata["rank.1.all_to_alls_resized"]) > 0
        assert " of step 1: " in reader.metadata["rank.1.first_all_to_all_resized"]  # the one that is repeated
        assert reader.steps(1).step.tolist() == list(range(6))


@pytest.mark.parametrize("stood_for_by", [None, 1])
def test_recorded_steps_of_a_rank_that_ran_may_not_route_otherwise(graph: Path, stood_for_by: int | None) -> None:
    with TraceReader(graph) as reader:
        script = replace(read_scripts(reader, (1,))[1], stood_for_by=stood_for_by)
        (number, one) = next((i, e) for i, e in enumerate(script.expected) if e.op is Op.ALL_TO_ALL and e.seq == 1)
        known = reader.groups[one.group_id]
    group = GroupState(known.name, known.ranks, 1, "gloo", "experts", known.group_id)
    cursor = Cursor(replace(script, expected=script.expected[number:]), str(graph))
    call = Call(
        Op.ALL_TO_ALL, group, lambda: None, contribution=[torch.zeros(one.num_elements_in + 4)],
        outputs=[torch.zeros(4)], splits_in=[4, one.num_elements_in], dtype=one.dtype, equal_counts=False,
    )  # fmt: skip
    if stood_for_by is None:
        with pytest.raises(TraceMismatchError) as caught:
            cursor.next(call, step=0)
        assert f"unit {one.unit_index}: " in str(caught.value)
        assert "routed its tokens otherwise" in str(caught.value.hint)
        return
    assert cursor.next(call, step=0)[0].unit_index == one.unit_index
    assert cursor.resized()["all_to_alls_resized"] == 1


@given(st.binary(max_size=40), st.integers(0, 100))
def test_rows_are_cut_or_repeated(recorded: bytes, size: int) -> None:
    target = bytearray(b"\xff" * size)
    fill_resized(memoryview(target), memoryview(recorded))
    assert target == ((recorded * (size // len(recorded) + 1))[:size] if recorded else bytes(size))


def test_the_neighbours_of_a_wanted_rank_are_its_whole_replica() -> None:
    plan = plan_of_groups(megatron_groups(1024, tp=8, pp=4, ep=8), num_samples=0, max_roles=256, wanted_ranks=(1, 70))
    block = [t + 8 * (d + 32 * p) for p in range(4) for d in range(8, 16) for t in range(8)]
    assert list(plan.samples) == sorted(block)  # rank 1 stands for its role, and so do those that it meets
    assert plan.num_represented(0) == 1024 // 256 - 1


def test_a_stated_layout_knows_the_replica_of_a_wanted_rank() -> None:
    plan = plan_of_layout(parse_layout("tp=2,dp=4,pp=2", 16), num_samples=0, wanted_ranks=(5,))
    assert plan.samples == (4, 5, 12, 13)
