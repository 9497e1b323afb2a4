"""Commands that take long say on stderr how far they are, and nothing of it on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_sdk.cli import output
from prism_sdk.cli.main import run
from prismtrace import GraphKind
from tests.graph.jobs import random_program
from tests.simulate.reference import write


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small job, and two seconds that are over at once."""
    before = output.Ticker.__init__
    monkeypatch.setattr(output.Ticker, "__init__", lambda self, what, *, of: before(self, what, of=of, first_s=0.0))
    program = random_program(3)
    return write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)


@pytest.mark.parametrize(
    ("words", "said"), [(("simulate",), "reading"), (("slice", "--steps", "0:1", "-o", "part.prism"), "cutting")]
)
def test_progress_is_a_line_on_stderr(
    trace: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    assert run([words[0], trace.name, *words[1:], "--json"]) == 0
    seen = capsys.readouterr()
    assert f"prism: {said} {trace.name}: 1 of " in seen.err
    json.loads(seen.out)
    Path("part.prism").unlink(missing_ok=True)
    assert run([words[0], trace.name, *words[1:], "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_sweep_says_how_far_each_variant_is(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", str(trace), "--variant", "--slow rank=0:2", "--json"]) == 0
    seen = capsys.readouterr()
    for number in (1, 2):
        assert f"prism: variant {number} of 2: reading {trace}: 1 of " in seen.err
    assert len(json.loads(seen.out)) == 2
