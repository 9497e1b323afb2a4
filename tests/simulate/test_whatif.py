from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.cli.main import run
from prism_sdk.errors import UsageError
from prism_sdk.runtime.roles.growing import grow
from prism_sdk.simulate import Scenario, load, simulate, summarise
from prism_sdk.simulate.changes import ExpertSkew
from prism_sdk.simulate.scenario import parse_straggle
from prismtrace import ABSENT, ABSENT32, DType, GraphKind, Op, ProcessGroup, TraceReader, TraceWriter, UnitKind
from tests.graph.jobs import Program, random_program
from tests.simulate.pipelines import BACKWARD_NS, FORWARD_NS, pipeline
from tests.simulate.reference import reference, rows_of, write

EXAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.py"


def _job(folder: Path, seed: int) -> tuple[Program, Path]:
    program = random_program(seed)
    return program, write(folder / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)


def rewritten(
    path: Path, output: Path, kind: GraphKind, *, sends_of_microbatch: int = -1, **columns: np.int64
) -> Path:  # fmt: skip
    """A copy of another kind with constant `columns`; sends of that microbatch name none."""
    with TraceReader(path) as reader, TraceWriter(output, graph_kind=kind, world_size=reader.world_size) as writer:
        for group in reader.groups.values():
            writer.add_group(group)
        for rank in reader.ranks:
            units = reader.units(rank)
            microbatch = units.microbatch.copy()
            microbatch[(units.kind == UnitKind.SEND) & (microbatch == sends_of_microbatch)] = ABSENT32
            constant = {name: np.full(len(units), value) for name, value in columns.items()}
            writer.add_units(rank, {**units.columns(), "microbatch": microbatch, **constant})
    return output


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 1.3, 2.0]))
def test_a_slow_rank_is_as_the_slow_scheduler_has_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, factor: float
) -> None:
    program, path = _job(tmp_path_factory.mktemp("job"), seed)

    def compute(rank: int, _index: int, _start: int, work: int) -> int:
        return int(work * factor + 0.5) if rank == 0 else work

    assert rows_of(Scenario(slow=(f"rank=0:{factor}",)).run(path)) == reference(
        program.rows, program.groups, compute=compute
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 500), st.integers(1, 800))
def test_throttling_over_time(tmp_path_factory: pytest.TempPathFactory, seed: int, begin: int, length: int) -> None:
    program, path = _job(tmp_path_factory.mktemp("job"), seed)

    def compute(rank: int, _index: int, start: int, work: int) -> int:
        """A unit of work needs 2 ns inside the window and 1 ns outside: an integral in half steps."""
        at, left = 2 * start, 2 * work  # in half nanoseconds
        while left > 0 and rank == 0:
            slow = 2 * begin <= at < 2 * (begin + length)
            left -= 1 if slow else 2
            at += 2
        return work if rank else (at + (left < 0)) // 2 - start

    got = rows_of(Scenario(slow=(f"rank=0:2@{begin}ns-{begin + length}ns",)).run(path))
    want = reference(program.rows, program.groups, compute=compute)
    # odd ends inside the window round, at most 1 ns a unit
    num = sum(row["kind"] == 1 for row in program.rows[0])
    assert all(abs(got[place][1] - want[place][1]) <= num for place in want)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_removed_collectives_are_as_if_never_called(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    program, path = _job(tmp_path_factory.mktemp("job"), seed)
    rows: dict[int, list[dict[str, Any]]] = {}
    for rank, mine in program.rows.items():
        kept: list[dict[str, Any]] = []
        place: dict[int, int] = {}
        for index, row in enumerate(mine):
            target = row.get("awaits", -1)
            if row["kind"] == UnitKind.COLLECTIVE or (target >= 0 and mine[target]["kind"] == UnitKind.COLLECTIVE):
                continue
            place[index] = len(kept)
            kept.append({**row, "awaits": place[target]} if target >= 0 else row)
        rows[rank] = kept
    assert rows_of(Scenario(remove=("kind=collective",)).run(path)) == reference(rows, program.groups)


def test_scaling_a_kind_scales_it_and_nothing_else(tmp_path: Path) -> None:
    path = pipeline(tmp_path / "job.prism", stages=1, replicas=2, microbatches=2)
    before = simulate(load(path)).step_time_ns
    assert Scenario(scale=("op=all_reduce:0",)).run(path).step_time_ns == before - 120
    assert Scenario(scale=("phase=backward&kind=compute:2",)).run(path).step_time_ns == before + 2 * BACKWARD_NS + 1
    assert (
        Scenario(scale=("phase=backward&kind=compute&step=1:2",)).run(path).step_time_ns == before + BACKWARD_NS + 0.5
    )
    assert Scenario(slow=("stage=0&phase=forward:1.5",)).run(path).step_time_ns == before + FORWARD_NS + 1
    with pytest.raises(UsageError, match=r"no unit of .* is op=all_to_all"):
        Scenario(scale=("op=all_to_all:2",)).run(path)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_another_schedule_or_number_of_microbatches_is_as_if_recorded(
    tmp_path: Path, schedule: Any, microbatches: int
) -> None:
    recorded = pipeline(tmp_path / "a.prism", microbatches=4)
    changed = Scenario(microbatches=microbatches, schedule=schedule).run(recorded)
    # microbatches beyond those recorded are taken again from the start: write the job with costs that repeat
    expected = simulate(load(pipeline(tmp_path / "b.prism", microbatches=microbatches, schedule=schedule)))
    extra = sum(m - m % 4 for m in range(microbatches))
    assert len(changed.job) == len(expected.job)
    assert changed.step_time_ns == pytest.approx(expected.step_time_ns, abs=3 * extra)
    if microbatches <= 4:
        assert rows_of(changed) == rows_of(expected)


@pytest.mark.parametrize("change", [{"microbatches": 8}, {"schedule": "gpipe"}, {"remove": ("op=all_reduce",)}])
def test_a_trace_of_times_changes_as_the_graph_that_it_is_of(tmp_path: Path, change: dict[str, Any]) -> None:
    graph, timeline = pipeline(tmp_path / "graph.prism"), tmp_path / "timeline.prism"
    assert run(["simulate", str(graph), "-o", str(timeline)]) == 0
    nothing = np.int64(ABSENT)
    times = rewritten(timeline, tmp_path / "times.prism", GraphKind.OBSERVED, transfer_ns=nothing, gap_ns=nothing)
    assert simulate(load(times)).step_time_ns == simulate(load(graph)).step_time_ns
    changed = Scenario(**change).run(graph).step_time_ns
    assert changed != simulate(load(graph)).step_time_ns
    assert Scenario(**change).run(times).step_time_ns == pytest.approx(changed, abs=1)


@pytest.mark.parametrize("change", [{"microbatches": 8}, {"schedule": "gpipe"}])
def test_what_meets_nobody_meets_nobody_in_another_order(tmp_path: Path, change: dict[str, Any]) -> None:
    """Communication without sequence numbers, as Kineto imports have it, gets none by being put in another order."""
    graph, timeline = pipeline(tmp_path / "graph.prism"), tmp_path / "timeline.prism"
    assert run(["simulate", str(graph), "-o", str(timeline)]) == 0
    nothing = np.int64(ABSENT)
    times = rewritten(timeline, tmp_path / "times.prism", GraphKind.OBSERVED, seq=nothing, transfer_ns=nothing)
    changed = Scenario(**change).run(times).job
    assert len(changed.alone_ids) == 6, "one of each rank"
    assert set(changed.lanes.group_id.tolist()) == set(changed.alone_ids.tolist())


@pytest.mark.parametrize("change", [{"microbatches": 8}, {"schedule": "gpipe"}, {"microbatches": 2}])
def test_what_a_schedule_computes_between_its_passes_goes_with_what_follows(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    changed = Scenario(**change).run(pipeline(tmp_path / "a.prism", glue_ns=7))
    expected = simulate(load(pipeline(tmp_path / "b.prism", glue_ns=7, **change)))
    # what comes before the first pass of a step is the step's, and not copied
    assert len(expected.job) - len(changed.job) == (3 * 6 if change.get("microbatches") == 8 else 0)
    assert changed.step_time_ns == pytest.approx(expected.step_time_ns, abs=3 * 16)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_waits_for_sends_stay_as_late_as_the_program_had_them(tmp_path: Path, schedule: Any) -> None:
    written = {"schedule": schedule, "late_waits": True}
    recorded = pipeline(tmp_path / "a.prism", **written)
    before = simulate(load(recorded))
    again = Scenario(microbatches=4, schedule=schedule).run(recorded)
    assert again.step_times_ns().tolist() == before.step_times_ns().tolist()
    assert rows_of(again) == rows_of(before)
    for microbatches in (2, 8):
        changed = Scenario(microbatches=microbatches, schedule=schedule).run(recorded)
        expected = simulate(load(pipeline(tmp_path / f"{microbatches}.prism", microbatches=microbatches, **written)))
        assert len(changed.job) == len(expected.job)
        assert changed.step_time_ns == pytest.approx(expected.step_time_ns, abs=3 * 16)


def test_communication_that_names_no_microbatch_is_not_copied(tmp_path: Path) -> None:
    path = pipeline(tmp_path / "a.prism")
    nameless = rewritten(path, tmp_path / "b.prism", GraphKind.CALIBRATED, sends_of_microbatch=1)
    with pytest.raises(UsageError, match=r"rank 0 communicates between its microbatches without naming one \(unit 3\)"):
        Scenario(microbatches=8).run(nameless)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_another_data_parallel_size_is_as_if_recorded(tmp_path: Path, replicas: int) -> None:
    changed = Scenario(dp=replicas).run(pipeline(tmp_path / "a.prism", replicas=2))
    expected = simulate(load(pipeline(tmp_path / "b.prism", replicas=replicas)))
    assert rows_of(changed) == rows_of(expected)
    sizes = {name: len(group.ranks) for group in changed.job.groups.values() for name in [group.name.split("@")[0]]}
    assert sizes["dp0"] == replicas


def folded_experts(path: Path) -> Path:
    """Four replicas of one rank as Megatron names its groups; pairs of them exchange rows, of other sizes in each."""
    names = {(0, 1, 2, 3): "DATA_PARALLEL_GROUP", (0, 1): "EXPERT_MODEL_PARALLEL_GROUP",
             (2, 3): "EXPERT_MODEL_PARALLEL_GROUP", (0, 2): "EXPERT_DATA_PARALLEL_GROUP",
             (1, 3): "EXPERT_DATA_PARALLEL_GROUP"}  # fmt: skip
    with TraceWriter(path, world_size=4, graph_kind=GraphKind.CALIBRATED) as writer:
        ids = dict[tuple[int, str], int]()
        for number, (ranks, name) in enumerate(names.items(), 1):
            ids |= {(rank, name): number for rank in ranks}
            writer.add_group(ProcessGroup(number, str(number), name, "nccl", ranks))
        for rank in range(4):
            rows = 10 + rank // 2
            writer.add_units(rank, {
                "kind": [UnitKind.COMPUTE, *[UnitKind.COLLECTIVE] * 3],
                "op": [0, Op.ALL_TO_ALL, Op.ALL_REDUCE, Op.ALL_REDUCE],
                "group_id": [0, *(ids[rank, f"{name}_GROUP"] for name in ("EXPERT_MODEL_PARALLEL", "DATA_PARALLEL",
                                                                          "EXPERT_DATA_PARALLEL"))],
                "seq": [ABSENT, 0, 0, 0], "dtype": [0, *[DType.FLOAT32] * 3], "num_elements_in": [ABSENT, rows, 4, 4],
                "num_elements_out": [ABSENT, rows, 4, 4], "start_ns": [0, 1000, 2000, 3000],
                "end_ns": [1000, 2000, 3000, 4000], "transfer_ns": [ABSENT, 1000, 1000, 1000], "gap_ns": [0] * 4,
            })  # fmt: skip
    return path


def test_replicas_that_experts_join_are_copied_in_blocks(tmp_path: Path) -> None:
    """As `prism expand` counts them: --dp is the number of replicas, not that of blocks."""
    path = folded_experts(tmp_path / "a.prism")
    with pytest.raises(UsageError, match=r"7 replicas cannot be made: .* has blocks of 2 that belong together"):
        Scenario(dp=7).run(path)
    grow(path, tmp_path / "b.prism", num_replicas=16)
    one, other = Scenario(dp=16).run(path).job, load(tmp_path / "b.prism")
    sizes = [
        sorted((group.description, len(group.ranks)) for group in job.groups.values() if len(group.ranks) > 1)
        for job in (one, other)
    ]
    assert one.world_size == other.world_size == 16
    assert sizes[0] == sizes[1] and dict(sizes[0])["DATA_PARALLEL_GROUP"] == 16  # and eight in those of experts


def test_a_changed_job_can_be_written_and_read(tmp_path: Path) -> None:
    path = pipeline(tmp_path / "job.prism")
    out = tmp_path / "out.prism"
    assert run(["simulate", str(path), "--dp", "3", "--schedule", "gpipe", "--slow", "rank=4:1.2", "-o", str(out)]) == 0
    direct = Scenario(dp=3, schedule="gpipe", slow=("rank=4:1.2",)).run(path)
    recorded = pipeline(tmp_path / "so.prism", replicas=3, schedule="gpipe")
    assert rows_of(direct) == rows_of(Scenario(slow=("rank=4:1.2",)).run(recorded)), "combined is as if recorded so"
    assert run(["validate", str(out)]) == 0
    again = simulate(load(out))
    np.testing.assert_array_equal(np.sort(again.end_ns), np.sort(direct.end_ns))


def test_random_stragglers_repeat_by_seed(tmp_path: Path) -> None:
    path = pipeline(tmp_path / "job.prism")
    base = simulate(load(path)).step_time_ns
    for per in ("rank", "unit"):
        runs = [Scenario(straggle=(f"lognormal:0.2:seed={seed}:per={per}",)).run(path) for seed in (1, 1, 2)]
        assert runs[0].step_time_ns == runs[1].step_time_ns != runs[2].step_time_ns
    for distribution in ("pareto", "uniform"):
        assert Scenario(straggle=(f"{distribution}:0.5",)).run(path).step_time_ns > base
    assert Scenario(straggle=("normal:0.0",)).run(path).step_time_ns == base


def _alone(path: Path, *, ranks: int, units: int, work: int = 1_000_000) -> Path:
    """One step of `units` units of computing on each rank, and a barrier that takes no time."""
    program = Program(ranks, {1: tuple(range(ranks))})
    for step in range(2):
        program.step = step
        for rank in range(ranks):
            for _ in range(units):
                program.compute(rank, work)
        for rank, unit in program.collective(1, lambda _: 0, op=Op.BARRIER).items():
            program.wait(rank, unit)
    return write(path, program.rows, program.groups, kind=GraphKind.CALIBRATED)


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [
        ("normal", 1.0, 0.2),
        ("uniform", 1 + 0.2 / 2, 0.2 / np.sqrt(12)),
        ("lognormal", np.exp(0.2**2 / 2), np.exp(0.2**2 / 2) * np.sqrt(np.expm1(0.2**2))),
        ("pareto", 1 + 0.2 / 2, 0.2 * np.sqrt(3 / 4)),  # of Lomax with shape 3
    ],
)
def test_stragglers_have_the_distribution_that_was_asked_for(
    tmp_path: Path, distribution: str, mean: float, deviation: float
) -> None:
    path = _alone(tmp_path / "job.prism", ranks=2, units=4000)
    timeline = Scenario(straggle=(f"{distribution}:0.2:seed=5:per=unit:rank=1",)).run(path)
    mine = [end - start for (rank, _), (start, end) in sorted(rows_of(timeline).items()) if rank == 1]
    factors = np.array(mine).reshape(2, 4002)[:, :4000] / 1e6  # behind them the barrier, and the wait for it
    assert factors.mean() == pytest.approx(mean, abs=4 * deviation / np.sqrt(factors.size))
    assert factors.std() == pytest.approx(deviation, rel=0.1 if distribution != "pareto" else 0.3)


def test_a_step_waits_for_the_largest_of_all_factors(tmp_path: Path) -> None:
    """The expected largest of n uniform factors between 1 and 1 + s is 1 + s * n / (n + 1)."""
    path, num_ranks, spread = _alone(tmp_path / "job.prism", ranks=7, units=1), 7, 0.5
    base = load(path)
    steps = [simulate(parse_straggle(f"uniform:{spread}:seed={seed}").apply(base)).step_time_ns for seed in range(300)]
    deviation = spread * np.sqrt(num_ranks / ((num_ranks + 1) ** 2 * (num_ranks + 2)))
    assert np.mean(steps) / 1e6 == pytest.approx(1 + spread * num_ranks / (num_ranks + 1), abs=4 * deviation / 300**0.5)


def test_without_stragglers_all_units_of_a_kind_take_equally_long(tmp_path: Path) -> None:
    path = pipeline(tmp_path / "job.prism", stages=1, replicas=4, microbatches=2)
    slow = Scenario(slow=("rank=2&phase=forward:3",))
    ideal = Scenario(slow=slow.slow, equal=("all",))
    # equal comes first in a scenario: what is slow afterwards stays slow
    assert ideal.run(path).step_time_ns == pytest.approx(slow.run(path).step_time_ns, abs=8)
    assert run(["simulate", str(path), "--slow", "rank=2&phase=forward:3", "-o", str(tmp_path / "slow.prism")]) == 0
    equal = Scenario(equal=("all",)).run(tmp_path / "slow.prism")
    mean = FORWARD_NS + 0.5 + (3 - 1) * (FORWARD_NS + 0.5) / 4
    assert equal.step_time_ns == pytest.approx(slow.run(path).step_time_ns - 2 * (3 * (FORWARD_NS + 0.5) - mean), abs=4)
    but = Scenario(equal=("all:but:rank=2",)).run(tmp_path / "slow.prism")
    assert but.step_time_ns == pytest.approx(slow.run(path).step_time_ns, abs=4)


@given(st.integers(0, 99), st.integers(2, 64), st.floats(1.0, 1.9))
def test_loads_of_experts_have_mean_one_and_the_largest_asked_for(seed: int, size: int, skew: float) -> None:
    loads = ExpertSkew(skew, seed).loads(7, size)
    assert loads.max() == pytest.approx(skew) and loads.mean() == pytest.approx(1.0) and loads.min() >= 0


def test_skewed_experts(tmp_path: Path) -> None:
    program = Program(4, {1: (0, 1, 2, 3)})
    for step in range(2):
        program.step = step
        for work, exchanges in ((100, True), (1000, True), (100, False)):
            for rank in range(4):
                program.compute(rank, work)
            for rank, unit in program.collective(1, lambda _: 10, op=Op.ALL_TO_ALL).items() if exchanges else ():
                program.wait(rank, unit)
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    assert simulate(load(path)).step_time_ns == 1220
    timeline = Scenario(moe_skew=1.5).run(path)
    # the busiest rank computes 1,500 ns, both exchanges take 15
    assert timeline.step_time_ns == pytest.approx(100 + 15 + 1500 + 15 + 100, abs=2)
    assert summarise(timeline).stragglers[0].rank == int(np.argmax(ExpertSkew(1.5).loads(1, 4)))
    with pytest.raises(UsageError, match="no all-to-all"):
        Scenario(moe_skew=2).run(pipeline(tmp_path / "other.prism"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slow", "rank=0"], "is not WHERE:FACTOR"),
        (["--slow", "rang=0:2"], "keys are rank"),
        (["--slow", "rank=99:2"], "no rank of"),
        (["--slow", "rank=0:2@1parsec"], "is not a time"),
        (["--slow", "phase=forward:2@1s-2s"], "for whole ranks"),
        (["--scale", "op=allreduce:2"], "'allreduce' .* is unknown"),
        (["--straggle", "cauchy:1"], "there are lognormal"),
        (["--link", "network.bandwidth_gb_per_s=1"], "give one with --cluster"),
        (["--cluster", "h100-sxm", "--link", "network.speed=1"], "is not network.KEY=VALUE"),
        (["--remove", "rank=0"], "removed on all ranks"),
        (["--dp", "2", "--dp-groups", "nobody"], "has no group 'nobody'"),
    ],
)
def test_what_cannot_be_understood_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    path = pipeline(tmp_path / "job.prism")
    assert run(["simulate", str(path), *options]) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "job.prism"
    subprocess.run([sys.executable, EXAMPLE, path], check=True, stdout=subprocess.DEVNULL)
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--steps", "900:910"], "no units in steps 900:910"),
        (["simulate", "--slow", "rank=0:1e300"], "with a factor from 0 to 1,000,000"),
        (["simulate", "--slow", "rank=0:-1"], "with a factor from 0 to 1,000,000"),
        (["simulate", "--dp", "1000000000"], "a job has at most 1048576 ranks"),
        (["simulate", "--microbatches", "100000000"], "make more than 1,000,000 units in a step of rank 0"),
        (["sweep", "--variant", "--slow 'x"], "No closing quotation"),
        (["analyze", "--max-gap-us", "1e400"], "is not in the range"),
        (["analyze", "--max-gap-us", "nan"], "not a number"),
        (["analyze", "--steps", "99999999999999999999:"], "has no units in steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_out_of_bounds_is_refused_at_once(
    example: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run([words[0], str(example), *words[1:]]) == 2
    assert message in capsys.readouterr().err
