"""What a rank waits for: a slow count of every wait, and `prism analyze` of the same times, agree with the totals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.analysis import breakdown_of, load_job
from prism_sdk.analysis.breakdown import PARTS
from prism_sdk.simulate import Timeline, load, simulate, summarise, write_timeline
from prism_sdk.simulate.kernel import (
    BUSY,
    EXPOSED_COLLECTIVE,
    EXPOSED_MESSAGE,
    HOST_GAP,
    IDLE_COLLECTIVE,
    IDLE_MESSAGE,
    MOVED_COLLECTIVE,
    MOVED_MESSAGE,
)
from prismtrace import ABSENT, GraphKind, Phase, TraceReader, TraceWriter, UnitKind
from tests.graph.jobs import Program, random_program
from tests.simulate.reference import reference, write
from tests.simulate.test_exact import early_member

_NAMES = ("compute", "bubble", "imbalance", "exposed", "host")


def _told(timeline: Timeline, position: int) -> dict[str, int]:
    """The parts of the counted time of a rank, ns."""
    row = timeline.totals()[0][position].tolist()
    sums = (sum(row[BUSY:]), row[IDLE_MESSAGE], row[IDLE_COLLECTIVE], row[EXPOSED_MESSAGE] + row[EXPOSED_COLLECTIVE],
            row[HOST_GAP])  # fmt: skip
    return dict(zip(_NAMES, sums, strict=True))


def _slow_count(program: Program, timeline: Timeline, rank: int) -> dict[str, int]:
    """The same by the words of docs/simulate.md, nanosecond by nanosecond, from times of the slow scheduler."""
    times = reference(program.rows, program.groups)
    members: dict[Any, list[tuple[int, int]]] = {}
    for member, mine in program.rows.items():
        for index, row in enumerate(mine):
            if row["kind"] == UnitKind.COLLECTIVE:
                members.setdefault((row["group_id"], row["seq"]), []).append((member, index))
            elif row["kind"] in (UnitKind.SEND, UnitKind.RECV):
                ends = (member, row["peer"]) if row["kind"] == UnitKind.SEND else (row["peer"], member)
                members.setdefault((row["group_id"], *ends, row["tag"], row["seq"]), []).append((member, index))
    key_of = {place: key for key, places in members.items() for place in places}

    def moves(key: Any, now: int) -> bool:
        """Whether data of an operation moves here; or of the one before it in the group, where that holds it up."""
        if len(key) == 5 and key[1] == rank:
            return True  # a send waits for nobody
        ready = max(times[place][0] for place in members[key])
        before = (key[0], key[1] - 1)
        ended = max(times[place][1] for place in members[before]) if len(key) == 2 and before in members else ready
        if now >= max(ready, ended):
            return any(member == rank and now < times[member, index][1] for member, index in members[key])
        return ended > ready and moves(before, now)

    found = dict.fromkeys(_NAMES, 0)
    first, last, length = timeline.window(rank)
    for index in range(first, last):
        row, (start, end) = program.rows[rank][index], times[rank, index]
        if row["kind"] == UnitKind.COMPUTE:
            found["compute"] += end - start
        elif row["kind"] == UnitKind.WAIT and row["awaits"] != ABSENT:
            awaited = rank, row["awaits"]
            kind = program.rows[rank][row["awaits"]]["kind"]
            for now in range(start, end):
                if now >= times[awaited][1]:
                    continue  # it is there: the host takes its time
                idle = "imbalance" if kind == UnitKind.COLLECTIVE else "bubble"
                found["exposed" if moves(key_of[awaited], now) else idle] += 1
    found["host"] = length - sum(found.values())
    return found


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_parts_are_those_of_a_slow_count(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    program = random_program(seed)
    path = tmp_path_factory.mktemp("job") / "job.prism"
    timeline = simulate(load(write(path, program.rows, program.groups, kind=GraphKind.CALIBRATED)))
    for rank in range(program.world_size):
        assert _told(timeline, rank) == _slow_count(program, timeline, rank)


def _waiting_program(seed: int) -> Program:
    """A random job whose ranks wait for each communication at once, with a delay after waits and gaps."""
    rng = random.Random(seed)
    world = rng.randint(2, 4)
    groups = {1: tuple(range(world)), 2: tuple(sorted(rng.sample(range(world), 2)))}
    program = Program(world, groups)
    for step in range(3):
        program.step = step
        for _ in range(8):
            for rank in range(world):
                program.compute(rank, rng.randint(1, 400), gap=rng.choice([ABSENT, rng.randint(0, 30)]), phase=1)
            if rng.random() < 0.6:
                units = program.collective(rng.choice([1, 2]), lambda _: rng.randint(0, 200))
            else:
                source, destination = rng.sample(range(world), 2)
                units = {source: program.send(1, source, destination, 0, rng.randint(0, 50)),
                         destination: program.recv(1, source, destination, 0, rng.randint(0, 200))}  # fmt: skip
            for rank, unit in units.items():
                program.wait(rank, unit, wake=rng.randint(0, 100), least=rng.choice([ABSENT, rng.randint(0, 60)]))
        for rank in range(world):
            program.compute(rank, rng.randint(1, 50), phase=int(Phase.OPTIMIZER))
    return program


def _observed(path: Path, source: Path) -> Path:
    """The same times, as a run would have been observed: nothing says what they consist of."""
    with (
        TraceReader(source) as reader,
        TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=reader.world_size) as writer,
    ):
        for group in reader.groups.values():
            writer.add_group(group)
        for rank in reader.ranks:
            columns = reader.units(rank).columns()
            writer.add_units(rank, {name: column for name, column in columns.items()
                                    if name not in ("gap_ns", "transfer_ns", "prism.provenance")})  # fmt: skip
            writer.add_steps(rank, reader.steps(rank).columns())
    return path


def _analyzed(path: Path, rank: int) -> dict[str, float]:
    """What `prism analyze` says of the counted steps of a rank, ns."""
    parts = breakdown_of(load_job(path))
    chosen = (parts.windows.rank == rank) & parts.windows.is_steady
    sums = dict(zip(PARTS, parts.parts_ns[chosen].sum(axis=0).tolist(), strict=True))
    return {"compute": sums["compute"], "bubble": sums["bubble"], "imbalance": sums["imbalance"],
            "exposed": sums["exposed_communication"], "host": sums["launch_gap"] + sums["idle"]}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_analyze_says_the_same_of_simulated_and_observed_times(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Where a rank waits for one communication at a time there is no other that the two could tell apart."""
    program = _waiting_program(seed)
    folder = tmp_path_factory.mktemp("job")
    write(folder / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    timeline = simulate(load(folder / "job.prism"))
    write_timeline(timeline, folder / "simulated.prism")
    observed = _observed(folder / "observed.prism", folder / "simulated.prism")
    again = simulate(load(observed))
    for rank in range(program.world_size):
        told = _told(timeline, rank)
        assert told == _analyzed(folder / "simulated.prism", rank) == _analyzed(observed, rank)
        assert told == _told(again, rank)
    report = summarise(again)
    assert 0 < report.exposed_ns <= report.communication_ns


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_no_more_is_exposed_than_moves_outside_of_computing(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """`prism analyze` also counts what moves while a rank waits for another one; so it never has less."""
    program = random_program(seed)
    for rank in range(program.world_size):
        for row in program.rows[rank]:
            row["phase"] = int(Phase.OPTIMIZER)  # all steps are whole
    folder = tmp_path_factory.mktemp("job")
    write(folder / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    timeline = simulate(load(folder / "job.prism"))
    write_timeline(timeline, folder / "out.prism")
    for rank in range(program.world_size):
        told, said = _told(timeline, rank), _analyzed(folder / "out.prism", rank)
        assert told["compute"] == said["compute"]
        assert told["exposed"] <= said["exposed"]


def test_the_delay_after_a_wait_is_not_communication(tmp_path: Path) -> None:
    program = Program(2, {1: (0, 1)})
    for rank, computes in enumerate((100, 300)):
        program.compute(rank, computes)
    for rank, unit in program.collective(1, lambda _: 50).items():
        program.wait(rank, unit, wake=1000)
    report = summarise(simulate(load(write(tmp_path / "job.prism", program.rows, program.groups,
                                           kind=GraphKind.CALIBRATED))))  # fmt: skip
    assert (report.exposed_ns, report.communication_ns) == (50, 50)
    assert report.shares.exposed_percent == pytest.approx(100 * 50 / 1350)
    assert report.shares.host_percent == pytest.approx(100 * 1000 / 1350)
    assert report.shares.imbalance_percent == pytest.approx(100 * 100 / 1350)  # rank 0 waits 200 of them


def test_collectives_behind_each_other_are_communication(tmp_path: Path) -> None:
    """Two are posted together and the second is waited for first: both transfers are exposed, nobody is late."""
    program = Program(2, {1: (0, 1)})
    first, second = program.collective(1, lambda _: 40), program.collective(1, lambda _: 10)
    for rank in range(2):
        program.wait(rank, second[rank])
        program.wait(rank, first[rank])
        program.compute(rank, 50)
    report = summarise(simulate(load(write(tmp_path / "job.prism", program.rows, program.groups,
                                           kind=GraphKind.CALIBRATED))))  # fmt: skip
    assert report.shares.exposed_percent == pytest.approx(50) and report.shares.imbalance_percent == 0
    assert report.exposed_ns == report.communication_ns == 50


def test_members_that_left_early_have_communicated(tmp_path: Path) -> None:
    """The root of a broadcast is done before the other has come: what it waited for counts as moved."""
    program = early_member()
    timeline = simulate(load(write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.OBSERVED)))
    totals, _, _ = timeline.totals()
    assert totals[:, EXPOSED_COLLECTIVE].tolist() == totals[:, MOVED_COLLECTIVE].tolist() == [30, 50]
    assert totals[:, HOST_GAP].tolist() == [5, 5] and not totals[:, MOVED_MESSAGE].any()
