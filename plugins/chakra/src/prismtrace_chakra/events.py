"""Turns every node of a rank into an event, with all that the node holds in named columns. It derives no units.

Names of the columns: `chakra.FIELD`, `chakra.attr.NAME.KIND`, `pytorch_et.FIELD`, `pytorch_et.attr.NAME`. Dependencies
are lists of ids, yes and no are 1 and 0, other lists and nested values are JSON. A column whose values are of another
type than those of an earlier rank is called `NAME.text` there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from prismtrace import ABSENT, ListColumn
from prismtrace_chakra.chakra_nodes import ChakraFile
from prismtrace_chakra.job import Job
from prismtrace_chakra.pytorch_nodes import EtFile
from prismtrace_chakra.wire import NODE_TYPES

_SPAN: Final = 1
_HOST, _DEVICE = 1, 2
_MAX_TEXT_BYTES: Final = 1 << 16
_CHARACTERS: Final = re.compile(r"[^A-Za-z0-9_.]")


class _Columns:
    """Columns that grow row by row; a column that begins late is absent in the rows before."""

    def __init__(self, job: Job, rank: int) -> None:
        self.values: dict[str, list[Any]] = {}
        self._job, self._rank, self._row, self._pieces = job, rank, 0, 0

    def put(self, name: str, value: Any) -> None:
        """Set one value of the present row."""
        if isinstance(value, str) and len(value) * 4 > _MAX_TEXT_BYTES:
            value = self._short(name, value)
        column = self.values.setdefault(name, [])
        column.extend([None] * (self._row - len(column)))
        column.append(value)

    def _short(self, name: str, value: str) -> str:
        raw = value.encode()
        if len(raw) <= _MAX_TEXT_BYTES:
            return value
        attachment = f"{name}.rank{self._rank}.row{self._row}"
        self._job.attach(attachment, raw)
        return f"attachment:{attachment}"

    def next(self) -> None:
        """Begin the next row."""
        self._row += 1

    def finish(self) -> dict[str, Any]:
        """All columns, filled up; numbers are put into the type that a trace has for them."""
        done: dict[str, Any] = {}
        for name, column in self.values.items():
            column.extend([None] * (self._row - len(column)))
            kinds = {_kind(value) for value in column if value is not None}
            if not kinds:
                continue
            kind = kinds.pop() if len(kinds) == 1 else "text"
            if "." in name and self._job.kinds.setdefault(name, kind) != kind:
                name, kind = f"{name}.text", "text"
            if kind == "ids":
                done[name] = _list_column(column)
            elif kind == "int":
                done[name] = [ABSENT if value is None else _int64(int(value)) for value in column]
            elif kind == "float":
                done[name] = [float("nan") if value is None else value for value in column]
            else:
                done[name] = [None if value is None else str(value) for value in column]
        return done


def _int64(value: int) -> int:
    wrapped = (value + (1 << 63)) % (1 << 64) - (1 << 63)
    return ABSENT + 1 if wrapped == ABSENT else wrapped


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return "ids"
    return "int" if isinstance(value, int) else "float" if isinstance(value, float) else "text"


def _list_column(rows: list[Any]) -> ListColumn:
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = np.array([_int64(value) for row in rows if row is not None for value in row], np.int64)
    return ListColumn(offsets, values, np.array([row is not None for row in rows], np.bool_))


def _ids(values: Iterable[int]) -> tuple[int, ...] | None:
    return tuple(values) or None


def _tracks(keys: list[tuple[bool, int]]) -> tuple[dict[tuple[bool, int], int], dict[str, list[Any]]]:
    rows = {key: row for row, key in enumerate(sorted(set(keys), key=lambda key: (not key[0], key[1])))}
    return rows, {
        "name": [f"thread {number}" if host else f"stream {number}" for host, number in rows],
        "kind": [_HOST if host else _DEVICE for host, _ in rows],
        "thread_id": [_int64(number) if host else None for host, number in rows],
        "stream": [None if host else _int64(number) for host, number in rows],
    }


def add_chakra(job: Job, rank: int, file: ChakraFile, *, path: str) -> None:
    """Write the events of one .et file."""
    keys = [(node.on_host, node.integer("tid") or 0) for node in file.nodes]
    rows, tracks = _tracks(keys)
    table = _Columns(job, rank)
    for node, key, unit in zip(file.nodes, keys, file.unit_of, strict=True):
        known = file.has_starts and node.start_us >= 0
        table.put("kind", _SPAN)
        table.put("name", node.name)
        table.put("category", NODE_TYPES[node.type] if 0 <= node.type < len(NODE_TYPES) else str(node.type))
        table.put("track", rows[key])
        table.put("start_ns", _int64(node.start_us * 1000) if known else None)
        table.put("end_ns", _int64((node.start_us + node.duration_us) * 1000) if known else None)
        table.put("unit", unit if unit >= 0 else None)
        table.put("chakra.id", node.id)
        table.put("chakra.type", node.type)
        table.put("chakra.duration_us", node.duration_us)
        table.put("chakra.ctrl_deps", _ids(node.ctrl_deps))
        table.put("chakra.data_deps", _ids(node.data_deps))
        for side, parts in (("inputs", node.inputs), ("outputs", node.outputs)):
            for field, text in zip(("values", "shapes", "types"), parts, strict=True):
                if text:
                    table.put(f"chakra.{side}.{field}", text)
        for name, (kind, value) in node.attributes.items():
            table.put(f"chakra.attr.{_CHARACTERS.sub('_', name)}.{kind}", _attribute(value))
        table.next()
    if any(abs(node.id) >= 1 << 63 for node in file.nodes):
        job.note(f"{path}: ids of 2^63 and more are stored less 2^64")
    job.add_events(rank, table.finish(), tracks)


def _attribute(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return _json(value) if isinstance(value, tuple) else value


def _json(value: Any) -> str:
    import orjson

    def plain(item: Any) -> Any:
        return item.hex() if isinstance(item, bytes) else list(item)

    try:
        return orjson.dumps(value, default=plain).decode()
    except (orjson.JSONEncodeError, TypeError):
        return repr(value)


def add_pytorch(job: Job, rank: int, file: EtFile, *, path: str) -> None:
    """Write the events of one PyTorch execution trace."""
    keys = [(True, node.integer("tid")) for node in file.nodes]
    rows, tracks = _tracks(keys)
    table = _Columns(job, rank)
    for node, key, unit in zip(file.nodes, keys, file.unit_of, strict=True):
        table.put("kind", _SPAN)
        table.put("name", node.name)
        table.put("track", rows[key])
        table.put("start_ns", node.start_ns)
        table.put("end_ns", node.end_ns)
        table.put("unit", unit if unit >= 0 else None)
        table.put("pytorch_et.id", node.id)
        table.put("pytorch_et.ctrl_deps", _ids(node.ctrl_deps))
        table.put("pytorch_et.data_deps", _ids(node.data_deps))
        for name, value in node.raw.items():
            if name in ("id", "name", "attrs", "ctrl_deps", "data_deps"):
                continue
            if isinstance(value, dict):
                for field, inner in value.items():
                    table.put(f"pytorch_et.{_CHARACTERS.sub('_', f'{name}.{field}')}", _value(inner))
            elif name not in node.attributes:
                table.put(f"pytorch_et.{_CHARACTERS.sub('_', name)}", _value(value))
        for name, value in node.attributes.items():
            table.put(f"pytorch_et.attr.{_CHARACTERS.sub('_', name)}", _value(value))
        table.next()
    job.add_events(rank, table.finish(), tracks)


def _value(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value if value != "" else None
    return _json(value)
