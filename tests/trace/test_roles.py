"""Ranks with a role read as if they had everything themselves, and take little room."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_reader import read as foreign_read
from hypothesis import given, settings
from hypothesis import strategies as st
from job_sample import Job
from trace_strategies import tables

import prismtrace
from prismtrace import ABSENT, TableKind, TraceDataError, TraceReader, TraceUsageError, TraceWriter, compact

VECTORS = Path(prismtrace.__file__).resolve().parents[1] / "spec/conformance/valid"


def write_job(path: Path, job: Job, *, own_times: bool = False, **columns: Any) -> None:
    """A trace of the job without roles."""
    with TraceWriter(path, world_size=job.world_size) as writer:
        writer.add_groups(job.groups())
        for rank in range(job.world_size):
            writer.add_units(rank, {**job.units(rank, own_times=own_times), **columns})
            writer.add_steps(rank, {"step": [0, 1], "end_ns": [10, 20], "loss": [1.0, 1.0]})


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_rank_may_have_any_role(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 8))
    role = data.draw(tables(TableKind.UNITS, num_rows=num_rows))
    rank = data.draw(tables(TableKind.UNITS, num_rows=num_rows))
    kept = data.draw(st.lists(st.sampled_from(sorted(role)), unique=True)) if role else []
    rank |= {name: role[name] for name in kept} | {"kind": [1] * num_rows}
    role |= {"x.a": [5] * num_rows}
    rank |= data.draw(st.sampled_from([{}, {"x.a": [5] * num_rows}, {"x.a": [6] * num_rows, "x.b": ["t"] * num_rows}]))
    with tempfile.TemporaryDirectory() as folder:
        plain, path = Path(folder) / "plain", Path(folder) / "role"
        with TraceWriter(plain) as writer:
            writer.add_units(3, rank)
        with TraceWriter(path) as writer:
            writer.add_role(9, role)
            writer.add_units(3, rank, role=9)
        twin = prismtrace.to_json(path)
        wanted = prismtrace.to_json(plain)
        assert twin == wanted
        with TraceReader(path) as reader:
            assert reader.role_of(3) == 9
            assert reader.ranks == (3,)
            for name in reader.units(3).column_names:
                alone = reader.units(3, columns=[name]).columns()
                assert list(alone) == [name]
        assert foreign_read(path.read_bytes()) == twin


@pytest.mark.parametrize("own_times", [False, True])
def test_compact_finds_roles_and_changes_nothing(tmp_path: Path, own_times: bool) -> None:
    job = Job(pp=4, dp=4, tp=2, num_layers=3)
    write_job(tmp_path / "plain", job, own_times=own_times, **{"test.tokens": [7] * 36})
    report = compact(tmp_path / "plain", tmp_path / "small")
    num_roles = 2 if own_times else 4  # the stages but the last have one structure, and each has its times
    assert (report.num_ranks, report.num_roles, report.num_members) == (32, num_roles, 32)
    assert report.num_shared == (2 if own_times else 32)  # the ranks that roles were made of
    assert (tmp_path / "small").stat().st_size < (tmp_path / "plain").stat().st_size * (0.8 if own_times else 0.25)
    wanted = prismtrace.to_json(tmp_path / "plain") | {"format": "1.1"}
    assert prismtrace.to_json(tmp_path / "small") == wanted
    assert foreign_read((tmp_path / "small").read_bytes()) == wanted
    with TraceReader(tmp_path / "small") as reader:
        assert len({reader.role_of(rank) for rank in reader.ranks}) == num_roles
        assert len(reader.roles) == num_roles
        assert len(reader.role_units(min(reader.roles))) == 36
        one_step = reader.units(9, steps=1, columns=["peer", "group_id"])
        assert len(one_step) == 18
        assert set(one_step.group_id[one_step.group_id != 0].tolist()) == set(job.group_ids(9)) - {job.group_ids(9)[1]}


def test_shifted_ranks_share_their_times(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "plain") as writer:
        for rank in range(50):
            start = np.arange(100) * 1000 + rank * 7
            writer.add_units(rank, {"kind": [1] * 100, "start_ns": start, "end_ns": start + 900, "step": [0] * 100})
    assert compact(tmp_path / "plain", tmp_path / "small").num_shared == 50
    assert (tmp_path / "small").stat().st_size < 2000
    assert prismtrace.to_json(tmp_path / "small") == prismtrace.to_json(tmp_path / "plain") | {"format": "1.1"}
    with TraceReader(tmp_path / "small") as reader:
        entry = reader._index.entries(TableKind.UNITS, 49)[0]
        assert (entry["first_ns"], entry["last_ns"]) == (0, 99 * 1000 + 900 + 49 * 7)


def test_a_rank_may_lack_what_its_role_has(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_role(1, {"kind": [2, 2], "start_ns": [1, 2], "label": ["a", None], "splits_in": [[1], None]})
        writer.add_units(0, {"kind": [0, 0], "start_ns": [None, 2]}, role=1)
    with TraceReader(tmp_path / "t") as reader:
        units = reader.units(0)
        assert units.kind.tolist() == [0, 0]
        assert units.start_ns.tolist() == [ABSENT, 2]
        assert list(units.label) == [None, None]
        assert list(units.splits_in) == [None, None]
    assert foreign_read((tmp_path / "t").read_bytes()) == prismtrace.to_json(tmp_path / "t")


def test_ranks_merge_with_their_roles(tmp_path: Path) -> None:
    job = Job(pp=2, dp=4, tp=1)
    write_job(tmp_path / "plain", job)
    compact(tmp_path / "plain", tmp_path / "small")
    with TraceWriter(tmp_path / "new") as writer:
        writer.add_units(5, {"kind": [1]})
    prismtrace.merge([tmp_path / "small", tmp_path / "small", tmp_path / "new"], tmp_path / "merged")
    wanted, got = prismtrace.to_json(tmp_path / "plain"), prismtrace.to_json(tmp_path / "merged")
    assert got["ranks"]["5"]["units"]["columns"] == {"kind": [1]}
    got["ranks"]["5"] = wanted["ranks"]["5"]
    assert got == wanted | {"format": "1.1"}
    assert foreign_read((tmp_path / "merged").read_bytes())["ranks"]["4"] == wanted["ranks"]["4"]
    raw = (tmp_path / "merged").read_bytes()
    (tmp_path / "cut").write_bytes(raw[:-40])
    with TraceReader(tmp_path / "cut", allow_unfinished=True) as reader:
        assert reader.units(5).kind.tolist() == [1]
        assert reader.units(4).start_ns.tolist() == job.units(4)["start_ns"].tolist()
    prismtrace.recover(tmp_path / "cut", tmp_path / "saved")
    assert prismtrace.to_json(tmp_path / "saved")["ranks"] == prismtrace.to_json(tmp_path / "merged")["ranks"]
    with pytest.raises(TraceUsageError, match="its index leaves out"):
        TraceWriter.append(tmp_path / "merged")
    prismtrace.recover(tmp_path / "small", tmp_path / "recovered")
    assert prismtrace.to_json(tmp_path / "recovered") == wanted | {"format": "1.1"}
    for value in (1, 2):
        with TraceWriter(tmp_path / f"role{value}") as writer:
            writer.add_role(1, {"kind": [value]})
    with pytest.raises(TraceDataError, match="role 1 differs"):
        prismtrace.merge([tmp_path / "role1", tmp_path / "role2"], tmp_path / "no")


def test_rows_must_fit_the_role(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_role(1, {"kind": [1, 2]})
        writer.add_role(1, {"kind": [3]})
        writer.add_units(0, {"kind": [1, 2, 3]}, role=1)
        with pytest.raises(TraceUsageError, match="begins with row 3"):
            writer.add_units(0, {"kind": [1]}, role=1)
        with pytest.raises(TraceUsageError, match="begins with row 0"):
            writer.add_units(1, {"kind": [1]}, role=1)
        with pytest.raises(TraceUsageError, match="must be in 1"):
            writer.add_role(0, {"kind": [1]})
        assert writer.add_units(1, {"kind": [1, 2]}, role=1) == 0
        assert writer.add_units(1, {"kind": [9]}) == 2
    with TraceReader(tmp_path / "t") as reader:
        assert reader.units(0).kind.tolist() == [1, 2, 3]
        assert reader.units(1).kind.tolist() == [1, 2, 9]
        with pytest.raises(TraceUsageError, match="no role 5"):
            reader.role_units(5)


def test_ranks_that_share_everything_take_few_bytes(tmp_path: Path) -> None:
    job = Job(pp=4, dp=64, tp=2, num_layers=10)
    write_job(tmp_path / "plain", job)
    compact(tmp_path / "plain", tmp_path / "small")
    with TraceReader(tmp_path / "small") as reader:
        num_units = sum(reader.num_units(rank) for rank in reader.ranks)
        groups = len(prismtrace.metas.pack_groups(reader.groups.values()))
    size = (tmp_path / "small").stat().st_size - 2 * groups
    assert size / job.world_size < 40
    assert size / num_units < 0.4


def test_what_would_not_get_smaller_is_copied(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_units(0, {"kind": [1]})
    report = compact(tmp_path / "t", tmp_path / "same")
    assert (report.is_copy, report.num_ranks) == (True, 1)
    assert (tmp_path / "same").read_bytes() == (tmp_path / "t").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same", "t"]
    again = compact(VECTORS / "roles_8192.prism", tmp_path / "roles")
    assert again.is_copy and (tmp_path / "roles").stat().st_size == (VECTORS / "roles_8192.prism").stat().st_size


def test_slices_and_redacted_copies_keep_roles(tmp_path: Path) -> None:
    job = Job(pp=2, dp=16, tp=1)
    write_job(tmp_path / "plain", job)
    assert not compact(tmp_path / "plain", tmp_path / "small").is_copy
    steps = range(1)
    prismtrace.slice_trace(tmp_path / "plain", tmp_path / "plain.slice", steps=steps)
    prismtrace.slice_trace(tmp_path / "small", tmp_path / "slice", steps=steps)
    prismtrace.redact(tmp_path / "small", tmp_path / "public", key="k")
    assert prismtrace.to_json(tmp_path / "slice") == prismtrace.to_json(tmp_path / "plain.slice") | {"format": "1.1"}
    for name in ("slice", "public"):
        with TraceReader(tmp_path / name) as reader:
            assert len(reader.roles) == 2, name
    assert (tmp_path / "slice").stat().st_size < (tmp_path / "plain.slice").stat().st_size / 2
    assert (tmp_path / "public").stat().st_size < (tmp_path / "small").stat().st_size * 1.2
