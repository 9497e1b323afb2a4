"""Makes random jobs whose ranks are alike, as files that store them by roles and as files that store each; no tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from made_jobs import ABSENT_VALUES
from numpy.typing import NDArray

from prismtrace import (
    ABSENT32,
    DType,
    GraphKind,
    Op,
    Phase,
    ProcessGroup,
    TableKind,
    TraceWriter,
    UnitKind,
    add_alike,
)

_REPLACED = ("group_id", "peer", "num_elements_in", "num_elements_out")
_WORLD = 1


@dataclass
class AlikeJob:
    """Ranks in a grid (dp, pp, tp); replicas along dp do the same at the same times, but for those that stand alone."""

    rng: np.random.Generator
    dp: int
    pp: int
    tp: int
    waits: bool
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    steps: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    def rank(self, dp: int, pp: int, tp: int) -> int:
        return (dp * self.pp + pp) * self.tp + tp

    @classmethod
    def random(cls, seed: int) -> AlikeJob:
        rng = np.random.default_rng(seed)
        job = cls(rng, int(rng.integers(5, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 3)),
                  bool(rng.random() < 0.8))  # fmt: skip
        job.groups = {_WORLD: tuple(range(job.world))}
        for d in range(job.dp):
            job.groups[100 + d] = tuple(job.rank(d, p, 0) for p in range(job.pp))
            for p in range(job.pp):
                job.groups[200 + d * job.pp + p] = tuple(job.rank(d, p, t) for t in range(job.tp))
        for p in range(job.pp):
            for t in range(job.tp):
                job.groups[300 + p * job.tp + t] = tuple(job.rank(d, p, t) for d in range(job.dp))
        program = ["compute", *(str(rng.choice(_PARTS)) for _ in range(int(rng.integers(1, 8))))]
        job._play(program, num_steps=int(rng.integers(1, 3)))
        for rank in rng.choice(job.world, int(rng.integers(0, 3)), replace=False).tolist():
            job._leave(rank, int(rng.integers(-200, 200)))
        return job

    def _play(self, program: list[str], *, num_steps: int) -> None:
        clock = np.zeros((self.pp, self.tp), dtype=np.int64)
        self.rows = {rank: [] for rank in range(self.world)}
        self.steps = {rank: [] for rank in range(self.world)}
        seqs: dict[Any, int] = {}
        for step in range(num_steps):
            begin = clock.copy()
            for number, part in enumerate(program):
                self._part(part, clock, step, f"{step} {number}", number, seqs)
            for rank in self.steps:
                _, p, t = self._place(rank)
                self.steps[rank].append((step, int(begin[p, t]), int(clock[p, t])))

    def _place(self, rank: int) -> tuple[int, int, int]:
        return rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp

    def _part(
        self, part: str, clock: NDArray[np.int64], step: int, what: str, number: int, seqs: dict[Any, int]
    ) -> None:
        common = {"step": step, "prism.layer": f"layer{number}" if number % 2 else None, "phase": int(Phase.FORWARD)}
        if part == "compute":
            lasts = self.rng.integers(1, 300, clock.shape)
            for rank, rows in self.rows.items():
                d, p, t = self._place(rank)
                rows.append({**common, "kind": UnitKind.COMPUTE, "start_ns": clock[p, t],
                             "end_ns": clock[p, t] + lasts[p, t], "memory_bytes": int(lasts[p, t]) * 100,
                             "microbatch": number, "stage": p,
                             "phase": int(Phase.FORWARD if number % 2 else Phase.BACKWARD)})  # fmt: skip
            clock += lasts + self.rng.integers(0, 4, clock.shape)
            return
        if part in ("chain", "ring"):
            self._messages(part, clock, common, seqs)
            return
        post = clock + self.rng.integers(0, 3, clock.shape)
        ready = {"tp": post.max(axis=1, keepdims=True), "world": post.max(), "dp": post, "loads": post,
                 "root": post.max(axis=1, keepdims=True)}[part]  # fmt: skip
        done = np.broadcast_to(ready, post.shape) + self.rng.integers(1, 60, post.shape)
        op = {"loads": Op.ALL_TO_ALL, "root": Op.BROADCAST}.get(part, Op.ALL_REDUCE)
        for rank in self.rows:
            d, p, t = self._place(rank)
            group = {"tp": 200 + d * self.pp + p, "root": 200 + d * self.pp + p, "world": _WORLD}.get(
                part, 300 + p * self.tp + t)  # fmt: skip
            load = 8 + (d % 3 if part == "loads" else 0)
            seq = seqs[rank, group] = seqs.get((rank, group), -1) + 1
            peer = self.groups[group][0] if part == "root" else ABSENT32
            self._communicate(rank, common, (int(post[p, t]), int(done[p, t])), kind=UnitKind.COLLECTIVE, op=op,
                              group_id=group, seq=seq, peer=peer, num_elements_in=8, num_elements_out=load)  # fmt: skip
        clock[:] = done

    def _messages(self, part: str, clock: NDArray[np.int64], common: dict[str, Any], seqs: dict[Any, int]) -> None:
        """To the next stage (`chain`), or to the next replica, around (`ring`)."""
        post = clock + self.rng.integers(0, 3, clock.shape)
        done = np.full_like(clock, post.max() + int(self.rng.integers(1, 60)))
        for rank in self.rows:
            d, p, t = self._place(rank)
            after, before = (p + 1, p - 1) if part == "chain" else ((d + 1) % self.dp, (d - 1) % self.dp)
            for kind, other in ((UnitKind.SEND, after), (UnitKind.RECV, before)):
                if part == "chain" and not 0 <= other < self.pp:
                    continue
                peer = self.rank(d, other, t) if part == "chain" else self.rank(other, p, t)
                seq = seqs[rank, peer, kind, part] = seqs.get((rank, peer, kind, part), -1) + 1
                self._communicate(rank, common, (int(post[p, t]), int(done[p, t])), kind=kind, group_id=_WORLD, seq=seq,
                                  op=Op.SEND if kind is UnitKind.SEND else Op.RECV, peer=peer,
                                  tag=1 if part == "ring" else 0, num_elements_in=4, num_elements_out=4)  # fmt: skip
        clock[:] = done

    def _communicate(self, rank: int, common: dict[str, Any], times: tuple[int, int], **columns: Any) -> None:
        rows, (post, done) = self.rows[rank], times
        rows.append({**common, "start_ns": post, "end_ns": done, "is_async": self.waits, "dtype": int(DType.FLOAT32),
                     **columns})  # fmt: skip
        if self.waits:
            rows.append({**common, "kind": UnitKind.WAIT, "start_ns": post, "end_ns": done, "awaits": len(rows) - 1})

    def _leave(self, rank: int, later: int) -> None:
        """The rank has times of its own, and so no role."""
        self.alone.add(rank)
        for row in self.rows[rank]:
            row["start_ns"], row["end_ns"] = row["start_ns"] + later, row["end_ns"] + later
        self.steps[rank] = [(step, start + later, end + later) for step, start, end in self.steps[rank]]

    def write(self, path: Path, *, by_roles: bool) -> Path:
        """A file with one role for each place in (pp, tp), or with each rank by itself."""
        path.unlink(missing_ok=True)
        with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=self.world) as writer:
            for group_id, ranks in self.groups.items():
                writer.add_group(ProcessGroup(group_id=group_id, name=f"g{group_id}", ranks=ranks))
            for number in range(self.pp * self.tp):
                ranks = [r for r in range(number, self.world, self.pp * self.tp) if not by_roles or r not in self.alone]
                self._write(writer, ranks, role=number + 1 if by_roles else 0)
            if by_roles:
                self._write(writer, sorted(self.alone), role=0)
        return path

    def _write(self, writer: TraceWriter, ranks: list[int], *, role: int) -> None:
        columns = {rank: self._columns(rank) for rank in ranks}
        steps = {rank: dict(zip(("step", "start_ns", "end_ns"), np.array(self.steps[rank]).T, strict=True))
                 for rank in ranks}  # fmt: skip
        if not role:
            for rank in ranks:
                writer.add_units(rank, columns[rank])
                writer.add_steps(rank, steps[rank])
            return
        replaced = {}
        for name in _REPLACED:
            values = np.array([columns[rank][name] for rank in ranks], dtype=np.int64)
            rows = np.flatnonzero((values != values[0]).any(axis=0))
            if len(rows):
                distinct, codes = np.unique(values[:, rows], axis=1, return_inverse=True)
                code_of_row = np.full(values.shape[1], -1)
                code_of_row[rows] = codes.reshape(-1)
                replaced[name] = (code_of_row, distinct.T)
        add_alike(writer, ranks, columns[ranks[0]], role=role, replaced=replaced)
        add_alike(writer, ranks, steps[ranks[0]], role=role, table=TableKind.STEPS)

    def _columns(self, rank: int) -> dict[str, list[Any]]:
        names = [name for name in ABSENT_VALUES if name not in ("moe.tokens_per_expert", "transfer_ns", "gap_ns")]
        return {name: [row.get(name, ABSENT_VALUES[name]) for row in self.rows[rank]] for name in names}


_PARTS = ("compute", "compute", "tp", "dp", "world", "chain", "ring", "loads", "root")
