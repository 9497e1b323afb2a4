"""What calibrate and emulate need of a trace that was recorded by roles: who ran, a small job like it, and a copy.

Responsible for reading roles back from a trace and for writing it with other times; nothing is run here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.errors import UnreadableError
from prism_sdk.graph.folding import fold_alike
from prism_sdk.graph.job import JobGraph
from prism_sdk.runtime.roles.mapping import DIFFERING
from prismtrace import GraphKind, TableKind, TraceReader, TraceWriter, UnitTable, add_alike

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class RecordedRoles:
    """`running`: the ranks that had a process, ascending. `stands_for`: by rank, whose rows it has."""

    running: tuple[int, ...]
    stands_for: Int64Array

    @classmethod
    def of(cls, reader: TraceReader) -> RecordedRoles | None:
        """The roles that a trace was recorded by; None where every rank ran.

        Raises UnreadableError where the trace contradicts itself.
        """
        if "roles.representatives" not in reader.metadata:
            return None
        stands_for = np.arange(reader.world_size, dtype=np.int64)
        try:
            representatives = np.array(json.loads(reader.metadata["roles.representatives"]), np.int64).reshape(-1)
            samples = np.array(json.loads(reader.metadata.get("roles.samples", "[]")), np.int64).reshape(-1)
            running = np.unique(np.concatenate([representatives, samples]))
            if not len(running) or not set(running.tolist()) <= set(reader.ranks):
                raise ValueError("ranks that it does not have stand for others")
            for ranks in reader.roles.values():
                standing = np.intersect1d(ranks, representatives)
                if len(standing) != 1:
                    raise ValueError(f"{len(standing)} ranks stand for those of one role")
                stands_for[list(ranks)] = standing[0]
        except (ValueError, TypeError, OverflowError) as error:
            raise UnreadableError(reader.path, reason=f"its roles cannot be read: {error}") from error
        return cls(tuple(running.tolist()), stands_for)


@dataclass(frozen=True)
class SmallJob:
    """A job of the ranks that differ. `path`: its trace. `stands_for`: of those ranks that did not run."""

    path: Path
    ranks: tuple[int, ...]
    stands_for: Mapping[int, int] = field(default_factory=dict)
    group_sizes: Mapping[int, int] = field(default_factory=dict)
    """How many members each group has in the whole job."""


def small_job(source: Path, output: Path) -> SmallJob | None:
    """The small job of a trace recorded by roles, written to `output`; None where every rank ran.

    It has the ranks that ran, with their own groups, and of all others one of each kind.
    """
    with TraceReader(source) as reader:
        roles = RecordedRoles.of(reader)
        if roles is None:
            return None
        from prism_sdk.simulate.loading import load  # brings numba, which ranks do without

        job = load(reader, with_sizes=False, transfers_needed=False)
        folded = fold_alike(reader, job, alone=roles.running, stands_for=roles.stands_for.tolist())
        if folded is None:
            sizes = {group_id: len(group.ranks) for group_id, group in reader.groups.items()}
            return SmallJob(source, roles.running, _of(roles, reader.ranks), sizes)
        _write_graph(folded.graph, reader, output)
        return SmallJob(output, roles.running, _of(roles, folded.graph.ranks), folded.group_sizes)


def _of(roles: RecordedRoles, ranks: Sequence[int]) -> dict[int, int]:
    return {rank: int(roles.stands_for[rank]) for rank in ranks if roles.stands_for[rank] != rank}


def _write_graph(graph: JobGraph, reader: TraceReader, output: Path) -> None:
    with TraceWriter(output, graph_kind=graph.graph_kind, world_size=graph.world_size, overwrite=True) as writer:
        writer.add_groups(graph.groups.values())
        for rank in graph.ranks:
            rows = graph.rows(rank)
            writer.add_units(rank, {name: column[rows] for name, column in graph.columns.items()})
            steps = reader.steps(rank)
            if len(steps):
                writer.add_steps(rank, steps)


def write_times_by_roles(
    source: Path, output: Path, *, times: Callable[[int], Mapping[str, NDArray[Any]]],
    steps: Callable[[TraceReader, int], dict[str, Any]], graph_kind: GraphKind, metadata: Mapping[str, str],
) -> None:  # fmt: skip
    """Write a copy of `source` in which all ranks of a role have the times of the one that ran; whole or not at all.

    Args:
        times: the columns that replace those of a rank that ran.
        steps: the step rows of a rank that ran.
    """
    with TraceReader(source) as reader:
        roles = RecordedRoles.of(reader)
        assert roles is not None
        facts = {**reader.metadata, **metadata}
        with TraceWriter(
            output, graph_kind=graph_kind, world_size=reader.world_size, metadata=facts, overwrite=True, atomic=True
        ) as writer:
            writer.add_groups(reader.groups.values())
            for digest in reader.payload_digests:
                writer.add_payload(reader.payload(digest))
            alone = set(reader.ranks)
            for role, ranks in reader.roles.items():
                alone -= set(ranks)
                rank = int(roles.stands_for[ranks[0]])
                units = reader.units(rank)
                columns = {**units.columns(), **times(rank)}
                add_alike(writer, ranks, columns, role=role, replaced=_replaced(reader, units, ranks))
                for kind, table in (
                    (TableKind.STEPS, steps(reader, rank)), (TableKind.SCALARS, reader.scalars(rank)),
                ):  # fmt: skip
                    if len(table):
                        add_alike(writer, ranks, table, role=role, table=kind)
            for rank in sorted(alone):
                writer.add_units(rank, {**reader.units(rank).columns(), **times(rank)})
                writer.add_steps(rank, steps(reader, rank))
                writer.add_scalars(rank, reader.scalars(rank))


def _replaced(
    reader: TraceReader, units: UnitTable, ranks: Sequence[int]
) -> dict[str, tuple[Int64Array, Int64Array]]:  # fmt: skip
    """How the ranks of a role differ, as `add_alike` takes it: rows that differ in one way have one number."""
    codes = {name: np.zeros(len(units), np.int64) for name in DIFFERING}
    own = {name: units[name] for name in DIFFERING}
    for rank in ranks:
        table = reader.units(rank, columns=DIFFERING)
        for name in DIFFERING:
            if table[name] is not own[name]:
                codes[name] = _finer(codes[name], table[name])
    found = {}
    for name in DIFFERING:
        code = _finer(codes[name], own[name])
        _, first = np.unique(code, return_index=True)
        values = np.stack([_wide(reader.units(rank, columns=[name])[name][first]) for rank in ranks], axis=1)
        if (values != values[:, :1]).any():
            found[name] = code, values
    return found


def _wide(column: NDArray[Any]) -> Int64Array:
    return column.view(np.int64) if column.dtype == np.uint64 else column.astype(np.int64)


def _finer(codes: Int64Array, column: NDArray[Any]) -> Int64Array:
    values, inverse = np.unique(column, return_inverse=True)
    if len(values) == 1:
        return codes
    return np.unique(codes * len(values) + inverse.reshape(-1), return_inverse=True)[1].reshape(-1)
