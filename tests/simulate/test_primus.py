"""A published pipeline dump: every step of it comes out of the simulation again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from prism_sdk.cli.main import run
from prism_sdk.simulate import Scenario, load, simulate

DUMP = Path(__file__).parent / "data" / "primus-pp8"
INTERLEAVED = Path(__file__).parents[1] / "analysis" / "data" / "primus_pp8_vpp2.json"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("primus") / "pp8.prism"
    assert run(["convert", str(DUMP), "-o", str(path)]) == 0
    assert run(["validate", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with two model chunks a stage, as a dump again."""
    folder = tmp_path_factory.mktemp("interleaved") / "vpp2"
    folder.mkdir()
    published = json.loads(INTERLEAVED.read_text())
    (folder / "config.json").write_text(json.dumps(published["config"]))
    for rank, steps in published["ranks"].items():
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps(steps))
    return folder


def test_every_step_is_as_recorded(job: Path, interleaved: Path) -> None:
    _check_steps(job, DUMP)
    path = interleaved.with_suffix(".prism")
    assert run(["convert", str(interleaved), "-o", str(path)]) == 0
    _check_steps(path, interleaved)


def _check_steps(job: Path, dump_folder: Path) -> None:
    timeline = simulate(load(job))
    ends = timeline.step_end_ns[: timeline.step_offsets[-1]].reshape(8, -1).max(axis=0) / 1e6
    dumps = [json.loads((dump_folder / f"pp_rank_{rank}.json").read_text()) for rank in range(8)]
    recorded = [max(dump[step]["total"] for dump in dumps) for step in dumps[0]]
    np.testing.assert_allclose(np.diff(ends, prepend=0), recorded, rtol=0.001)


def test_the_pipeline_can_be_changed(job: Path) -> None:
    base = simulate(load(job)).step_time_ns
    more = Scenario(microbatches=32).run(job).step_time_ns
    gpipe = Scenario(schedule="gpipe").run(job).step_time_ns
    assert 1.5 * base < more < 2 * base, "twice the work, and the bubble counts once"
    assert gpipe == pytest.approx(base, rel=0.1), "the two schedules have the same bubble"


def test_damaged_dumps_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "dump"
    shutil.copytree(DUMP, copy)
    (copy / "pp_rank_3.json").write_text('{"1": {"fwd_start": [1.0]}}')
    assert run(["convert", str(copy), "-o", str(tmp_path / "out.prism")]) == 3
    assert "no Primus dump" in capsys.readouterr().err
    (copy / "pp_rank_3.json").write_text("{")
    assert run(["convert", str(copy), "-o", str(tmp_path / "out.prism")]) == 3
    assert not (tmp_path / "out.prism").exists()
