"""Events, tracks, named columns and attachments go through the tools, and validate looks at them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prismtrace
from prismtrace import (
    EventKind,
    TableKind,
    TraceReader,
    TraceWriter,
    diff,
    file_sizes,
    iter_rows,
    merge,
    redact,
    slice_trace,
    validate,
)


def write(path: Path, *, name: str = "gemm", unit: int = 1, track: int = 1, end: int = 250) -> Path:
    with TraceWriter(path, world_size=1) as writer:
        writer.add_units(
            0,
            {
                "kind": [1, 1, 1],
                "step": [0, 1, 2],
                "start_ns": [0, 100, 300],
                "end_ns": [90, 290, 400],
                "my_plugin.tokens": np.array([7, 8, 9]),
                "my_plugin.note": ["ran on dgx-0042", None, "x"],
            },
        )
        writer.add_tracks(0, {"name": ["host", "stream 7 of dgx-0042"], "kind": [1, 2]})
        writer.add_events(
            0,
            {
                "name": ["launch", name, "sync", "mark"],
                "kind": [EventKind.SPAN, EventKind.SPAN, EventKind.SPAN, EventKind.INSTANT],
                "track": [0, track, 0, 1],
                "start_ns": [10, 200, 310, 120],
                "end_ns": [20, end, 390, None],
                "unit": [0, unit, 2, None],
                "kineto.args": [None, "/home/jdoe/x.py", None, None],
            },
        )
        writer.add_attachment("config.yaml", b"host: dgx-0042")
    return path


def test_slice_renumbers_the_units_of_events(tmp_path: Path) -> None:
    write(tmp_path / "a")
    slice_trace(tmp_path / "a", tmp_path / "part", steps=range(1, 2))
    assert validate(tmp_path / "part") == []
    with TraceReader(tmp_path / "part") as reader:
        events, units = reader.events(0), reader.units(0)
        assert list(events.name) == ["gemm", "mark"], "mark lies in the time of the kept units"
        assert events.unit.tolist() == [0, prismtrace.ABSENT] and len(reader.tracks(0)) == 2
        assert events["kineto.args"][0] == "/home/jdoe/x.py" and units["my_plugin.tokens"].tolist() == [8]
        assert reader.attachment("config.yaml") == b"host: dgx-0042"
    slice_trace(tmp_path / "a", tmp_path / "window", time_ns=(205, 320))
    with TraceReader(tmp_path / "window") as reader:
        assert list(reader.events(0).name) == ["gemm", "sync"] and reader.events(0).unit.tolist() == [0, 1]


def test_redact_reaches_events_tracks_and_named_columns(tmp_path: Path) -> None:
    write(tmp_path / "a")
    report = redact(tmp_path / "a", tmp_path / "out", key="k")
    twin = str(prismtrace.to_json(tmp_path / "out"))
    assert not any(secret in twin for secret in ("dgx", "jdoe", "/home")) and "gemm" in twin
    assert report.num_attachments_dropped == 1 and report.num_payloads_dropped == 1
    with TraceReader(tmp_path / "out") as reader:
        assert reader.attachments == {} and reader.units(0)["my_plugin.tokens"].tolist() == [7, 8, 9]
        assert reader.tracks(0).name[1].startswith("stream 7 of host-")
    with pytest.raises(prismtrace.TraceResultError, match="payload"):
        redact(tmp_path / "a", tmp_path / "kept", key="k", keep_payloads=True)


def test_diff_sees_events_and_named_columns(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    assert diff(a, write(tmp_path / "b", name="conv")).counts == {"events": 1}
    assert diff(a, write(tmp_path / "c", end=260)).counts == {"times": 1}
    with TraceReader(a) as reader, TraceWriter(tmp_path / "d", world_size=1) as writer:
        writer.update_metadata(reader.metadata)
        writer.add_payload(reader.attachment("config.yaml"))
        columns = dict(reader.units(0).columns())
        del columns["my_plugin.note"]
        writer.add_units(0, {**columns, "my_plugin.tokens": np.array([7, 5, 9])})
        writer.add_tracks(0, reader.tracks(0))
        writer.add_events(0, reader.events(0))
    found = diff(a, tmp_path / "d")
    assert found.counts == {"columns": 2}
    assert found.values[1].where == "rank 0, units: my_plugin.tokens, row 1 (and 0 more)"
    assert (found.values[1].before, found.values[1].after) == ("8", "5")


def test_rows_and_sizes(tmp_path: Path) -> None:
    with TraceReader(write(tmp_path / "a")) as reader:
        (batch,) = iter_rows(reader, table=TableKind.EVENTS, columns=["kind", "kineto.args", "unit"])
        assert batch.columns["kind"][3] == "instant" and batch.columns["unit"] == [0, 1, 2, None]
        assert batch.columns["kineto.args"] == [None, "/home/jdoe/x.py", None, None]
        sizes = file_sizes(reader)
    named = {(column.table, column.column) for column in sizes.columns}
    assert {("units", "my_plugin.tokens"), ("events", "kineto.args"), ("tracks", "name")} <= named
    assert sizes.num_rows == {"units": 3, "tracks": 2, "events": 4}


def test_validate_looks_at_events(tmp_path: Path) -> None:
    assert validate(write(tmp_path / "a")) == []
    for name, changes, code in (
        ("unit", {"unit": 3}, "PT043"),
        ("track", {"track": 2}, "PT042"),
        ("end", {"end": 150}, "PT041"),
    ):
        found = validate(write(tmp_path / name, **changes))  # type: ignore[arg-type]
        assert [(item.code, item.where) for item in found] == [(code, "rank 0, event 1")]
    with TraceWriter(tmp_path / "lost", metadata={"attachment.x": "0" * 32}) as writer:
        writer.add_units(0, {"kind": [1]})
    assert [item.code for item in validate(tmp_path / "lost")] == ["PT051"]


def test_clocks_of_events_are_corrected_too(tmp_path: Path) -> None:
    shards = []
    for rank, late in ((0, 0), (1, 5_000)):
        shards.append(tmp_path / str(rank))
        with TraceWriter(shards[-1], world_size=2) as writer:
            writer.add_group(prismtrace.ProcessGroup(group_id=1, ranks=(0, 1)))
            times = np.arange(9) * 1000 + late
            units = {"kind": [2] * 9, "op": [1] * 9, "group_id": np.ones(9, np.uint64), "seq": np.arange(9)}
            writer.add_units(rank, {**units, "start_ns": times - 500, "end_ns": times})
            writer.add_events(rank, {"name": ["e"], "kind": [1], "start_ns": [100 + late], "end_ns": [None]})
    merge(shards, tmp_path / "all", align="file")
    with TraceReader(tmp_path / "all") as reader:
        assert [reader.events(rank).start_ns.tolist() for rank in (0, 1)] == [[100], [100]]
