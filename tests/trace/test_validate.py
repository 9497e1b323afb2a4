"""Contradictions are found, by code and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_edits import CHUNK, put_together, take_apart

from prismtrace import (
    GraphKind,
    Op,
    ProcessGroup,
    TableKind,
    TraceReader,
    TraceWriter,
    UnitKind,
    compact,
    has_errors,
    merge,
    recover,
    slice_trace,
    validate,
)
from prismtrace.findings import CODES

C, W, K, S, R = UnitKind.COLLECTIVE, UnitKind.WAIT, UnitKind.COMPUTE, UnitKind.SEND, UnitKind.RECV
GROUP = ProcessGroup(group_id=5, ranks=(0, 1))


def codes(path: Path, *, ranks: dict[int, dict[str, Any]], groups: tuple[ProcessGroup, ...] = (GROUP,)) -> set[str]:
    with TraceWriter(path, world_size=2) as writer:
        for group in groups:
            writer.add_group(group)
        for rank, columns in ranks.items():
            writer.add_units(rank, columns)
    return {item.code for item in validate(path)}


GOOD = {"kind": [C, W], "group_id": [5, 0], "seq": [0, None], "op": [Op.ALL_REDUCE, 0], "awaits": [None, 0]}


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("PT010", {}),
        ("PT012", {"group_id": [6, 0]}),
        ("PT014", {"peer": [3, None]}),
        ("PT020", {"start_ns": [5, None], "end_ns": [4, None]}),
        ("PT021", {"transfer_ns": [-1, None]}),
        ("PT021", {"memory_bytes": [None, -5]}),
        ("PT022", {"kind": [K, K], "start_ns": [0, 5], "end_ns": [10, 20], "awaits": [None, None]}),
        ("PT023", {"awaits": [None, 1]}),
        ("PT023", {"awaits": [None, 7]}),
        ("PT023", {"kind": [K, W]}),
        ("PT023", {"awaits": [0, None]}),
        ("PT024", {"awaits": [None, None]}),
        ("PT025", {"op": [Op.SEND, 0]}),
        ("PT026", {"phase": [77, 0]}),
        ("PT030", {"kind": [C, C], "group_id": [5, 5], "seq": [3, 3], "awaits": [None, None]}),
        (
            "PT030",
            {"kind": [S, S], "group_id": [5, 5], "op": [10, 10], "seq": [3, 3], "peer": [1, 1], "awaits": [None, None]},
        ),
        ("PT031", {"op": [Op.BROADCAST, 0]}),
        ("PT032", {"seq": [1, None]}),
        ("PT033", {"kind": [S, W], "op": [Op.SEND, 0], "peer": [1, None]}),
        ("PT050", {"payload_in": [bytes(16), None]}),
    ],
)
def test_each_contradiction_has_its_code(tmp_path: Path, code: str, change: dict[str, Any]) -> None:
    rank = 2 if code == "PT010" else 0
    assert code in codes(tmp_path / "t", ranks={rank: GOOD | change, 1: GOOD})


def test_a_good_trace_has_no_finding(tmp_path: Path, sample: Path) -> None:
    assert codes(tmp_path / "t", ranks={0: GOOD, 1: GOOD}) == set()
    assert validate(sample) == []


def test_strangers_and_broken_groups(tmp_path: Path) -> None:
    group = ProcessGroup(group_id=5, ranks=(1,))
    assert "PT013" in codes(tmp_path / "a", ranks={0: GOOD}, groups=(group,))
    assert codes(tmp_path / "b", ranks={}, groups=(ProcessGroup(group_id=5, ranks=(1, 1)),)) == {"PT011"}
    assert codes(tmp_path / "c", ranks={}, groups=(ProcessGroup(group_id=5, ranks=(1, 9)),)) == {"PT010"}


def test_steps_are_checked(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_steps(0, {"step": [1, 1], "start_ns": [None, 9], "end_ns": [5, 6]})
    found = validate(tmp_path / "t")
    assert [item.code for item in found] == ["PT040", "PT040"]
    assert has_errors(found)


def test_repetitions_are_one_finding(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_units(0, {"kind": [K] * 100, "start_ns": [5] * 100, "end_ns": [1] * 100})
    found = [item for item in validate(tmp_path / "t") if item.code == "PT020"]
    assert len(found) == 1
    assert "99 more" in found[0].message
    assert found[0].where == "rank 0, unit 0"


def test_broken_files_are_findings(tmp_path: Path, sample: Path) -> None:
    raw = bytearray(sample.read_bytes())
    cut = tmp_path / "cut"
    cut.write_bytes(raw[:-10])
    assert {item.code for item in validate(cut)} == {"PT002"}
    cut.write_bytes(b"no trace")
    assert [item.code for item in validate(cut)] == ["PT001"]
    assert [item.code for item in validate(tmp_path / "missing")] == ["PT001"]


def test_every_code_is_documented_in_the_specification() -> None:
    text = (Path(__file__).parents[2] / "spec" / "registry.md").read_text(encoding="utf-8")
    for code, kind in CODES.items():
        assert f"| {code} | {kind.severity} |" in text


def test_what_no_rank_shows_of_its_role_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter(path) as writer:
        writer.add_role(9, {"kind": [K] * 300, "label": [f"unit {row}" for row in range(300)]})
        writer.add_units(0, {"kind": [K] * 300, "label": ["mine"] * 300}, role=9)
    assert validate(path) == []
    records = take_apart(path.read_bytes())
    role = next(record for record in records if record.kind == CHUNK)
    role.data[-1] ^= 1
    path.write_bytes(put_together(records, path.read_bytes()[:8], finished=False))
    recover(path, tmp_path / "saved")
    with TraceReader(tmp_path / "saved") as reader:
        assert reader.units(0).label[0] == "mine"
    assert [(item.code, item.where.split(",")[0]) for item in validate(tmp_path / "saved")] == [("PT003", "role 9")]


def test_an_unknown_kind_of_graph_is_kept_and_remarked(tmp_path: Path) -> None:
    kind = GraphKind(77)
    with TraceWriter(tmp_path / "t", graph_kind=kind) as writer:
        writer.add_units(0, {"kind": [K]})
    slice_trace(tmp_path / "t", tmp_path / "s", ranks=[0])
    merge([tmp_path / "s"], tmp_path / "m")
    with TraceReader(tmp_path / "m") as reader:
        assert (reader.graph_kind, reader.graph_kind.name) == (kind, "77")
    assert [(item.code, item.severity) for item in validate(tmp_path / "m")] == [("PT026", "warning")]
    with pytest.raises(ValueError):
        GraphKind(256)


def test_columns_that_were_not_given_count_for_the_steps_and_times_of_a_chunk(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_steps(0, {"end_ns": [0, 0], "start_ns": [-5, -1]})
        writer.add_scalars(0, {"value": [1.0]})
        for rank in (0, 1):
            writer.add_units(rank, {"kind": [K]})
        writer.add_steps(1, {"step": [0, 0], "start_ns": [-5, -1]})
    assert {item.code for item in validate(tmp_path / "t")} == {"PT040"}
    compact(tmp_path / "t", tmp_path / "small")
    with TraceReader(tmp_path / "t") as reader:
        assert reader.chunk_ranges(TableKind.STEPS, 0).tolist() == [(0, 2, 0, 0, -5, 0)]
        assert reader.chunk_ranges(TableKind.SCALARS, 0).tolist() == [(0, 1, 0, 0, 0, -1)]
    assert {item.code for item in validate(tmp_path / "small")} == {"PT040"}
