from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.cli.main import run
from prism_sdk.simulate import critical_path, load, simulate, summarise, write_timeline
from prismtrace import GraphKind, TraceReader, has_errors, validate
from tests.graph.jobs import Program, random_program
from tests.simulate.reference import write


def _two_stages(path: Path) -> Path:
    """Two stages, three steps of 100 + 60 ns; stage 1 waits 100 ns for the message, stage 0 waits for an all-reduce."""
    program = Program(2, {1: (0, 1)})
    for step in range(3):
        program.step = step
        program.compute(0, 100, phase=1, stage=0)
        program.wait(0, program.send(1, 0, 1, 0, 0))
        program.wait(1, program.recv(1, 0, 1, 0, 10))
        program.compute(1, 40, phase=3, stage=1)
        program.compute(0, 5, phase=3, stage=0)
        for rank, unit in program.collective(1, lambda _: 10).items():
            program.wait(rank, unit)
    for rank in (0, 1):
        for row in program.rows[rank]:
            row["stage"] = rank
    facts = {"calibration.step_ns": "160", "calibration.interval_ns": "152:168"}
    return write(path, program.rows, program.groups, kind=GraphKind.CALIBRATED, **facts)


def test_where_the_time_goes_by_hand(tmp_path: Path) -> None:
    report = summarise(simulate(load(_two_stages(tmp_path / "job.prism"))))
    assert report.step_time_ns == 160
    assert report.num_steps == 2
    assert report.interval is not None and (report.interval.low, report.interval.high) == (152, 168)
    first, second = report.stages
    assert (first.name, first.busy_percent) == ("stage 0", pytest.approx(100 * 105 / 160))
    # stage 1 waits 100 ns for the sender and 10 for the data; stage 0 45 for the last member and 10 for the data
    assert second.bubble_percent == pytest.approx(100 * 100 / 160)
    assert second.exposed_percent == pytest.approx(100 * 20 / 160)
    assert first.imbalance_percent == pytest.approx(100 * 45 / 160)
    assert report.exposed_ns == pytest.approx((20 + 10) / 2)
    shares = {part.what: part.time_ns for part in report.critical_path}
    assert shares == {"forward": 200, "message": 20, "optimizer": 80, "all_reduce": 20}
    assert [(s.rank, s.idle_caused_ns) for s in report.stragglers] == [(0, 100), (1, 45)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_shares_add_up_and_the_path_has_no_holes(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    program = random_program(seed)
    folder = tmp_path_factory.mktemp("job")
    timeline = simulate(load(write(folder / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)))
    parts = critical_path(timeline)
    for before, after in itertools.pairwise(parts):
        assert before.end_ns == after.start_ns
    totals, _, counted = timeline.totals()
    np.testing.assert_array_equal(totals[:, [0, 1, 2, 3, 4]].sum(axis=1) + totals[:, 7:].sum(axis=1), counted)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_a_written_timeline_simulates_to_itself(
    tmp_path_factory: pytest.TempPathFactory, seed: int, keep: bool
) -> None:
    folder = tmp_path_factory.mktemp("job")
    program = random_program(seed)
    source = write(folder / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    timeline = simulate(load(source))
    write_timeline(timeline, folder / "out.prism", keep_columns=keep)
    with TraceReader(folder / "out.prism") as reader:
        assert not has_errors(validate(folder / "out.prism"))
        for position, rank in enumerate(reader.ranks):
            units = reader.units(rank)
            np.testing.assert_array_equal(units.start_ns, timeline.times(position).start_ns)
            np.testing.assert_array_equal(units.end_ns, timeline.times(position).end_ns)
    again = simulate(load(folder / "out.prism"))
    np.testing.assert_array_equal(again.step_end_ns, timeline.step_end_ns)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = _two_stages(tmp_path / "job.prism")
    assert run(["simulate", str(job), "-o", str(tmp_path / "out.prism")]) == 0
    assert "step time  160 ns   95% interval 152 ns to 168 ns" in capsys.readouterr().out
    assert run(["simulate", str(tmp_path / "out.prism"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["step_time_ns"] == 160
    assert run(["simulate", str(tmp_path / "none.prism")]) == 3
    write(tmp_path / "bare.prism", random_program(1).rows, random_program(1).groups, kind=GraphKind.BARE)
    assert run(["simulate", str(tmp_path / "bare.prism")]) == 2
    assert "calibrate it first" in capsys.readouterr().err
