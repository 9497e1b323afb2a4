"""From what a rank does to the rows of its shard: phases, steps, waits, and when rows are written out."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prism_sdk.runtime import rows
from prism_sdk.runtime import tracer as tracing
from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.tracer import ResidentMemory, Tracer, open_shard
from prismtrace import (
    ABSENT,
    ABSENT32,
    DType,
    GraphKind,
    Op,
    Phase,
    ProcessGroup,
    ReduceOp,
    TraceReader,
    UnitKind,
    validate,
)

GROUP = GroupState(name="dp", ranks=(4, 7, 9), group_rank=1, backend="gloo", description="", group_id=77)
FORWARD, BACKWARD, OPTIMIZER, OTHER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER


class Rank:
    """A rank whose clock and memory the test holds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "parts") -> None:
        self.now = 1000
        self.resident = 10
        monkeypatch.setattr(tracing, "now_ns", lambda: self.now)
        self.folder = folder / name
        self.tracer = Tracer(7, open_shard(self.folder, 7, GraphKind.OBSERVED, 16, {}), memory=lambda: self.resident)
        self.tracer.add_group(ProcessGroup(group_id=77, name="dp", description="", backend="gloo", ranks=GROUP.ranks))
        self.num = 0

    def work(self, duration: int = 10) -> None:
        self.now += duration

    def post(self, *, is_async: bool = False) -> int:
        call = Call(Op.ALL_REDUCE, GROUP, lambda: None, is_async=is_async, reduce_op=ReduceOp.SUM, dtype=DType.FLOAT32)
        self.num += 1
        return self.tracer.communication(call, self.now, GROUP.take_seq())

    def wait(self, unit: int, duration: int = 5) -> None:
        start, self.now = self.now, self.now + duration
        self.tracer.wait(unit, start, self.now, blocked=True)

    def forward(self, *, collective: bool = False) -> None:
        self.work()
        if collective:
            self.wait(self.post())
            self.work()

    def backward(self, loss: float | Callable[[], float] = 1.0) -> None:
        self.tracer.backward_begins([loss])
        self.work(20)
        self.tracer.backward_ends()

    def optimize(self) -> None:
        self.tracer.optimizer_begins()
        self.work(3)
        self.tracer.optimizer_ends()

    def read(self) -> Any:
        self.tracer.finish("complete")
        return read(self.folder)


class Read:
    def __init__(self, path: Path) -> None:
        assert [finding for finding in validate(path) if finding.severity == "error"] == []
        with TraceReader(path) as reader:
            self.table = reader.units(7)
            self.steps = reader.steps(7)
            self.scalars = reader.scalars(7)
            self.metadata = dict(reader.metadata)
            self.columns = {name: np.array(values).tolist() for name, values in self.table.columns().items()
                            if isinstance(values, np.ndarray)}  # fmt: skip

    def phases(self) -> list[tuple[int, Phase]]:
        compute = self.table.kind == UnitKind.COMPUTE
        pairs = zip(self.table.step[compute].tolist(), self.table.phase[compute].tolist(), strict=True)
        return [(step, Phase(phase)) for step, phase in pairs]


def read(folder: Path) -> Read:
    return Read(folder / "rank-00007.prism")


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    GROUP.next_seq = 0
    return Rank(tmp_path, monkeypatch)


def test_phases_of_a_plain_loop(rank: Rank) -> None:
    for step in range(2):
        rank.forward()
        rank.backward(float(step))
        rank.optimize()
    found = rank.read()
    one = [FORWARD, BACKWARD, OPTIMIZER]
    assert found.phases() == [(step, phase) for step in (0, 1) for phase in one]
    assert found.steps.step.tolist() == [0, 1]
    assert found.steps.loss.tolist() == [0.0, 1.0]
    assert found.steps.end_ns.tolist() == [1033, 1066]
    assert found.steps.start_ns.tolist() == [ABSENT, 1033]
    assert found.metadata["rank.7.status"] == "complete"


