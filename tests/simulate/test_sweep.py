"""Several variants of a job in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_sdk.cli.main import run
from prism_sdk.cli.whatif import expand_variants
from tests.simulate.pipelines import pipeline


def test_a_sweep_is_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pipeline(tmp_path / "job.prism")
    assert run(["sweep", str(path), "--variant", "--slow rank=0:{1.1,1.5}", "--variant", "big=--dp 4", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["variant"] for row in table] == ["as it is", "slow rank=0:1.1", "slow rank=0:1.5", "big"]
    times = [row["report"]["step_time_ns"] for row in table]
    assert times[0] < times[1] < times[2] and times[3] == times[0]
    assert run(["sweep", str(path), "--variant", "--slow rank=0:1.1"]) == 0
    assert "slow rank=0:1.1" in capsys.readouterr().out
    assert run(["sweep", str(path), "--variant", "--fast"]) == 2
    assert run(["sweep", str(path)]) == 2
    assert len(expand_variants(("x=--dp {1,2} --slow rank={0,1}:2",))) == 4


def test_a_sweep_goes_on_after_a_variant_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(pipeline(tmp_path / "job.prism"))
    words = ["sweep", path, "--variant", "wrong=--slow rank=99:2", "--variant", "--microbatches 8"]
    assert run(words) == 2
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()[2:]] == ["as", "microbatches"]
    assert "variant 'wrong': no rank of" in said.err
    assert run([*words, "--json"]) == 2
    variants = json.loads(capsys.readouterr().out)
    assert [sorted(one) for one in variants] == [["report", "variant"], ["report", "variant"],
                                                 ["error", "hint", "variant"]]  # fmt: skip
