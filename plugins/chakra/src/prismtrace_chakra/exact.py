"""The attributes with which a trace of Prism survives the way through Chakra: names, kinds, and both directions.

It does not touch files. Every column of a unit that Chakra has no field for becomes an attribute `prism.COLUMN` of
the unit's node; the groups of the job become lists in the description of each file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from prismtrace import DictionaryColumn, ListColumn, ProcessGroup
from prismtrace.model import UNIT_COLUMNS, ColumnSpec, ColumnType
from prismtrace_chakra.wire import AttributeName

MARK: Final = "prism.format"
PREFIX: Final = "prism."
_KIND: Final = {
    ColumnType.UINT64: "uint64",
    ColumnType.STRING: "string",
    ColumnType.DIGEST: "bytes",
    ColumnType.BOOL: "bool",
}


def rows(spec: ColumnSpec, column: Any) -> list[Any]:
    """The values of one column row by row; None where the row holds nothing, or the default."""
    if isinstance(column, DictionaryColumn):
        return list(column)
    if isinstance(column, ListColumn):
        return [None if values is None else values.tolist() for values in column]
    default = spec.default
    if spec.type is ColumnType.BOOL:
        return [value or None for value in column.tolist()]
    return [None if value == default else value for value in column.tolist()]


def writers() -> dict[str, tuple[ColumnSpec, AttributeName]]:
    """For each column of units its specification and what writes the attribute."""
    return {s.name: (s, AttributeName(PREFIX + s.name, _KIND.get(s.type, "int64"))) for s in UNIT_COLUMNS}


def columns(nodes: Sequence[Mapping[str, tuple[str, Any]]]) -> dict[str, Any]:
    """The unit columns that the attributes of the nodes of one rank hold.

    Raises:
        ValueError: an attribute is not of the kind of its column.
    """
    found: dict[str, Any] = {}
    for spec in UNIT_COLUMNS:
        name = PREFIX + spec.name
        values = [node[name][1] if name in node else None for node in nodes]
        if all(value is None for value in values):
            continue
        if spec.type is ColumnType.STRING:
            found[spec.name] = [value if value is None else str(value) for value in values]
        elif spec.type is ColumnType.DIGEST:
            found[spec.name] = values
        elif spec.type is ColumnType.LIST_INT64:
            found[spec.name] = [value if value is None else list(value) for value in values]
        else:
            default = spec.default
            filled = [default if value is None else value for value in values]
            if any(not isinstance(value, int) for value in filled):
                raise ValueError(f"attribute {name} is not a number")
            found[spec.name] = np.array(filled, spec.type.dtype)
    return found


def describe_groups(groups: Sequence[ProcessGroup]) -> bytes:
    """The groups as attributes of a file's description (field 2)."""
    return b"".join(
        (
            AttributeName("prism.groups.id", "uint64", field=2).many([group.group_id for group in groups]),
            AttributeName("prism.groups.name", "string", field=2).many([group.name for group in groups]),
            AttributeName("prism.groups.description", "string", field=2).many([g.description for g in groups]),
            AttributeName("prism.groups.backend", "string", field=2).many([group.backend for group in groups]),
            AttributeName("prism.groups.size", "int64", field=2).many([group.size for group in groups]),
            AttributeName("prism.groups.ranks", "int64", field=2).many([r for group in groups for r in group.ranks]),
        )
    )


def groups(attributes: Mapping[str, tuple[str, Any]]) -> dict[int, ProcessGroup]:
    """The groups that a description holds.

    Raises:
        ValueError: the lists contradict each other.
    """
    ids, names, descriptions, backends, sizes, ranks = (
        attributes.get(f"prism.groups.{name}", ("", ()))[1]
        for name in ("id", "name", "description", "backend", "size", "ranks")
    )
    found: dict[int, ProcessGroup] = {}
    position = 0
    for number, name, description, backend, size in zip(ids, names, descriptions, backends, sizes, strict=True):
        if not 0 < size <= len(ranks) - position:
            raise ValueError(f"group {number} of {size} members, {len(ranks) - position} are left")
        found[number] = ProcessGroup(number, name, description, backend, tuple(ranks[position : position + size]))
        position += size
    return found
