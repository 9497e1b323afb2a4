"""Says which Arrow field stands for which column of a trace, and what a file says about itself. Moves no rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import pyarrow as pa

from prism_sdk.errors import UsageError
from prismtrace import GraphKind, ProcessGroup, TableKind
from prismtrace.model import COLUMNS, ColumnSpec, ColumnType
from prismtrace.tables import Table

FILE_KEY: Final = b"prismtrace"
"""Key of the schema metadata that holds what a file says about itself, as JSON."""

DERIVED_KEY: Final = b"prismtrace.derived"
"""Key of the field metadata of columns that repeat another one for people; imports leave them out."""

_TYPES: Final[Mapping[ColumnType, pa.DataType]] = {
    ColumnType.UINT8: pa.uint8(),
    ColumnType.INT32: pa.int32(),
    ColumnType.INT64: pa.int64(),
    ColumnType.UINT64: pa.uint64(),
    ColumnType.FLOAT64: pa.float64(),
    ColumnType.BOOL: pa.bool_(),
    ColumnType.STRING: pa.string(),
    ColumnType.DIGEST: pa.binary(16),
    ColumnType.LIST_INT64: pa.list_(pa.int64()),
}

_WIDTH: Final[Mapping[ColumnType, int]] = {
    ColumnType.UINT8: 1,
    ColumnType.INT32: 2,
    ColumnType.INT64: 3,
    ColumnType.FLOAT64: 4,
}

ENUM_TYPE: Final = pa.dictionary(pa.int8(), pa.string())

_ROW_NAMES: Final[Mapping[str, str]] = {"units": "unit_index", "tracks": "track_index"}

GROUPS: Final = pa.schema(
    [
        pa.field("group_id", pa.uint64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("description", pa.string(), nullable=False),
        pa.field("backend", pa.string(), nullable=False),
        pa.field("ranks", pa.list_(pa.int32()), nullable=False),
    ]
)
METADATA: Final = pa.schema(
    [pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string(), nullable=False)]
)
PAYLOADS: Final = pa.schema(
    [pa.field("digest", pa.binary(16), nullable=False), pa.field("data", pa.large_binary(), nullable=False)]
)
SIDE_TABLES: Final[Mapping[str, pa.Schema]] = {"groups": GROUPS, "metadata": METADATA, "payloads": PAYLOADS}


def table_names() -> list[str]:
    """The names of the tables that a rank may have, as this version of the trace library knows them."""
    return [kind.name.lower() for kind in COLUMNS]


def table_kind(name: str) -> TableKind:
    """The table called ``name``."""
    return TableKind[name.upper()]


def row_name(table: str) -> str:
    """What the column is called that holds the ordinal of a row within its rank."""
    return _ROW_NAMES.get(table, "row_index")


@dataclass(frozen=True)
class FileInfo:
    """What a file says about itself and its trace."""

    table: str
    graph_kind: int = 0
    world_size: int = 0
    writer: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[ProcessGroup, ...] = ()

    def to_bytes(self) -> bytes:
        """The value of FILE_KEY."""
        groups = [[g.group_id, g.name, g.description, g.backend, list(g.ranks)] for g in self.groups]
        parts = {"table": self.table, "graph_kind": self.graph_kind, "world_size": self.world_size}
        text = json.dumps({**parts, "writer": self.writer, "metadata": dict(self.metadata), "groups": groups})
        return text.encode()

    @classmethod
    def of_schema(cls, schema: pa.Schema) -> FileInfo | None:
        """What the schema of a file says, or None where it says nothing that can be understood."""
        try:
            parts = json.loads((schema.metadata or {})[FILE_KEY])
            groups = tuple(
                ProcessGroup(int(number), str(name), str(description), str(backend), tuple(map(int, ranks)))
                for number, name, description, backend, ranks in parts.get("groups", [])
            )
            metadata = {str(key): str(value) for key, value in parts.get("metadata", {}).items()}
            kind, size = int(parts["graph_kind"]), int(parts["world_size"])
            return cls(str(parts["table"]), kind, size, str(parts.get("writer", "")), metadata, groups)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    @property
    def known_graph_kind(self) -> GraphKind:
        """The graph kind, UNSPECIFIED where this version does not know it."""
        return GraphKind(self.graph_kind) if self.graph_kind in set(GraphKind) else GraphKind.UNSPECIFIED


def named_spec(name: str, kind: ColumnType) -> ColumnSpec:
    """A column that the registry does not have: it is absent in rows that do not have it, where its type allows."""
    optional = kind not in (ColumnType.UINT8, ColumnType.UINT64, ColumnType.BOOL)
    return ColumnSpec(0, name, kind, optional)


def named_types(table: Table) -> dict[str, ColumnType]:
    """The columns of some rows that the registry does not have."""
    return {spec.name: spec.type for spec in getattr(table, "named_specs", {}).values()}


def merged_types(one: Mapping[str, ColumnType], other: Mapping[str, ColumnType]) -> dict[str, ColumnType]:
    """Columns of both: a column of a file has one type, so numbers take the wider of two.

    Raises:
        UsageError: a column holds numbers in one place and something else in another.
    """
    merged = dict(one)
    for name, kind in other.items():
        before = merged.setdefault(name, kind)
        if before is kind:
            continue
        wider = max(before, kind, key=lambda kind: _WIDTH.get(kind, 0))
        if before not in _WIDTH or kind not in _WIDTH:
            raise UsageError(f"column {name!r} is {before.name} in one rank and {kind.name} in another")
        merged[name] = wider
    return merged


def table_schema(table: str, *, named: Mapping[str, ColumnType], names: bool, info: FileInfo) -> pa.Schema:
    """The schema of one table: rank, ordinal, the registry's columns, named columns, and names of enum values."""
    fields = [pa.field("rank", pa.int32(), nullable=False), pa.field(row_name(table), pa.int64(), nullable=False)]
    for spec in COLUMNS[table_kind(table)]:
        fields.append(_field(spec))
        if names and spec.enum is not None:
            fields.append(pa.field(f"{spec.name}_name", ENUM_TYPE, metadata={DERIVED_KEY: spec.name}))
    fields += [_field(named_spec(name, kind)).with_nullable(True) for name, kind in sorted(named.items())]
    return pa.schema(fields, metadata={FILE_KEY: info.to_bytes()})


def _field(spec: ColumnSpec) -> pa.Field:
    about: dict[bytes | str, bytes | str] = {}
    if spec.unit and spec.unit != "-":
        about["unit"] = spec.unit
    if spec.description:
        about["description"] = spec.description
    return pa.field(spec.name, _TYPES[spec.type], nullable=spec.optional, metadata=about or None)


def enum_names(enum: type[IntEnum]) -> pa.Array:
    """The names of an enumeration in text, by value; values are consecutive from 0."""
    return pa.array([member.name.lower() for member in enum], pa.string())


def exact_type_of(kind: Any) -> ColumnType | None:
    """The type whose values this plugin writes as an Arrow type."""
    return next((column for column, arrow in _TYPES.items() if arrow == kind), None)


def column_type_of(kind: Any) -> ColumnType | None:
    """The type of a named column for values of an Arrow type; None where a trace cannot hold them."""
    if kind in (_TYPES[ColumnType.DIGEST], _TYPES[ColumnType.LIST_INT64], _TYPES[ColumnType.UINT64]):
        return exact_type_of(kind)
    if pa.types.is_boolean(kind):
        return ColumnType.BOOL
    if pa.types.is_integer(kind):
        return ColumnType.INT64
    if pa.types.is_floating(kind):
        return ColumnType.FLOAT64
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return ColumnType.STRING if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None
