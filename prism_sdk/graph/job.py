"""Holds the execution graph of a whole job in memory, as flat columns with every communication matched.

It does not give times to units (``timing``), and reads files only through ``prismtrace``.

Rows of all ranks lie one after the other: row ``offsets[p] + i`` is unit ``i`` (of those loaded) of rank ``ranks[p]``.
An *event* is one operation of the job: a collective with the rows of its members, or a message with its SEND and RECV.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.graph import matching
from prism_sdk.graph.errors import GraphError
from prismtrace import ABSENT, ABSENT32, GraphKind, Op, Phase, ProcessGroup, TraceReader, UnitKind, UnitTable

__all__ = ["COLUMN_TYPES", "JobGraph", "note_on_steps", "read_columns"]

Int64Array = npt.NDArray[np.int64]

#: The columns that a graph keeps, with their types and the value that means "absent" (None: has no absent value).
COLUMN_TYPES: dict[str, tuple[type[np.generic], int | None]] = {
    "kind": (np.uint8, None),
    "phase": (np.uint8, None),
    "step": (np.int32, None),
    "start_ns": (np.int64, ABSENT),
    "end_ns": (np.int64, ABSENT),
    "group_id": (np.uint64, None),
    "seq": (np.int64, ABSENT),
    "op": (np.uint8, None),
    "reduce_op": (np.uint8, None),
    "dtype": (np.uint8, None),
    "num_elements_in": (np.int64, ABSENT),
    "num_elements_out": (np.int64, ABSENT),
    "peer": (np.int32, ABSENT32),
    "tag": (np.int64, ABSENT),
    "is_async": (np.bool_, None),
    "awaits": (np.int64, ABSENT),
    "transfer_ns": (np.int64, ABSENT),
    "gap_ns": (np.int64, ABSENT),
    "prism.lead_ns": (np.int64, ABSENT),
    "microbatch": (np.int32, ABSENT32),
    "stage": (np.int32, ABSENT32),
    "model_chunk": (np.int32, ABSENT32),
}


def note_on_steps(reader: TraceReader, *, ranks: Sequence[int], phase: npt.NDArray[np.uint8]) -> tuple[str, ...]:
    """What to say where nothing tells the steps of a trace: no optimizer, no row of a step, one number at most.

    Args:
        reader: the trace.
        ranks: those that were loaded.
        phase: the phases of their units.
    """
    if (phase == Phase.OPTIMIZER).any() or any(map(reader.num_steps, ranks)):
        return ()
    numbers = {step for span in map(reader.step_range, ranks) if span is not None for step in span}
    if len(numbers) > 1:
        return ()
    return ("no optimizer step was seen: where steps end is not known, and all that was recorded counts as one",)


def read_columns(table: UnitTable, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Columns of a table by name, all absent where the file has none (named columns need not be there)."""
    return {name: _column(name, getattr(table, name, None), len(table)) for name in names}


def _column(name: str, values: Any, num_rows: int) -> npt.NDArray[Any]:
    dtype, absent = COLUMN_TYPES[name]
    if values is None:
        return np.full(num_rows, absent or 0, dtype=dtype)
    array = np.asarray(values)
    if array.shape != (num_rows,):
        raise GraphError(f"column {name} has shape {array.shape}, the rank has {num_rows} rows")
    return array.astype(dtype, copy=False)


