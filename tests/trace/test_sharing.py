"""Rows that many ranks have alike, with columns of which each rank has values of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismtrace import ABSENT, TableKind, TraceReader, TraceUsageError, TraceWriter, add_alike, has_errors, validate
from prismtrace.model import ABSENT32


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_rank_gets_its_own_values(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where one value is replaced by different ones in different rows, which no single map can say.

    And where the rows have no value, or a default that is not stored.
    """
    name, dtype, absent = data.draw(st.sampled_from([
        ("peer", np.int32, ABSENT32), ("seq", np.int64, ABSENT), ("group_id", np.uint64, 0), ("step", np.int64, 0),
    ]))  # fmt: skip
    is_optional = absent != 0
    num_rows, num_ranks = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    num_codes = data.draw(st.integers(1, 4))
    few = st.sampled_from([absent, 1, 2, 3])
    column = np.array(data.draw(st.lists(few, min_size=num_rows, max_size=num_rows)), dtype)
    some_codes = st.lists(st.integers(-1, num_codes - 1), min_size=num_rows, max_size=num_rows)
    codes = np.array(data.draw(some_codes), np.int64)
    values = np.array(data.draw(st.lists(st.lists(st.integers(is_optional, 9), min_size=num_ranks, max_size=num_ranks),
                                         min_size=num_codes, max_size=num_codes)), np.int64)  # fmt: skip
    ranks = list(range(3, 3 + 2 * num_ranks, 2))
    path = tmp_path_factory.mktemp("shared") / "a.prism"
    with TraceWriter(path, world_size=20) as writer:
        columns = {"kind": [3] * num_rows, name: column, "start_ns": np.arange(num_rows)}
        add_alike(writer, ranks, columns, role=5, replaced={name: (codes, values)})
        add_alike(writer, ranks, {"step": [0], "loss": [1.5]}, role=5, table=TableKind.STEPS)
    with TraceReader(path) as reader:
        assert reader.ranks == tuple(ranks)
        for place, rank in enumerate(ranks):
            units = reader.units(rank)
            expected = np.where(codes >= 0, values[codes, place], column.astype(np.int64))
            assert getattr(units, name).tolist() == expected.tolist()
            assert units.start_ns.tolist() == list(range(num_rows))
            assert reader.steps(rank).loss.tolist() == [1.5]


def test_a_thousand_ranks_cost_little(tmp_path: Path) -> None:
    ranks, groups = list(range(1000)), np.arange(1, 1001, dtype=np.int64)
    columns = {"kind": [2] * 500, "group_id": np.where(np.arange(500) % 2, 1, 0).astype(np.uint64)}
    with TraceWriter(tmp_path / "a.prism", world_size=1000) as writer:
        codes = np.where(np.arange(500) % 2, 0, -1)
        add_alike(writer, ranks, columns, role=1, replaced={"group_id": (codes, groups[None, :])})
    assert (tmp_path / "a.prism").stat().st_size < 6000
    with TraceReader(tmp_path / "a.prism") as reader:
        assert set(reader.units(700).group_id.tolist()) == {0, 701}


@pytest.mark.parametrize(
    ("ranks", "replaced", "message"),
    [
        ([2, 1], {}, "rising order"),
        ([], {}, "rising order"),
        ([1], {"peer": (np.array([0, 1]), np.array([[4]]))}, "do not fit its 2 rows"),
        ([1], {"peer": (np.array([0, 0]), np.array([[4, 5]]))}, "of shape"),
        ([1], {"peer": (np.array([0, 0]), np.array([[ABSENT32]]))}, "no value in some rank"),
        ([1], {"label": (np.array([0, 0]), np.array([[4]]))}, "no column of integers"),
        ([1], {"tag": (np.array([0, 0]), np.array([[4]]))}, "no column of integers"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    tmp_path: Path, ranks: list[int], replaced: dict[str, tuple[np.ndarray, np.ndarray]], message: str
) -> None:
    columns = {"kind": [3, 3], "peer": [1, 2], "label": ["a", "b"]}
    with TraceWriter(tmp_path / "a.prism") as writer, pytest.raises(TraceUsageError, match=message):
        add_alike(writer, ranks, columns, role=5, replaced=replaced)


def test_what_is_written_is_valid(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.prism", world_size=4) as writer:
        add_alike(writer, [0, 2], {"kind": [1, 1], "start_ns": [0, 5], "end_ns": [4, 9]}, role=9)
        writer.add_units(1, {"kind": [1], "start_ns": [0], "end_ns": [1]})
    assert not has_errors(validate(tmp_path / "a.prism"))
