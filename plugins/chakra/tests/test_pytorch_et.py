"""The importer `pytorch_et` on published and own execution traces, old and new, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prismtrace_chakra.importers import PyTorchExecutionTraceImporter

import prismtrace
from prism_sdk.abc import ConversionReport
from prism_sdk.errors import UsageError
from prismtrace import ABSENT, DType, Op, Phase, TraceFormatError, TraceReader, UnitKind

DATA = Path(__file__).parent / "data"


def load(sources: list[Path], output: Path, **options: str) -> ConversionReport:
    return PyTorchExecutionTraceImporter().import_trace(
        sources, output=output, options=options, report=lambda line: None
    )


def node(
    number: int,
    name: str,
    parent: int = 1,
    values: list[Any] | None = None,
    types: list[str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {
        "id": number,
        "name": name,
        "ctrl_deps": parent,
        "inputs": {"values": values or [], "shapes": [], "types": types or []},
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [{"name": "tid", "type": "uint64", "value": 1}],
        **more,
    }


def write(path: Path, nodes: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes, **more}))
    return path


TENSOR = [5, 6, 0, 100, 4, "cuda:0"]
GROUPS = [
    {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": [], "group_size": 4},
    {"pg_name": "7", "pg_desc": "pp", "backend_config": "cuda:nccl", "ranks": [1, 3], "group_size": 2},
]


def nccl(path: Path) -> Path:
    """As NCCL notes its operations from schema 1.1 on: (tensors, (seq, is p2p), (name, desc), rank, verb, ...)."""

    def noted(
        number: int, parent: int, verb: str, seq: int, group: str, rank: int, *, p2p: bool = False, splits: Any = ()
    ) -> dict[str, Any]:
        values = [[TENSOR], [seq, p2p], [group, "x"], rank, verb, list(splits), list(splits), 0, 1, 4, True]
        return node(number, "record_param_comms", parent, values, ["GenericList[Tensor(c10::BFloat16)]"])

    return write(
        path,
        [
            node(1, "[pytorch|profiler|execution_trace|process]", 1),
            node(2, "## process_group:init ##", 1, [json.dumps(GROUPS)], ["String"]),
            node(3, "aten::mm", 1),
            noted(4, 1, "allreduce", 9, "0", 1),
            node(5, "nccl:all_reduce", 4, [TENSOR], ["Tensor(c10::BFloat16)"]),
            node(6, "aten::add", 1),
            node(7, "record_param_comms", 1, [[9, False], ["0", "x"], 1, "wait", [], [], 0, 1, 4, False]),
            node(8, "autograd::engine::evaluate_function: MmBackward0", 1),
            node(9, "aten::mm", 8),
            noted(10, 1, "send", 0, "7", 1, p2p=True),
            noted(11, 1, "all_to_allv", 10, "0", 1, splits=[25, 25, 25, 25]),
            noted(12, 1, "broadcast", 11, "0", 2),
            node(13, "Optimizer.step#SGD.step", 1),
            node(14, "aten::add_", 13),
        ],
        rank=1,
    )


def test_what_nccl_notes(tmp_path: Path) -> None:
    report = load([nccl(tmp_path / "et.json")], tmp_path / "out.prism")
    with TraceReader(report.output) as reader:
        units = reader.units(1)
        names = {group.name: group for group in reader.groups.values()}
        assert names["0"].ranks == (0, 1, 2, 3)
        assert names["7"].ranks == (1, 3)
        assert reader.world_size == 4
        assert [UnitKind(kind).name for kind in units.kind.tolist()] == [
            "COMPUTE", "COLLECTIVE", "COMPUTE", "WAIT", "COMPUTE", "SEND", "COLLECTIVE", "COLLECTIVE", "COMPUTE",
        ]  # fmt: skip
        assert [Phase(value) for value in units.phase.tolist()][4] is Phase.BACKWARD
        assert [Phase(value) for value in units.phase.tolist()][8] is Phase.OPTIMIZER
        assert units.awaits[3] == 1
        assert units.seq.tolist() == [ABSENT, 9, ABSENT, ABSENT, ABSENT, 0, 10, 11, ABSENT]
        assert (units.peer[5], units.peer[7]) == (3, 2)
        assert units.group_id[5] == names["7"].group_id
        assert DType(units.dtype[1]) is DType.BFLOAT16
        assert units.num_elements_in[1] == 100
        splits = units.splits_in_at(6)
        assert splits is not None and splits.tolist() == [25, 25, 25, 25]
    assert [f for f in prismtrace.validate(report.output) if f.severity == "error"] == []


def test_published_traces_of_schema_1_0(tmp_path: Path) -> None:
    report = load([DATA / "dlrm_eg_0.json", DATA / "dlrm_eg_1.json"], tmp_path / "out.prism")
    assert report.counts["collective"] == 16
    with TraceReader(report.output) as reader:
        for rank in (0, 1):
            units = reader.units(rank)
            collectives = units.kind == UnitKind.COLLECTIVE
            assert [Op(value).name for value in units.op[collectives].tolist()] == [
                "ALL_TO_ALL", "ALL_TO_ALL", "ALL_TO_ALL", "ALL_TO_ALL",
                "ALL_REDUCE", "ALL_TO_ALL", "ALL_REDUCE", "ALL_REDUCE",
            ]  # fmt: skip
            assert units.seq[collectives].tolist() == list(range(147, 155))
            assert sum(units.kind == UnitKind.WAIT) == 3
        (group,) = reader.groups.values()
        assert group.ranks == (0, 1)
    assert any("does not say who its members are" in note for note in report.notes)
    assert any("waits are for operations from before the trace" in note for note in report.notes)
    assert prismtrace.validate(report.output) == []


def test_traces_that_this_pytorch_writes_with_gloo(tmp_path: Path) -> None:
    report = load([DATA / f"gloo_et_{rank}.json" for rank in range(4)], tmp_path / "out.prism")
    with TraceReader(report.output) as reader:
        assert {group.ranks for group in reader.groups.values()} <= {(0, 1, 2, 3), (0, 1), (2, 3)}
        for rank in range(4):
            units = reader.units(rank)
            comm = [Op(value).name for value in units.op[units.op != 0].tolist()]
            message = "SEND" if rank % 2 == 0 else "RECV"
            expected = ["ALL_REDUCE", "ALL_GATHER", "ALL_REDUCE", message, "ALL_TO_ALL", "REDUCE_SCATTER", "BARRIER"]
            assert comm == expected
            waits = units.awaits[units.kind == UnitKind.WAIT]
            assert len(waits) >= 4
            synchronous = [row for row in waits.tolist() if not units.is_async[row]]
            assert all(units.kind[row + 1] == UnitKind.WAIT for row in synchronous)
            gathers = units.op == Op.ALL_GATHER
            assert reader.groups[int(units.group_id[gathers][0])].size == 2
            assert 5 in units.tag.tolist()
    assert [f for f in prismtrace.validate(report.output) if f.severity == "error"] == []


def test_linked_traces_have_times(tmp_path: Path) -> None:
    nodes = [
        node(1, "root"),
        node(2, "aten::mm", 1, ts=1000.001, inclusive_dur=2.5),
        node(3, "c10d::allreduce_", 1, ts=1003.0, dur=4),
    ]
    report = load([write(tmp_path / "rank_0.json", nodes)], tmp_path / "out.prism")
    with TraceReader(report.output) as reader:
        units = reader.units(0)
        assert reader.graph_kind is prismtrace.GraphKind.OBSERVED
        assert units.start_ns.tolist() == [1_000_001, 1_003_000]
        assert units.end_ns.tolist() == [1_002_501, 1_007_000]


def test_cut_and_lax_json(tmp_path: Path) -> None:
    whole = (DATA / "dlrm_eg_0.json").read_bytes()
    cut = tmp_path / "cut_0.json"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    report = load([cut], tmp_path / "out.prism")
    assert any("was cut at its end" in note for note in report.notes)
    assert report.counts["nodes"] > 50
    lax = tmp_path / "lax_0.json"
    lax.write_bytes(b'{"schema": "1.0.1", "x": NaN, "nodes": [{"name": "caf\xe9\n", "id": 1, "parent": 1}]}')
    report = load([lax], tmp_path / "out.prism")
    assert any("is not strict JSON" in note for note in report.notes)
    assert report.counts["nodes"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is no JSON"),
        (b"[1, 2]", "no object"),
        (b'{"traceEvents": []}', "no schema and nodes"),
        (b'{"schema": 1, "nodes": []}', "has no node"),
        (b'{"schema": 1, "nodes": [{"id": "a"}, 3, null]}', "has no node"),
        (b'{"schema": 1, "nodes": ' + b"[" * 100_000, "is no JSON"),
    ],
)
def test_what_is_no_execution_trace(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "x_0.json"
    path.write_bytes(text)
    with pytest.raises(TraceFormatError, match=message):
        load([path], tmp_path / "out.prism")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x_0.json"]


def test_other_json_in_a_folder_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    write(folder / "et_3.json", [node(1, "root")])
    (folder / "kineto_3.json").write_text('{"traceEvents": []}')
    report = load([folder], tmp_path / "out.prism")
    assert report.counts["foreign_files"] == 1
    assert PyTorchExecutionTraceImporter().recognises(folder, b"")
    with pytest.raises(UsageError, match="does not say of which rank"):
        load([write(tmp_path / "nameless.json", [node(1, "root")])], tmp_path / "out.prism")


def test_cycles_and_deep_chains_of_parents(tmp_path: Path) -> None:
    nodes = [node(k, "aten::mm", k - 1) for k in range(2, 5000)]
    nodes += [node(6000, "a", 6001), node(6001, "b", 6000), node(6002, "c", 9999)]
    report = load([write(tmp_path / "deep_0.json", nodes)], tmp_path / "out.prism")
    assert report.counts["cycles"] == 1
    assert report.counts["dangling_dependencies"] == 2
    assert report.counts["longest_chain"] == 4998


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**63) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["record_param_comms", "c10d::allreduce_", "nccl:send", "gloo:barrier", "aten::mm", "## process_group:init ##"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 5), NAMES, JSON, JSON, JSON), min_size=1, max_size=6))
def test_whatever_nodes_hold_nothing_crashes(tmp_path: Path, items: list[tuple[int, str, Any, Any, Any]]) -> None:
    nodes = [
        {"id": number, "name": name, "ctrl_deps": deps, "inputs": inputs, "attrs": attrs, "ts": deps, "dur": attrs}
        for number, name, deps, inputs, attrs in items
    ]
    report = load([write(tmp_path / "h_0.json", nodes)], tmp_path / "h.prism")
    assert [f for f in prismtrace.validate(report.output) if f.severity == "error"] == []


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(
    st.lists(JSON, min_size=2, max_size=10), st.sampled_from(["allreduce", "send", "broadcast", "wait", "all_to_allv"])
)
def test_whatever_a_process_group_notes_nothing_crashes(tmp_path: Path, values: list[Any], verb: str) -> None:
    values = [*values[:3], 1, verb, *values[3:]]
    nodes = [node(1, "## process_group:init ##", 1, [json.dumps(GROUPS)]), node(2, "record_param_comms", 1, values)]
    report = load([write(tmp_path / "h_1.json", nodes)], tmp_path / "h.prism")
    assert [f for f in prismtrace.validate(report.output) if f.severity == "error"] == []
