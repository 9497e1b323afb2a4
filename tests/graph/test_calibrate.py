from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.graph.calibrate import measure, merge_slices, relative_change, step_time_ns, whole_steps_ns
from prism_sdk.graph.errors import GraphError, MissingTimingError
from prism_sdk.graph.job import COLUMN_TYPES, JobGraph
from prism_sdk.graph.prediction import predict_step_time
from prism_sdk.graph.statistics import bootstrap_interval, mean_known
from prism_sdk.graph.timing import Schedule, Timing, schedule
from prism_sdk.graph.unlike import first_difference
from prismtrace import ABSENT, GraphKind, Op, UnitKind
from tests.graph.jobs import Program, random_program


def _observed(timeline: Schedule, *, ranks: list[int] | None = None) -> JobGraph:
    """What a run that follows a timeline records: times only, no weights."""
    graph = timeline.graph
    columns = {}
    for rank in graph.ranks if ranks is None else ranks:
        rows = graph.rows(rank)
        own = {name: graph.columns[name][rows] for name in COLUMN_TYPES}
        own |= {"start_ns": timeline.start_ns[rows], "end_ns": timeline.end_ns[rows]}
        own |= {name: np.full(len(own["kind"]), ABSENT) for name in ("gap_ns", "transfer_ns")}
        columns[rank] = own
    return JobGraph.from_columns(columns, world_size=graph.world_size, groups=graph.groups,
                                 graph_kind=GraphKind.OBSERVED)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_what_was_observed_is_predicted_exactly(seed: int, with_streams: bool) -> None:
    """Weights taken from the times of a run, put into the longest path, give the times of the run."""
    p = random_program(seed, with_streams=with_streams)
    for rank, rows in p.rows.items():
        rows.insert(0, {"kind": 1, "step": 0, "start_ns": 0, "end_ns": 5})
        for index, row in enumerate(rows):
            row["awaits"] = row["awaits"] + 1 if row.get("awaits", ABSENT) != ABSENT else ABSENT
            if row["kind"] == UnitKind.COMPUTE:  # no two steps are of one structure
                row["num_elements_in"] = 1000 * rank + index
    truth = schedule(p.graph())
    observed = _observed(truth)
    result = merge_slices(observed, [observed], warmup_steps=0)
    for name in ("start_ns", "end_ns", "arrival_ns", "host_ns"):
        np.testing.assert_array_equal(getattr(result.timeline, name), getattr(truth, name))
    assert result.is_measured.all() and not result.num_clipped
    # and so does a file with these columns
    again = JobGraph.from_columns(
        {rank: {**{n: observed.columns[n][observed.rows(rank)] for n in COLUMN_TYPES}, **result.columns(rank)}
         for rank in observed.ranks}, world_size=observed.world_size, groups=observed.groups,
    )  # fmt: skip
    np.testing.assert_array_equal(schedule(again).end_ns, truth.end_ns)


def _steps(durations: dict[int, list[int]], *, transfer: int = 50) -> Program:
    """Every step computes and reduces."""
    p = Program(len(durations), {1: tuple(durations)})
    for step in range(len(durations[0])):
        p.step = step
        for rank in durations:
            p.compute(rank, durations[rank][step], gap=3)
        for rank, unit in p.collective(1, lambda _: transfer).items():
            p.wait(rank, unit, wake=4)
    return p


