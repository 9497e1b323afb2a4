"""Traces and changes that cannot be: each is named, and no sum of times leaves 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism_sdk.cli.main import run
from prism_sdk.simulate import Scenario, load, simulate, write_timeline
from prismtrace import GraphKind, TraceReader, has_errors, validate
from tests.graph.jobs import COLLECTIVE, COMPUTE, SEND, Program
from tests.simulate.reference import rows_of, write


def _program() -> Program:
    program = Program(2, {1: (0, 1)})
    for step in range(3):
        program.step = step
        for rank in range(2):
            program.compute(rank, 1000)
        for rank, unit in program.collective(1, lambda _: 7).items():
            program.wait(rank, unit)
        program.send(1, 0, 1, 0, 5)
        program.wait(1, program.recv(1, 0, 1, 0, 5))
    return program


def _each(of: int, /, **values: Any) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        for row in (row for rows in program.rows.values() for row in rows if row["kind"] == of):
            row.update(values)

    return change


@pytest.mark.parametrize(
    ("change", "words", "options"),
    [
        (_each(COMPUTE, start_ns=0, end_ns=2**61), "too long to add up", ()),
        (_each(COMPUTE, gap_ns=2**62), "too long to add up", ()),
        (_each(COMPUTE, start_ns=0, end_ns=2**60), "times of all ranks together are 6.92e+09 s: too long", ()),
        (_each(COLLECTIVE, transfer_ns=2**62), "too long to add up", ()),
        (_each(COLLECTIVE, num_elements_in=2**62), f"rank 0 unit 1 moves {2**62} elements", ("--cluster", "h100-sxm")),
        (_each(COLLECTIVE, num_elements_in=-4), "rank 0 unit 1 moves -4 elements", ("--cluster", "h100-sxm")),
        (_each(COMPUTE, kind=9), "rank 0 unit 0 is of kind 9", ()),
        (_each(SEND, peer=-(2**31)), "rank 0 has communication without a peer or a sequence number: row 3", ()),
        (lambda _: None, "too long to add up", ("--straggle", "lognormal:700")),
        (lambda _: None, "more than a hundred years", ("--straggle", "pareto:1e300:per=unit")),
        (lambda _: None, "is no time from 0 to a hundred years", ("--slow", "rank=0:1.5@0s-99999999999999s")),
        (lambda _: None, "is no time from 0 to a hundred years", ("--slow", "rank=0:1.5@1e400s-")),
    ],
)
def test_what_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, words: str, options: tuple[str, ...]
) -> None:
    program = _program()
    change(program)
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    assert run(["simulate", str(path), *options]) in (1, 2)
    said = capsys.readouterr().err
    assert words in said and "unexpected" not in said


def test_operations_and_types_that_are_not_known_keep_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _program()
    _each(COLLECTIVE, op=200)(program)
    _each(COMPUTE, phase=255)(program)
    _each(SEND, dtype=250)(program)
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    assert run(["simulate", str(path), "--cluster", "h100-sxm"]) == 0
    assert "6 communication units do not say how much they move" in capsys.readouterr().out


def _observed(program: Program) -> None:
    for rows in program.rows.values():
        for index, row in enumerate(rows):
            row.update(start_ns=1000 * index, end_ns=1000 * index + 800)


def test_times_beyond_all_years_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = _program()
    _observed(program)
    program.rows[1][0].update(end_ns=2**63 - 1)
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.OBSERVED)
    assert run(["simulate", str(path)]) == 1
    assert f"rank 1 unit 0 is at {2**63 - 1} ns" in capsys.readouterr().err


def test_communication_that_names_no_partner_waits_for_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in traces of profilers, whose kernels do not always say which group or message they are."""
    program = _program()
    _observed(program)
    for rows in program.rows.values():
        for row in rows:
            for name in ("seq", "peer"):
                row.pop(name, None)
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.OBSERVED)
    timeline = simulate(load(path))
    assert timeline.step_time_ns == timeline.job.recorded_step_ns == 5000
    note = "12 communication units without a peer or a sequence number: they wait for nobody"
    assert note in timeline.job.notes
    written = tmp_path / "written.prism"
    write_timeline(timeline, written)
    assert not has_errors(validate(written))
    with TraceReader(path) as before, TraceReader(written) as after:
        assert after.groups == before.groups and after.metadata["profile"] == "schedule-unit"
        for name in ("kind", "op", "group_id", "seq", "peer", "num_elements_in"):
            assert np.array_equal(after.units(1)[name], before.units(1)[name]), name
    again = simulate(load(written))
    assert rows_of(again) == rows_of(timeline) and note in again.job.notes
    assert run(["simulate", str(written)]) == run(["analyze", str(written)]) == 0
    assert "5.000 us" in capsys.readouterr().out


def test_copied_ranks_whose_communication_names_no_partner(tmp_path: Path) -> None:
    """Two operations overlap, the first is waited for last: neither waits for the other, also in the written copy."""
    times = [(1, 0, 10), (2, 10, 100), (2, 12, 30), (5, 12, 31), (1, 31, 40), (5, 40, 105)]
    program = Program(2, {1: (0, 1)})
    for rank in range(2):
        program.rows[rank] = [{"kind": kind, "step": 0, "start_ns": start, "end_ns": end} for kind, start, end in times]
        program.rows[rank][3]["awaits"], program.rows[rank][5]["awaits"] = 2, 1
        for row in program.rows[rank][1:3]:
            row["group_id"] = 1
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.OBSERVED)
    assert simulate(load(path)).step_time_ns == 105
    copied = Scenario(dp=4).run(path)
    write_timeline(copied, tmp_path / "written.prism")
    again = simulate(load(tmp_path / "written.prism"))
    assert copied.step_time_ns == again.step_time_ns == 105 and again.job.num_ranks == 4
    assert rows_of(again) == rows_of(copied)
