"""Writes changed copies of a trace: tables by kind, rows by mask, and an output that appears only when it is complete.

Does not know what is changed; `slicing`, `redact` and `align` do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.assemble import concatenate
from prismtrace.errors import TraceDataError, TraceUsageError, TraceWriteError, already_exists, writing
from prismtrace.model import ABSENT, ABSENT32, BASE_VERSION, COLUMNS, GraphKind, TableKind
from prismtrace.reader import TraceReader
from prismtrace.recordfile import is_special
from prismtrace.tables import (
    Column,
    DictionaryColumn,
    EventTable,
    ScalarTable,
    StepTable,
    Table,
    TrackTable,
    UnitTable,
)
from prismtrace.writer import TraceWriter

TIME_COLUMNS: Final = frozenset({"start_ns", "end_ns"})
"""Columns that hold points in time, in every table; all other `_ns` columns are durations."""

_CLASSES: Final[dict[TableKind, type[Table]]] = {
    kind.table: kind for kind in (UnitTable, StepTable, ScalarTable, EventTable, TrackTable)
}

TABLES: Final = tuple(kind for kind in TableKind if kind is not TableKind.UNSPECIFIED)


def read_table(reader: TraceReader, kind: TableKind, rank: int) -> Table:
    """One whole table of a rank; empty when the rank has none."""
    table: Table = getattr(reader, kind.name.lower())(rank)
    return table


def iter_tables(reader: TraceReader, kind: TableKind, rank: int) -> Iterator[Table]:
    """A table of a rank chunk by chunk, in bounded memory."""
    specs, table = list(COLUMNS[kind]), _CLASSES[kind]
    for part in reader._parts(kind, rank, specs, None, None):
        yield concatenate(table, rank, specs, [part], selected=None, path=reader.path)


def still_promised(metadata: Mapping[str, str], *, lost: Collection[str]) -> dict[str, str]:
    """The entry `profile` of a copy without what the profiles `lost` promise; {} where none of them is claimed."""
    names = [name.strip() for name in metadata.get("profile", "").split(",")]
    return {"profile": ",".join(name for name in names if name not in lost)} if set(names) & set(lost) else {}


def add_rows(writer: TraceWriter, kind: TableKind, rank: int, columns: Mapping[str, Column]) -> None:
    """Appends rows to the table of a rank."""
    getattr(writer, f"add_{kind.name.lower()}")(rank, columns)


def take(column: Column, rows: NDArray[Any]) -> Column:
    """The rows of a column that an index or mask array selects."""
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)


def present(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows of an optional integer column have a value."""
    absent = ABSENT32 if column.dtype == np.int32 else ABSENT
    return np.asarray(column != absent)


def used_values(column: Column) -> list[Any]:
    """The distinct strings or digests that some row of the column has."""
    if not isinstance(column, DictionaryColumn):
        return []
    codes = np.unique(column.codes)
    return [column.values[code] for code in codes[codes >= 0].tolist()]


def is_digest_column(column: Column) -> bool:
    """Whether the column holds digests."""
    return isinstance(column, DictionaryColumn) and bool(column.values) and isinstance(column.values[0], bytes)


def is_text_column(column: Column) -> bool:
    """Whether the column holds strings."""
    return isinstance(column, DictionaryColumn) and bool(column.values) and isinstance(column.values[0], str)


def copy_payload(reader: TraceReader, writer: TraceWriter, digest: bytes) -> None:
    """Copies a payload; one whose bytes have another digest is refused."""
    if writer.add_payload(reader.payload(digest)) != digest:
        raise TraceDataError(f"payload {digest.hex()} has other bytes than its name says", path=reader.path)


@contextmanager
def new_trace(
    target: str | os.PathLike[str],
    *,
    like: TraceReader,
    metadata: Mapping[str, str] | None = None,
    graph_kind: GraphKind | None = None,
    overwrite: bool = False,
    find_roles: Callable[[], bool] = lambda: True,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[TraceWriter]:
    """A writer for a trace of the same job as `like`; `target` appears when the block ends without an error.

    Rows that are written rank by rank undo the roles of their source. They are looked for again after that, unless
    `find_roles` says that nothing is to be found; `progress` is told how many ranks of how many that has stored.
    """
    path = os.fspath(target)
    with atomic_output(path, overwrite=overwrite) as temporary:
        writer = TraceWriter(
            temporary,
            graph_kind=like.graph_kind if graph_kind is None else graph_kind,
            world_size=like.world_size,
            metadata=metadata,
            dense=bool(like.roles) and like.format_version > BASE_VERSION,
        )
        try:
            yield writer
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        if like.roles and find_roles():
            from prismtrace.compact import compact  # it writes through this module

            compact(temporary, temporary, overwrite=True, progress=progress)


@contextmanager
def atomic_output(target: str, *, overwrite: bool) -> Iterator[str]:
    """A temporary name beside `target`; what was written there gets the name `target` when the block ends well."""
    if os.path.lexists(target) and not overwrite:
        raise already_exists(target)
    if os.path.isdir(target):
        raise TraceWriteError("is a folder", path=target)
    if is_special(target):
        raise TraceWriteError("is neither a file nor missing: a device, a pipe or a socket", path=target)
    temporary = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.getpid()}.tmp")
    with writing(target, what="cannot create"):
        if os.path.lexists(temporary):
            os.unlink(temporary)
    try:
        yield temporary
        with writing(target, what="cannot create"):
            if overwrite:
                os.replace(temporary, target)
            else:
                os.link(temporary, target)
                os.unlink(temporary)
    except BaseException as error:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        if isinstance(error, TraceWriteError) and error.path.startswith(temporary):  # a name that nobody asked for
            raise error.of(target) from error
        raise


def check_ranks(reader: TraceReader, ranks: Any) -> tuple[int, ...]:
    """The ranks asked for, all of which must have data; every rank with data when nothing was asked."""
    if ranks is None:
        return reader.ranks
    wanted = tuple(sorted(set(ranks)))
    strange = sorted(set(wanted) - set(reader.ranks))
    if strange:
        have = f"{reader.ranks[0]} .. {reader.ranks[-1]}" if reader.ranks else "none"
        raise TraceUsageError(f"{reader.path}: rank {strange[0]} has no data; ranks with data: {have}")
    return wanted