def test_slices_of_one_rank_give_compute_and_keep_transfers() -> None:
    truth = schedule(_steps({0: [100] * 6, 1: [130] * 6}).graph())
    slow = _steps({0: [900] * 6, 1: [100] * 6}, transfer=77).graph()  # a recording, disturbed by switching
    noisy = {0: [700, 100, 90, 110, 100, 100], 1: [700, 130, 130, 120, 140, 130]}
    run = schedule(_steps(noisy).graph())
    slices = [_observed(run, ranks=[rank]) for rank in (0, 1)]
    result = merge_slices(slow, slices, warmup_steps=1)
    kind = slow.columns["kind"]
    assert set(result.timing.duration_ns[slow.rows(0)][kind[slow.rows(0)] == 1]) == {100}
    assert set(result.timing.duration_ns[slow.rows(1)][kind[slow.rows(1)] == 1]) == {130}
    # no slice has both members on one clock, so the transfers are those of the recording
    assert set(result.timing.transfer_ns[kind == 2]) == {77}
    assert not result.is_measured[kind == 2].any() and not len(result.unmeasured_compute)
    assert result.num_samples.max() == 5
    # with one slice of both, they are measured: waiting is not in them
    both = merge_slices(slow, [*slices, _observed(run)])
    assert set(both.timing.transfer_ns[kind == 2]) == {50}
    assert step_time_ns(both.timeline) == step_time_ns(truth) == 130 + 3 + 50 + 4
    assert relative_change(result.timeline, both.timeline) == 27 / 187
    assert relative_change(both.timeline, both.timeline) == 0.0


def test_a_first_step_that_never_settles_keeps_no_calibration_from_converging() -> None:
    quick, slow = (schedule(_steps({0: [first, 100, 100], 1: [100] * 3}).graph()) for first in (100, 900))
    assert relative_change(quick, slow) == 0.0
    alone = [schedule(_steps({0: [first], 1: [100]}).graph()) for first in (100, 900)]
    assert relative_change(*alone) == 800 / alone[1].end_of_job_ns


def test_steps_seen_only_in_the_warm_up_use_it_and_others_stay_named() -> None:
    p = _steps({0: [100] * 4, 1: [130] * 4})
    p.rows[0].insert(1, {"kind": 1, "step": 0, "start_ns": 0, "end_ns": 40})
    for row in p.rows[0][2:]:
        if "awaits" in row:
            row["awaits"] += 1
    graph = p.graph()
    result = merge_slices(graph, [_observed(schedule(graph))])
    assert result.timing.duration_ns[:2].tolist() == [100, 40] and result.num_samples[0] == 1
    partial = merge_slices(graph, [_observed(schedule(graph), ranks=[0])])
    assert set(graph.rank_of_row[partial.unmeasured_compute]) == {1}
    assert set(partial.timing.duration_ns[partial.unmeasured_compute]) == {130}


def test_counts_may_differ_between_steps_of_one_structure() -> None:
    slow, run = _steps({0: [9] * 4, 1: [9] * 4}), _steps({0: [100] * 4, 1: [130] * 4})
    for p, size in ((slow, 10), (run, 20)):
        for rows in p.rows.values():
            for row in rows:
                if row["kind"] == UnitKind.COLLECTIVE:
                    row |= {"num_elements_in": size + row["step"], "num_elements_out": size + row["step"]}
    result = merge_slices(slow.graph(), [_observed(schedule(run.graph()))])
    assert step_time_ns(result.timeline) == 187 and result.num_samples.max() == 3


def test_what_a_run_does_otherwise_is_named() -> None:
    graph = _steps({0: [9] * 3, 1: [9] * 3}).graph()
    run = schedule(graph)
    alone = [_observed(run, ranks=[rank]) for rank in (0, 1)]
    assert first_difference(graph, alone) is None
    assert first_difference(graph, alone[:1]) == "rank 1 did not run"
    assert first_difference(graph, alone[:1], stands_for={1: 0}) is None
    cut = _steps({0: [9] * 3, 1: [9] * 3})
    cut.rows[1].append({**cut.rows[1][0], "step": 2})  # an adapter names what is behind the last unit
    assert first_difference(graph, [cut.graph()]) is None, "the other steps show this one"
    units = len(graph.columns["step"][graph.rows(1)]) // 3
    assert first_difference(cut.graph(), alone) == (
        "rank 1 communicates as recorded, and its computing or waiting is cut otherwise: "
        f"step 2 has {units} units, in the graph {units + 1}"
    )
    fewer = _steps({0: [9] * 2, 1: [9] * 2})
    for rows in fewer.rows.values():
        for row in rows:
            row["step"] = 0
    assert first_difference(graph, [fewer.graph()]) == "rank 0 communicates 2 times, in the graph 3"
    for rows in fewer.rows.values():
        for row in rows:
            if row["kind"] == UnitKind.COLLECTIVE:
                row["op"] = int(Op.BARRIER)
    text = first_difference(graph, [fewer.graph()])
    assert text is not None and text.startswith("the graph has rank 0, unit ")
    assert "all_reduce" in text and ", the run did rank 0, unit " in text and "barrier" in text


