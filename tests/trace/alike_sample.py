"""Random traces of jobs whose ranks are stored by roles: alike, with values of their own, or without some rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from prismtrace import ProcessGroup, TableKind, TraceWriter, add_alike
from prismtrace.chunk import encode_members
from prismtrace.columns import normalise
from prismtrace.model import ABSENT32, ROLE_RANK

NUM_RANKS = 8
_KINDS = (1, 2, 3, 4, 5)  # compute, collective, send, recv, wait


def write_job(data: st.DataObject, path: Path) -> Path:
    """Two roles of three ranks each, and two ranks of their own; what they do is drawn, sense is not asked for."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    digests = []
    with TraceWriter(path, world_size=NUM_RANKS, metadata={"a": "b"}) as writer:
        writer.add_groups(
            [ProcessGroup(1, ranks=tuple(range(NUM_RANKS))), ProcessGroup(2, ranks=(0, 2, 4)),
             ProcessGroup(3, ranks=(1, 3, 5)), ProcessGroup(4, ranks=(0, 1)), ProcessGroup(5, ranks=(2, 3))]
        )  # fmt: skip
        digests = [writer.add_payload(bytes([number]) * 9) for number in range(2)]
        for role, ranks in ((7, (0, 2, 4)), (9, (1, 3, 5))):
            _write_role(data, rng, writer, role, ranks, digests)
        for rank in (6, 7):
            writer.add_units(rank, _units(rng, int(rng.integers(1, 12)), digests))
    return path


def _write_role(
    data: st.DataObject, rng: np.random.Generator, writer: TraceWriter, role: int, ranks: tuple[int, ...],
    digests: list[bytes],
) -> None:  # fmt: skip
    num_rows = int(rng.integers(1, 24))
    columns = _units(rng, num_rows, digests)
    if data.draw(st.booleans()):
        _write_with_a_gap(writer, role, ranks, columns)
        return
    replaced = {
        name: (rng.integers(-1, 2, num_rows), rng.integers(0, most, (2, len(ranks))))
        for name, most in (("group_id", 6), ("peer", NUM_RANKS), ("stage", 3), ("own.number", 4))
        if data.draw(st.booleans())
    }
    if data.draw(st.integers(0, 4)) == 0:
        replaced["step"] = (np.zeros(num_rows, np.int64), rng.integers(0, 3, (1, len(ranks))))
    add_alike(writer, ranks, columns, role=role, replaced=replaced)
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


def _write_with_a_gap(writer: TraceWriter, role: int, ranks: tuple[int, ...], columns: dict[str, object]) -> None:
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


def _units(rng: np.random.Generator, num_rows: int, digests: list[bytes]) -> dict[str, object]:
    kind = rng.choice(_KINDS, num_rows)
    start = np.sort(rng.integers(0, 300, num_rows))
    earlier = [int(rng.integers(0, max(row, 1))) if k == 5 and row else None for row, k in enumerate(kind.tolist())]
    return {
        "kind": kind,
        "step": np.minimum(start // 100, 2).astype(np.int32),
        "start_ns": start,
        "end_ns": start + rng.integers(0, 20, num_rows),
        "group_id": np.where(kind == 1, 0, rng.integers(1, 6, num_rows)).astype(np.uint64),
        "op": np.where(kind == 2, 1, np.where(kind == 3, 9, np.where(kind == 4, 10, 0))).astype(np.uint8),
        "seq": np.where(kind < 5, np.arange(num_rows), -(2**63)),
        "peer": np.where((kind == 3) | (kind == 4), rng.integers(0, NUM_RANKS, num_rows), ABSENT32).astype(np.int32),
        "stage": rng.integers(0, 3, num_rows).astype(np.int32),
        "awaits": earlier,
        "label": [None if value == 0 else f"l{value}" for value in rng.integers(0, 3, num_rows).tolist()],
        "payload_in": [digests[value] if value < 2 else None for value in rng.integers(0, 3, num_rows).tolist()],
        "own.number": rng.integers(0, 4, num_rows),
    }
