"""Several variants of a job in one table."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prism_sdk.cli import sweeping
from prism_sdk.cli.main import run
from prism_sdk.cli.sweeping import VariantTask
from prism_sdk.cli.whatif import expand_variants
from prismtrace import GraphKind
from tests.graph.jobs import random_program
from tests.simulate.pipelines import pipeline
from tests.simulate.reference import write


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


def test_a_bare_graph_is_told_how_to_get_times_for_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = random_program(3)
    bare, timed = tmp_path / "bare.prism", tmp_path / "timed.prism"
    write(bare, program.rows, program.groups, kind=GraphKind.BARE)
    variant = ["--variant", "--cluster h100-sxm"]
    assert run(["sweep", str(bare), *variant]) == 2
    assert f"prism simulate {bare} --cluster NAME -o timed.prism" in capsys.readouterr().err
    assert run(["simulate", str(bare)]) == 2
    assert run(["simulate", str(bare), "--cluster", "h100-sxm", "-o", str(timed)]) == 0
    assert run(["sweep", str(timed), *variant]) == 0


class _Here:
    """In place of a cluster: does the tasks one after the other, as machines that share the folder would."""

    def __init__(self, address: str | None, *, num_slots: int) -> None:
        assert num_slots == 1

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, tasks: Sequence[VariantTask], progress: Callable[[int], None]) -> None:
        for done, task in enumerate(tasks):
            progress(done)
            there: VariantTask = pickle.loads(pickle.dumps(task))
            there.run(pytest.fail)  # no rank runs
            assert task.is_finished


def test_an_engine_goes_on_as_well_and_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "RayEngine", _Here)
    path = pipeline(tmp_path / "job.prism")
    words = ["sweep", str(path), "--variant", "wrong=--slow rank=99:2", "--variant", "--microbatches 8"]
    for more in ([], ["--json"]):
        assert run([*words, *more]) == 2
        here = capsys.readouterr()
        assert run([*words, *more, "--engine", "ray"]) == 2
        assert capsys.readouterr() == here
    bare = write(tmp_path / "bare.prism", random_program(1).rows, random_program(1).groups, kind=GraphKind.BARE)
    for more in ([], ["--engine", "ray"]):  # without the job as it is there is nothing to compare with
        assert run(["sweep", str(bare), "--variant", "--no-gaps", *more]) == 2
        assert "calibrate it first" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.sweep"))
