"""Says what of a trace is still true of a simulation of it, and reads that.

It decides no times and writes nothing. What is true of a unit whenever it runs is kept: what it does, its names, types
and sizes, and what adapters add. Where units are others than in the trace, what ranks handed over is not known, nor
which part of the schedule they are in; in groups of another size a rank has another part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.shares import shared_anew
from prism_sdk.simulate.job import SimJob, SourceRows
from prism_sdk.simulate.memory import UNKNOWN_BYTES
from prism_sdk.simulate.weights import FREE_OF, LEAD, PROVENANCE
from prismtrace import ABSENT, ABSENT32, Op, TraceReader, UnitKind
from prismtrace.rewriting import take
from prismtrace.tables import Column, Table

__all__ = ["kept_scalars", "kept_steps", "kept_units", "structure_of"]

#: What is said of the run that was recorded, or is said anew.
_OF_TIMES = frozenset({"start_ns", "end_ns", "transfer_ns", "gap_ns", LEAD, PROVENANCE, FREE_OF, "prism.issued_ns"})
_OF_VALUES = frozenset({"payload_in", "payload_out"})
_OF_ORDER = frozenset({"prism.schedule"})
_OF_A_STEP = frozenset({"loss", "num_losses", "cpu_time_ns"})
_PEAK, _RESERVED = "memory_peak_bytes", "prism.device_reserved_peak_bytes"


def kept_units(job: SimJob, position: int, reader: TraceReader, source: SourceRows) -> dict[str, Column]:
    """The columns of the units of a rank, but for their times."""
    table = reader.units(int(source.rank[position]), steps=source.steps)
    columns = {name: column for name, column in table.columns().items() if name not in _OF_TIMES}
    if source.steps is None and not source.are_others:
        return columns
    structure = structure_of(job, position)
    if source.rows is not None:
        rows, memory = source.rows[position]
        columns = {name: take(column, rows) for name, column in columns.items() if name not in _OF_ORDER}
        columns["microbatch"] = structure["microbatch"]
        columns["memory_bytes"] = np.where(memory == UNKNOWN_BYTES, ABSENT, memory)
    columns["awaits"] = structure["awaits"]
    if not source.are_others:
        return columns
    columns = {name: column for name, column in columns.items() if name not in _OF_VALUES}
    # communication that does not say what it meets still does not
    meets = (_known(columns, "seq", ABSENT) != ABSENT) & (_known(columns, "kind", 0) == structure["kind"])
    columns["seq"] = np.where(meets, structure["seq"], ABSENT)
    return _in_other_groups(job, reader, source, columns, structure, meets) if source.is_copied else columns


def _known(columns: dict[str, Column], name: str, absent: int) -> npt.NDArray[Any]:
    return np.array(columns.get(name, np.full(len(columns["kind"]), absent)))


def _in_other_groups(
    job: SimJob, reader: TraceReader, source: SourceRows, columns: dict[str, Column],
    structure: dict[str, npt.NDArray[Any]], meets: npt.NDArray[np.bool_],
) -> dict[str, Column]:  # fmt: skip
    """The columns with the groups, peers and sizes where ranks were copied or left out."""
    old, new = _known(columns, "group_id", 0), np.where(meets, structure["group_id"], 0)
    op, dtype, root = (_known(columns, name, absent) for name, absent in (("op", 0), ("dtype", 0), ("peer", ABSENT32)))
    given, got = (_known(columns, name, ABSENT) for name in ("num_elements_in", "num_elements_out"))
    peer, splits = structure["peer"].copy(), {"splits_in", "splits_out"}
    gone: set[str] = set()
    for before, after in set(zip(old[meets].tolist(), new[meets].tolist(), strict=True)):
        rows = np.flatnonzero(meets & (old == before) & (new == after) & (structure["kind"] == UnitKind.COLLECTIVE))
        was, now = reader.groups[before].ranks, job.groups[after].ranks
        if len(rooted := rows[root[rows] != ABSENT32]):
            first = {int(source.rank[rank]): rank for rank in reversed(now)}
            peer[rooted] = [first.get(rank, ABSENT32) for rank in root[rooted].tolist()]
        if len(was) != len(now):
            given[rows], got[rows] = shared_anew(op[rows], dtype[rows], given[rows], got[rows], before=len(was),
                                                 after=len(now))  # fmt: skip
            gone |= splits if (op[rows] == Op.ALL_TO_ALL).any() else set()
    found: dict[str, Column] = {**columns, "group_id": new.astype(np.uint64), "peer": peer, "num_elements_in": given,
                                "num_elements_out": got}  # fmt: skip
    return {name: column for name, column in found.items() if name not in gone}


def kept_steps(reader: TraceReader, source: SourceRows, position: int) -> dict[str, Column]:
    """The columns of the steps of a rank, but for their times; {} where the trace has none."""
    rank = int(source.rank[position])
    columns = _of_steps(reader.steps(rank), source.steps)
    if not source.are_others:
        return columns
    columns = {name: column for name, column in columns.items() if name not in _OF_A_STEP}
    if source.rows is None or _PEAK not in columns:
        return columns
    # it changes by as much as that of units
    before = int(reader.units(rank, steps=source.steps, columns=["memory_bytes"]).memory_bytes.max(initial=-1))
    memory = source.rows[position][1]
    after, peak = int(memory.max(initial=-1)), np.asarray(columns[_PEAK])
    if (memory == UNKNOWN_BYTES).any():
        return {name: column for name, column in columns.items() if name not in (_PEAK, _RESERVED)}
    if after >= 0 and after != before:
        columns = {name: column for name, column in columns.items() if name != _RESERVED}
        columns[_PEAK] = np.where(peak >= 0, peak + after - before, peak)
    return columns


def kept_scalars(reader: TraceReader, source: SourceRows, position: int) -> dict[str, Column]:
    """The named values of a rank; {} where its units are others."""
    if source.are_others:
        return {}
    return _of_steps(reader.scalars(int(source.rank[position])), source.steps)


def _of_steps(table: Table, steps: range | None) -> dict[str, Column]:
    columns = table.columns()
    if steps is None or not columns:
        return columns
    inside = np.isin(table["step"], np.arange(steps.start, steps.stop))
    return {name: take(column, inside) for name, column in columns.items()}


def structure_of(job: SimJob, position: int) -> dict[str, npt.NDArray[Any]]:
    """The registry columns that the simulation knows, of one rank."""
    p, lanes = job.programs, job.lanes
    program = int(job.program[position])
    rows = p.rows(program)
    kind, lane_of = p.kind[rows], p.lane_of[rows]
    is_communication = lane_of >= 0
    mine = lanes.lane[lanes.offsets[position] : lanes.offsets[position + 1]]

    def of_lane(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        nothing: npt.NDArray[Any] = np.zeros(len(kind), column.dtype)  # a rank may communicate nothing
        return column[mine][np.maximum(lane_of, 0)] if len(mine) else nothing

    is_message = is_communication & (kind != UnitKind.COLLECTIVE)
    bounds = p.bounds_of(program)
    step = np.repeat(p.bound_step[bounds], np.diff(p.bounds[bounds], prepend=0))
    op = np.where(kind == UnitKind.SEND, Op.SEND, np.where(kind == UnitKind.RECV, Op.RECV, p.op[rows]))
    # communication that does not say what it meets is a collective to the simulation, also where it was a message
    op = np.where((kind == UnitKind.COLLECTIVE) & ((op == Op.SEND) | (op == Op.RECV)), Op.UNSPECIFIED, op)
    group_id = np.where(is_communication, of_lane(lanes.group_id), 0).astype(np.uint64)
    meets = is_communication & ~np.isin(group_id, job.alone_ids)
    peer = np.where(kind == UnitKind.SEND, of_lane(lanes.destination), of_lane(lanes.source))
    return {
        "kind": kind, "phase": p.phase[rows],
        "op": op.astype(np.uint8),
        "step": step, "microbatch": p.microbatch[rows],
        "group_id": np.where(meets, group_id, 0),
        "seq": np.where(meets, of_lane(lanes.first_seq) + p.ordinal[rows], ABSENT),
        "peer": np.where(is_message, peer, ABSENT32).astype(np.int32),
        "tag": np.where(is_message, of_lane(lanes.tag), ABSENT),
        "awaits": np.where(p.awaited[rows] >= 0, p.awaited[rows].astype(np.int64), ABSENT),
        "stage": np.full(len(kind), job.stage[position] if job.stage[position] >= 0 else ABSENT32, dtype=np.int32),
    }  # fmt: skip
