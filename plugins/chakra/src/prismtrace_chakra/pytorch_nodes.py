"""Reads one PyTorch execution trace (JSON) into nodes, over all versions of its schema. It derives no units.

Schema 1.0.x has `parent`, `input_shapes`, ... beside each node; from `-chakra` versions on a node has `ctrl_deps`,
`inputs: {values, shapes, types, strides}` and a list `attrs` of {name, type, value}.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from prism_sdk.interop.sources import ForeignFileError
from prismtrace import TraceFormatError
from prismtrace_chakra.graph import GraphFacts, inspect
from prismtrace_chakra.job import LocalGroup

_GROUPS_NODE: Final = "process_group:init"
_WRONG: Final = re.compile("[\udc80-\udcff]")
_TRIES: Final = 40
_MAX_US: Final = 1 << 52
_PLAIN: Final = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema")


@dataclass(slots=True)
class EtNode:
    """One node. `raw` is the JSON object that it came from; times are absent unless a linker added them."""

    id: int
    name: str
    parent: int
    ctrl_deps: tuple[int, ...]
    data_deps: tuple[int, ...]
    values: list[Any]
    types: list[Any]
    out_values: list[Any]
    out_types: list[Any]
    attributes: dict[str, Any]
    start_ns: int | None
    end_ns: int | None
    raw: dict[str, Any]

    @property
    def schema(self) -> str:
        """The signature of the operator; empty when there is none."""
        found = self.attributes.get("op_schema")
        return found if isinstance(found, str) else ""

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute that is a number."""
        found = self.attributes.get(name)
        return found if type(found) is int else default


@dataclass
class EtFile:
    """One file: what it says about itself, its nodes in file order, and what their dependencies look like."""

    schema: str
    metadata: dict[str, str]
    stated_rank: int | None
    nodes: list[EtNode]
    facts: GraphFacts
    groups: list[LocalGroup]
    has_times: bool
    notes: list[str]
    unit_of: list[int] = field(default_factory=list)


def read(data: bytes, *, path: str) -> EtFile:
    """Read a whole file; one that was cut is read up to its last whole node.

    Raises:
        TraceFormatError: this is no JSON, or no execution trace.
    """
    notes: list[str] = []
    document = _document(data, path, notes)
    listed = document.get("nodes")
    if not isinstance(listed, list) or "schema" not in document:
        raise ForeignFileError("has no schema and nodes: this is no PyTorch execution trace", path=path)
    nodes: list[EtNode] = []
    bad = 0
    for item in listed:
        node = _node(item)
        if node is None:
            bad += 1
        else:
            nodes.append(node)
    if bad:
        notes.append(f"{path}: {bad} nodes without a usable id and name were left out")
    if not nodes:
        raise TraceFormatError("has no node", path=path)
    facts = inspect([n.id for n in nodes], [n.ctrl_deps + n.data_deps for n in nodes], [0] * len(nodes))
    groups = _groups(nodes, path, notes)
    metadata = {
        key: str(value)[: 1 << 12] for key, value in document.items() if isinstance(value, str | int | float) and key
    }
    return EtFile(
        str(document["schema"]),
        {key: value for key, value in metadata.items() if re.fullmatch(r"[a-z][a-z0-9_]*", key)},
        _stated_rank(document),
        nodes,
        facts,
        groups,
        any(node.start_ns is not None for node in nodes),
        notes,
        [-1] * len(nodes),
    )


def _document(data: bytes, path: str, notes: list[str]) -> dict[str, Any]:
    import orjson

    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        found = _repaired(data, path, notes, str(error))
    if not isinstance(found, dict):
        raise ForeignFileError("is JSON, and no object: this is no PyTorch execution trace", path=path)
    return found


def _repaired(data: bytes, path: str, notes: list[str], reason: str) -> Any:
    """What can be had of bytes that are not strict JSON: NaN, control characters, wrong UTF-8, or a cut end."""
    text = _WRONG.sub(lambda found: f"\\\\x{ord(found[0]) & 0xFF:02x}", data.decode("utf-8", "surrogateescape"))
    if not text.lstrip().startswith("{"):
        raise TraceFormatError(f"is no JSON object ({reason})", path=path)
    try:
        found = json.loads(text, strict=False)
        notes.append(f"{path}: is not strict JSON ({reason}); read all the same")
        return found
    except (ValueError, RecursionError):
        pass
    end = len(text)
    for _ in range(_TRIES):
        end = text.rfind("}", 0, end)
        if end < 0:
            break
        try:
            found = json.loads(text[: end + 1] + "]}", strict=False)
        except (ValueError, RecursionError):
            continue
        notes.append(f"{path}: was cut at its end; {len(found.get('nodes', ()))} whole nodes were read")
        return found
    raise TraceFormatError(f"is no JSON ({reason})", path=path)


