"""Rewrites a trace so that ranks with equal structure share it: finds the roles and stores what differs from them.

Does not change what a reader sees; rows, groups, metadata and payloads stay what they are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.chunk import encode_members
from prismtrace.columns import Rows, normalise
from prismtrace.model import ABSENT, COLUMNS, ROLE_RANK, TableKind
from prismtrace.reader import TraceReader
from prismtrace.rewriting import atomic_output
from prismtrace.roles import Difference, Template
from prismtrace.sharing import role_id_of
from prismtrace.source import TraceInput
from prismtrace.stacking import ROWS_PER_STACK, encode_stack, stacks
from prismtrace.tables import Table
from prismtrace.writer import TraceWriter

_STRUCTURE: Final = (
    "kind", "phase", "step", "op", "reduce_op", "dtype", "num_elements_in", "num_elements_out", "is_async",
    "awaits", "microbatch", "model_chunk",
)  # fmt: skip
_TIMES: Final = ("start_ns", "end_ns", "transfer_ns", "gap_ns", "memory_bytes")
_TABLES: Final = tuple(COLUMNS)
_FEW_RANKS: Final = 4
_BATCH_ROWS: Final = 1 << 18


@dataclass(frozen=True)
class CompactReport:
    """What `compact` found. `num_shared` ranks differ from their role by shifts and maps only.

    `is_copy`: written anew the trace would be no smaller, so the output is the source, byte by byte.
    """

    num_ranks: int
    num_roles: int
    num_members: int
    num_shared: int
    is_copy: bool = False


def compact(
    source: TraceInput,
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    min_ranks: int = 2,
    dense: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> CompactReport:
    """Writes the trace `source` to `output` with roles; `output` appears only when it is complete.

    Args:
        source: a finished trace.
        output: the file to create.
        overwrite: replaces a file that exists.
        min_ranks: how many ranks of one structure make a role; four where they have few rows and no times in common.
        dense: uses what format 1.1 added: ranks with few rows go into one chunk, times take fewer bits. Readers of
            format 1.0 refuse such files.
        progress: is told of how many ranks' worth of how many the rows are compared and stored.

    Raises:
        TraceFormatError: the source is broken.
        TraceWriteError: the result cannot be written, or exists.
    """
    with TraceReader(source) as reader, atomic_output(os.fspath(output), overwrite=overwrite) as temporary:
        with TraceWriter(
            temporary,
            graph_kind=reader.graph_kind,
            world_size=reader.world_size,
            metadata=reader.metadata,
            dense=dense,
        ) as writer:
            writer.add_groups(reader.groups.values())
            for digest in reader.payload_digests:
                writer.add_payload(reader.payload(digest))
            report = _Compaction(reader, writer, dense=dense, progress=progress).run(min_ranks)
        if isinstance(source, str | os.PathLike) and os.path.getsize(temporary) >= reader.readable_bytes:
            shutil.copyfile(source, temporary)
            return replace(report, is_copy=True)
        return report


class _Compaction:
    """One run: the ranks of one structure after the other."""

    def __init__(
        self,
        reader: TraceReader,
        writer: TraceWriter,
        *,
        dense: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._reader, self._writer, self._dense = reader, writer, dense
        self._num_members, self._num_shared = 0, 0
        self._progress, self._num_reads = progress, 0

    def _tell(self) -> None:
        """Tells how far it is: of each rank the structure is read, then each table."""
        self._num_reads += 1
        if self._progress is not None:
            total = len(self._reader.ranks)
            self._progress(min(self._num_reads // (1 + len(_TABLES)), total), total)

    def run(self, min_ranks: int) -> CompactReport:
        """Writes all ranks."""
        classes: dict[bytes, dict[bytes, list[int]]] = {}
        for rank in self._reader.ranks:
            structure, times = self._digests(rank)
            classes.setdefault(structure, {}).setdefault(times, []).append(rank)
        num_roles, alone = 0, []
        for structure, by_times in classes.items():
            for is_role, ranks in _roles(by_times, self._least(by_times, min_ranks) if structure else 1 << 31):
                if not is_role:
                    alone += ranks
                else:
                    self._write_role(ranks)
                    num_roles += 1
        for table in _TABLES:
            self._write_alone(table, sorted(alone))
        return CompactReport(len(self._reader.ranks), num_roles, self._num_members, self._num_shared)

    def _least(self, by_times: dict[bytes, list[int]], min_ranks: int) -> int:
        """How many ranks make a role: more where their rows are few and go into one chunk with those of others."""
        ranks = [rank for alike in by_times.values() for rank in alike]
        small = self._dense and 0 < self._reader.num_units(ranks[0]) <= ROWS_PER_STACK // 2
        return max(min_ranks, _FEW_RANKS) if small and len(by_times) == len(ranks) else min_ranks

    def _digests(self, rank: int) -> tuple[bytes, bytes]:
        """Digests of what makes ranks alike, and of their times from the first one on; empty where nothing can be."""
        self._tell()
        units = self._reader.units(rank, columns=(*_STRUCTURE, *_TIMES))
        if not len(units) or any(self._reader.missing_rows(table, rank) for table in _TABLES):
            return b"", b""
        structure, times = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        structure.update(f"{len(units)} {units.first_index}".encode())
        for name in _STRUCTURE:
            structure.update(np.ascontiguousarray(units[name]).tobytes())
        for name in _TIMES:
            column: NDArray[np.int64] = units[name]
            present = column != ABSENT
            base = column[present][:1] if name in ("start_ns", "end_ns") else np.zeros(1, np.int64)
            times.update(np.packbits(present).tobytes())
            times.update((column[present] - base).tobytes())
        return structure.digest(), times.digest()

    def _write_alone(self, table: TableKind, ranks: list[int]) -> None:
        """Writes one table of ranks without a role: those with few rows together."""
        for batch in self._batches(table, ranks):
            whole = [(rank, pieces[0][1]) for rank, pieces in batch if len(pieces) == 1 and pieces[0][0] == 0]
            found = stacks(whole)[0] if self._dense else []
            for members in found:
                self._writer.put(encode_stack(table, members, first_row=0))
            stacked = {rank for members in found for rank, _ in members}
            for rank, pieces in batch:
                for first, rows in pieces if rank not in stacked else ():
                    self._writer.put_rows(table, rank, first, rows)

    def _batches(self, table: TableKind, ranks: list[int]) -> Iterator[list[tuple[int, list[tuple[int, Rows]]]]]:
        """The rows of ranks, of so many at a time as can be kept in memory."""
        batch: list[tuple[int, list[tuple[int, Rows]]]] = []
        num_rows = 0
        for rank in ranks:
            batch.append((rank, list(self._pieces(table, rank))))
            num_rows += sum(rows.num_rows for _, rows in batch[-1][1])
            if num_rows > _BATCH_ROWS:
                yield batch
                batch, num_rows = [], 0
        if batch:
            yield batch

    def _pieces(self, table: TableKind, rank: int) -> Iterator[tuple[int, Rows]]:
        """The rows of a rank in pieces without gaps, each with the number of its first row."""
        self._tell()
        whole = self._table(table, rank)
        rows = normalise(table, whole)
        gaps = (np.flatnonzero(np.diff(whole.row_index) != 1) + 1).tolist()
        for start, stop in zip([0, *gaps], [*gaps, len(whole)], strict=True):
            if stop > start:
                yield int(whole.row_index[start]), rows.part(start, stop)

    def _table(self, table: TableKind, rank: int) -> Table:
        reader = self._reader
        read: dict[TableKind, Any] = {
            TableKind.UNITS: reader.units,
            TableKind.STEPS: reader.steps,
            TableKind.SCALARS: reader.scalars,
            TableKind.EVENTS: reader.events,
            TableKind.TRACKS: reader.tracks,
        }
        found: Table = read[table](rank)
        return found

    def _write_role(self, ranks: list[int]) -> None:
        """Writes a role with the rows of its first rank, and what the others have in its place."""
        role = role_id_of((table, *piece) for table in _TABLES for piece in self._pieces(table, ranks[0]))
        self._num_members += len(ranks)
        shared = set(ranks)
        for table in _TABLES:
            model = [(first, rows) for first, rows in self._pieces(table, ranks[0])]
            if not model:
                for rank in ranks[1:]:
                    for first, rows in self._pieces(table, rank):
                        shared.discard(rank)
                        self._writer.put_rows(table, rank, first, rows)
                continue
            (start, rows) = model[0]
            templates = self._writer.put_rows(table, ROLE_RANK, start, rows, role=role)
            shared &= self._write_members(table, role, ranks, templates)
        self._num_shared += len(shared)

    def _write_members(self, table: TableKind, role: int, ranks: list[int], templates: list[Template]) -> set[int]:
        """Writes one table of all ranks of a role; returns those that needed no chunk of their own."""
        num_rows = sum(template.rows.num_rows for template in templates)
        blocks: list[tuple[int, list[list[Difference]]]] = []
        own: list[int] = []
        for rank in ranks:
            pieces = list(self._pieces(table, rank))
            fits = len(pieces) == 1 and pieces[0][0] == templates[0].first_row and pieces[0][1].num_rows == num_rows
            if not fits:
                for first, rows in pieces:
                    self._writer.put_rows(table, rank, first, rows)
                continue
            rows = pieces[0][1]
            found = []
            for template in templates:
                start = template.first_row - templates[0].first_row
                found.append(template.differences(rows.part(start, start + template.rows.num_rows)))
            if all(_is_small(item) for piece in found for item in piece):
                blocks.append((rank, found))
            else:
                own.append(rank)
        blocks, left = _one_way(blocks)
        self._write_own(table, role, sorted(own + left), templates)
        blocks.sort(key=lambda block: block[0])
        if blocks:
            for number, template in enumerate(templates):
                self._writer.put(
                    encode_members(
                        table,
                        ranks=[rank for rank, _ in blocks],
                        first_row=template.first_row,
                        role=role,
                        template=template,
                        differences=[found[number] for _, found in blocks],
                    )
                )
        return {rank for rank, _ in blocks}

    def _write_own(self, table: TableKind, role: int, ranks: list[int], templates: list[Template]) -> None:
        """Writes one table of ranks of a role that have values of their own: those with few rows together."""
        for batch in self._batches(table, ranks):
            rows_of = {rank: pieces[0][1] for rank, pieces in batch}
            found, alone = (
                stacks(list(rows_of.items())) if self._dense and len(templates) == 1 else ([], list(rows_of.items()))
            )
            for members in found:
                first = templates[0].first_row
                stack = encode_stack(table, members, first_row=first, role=role, template=templates[0])
                self._writer.put(stack)
            for rank, rows in alone:
                self._writer.put_member(table, rank, rows, role=role, templates=templates)


def _roles(by_times: dict[bytes, list[int]], min_ranks: int) -> Iterator[tuple[bool, list[int]]]:
    """Ranks of one structure as roles, or (False) ranks that have none.

    Ranks that share their times have a role of their own, all others that of the largest such class.
    """
    alike = sorted(by_times.items(), key=lambda item: -len(item[1]))
    rest = sorted(rank for _, ranks in alike if len(ranks) < min_ranks for rank in ranks)
    roles = [ranks for _, ranks in alike if len(ranks) >= min_ranks]
    if roles:
        roles[0] = roles[0] + rest
        yield from ((True, ranks) for ranks in roles)
    elif len(rest) >= min_ranks:
        yield True, alike[0][1] + [rank for rank in rest if rank not in alike[0][1]]
    else:
        yield False, rest


def _is_small(item: Difference) -> bool:
    return item.same or item.shift is not None or item.mapped is not None


def _one_way(
    blocks: list[tuple[int, list[list[Difference]]]],
) -> tuple[list[tuple[int, list[list[Difference]]]], list[int]]:
    """The ranks of which each column can be written in one way, shifted or mapped, and the ranks left over."""
    alone: list[int] = []
    if not blocks:
        return blocks, alone
    for number, piece in enumerate(blocks[0][1]):
        for place in range(len(piece)):
            items = [found[number][place] for _, found in blocks]
            if all(item.same for item in items) or all(item.shift is not None for item in items):
                continue
            kept = [block for block, item in zip(blocks, items, strict=True) if item.mapped is not None]
            if len(kept) < len(blocks):
                names = {rank for rank, _ in kept}
                alone += [rank for rank, _ in blocks if rank not in names]
                blocks = kept
            if not blocks:
                return blocks, alone
    return blocks, alone
