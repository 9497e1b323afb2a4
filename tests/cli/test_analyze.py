"""``prism analyze`` on real trace files: tables, JSON, a difference, wrong usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_sdk.cli.main import run
from prism_sdk.testing.scripted import write_trace
from prismtrace import GraphKind


@pytest.fixture
def traces(tmp_path: Path) -> tuple[str, str]:
    paths = []
    for name, step_ns in (("first", 1_000_000), ("second", 1_200_000)):
        paths.append(str(write_trace(tmp_path / f"{name}.prism", kind=GraphKind.OBSERVED, world_size=2, ranks=(0, 1),
                                     num_steps=4, step_ns=step_ns)))  # fmt: skip
    return paths[0], paths[1]


def test_the_tables(traces: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", traces[0]]) == 0
    text = capsys.readouterr().out
    for words in ("where a step goes", "path through all steps, 4.000 ms", "all_reduce in default_pg", "no memory"):
        assert words in text
    assert "stragglers" not in text


def test_json(traces: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", traces[0], "--json", "--repeat", traces[1]]) == 0
    values = json.loads(capsys.readouterr().out)
    assert sum(values["parts_ns"].values()) == values["mean_step_ns"] == 1_000_000
    assert values["parts_ns"]["exposed_communication"] == 100_000
    assert values["variation"]["spread"] == pytest.approx(2 / 11)
    assert sum(values["critical_path"]["parts_ns"].values()) == values["critical_path"]["length_ns"] == 4_000_000


def test_a_difference(traces: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", *traces]) == 0
    assert "the second is 20.00 % slower: compute (+0.180 ms a step)" in capsys.readouterr().out
    assert run(["analyze", *traces, "--json", "--steps", "1:3", "--ranks", "0"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["difference_ns"] == 200_000 and values["ranks"] == [0]


def test_wrong_usage(traces: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", *traces, "--repeat", traces[0]]) == 2
    assert run(["analyze", traces[0], "--ranks", "9"]) == 2
    assert run(["analyze", str(tmp_path / "none.prism")]) == 3
    assert "has no rank 9" in capsys.readouterr().err
    bare = write_trace(tmp_path / "bare.prism", kind=GraphKind.BARE, world_size=1, ranks=[0], num_steps=1, step_ns=None)
    assert run(["analyze", str(bare)]) == 2
    assert "calibrate it" in capsys.readouterr().err


def test_large_traces_say_what_goes_on(traces: tuple[str, str], tmp_path: Path) -> None:
    from prism_sdk.analysis import analyze

    said: list[str] = []
    analyze(traces[0], report=said.append)
    assert said == []
    path = write_trace(tmp_path / "many.prism", kind=GraphKind.OBSERVED, world_size=501, ranks=range(501),
                       num_steps=1, step_ns=1000)  # fmt: skip
    found = analyze(path, report=said.append)
    assert len(said) == 4 and "501 ranks" in said[0] and found.breakdown.mean_step_ns == 1000
