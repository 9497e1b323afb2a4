"""Tables and readers as data frames and in notebooks: values, absent values, names, and what is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prismtrace import (
    ABSENT,
    GraphKind,
    Op,
    ProcessGroup,
    TraceLimitError,
    TraceReader,
    TraceUsageError,
    TraceWriter,
    UnitKind,
    frames,
    iter_rows,
)

LIBRARIES = ("pandas", "polars", "arrow")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "a.prism"
    with TraceWriter(file, graph_kind=GraphKind.OBSERVED, world_size=3) as writer:
        writer.add_group(ProcessGroup(group_id=1, name="all <ranks>", ranks=(0, 1, 2)))
        writer.update_metadata({"job.argv": '["<script>alert(1)</script>"]'})
        for rank in (0, 2):
            writer.add_units(rank, {
                "kind": [UnitKind.COMPUTE, UnitKind.COLLECTIVE, UnitKind.WAIT], "step": [0, 0, 1],
                "start_ns": [0, 5, ABSENT], "end_ns": [5, 9, ABSENT], "group_id": [0, 1, 0], "seq": [ABSENT, 0, ABSENT],
                "op": [0, Op.ALL_TO_ALL, 0], "awaits": [ABSENT, ABSENT, 1],
                "label": [f"only in {rank}", None, "<b>both</b>"], "splits_in": [None, [1, rank], None],
                "payload_in": [None, bytes(15) + bytes([rank]), None],
            })  # fmt: skip
            writer.add_steps(rank, {"step": [0, 1], "start_ns": [ABSENT, 9], "end_ns": [9, 20],
                                    "loss": [0.5, float("nan")]})  # fmt: skip
    return file


def values_of(frame: Any, library: str) -> dict[str, list[Any]]:
    """Column -> Python values, None where absent."""
    if library == "arrow":
        return dict(frame.to_pydict())
    if library == "polars":
        return dict(frame.to_dict(as_series=False))
    import pandas as pd

    plain = {}
    for name in frame.columns:
        column = frame[name]
        plain[name] = [None if not isinstance(v, np.ndarray) and pd.isna(v) else v for v in column.tolist()]
        plain[name] = [v.tolist() if isinstance(v, np.ndarray) else v for v in plain[name]]
    return plain


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_has_the_rows(path: Path, library: str) -> None:
    pytest.importorskip({"arrow": "pyarrow"}.get(library, library))
    with TraceReader(path) as reader:
        found = values_of(getattr(reader, f"to_{library}")(), library)
        expected: dict[str, list[Any]] = {}
        for batch in iter_rows(reader):
            expected.setdefault("rank", []).extend([batch.rank] * len(batch.row_index))
            expected.setdefault("row_index", []).extend(batch.row_index)
            for name, values in batch.columns.items():
                expected.setdefault(name, []).extend(values)
        steps = values_of(getattr(reader, f"to_{library}")("steps"), library)
        one = values_of(getattr(reader.units(2), f"to_{library}")(names=False), library)
        few = values_of(getattr(reader, f"to_{library}")(ranks=[2], steps=1), library)
    # iter_rows writes digests in hexadecimal, and has the columns of enumerations that say nothing as None
    expected["payload_in"] = [None if value is None else bytes.fromhex(value) for value in expected["payload_in"]]
    assert {name: found[name] for name in expected} == expected
    assert found["label"] == ["only in 0", None, "<b>both</b>", "only in 2", None, "<b>both</b>"]
    assert found["splits_in"] == [None, [1, 0], None, None, [1, 2], None]
    assert steps["loss"] == [0.5, None, 0.5, None] and steps["start_ns"] == [None, 9, None, 9]
    assert one["kind"] == [1, 2, 5] and one["rank"] == [2, 2, 2] and few["row_index"] == [2]


@pytest.mark.parametrize("library", LIBRARIES)
def test_times_stay_whole(tmp_path: Path, library: str) -> None:
    """Beside an absent value, where numpy would make a double of them."""
    pytest.importorskip({"arrow": "pyarrow"}.get(library, library))
    large = (1 << 62) + 1
    with TraceWriter(tmp_path / "a.prism", graph_kind=GraphKind.OBSERVED, world_size=1) as writer:
        writer.add_units(0, {"kind": [1, 1], "start_ns": [large, ABSENT], "end_ns": [large, ABSENT]})
    with TraceReader(tmp_path / "a.prism") as reader:
        assert values_of(getattr(reader, f"to_{library}")(), library)["start_ns"] == [large, None]
        assert len(getattr(reader, f"to_{library}")("events")) == 0


def test_notebooks_see_escaped_text(path: Path) -> None:
    with TraceReader(path) as reader:
        views = reader._repr_html_() + reader.units(0)._repr_html_() + reader.steps(0)._repr_html_()
    assert "<script>" not in views and "<b>" not in views
    assert "UnitTable of rank 0: 3 rows" in views and "observed graph, 2 of 3 ranks" in views
    assert "&lt;b&gt;both&lt;/b&gt;" in views and "all_to_all" in views


def test_long_tables_say_what_is_left_out(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.prism", graph_kind=GraphKind.OBSERVED, world_size=30) as writer:
        for rank in range(30):
            writer.add_units(rank, {"kind": [1] * 25})
    with TraceReader(tmp_path / "a.prism") as reader:
        assert "and 20 more ranks" in reader._repr_html_()
        assert "and 15 more rows" in reader.units(0)._repr_html_()
        assert reader.units(0)._repr_html_().count("<tr>") == 12


def test_what_is_missing_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with TraceReader(path) as reader:
        with pytest.raises(TraceUsageError, match="pip install pandas"):
            reader.to_pandas()
        with pytest.raises(TraceUsageError, match="no table 'unit'"):
            reader.to_arrow("unit")
        with pytest.raises(TraceUsageError, match="rank 1"):
            reader.to_arrow(ranks=[1])
        monkeypatch.setattr(frames, "MAX_ROWS", 4)
        with pytest.raises(TraceLimitError, match="choose ranks or steps"):
            reader.to_arrow()


def test_no_data_frame_library_is_loaded_unasked() -> None:
    code = ("import sys, prismtrace, prism_sdk.analysis\n"
            "print(sorted({'pandas', 'polars', 'pyarrow'} & set(sys.modules)))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
