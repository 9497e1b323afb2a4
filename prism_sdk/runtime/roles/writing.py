"""The trace of all ranks of a job, from the trace of those that ran.

Responsible for what stands in the file; which ranks are alike was decided before (layout.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from prism_sdk.runtime.roles.layout import Families, RolePlan
from prism_sdk.runtime.roles.mapping import Mapper
from prismtrace import ProcessGroup, TableKind, TraceReader, TraceWriter, add_alike


def write_all_ranks(
    ran: Path, output: Path, *, plan: RolePlan, families: Families, mapper: Mapper, metadata: Mapping[str, str]
) -> None:
    """Write the trace of the whole world to `output`, which appears when it is complete.

    Ranks that ran and stand for nobody (samples) keep their own rows.
    """
    with (
        TraceReader(ran) as reader,
        TraceWriter(
            output, graph_kind=reader.graph_kind, world_size=plan.world_size, metadata={**reader.metadata, **metadata},
            overwrite=True, atomic=True,
        ) as writer,
    ):  # fmt: skip
        writer.add_groups(
            ProcessGroup(fact.group_id, fact.name, fact.description, fact.backend, fact.ranks)
            for fact in families.groups()
        )
        for digest in reader.payload_digests:
            writer.add_payload(reader.payload(digest))
        for role, rank in enumerate(plan.representatives):
            ranks = sorted({rank, *plan.represented(role).tolist()})
            _write_role(reader, writer, rank, ranks, mapper)
        for rank in plan.samples:
            _write_own(reader, writer, rank)


def _write_own(reader: TraceReader, writer: TraceWriter, rank: int) -> None:
    writer.add_units(rank, reader.units(rank))
    for table, add in (
        (reader.steps(rank), writer.add_steps), (reader.scalars(rank), writer.add_scalars),
        (reader.events(rank), writer.add_events), (reader.tracks(rank), writer.add_tracks),
    ):  # fmt: skip
        if len(table):
            add(rank, table)


def _write_role(reader: TraceReader, writer: TraceWriter, rank: int, ranks: Sequence[int], mapper: Mapper) -> None:
    if len(ranks) == 1:
        _write_own(reader, writer, rank)
        return
    units = reader.units(rank)
    state = hashlib.blake2b(f"{rank} of {len(ranks)}".encode(), digest_size=8)
    for name in ("kind", "group_id", "start_ns"):
        state.update(units[name].tobytes())
    role = int.from_bytes(state.digest(), "little") or 1
    add_alike(writer, ranks, units, role=role, replaced=mapper.columns(units, rank, ranks))
    for kind, table in (
        (TableKind.STEPS, reader.steps(rank)), (TableKind.SCALARS, reader.scalars(rank)),
        (TableKind.EVENTS, reader.events(rank)), (TableKind.TRACKS, reader.tracks(rank)),
    ):  # fmt: skip
        if len(table):
            add_alike(writer, ranks, table, role=role, table=kind)
