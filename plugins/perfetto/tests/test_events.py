"""Events that lie beside units become slices that nest, instants, counters and arrows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from prismtrace_perfetto.exporting import PerfettoExporter
from prismtrace_perfetto.lanes import NestedLanes
from trace_processor import ask

from prismtrace import FORMAT_VERSION, TraceWriter


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=25))
def test_slices_of_a_lane_nest(pairs: list[tuple[int, int]]) -> None:
    pairs.sort(key=lambda pair: (pair[0], -pair[1]))
    start = np.array([s for s, _ in pairs], np.int64)
    end = start + np.array([d for _, d in pairs], np.int64)
    lane = NestedLanes().assign(start, end)
    for a in range(len(pairs)):
        for b in range(a):
            if lane[a] == lane[b]:
                assert start[a] >= end[b] or end[a] <= end[b]


@pytest.mark.skipif(FORMAT_VERSION < (1, 0), reason="the trace library writes format 0.1")
def test_events_of_every_kind(tmp_path: Path) -> None:
    rows: list[tuple[Any, ...]] = [
        # name, kind, track, start, end, correlation, flow
        ("outer", 1, 0, 0, 100, None, None),
        ("inner", 1, 0, 10, 20, None, None),
        ("launch", 1, 0, 30, 40, 5, None),
        ("crossing", 1, 0, 90, 120, None, None),
        ("kernel", 1, 1, 50, 60, 5, None),
        ("mark", 2, 1, 55, None, None, None),
        ("mem", 3, None, 5, None, None, None),
        ("flow out", 4, 0, 15, None, None, 9),
        ("flow in", 6, 1, 58, None, None, 9),
        ("process_name", 7, None, None, None, None, None),
        ("begun", 8, 0, 200, None, None, None),
        (None, 9, 0, 210, None, None, None),
    ]
    names = ("name", "kind", "track", "start_ns", "end_ns", "correlation_id", "flow_id")
    with TraceWriter(tmp_path / "e.prism") as writer:
        writer.add_tracks(3, {"name": ["python", None], "kind": [1, 2], "stream": [None, 7]})
        columns: dict[str, Any] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        columns["p.bytes"] = [None] * 6 + [64] + [None] * 5
        columns["p.why"] = ["because", *[None] * 11]
        writer.add_events(3, columns)
    report = PerfettoExporter().export_trace(
        tmp_path / "e.prism", output=tmp_path / "e.pftrace", options={}, report=print
    )
    damage, slices, flows, counters, args = ask(
        tmp_path / "e.pftrace",
        "select name, value from stats where value > 0 and severity in ('error', 'data_loss')",
        "select s.name, t.name, s.ts, s.dur, s.depth from slice s join track t on t.id = s.track_id "
        "order by s.ts, s.dur desc",
        "select o.name, i.name from flow f join slice o on o.id = f.slice_out join slice i on i.id = f.slice_in "
        "order by 1",
        "select t.name, c.ts, c.value from counter c join counter_track t on t.id = c.track_id",
        "select key, string_value from args where key like '%why'",
    )
    assert damage == []
    assert slices == [
        ("outer", "python", 0, 100, 0),
        ("inner", "python", 10, 10, 1),
        ("flow out", "python", 15, 0, 2),
        ("launch", "python", 30, 10, 1),
        ("kernel", "stream 7", 50, 10, 0),
        ("mark", "stream 7", 55, 0, 1),
        ("flow in", "stream 7", 58, 0, 1),
        ("crossing", "python (lane 2)", 90, 30, 0),
        ("begun", "python (begin and end)", 200, 10, 0),
    ]
    assert flows == [("flow out", "flow in"), ("launch", "kernel")]
    assert counters == [("mem p.bytes", 5, 64.0)] and args == [("debug.p_why", "because")]
    assert report.counts["events"] == 10 and any("1 metadata events" in note for note in report.notes)