def test_nothing_in_common_and_nothing_known_are_errors() -> None:
    graph = _steps({0: [100] * 2, 1: [130] * 2}).graph()
    other = Program(1, {})
    other.compute(0, 5)
    other.compute(0, 5)
    with pytest.raises(GraphError, match="no slice shows any step"):
        merge_slices(graph, [other.graph()])
    with pytest.raises(GraphError, match="no slice shows any step"):
        merge_slices(graph, [])
    run = schedule(graph)
    bare = _observed(run)
    with pytest.raises(MissingTimingError, match="transfer time of communication units is absent"):
        merge_slices(bare, [_observed(run, ranks=[0]), _observed(run, ranks=[1])])
    filled = merge_slices(bare, [_observed(run, ranks=[0])], default_transfer_ns=1)
    assert set(filled.timing.transfer_ns[bare.columns["kind"] == 2]) == {1}


def test_values_below_zero_are_clipped_and_counted() -> None:
    p = Program(1, {1: (0,)})
    p.compute(0, 10)
    p.collective(1, lambda _: ABSENT)
    p.rows[0][1] |= {"start_ns": 1010, "end_ns": 1009}
    result = measure(p.graph())
    assert result.transfer_ns.tolist() == [ABSENT, 0] and result.num_clipped == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.just(ABSENT) | st.integers(-5, 50), min_size=3, max_size=3), min_size=1, max_size=6))
