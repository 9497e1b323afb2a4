"""The parts of a step: by hand on small timelines, and by properties on random ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_jobs import MadeJob

from prism_sdk.analysis import PARTS, breakdown_of, load_job
from prism_sdk.analysis.spans import coverage, cut, union_ns
from prism_sdk.errors import UsageError
from prismtrace import UnitKind


def parts_of(job: MadeJob, path: Path, **options: int) -> dict[int, dict[str, float]]:
    found = breakdown_of(load_job(job.write(path)), **options)
    return {rank: found.of_rank(rank) for rank in job.rows}


def test_a_collective_is_divided_at_its_last_arrival(tmp_path: Path) -> None:
    job = MadeJob(2)
    for rank, post in ((0, 10), (1, 14)):
        job.compute(rank, 0, post)
        job.communicate(rank, post, 20, wait=(post, 23))
        job.compute(rank, 25, 30)
        job.step(rank, 0, 0, 40)
    found = parts_of(job, tmp_path / "a.prism", max_gap_ns=5)
    expected = {"compute": 15, "exposed_communication": 6, "bubble": 0, "imbalance": 4, "launch_gap": 5, "idle": 10}
    assert found[0] == expected
    assert found[1] == {**expected, "compute": 19, "imbalance": 0}


def test_waiting_for_a_message_is_a_bubble(tmp_path: Path) -> None:
    job = MadeJob(2)
    job.compute(0, 0, 30)
    job.message(UnitKind.SEND, 0, 1, 30, 35, wait=(30, 30))
    job.message(UnitKind.RECV, 1, 0, 0, 35, wait=(5, 36))
    job.compute(1, 36, 50)
    for rank in (0, 1):
        job.step(rank, 0, 0, 50)
    found = parts_of(job, tmp_path / "a.prism")
    # the receive is posted at 0 and waited for from 5; it is sent at 30 and there at 35; waking up takes 1
    assert found[1] == {"compute": 14, "exposed_communication": 5, "bubble": 25, "imbalance": 0, "launch_gap": 1,
                        "idle": 5}  # fmt: skip


def test_hidden_communication_is_no_part_of_the_sum(tmp_path: Path) -> None:
    job = MadeJob(1)
    row = job.communicate(0, 0, 30, is_async=True)
    job.compute(0, 0, 20)
    job.add(0, UnitKind.WAIT, 20, 30, awaits=row)
    job.step(0, 0, 0, 30)
    found = breakdown_of(load_job(job.write(tmp_path / "a.prism")))
    assert found.communication_ns.tolist() == [30] and found.hidden_communication_ns.tolist() == [20]
    assert found.overlap_ratio == 20 / 30
    assert found.mean_parts_ns["exposed_communication"] == 10 and found.mean_step_ns == 30


def test_spans_that_contain_the_waiting(tmp_path: Path) -> None:
    """Formats without WAIT units: the host is blocked by the communication itself."""
    job = MadeJob(2)
    for rank, post in ((0, 10), (1, 25)):
        job.compute(rank, 0, post)
        job.communicate(rank, post, 30)
        job.compute(rank, 30, 40)
    found = parts_of(job, tmp_path / "a.prism")
    assert found[0]["imbalance"] == 15 and found[0]["exposed_communication"] == 5 and found[1]["imbalance"] == 0


def test_gaps_that_the_trace_gives_count_in_full(tmp_path: Path) -> None:
    job = MadeJob(1)
    job.compute(0, 0, 10)
    job.compute(0, 310, 320, gap_ns=200)
    assert parts_of(job, tmp_path / "a.prism", max_gap_ns=50)[0] == {
        "compute": 20, "exposed_communication": 0, "bubble": 0, "imbalance": 0, "launch_gap": 200, "idle": 100,
    }  # fmt: skip


def test_the_first_step_counts_where_it_is_the_only_one(tmp_path: Path) -> None:
    job = MadeJob(1)
    for step in range(3):
        job.compute(0, 100 * step, 100 * step + 10 + step, step=step)
        job.step(0, step, 100 * step, 100 * step + 100)
    found = breakdown_of(load_job(job.write(tmp_path / "a.prism")))
    assert found.windows.is_steady.tolist() == [False, True, True]
    assert found.mean_parts_ns["compute"] == 11.5
    assert breakdown_of(load_job(tmp_path / "a.prism", steps=range(1))).mean_parts_ns["compute"] == 10


def test_what_cannot_be_analysed_says_so(tmp_path: Path) -> None:
    job = MadeJob(1)
    job.add(0, UnitKind.COMPUTE, np.iinfo(np.int64).min, np.iinfo(np.int64).min)
    path = job.write(tmp_path / "bare.prism")
    with pytest.raises(UsageError, match="no unit has a time"):
        load_job(path)
    with pytest.raises(UsageError, match="no rank 7"):
        load_job(path, ranks=[7])


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12)


@given(spans)
def test_union_by_counting(pairs: list[tuple[int, int]]) -> None:
    covered = {t for start, length in pairs for t in range(start, start + length)}
    assert union_ns([(start, start + length) for start, length in pairs]) == len(covered)


@given(spans)
def test_coverage_by_counting(pairs: list[tuple[int, int]]) -> None:
    start = np.array([a for a, _ in pairs], dtype=np.int64)
    end = start + np.array([n for _, n in pairs], dtype=np.int64)
    bounds = cut(start, end)
    for index, count in enumerate(coverage(bounds, start, end).tolist()):
        assert count == sum(int(a <= bounds[index] < b) for a, b in zip(start, end, strict=True))


@st.composite
def timelines(draw: st.DrawFn) -> MadeJob:
    """Any well-formed times: hosts in order, communication anywhere after its post, waits for some of it."""
    job = MadeJob(draw(st.integers(1, 3)))
    num_collectives = draw(st.integers(0, 4))
    for rank in range(job.world_size):
        clock, open_rows = draw(st.integers(0, 20)), []
        first = clock
        for _ in range(num_collectives):
            for _ in range(draw(st.integers(0, 3))):
                clock += draw(st.integers(0, 9))
                length = draw(st.integers(0, 15))
                job.compute(rank, clock, clock + length, gap_ns=draw(st.sampled_from([0, 3, -(1 << 63)])))
                clock += length
            end = clock + draw(st.integers(0, 25))
            open_rows.append(job.communicate(rank, clock, end, is_async=draw(st.booleans())))
            if draw(st.booleans()):
                length = draw(st.integers(0, 12))
                job.add(rank, UnitKind.WAIT, clock, clock + length, awaits=open_rows[-1])
                clock += length
        job.compute(rank, clock, clock + 1)
        job.step(rank, 0, first, clock + draw(st.integers(1, 30)))
    return job


@given(timelines(), st.integers(0, 20))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_parts_add_up_exactly(tmp_path: Path, job: MadeJob, max_gap_ns: int) -> None:
    loaded = load_job(job.write(tmp_path / "random.prism"))
    found = breakdown_of(loaded, max_gap_ns=max_gap_ns)
    assert (found.parts_ns.sum(axis=1) == found.windows.length_ns).all()
    assert (found.parts_ns >= 0).all() and len(PARTS) == found.parts_ns.shape[1]
    assert (found.hidden_communication_ns <= np.minimum(found.communication_ns, found.parts_ns[:, 0])).all()
    for rank in job.rows:
        rows = [row for row in job.rows[rank] if row["kind"] == UnitKind.COMPUTE]
        assert found.of_rank(rank)["compute"] == union_ns([(row["start_ns"], row["end_ns"]) for row in rows])
    # what is neither hidden nor waiting is exposed: no communication is lost
    parts = dict(zip(PARTS, found.parts_ns.T, strict=True))
    outside = found.communication_ns - found.hidden_communication_ns
    assert (parts["exposed_communication"] <= outside + parts["launch_gap"] + parts["idle"]).all()
