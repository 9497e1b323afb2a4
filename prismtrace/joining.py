"""Says what several trace files of one job have in common: rows that a merge replaces, and metadata that stays true.

It reads indexes only and writes nothing; `merge` joins.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from prismtrace.errors import TraceUnfinishedError
from prismtrace.index import Index, index_of_footer, scan
from prismtrace.model import BEGINS_KEY, TableKind
from prismtrace.source import PathSource
from prismtrace.wording import ranks_text

_OF_ROWS = ("slice.steps", "slice.time_ns", "clock.")


@dataclass(frozen=True)
class Overlap:
    """Ranks that have rows of `table` in both files: a merge keeps those of `kept`, the later, not `replaced`'s."""

    table: TableKind
    ranks: tuple[int, ...]
    kept: str
    replaced: str


def read_index(path: str, *, allow_unfinished: bool) -> Index:
    """Where everything is in a file; of one without a footer, if that is allowed, what is whole of it."""
    source = PathSource(path)
    try:
        return index_of_footer(source)
    except TraceUnfinishedError:
        if not allow_unfinished:
            raise
        return scan(source)
    finally:
        source.close()


def overlaps(paths: Sequence[str | os.PathLike[str]], *, allow_unfinished: bool = False) -> tuple[Overlap, ...]:
    """What `merge` of these files, in this order, replaces; by table, then by file.

    Raises:
        TraceReadError: a file cannot be opened.
        TraceFormatError: a file is broken, or unfinished where that is not allowed.
    """
    owners: dict[tuple[int, int], list[int]] = {}
    names = [os.fspath(path) for path in paths]
    for number, name in enumerate(names):
        for key in read_index(name, allow_unfinished=allow_unfinished).owned:
            owners.setdefault(key, []).append(number)
    known = {int(kind) for kind in TableKind}
    found: dict[tuple[int, int, int], list[int]] = {}
    for (table, rank), numbers in owners.items():
        for number in numbers[:-1]:
            found.setdefault((table, number, numbers[-1]), []).append(rank)
    return tuple(
        Overlap(TableKind(table), tuple(sorted(ranks)), names[kept], names[replaced])
        for (table, replaced, kept), ranks in sorted(found.items())
        if table in known
    )


def true_of_all(
    joined: Mapping[str, str], parts: Sequence[tuple[Mapping[str, str], Collection[int]]], *,
    of_units: Mapping[int, Mapping[str, str]], world_size: int,
) -> dict[str, str]:  # fmt: skip
    """The joined metadata without what is true of some of the parts only: how they were cut, on which clock they are.

    Where a rank begins is said by the part that its units are of.

    Args:
        joined: metadata of all parts, the later ones over the earlier.
        parts: of each file its metadata, and the ranks that it has rows of.
        of_units: for each rank with units the metadata of the part that they are of.
        world_size: of the job; 0 where it is not known.
    """
    kept = dict(joined)
    with_rows = [(metadata, ranks) for metadata, ranks in parts if ranks]
    for key in [key for key in joined if key.startswith(_OF_ROWS)]:
        if any(metadata.get(key) != joined[key] for metadata, _ in with_rows):
            del kept[key]
    if "slice.ranks" in kept:
        every = {rank for _, ranks in with_rows for rank in ranks}
        if any("slice.ranks" not in metadata for metadata, _ in with_rows) or len(every) == world_size:
            del kept["slice.ranks"]
        else:
            kept["slice.ranks"] = ranks_text(tuple(sorted(every)))
    for rank, metadata in of_units.items():
        if (key := BEGINS_KEY.format(rank)) in kept:
            kept.pop(key)
            kept.update({key: metadata[key]} if key in metadata else {})
    return kept
