"""The adapter on Megatron-Core itself, without a GPU, against the orders of its schedules; and its contract."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core", exc_type=ImportError)
from prismtrace_megatron.adapter import MegatronAdapter
from prismtrace_megatron.experts import skew_bias

import prismtrace
from prism_sdk.abc import FrameworkAdapter
from prism_sdk.testing import (
    FrameworkAdapterContract,
    Launched,
    Launches,
    NamedUnit,
    Route,
    losses,
    run_plain,
    run_route,
    unit_order,
    used_groups,
)
from prismtrace import Op

JOB = Path(__file__).parent / "megatron_job.py"
ON_CPU = ("--device", "cpu")
MICROBATCHES = 4
NUM_RANKS = 8


@pytest.mark.filterwarnings("ignore::UserWarning:megatron", "ignore::DeprecationWarning", "ignore::FutureWarning")
class TestContract(FrameworkAdapterContract):
    def make_adapter(self) -> FrameworkAdapter:
        return MegatronAdapter()


@dataclass(frozen=True)
class Job:
    """A job of two steps in a launch; `first` is the step that it began with."""

    launched: Launched
    first: int = 0

    def order(self, rank: int) -> list[NamedUnit]:
        """The job's second step."""
        return unit_order(self.launched.trace, rank, step=self.first + 1)

    def passes(self, rank: int) -> list[tuple[str | None, int | None, int | None]]:
        """Forward and backward passes as they began: part, microbatch, chunk."""
        found: list[tuple[str | None, int | None, int | None]] = []
        for unit in self.order(rank):
            one = (unit.phase, unit.microbatch, unit.model_chunk)
            if unit.microbatch is not None and unit.label is None and (not found or found[-1] != one):
                found.append(one)
        return found


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("megatron"), plugin="prismtrace_megatron")


MIXED = ("--pp", "2", "--chunks", "2", "--ep", "2", "--moe")
BOTH = ("--tp", "2", "--pp", "2", "then", *MIXED)


@pytest.fixture(scope="module")
def both(launches: Launches) -> Launched:
    return launches.record(JOB, BOTH, num_ranks=NUM_RANKS, options=ON_CPU)


@pytest.fixture(scope="module")
def dense(both: Launched) -> Job:
    return Job(both)


@pytest.fixture(scope="module")
def mixed(both: Launched) -> Job:
    """Interleaved stages, with experts on two ranks."""
    return Job(both, first=2)


@pytest.mark.slow
def test_losses_are_those_without_prism(both: Launched) -> None:
    """In all bits; of Prism there is only what answers for GPUs."""
    modules = ["megatron.core.models.gpt.gpt_model"]
    plain = run_plain(JOB, BOTH, num_ranks=NUM_RANKS, device="cpu", modules=modules)
    assert len(losses(both.out)) == 4 and losses(plain) == losses(both.out)


def one_forward_one_backward(stage: int, num_stages: int) -> list[tuple[str, int, None]]:
    """As Megatron describes its schedule: warmup, pairs of one forward and one backward pass, cooldown."""
    num_warmup = min(num_stages - stage - 1, MICROBATCHES)
    order: list[tuple[str, int, None]] = [("forward", number, None) for number in range(num_warmup)]
    for number in range(MICROBATCHES - num_warmup):
        order += [("forward", num_warmup + number, None), ("backward", number, None)]
    return order + [("backward", number, None) for number in range(MICROBATCHES - num_warmup, MICROBATCHES)]


