"""Clocks that differ by a known offset and drift are brought together again."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from prismtrace import (
    ABSENT,
    Op,
    ProcessGroup,
    TraceReader,
    TraceResultError,
    TraceUsageError,
    TraceWriter,
    UnitKind,
    merge,
    validate,
)
from prismtrace.align import Alignment, estimate_clocks

STEP_NS = 20_000_000


def write_shards(
    folder: Path,
    *,
    groups: list[tuple[int, ...]],
    offsets: list[int],
    drifts: list[float],
    jitter_ns: int = 500,
    count: int = 200,
    seed: int = 1,
) -> list[Path]:
    """One file a rank: in turn every group ends a collective together, on clocks that are wrong by what is given."""
    rng = np.random.default_rng(seed)
    world = len(offsets)
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(world)]
    now = 1_000_000
    for number in range(count):
        for group_id, members in enumerate(groups, start=1):
            now += STEP_NS // len(groups)
            for rank in members:
                start = now - int(rng.integers(1_000_000, 3_000_000))
                rows[rank].append((group_id, number, start, now + int(rng.normal(0, jitter_ns))))
    paths = []
    for rank in range(world):
        wrong = [[], []]
        for place in (2, 3):
            true = np.array([row[place] for row in rows[rank]], np.float64)
            wrong[place - 2] = np.rint(true * (1 + drifts[rank])).astype(np.int64) + offsets[rank]
        paths.append(folder / f"rank{rank}.prism")
        with TraceWriter(paths[-1], world_size=world, overwrite=True) as writer:
            for group_id, members in enumerate(groups, start=1):
                writer.add_group(ProcessGroup(group_id=group_id, ranks=members))
            number = len(rows[rank])
            columns = {
                "kind": [UnitKind.COLLECTIVE] * number,
                "op": [Op.ALL_REDUCE] * number,
                "group_id": np.array([row[0] for row in rows[rank]], np.uint64),
                "seq": np.array([row[1] for row in rows[rank]], np.int64),
                "start_ns": wrong[0],
                "end_ns": wrong[1],
            }
            writer.add_units(rank, columns)
            writer.add_steps(rank, {"step": [0], "start_ns": [None], "end_ns": [int(wrong[1][-1])]})
    return paths


def ends(path: Path) -> dict[tuple[int, int], list[int]]:
    """Ends of each collective over all ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    with TraceReader(path) as reader:
        for rank in reader.ranks:
            units = reader.units(rank)
            for row in range(len(units)):
                found.setdefault((int(units.group_id[row]), int(units.seq[row])), []).append(int(units.end_ns[row]))
    return found


def test_offsets_are_found_within_the_jitter(tmp_path: Path) -> None:
    offsets = [0, 7_654_321_012, -3_000_000_000_000, 1_700_000_000_000_000_000]
    shards = write_shards(tmp_path, groups=[(0, 1), (2, 3), (1, 2)], offsets=offsets, drifts=[0.0] * 4)
    found = merge(shards, tmp_path / "all.prism", align="file")
    assert isinstance(found, Alignment)
    for rank, offset in enumerate(offsets):
        assert abs(found.of_rank(rank).offset_ns + offset) < 300, "200 collectives of 500 ns jitter, three hops"
    assert found.residual_median_ns < 700 and found.is_causal and found.num_collectives == 600
    assert max(max(times) - min(times) for times in ends(tmp_path / "all.prism").values()) < 8000
    assert validate(tmp_path / "all.prism") == []
    with TraceReader(tmp_path / "all.prism") as reader:
        assert reader.metadata["clock.reference"] == "0"
        assert reader.metadata["clock.offsets_ns"].startswith("0=0,1=-76543")
        assert reader.metadata["clock.residual_median_ns"] == str(found.residual_median_ns)
        steps = reader.steps(3)
        assert steps.start_ns[0] == ABSENT and abs(int(steps.end_ns[0]) - int(reader.units(3).end_ns[-1])) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "all.prism",
        *(f"rank{rank}.prism" for rank in range(4)),
    ]