def test_host_rows_follow_one_another_without_a_hole(rank: Rank) -> None:
    rank.forward(collective=True)
    rank.backward()
    rank.optimize()
    rank.work()
    table = rank.read().table
    host = np.isin(table.kind, [UnitKind.COMPUTE, UnitKind.WAIT])
    starts, ends = table.start_ns[host], table.end_ns[host]
    assert (starts[1:] == ends[:-1]).all()
    assert (starts[0], ends[-1]) == (1000, rank.now)


def test_a_collective_and_its_wait(rank: Rank) -> None:
    rank.work(10)
    unit = rank.post(is_async=True)
    rank.work(30)
    rank.wait(unit, 5)
    assert unit == 1
    table = rank.read().table
    assert table.kind.tolist() == [UnitKind.COMPUTE, UnitKind.COLLECTIVE, UnitKind.COMPUTE, UnitKind.WAIT]
    assert table.awaits.tolist() == [ABSENT, ABSENT, ABSENT, 1]
    assert (table.start_ns[1], table.end_ns[1]) == (1010, 1045)
    assert (table.start_ns[3], table.end_ns[3]) == (1040, 1045)
    assert (table.group_id[1], table.seq[1], table.op[1], table.is_async[1]) == (77, 0, Op.ALL_REDUCE, True)
    assert table.peer[1] == ABSENT32
    assert table.tag[1] == ABSENT


def test_a_wait_that_did_not_block_dates_nothing(rank: Rank) -> None:
    unit = rank.post()
    rank.tracer.wait(unit, rank.now, rank.now + 1, blocked=False)
    assert rank.read().table.end_ns[unit] == ABSENT


def test_peers_are_global_ranks(rank: Rank) -> None:
    call = Call(Op.SEND, GROUP, lambda: None, peer=2, tag=5, dtype=DType.INT64)
    unit = rank.tracer.communication(call, rank.now, 0)
    root = Call(Op.BROADCAST, GROUP, lambda: None, root=0, dtype=DType.INT64)
    other = rank.tracer.communication(root, rank.now, 0)
    rank.tracer.amend(unit, rows.SEQ, 3)
    table = rank.read().table
    assert (table.kind[unit], table.peer[unit], table.tag[unit], table.seq[unit]) == (UnitKind.SEND, 9, 5, 3)
    assert (table.kind[other], table.peer[other]) == (UnitKind.COLLECTIVE, 4)


def test_gradient_accumulation_is_one_step(rank: Rank) -> None:
    for microbatch in range(3):
        rank.forward()
        rank.backward(2.0 * microbatch)
    rank.optimize()
    found = rank.read()
    assert found.phases() == [(0, FORWARD), (0, BACKWARD)] * 3 + [(0, OPTIMIZER)]
    assert (found.steps.loss.tolist(), found.steps.num_losses.tolist()) == ([2.0], [3])
    assert found.scalars.value.tolist() == [0.0, 2.0, 4.0]


def test_several_optimizers_that_step_one_after_the_other_end_one_step(rank: Rank) -> None:
    for _ in range(2):
        rank.forward()
        rank.backward()
        rank.optimize()
        rank.optimize()
    found = rank.read()
    assert [phase for step, phase in found.phases() if step == 0] == [FORWARD, BACKWARD, OPTIMIZER, OPTIMIZER]
    assert found.steps.step.tolist() == [0, 1]
    assert found.steps.end_ns.tolist() == [1036, 1072]


def test_optimizers_that_take_turns_with_backwards_end_a_step_each(rank: Rank) -> None:
    for _ in range(2):  # discriminator, then generator
        for loss in (1.0, 3.0):
            rank.forward()
            rank.backward(loss)
            rank.optimize()
    found = rank.read()
    assert found.steps.step.tolist() == [0, 1, 2, 3]
    assert found.steps.loss.tolist() == [1.0, 3.0, 1.0, 3.0]


