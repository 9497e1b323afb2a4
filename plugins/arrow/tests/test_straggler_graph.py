"""The what-if answers that the straggler study published of its job ST, against the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prism_sdk.cli.main import run
from prism_sdk.simulate import Scenario
from prismtrace import TraceReader, has_errors, validate

DATA = Path(__file__).parent / "data"
PUBLISHED: dict[str, Any] = json.loads((DATA / "published-ST.json").read_text(encoding="utf-8"))
EXACT = 1e-4  # the study calculates with float32 seconds


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("straggler") / "st.prism"
    source = DATA / "trace-ST.parquet"
    assert run(["convert", str(source), "-o", str(path), "--from", "straggler", "-O", "dependencies=true"]) == 0
    return path


def _steps(path: Path, **changes: Any) -> NDArray[np.float64]:
    """Seconds of each step: from the last end of one to the last end of the next."""
    timeline = Scenario(**changes).run(path)
    ends = timeline.step_end_ns[: timeline.step_offsets[-1]].reshape(timeline.job.num_ranks, -1).max(axis=0)
    return np.diff(ends, prepend=0) / 1e9


def _published(name: str) -> NDArray[np.float64]:
    return np.array(list(PUBLISHED[name].values()))


def test_the_graph_is_well_formed(job: Path) -> None:
    assert not has_errors(validate(job))
    with TraceReader(job) as reader:
        assert sum(reader.num_units(rank) for rank in reader.ranks) == 9728


def test_every_recorded_step_comes_out_again(job: Path) -> None:
    np.testing.assert_allclose(_steps(job), _published("step_t_base"), rtol=EXACT)


def test_timelines_without_delays_and_without_stragglers(job: Path) -> None:
    np.testing.assert_allclose(_steps(job, no_gaps=True), _published("step_t_nodelay"), rtol=EXACT)
    np.testing.assert_allclose(_steps(job, no_gaps=True, equal=("all",)), _published("step_t_noblk"), rtol=EXACT)


def test_slowdowns_overall(job: Path) -> None:
    base, swift = _steps(job).mean(), _steps(job, no_gaps=True).mean()
    ideal = _steps(job, no_gaps=True, equal=("all",)).mean()
    assert base / swift == pytest.approx(PUBLISHED["launch_slowdown"], rel=EXACT)
    assert swift / ideal == pytest.approx(PUBLISHED["blocking_slowdown"], rel=EXACT)


@pytest.mark.parametrize("by", ["optype", "stage", "dp_rank"])
def test_slowdowns_by_kind_of_operation_and_by_worker(job: Path, by: str) -> None:
    ideal = _steps(job, no_gaps=True, equal=("all",)).mean()
    with TraceReader(job) as reader:
        replicas = _replicas(reader)
    for name, published in PUBLISHED[f"blocking_decompose_by_{by}"].items():
        where = {"stage": f"stage={name}", "optype": f"label={_LABELS.get(name, name)}"}.get(by)
        if where is None:
            where = "rank=" + ",".join(map(str, replicas[name]))
        found = _steps(job, no_gaps=True, equal=(f"all:but:{where}",)).mean() / ideal
        assert found == pytest.approx(published, rel=EXACT), name


_LABELS = {"forward-pp-comm": "forward-send,forward-recv", "backward-pp-comm": "backward-send,backward-recv"}


def _replicas(reader: TraceReader) -> dict[str, list[int]]:
    """Ranks of each data-parallel index: those that exchange messages."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(DATA / "trace-ST.parquet", columns=["rank", "dp_rank"]).to_pydict()
    found: dict[str, set[int]] = {}
    for rank, dp in zip(table["rank"], table["dp_rank"], strict=True):
        found.setdefault(str(dp), set()).add(rank)
    assert set().union(*found.values()) == set(reader.ranks)
    return {dp: sorted(ranks) for dp, ranks in found.items()}


def test_what_the_last_stage_explains(job: Path) -> None:
    removed = _steps(job, no_gaps=True, equal=("stage=3",)).mean()
    added = _steps(job, no_gaps=True, equal=("all:but:stage=3",)).mean()
    assert removed == pytest.approx(PUBLISHED["ms"]["trem"], rel=EXACT)
    assert added == pytest.approx(PUBLISHED["ms"]["tadd"], rel=EXACT)
