"""Encodes rows of several ranks into one stacked chunk, and says which ranks may go into one.

Does not write files, and does not look for roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prismtrace.assemble import joined
from prismtrace.chunk import ChunkEncoder, Encoded
from prismtrace.columns import Rows
from prismtrace.dense import laps_of
from prismtrace.entries import ranges_of
from prismtrace.model import ColumnSpec, TableKind
from prismtrace.roles import Difference, Template
from prismtrace.tables import missing_column

ROWS_PER_STACK: Final = 1 << 15
"""Rows of all ranks of a stacked chunk that this library writes: to read one rank, all of them are decoded."""

Member = tuple[int, Rows]


def stacks(members: Sequence[Member]) -> tuple[list[list[Member]], list[Member]]:
    """Ranks (rising) with as many rows each as go into one chunk, and those that are too large or alone."""
    groups: dict[tuple[int, tuple[tuple[str, int], ...]], list[Member]] = {}
    alone: list[Member] = []
    for rank, rows in members:
        named = tuple((spec.name, int(spec.type)) for spec in rows.specs if "." in spec.name)
        if 0 < rows.num_rows <= ROWS_PER_STACK // 2:
            groups.setdefault((rows.num_rows, named), []).append((rank, rows))
        else:
            alone.append((rank, rows))
    found: list[list[Member]] = []
    for (num_rows, _), group in groups.items():
        size = ROWS_PER_STACK // num_rows
        pieces = [group[start : start + size] for start in range(0, len(group), size)]
        found += [piece for piece in pieces if len(piece) > 1]
        alone += [piece[0] for piece in pieces if len(piece) == 1]
    return found, alone


def encode_stack(
    table: TableKind, members: Sequence[Member], *, first_row: int, role: int = 0, template: Template | None = None
) -> Encoded:
    """One chunk with the rows of several ranks (rising) of equal number, one rank after the other.

    With a `role`, of which `template` are the same rows, it holds only what differs from that.
    """
    parts = [rows for _, rows in members]
    specs = {spec.name: spec for rows in parts for spec in rows.specs}
    if template is not None:
        specs = {**template.specs, **specs}
    whole = _together(parts, list(specs.values()))
    encoder = ChunkEncoder(table, whole, laps=laps_of(whole, num_rows=parts[0].num_rows))
    if template is None:
        paired = encoder.add_interval(whole)
        for spec in whole.specs:
            if spec.name not in paired:
                encoder.add(spec, whole.columns[spec.name])
    else:
        _add_differences(encoder, parts, template, list(specs.values()))
    meta, data = encoder.finish(rank=members[0][0], first_row=first_row, role=role)
    ranges = ranges_of([rank for rank, _ in members])
    return meta._replace(num_rows=parts[0].num_rows, ranges=ranges, stacked=True), data


def _together(parts: Sequence[Rows], specs: Sequence[ColumnSpec]) -> Rows:
    columns = {
        spec.name: joined(
            [
                rows.columns[spec.name] if spec.name in rows.columns else missing_column(spec, num_rows=rows.num_rows)
                for rows in parts
            ]
        )
        for spec in specs
    }
    return Rows(sum(rows.num_rows for rows in parts), columns, tuple(specs))


def _add_differences(
    encoder: ChunkEncoder, parts: Sequence[Rows], template: Template, specs: Sequence[ColumnSpec]
) -> None:
    """Adds what ranks have other than their role: shifts and maps where they do for all ranks, else all values."""
    num_rows = template.rows.num_rows
    full = [_together([rows], specs) for rows in parts]
    different: list[ColumnSpec] = []
    found: dict[str, list[Difference]] = {}
    for rows in full:
        for item in template.differences(rows):  # a column that neither the role nor this rank has is not among them
            found.setdefault(item.spec.name, []).append(item)
    for column in found.values():
        spec = column[0].spec
        shifts = [item.shift for item in column if item.shift is not None]
        if all(item.same for item in column):
            continue
        if len(shifts) == len(parts):
            encoder.add_shift(spec, shifts)
        elif all(item.mapped is not None for item in column):
            encoder.add_map(spec, template, column)
        else:
            different.append(spec)
    repeated = {name: joined([column] * len(parts)) for name, column in template.rows.columns.items()}
    encoder.add_different(different, Template(Rows(num_rows * len(parts), repeated, template.rows.specs)))