def test_an_optimizer_step_before_any_backward_ends_no_step(rank: Rank) -> None:
    rank.optimize()  # to make the optimizer's state, as some frameworks do at the start
    rank.forward()
    rank.backward()
    rank.optimize()
    found = rank.read()
    assert found.steps.step.tolist() == [0]
    assert found.phases() == [(0, OPTIMIZER), (0, FORWARD), (0, BACKWARD), (0, OPTIMIZER)]


def test_what_follows_an_optimizer_is_of_the_next_step_and_not_forward_until_a_backward_comes(rank: Rank) -> None:
    rank.forward()
    rank.backward()
    rank.optimize()
    rank.forward(collective=True)  # logging a loss, evaluating
    assert rank.read().phases() == [(0, FORWARD), (0, BACKWARD), (0, OPTIMIZER), (1, OTHER), (1, OTHER)]


def test_an_open_step_counts_when_its_optimizer_has_stepped(rank: Rank) -> None:
    rank.forward()
    rank.backward(5.0)
    rank.tracer.finish("aborted")
    found = read(rank.folder)
    assert len(found.steps) == 0
    assert len(found.scalars) == 0
    assert found.metadata["rank.7.status"] == "aborted"
    rank.tracer.finish("complete")  # the second time says nothing more


def test_losses_of_the_next_step_stay_with_it(rank: Rank) -> None:
    late: list[float] = []

    def fetch() -> float:
        late.append(1.0)
        return math.inf

    rank.backward(fetch)
    rank.optimize()
    assert late == []  # nothing is fetched before the next backward
    rank.backward(2.0)
    assert late == [1.0]
    rank.optimize()
    assert rank.read().steps.loss.tolist() == [math.inf, 2.0]


def test_memory_peaks_belong_to_their_step(rank: Rank) -> None:
    for peak in (500, 90):
        rank.resident = 50
        rank.forward()
        rank.resident = peak
        rank.backward()
        rank.resident = 60
        rank.optimize()
    found = rank.read()
    assert found.steps.memory_peak_bytes.tolist() == [500, 90]
    assert found.table.memory_bytes.max() == 500


def test_time_of_prism_itself_is_in_no_row(rank: Rank) -> None:
    rank.work(10)
    unit = rank.post(is_async=True)
    rank.work(1_000_000)  # saving values
    rank.tracer.resume()
    rank.work(10)
    rank.wait(unit)
    table = rank.read().table
    compute = table.kind == UnitKind.COMPUTE
    assert (table.end_ns - table.start_ns)[compute].tolist() == [10, 10]


def test_an_open_unit_is_not_written_before_it_is_complete(rank: Rank) -> None:
    rank.work()
    unit = rank.post(is_async=True)
    rank.work()
    rank.tracer.flush(open_unit=unit)
    assert rank.tracer.num_units == 2
    rank.tracer.amend(unit, rows.PAYLOAD_OUT, None)
    rank.wait(unit)
    table = rank.read().table
    assert table.end_ns[unit] == rank.now
    assert table.awaits.tolist()[-1] == unit