@dataclass(frozen=True, kw_only=True)
class JobGraph:
    """The graph of a job: columns over all rows, the rows of each event, and the groups. All arrays are read-only."""

    graph_kind: GraphKind
    world_size: int
    groups: Mapping[int, ProcessGroup]
    ranks: tuple[int, ...]
    offsets: Int64Array
    #: ``unit_index`` in the file of the first loaded row of each rank.
    first_index: Int64Array
    columns: Mapping[str, npt.NDArray[Any]]
    source: str = "<memory>"
    #: For a WAIT row the row that it awaits, else -1 (also if that row was not loaded).
    awaited_row: Int64Array = field(repr=False)
    #: For a communication row its event, else -1.
    event_of_row: Int64Array = field(repr=False)
    #: Rows of event e: ``event_rows[event_offsets[e]:event_offsets[e + 1]]``; a message has its SEND first.
    event_offsets: Int64Array = field(repr=False)
    event_rows: Int64Array = field(repr=False)
    #: The event before it in the same group (collectives only), else -1.
    event_previous: Int64Array = field(repr=False)
    #: False where ranks that take part are not in this graph.
    event_is_whole: npt.NDArray[np.bool_] = field(repr=False)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | TraceReader,
        *,
        ranks: Sequence[int] | None = None,
        steps: range | None = None,
        allow_unfinished: bool = False,
    ) -> JobGraph:
        """Read a trace (its path, or an open reader) and match its communication.

        Ranks of the world that are not loaded (not in ``ranks``, or not in the file) are *absent*: events that they
        take part in are kept and marked in ``event_is_whole``. Events that lack a unit of a rank that is loaded raise
        UnmatchedUnitError, members that disagree raise InconsistentUnitError.
        """
        if not isinstance(source, TraceReader):
            with TraceReader(os.fspath(source), allow_unfinished=allow_unfinished) as reader:
                return cls._read(reader, ranks=ranks, steps=steps, source=os.fspath(source))
        return cls._read(source, ranks=ranks, steps=steps, source=str(getattr(source, "path", None) or "<trace>"))

    @classmethod
    def _read(cls, reader: TraceReader, *, ranks: Sequence[int] | None, steps: range | None, source: str) -> JobGraph:
        chosen = tuple(reader.ranks) if ranks is None else tuple(sorted(set(ranks)))
        present = set(reader.ranks)
        unknown = [rank for rank in chosen if rank not in present]
        if unknown:
            raise GraphError(f"{source} has no units of rank {unknown[0]}", hint=f"it has ranks {list(reader.ranks)}")
        names = list(COLUMN_TYPES)
        tables = {rank: reader.units(rank, steps=steps, columns=names) for rank in chosen}
        for rank, table in tables.items():
            if len(table) and int(table.row_index[-1]) - table.first_index != len(table) - 1:
                raise GraphError(f"{source}: the steps of rank {rank} do not follow each other in order",
                                 hint="load all steps")  # fmt: skip
        return cls.from_columns(
            {rank: read_columns(table, names) for rank, table in tables.items()},
            world_size=reader.world_size,
            groups=reader.groups,
            graph_kind=reader.graph_kind,
            first_index={rank: table.first_index for rank, table in tables.items()},
            source=source,
        )

    @classmethod
    def from_columns(
        cls,
        columns_by_rank: Mapping[int, Mapping[str, Any]],
        *,
        world_size: int,
        groups: Mapping[int, ProcessGroup],
        graph_kind: GraphKind = GraphKind.UNSPECIFIED,
        first_index: Mapping[int, int] | None = None,
        source: str = "<memory>",
    ) -> JobGraph:
        """Build a graph from columns by rank; a missing column is all absent (``kind`` must be there)."""
        ranks = tuple(sorted(columns_by_rank))
        if not ranks:
            raise GraphError(f"{source} has no units at all: there is no graph to work on")
        sizes = [len(columns_by_rank[rank]["kind"]) for rank in ranks]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        columns = {
            name: np.concatenate(
                [_column(name, columns_by_rank[r].get(name), n) for r, n in zip(ranks, sizes, strict=True)]
            )
            for name in COLUMN_TYPES
        }
        first = np.array([0 if first_index is None else first_index[rank] for rank in ranks], dtype=np.int64)
        matched = matching.match(
            columns=columns, offsets=offsets, first_index=first, ranks=ranks, groups=groups, source=source
        )
        for array in [offsets, first, *columns.values(), *matched.values()]:
            array.setflags(write=False)
        return cls(
            graph_kind=graph_kind, world_size=world_size, groups=dict(groups), ranks=ranks, offsets=offsets,
            first_index=first, columns=columns, source=source, **matched,
        )  # fmt: skip

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_events(self) -> int:
        """How many collectives and messages the graph has."""
        return len(self.event_offsets) - 1

    @property
    def has_all_ranks(self) -> bool:
        """Whether every rank of the world is loaded."""
        return len(self.ranks) == self.world_size

    @cached_property
    def rank_of_row(self) -> npt.NDArray[np.int32]:
        """The rank of each row."""
        return np.repeat(np.array(self.ranks, dtype=np.int32), np.diff(self.offsets))

    @cached_property
    def linear_order(self) -> Int64Array:
        """Communication and WAIT rows in an order in which each comes after all that it depends on.

        Raises GraphDeadlockError where there is none.
        """
        order = matching.linearize(self)
        order.setflags(write=False)
        return order

    def rows(self, rank: int) -> slice:
        """The rows of a rank."""
        if rank not in self.ranks:
            raise GraphError(f"rank {rank} is not in the graph {self.source}", hint=f"it has ranks {list(self.ranks)}")
        position = self.ranks.index(rank)
        return slice(int(self.offsets[position]), int(self.offsets[position + 1]))

    def unit_index(self, row: int) -> int:
        """The ``unit_index`` in the file of a row."""
        position = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return int(row - self.offsets[position] + self.first_index[position])

    def group_name(self, group_id: int) -> str:
        """A group for people: its name and ranks."""
        group = self.groups.get(group_id)
        if group is None:
            return f"group {group_id:#x}"
        ranks = list(group.ranks)
        shown = str(ranks) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}: {len(ranks)} ranks]"
        return f"{group.name or hex(group_id)} {shown}"

    def describe(self, row: int) -> str:
        """A unit for people: rank, unit index, kind, operation, group, seq."""
        c = self.columns
        kind = UnitKind(int(c["kind"][row]))
        text = f"rank {self.rank_of_row[row]}, unit {self.unit_index(row)} (step {c['step'][row]}): {kind.name.lower()}"
        if kind in (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV):
            if kind is UnitKind.COLLECTIVE:
                text = text.removesuffix(kind.name.lower()) + Op(int(c["op"][row])).name.lower()
            else:
                text += f" {'to' if kind is UnitKind.SEND else 'from'} rank {c['peer'][row]} tag {c['tag'][row]}"
            text += f" in {self.group_name(int(c['group_id'][row]))} seq {c['seq'][row]}"
        return text
