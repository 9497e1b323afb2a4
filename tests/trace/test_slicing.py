"""A slice is a valid trace that says the same as the whole about what it kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from trace_sample import GROUP, write_sample

import prismtrace
from prismtrace import ABSENT, TraceReader, TraceUsageError, TraceWriteError, slice_trace, validate
from prismtrace.tables import UnitTable


def errors(path: Path) -> list[str]:
    return [f"{item.code} {item.message}" for item in validate(path) if item.severity == "error"]


def test_a_slice_of_everything_is_the_same(tmp_path: Path, sample: Path) -> None:
    report = slice_trace(sample, tmp_path / "out", ranks=(0, 1))
    twin, whole = prismtrace.to_json(tmp_path / "out"), prismtrace.to_json(sample)
    assert twin["metadata"].pop("slice.ranks") == "0-1"
    assert twin == whole
    assert (report.num_units, report.num_units_before, report.num_cut_waits, report.num_payloads) == (20, 20, 0, 1)


def test_steps(tmp_path: Path) -> None:
    source = write_sample(tmp_path / "long", steps=6)
    report = slice_trace(source, tmp_path / "out", ranks=[1], steps=range(2, 4))
    assert report.ranks == (1,) and report.num_units == 10 and errors(tmp_path / "out") == []
    with TraceReader(tmp_path / "out") as part, TraceReader(source) as whole:
        units, before = part.units(1), whole.units(1, steps=range(2, 4))
        assert part.ranks == (1,) and dict(part.groups) == {GROUP.group_id: GROUP} and part.world_size == 2
        assert units.row_index.tolist() == list(range(10))
        assert units.awaits[units.awaits != ABSENT].tolist() == [1, 3, 6, 8]
        assert units.start_ns.tolist() == before.start_ns.tolist() and units.seq.tolist() == before.seq.tolist()
        assert part.steps(1).step.tolist() == part.scalars(1).step.tolist() == [2, 3]
        assert part.metadata["slice.steps"] == "2:4"
        assert part.payload_digests == whole.payload_digests


def test_a_wait_without_its_communication_loses_it(tmp_path: Path, sample: Path) -> None:
    report = slice_trace(sample, tmp_path / "out", ranks=[0], time_ns=(3000, 3400))
    with TraceReader(tmp_path / "out") as part:
        units = part.units(0)
        assert part.steps(0).step.tolist() == [0]
    assert report.num_units == len(units) == 2 and report.num_cut_waits == 0, "the send has one time, its wait both"
    assert units.awaits.tolist() == [ABSENT, 0]
    report = slice_trace(sample, tmp_path / "cut", ranks=[0], time_ns=(3001, 3400))
    assert report.num_units == 1 and report.num_cut_waits == 1
    assert {item.code for item in validate(tmp_path / "cut")} == {"PT024"}


CLAIMS = {
    "rank.0.begins_ns": "70", "rank.1.begins_ns": "80", "rank.1.fidelity": "full",
    "profile": "schedule-unit,replay,payload",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cut", "lost", "profile"),
    [
        ({"steps": range(1)}, set(), CLAIMS["profile"]),
        ({"steps": range(1, 2)}, {"rank.0.begins_ns", "rank.1.begins_ns"}, CLAIMS["profile"]),
        ({"ranks": [1]}, {"rank.0.begins_ns"}, CLAIMS["profile"]),
        ({"ranks": [0], "keep_payloads": False}, {"rank.1.begins_ns"}, "schedule-unit,replay"),
        ({"time_ns": (3001, 13_000)}, {"rank.0.begins_ns", "rank.1.begins_ns"}, "schedule-unit,payload"),
    ],
)
def test_metadata_that_the_cut_makes_untrue_goes(
    tmp_path: Path, sample: Path, cut: dict[str, Any], lost: set[str], profile: str
) -> None:
    prismtrace.merge([sample], tmp_path / "whole", metadata=CLAIMS)
    slice_trace(tmp_path / "whole", tmp_path / "out", **cut)
    with TraceReader(tmp_path / "out") as part:
        kept = {key: part.metadata[key] for key in CLAIMS if key in part.metadata}
    assert kept == {key: value for key, value in CLAIMS.items() if key not in lost} | {"profile": profile}


def test_a_merge_says_where_the_ranks_of_its_units_begin(tmp_path: Path, sample: Path) -> None:
    prismtrace.merge([sample], tmp_path / "whole", metadata=CLAIMS)
    slice_trace(tmp_path / "whole", tmp_path / "late", ranks=[1], steps=range(1, 2))
    for paths, begins in ((["whole", "late"], None), (["late", "whole"], "80")):
        prismtrace.merge([tmp_path / path for path in paths], tmp_path / "both", overwrite=True)
        with TraceReader(tmp_path / "both") as both:
            assert (both.metadata["rank.0.begins_ns"], both.metadata.get("rank.1.begins_ns")) == ("70", begins)


def test_payloads_can_be_dropped(tmp_path: Path, sample: Path) -> None:
    report = slice_trace(sample, tmp_path / "out", steps=range(1), keep_payloads=False)
    assert report.num_payloads == 0 and {item.code for item in validate(tmp_path / "out")} == {"PT050"}


def test_what_makes_no_sense_is_refused(tmp_path: Path, sample: Path) -> None:
    with pytest.raises(TraceUsageError, match="rank 7 has no data"):
        slice_trace(sample, tmp_path / "out", ranks=[0, 7])
    with pytest.raises(TraceUsageError, match="holds no time"):
        slice_trace(sample, tmp_path / "out", time_ns=(5, 5))
    with pytest.raises(TraceUsageError, match="step 1"):
        slice_trace(sample, tmp_path / "out", steps=range(0, 4, 2))
    with pytest.raises(TraceWriteError, match="exists"):
        slice_trace(sample, sample, ranks=[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sample.prism"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.none() | st.sets(st.sampled_from([0, 1]), min_size=1),
    first=st.integers(-1, 4),
    length=st.integers(0, 4),
    low=st.none() | st.integers(-10, 50_000),
    span=st.integers(1, 30_000),
)
def test_any_slice_is_valid(
    tmp_path: Path, ranks: set[int] | None, first: int, length: int, low: int | None, span: int
) -> None:
    source = tmp_path / "long"
    if not source.exists():
        write_sample(source, steps=4)
    window = None if low is None else (low, low + span)
    slice_trace(
        source, tmp_path / "out", ranks=ranks, steps=range(first, first + length), time_ns=window, overwrite=True
    )
    assert errors(tmp_path / "out") == []
    with TraceReader(tmp_path / "out") as part, TraceReader(source) as whole:
        for rank in part.ranks:
            kept, before = pairs(part.units(rank)), pairs(whole.units(rank))
            assert kept <= before, "a wait still waits for the unit that it waited for"


def pairs(units: UnitTable) -> set[tuple[int, int, int | None]]:
    """Kind and start of each unit, and the start of what it waits for (None: nothing, or it was cut off)."""
    result = set()
    starts = dict(zip(units.row_index.tolist(), units.start_ns.tolist(), strict=True))
    for kind, start, target in zip(units.kind.tolist(), units.start_ns.tolist(), units.awaits.tolist(), strict=True):
        result.add((kind, start, None))
        if target != ABSENT:
            result.add((kind, start, int(np.int64(starts[target]))))
    return result
