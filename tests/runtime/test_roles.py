"""Recordings by roles: equal in structure to those of all ranks, right in values where symmetry makes them so."""

from __future__ import annotations

import ast
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prism_sdk.errors import UnsupportedError, UsageError
from prism_sdk.runtime.config import LaunchConfig, LaunchMode, PayloadMode
from prism_sdk.runtime.roles.growing import grow
from prism_sdk.runtime.roles.layout import Families, GroupFact, RolePlan, make_plan, parse_layout, plan_of_groups
from prism_sdk.runtime.roles.stating import stated_plan
from prism_sdk.runtime.roles.views import Views
from prism_sdk.testing.launches import Launched, Launches
from prism_sdk.testing.workplace import Workplace
from prismtrace import DType, Op, ProcessGroup, TraceReader, TraceWriter, has_errors, validate
from tests.runtime.role_jobs import ASYMMETRIC, MIXED, SIDES, structure_differences
from tests.runtime.spread_machines import record as record_on_machines

MOE = Path(__file__).parents[2] / "examples" / "train_moe_4d.py"


@pytest.fixture(scope="module")
def jobs(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("roles")
    for name, text in (("mixed", MIXED), ("asymmetric", ASYMMETRIC), ("sides", SIDES)):
        (folder / f"{name}.py").write_text(text)
    return Launches(folder, workplace=workplace)


def record(jobs: Launches, script: str | Path, *arguments: str, num_ranks: int, roles: str | None = None) -> Launched:
    options = ["--world-size", str(num_ranks), "--slots", "2", "--payloads", "none"]
    path = jobs.folder / script if isinstance(script, str) else script
    return jobs.must("record", path, arguments, options=[*options, *(["--roles", roles] if roles else [])])


@pytest.fixture(scope="module")
def hybrid(jobs: Launches) -> Launched:
    """Ranks communicate before there are groups, so the job starts again once these are known."""
    (jobs.folder / "roles").mkdir()
    return record(jobs, "mixed.py", str(jobs.folder / "roles"), "--late", num_ranks=8, roles="auto")


@pytest.fixture(scope="module")
def everybody(jobs: Launches) -> Launched:
    (jobs.folder / "all").mkdir()
    return record(jobs, "mixed.py", str(jobs.folder / "all"), "--late", num_ranks=8)


def test_hybrid_sharded_job_is_that_of_all_ranks(hybrid: Launched, everybody: Launched) -> None:
    assert structure_differences(hybrid.trace, everybody.trace) == []
    assert "2 roles (TENSOR_MODEL_PARALLEL_GROUP 2), 3 ranks more to verify them: 5 of 8 ranks run" in hybrid.err
    assert "starts again" in hybrid.err
    with TraceReader(hybrid.trace) as reader:
        facts = reader.metadata
        assert json.loads(facts["roles.representatives"]) == [0, 1]
        assert json.loads(facts["roles.samples"]) == [5, 6, 7]
        assert json.loads(facts["roles.disagreements"]) == []
        assert sorted(len(ranks) for ranks in reader.roles.values()) == [2, 3]
        assert len(reader.steps(4)) == 2
    assert not has_errors(validate(hybrid.trace))


def test_every_operation_gives_what_it_gives_with_all_ranks(
    jobs: Launches, hybrid: Launched, everybody: Launched
) -> None:
    seen = {
        name: {path.name: ast.literal_eval(path.read_text()) for path in (jobs.folder / name).iterdir()}
        for name in ("roles", "all")
    }
    assert sorted(seen["roles"]) == [f"seen-{rank}" for rank in (0, 1, 5, 6, 7)]
    for rank, values in seen["roles"].items():
        assert values == seen["all"][rank], rank


def test_roles_run_on_several_machines(jobs: Launches, hybrid: Launched, tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    said = list[str]()
    result = record_on_machines(
        jobs.folder / "mixed.py", tmp_path / "spread.prism", [str(tmp_path / "seen")], num_ranks=8, roles="auto",
        machines=[("a", 1), ("b", 1)], payloads=PayloadMode.NONE, say=said.append,
    )  # fmt: skip
    assert "2 slots over 2 machines" in said and any("5 of 8 ranks run" in line for line in said)
    for path in (jobs.folder / "roles").iterdir():
        assert (tmp_path / "seen" / path.name).read_text() == path.read_text()
    assert result.output is not None and not has_errors(validate(result.output))
    with TraceReader(result.output) as reader:
        assert reader.ranks == tuple(range(8)) and json.loads(reader.metadata["roles.disagreements"]) == []


def test_shards_shrink_as_replicas_are_added(tmp_path: Path) -> None:
    """All ranks share one copy: what each gives to a gather halves as there are twice as many."""
    gathers = []
    ranks = tuple(range(4))
    with TraceWriter(tmp_path / "four.prism", world_size=4) as writer:
        writer.add_group(ProcessGroup(7, "0", "default_pg", "nccl", ranks))
        for rank in ranks:
            columns = {"kind": [2, 2, 2], "op": [Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_GATHER], "seq": [0, 1, 2],
                       "group_id": [7, 7, 7], "dtype": [DType.FLOAT32, DType.FLOAT32, DType.INT64],
                       "num_elements_in": [25, 100, 1], "num_elements_out": [100, 25, 4]}  # fmt: skip
            writer.add_units(rank, columns)
    grow(tmp_path / "four.prism", tmp_path / "eight.prism", num_replicas=8)
    with TraceReader(tmp_path / "eight.prism") as reader:
        assert reader.ranks == tuple(range(8))
        for rank in reader.ranks:
            units = reader.units(rank)
            gathers.append((units.num_elements_in.tolist(), units.num_elements_out.tolist()))
        assert [group.ranks for group in reader.groups.values()] == [tuple(range(8))]
    assert gathers == [([13, 104, 1], [104, 13, 8])] * 8


def test_blocks_of_replicas_stay_together(tmp_path: Path) -> None:
    families = megatron_groups(32, tp=2, pp=2, ep=2)
    for number, first in enumerate((0, 16)):  # larger than those of replicas alone, and not what is counted
        ranks = tuple(range(first, first + 16))
        families.add(GroupFact(str(1000 + number), "TENSOR_AND_DATA_PARALLEL_GROUP", "nccl", ranks))
    with TraceWriter(tmp_path / "a.prism", world_size=32) as writer:
        for fact in families.groups():
            writer.add_group(ProcessGroup(fact.group_id, fact.name, fact.description, fact.backend, fact.ranks))
        for rank in range(32):
            used = [family.group_with(rank) for family in families.all]
            ids = [fact.group_id for fact in used if fact is not None]
            writer.add_units(rank, {"kind": [2] * len(ids), "op": [Op.BARRIER] * len(ids), "group_id": ids,
                                    "seq": [0] * len(ids)})  # fmt: skip
    with pytest.raises(UsageError, match="9 replicas cannot be made"):
        grow(tmp_path / "a.prism", tmp_path / "b.prism", num_replicas=9)
    grow(tmp_path / "a.prism", tmp_path / "b.prism", num_replicas=16)
    wanted = megatron_groups(64, tp=2, pp=2, ep=2)
    for number, first in enumerate((0, 32)):
        ranks = tuple(range(first, first + 32))
        wanted.add(GroupFact(str(1000 + number), "TENSOR_AND_DATA_PARALLEL_GROUP", "nccl", ranks))
    with TraceReader(tmp_path / "b.prism") as reader:
        assert {g.ranks for g in reader.groups.values()} == {fact.ranks for fact in wanted.groups()}
        for rank in reader.ranks:
            members = [set(reader.groups[one].ranks) for one in reader.units(rank).group_id.tolist()]
            assert members == [set(group.ranks) for f in wanted.all if (group := f.group_with(rank)) is not None]
    assert not has_errors(validate(tmp_path / "b.prism"))


def moe(jobs: Launches, num_ranks: int, roles: str | None = None) -> Launched:
    arguments = ("--tp", "1", "--same", "--steps", "1", "--microbatches", "2")
    return record(jobs, MOE, *arguments, num_ranks=num_ranks, roles=roles)


@pytest.fixture(scope="module")
def all_of_moe(jobs: Launches) -> Launched:
    return moe(jobs, 8)


def test_pipeline_and_expert_parallelism_are_those_of_all_ranks(jobs: Launches, all_of_moe: Launched) -> None:
    by_roles = moe(jobs, 8, roles="ep=2,dp=2,pp=2")
    assert structure_differences(by_roles.trace, all_of_moe.trace) == []
    printed = [float(run.out.split()[-1]) for run in (by_roles, all_of_moe)]
    assert printed[0] == pytest.approx(printed[1], rel=1e-6)
    assert "7 of 8 ranks run" in by_roles.err


def test_a_job_does_not_grow_without_bound(all_of_moe: Launched, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 1048576 are supported"):
        grow(all_of_moe.trace, tmp_path / "large.prism", num_replicas=1 << 40)
    assert not any(tmp_path.iterdir())


def test_a_small_recording_grows_into_the_one_of_more_replicas(jobs: Launches, all_of_moe: Launched) -> None:
    """Of one block of replicas, which expert parallelism joins, two are made."""
    grown = jobs.folder / "grown.prism"
    report = grow(moe(jobs, 4).trace, grown, num_replicas=4)
    assert (report.num_replicas_before, report.world_size) == (2, 8)
    assert structure_differences(grown, all_of_moe.trace) == []
    assert not has_errors(validate(grown))


def test_ranks_that_break_the_symmetry_are_named(jobs: Launches) -> None:
    run = record(jobs, "asymmetric.py", num_ranks=8, roles="auto")
    with TraceReader(run.trace) as reader:
        found = {one["rank"]: one for one in json.loads(reader.metadata["roles.disagreements"])}
        assert json.loads(reader.metadata["roles.samples"]) == [6, 7]
        assert [one["representative"] for one in map(found.get, (5, 6, 7)) if one] == [1, 0, 1]
        changed = found[7]["unit_index"]
        assert "num_elements_in is 5, not 1" in found[7]["what"]
        assert reader.units(7).num_elements_in[changed] == 5
        assert reader.units(1).num_elements_in[changed] == 1
        assert len(reader.units(7)) > len(reader.units(3)) == len(reader.units(1))
        assert found[7]["num_units"] > found[6]["num_units"] == 1
    assert "all_gather" in found[5]["what"]  # its neighbour is absent: it could not be followed
    assert found[5]["unit_index"] is None
    assert "rank 5 differs from rank 1, which stands for its role: " in run.err


def test_a_failure_under_a_stated_layout_names_the_layout(jobs: Launches) -> None:
    """Ranks 0 and 1 are no replicas: with one standing for the other the script sees what it must not see."""
    few = ["--world-size", "8", "--samples", "1"]
    ended = jobs.run("record", jobs.folder / "sides.py", (), options=[*few, "--roles", "dp=8"])
    assert ended.code == 1
    assert "AssertionError" in ended.err
    assert "the roles were stated, --roles dp=8: if ranks of one role do not do the same, this follows" in ended.err
    fitting = jobs.run("record", jobs.folder / "sides.py", (), options=[*few, "--roles", "tp=2,dp=4"])
    assert fitting.code == 0, fitting.err


# -- the plan ----------------------------------------------------------------------------------------------------------


def megatron_groups(world: int, *, tp: int, pp: int, ep: int) -> Families:
    families, dp = Families(world), world // (tp * pp)
    grid = np.arange(world).reshape(pp, dp // ep, ep, tp)
    families.add(GroupFact("0", "default_pg", "nccl", tuple(range(world))))
    kinds = {
        "DATA_PARALLEL_GROUP": grid.reshape(pp, dp, tp).transpose(0, 2, 1).reshape(-1, dp),
        "TENSOR_MODEL_PARALLEL_GROUP": grid.reshape(-1, tp),
        "PIPELINE_MODEL_PARALLEL_GROUP": grid.transpose(1, 2, 3, 0).reshape(-1, pp),
        "MODEL_PARALLEL_GROUP": grid.transpose(1, 2, 0, 3).reshape(-1, pp * tp),
        "EXPERT_MODEL_PARALLEL_GROUP": grid.transpose(0, 1, 3, 2).reshape(-1, ep),
        "EXPERT_DATA_PARALLEL_GROUP": grid.transpose(0, 2, 3, 1).reshape(-1, dp // ep),
    }
    count = 0
    for description, groups in kinds.items():
        for ranks in groups.tolist():
            count += 1
            families.add(GroupFact(str(count), description, "nccl", tuple(ranks)))
    return families


def test_roles_of_a_large_job() -> None:
    started = time.process_time()
    families = megatron_groups(8192, tp=2, pp=4, ep=4)
    plan = plan_of_groups(families, num_samples=3)
    assert time.process_time() - started < 3
    assert plan.num_roles == 2 * 4 * 4
    assert plan.representatives[:9] == (*range(8), 2048)
    assert len(plan.samples) == 3
    assert plan.samples[-1] == 8191
    assert sum(plan.num_represented(rank) for rank in plan.running) == 8192
    assert plan.notes == ()


def test_what_would_need_too_many_processes_is_an_approximation_that_is_named() -> None:
    plan = plan_of_groups(megatron_groups(1024, tp=8, pp=4, ep=8), num_samples=0, max_roles=32)
    assert plan.num_roles == 32
    assert any("'TENSOR_MODEL_PARALLEL_GROUP' (groups of 8) are taken as replicas" in note for note in plan.notes)
    assert plan.origin == "PIPELINE_MODEL_PARALLEL_GROUP 4 x EXPERT_MODEL_PARALLEL_GROUP 8"


def test_stages_are_never_taken_as_replicas() -> None:
    families = megatron_groups(2048, tp=2, pp=128, ep=1)
    with pytest.raises(UnsupportedError, match="make 128 roles, more than --max-roles 64") as found:
        plan_of_groups(families, num_samples=0)
    assert "--max-roles 128" in (found.value.hint or "")
    assert plan_of_groups(families, num_samples=0, max_roles=256).num_roles == 256


def test_an_absent_neighbour_is_the_one_of_the_rank_that_stands_for_it() -> None:
    families = megatron_groups(64, tp=2, pp=4, ep=2)
    plan = RolePlan(64, plan_of_groups(families, num_samples=0).role_of,
                    plan_of_groups(families, num_samples=0).representatives, samples=(63,))  # fmt: skip
    views = Views(families, plan)
    tensor = next(fact for fact in families.groups() if fact.ranks == (62, 63))
    view = views.view(tensor.group_id)
    assert [source.rank for source in view.sources] == [50, 63]
    assert view.source_of(0).group_id != tensor.group_id
    pipe = next(fact for fact in families.groups() if fact.ranks == (15, 31, 47, 63))
    own = next(fact for fact in families.groups() if fact.ranks == (3, 19, 35, 51))
    assert views.sender(pipe.group_id, 47, 63) == (own.group_id, 35, 51)
    assert views.num_takers(own.group_id, 35, 51) == 2
    assert views.num_takers(own.group_id, 51, 35) == 1
    world = families.all[0].groups[0]
    assert views.sender(world.group_id, 47, 63) == (world.group_id, 35, 51)


@pytest.mark.parametrize(
    ("text", "message"),
    [("tp=2,dp=3", "makes 6 ranks, and the job has 8"), ("tp", "'tp' in 'tp' is not NAME=SIZE"),
     ("tp=0,dp=8", "with a size of 1 or more"), ("dp=" + "9" * 5000, "with a size of 1 or more"),
     ("tp=2,tp=4", "'tp' is named twice")],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layout(text, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [("0-6", "gives no role to 1 ranks, the first of them 7"), ("0-7\n3", "rank 3 has a role already"),
     ("0-8", "rank 8 does not exist"), ("0-x", "neither a rank nor a range"), ("1,0\n2-7", "rank 0 must be the first"),
     ("0-99999999999", "rank 99999999999 does not exist in a job of 8"),
     ("7-0", "the range '7-0' ends before it begins"), ("9" * 5000, "neither a rank nor a range")],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stated_plan(_config(tmp_path, text))


@pytest.mark.parametrize(
    ("roles", "message"), [("", "is empty"), ("no.such", "is no file, and not a layout"), ("bytes", "not a text file")]
)
def test_what_is_neither_a_layout_nor_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roles: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bytes").write_bytes(b"\xff\xfe0-7")
    with pytest.raises(UsageError, match=message):
        stated_plan(replace(_config(tmp_path, ""), roles=roles))


def test_a_file_states_who_stands_for_whom(tmp_path: Path) -> None:
    plan = stated_plan(_config(tmp_path, "0-6:2   # even\n3,1,5,7\n"))
    assert plan is not None
    assert plan.representatives == (0, 3)
    assert [plan.representative(rank) for rank in range(8)] == [0, 3, 0, 3, 0, 3, 0, 3]


def _config(folder: Path, text: str) -> LaunchConfig:
    (folder / "roles.txt").write_text(text)
    return LaunchConfig(
        LaunchMode.RECORD, "train.py", folder / "out.prism", nproc_per_node=8, roles=str(folder / "roles.txt"),
        num_samples=0,
    )  # fmt: skip


def test_samples_come_from_different_roles() -> None:
    plan = make_plan(np.arange(64) % 4, num_samples=3, origin="")
    assert len({int(plan.role_of[rank]) for rank in plan.samples}) == 3
    assert not set(plan.samples) & set(plan.representatives)