def interleaved(stage: int, num_stages: int, num_chunks: int) -> list[tuple[str, int, int]]:
    """From the table that Megatron itself plans by."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(MICROBATCHES, num_chunks, num_stages)
    forward = [("forward", microbatch, chunk) for microbatch, chunk in table]
    backward = [("backward", microbatch, num_chunks - 1 - chunk) for microbatch, chunk in table]
    num_warmup = min((num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages, len(table))
    order = forward[:num_warmup]
    for one, other in zip(forward[num_warmup:], backward, strict=False):
        order += [one, other]
    return order + backward[len(table) - num_warmup :]


def test_passes_are_in_the_order_of_1f1b(dense: Job) -> None:
    for rank in range(NUM_RANKS):
        assert dense.passes(rank) == one_forward_one_backward(rank // 4, 2)


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_passes_are_in_the_interleaved_order(mixed: Job) -> None:
    for rank in range(NUM_RANKS):
        assert mixed.passes(rank) == interleaved(rank // 4, 2, 2)


def messages(job: Job) -> tuple[Counter[tuple[Any, ...]], Counter[tuple[Any, ...]]]:
    """What all ranks sent and received: from, to, phase, microbatch, stage that receives."""
    sent: Counter[tuple[Any, ...]] = Counter()
    received: Counter[tuple[Any, ...]] = Counter()
    for rank in range(NUM_RANKS):
        for unit in job.order(rank):
            towards = 1 if unit.phase == "forward" else -1
            if unit.op == "send":
                assert unit.stage is not None
                sent[(rank, unit.peer, unit.phase, unit.microbatch, unit.stage + towards)] += 1
            elif unit.op == "recv":
                received[(unit.peer, rank, unit.phase, unit.microbatch, unit.stage)] += 1
    return sent, received


def test_every_message_is_sent_and_received_once(dense: Job) -> None:
    sent, received = messages(dense)
    assert sent == received and len(sent) == 8 * MICROBATCHES and set(sent.values()) == {1}
    for rank in range(NUM_RANKS):
        labels = {unit.label for unit in dense.order(rank) if unit.op == "send"}
        assert labels == {"send activation" if rank < 4 else "send gradient"}


def test_messages_of_interleaved_stages_belong_to_their_passes(mixed: Job) -> None:
    sent, received = messages(mixed)
    assert sent == received and set(sent.values()) == {1}
    assert len(sent) == 2 * 3 * 4 * MICROBATCHES  # both directions, between four stages, of four replicas
    for rank in range(NUM_RANKS):
        order = mixed.order(rank)
        for part in ("forward", "backward"):
            passes: dict[tuple[int | None, int | None], int] = {}
            for at, unit in enumerate(order):
                if unit.part == part and unit.op is None:
                    passes.setdefault((unit.microbatch, unit.stage), at)
            for at, unit in enumerate(order):
                if unit.phase == part and unit.op in ("send", "recv"):  # sent after its pass, received before it
                    assert (passes[unit.microbatch, unit.stage] < at) == (unit.op == "send")


def test_layers_stages_purposes_and_coordinates(dense: Job, mixed: Job) -> None:
    assert {(unit.layer, unit.stage) for unit in dense.order(7) if unit.layer} == {("layers.1", 1)}
    found = {(unit.stage, unit.layer) for unit in mixed.order(0) if unit.layer}
    assert found == {(0, "layers.0"), (2, "layers.2")}
    assert {unit.purpose for unit in dense.order(0) if unit.op == "all_reduce"} >= {"tp"}
    assert used_groups(dense.launched.trace, 7, step=1) == {
        ("tp", (6, 7)), ("pp", (3, 7)), ("dp_cp", (5, 7)), ("tp_pp", (2, 3, 6, 7)),
    }  # fmt: skip
    assert used_groups(mixed.launched.trace, 5, step=3) >= {
        ("pp", (1, 5)), ("ep", (4, 5)), ("etp_ep", (4, 5)), ("dp_cp", (4, 5, 6, 7)), ("edp", (5, 7)),
        ("world", tuple(range(NUM_RANKS))),  # half of the messages: Megatron's way around a deadlock between two
    }  # fmt: skip
    with prismtrace.TraceReader(mixed.launched.trace) as reader:
        assert reader.metadata["rank.7.coordinates"] == "tp=0,pp=1,dp=3,cp=0,ep=1"
        assert all(reader.metadata[f"rank.{rank}.fidelity"] == "full" for rank in range(NUM_RANKS))


def tokens(trace: Path, rank: int) -> list[list[int]]:
    with prismtrace.TraceReader(trace) as reader:
        column = reader.units(rank).columns()["moe.tokens_per_expert"]
        return [[int(one) for one in value] for value in column if value is not None]


def splits(trace: Path, rank: int) -> list[list[int]]:
    with prismtrace.TraceReader(trace) as reader:
        units = reader.units(rank)
        return [
            [int(one) for one in units.splits_in[row]]
            for row in range(len(units))
            if units.op[row] == Op.ALL_TO_ALL and units.splits_in[row] is not None
        ]


def test_tokens_of_experts_agree_with_the_splits(mixed: Job) -> None:
    for rank in range(NUM_RANKS):
        counts = tokens(mixed.launched.trace, rank)
        assert len(counts) == 2 * 2 * MICROBATCHES  # steps, chunks, microbatches
        assert all(sum(one) == 2 * 2 * 16 for one in counts)  # the two best experts of each of two times 16 tokens
        assert len({tuple(one) for one in counts}) > 1  # nothing is made even
        per_member = {(one[0] + one[1], one[2] + one[3]) for one in counts}  # two experts a rank
        assert per_member <= {tuple(one) for one in splits(mixed.launched.trace, rank)}


@pytest.fixture(scope="module")
def route(launches: Launches) -> Route:
    """Two stages, experts on two ranks with skewed routing, all that is sharded overlapped; on the whole way."""
    arguments = ["--pp", "2", "--ep", "2", "--moe", "--sharded", "--microbatches", "2"]
    return run_route(launches, JOB, arguments, sandbox=(0, 3), options=[*ON_CPU, "--moe-skew", "3"])


def test_a_skew_moves_tokens_to_the_first_experts(route: Route, mixed: Job) -> None:
    for rank in range(4):
        before, after = (
            [sum(column) for column in zip(*tokens(trace, rank), strict=True)]
            for trace in (mixed.launched.trace, route.recorded.trace)
        )
        before = [count * sum(after) / sum(before) for count in before]
        assert after[0] > 1.5 * before[0] and after[3] < before[3] / 2
    assert skew_bias(3, 0) == [0, 0, 0]
    with prismtrace.TraceReader(route.recorded.trace) as reader:
        assert reader.metadata["job.moe_skew"] == "3.0"


@pytest.mark.slow
def test_four_ranks_are_observed_recorded_calibrated_and_emulated(route: Route) -> None:
    route.check_names()
    route.check_emulation()
    assert losses(route.observed.out) == pytest.approx(losses(route.recorded.out), rel=1e-4)
    for rank in route.sandbox:
        assert tokens(route.emulated.trace, rank) == tokens(route.recorded.trace, rank)


def test_a_sharded_optimizer_gathers_parameters_and_reduces_gradients(route: Route) -> None:
    order = unit_order(route.recorded.trace, 1, step=1)
    gathers = [unit for unit in order if unit.op == "all_gather" and unit.part == "param_gather"]
    syncs = [unit for unit in order if unit.op == "reduce_scatter" and unit.part == "grad_sync"]
    assert gathers and syncs and {unit.microbatch for unit in syncs} <= {1, None}
