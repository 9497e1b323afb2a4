"""With lossless=true every node is an event, and everything that it holds comes back from its columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prismtrace_chakra import chakra_nodes
from prismtrace_chakra.importers import ChakraImporter, PyTorchExecutionTraceImporter

import prismtrace

DATA = Path(__file__).parent / "data"
EXCERPT = DATA / "excerpt.0.et"
OPTIONS = {"lossless": "true"}


def test_every_chakra_node_comes_back(tmp_path: Path) -> None:
    report = ChakraImporter().import_trace([EXCERPT], output=tmp_path / "o.prism", options=OPTIONS, report=print)
    nodes = chakra_nodes.read(EXCERPT.read_bytes(), path="x", strict=True).nodes
    reader: Any = prismtrace.TraceReader(report.output)
    events, tracks = reader.events(0), reader.tracks(0)
    assert len(events) == len(nodes)
    assert (events.unit >= 0).all()
    for row, node in enumerate(nodes):
        assert (events["name"][row], events["chakra.id"][row], events["chakra.type"][row]) == (
            node.name,
            node.id,
            node.type,
        )
        for field, ids in (("ctrl_deps", node.ctrl_deps), ("data_deps", node.data_deps)):
            kept = events[f"chakra.{field}"][row]
            assert ids == (() if kept is None else tuple(kept.tolist()))
        assert events["chakra.duration_us"][row] == node.duration_us
        for side, parts in (("inputs", node.inputs), ("outputs", node.outputs)):
            for field, text in zip(("values", "shapes", "types"), parts, strict=True):
                assert (events[f"chakra.{side}.{field}"][row] or "") == text
        for name, (kind, value) in node.attributes.items():
            kept = events[f"chakra.attr.{name}.{kind}"][row]
            assert (json.loads(kept) if kind.endswith("_list") else kept) == (
                list(value) if kind.endswith("_list") else value
            )
        assert (tracks.kind[events.track[row]] == 1) == node.on_host
    assert prismtrace.validate(report.output) == []


def test_every_pytorch_node_comes_back(tmp_path: Path) -> None:
    sources = [DATA / f"gloo_et_{rank}.json" for rank in range(2)]
    report = PyTorchExecutionTraceImporter().import_trace(
        sources, output=tmp_path / "o.prism", options=OPTIONS, report=print
    )
    reader: Any = prismtrace.TraceReader(report.output)
    for rank, source in enumerate(sources):
        nodes = json.loads(source.read_bytes())["nodes"]
        events = reader.events(rank)
        assert len(events) == len(nodes)
        for row, node in enumerate(nodes):
            assert (events["name"][row], events["pytorch_et.id"][row]) == (node["name"], node["id"])
            kept = events["pytorch_et.ctrl_deps"][row]
            assert ([] if kept is None else kept.tolist()) == (
                [] if node["ctrl_deps"] == node["id"] else [node["ctrl_deps"]]
            )
            for side in ("inputs", "outputs"):
                for field, value in node[side].items():
                    assert json.loads(events[f"pytorch_et.{side}.{field}"][row]) == value
            for attribute in node["attrs"]:
                if attribute["value"] != "":
                    assert events[f"pytorch_et.attr.{attribute['name']}"][row] == attribute["value"]


def test_text_that_is_too_long_for_a_column_is_attached(tmp_path: Path) -> None:
    long = "x" * 70_000
    node = {"id": 1, "name": "aten::mm", "ctrl_deps": 1, "inputs": {"values": [long]}, "attrs": []}
    path = tmp_path / "et_0.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": [node]}))
    report = PyTorchExecutionTraceImporter().import_trace(
        [path], output=tmp_path / "o.prism", options=OPTIONS, report=print
    )
    reader: Any = prismtrace.TraceReader(report.output)
    kept = reader.events(0)["pytorch_et.inputs.values"][0]
    assert json.loads(reader.attachment(kept.removeprefix("attachment:"))) == [long]


def test_attributes_of_another_type_on_a_later_rank(tmp_path: Path) -> None:
    for rank, value in enumerate((3, "three")):
        node = {"id": 1, "name": "a", "ctrl_deps": 1, "attrs": [{"name": "x", "type": "t", "value": value}]}
        (tmp_path / f"et_{rank}.json").write_text(json.dumps({"schema": "1.1.1", "nodes": [node]}))
    report = PyTorchExecutionTraceImporter().import_trace(
        [tmp_path], output=tmp_path / "o.prism", options=OPTIONS, report=print
    )
    reader: Any = prismtrace.TraceReader(report.output)
    assert reader.events(0)["pytorch_et.attr.x"][0] == 3
    assert reader.events(1)["pytorch_et.attr.x.text"][0] == "three"