def test_mean_of_the_known(rows: list[list[int]]) -> None:
    expected = []
    for column in zip(*rows, strict=True):
        known = [value for value in column if value != ABSENT]
        expected.append(sum(known) // len(known) if known else ABSENT)
    assert mean_known(np.array(rows, dtype=np.int64)).tolist() == expected


def test_bootstrap_interval_is_seeded_and_covers() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for seed in range(100):
        interval = bootstrap_interval(rng.normal(100.0, 5.0, 30), num_resamples=400, seed=seed)
        covered += interval.low <= 100.0 <= interval.high
        assert interval.low <= interval.estimate <= interval.high and interval.num_samples == 30
    assert 85 <= covered <= 100
    assert bootstrap_interval([1, 2, 3], seed=4) == bootstrap_interval([1, 2, 3], seed=4)
    assert bootstrap_interval([7, 7], statistic="median").high == 7.0
    with pytest.raises(ValueError, match="no values"):
        bootstrap_interval([])


def test_prediction_interval_covers_the_spread_of_steps() -> None:
    rng = np.random.default_rng(1)
    noisy = {rank: (1000 + rng.integers(-100, 100, 12)).tolist() for rank in (0, 1)}
    graph = _steps(noisy).graph()
    run = schedule(graph)
    slices = [_observed(run, ranks=[0]), _observed(run, ranks=[1])]
    prediction = predict_step_time(graph, slices, num_resamples=60, seed=3)
    interval = prediction.interval
    assert interval == predict_step_time(graph, slices, num_resamples=60, seed=3).interval
    assert interval.low < interval.estimate < interval.high and interval.num_samples == 11
    assert interval.high - interval.low < 150
    still = schedule(_steps({0: [100] * 4, 1: [130] * 4}).graph())
    exact = predict_step_time(still.graph, [_observed(still)], num_resamples=5).interval
    assert (exact.low, exact.estimate, exact.high) == (187.0, 187.0, 187.0)


@pytest.mark.parametrize("num_ranks", [2, 8, 24])
def test_what_variation_costs_is_predicted(num_ranks: int) -> None:
    """Ranks measured apart, with times of their own in every step: the job waits for the latest, not for the mean."""
    rng = np.random.default_rng(num_ranks)
    noisy = {rank: (10_000 + rng.integers(-3000, 3000, 40)).tolist() for rank in range(num_ranks)}
    graph = _steps(noisy).graph()
    run = schedule(graph)
    slices = [_observed(run, ranks=[rank]) for rank in range(num_ranks)]
    real = step_time_ns(run)
    of_means = step_time_ns(merge_slices(graph, slices).timeline)
    prediction = predict_step_time(graph, slices, num_draws=60, num_resamples=20)
    assert of_means < 0.94 * real
    assert prediction.interval.estimate == pytest.approx(real, rel=0.02)
    assert prediction.interval.low < real < prediction.interval.high or prediction.interval.estimate == pytest.approx(
        real, rel=0.01
    )
    typical = prediction.calibration.timeline
    assert step_time_ns(typical) == pytest.approx(prediction.interval.estimate, rel=0.02)
    last = whole_steps_ns(typical)[-1]
    assert last == pytest.approx(prediction.interval.estimate, rel=0.03)


def test_ranks_of_one_slice_vary_together() -> None:
    shared = (10_000 + np.random.default_rng(4).integers(-3000, 3000, 30)).tolist()
    graph = _steps({0: shared, 1: shared}).graph()
    run = schedule(graph)
    prediction = predict_step_time(graph, [_observed(run)], num_draws=50, num_resamples=5)
    assert prediction.interval.estimate == pytest.approx(
        step_time_ns(merge_slices(graph, [_observed(run)]).timeline), rel=0.01
    )


def _in_turns(lengths: list[int], num_steps: int, *, num_ranks: int, jitter: int = 200) -> dict[int, list[int]]:
    """Steps of kinds in turns, the first one with the start of libraries; every rank varies by itself, too."""
    rng = np.random.default_rng(num_steps)
    kinds = [lengths[step % len(lengths)] + (30_000 if step == 0 else 0) for step in range(num_steps)]
    return {rank: (kinds + rng.integers(-jitter, jitter, num_steps)).tolist() for rank in range(num_ranks)}


@pytest.mark.parametrize("lengths", [[10_000, 30_000], [10_000, 10_000, 10_000, 40_000]])
def test_kinds_of_steps_in_turns_have_times_of_their_own(lengths: list[int]) -> None:
    """All ranks have the long steps at once: none waits for another's, as if each had long steps when it liked."""
    turns = len(lengths)
    runs = [schedule(_steps(_in_turns(lengths, n, num_ranks=6)).graph()) for n in (4 * turns + 2, 4 * turns + 3)]
    graph = runs[0].graph
    slices = [_observed(run, ranks=[rank, rank + 1]) for run in runs for rank in (0, 2, 4)]
    prediction = predict_step_time(graph, slices, num_draws=40, num_resamples=20)
    whole_round = np.mean(whole_steps_ns(runs[0])[1:])
    assert prediction.interval.estimate == pytest.approx(whole_round, rel=0.01)
    assert prediction.interval.high - prediction.interval.low < 0.02 * whole_round
    for timeline in (prediction.calibration.timeline, prediction.means.timeline):
        np.testing.assert_allclose(whole_steps_ns(timeline), whole_steps_ns(runs[0]), rtol=0.05)


def test_steps_that_differ_without_turns_differ_for_all_ranks_at_once() -> None:
    """Lengths of sequences, say, which are drawn once for all ranks."""
    lengths = np.random.default_rng(5).integers(5_000, 40_000, 40).tolist()
    run = schedule(_steps(_in_turns(lengths, 40, num_ranks=6)).graph())
    slices = [_observed(run, ranks=[rank]) for rank in range(6)]
    prediction = predict_step_time(run.graph, slices, num_draws=60, num_resamples=5)
    assert prediction.interval.estimate == pytest.approx(step_time_ns(run), rel=0.06)


def test_timing_of_the_wrong_size_is_an_error() -> None:
    graph = _steps({0: [1], 1: [1]}).graph()
    empty = np.zeros(0, dtype=np.int64)
    with pytest.raises(GraphError, match="0 entries for the 6 rows"):
        schedule(graph, timing=Timing(gap_ns=empty, duration_ns=empty, transfer_ns=empty))