def _node(item: Any) -> EtNode | None:
    if not isinstance(item, dict):
        return None
    number, name = item.get("id"), item.get("name")
    if type(number) is not int or not isinstance(name, str):
        return None
    attributes = {key: item[key] for key in _PLAIN if key in item}
    listed = item.get("attrs")
    for attribute in listed if isinstance(listed, list) else ():
        if isinstance(attribute, dict) and isinstance(attribute.get("name"), str):
            attributes[attribute["name"]] = attribute.get("value")
    ctrl = _ids(item.get("ctrl_deps", item.get("parent")))
    start, end = _times(item)
    inputs, outputs = item.get("inputs"), item.get("outputs")
    return EtNode(
        number,
        name,
        ctrl[0] if ctrl else -1,
        tuple(other for other in ctrl if other != number),
        tuple(other for other in _ids(item.get("data_deps")) if other != number),
        _part(inputs, "values"),
        _part(inputs, "types") if isinstance(inputs, dict) else _list(item.get("input_types")),
        _part(outputs, "values"),
        _part(outputs, "types") if isinstance(outputs, dict) else _list(item.get("output_types")),
        attributes,
        start,
        end,
        item,
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _part(value: Any, name: str) -> list[Any]:
    return _list(value.get(name)) if isinstance(value, dict) else _list(value)


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [each for each in found if type(each) is int]


def _times(item: dict[str, Any]) -> tuple[int | None, int | None]:
    """Start and end in ns where a linker put `ts` and a duration, both in us, beside a node."""
    start = item.get("ts")
    duration = next((item[key] for key in ("inclusive_dur", "dur") if key in item), None)
    for value in (start, duration):
        if type(value) not in (int, float) or not 0 <= value <= _MAX_US:  # type: ignore[operator]
            return None, None
    begin = round(start * 1000)  # type: ignore[operator]
    return begin, begin + round(duration * 1000)  # type: ignore[operator]


def _stated_rank(document: dict[str, Any]) -> int | None:
    inner = document.get("distributedInfo")
    for holder in (document, inner if isinstance(inner, dict) else {}):
        for key in ("rank", "global_rank"):
            if type(holder.get(key)) is int and 0 <= holder[key] < 1 << 31:
                return int(holder[key])
    return None


def _groups(nodes: list[EtNode], path: str, notes: list[str]) -> list[LocalGroup]:
    """The process groups that the node `## process_group:init ##` lists."""
    found: dict[LocalGroup, None] = {}
    for node in nodes:
        if _GROUPS_NODE not in node.name or not node.values or not isinstance(node.values[0], str):
            continue
        try:
            listed = json.loads(node.values[0])
        except (ValueError, RecursionError):
            notes.append(f"{path}: the list of process groups in node {node.id} cannot be read")
            continue
        for item in listed if isinstance(listed, list) else ():
            if isinstance(item, dict) and (group := _group(item)) is not None:
                found[group] = None
    return list(found)


def _group(item: dict[str, Any]) -> LocalGroup | None:
    name = item.get("pg_name", item.get("pg_id"))
    if name is None:
        return None
    size = item.get("group_size", item.get("pg_size"))
    ranks = item.get("ranks")
    if isinstance(ranks, dict):
        ranks = [int(key) for key in ranks if str(key).isdigit()]
    members = [rank for rank in _list(ranks) if type(rank) is int and 0 <= rank < 1 << 31]
    if not members and type(size) is int and 0 < size <= 1 << 20:
        members = list(range(size))  # the whole world is written as an empty list
    if len(set(members)) != len(members):
        return None
    return LocalGroup(
        str(name),
        str(item.get("pg_desc", ""))[:1024],
        str(item.get("backend_config", ""))[:1024],
        tuple(members),
    )
