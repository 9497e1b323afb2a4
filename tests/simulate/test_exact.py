from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prism_sdk.graph.errors import GraphDeadlockError, GraphError, MissingTimingError, UnmatchedUnitError
from prism_sdk.graph.timing import schedule
from prism_sdk.simulate import compiling
from prism_sdk.simulate.loading import load
from prism_sdk.simulate.output import write_timeline
from prism_sdk.simulate.simulation import Timeline, simulate
from prismtrace import GraphKind, Op, has_errors, validate
from tests.graph.jobs import Program, random_program
from tests.simulate.reference import reference, rows_of, write


def _timeline(program: Program, *, kind: GraphKind = GraphKind.CALIBRATED) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        return simulate(load(write(Path(folder) / "job.prism", program.rows, program.groups, kind=kind)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_every_unit_is_where_the_slow_scheduler_has_it(seed: int) -> None:
    program = random_program(seed)
    assert rows_of(_timeline(program)) == reference(program.rows, program.groups)


@pytest.mark.skipif(not compiling.has_compiler(), reason="numba is not installed")
def test_compiled_and_plain_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[Any]:
        timelines = [_timeline(random_program(seed)) for seed in range(25)]
        return [(rows_of(timeline), *(part.tolist() for part in timeline.totals())) for timeline in timelines]

    plain = found()
    monkeypatch.setattr(compiling, "PLAIN_UNITS", 0)
    assert found() == plain


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_the_timeline_of_calibration_agrees(seed: int, with_streams: bool) -> None:
    program = random_program(seed, with_streams=with_streams)
    graph = program.graph()
    other = schedule(graph)
    timeline = _timeline(program)
    for position, rank in enumerate(graph.ranks):
        rows = graph.rows(rank)
        np.testing.assert_array_equal(timeline.times(position).start_ns, other.start_ns[rows])
        np.testing.assert_array_equal(timeline.times(position).end_ns, other.end_ns[rows])
        _, times, _ = timeline.steps(position)
        np.testing.assert_array_equal(times, other.step_times_ns(rank)[1])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
@example(97954)  # a step that begins with communication
def test_what_was_observed_comes_out_again(seed: int) -> None:
    """The times of any possible run, taken as measured, are reproduced to the nanosecond."""
    program = random_program(seed)
    expected = reference(program.rows, program.groups)
    seen = Program(program.world_size, {g: tuple(group.ranks) for g, group in program.groups.items()})
    for rank, rows in program.rows.items():
        for index, row in enumerate(rows):
            start, end = expected[rank, index]
            kept = {n: v for n, v in row.items() if n not in ("gap_ns", "transfer_ns", "start_ns", "end_ns")}
            seen.rows[rank].append({**kept, "start_ns": start + 7, "end_ns": end + 7})
    timeline = _timeline(seen, kind=GraphKind.OBSERVED)
    first = min(start for start, _ in expected.values())
    assert rows_of(timeline) == {place: (s - first, e - first) for place, (s, e) in expected.items()}
    if timeline.job.recorded_step_ns is not None:
        assert timeline.step_time_ns == pytest.approx(timeline.job.recorded_step_ns)


def _dated_anyhow(seed: int) -> tuple[Program, dict[tuple[int, int], int]]:
    """A random program as a busy machine dates it, and when each unit of the host ended from the first time on."""
    program, random = random_program(seed), np.random.default_rng(seed)
    seen = Program(program.world_size, {g: tuple(group.ranks) for g, group in program.groups.items()})
    expected, origin = {}, 2**62
    for rank, rows in program.rows.items():
        clock, hosts = int(random.integers(0, 50)), []
        for row in rows:
            dated = {n: v for n, v in row.items() if n not in ("gap_ns", "transfer_ns", "start_ns", "end_ns")}
            lasts = int(random.integers(0, 40))
            dated["start_ns"] = clock + int(random.integers(0, 3))
            if row["kind"] in (1, 5):
                dated["end_ns"] = clock = dated["start_ns"] + lasts
                expected[rank, len(seen.rows[rank])] = clock
                hosts.append(dated)
            elif random.random() < 0.7:
                dated["end_ns"] = dated["start_ns"] + 3 * lasts
            seen.rows[rank].append(dated)
        origin = min(origin, *(row["start_ns"] for row in seen.rows[rank][:1] + hosts[:1]))
    return seen, {place: end - origin for place, end in expected.items()}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_host_clocks_come_out_again_whatever_was_dated(seed: int) -> None:
    """On a busy machine a thread is put aside between what happens and its date: completions are then dated behind the
    wait that found them, before the post of another member, or not at all. The clocks of hosts hold nevertheless."""
    seen, expected = _dated_anyhow(seed)
    found = rows_of(_timeline(seen, kind=GraphKind.OBSERVED))
    assert {place: found[place][1] for place in expected} == expected


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_what_was_written_simulates_to_itself(seed: int, names_partners: bool, keep_columns: bool) -> None:
    """Also with members that wait for nobody, operations out of turn, ranks that begin late, unknown partners."""
    seen, _ = _dated_anyhow(seed)
    unknown = set() if names_partners else {group for group in seen.groups if (seed + group) % 2}
    for row in (row for rows in seen.rows.values() for row in rows if row.get("group_id") in unknown):
        row.pop("seq")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = simulate(load(write(folder / "job.prism", seen.rows, seen.groups, kind=GraphKind.OBSERVED)))
        write_timeline(first, folder / "written.prism", keep_columns=keep_columns)
        assert not has_errors(validate(folder / "written.prism"))
        again = simulate(load(folder / "written.prism"))
    assert rows_of(again) == rows_of(first) and again.step_end_ns.tolist() == first.step_end_ns.tolist()
    assert [part.tolist() for part in again.totals()] == [part.tolist() for part in first.totals()]


def test_an_operation_that_a_wait_found_complete_was_so_for_this_rank() -> None:
    """Whose own completion nobody dated: it is not that of the member that was told last."""
    program = Program(2, {1: (0, 1)})
    collective = {"kind": 2, "step": 0, "op": int(Op.ALL_REDUCE), "group_id": 1, "seq": 0}
    for rank, (post, wait, end) in enumerate([(100, 200, 201), (120, 130, 260)]):
        dated = {"end_ns": end} if rank else {}
        program.rows[rank] = [
            {"kind": 1, "step": 0, "start_ns": 0, "end_ns": post},
            {**collective, "start_ns": post, **dated},
            {"kind": 1, "step": 0, "start_ns": post, "end_ns": wait},
            {"kind": 5, "step": 0, "awaits": 1, "start_ns": wait, "end_ns": end},
        ]
    timeline = _timeline(program, kind=GraphKind.OBSERVED)
    assert [int(timeline.times(rank).end_ns[-1]) for rank in range(2)] == [201, 260]
    assert timeline.job.num_detached == 0


def early_member() -> Program:
    """A broadcast whose root is done before the other has come."""
    program = Program(2, {1: (0, 1)})
    for rank, (start, end) in enumerate([(100, 130), (900, 950)]):
        program.rows[rank] = [
            {"kind": 1, "step": 0, "start_ns": 0, "end_ns": start},
            {"kind": 2, "step": 0, "group_id": 1, "seq": 0, "op": int(Op.BROADCAST), "start_ns": start, "end_ns": end},
            {"kind": 5, "step": 0, "awaits": 1, "start_ns": start, "end_ns": end + 5},
        ]
    return program


def test_members_that_left_early_wait_for_nobody() -> None:
    timeline = _timeline(early_member(), kind=GraphKind.OBSERVED)
    assert timeline.job.num_detached == 1
    assert timeline.times(0).end_ns.tolist() == [100, 130, 135]
    assert timeline.times(1).end_ns.tolist() == [900, 950, 955]
    assert "wait for nobody" in timeline.job.notes[0]


def test_roles_are_kept_once() -> None:
    program = Program(6, {g: (2 * g - 2, 2 * g - 1) for g in (1, 2, 3)})
    for rank in range(6):
        program.compute(rank, 10 * (1 + rank % 2))
    for group in (1, 2, 3):
        for rank, unit in program.collective(group, lambda _: 4).items():
            program.wait(rank, unit)
    job = _timeline(program).job
    assert len(job.programs) == 1 and len(job) == 18 and len(job.main) == 6


def _crossed() -> Program:
    program = Program(2, {1: (0, 1), 2: (0, 1)})
    for rank in (0, 1):
        for group in (1, 2) if rank == 0 else (2, 1):
            program.rows[rank] += [
                {"kind": 2, "step": 0, "group_id": group, "seq": 0, "op": 1, "transfer_ns": 1},
                {"kind": 5, "step": 0, "awaits": len(program.rows[rank])},
            ]
    return program


def test_crossed_groups_are_a_named_deadlock() -> None:
    with pytest.raises(GraphDeadlockError, match=r"rank 0 unit 1: waits for all_reduce number 0 in group g1"):
        _timeline(_crossed())


def _fault(change: Any) -> Program:
    program = random_program(11)
    change(program)
    return program


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p: p.rows[0].append({"kind": 2, "step": 0, "group_id": 1, "seq": 99, "op": 1, "transfer_ns": 0}),
         UnmatchedUnitError, "seq 99"),
        (lambda p: p.rows[0].append({"kind": 5, "step": 0, "awaits": 10**6}), GraphError, "waits for unit"),
        (lambda p: p.rows[0].append({"kind": 2, "step": 0, "group_id": 77, "seq": 0, "op": 1, "transfer_ns": 0}),
         GraphError, "trace lacks"),
        (lambda p: p.rows[0].append({"kind": 1, "step": 0}), MissingTimingError, "lacks its start or end"),
        (lambda p: p.rows[0].append({"kind": 3, "step": 0, "group_id": 1, "peer": 1, "tag": 9, "seq": 0,
                                     "transfer_ns": 0}), UnmatchedUnitError, "no partner"),
        (lambda p: p.rows[0].append({"kind": 2, "step": 0, "group_id": 1, "op": 1, "transfer_ns": 0}),
         GraphError, "seq"),
    ],
)  # fmt: skip
def test_faults_are_named(change: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        _timeline(_fault(change))


def test_a_bare_graph_has_no_times(tmp_path: Path) -> None:
    path = write(tmp_path / "bare.prism", random_program(3).rows, random_program(3).groups, kind=GraphKind.BARE)
    with pytest.raises(MissingTimingError, match="calibrate it first"):
        load(path)


def test_a_rank_alone_is_never_kept_waiting(tmp_path: Path) -> None:
    program = Program(2, {1: (0, 1)})
    program.compute(0, 10)
    program.compute(1, 500)
    for rank, unit in program.collective(1, lambda _: 3).items():
        program.wait(rank, unit)
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    assert simulate(load(path, ranks=[0])).length_ns == 13
    assert simulate(load(path)).length_ns == 503
