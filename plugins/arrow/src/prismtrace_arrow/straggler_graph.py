"""Makes a graph that can be simulated of the straggler study's tables: what waits for what, and how long each lasts.

It reads no file (``mapping`` does), and supports pipelines without virtual stages.

The dependencies are those that the study describes: computing of a stage in order; a receive after computing of its
kind before, and before its own; a send after its computing; the last gradients, then the reductions, the clipping that
all ranks join, and the optimizer. A send and its receive are one operation of two ranks. A transfer is the end less the
last start of all members; the gap before a unit is the study's launch delay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prism_sdk.errors import UsageError
from prismtrace import ABSENT, ABSENT32, Op, Phase, ProcessGroup, UnitKind
from prismtrace_arrow.mapping import Units

__all__ = ["StragglerGraph", "graph_of"]

_WORLD = 1


@dataclass
class StragglerGraph:
    """Columns of units by rank, and the groups that they are in."""

    columns: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: dict[int, ProcessGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class _Operation:
    start: int
    end: int
    microbatch: int


def graph_of(units: Units, *, dp_of: Callable[[int], int], stage_of: Callable[[int], int]) -> StragglerGraph:
    """The graph of one job; raises UsageError where operations of the study are missing or not understood."""
    label = units.texts("label")
    names = [label.values[code] if code >= 0 else "" for code in label.codes]
    if (units.numbers("model_chunk") > 0).any():
        raise UsageError("the job has virtual stages: its dependencies cannot be made up yet",
                         hint="import it without -O dependencies=true")  # fmt: skip
    ranks = np.unique(units.rank).tolist()
    place = {(dp_of(rank), stage_of(rank)): rank for rank in ranks}
    num_stages = 1 + max(stage for _, stage in place)
    by_step: dict[int, dict[int, dict[str, list[_Operation]]]] = {}
    rows = np.lexsort((units.numbers("start_ns"), units.numbers("step")))
    columns = [units.numbers(name).tolist() for name in ("step", "start_ns", "end_ns", "microbatch")]
    for row in rows.tolist():
        step, start, end, microbatch = (column[row] for column in columns)
        mine = by_step.setdefault(step, {}).setdefault(int(units.rank[row]), {})
        mine.setdefault(names[row], []).append(_Operation(start, end, microbatch))
    maker = _Maker(ranks, place, num_stages)
    for step, found in sorted(by_step.items()):
        maker.step(step, found)
    return maker.graph()


class _Maker:
    def __init__(self, ranks: list[int], place: dict[tuple[int, int], int], num_stages: int) -> None:
        self.ranks, self.place, self.num_stages = ranks, place, num_stages
        self.where = {rank: where for where, rank in place.items()}
        self.rows: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
        self.groups: dict[tuple[Any, ...], ProcessGroup] = {}
        self.seqs: dict[tuple[int, int], int] = {}
        self.group("world", tuple(ranks), "world")

    def group(self, name: str, members: tuple[int, ...], about: str) -> int:
        """The id of a group, made where it is new."""
        key = (name, members)
        if key not in self.groups:
            self.groups[key] = ProcessGroup(len(self.groups) + 1, name, about, "nccl", members)
        return self.groups[key].group_id

    def graph(self) -> StragglerGraph:
        """All rows as columns."""
        made = StragglerGraph(groups={group.group_id: group for group in self.groups.values()})
        empty = {"start_ns": ABSENT, "end_ns": ABSENT, "seq": ABSENT, "awaits": ABSENT, "transfer_ns": ABSENT,
                 "gap_ns": ABSENT, "microbatch": ABSENT32, "label": None}  # fmt: skip
        names = ("kind", "phase", "op", "step", "group_id", "stage", *empty)
        for rank, mine in self.rows.items():
            made.columns[rank] = {name: [row.get(name, empty.get(name, 0)) for row in mine] for name in names}
        return made

    def step(self, step: int, found: dict[int, dict[str, list[_Operation]]]) -> None:
        """One step of all ranks; it begins when all are there."""
        begin = min(op.start for mine in found.values() for ops in mine.values() for op in ops)
        self.last_start = self._last_starts(found)
        for rank in self.ranks:
            writer = _RankStep(self, rank, step, begin, found.get(rank, {}))
            writer.write()

    def members(self, rank: int, name: str) -> tuple[int, ...]:
        """Who takes part in an operation of the study."""
        dp, stage = self.where[rank]
        if name.endswith(("-send", "-recv")):
            ahead = name in ("forward-send", "backward-recv")
            other = self.place.get((dp, stage + (1 if ahead else -1)))
            return tuple(sorted((rank, other))) if other is not None else ()
        if name == "embedding-grads-all-reduce":
            return tuple(sorted({self.place[dp, 0], self.place[dp, self.num_stages - 1]}))
        if name == "optimizer-clip-main-grad":
            return tuple(self.ranks)
        return tuple(sorted(r for r, (_, s) in self.where.items() if s == stage))

    def event(self, rank: int, name: str, number: int) -> tuple[Any, ...]:
        """What names the operation that a unit is a part of."""
        way = name.rsplit("-", 1)[0] if name.endswith(("-send", "-recv")) else name
        return way, self.members(rank, name), number

    def _last_starts(self, found: dict[int, dict[str, list[_Operation]]]) -> dict[tuple[Any, ...], int]:
        last: dict[tuple[Any, ...], int] = {}
        for rank, mine in found.items():
            for name, ops in mine.items():
                for number, op in enumerate(ops):
                    key = self.event(rank, name, number)
                    last[key] = max(last.get(key, op.start), op.start)
        return last


class _RankStep:
    """Writes the rows of one rank and step in the order of its program."""

    def __init__(
        self, maker: _Maker, rank: int, step: int, begin: int, found: dict[str, list[_Operation]]
    ) -> None:  # fmt: skip
        self.maker, self.rank, self.found, self.now = maker, rank, found, begin
        self.rows = maker.rows[rank]
        self.fixed = {"step": step, "stage": maker.where[rank][1]}
        self.posted: dict[tuple[str, int], int] = {}

    def write(self) -> None:
        """The step in order."""
        self._operation(_WORLD, {"label": "step", "start_ns": self.now, "end_ns": self.now, "transfer_ns": 0})
        self._wait(len(self.rows) - 1, self.now)
        for number in range(len(self.found.get("params-all-gather", ()))):
            self._post("params-all-gather", number)
        computing = sorted(
            [(op.start, f"{way}-compute", number, op) for way in ("forward", "backward")
             for number, op in enumerate(self.found.get(f"{way}-compute", ()))]
        )  # fmt: skip
        first = next((at for at, item in enumerate(computing) if item[1] == "backward-compute"), len(computing))
        self._post("forward-recv", 0)
        if first < 2:
            self._post("backward-recv", 0)
        for at, (_, name, number, op) in enumerate(computing):
            way = name.split("-", maxsplit=1)[0]
            if name == "forward-compute" and number == 0:
                for gather in range(len(self.found.get("params-all-gather", ()))):
                    self._await("params-all-gather", gather)
            self._await(f"{way}-recv", number)
            self._compute(name, op)
            self._post(f"{way}-send", number)
            self._post(f"{way}-recv", number + 1)
            if at == first - 2:
                self._post("backward-recv", 0)
        for name in ("gc", "layernorm-grads-all-reduce"):
            for op in self.found.get(name, ()):
                self._compute(name, op)
        for name in ("embedding-grads-all-reduce", "grads-reduce-scatter", "optimizer-clip-main-grad"):
            for number in range(len(self.found.get(name, ()))):
                self._post(name, number)
                self._await(name, number)
        for op in self.found.get("optimizer", ()):
            self._compute("optimizer", op)

    def _compute(self, name: str, op: _Operation) -> None:
        # clocks differ by microseconds: a unit that seems to start before the one before it has ended starts then
        start = max(op.start, self.now)
        end = start + op.end - op.start
        phase = {"forward-compute": Phase.FORWARD, "backward-compute": Phase.BACKWARD, "optimizer": Phase.OPTIMIZER}
        self.rows.append({
            "kind": int(UnitKind.COMPUTE), "phase": int(phase.get(name, Phase.OTHER)), "label": name,
            "start_ns": start, "end_ns": end, "gap_ns": start - self.now,
            "microbatch": op.microbatch if op.microbatch >= 0 else ABSENT32, **self.fixed,
        })  # fmt: skip
        self.now = end

    def _post(self, name: str, number: int) -> None:
        ops = self.found.get(name, [])
        members = self.maker.members(self.rank, name)
        if number >= len(ops) or not members:
            return
        op = ops[number]
        transfer = max(op.end - self.maker.last_start[self.maker.event(self.rank, name, number)], 0)
        way = name.rsplit("-", 1)[0] if name.endswith(("-send", "-recv")) else name
        operations = {"params-all-gather": Op.ALL_GATHER, "grads-reduce-scatter": Op.REDUCE_SCATTER}
        other = Op.BROADCAST if name.endswith(("-send", "-recv")) else Op.ALL_REDUCE
        phase = Phase.FORWARD if name.startswith("forward") else Phase.BACKWARD
        group = self.maker.group(way, members, "sender and receiver" if other is Op.BROADCAST else "members")
        self.posted[name, number] = len(self.rows)
        self._operation(group, {
            "label": name, "op": int(operations.get(name, other)), "phase": int(phase), "transfer_ns": transfer,
            "start_ns": op.start, "end_ns": op.end, "gap_ns": max(op.start - self.now, 0),
        })  # fmt: skip

    def _operation(self, group: int, columns: dict[str, Any]) -> None:
        seq = self.maker.seqs.get((self.rank, group), 0)
        self.maker.seqs[self.rank, group] = seq + 1
        self.rows.append({"kind": int(UnitKind.COLLECTIVE), "op": int(Op.BARRIER), "group_id": group, "seq": seq,
                          **columns, **self.fixed})  # fmt: skip

    def _await(self, name: str, number: int) -> None:
        row = self.posted.get((name, number))
        if row is not None:
            self._wait(row, self.found[name][number].end)

    def _wait(self, row: int, end: int) -> None:
        end = max(end, self.now)
        self.rows.append({"kind": int(UnitKind.WAIT), "awaits": row, "start_ns": self.now, "end_ns": end, **self.fixed})
        self.now = end
