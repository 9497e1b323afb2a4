"""Recordings by roles, calibrated and emulated: the ranks that ran stand for those of their role."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest

from prism_sdk.runtime.manifest import read_scripts
from prism_sdk.runtime.roles.recorded import RecordedRoles, small_job
from prism_sdk.simulate import load, simulate
from prism_sdk.testing.launches import Launched, Launches
from prism_sdk.testing.workplace import Workplace
from prismtrace import GraphKind, Op, TraceReader, has_errors, validate
from tests.runtime.role_jobs import MIXED, structure_differences

RANKS = 64


@pytest.fixture(scope="module")
def jobs(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("replayed")
    (folder / "mixed.py").write_text(MIXED)
    for name in ("recorded", "calibrated", "emulated"):
        (folder / name).mkdir()
    return Launches(folder, workplace=workplace)


def run(jobs: Launches, verb: str, name: str, *options: str | Path) -> Launched:
    arguments = (str(jobs.folder / name), "--no-ring")
    return jobs.must(verb, jobs.folder / "mixed.py", arguments, options=list(map(str, options)))


@pytest.fixture(scope="module")
def recorded(jobs: Launches) -> Launched:
    return run(jobs, "record", "recorded", "--world-size", str(RANKS), "--slots", "2", "--roles", "auto")


@pytest.fixture(scope="module")
def calibrated(jobs: Launches, recorded: Launched) -> Launched:
    return run(jobs, "calibrate", "calibrated", "--graph", recorded.trace, "--slots", "5", "-O", "passes=1")


@pytest.fixture(scope="module")
def emulated(jobs: Launches, calibrated: Launched) -> Launched:
    return run(jobs, "emulate", "emulated", "--graph", calibrated.trace, "--sandbox", "0,34")


def seen(jobs: Launches, name: str, rank: int) -> dict[object, object]:
    found: dict[object, object] = ast.literal_eval((jobs.folder / name / f"seen-{rank}").read_text())
    return found


def test_only_ranks_that_ran_run_again(jobs: Launches, calibrated: Launched) -> None:
    ran = sorted(int(path.name.removeprefix("seen-")) for path in (jobs.folder / "calibrated").iterdir())
    with TraceReader(calibrated.trace) as reader:
        assert ran == sorted([*json.loads(reader.metadata["roles.representatives"]),
                              *json.loads(reader.metadata["roles.samples"])])  # fmt: skip
    assert f"{len(ran)} of {RANKS} ranks run for real" in calibrated.err


def test_the_calibrated_graph_is_the_recorded_one_with_the_times_of_the_ranks_that_ran(
    recorded: Launched, calibrated: Launched
) -> None:
    assert structure_differences(calibrated.trace, recorded.trace) == []
    assert not has_errors(validate(calibrated.trace))
    with TraceReader(calibrated.trace) as reader:
        assert reader.graph_kind is GraphKind.CALIBRATED
        assert reader.metadata["calibration.slices"] == "1"
        roles = RecordedRoles.of(reader)
        assert roles is not None
        for rank in range(RANKS):
            mine, theirs = reader.units(rank), reader.units(int(roles.stands_for[rank]))
            for name in ("start_ns", "end_ns", "transfer_ns", "gap_ns"):
                assert np.array_equal(mine[name], theirs[name]), (rank, name)
        assert reader.units(0).end_ns.max() > 0


def test_a_simulation_of_all_ranks_says_what_the_small_job_said(calibrated: Launched) -> None:
    timeline = simulate(load(calibrated.trace))
    with TraceReader(calibrated.trace) as reader:
        for rank in (0, 1, RANKS // 2):
            ends = reader.units(rank).end_ns
            assert abs(int(timeline.times(rank).end_ns.max()) - int(ends.max())) <= 0.02 * ends.max()


def test_the_small_job_has_few_ranks_and_a_timeline(recorded: Launched, tmp_path: Path) -> None:
    found = small_job(recorded.trace, tmp_path / "small.prism")
    assert found is not None
    with TraceReader(found.path) as reader:
        assert set(found.ranks) <= set(reader.ranks)
        assert len(reader.ranks) <= RANKS // 2
        assert {found.stands_for.get(rank, rank) for rank in reader.ranks} == set(found.ranks)
        assert max(found.group_sizes.values()) == RANKS
        assert max(len(group.ranks) for group in reader.groups.values()) == len(reader.ranks)


def test_a_sandbox_rank_sees_what_it_saw_in_the_recording(jobs: Launches, emulated: Launched) -> None:
    """Rank 34 did not run: it sees what the rank of its role saw."""
    assert seen(jobs, "emulated", 0) == seen(jobs, "recorded", 0)
    assert seen(jobs, "emulated", 34) == seen(jobs, "recorded", 0)
    assert "rank 34 did not run when" in emulated.err
    assert "rank 0 did not run" not in emulated.err


def test_losses_are_those_of_the_recording(recorded: Launched, emulated: Launched) -> None:
    with TraceReader(recorded.trace) as before, TraceReader(emulated.trace) as after:
        assert after.ranks == (0, 34)
        for rank in after.ranks:
            assert after.steps(rank).step.tolist() == [0, 1]
            assert np.array_equal(after.steps(rank).loss, before.steps(rank).loss, equal_nan=True)


def test_members_of_one_role_are_read_once(recorded: Launched) -> None:
    with TraceReader(recorded.trace) as reader:
        script = read_scripts(reader, (0,))[0]
    gathers = [one for one in script.expected if one.op is Op.ALL_GATHER and len(one.group_ranks) == RANKS // 2]
    assert gathers
    for one in gathers:  # of 31 others one stands for all but the samples, of which some are in this group
        assert one.alike is not None
        assert len(one.sources) <= 1 + 3
        assert {one.giver(member) for member in range(1, RANKS // 2)} == set(one.sources)
