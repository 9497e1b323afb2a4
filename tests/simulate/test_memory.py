"""Memory under another schedule, against the closed form: what is always there plus microbatches in flight."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from prism_sdk.simulate import Scenario, load, summarise, write_timeline
from prism_sdk.simulate.memory import in_flight
from prismtrace import TraceReader, UnitKind

EXAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.py"


@pytest.fixture(scope="module")
def sample() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sample_trace", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph(sample: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stages, two replicas, eight microbatches, 1F1B."""
    path = tmp_path_factory.mktemp("memory") / "graph.prism"
    sample.write_graph(path)
    return path


@pytest.mark.parametrize(
    ("scenario", "in_flight_of_stage"),
    [
        (Scenario(microbatches=16), [4, 3, 2, 1]),
        (Scenario(microbatches=2), [2, 2, 2, 1]),
        (Scenario(schedule="1f1b"), [4, 3, 2, 1]),
        (Scenario(schedule="gpipe"), [8, 8, 8, None]),  # the last stage never had two, so one of them is not known
        (Scenario(schedule="gpipe", microbatches=12), [12, 12, 12, None]),
        (Scenario(schedule="gpipe", microbatches=1), [1, 1, 1, 1]),
    ],
)
def test_peaks_follow_from_the_microbatches_in_flight(
    sample: ModuleType, graph: Path, scenario: Scenario, in_flight_of_stage: list[int | None]
) -> None:
    job = scenario.job(graph)
    always = sample.WEIGHTS_BYTES + sample.WORKSPACE_BYTES
    expected = [-1 if held is None else always + held * sample.ACTIVATION_BYTES for held in in_flight_of_stage]
    assert job.memory_bytes.tolist() == 2 * expected
    known = sum(peak >= 0 for peak in 2 * expected)
    (note,) = [note for note in job.notes if "memory" in note]
    assert note.startswith("memory is predicted" if known == 8 else "memory of 6 of 8 ranks is predicted")


def test_without_high_waters_of_units_nothing_is_predicted(graph: Path, tmp_path: Path) -> None:
    """The peaks of steps alone do not show what a microbatch takes: none is better than that of the other schedule."""
    from prismtrace import GraphKind, TraceWriter

    bare = tmp_path / "steps_only.prism"
    with TraceReader(graph) as reader, TraceWriter(bare, graph_kind=GraphKind.CALIBRATED, world_size=8) as writer:
        writer.add_groups(reader.groups.values())
        for rank in reader.ranks:
            units = reader.units(rank)
            writer.add_units(rank, {name: units[name] for name in units.column_names if name != "memory_bytes"})
            writer.add_steps(rank, reader.steps(rank).columns())
    assert summarise(Scenario().run(bare)).memory_peak_bytes is not None
    report = summarise(Scenario(schedule="gpipe").run(bare))
    assert report.memory_peak_bytes is None
    assert any("memory is not predicted" in note for note in report.notes)


def test_microbatches_in_flight_of_a_stage(graph: Path) -> None:
    with TraceReader(graph) as reader:
        units = reader.units(1)  # stage 1 of 4
        computes = np.flatnonzero((units.kind == UnitKind.COMPUTE) & (units.step == 0) & (units.microbatch >= 0))
        counts = in_flight({name: units[name] for name in ("kind", "step", "microbatch", "phase")})
    # two forward passes ahead, then one each by turns, then what is left
    assert counts[computes].tolist() == [1, 2, *[3, 3] * 6, 2, 1]


def test_new_microbatches_have_numbers_of_their_own(graph: Path, tmp_path: Path) -> None:
    write_timeline(Scenario(microbatches=12).run(graph), tmp_path / "twelve.prism", keep_columns=False)
    with TraceReader(tmp_path / "twelve.prism") as reader:
        units = reader.units(2, steps=range(1, 2))
        forward = units.microbatch[(units.kind == UnitKind.COMPUTE) & (units.phase == 1)]
    assert forward.tolist() == list(range(12))
    assert load(tmp_path / "twelve.prism").num_ranks == 8
