"""Random jobs for the graph tests, and slow oracles written straight from the definitions of the timing model.

It holds no tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np

from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.plan import START, BoundaryPlan
from prism_sdk.graph.timing import Timing
from prismtrace import ABSENT, GraphKind, Op, ProcessGroup, UnitKind

COMPUTE, COLLECTIVE, SEND, RECV, WAIT = tuple(UnitKind)[1:]


class Program:
    """Writes the rows of a job rank by rank; actions taken in one global order can never deadlock."""

    def __init__(self, world_size: int, groups: dict[int, tuple[int, ...]]) -> None:
        self.world_size = world_size
        self.groups = {
            g: ProcessGroup(group_id=g, name=f"g{g}", description="", backend="gloo", ranks=ranks)
            for g, ranks in groups.items()
        }
        self.rows: dict[int, list[dict[str, Any]]] = {r: [] for r in range(world_size)}
        self.seqs: dict[Any, int] = {}
        self.step = 0

    def _add(self, rank: int, kind: UnitKind, **columns: Any) -> int:
        self.rows[rank].append({"kind": int(kind), "step": self.step, **columns})
        return len(self.rows[rank]) - 1

    def compute(self, rank: int, duration: int, gap: int = ABSENT, **columns: Any) -> None:
        self._add(rank, COMPUTE, start_ns=1000, end_ns=1000 + duration, gap_ns=gap, **columns)

    def collective(self, group_id: int, transfers: Callable[[int], int], op: Op = Op.ALL_REDUCE) -> dict[int, int]:
        seq = self.seqs.setdefault(group_id, 0)
        self.seqs[group_id] += 1
        return {
            r: self._add(r, COLLECTIVE, group_id=group_id, seq=seq, op=int(op), dtype=1, num_elements_in=8,
                         num_elements_out=8, transfer_ns=transfers(r))
            for r in self.groups[group_id].ranks
        }  # fmt: skip

    def send(self, group_id: int, source: int, destination: int, tag: int, transfer: int) -> int:
        return self._message(SEND, source, destination, (group_id, source, destination, tag), transfer)

    def recv(self, group_id: int, source: int, destination: int, tag: int, transfer: int) -> int:
        return self._message(RECV, destination, source, (group_id, source, destination, tag), transfer)

    def _message(self, kind: UnitKind, rank: int, peer: int, key: tuple[int, ...], transfer: int) -> int:
        seq = self.seqs.setdefault((kind, *key), 0)
        self.seqs[(kind, *key)] += 1
        return self._add(
            rank, kind, group_id=key[0], seq=seq, dtype=1, op=int(Op.SEND if kind == SEND else Op.RECV),
            num_elements_in=4, num_elements_out=4, peer=peer, tag=key[3], transfer_ns=transfer,
        )  # fmt: skip

    def wait(self, rank: int, unit: int, wake: int = ABSENT, least: int = ABSENT) -> None:
        self._add(rank, WAIT, awaits=unit, gap_ns=wake, transfer_ns=least)

    def columns(self) -> dict[int, dict[str, list[Any]]]:
        names = {"start_ns", "end_ns", "gap_ns", "transfer_ns", "awaits", "seq", "num_elements_in", "num_elements_out",
                 "tag", "prism.lead_ns"}  # fmt: skip
        others = {"group_id", "op", "dtype", "phase"}
        out: dict[int, dict[str, list[Any]]] = {}
        for rank, rows in self.rows.items():
            out[rank] = {"kind": [row["kind"] for row in rows], "step": [row["step"] for row in rows]}
            out[rank] |= {name: [row.get(name, ABSENT) for row in rows] for name in names}
            out[rank] |= {name: [row.get(name, 0) for row in rows] for name in others}
            out[rank]["peer"] = [row.get("peer", np.iinfo(np.int32).min) for row in rows]
        return out

    def graph(self) -> JobGraph:
        return JobGraph.from_columns(
            self.columns(), world_size=self.world_size, groups=self.groups, graph_kind=GraphKind.CALIBRATED
        )


def random_program(
    seed: int, *, num_steps: int = 3, actions_per_step: int = 14, with_streams: bool = False
) -> Program:
    """A random job: groups of any size, sync and async collectives, messages posted early or late, several steps.

    `with_streams`: communication is posted before or after the host row that it follows, as GPU streams do.
    """
    rng = random.Random(seed)
    world = rng.randint(1, 5)
    groups = {1: tuple(range(world))}
    for g in range(2, 2 + rng.randint(0, 4)):
        groups[g] = tuple(sorted(rng.sample(range(world), rng.randint(1, world))))
    p = Program(world, groups)
    pending: dict[int, list[int]] = {r: [] for r in range(world)}
    late: list[tuple[str, tuple[int, int, int, int], int]] = []
    big = rng.choice([3, 30, 1000])

    def t() -> int:
        return rng.choice([0, rng.randint(0, big), rng.randint(0, big)])

    def wait(rank: int, unit: int) -> None:
        p.wait(rank, unit, wake=rng.choice([ABSENT, t()]), least=rng.choice([ABSENT, 0, t() // 4]))

    def finish(rank: int, unit: int, mode: int) -> None:
        if mode == 0:
            wait(rank, unit)
        else:
            pending[rank].append(unit)

    def complete(index: int) -> None:
        what, key, other = late.pop(index)
        if what == "recv":  # the send came first
            finish(key[2], p.recv(*key, t()), rng.randint(0, 1))
        else:  # the receive was posted first and may be awaited only now
            finish(key[1], p.send(*key, t()), rng.randint(0, 2))
            pending[key[2]].append(other)

    for step in range(num_steps):
        p.step = step
        for _ in range(actions_per_step):
            action = rng.randint(0, 7)
            rank = rng.randrange(world)
            if action <= 1:
                for r in rng.sample(range(world), rng.randint(1, world)):
                    p.compute(r, t(), gap=rng.choice([ABSENT, t() // 3]), phase=rng.randint(1, 4))
            elif action <= 3:
                mode = rng.choice([0, 0, 1, 2])
                for r, unit in p.collective(rng.choice(list(groups)), lambda _: t()).items():
                    finish(r, unit, mode if mode < 2 else rng.randint(0, 1))
            elif action <= 5 and world > 1:
                g = rng.choice([g for g in groups if len(groups[g]) > 1] or [1])
                source, destination = rng.sample(groups[g], 2)
                key = (g, source, destination, rng.randint(0, 1))
                # the halves of earlier messages of this stream come first
                for i in reversed(range(len(late))):
                    if late[i][1] == key:
                        complete(i)
                if rng.random() < 0.6:
                    finish(source, p.send(*key, t()), rng.randint(0, 1))
                    late.append(("recv", key, -1))
                else:
                    late.append(("send", key, p.recv(*key, t())))
            elif action == 6 and pending[rank]:
                wait(rank, pending[rank].pop(rng.randrange(len(pending[rank]))))
            elif late:
                complete(rng.randrange(len(late)))
        if rng.random() < 0.5:
            for r, unit in p.collective(1, lambda _: t()).items():
                wait(r, unit)
    while late:
        complete(len(late) - 1)
    for r in range(world):
        for unit in pending[r]:
            if rng.random() < 0.8:
                wait(r, unit)
        p.compute(r, t())
    if with_streams:
        for row in (row for rows in p.rows.values() for row in rows if row["kind"] in (COLLECTIVE, SEND, RECV)):
            name = rng.choice(["gap_ns", "prism.lead_ns", "prism.lead_ns", ""])
            row |= {name: t()} if name else {}
    return p


def oracle(
    graph: JobGraph, timing: Timing, *, plan: BoundaryPlan | None = None, sandbox: Collection[int] | None = None
) -> dict[int, tuple[int, int]]:
    """Start and end of each row by recursion over the definitions.

    With a plan only the sandbox ranks are evaluated: what virtual ranks do comes from the plan and nothing else.
    """
    c = graph.columns
    own = set(graph.ranks if sandbox is None else sandbox)
    first_rows = {int(row) for row in graph.offsets[:-1]}
    rank_of = graph.rank_of_row
    collectives: dict[tuple[int, int], list[int]] = {}
    messages: dict[tuple[int, ...], dict[int, int]] = {}
    op_of: dict[int, int] = {}
    for row in range(len(graph)):
        if c["kind"][row] == COLLECTIVE:
            collectives.setdefault((int(c["group_id"][row]), int(c["seq"][row])), []).append(row)
        elif c["kind"][row] in (SEND, RECV):
            messages.setdefault(message_key(graph, row), {})[int(c["kind"][row])] = row
    if plan is not None:
        ops = {(int(plan.group_id[j]), int(plan.source_rank[j]), int(plan.destination_rank[j]), int(plan.tag[j]),
                int(plan.seq[j])): j for j in range(len(plan))}  # fmt: skip
        for row in range(len(graph)):
            if c["kind"][row] in (COLLECTIVE, SEND, RECV):
                key = (
                    message_key(graph, row)
                    if c["kind"][row] != COLLECTIVE
                    else (
                        int(c["group_id"][row]),
                        np.iinfo(np.int32).min,
                        np.iinfo(np.int32).min,
                        ABSENT,
                        int(c["seq"][row]),
                    )
                )
                if key in ops:
                    op_of[row] = ops[key]
        rows_of_op: dict[int, list[int]] = {}
        for row, j in op_of.items():
            rows_of_op.setdefault(j, []).append(row)

    def before(row: int) -> int:
        return 0 if row in first_rows else after(row - 1)

    @cache
    def after(row: int) -> int:
        """The host clock after a row."""
        assert int(rank_of[row]) in own, "a virtual rank was looked at"
        kind = c["kind"][row]
        if kind == COMPUTE:
            return before(row) + int(timing.gap_ns[row]) + int(timing.duration_ns[row])
        if kind == WAIT:
            end = before(row) + int(timing.duration_ns[row])
            if graph.awaited_row[row] >= 0:
                end = max(end, completion(int(graph.awaited_row[row])) + int(timing.gap_ns[row]))
            return end
        return before(row)

    def posted(row: int) -> int:
        return before(row) + int(timing.gap_ns[row])

    @cache
    def operation(j: int) -> int:
        assert plan is not None
        posts = [posted(row) for row in rows_of_op[j] if int(rank_of[row]) in own]
        assert posts
        if plan.kind[j] == SEND:
            assert not plan.terms(j)
        return max(posts + [(0 if s == START else operation(s)) + w for s, _, w in plan.terms(j)])

    @cache
    def completion(row: int) -> int:
        transfer = int(timing.transfer_ns[row])
        if c["kind"][row] == SEND:
            return posted(row) + transfer
        if row in op_of:
            assert plan is not None
            assert dict(plan.members(op_of[row]))[int(rank_of[row])] == transfer
            return operation(op_of[row]) + transfer
        if c["kind"][row] == RECV:
            return max(posted(row), posted(messages[message_key(graph, row)][SEND])) + transfer
        group_id, seq = int(c["group_id"][row]), int(c["seq"][row])
        ready = []
        for member in collectives[group_id, seq]:
            ready.append(posted(member))
            if (group_id, seq - 1) in collectives:
                ready += [completion(m) for m in collectives[group_id, seq - 1] if rank_of[m] == rank_of[member]]
        return max(ready) + transfer

    out = {}
    for row in range(len(graph)):
        if int(rank_of[row]) not in own:
            continue
        kind = c["kind"][row]
        if kind == COMPUTE:
            out[row] = (after(row) - int(timing.duration_ns[row]), after(row))
        elif kind == WAIT:
            out[row] = (before(row), after(row))
        else:
            out[row] = (posted(row), completion(row))
    return out


def message_key(graph: JobGraph, row: int) -> tuple[int, ...]:
    """(group, source, destination, tag, seq) of a SEND or RECV row."""
    c = graph.columns
    ends = (int(graph.rank_of_row[row]), int(c["peer"][row]))
    if c["kind"][row] == RECV:
        ends = ends[::-1]
    return (int(c["group_id"][row]), *ends, int(c["tag"][row]), int(c["seq"][row]))
