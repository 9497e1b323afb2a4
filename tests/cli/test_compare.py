"""``prism compare`` on real trace files: the table, JSON, several repeats, and the limit that sets the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prism_sdk.cli.main import run
from prism_sdk.testing.scripted import write_trace
from prismtrace import GraphKind

Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(name: str, step_ns: int, *, ranks: tuple[int, ...] = (0, 1), num_steps: int = 5) -> str:
        path = tmp_path / f"{name}.prism"
        write_trace(path, kind=GraphKind.OBSERVED, world_size=4, ranks=ranks, num_steps=num_steps, step_ns=step_ns)
        return str(path)

    return write


def test_the_table_shows_the_error(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", make("real", 1_000_000), make("other", 1_020_000, ranks=(0,))]) == 0
    text = capsys.readouterr().out
    assert "+2.00 %" in text and "order of communication" in text


def test_json_and_repeats(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", make("r1", 1_000_000), make("o1", 1_010_000)]
    words += ["--real", make("r2", 1_020_000), "--other", make("o2", 1_010_000), "--json"]
    assert run(words) == 0
    values = json.loads(capsys.readouterr().out)
    assert len(values["real"]) == len(values["other"]) == 2
    assert values["mean_abs_error_percent"] == pytest.approx(0, abs=1e-9)
    assert values["ranks"][0]["step_time"]["is_within_real_range"] is True


@pytest.mark.parametrize(("limit", "code"), [("3", 0), ("2", 0), ("1.9", 1), ("0", 1)])
def test_max_error_sets_the_exit_code(make: Make, capsys: pytest.CaptureFixture[str], limit: str, code: int) -> None:
    assert run(["compare", make("real", 1_000_000), make("other", 1_020_000), "--max-error", limit]) == code
    captured = capsys.readouterr()
    assert ("is above" in captured.err) is (code == 1)
    assert "+2.00 %" in captured.out


def test_without_times_a_limit_cannot_be_met(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", make("a", 1000, num_steps=1), make("b", 1000, num_steps=1), "--max-error", "100"]) == 1
    assert "no step times to hold against --max-error" in capsys.readouterr().err


def test_traces_of_other_ranks(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", make("a", 1000, ranks=(0,)), make("b", 1000, ranks=(1,))]) == 1
    assert "none of the ranks [1]" in capsys.readouterr().err


def test_unreadable(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", make("real", 1), str(tmp_path / "none.prism")]) == 3
    assert "none.prism" in capsys.readouterr().err