def test_drift_is_found(tmp_path: Path) -> None:
    drifts = [0.0, 2e-5, -1e-5]
    shards = write_shards(tmp_path, groups=[(0, 1, 2)], offsets=[5, 10**9, -(10**12)], drifts=drifts)
    plain = estimate_clocks(shards)
    found = merge(shards, tmp_path / "all.prism", align="file", drift=True)
    assert found is not None and found.residual_median_ns < 700
    assert plain.residual_median_ns > 5000, "four seconds at 20 ppm are 80 us: an offset alone leaves them"
    for rank in (1, 2):
        assert found.of_rank(rank).drift == pytest.approx(-drifts[rank], abs=2e-7)
    assert max(max(times) - min(times) for times in ends(tmp_path / "all.prism").values()) < 8000


def test_outliers_do_not_move_the_clocks(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, groups=[(0, 1, 2)], offsets=[0, 50_000, -70_000], drifts=[0.0] * 3)
    with TraceReader(shards[1]) as reader:
        columns = reader.units(1).columns()
    late = np.asarray(columns["end_ns"]).copy()
    late[::9] += 30_000_000
    with TraceWriter(shards[1], world_size=3, overwrite=True) as writer:
        writer.add_units(1, {**columns, "end_ns": late})
    found = estimate_clocks(shards)
    assert found.num_outliers > 0 and found.residual_max_ns > 10_000_000
    for rank, offset in enumerate((0, 50_000, -70_000)):
        assert abs(found.of_rank(rank).offset_ns + offset) < 300


def test_clocks_without_a_common_collective_are_refused_by_name(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, groups=[(0, 1), (2, 3)], offsets=[0] * 4, drifts=[0.0] * 4)
    with pytest.raises(TraceResultError, match=r"0 \(ranks 0\), 1 \(ranks 1\); 2 \(ranks 2\), 3 \(ranks 3\)"):
        merge(shards, tmp_path / "all.prism", align="file")
    with pytest.raises(TraceUsageError, match="only one clock"):
        merge(shards[:1], tmp_path / "all.prism", align="file")
    with pytest.raises(TraceUsageError, match="'file' or 'rank'"):
        merge(shards, tmp_path / "all.prism", align="host")
    assert not (tmp_path / "all.prism").exists()


def test_a_receive_before_its_send_is_reported(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, groups=[(0, 1)], offsets=[0, 0], drifts=[0.0, 0.0], count=50)
    for rank, kind in ((0, UnitKind.SEND), (1, UnitKind.RECV)):
        with TraceReader(shards[rank]) as reader:
            columns = dict(reader.units(rank).columns())
        with TraceWriter(shards[rank], world_size=2, overwrite=True) as writer:
            writer.add_group(ProcessGroup(group_id=1, ranks=(0, 1)))
            writer.add_units(rank, columns)
            op = Op.SEND if kind is UnitKind.SEND else Op.RECV
            start = 9_000_000_000 if rank == 0 else 8_000_000_000
            message = {"kind": [kind], "op": [op], "group_id": np.array([1], np.uint64), "seq": [0], "tag": [0]}
            writer.add_units(rank, {**message, "peer": [1 - rank], "start_ns": [start], "end_ns": [start + 10]})
    found = estimate_clocks(shards)
    assert not found.is_causal and found.num_messages == 1 and found.num_early_receives == 1
    assert abs(found.worst_early_ns - 999_999_990) < 1000


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offsets=st.lists(st.integers(-(10**17), 10**17), min_size=2, max_size=6),
    jitter=st.sampled_from([0, 100, 20_000]),
    seed=st.integers(0, 99),
    drift=st.booleans(),
)
def test_any_offsets_over_a_chain_of_groups(
    tmp_path: Path, offsets: list[int], jitter: int, seed: int, drift: bool
) -> None:
    groups = [(rank, rank + 1) for rank in range(len(offsets) - 1)]
    drifts = [0.0 if not drift else (rank % 3) * 1e-5 for rank in range(len(offsets))]
    shards = write_shards(
        tmp_path, groups=groups, offsets=offsets, drifts=drifts, jitter_ns=jitter, count=40, seed=seed
    )
    found = merge(shards, tmp_path / "all.prism", align="rank", drift=drift, overwrite=True)
    assert found is not None
    spread = max(max(times) - min(times) for times in ends(tmp_path / "all.prism").values())
    assert spread <= 12 * jitter + 20
