"""Makes trace files of jobs whose figures are known beforehand; it holds no tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prismtrace import ABSENT, ABSENT32, DType, GraphKind, Op, Phase, ProcessGroup, TraceWriter, UnitKind

ABSENT_VALUES: dict[str, Any] = {
    "kind": 0, "phase": 0, "step": 0, "start_ns": ABSENT, "end_ns": ABSENT, "group_id": 0, "seq": ABSENT, "op": 0,
    "dtype": 0, "num_elements_in": ABSENT, "num_elements_out": ABSENT, "peer": ABSENT32, "tag": ABSENT,
    "is_async": False, "awaits": ABSENT, "transfer_ns": ABSENT, "gap_ns": ABSENT, "memory_bytes": ABSENT,
    "microbatch": ABSENT32, "stage": ABSENT32, "model_chunk": ABSENT32,
    "prism.layer": None, "moe.tokens_per_expert": None,
}  # fmt: skip


class MadeJob:
    """Rows rank by rank, with times that the test chooses; ``write`` makes a file of them."""

    def __init__(self, world_size: int, groups: dict[int, Sequence[int]] | None = None) -> None:
        self.world_size = world_size
        self.groups = groups if groups is not None else {1: range(world_size)}
        self.rows: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(world_size)}
        self.steps: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(world_size)}
        self.seqs: dict[Any, int] = {}

    def add(self, rank: int, kind: UnitKind, start: int, end: int, **columns: Any) -> int:
        self.rows[rank].append({"kind": int(kind), "start_ns": start, "end_ns": end, **columns})
        return len(self.rows[rank]) - 1

    def compute(self, rank: int, start: int, end: int, **columns: Any) -> int:
        return self.add(rank, UnitKind.COMPUTE, start, end, **columns)

    def communicate(
        self, rank: int, start: int, end: int, *, group: int = 1, op: Op = Op.ALL_REDUCE, seq: int | None = None,
        wait: tuple[int, int] | None = None, elements: int = 8, **columns: Any,
    ) -> int:  # fmt: skip
        """A collective, and the WAIT for it; seq counts up for each rank and group."""
        if seq is None:
            seq = self.seqs.get((rank, group), 0)
            self.seqs[rank, group] = seq + 1
        columns = {"num_elements_in": elements, "num_elements_out": elements, "dtype": int(DType.FLOAT32), **columns}
        row = self.add(rank, UnitKind.COLLECTIVE, start, end, group_id=group, seq=seq, op=int(op), **columns)
        if wait is not None:
            self.add(rank, UnitKind.WAIT, *wait, awaits=row, step=columns.get("step", 0))
        return row

    def message(
        self, kind: UnitKind, rank: int, peer: int, start: int, end: int, *, group: int = 1,
        wait: tuple[int, int] | None = None, **columns: Any,
    ) -> int:  # fmt: skip
        """A SEND or RECV, and the WAIT for it."""
        key = (kind, rank, peer, group)
        seq = self.seqs[key] = self.seqs.get(key, -1) + 1
        op = Op.SEND if kind is UnitKind.SEND else Op.RECV
        row = self.add(rank, kind, start, end, group_id=group, seq=seq, op=int(op), peer=peer, tag=0,
                       dtype=int(DType.FLOAT32), num_elements_in=4, num_elements_out=4, **columns)  # fmt: skip
        if wait is not None:
            self.add(rank, UnitKind.WAIT, *wait, awaits=row, step=columns.get("step", 0))
        return row

    def step(self, rank: int, number: int, start: int, end: int) -> None:
        self.steps[rank].append((number, start, end))

    def write(self, path: Path, *, kind: GraphKind = GraphKind.OBSERVED) -> Path:
        path.unlink(missing_ok=True)
        with TraceWriter(path, graph_kind=kind, world_size=self.world_size) as writer:
            for group_id, ranks in self.groups.items():
                writer.add_group(ProcessGroup(group_id=group_id, name=f"g{group_id}", ranks=tuple(ranks)))
            for rank, rows in self.rows.items():
                if rows:
                    names = [name for name in ABSENT_VALUES if any(name in row for row in rows)]
                    writer.add_units(rank, {n: [row.get(n, ABSENT_VALUES[n]) for row in rows] for n in names})
                if self.steps[rank]:
                    table = np.array(self.steps[rank])
                    writer.add_steps(rank, {"step": table[:, 0], "start_ns": table[:, 1], "end_ns": table[:, 2]})
        return path


def pipeline_job(
    num_stages: int, num_microbatches: int, *, forward: int, backward: int, schedule: str = "1f1b", num_chunks: int = 1,
    num_steps: int = 2, slow: Callable[[int], int] = lambda _: 1,
) -> MadeJob:  # fmt: skip
    """A pipeline with free communication, played through by its dependencies. Units are named, messages are left out.

    ``forward`` and ``backward`` are the times of one chunk of one microbatch.
    """
    job = MadeJob(num_stages)
    begin = 0
    for step in range(num_steps):
        begin = _play(job, num_stages, num_microbatches, (forward, backward), schedule, num_chunks, step, begin, slow)
    return job


def _orders(num_stages: int, num_microbatches: int, schedule: str, num_chunks: int) -> list[list[tuple[str, int, int]]]:
    orders = []
    for stage in range(num_stages):
        if schedule == "gpipe":
            order = [("F", m, 0) for m in range(num_microbatches)] + [("B", m, 0) for m in range(num_microbatches)]
        else:
            # Megatron's order of chunks: groups of p microbatches go through all chunks in turn
            turns = [(m, v) for g in range(0, num_microbatches, num_stages) for v in range(num_chunks)
                     for m in range(g, min(g + num_stages, num_microbatches))]  # fmt: skip
            back = [(m, num_chunks - 1 - v) for m, v in turns]
            warm = num_stages - stage - 1 if num_chunks == 1 else (num_stages - stage - 1) * 2 + (
                num_chunks - 1) * num_stages  # fmt: skip
            warm = min(warm, len(turns))
            order = [("F", *turn) for turn in turns[:warm]]
            for index in range(len(turns) - warm):
                order += [("F", *turns[warm + index]), ("B", *back[index])]
            order += [("B", *turn) for turn in back[len(turns) - warm :]]
        orders.append(order)
    return orders


def _play(
    job: MadeJob, p: int, m: int, lengths: tuple[int, int], schedule: str, v: int, step: int, begin: int,
    slow: Callable[[int], int],
) -> int:  # fmt: skip
    done: dict[tuple[str, int, int], int] = {}
    orders, clock, at = _orders(p, m, schedule, v), [begin] * p, [0] * p
    while any(at[s] < len(orders[s]) for s in range(p)):
        moved = False
        for s in range(p):
            while at[s] < len(orders[s]):
                kind, micro, chunk = orders[s][at[s]]
                part = chunk * p + s
                needs = ("F", micro, part - 1) if kind == "F" else ("B", micro, part + 1)
                if kind == "B" and part == p * v - 1:
                    needs = ("F", micro, part)
                if not (kind == "F" and part == 0) and needs not in done:
                    break
                start = max(clock[s], done.get(needs, begin))
                end = start + (lengths[0] if kind == "F" else lengths[1]) * slow(s)
                done[kind, micro, part] = clock[s] = end
                phase = Phase.FORWARD if kind == "F" else Phase.BACKWARD
                chunks = {"model_chunk": chunk} if v > 1 else {}
                job.compute(s, start, end, step=step, phase=int(phase), microbatch=micro, stage=s, **chunks)
                at[s] += 1
                moved = True
        assert moved, "the schedule is deadlocked"
    end = max(clock)
    for s in range(p):
        job.step(s, step, begin, end)
    return end
