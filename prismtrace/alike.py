"""Reads ranks that a file stores as members of one role together: the rows of one, and what the others have instead.

Does not compare rows (`compact` does): that ranks belong together is said by the chunks that they share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace._generated.schema import StreamPart
from prismtrace.columns import VALUE_RANGES
from prismtrace.decoder import ChunkDecoder
from prismtrace.errors import reading
from prismtrace.members import Changes
from prismtrace.model import COLUMNS, FIRST_NAMED_COLUMN, ROLE_RANK, ColumnSpec, ColumnType, TableKind
from prismtrace.reader import TraceReader
from prismtrace.roles import MAX_MAPPED, present, wide
from prismtrace.sharing import Replaced
from prismtrace.tables import Column

_ROLE_PARTS: Final = frozenset((StreamPart.MAP, StreamPart.SHIFT))
_REPLACED: Final = frozenset((ColumnType.UINT8, ColumnType.INT32, ColumnType.INT64, ColumnType.UINT64))


@dataclass(frozen=True)
class Alike:
    """Ranks (rising) that have all their rows in the same chunks, which hold what differs from one role."""

    reader: TraceReader
    ranks: tuple[int, ...]

    def have(self, names: Collection[str]) -> bool:
        """Whether some columns are the same for all ranks, in every table.

        Raises:
            TraceFormatError: the file is broken.
        """
        for kind in COLUMNS:
            for entry in self.reader._index.entries(kind, self.ranks[0]):
                members = self.reader._chunk_reader.members(entry, self.ranks)
                if members is None or any(spec.name in names for spec in _changed_specs(members[0], kind)):
                    return False
        return True

    def replaced(
        self, kind: TableKind, rows: NDArray[np.int64], columns: Mapping[str, Column]
    ) -> tuple[dict[str, Column], dict[str, Replaced]] | None:
        """Rows of the role, and what each of the ranks has in place of them, as `add_alike` takes it.

        Args:
            kind: the table.
            rows: numbers of rows that the ranks have, rising.
            columns: what the reader gives for these rows of the first rank.

        Returns:
            The columns, with values of the role where ranks differ, and what replaces these values; None where that
            does not say it all: a chunk holds the rows of each rank, or a value does not fit.

        Raises:
            TraceFormatError: the file is broken.
        """
        of_role = dict(columns)
        codes: dict[str, NDArray[np.int64]] = {}
        values: dict[str, list[NDArray[np.int64]]] = {}
        for entry in self.reader._index.entries(kind, self.ranks[0]):
            first = int(entry["first_row"])
            here = slice(*np.searchsorted(rows, [first, first + int(entry["num_rows"])]).tolist())
            if here.start == here.stop:
                continue
            members = self.reader._chunk_reader.members(entry, self.ranks)
            if members is None:
                return None
            with reading("chunk", path=self.reader.path, offset=int(entry["offset"])):
                for spec, whole, changes in _changed(members[0], kind):
                    part = whole[rows[here] - first]
                    valid = present(spec, part)
                    held = wide(spec, part if valid is None else part[valid])
                    distinct, inverse = np.unique(held, return_inverse=True)
                    if len(distinct) > MAX_MAPPED:
                        return None
                    after = changes.of_all(distinct)[:, members[1]]
                    if not _fits(spec, distinct, after):
                        return None
                    if spec.name not in codes:
                        of_role[spec.name] = np.array(columns[spec.name])
                        codes[spec.name], values[spec.name] = np.full(len(rows), -1, np.int64), []
                    of_role[spec.name][here] = part  # type: ignore[index]
                    rows_with = here.start + (np.arange(len(part)) if valid is None else np.flatnonzero(valid))
                    codes[spec.name][rows_with] = inverse + sum(map(len, values[spec.name]))
                    values[spec.name].append(after)
        return of_role, {name: (codes[name], np.concatenate(values[name])) for name in codes}


def alike_ranks(reader: TraceReader, ranks: Collection[int]) -> tuple[list[Alike], list[int]]:
    """The ranks that can be read together, and those that share no chunks with others; by the index alone."""
    entries = reader._index.chunk_entries
    place, owner = reader._index._by_rank
    known = np.isin(entries["table"][place], [int(kind) for kind in COLUMNS]) & (owner != ROLE_RANK)
    known &= np.isin(owner, np.fromiter(ranks, np.int64))
    place, owner = place[known], owner[known]
    order = np.lexsort((place, owner))
    place, owner = place[order], owner[order]
    is_shared = (entries["num_ranges"] > 0) & (entries["role"] > 0)
    found: dict[bytes, list[int]] = {}
    alone: list[int] = []
    for chunks in np.split(np.arange(len(owner)), np.flatnonzero(np.diff(owner)) + 1) if len(owner) else ():
        mine, rank = place[chunks], int(owner[chunks[0]])
        if is_shared[mine].all() and (entries["role"][mine] == entries["role"][mine[0]]).all():
            found.setdefault(mine.tobytes(), []).append(rank)
        else:
            alone.append(rank)
    alone += [rank for together in found.values() if len(together) == 1 for rank in together]
    return [Alike(reader, tuple(together)) for together in found.values() if len(together) > 1], sorted(alone)


def _changed(decoder: ChunkDecoder, kind: TableKind) -> Iterator[tuple[ColumnSpec, NDArray[Any], Changes]]:
    """The columns in which ranks of a chunk differ from their role: the role's rows, and what is in their place."""
    for spec in _changed_specs(decoder, kind):
        role = decoder._of_role(spec)
        assert role is not None  # else the reader has refused the column
        column = role[0]._column(role[1])
        assert isinstance(column, np.ndarray)
        yield spec, column, decoder._changes(spec)


def _changed_specs(decoder: ChunkDecoder, kind: TableKind) -> list[ColumnSpec]:
    return [spec for spec in (*COLUMNS[kind], *decoder.named.values()) if decoder._own(spec) & _ROLE_PARTS]


def _fits(spec: ColumnSpec, distinct: NDArray[np.int64], after: NDArray[np.int64]) -> bool:
    """Whether a rank of each value could have it, and a role with these values has the column at all."""
    if spec.column_id >= FIRST_NAMED_COLUMN and spec.type is not ColumnType.INT64:
        return False  # their type is found by the values
    if spec.type not in _REPLACED or (not spec.optional and (after[distinct == spec.default] != spec.default).any()):
        return False
    if spec.type is ColumnType.UINT64 or not after.size:
        return True
    least, most = VALUE_RANGES[spec.type]
    return bool(after.min() >= least + spec.optional and after.max() <= most)