def drive(rank: Rank, seed: int, *, flush: bool) -> Read:
    """A random training: the same rows wherever they are written out in between."""
    rng, when = random.Random(seed), random.Random(seed + 1)
    GROUP.next_seq = 0
    open_units: list[int] = []
    for _ in range(rng.randint(1, 40)):
        action = rng.randint(0, 6)
        if action == 0:
            rank.work(rng.randint(0, 9))
        elif action == 1:
            open_units.append(rank.post(is_async=True))
        elif action == 2 and open_units:
            rank.wait(open_units.pop(rng.randrange(len(open_units))), rng.randint(0, 9))
        elif action in (3, 4):
            rank.forward(collective=action == 3)
            rank.backward(rng.random())
        else:
            rank.optimize()
        if flush and when.random() < 0.4:
            before = rank.tracer.num_units
            rank.tracer.flush(everything=False, open_unit=min(open_units, default=None))
            assert rank.tracer.num_units == before
    return rank.read()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_where_rows_are_written_out_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    found = [drive(Rank(folder, monkeypatch, str(flush)), seed, flush=flush) for flush in (False, True)]
    cpu = "cpu_time_ns"
    assert found[0].columns == found[1].columns
    for name, values in found[0].steps.columns().items():
        if name != cpu:
            np.testing.assert_array_equal(values, found[1].steps.columns()[name])
    assert found[0].scalars.value.tolist() == found[1].scalars.value.tolist()
    steps = found[0].table.step
    assert (np.diff(steps) >= 0).all()
    assert len(found[0].steps) in (steps.max(initial=0), steps.max(initial=0) + 1)


def test_rows_are_written_at_a_step_boundary_when_there_are_many(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_ROWS", 20)
    path = rank.folder / "rank-00007.prism"
    sizes = []
    for _ in range(8):
        rank.forward(collective=True)
        rank.backward()
        rank.optimize()
        sizes.append(path.stat().st_size)
    assert sizes[0] == sizes[1]
    assert sizes[-1] > sizes[0]
    with TraceReader(path, allow_unfinished=True) as reader:  # what a killed rank leaves
        table = reader.units(7)
        assert len(table) > 0
        assert set(table.step.tolist()) == set(range(int(table.step.max()) + 1))
        assert reader.steps(7).step.tolist()[: int(table.step.max())] == list(range(int(table.step.max())))
    assert [step for step, _ in rank.read().phases()] == [step for step in range(8) for _ in range(4)]


def test_resident_memory_counts_what_is_touched() -> None:
    resident = ResidentMemory()
    before = resident()
    block = np.ones(8_000_000)
    assert resident() - before > 0.9 * block.nbytes


SCRIPT = """
    import sys, torch, torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.1)]
    if "dummy" in sys.argv:
        for p in second.parameters():
            p.grad = torch.zeros_like(p)
        optimizers[1].step()
    losses = []
    for step in range(3):
        for microbatch in range(2):
            x = torch.randn(4, 16)
            hidden = checkpoint(lambda x: second(torch.relu(first(x))), x.requires_grad_(), use_reentrant=step == 1)
            loss = F.mse_loss(hidden, torch.ones(4, 16))
            loss.backward()
            losses.append(loss.item())
        gradients = torch.autograd.grad(second(torch.ones(2, 16)).sum() * 0, second.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    import json
    print(json.dumps(losses))
"""


@pytest.mark.parametrize("dummy", [(), ("dummy",)])
def test_a_real_program_with_checkpoints_and_two_optimizers(bench: Any, dummy: tuple[str, ...]) -> None:
    """Recomputation inside a backward is part of it, also where a checkpoint runs a backward of its own."""
    pytest.importorskip("torch")
    ended = bench.run_shared("observe", bench.script(SCRIPT), "-q", arguments=dummy)
    assert ended.code == 0, ended.err
    losses = json.loads(ended.out)
    with TraceReader(bench.output) as reader:
        steps, table = reader.steps(0), reader.units(0)
    assert steps.step.tolist() == [0, 1, 2]
    wanted = [(*losses[2 * step : 2 * step + 2], 0.0) for step in range(3)]  # autograd.grad has a scalar root as well
    assert steps.loss.tolist() == pytest.approx([sum(values) / 3 for values in wanted])
    # two optimizers follow one another with a sliver of host time between them
    phases = [Phase(p) for s, p in zip(table.step.tolist(), table.phase.tolist(), strict=True) if s == 1]
    assert [phase for phase in phases if phase is not OTHER] == [FORWARD, BACKWARD] * 3 + [OPTIMIZER] * 2
