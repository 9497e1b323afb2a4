"""Writes pipelines of any size, schedule and number of replicas, with constant times.

It holds no tests.
"""

# ruff: noqa: B023 (the functions are used up inside the loop that defines them)
from __future__ import annotations

from pathlib import Path
from typing import Any

from prismtrace import GraphKind, Op, Phase, ProcessGroup, UnitKind
from tests.simulate.reference import write

FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS, MESSAGE_NS, REDUCE_NS = 400, 900, 150, 30, 120


def pipeline(
    path: Path, *, stages: int = 3, replicas: int = 2, microbatches: int = 4, schedule: str = "1f1b", steps: int = 3,
    glue_ns: int = 0, late_waits: bool = False,
) -> Path:  # fmt: skip
    """Rank = replica * stages + stage; stage s computes s * 10 ns longer. Microbatch m costs m ns more.

    `glue_ns`: before each pass the schedule computes so long, and its unit names no microbatch.
    `late_waits`: a rank asks for the end of what it sent in its next pass, when that has computed.
    """
    world = stages * replicas
    groups = {
        1 + s: ProcessGroup(1 + s, f"dp{s}", "data parallel", "nccl", tuple(range(s, world, stages)))
        for s in range(stages)
    }
    for d in range(replicas):
        members = tuple(range(d * stages, (d + 1) * stages))
        groups[100 + d] = ProcessGroup(100 + d, f"pp{d}", "pipeline", "nccl", members)
    rows: dict[int, list[dict[str, Any]]] = {}
    for rank in range(world):
        stage, replica = rank % stages, rank // stages
        mine: list[dict[str, Any]] = []
        seqs: dict[Any, int] = {}
        sent: list[dict[str, Any]] = []  # waits that are still to come

        def message(kind: UnitKind, peer: int, tag: int, **columns: Any) -> None:
            seq = seqs.setdefault((kind, peer, tag), 0)
            seqs[kind, peer, tag] += 1
            mine.append({"kind": int(kind), "op": int(Op.SEND if kind == UnitKind.SEND else Op.RECV), "peer": peer,
                         "tag": tag, "group_id": 100 + replica, "seq": seq, "transfer_ns": MESSAGE_NS, "dtype": 4,
                         "num_elements_in": 100, "num_elements_out": 100, **columns})  # fmt: skip
            if kind == UnitKind.RECV:
                mine.append({"kind": int(UnitKind.WAIT), "awaits": len(mine) - 1, **columns})
            elif late_waits:
                sent.append({"kind": int(UnitKind.WAIT), "awaits": len(mine) - 1, **columns})

        def part(phase: Phase, m: int, ahead: int, work: int, **columns: Any) -> None:
            known = {"phase": int(phase), "microbatch": m, **columns}
            if glue_ns:
                mine.append({"kind": 1, "start_ns": 0, "end_ns": glue_ns, **columns})
            tag = 0 if phase == Phase.FORWARD else 1
            if 0 <= stage - ahead < stages:
                message(UnitKind.RECV, rank - ahead, tag, **known)
            mine.append({"kind": 1, "start_ns": 0, "end_ns": work + 10 * stage + m, "gap_ns": 2, **known})
            mine.extend(sent)
            sent.clear()
            if 0 <= stage + ahead < stages:
                message(UnitKind.SEND, rank + ahead, tag, **known)

        for step in range(steps):
            fixed = {"step": step, "stage": stage}
            warmup = microbatches if schedule == "gpipe" else min(stages - stage - 1, microbatches)
            for m in range(warmup):
                part(Phase.FORWARD, m, 1, FORWARD_NS, **fixed)
            for m in range(warmup, microbatches):
                part(Phase.FORWARD, m, 1, FORWARD_NS, **fixed)
                part(Phase.BACKWARD, m - warmup, -1, BACKWARD_NS, **fixed)
            for m in range(microbatches - warmup, microbatches):
                part(Phase.BACKWARD, m, -1, BACKWARD_NS, **fixed)
            mine.extend(sent)
            sent.clear()
            sizes = {"num_elements_in": 1000, "num_elements_out": 1000, "dtype": 4}
            mine.append({"kind": 2, "op": int(Op.ALL_REDUCE), "phase": 2, "group_id": 1 + stage, "seq": step,
                         "transfer_ns": REDUCE_NS, **sizes, **fixed})  # fmt: skip
            mine.append({"kind": 5, "phase": 2, "awaits": len(mine) - 1, **fixed})
            mine.append({"kind": 1, "phase": 3, "start_ns": 0, "end_ns": OPTIMIZER_NS, **fixed})
        rows[rank] = mine
    return write(path, rows, groups, kind=GraphKind.CALIBRATED)
