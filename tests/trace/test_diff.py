"""Differences between two traces are found, counted and named; equal traces have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_sample import GROUP, write_sample

from prismtrace import ABSENT, GraphKind, Op, ProcessGroup, TraceReader, TraceUsageError, TraceWriter, diff
from prismtrace.alignment import compare


def rewrite(source: Path, target: Path, *, rank: int = 1, rows: Any = None, **changes: Any) -> Path:
    """A copy whose units of one rank have other columns (`name=function`), or other rows."""
    with TraceReader(source) as reader, TraceWriter(target, graph_kind=reader.graph_kind, world_size=2) as writer:
        writer.update_metadata(reader.metadata)
        writer.add_group(GROUP)
        for digest in reader.payload_digests:
            writer.add_payload(reader.payload(digest))
        for one in reader.ranks:
            units = reader.units(one)
            columns = dict(units.columns())
            if one == rank:
                for name, function in changes.items():
                    columns[name] = function(np.array(getattr(units, name)))
                if rows is not None:
                    picked = rows(np.arange(len(units)))
                    columns = {
                        k: v[picked] if isinstance(v, np.ndarray) else v.take(picked) for k, v in columns.items()
                    }
            writer.add_units(one, columns)
            writer.add_steps(one, reader.steps(one))
            writer.add_scalars(one, reader.scalars(one))
    return target


def changed(row: int, value: int) -> Any:
    def function(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        column[row] = value
        return column

    return function


def test_equal_files_and_equal_contents(tmp_path: Path, sample: Path) -> None:
    found = diff(sample, sample)
    assert not found.differs and found.num_ranks_identical == 2 and found.counts == {}
    found = diff(sample, rewrite(sample, tmp_path / "same"))
    assert not found.differs, "other chunks, same rows"


def test_a_changed_operation(tmp_path: Path, sample: Path) -> None:
    found = diff(sample, rewrite(sample, tmp_path / "b", op=changed(6, Op.ALL_GATHER)))
    assert found.counts == {"structure": 1}
    (change,) = found.structure
    assert (change.rank, change.step, change.num_changed) == (1, 1, 1)
    assert change.first == "unit 6 (all_reduce -> all_gather): op 1 -> 4"


def test_removed_and_added_units(tmp_path: Path, sample: Path) -> None:
    fewer = rewrite(sample, tmp_path / "b", rows=lambda rows: np.delete(rows, 5), awaits=lambda column: column)
    found = diff(sample, fewer, ignore=["times", "memory"])
    assert [(one.step, one.num_removed, one.num_added, one.num_changed) for one in found.structure] == [(1, 1, 0, 0)]
    assert found.structure[0].first.startswith("unit 5 (compute forward -> all_reduce)")
    (back,) = diff(fewer, sample, ignore=["times", "memory"]).structure
    assert (back.num_removed, back.num_added) == (0, 1)


def test_an_earlier_wait_is_a_change_of_order(tmp_path: Path, sample: Path) -> None:
    found = diff(sample, rewrite(sample, tmp_path / "b", awaits=changed(9, 6)))
    assert found.counts == {"structure": 1} and "awaits 8 -> 6" in found.structure[0].first


def test_times(tmp_path: Path, sample: Path) -> None:
    slower = rewrite(sample, tmp_path / "b", end_ns=changed(5, 11_501))
    found = diff(sample, slower)
    assert found.counts == {"times": 1}
    (change,) = found.timing
    assert (change.by, change.name, change.num_a, change.change_ns) == ("op", "compute forward", 4, 500)
    assert not diff(sample, slower, ignore=["times"]).differs


def test_groups_metadata_header_and_ranks(tmp_path: Path, sample: Path) -> None:
    with TraceWriter(tmp_path / "b", graph_kind=GraphKind.BARE, world_size=4, metadata={"x": "1"}) as writer:
        writer.add_group(ProcessGroup(group_id=5, name="tp", ranks=(2, 3)))
        writer.add_units(2, {"kind": [1]})
    found = diff(sample, tmp_path / "b")
    assert found.counts == {"header": 2, "ranks": 3, "groups": 2, "metadata": 2, "payloads": 1}
    texts = {(item.category, item.where): (item.before, item.after) for item in found.values}
    assert texts["header", "graph_kind"] == ("observed", "bare")
    assert texts["metadata", "x"] == (None, "1")
    assert texts["ranks", "rank 2"] == (None, "1 unit")
    assert texts["groups", "group tp"][0] is None


def test_group_ids_do_not_matter(tmp_path: Path) -> None:
    for name, group_id in (("a", 5), ("b", 2**63)):
        with TraceWriter(tmp_path / name) as writer:
            writer.add_group(ProcessGroup(group_id=group_id, name="dp", ranks=(0, 1)))
            writer.add_units(0, {"kind": [2], "op": [1], "group_id": np.array([group_id], np.uint64), "seq": [0]})
    assert not diff(tmp_path / "a", tmp_path / "b").differs


def test_losses_are_compared_bit_by_bit(tmp_path: Path) -> None:
    for name, values in (("a", [1.0, 2.0, float("nan"), 4.0]), ("b", [1.0, np.nextafter(2.0, 3), float("nan"), 4.5])):
        with TraceWriter(tmp_path / name) as writer:
            steps = {"step": [0, 1, 2, 3], "end_ns": [1, 2, 3, 4], "loss": values, "num_losses": [1] * 4}
            writer.add_steps(0, steps)
            writer.add_scalars(0, {"step": [0, 1], "name": ["lr", "lr"], "value": [0.1, values[1]]})
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.counts == {"scalars": 3} and found.largest_scalar_difference == 0.5
    assert found.values[0].where == "rank 0, step 3 loss (the largest of 2)"


def test_a_loss_on_one_side_only_is_absent_and_no_number(tmp_path: Path) -> None:
    for name, values in (("a", [1.0, 2.0]), ("b", [float("nan"), 2.5])):
        with TraceWriter(tmp_path / name) as writer:
            writer.add_steps(0, {"step": [0, 1], "end_ns": [1, 2], "loss": values, "num_losses": [1] * 2})
            writer.add_scalars(0, {"step": [0], "name": ["lr"], "value": [values[0]]})
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.largest_scalar_difference == 0.5 and found.counts == {"scalars": 3}
    assert [(one.before, one.after) for one in found.values] == [("1.0", "absent"), ("1.0", "nan")]
    assert diff(tmp_path / "b", tmp_path / "a").values[0].before == "absent"


def test_unknown_categories_are_refused(sample: Path) -> None:
    with pytest.raises(TraceUsageError, match="nonsense"):
        diff(sample, sample, ignore=["nonsense"])


def test_lists_are_cut_and_everything_is_counted(tmp_path: Path) -> None:
    a, b = write_sample(tmp_path / "a", steps=30), tmp_path / "b"
    rewrite(a, b, dtype=lambda column: np.where(column == 1, 2, column))
    found = diff(a, b, max_items=3)
    assert found.counts["structure"] == 30 and len(found.structure) == 3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_edits_account_for_lengths(a: list[int], b: list[int]) -> None:
    edits = compare(np.array(a, np.int64), np.array(b, np.int64))
    assert (edits is None) == (a == b)
    if edits is not None:
        assert len(a) - edits.num_removed + edits.num_added == len(b)
        assert a[: edits.first_a] == b[: edits.first_b]


def test_long_different_middles_are_only_counted() -> None:
    a, b = np.arange(5000), np.arange(5000)[::-1].copy()
    edits = compare(a, np.concatenate([b, [ABSENT]]))
    assert edits is not None and not edits.exact and (edits.num_added, edits.num_removed) == (1, 0)


def test_ranks_of_one_file_only_are_counted_and_the_first_of_them_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking the index for each of a million ranks takes half a minute."""
    for name, ranks in (("a", range(300)), ("b", range(100, 101))):
        with TraceWriter(tmp_path / name) as writer:
            for rank in ranks:
                writer.add_units(rank, {"kind": [1, 1]})
    asked: list[int] = []
    num_units = TraceReader.num_units
    monkeypatch.setattr(TraceReader, "num_units", lambda self, rank: (asked.append(rank), num_units(self, rank))[1])
    found = diff(tmp_path / "a", tmp_path / "b", max_items=4)
    assert found.counts == {"ranks": 299}
    assert [(item.where, item.before, item.after) for item in found.values] == [
        (f"rank {rank}", "2 units", None) for rank in range(4)
    ]
    assert (found.num_units_a, found.num_units_b) == (600, 2)
    assert asked == [0, 1, 2, 3]
