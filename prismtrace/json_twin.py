"""Shows a whole trace as a JSON document, for people, tests and tools that have no reader.

Does not define a second format: the twin is written, never read back.
"""

from __future__ import annotations

import base64
import json
import math
import os
from typing import Any, Final

import numpy as np

from prismtrace.errors import writing
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, ColumnSpec, ColumnType, TableKind
from prismtrace.reader import TraceReader
from prismtrace.source import TraceInput
from prismtrace.tables import DictionaryColumn, ListColumn, Table

MAX_PAYLOAD_TEXT_BYTES: Final = 4096


def to_json(source: TraceReader | TraceInput, *, payload_text_bytes: int = MAX_PAYLOAD_TEXT_BYTES) -> dict[str, Any]:
    """The trace as JSON-compatible values.

    64-bit integers are strings (a JSON number cannot carry them), absent values are null, columns that no row has, or
    that are 0 in every row and cannot be absent, are left out, floats that JSON lacks are "nan", "inf" and "-inf".

    Args:
        source: an open trace, or what TraceReader takes.
        payload_text_bytes: payloads up to this size are included as base64.
    """
    if isinstance(source, TraceReader):
        return _document(source, payload_text_bytes)
    with TraceReader(source) as reader:
        return _document(reader, payload_text_bytes)


def _document(reader: TraceReader, payload_text_bytes: int) -> dict[str, Any]:
    return {
        "format": ".".join(map(str, reader.format_version)),
        "graph_kind": reader.graph_kind.name,
        "world_size": reader.world_size,
        "metadata": dict(reader.metadata),
        "groups": [
            {
                "group_id": str(group.group_id),
                "name": group.name,
                "description": group.description,
                "backend": group.backend,
                "ranks": list(group.ranks),
            }
            for _, group in sorted(reader.groups.items())
        ],
        "ranks": {str(rank): _rank(reader, rank) for rank in reader.ranks},
        "payloads": {
            digest.hex(): _payload(reader, digest, payload_text_bytes) for digest in sorted(reader.payload_digests)
        },
    }


def write_json(source: TraceReader | TraceInput, out: str | os.PathLike[str], *, indent: int | None = None) -> None:
    """Writes the JSON twin of a trace to a new or existing file."""
    target = os.fspath(out)
    text = json.dumps(to_json(source), indent=indent, ensure_ascii=False, allow_nan=False)
    with writing(target), open(target, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def _rank(reader: TraceReader, rank: int) -> dict[str, Any]:
    tables: dict[TableKind, Table] = {
        TableKind.UNITS: reader.units(rank),
        TableKind.STEPS: reader.steps(rank),
        TableKind.SCALARS: reader.scalars(rank),
        TableKind.EVENTS: reader.events(rank),
        TableKind.TRACKS: reader.tracks(rank),
    }
    return {kind.name.lower(): _table(kind, table) for kind, table in tables.items() if len(table)}


def _table(kind: TableKind, table: Table) -> dict[str, Any]:
    present = table.columns()
    specs = [*COLUMNS[kind], *(table.named_specs[name] for name in sorted(table.named_specs))]
    columns = {spec.name: _column(spec, present[spec.name]) for spec in specs if spec.name in present}
    defaults = {spec.name: _default(spec) for spec in specs}
    columns = {name: values for name, values in columns.items() if any(v != defaults[name] for v in values)}
    result: dict[str, Any] = {"num_rows": len(table), "first_index": str(table.first_index), "columns": columns}
    types = {name: spec.type.name for name, spec in sorted(table.named_specs.items()) if name in columns}
    return result | {"types": types} if types else result


def _default(spec: ColumnSpec) -> Any:
    """What a row says where nothing was written; a column that says only this is left out."""
    return None if spec.optional else _column(spec, np.array([spec.default], spec.type.dtype))[0]


def _column(spec: ColumnSpec, column: Any) -> list[Any]:
    if isinstance(column, ListColumn):
        return [None if row is None else [str(value) for value in row.tolist()] for row in column]
    if isinstance(column, DictionaryColumn):
        return [value.hex() if isinstance(value, bytes) else value for value in column]
    values = np.asarray(column).tolist()
    if spec.type is ColumnType.FLOAT64:
        return [_float(value, optional=spec.optional) for value in values]
    absent = {ColumnType.INT32: ABSENT32, ColumnType.INT64: ABSENT}.get(spec.type) if spec.optional else None
    wide = spec.type in (ColumnType.INT64, ColumnType.UINT64)
    return [None if value == absent else str(value) if wide else value for value in values]


def _float(value: float, *, optional: bool) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if optional and math.isnan(value) else str(value)


def _payload(reader: TraceReader, digest: bytes, limit: int) -> dict[str, Any]:
    size = reader.payload_bytes(digest)
    text = base64.b64encode(reader.payload(digest)).decode("ascii") if size <= limit else None
    return {"num_bytes": str(size), "base64": text}
