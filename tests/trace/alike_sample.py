"""Random traces of jobs whose ranks are stored by roles: alike, with values of their own, or without some rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from prismtrace import ProcessGroup, TableKind, TraceWriter, add_alike
from prismtrace.chunk import encode_members
from prismtrace.columns import normalise
from prismtrace.model import ABSENT32, ROLE_RANK

NUM_RANKS = 8
GROUPS = {2: (0, 2, 4), 3: (1, 3, 5), 4: (0, 1), 5: (2, 3)}
_KINDS = (1, 2, 3, 4, 5)  # compute, collective, send, recv, wait


def write_job(data: st.DataObject, path: Path, *, in_order: bool = False) -> Path:
    """Two roles of three ranks each, and two ranks of their own; what they do is drawn.

    `in_order`: each rank makes sense by itself, which is not asked for otherwise.
    """
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    digests = []
    with TraceWriter(path, world_size=NUM_RANKS, metadata={"a": "b"}) as writer:
        writer.add_groups(
            [ProcessGroup(1, ranks=tuple(range(NUM_RANKS))), *(ProcessGroup(key, ranks=GROUPS[key]) for key in GROUPS)]
        )
        digests = [writer.add_payload(bytes([number]) * 9) for number in range(2)]
        for role, ranks in ((7, (0, 2, 4)), (9, (1, 3, 5))):
            _write_role(data, rng, writer, role, ranks, digests, in_order=in_order)
        for rank in (6, 7):
            writer.add_units(rank, _units(rng, int(rng.integers(1, 12)), digests, in_order=in_order))
    return path


def _write_role(
    data: st.DataObject, rng: np.random.Generator, writer: TraceWriter, role: int, ranks: tuple[int, ...],
    digests: list[bytes], *, in_order: bool,
) -> None:  # fmt: skip
    num_rows = int(rng.integers(1, 24))
    columns = _units(rng, num_rows, digests, in_order=in_order)
    if data.draw(st.integers(0, 3)) == 0:
        _write_with_a_gap(writer, role, ranks, columns)
        return
    replaced = {
        name: (rng.integers(-1, 2, num_rows), rng.integers(0, most, (2, len(ranks))))
        for name, most in (("group_id", 6), ("peer", NUM_RANKS), ("stage", 3), ("own.number", 4))
        if data.draw(st.booleans())
    }
    if in_order and "group_id" in replaced:
        replaced["group_id"] = _groups_of(rng, ranks, columns)
    if not in_order and data.draw(st.integers(0, 4)) == 0:
        replaced["step"] = (np.zeros(num_rows, np.int64), rng.integers(0, 3, (1, len(ranks))))
    add_alike(writer, ranks, columns, role=role, replaced=replaced)
    if in_order and data.draw(st.booleans()):
        return
    steps = {"step": np.arange(3), "start_ns": np.arange(3) * 100, "end_ns": np.arange(3) * 100 + 90, "loss": [1.0] * 3}
    if data.draw(st.booleans()):
        add_alike(writer, ranks, steps, role=role, table=TableKind.STEPS)
    elif data.draw(st.booleans()):
        for rank in ranks[:2]:  # the last one lacks them
            writer.add_steps(rank, steps)
    if data.draw(st.booleans()):
        events = {"name": ["x", "y", "z"], "start_ns": [0, 120, 250], "end_ns": [9, 130, 260], "track": [0, 0, 0],
                  "unit": [0, num_rows - 1, None]}  # fmt: skip
        add_alike(writer, ranks, {"name": ["t"], "kind": [1]}, role=role, table=TableKind.TRACKS)
        add_alike(writer, ranks, events, role=role, table=TableKind.EVENTS)


def _write_with_a_gap(writer: TraceWriter, role: int, ranks: tuple[int, ...], columns: dict[str, Any]) -> None:
    """Rows of which one in the middle is missing, for the last rank all after it too."""
    rows = normalise(TableKind.UNITS, columns)
    middle = rows.num_rows // 2
    for start, stop, mine in ((0, middle, ranks), (middle + 1, rows.num_rows, ranks[:-1])):
        if stop > start:
            for template in writer.put_rows(TableKind.UNITS, ROLE_RANK, start, rows.part(start, stop), role=role):
                same = template.differences(template.rows)
                writer.put(
                    encode_members(TableKind.UNITS, ranks=mine, first_row=start, role=role, template=template,
                                   differences=[same] * len(mine))
                )  # fmt: skip


def _groups_of(
    rng: np.random.Generator, ranks: tuple[int, ...], columns: dict[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For collectives of the world in some cases a smaller group that a rank is in, maybe of no other."""
    smaller = [[group for group, members in GROUPS.items() if rank in members] for rank in ranks]
    values = np.array([[rng.choice(groups) for groups in smaller] for _ in range(2)])
    is_collective = (columns["kind"] == 2) & (columns["group_id"] == 1)
    return np.where(is_collective, rng.integers(-1, 2, len(is_collective)), -1), values


def _units(rng: np.random.Generator, num_rows: int, digests: list[bytes], *, in_order: bool = False) -> dict[str, Any]:
    kind = rng.choice(_KINDS, num_rows)
    start = np.arange(num_rows) * 13 if in_order else np.sort(rng.integers(0, 300, num_rows))
    earlier: list[int | None] = [None] * num_rows
    for row in np.flatnonzero(kind == 5).tolist():
        before = np.flatnonzero((kind[:row] > 1) & (kind[:row] < 5)) if in_order else np.arange(row)
        if len(before):
            earlier[row] = int(rng.choice(before))
        elif in_order:
            kind[row] = 1
    return {
        "kind": kind,
        "step": np.minimum(start // 100, 2).astype(np.int32),
        "start_ns": start,
        "end_ns": start + rng.integers(0, 13 if in_order else 20, num_rows),
        "group_id": np.where(kind == 1, 0, 1 if in_order else rng.integers(1, 6, num_rows)).astype(np.uint64),
        "op": np.where(kind == 2, 1, np.where(kind == 3, 10, np.where(kind == 4, 11, 0))).astype(np.uint8),
        "seq": np.where(kind < 5, np.arange(num_rows), -(2**63)),
        "peer": np.where((kind == 3) | (kind == 4), rng.integers(0, NUM_RANKS, num_rows), ABSENT32).astype(np.int32),
        "stage": rng.integers(0, 3, num_rows).astype(np.int32),
        "awaits": earlier,
        "label": [None if value == 0 else f"l{value}" for value in rng.integers(0, 3, num_rows).tolist()],
        "payload_in": [digests[value] if value < 2 else None for value in rng.integers(0, 3, num_rows).tolist()],
        "own.number": rng.integers(0, 4, num_rows),
    }
