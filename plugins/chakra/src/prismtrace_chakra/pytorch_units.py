"""Derives the units of a rank from the nodes of its PyTorch execution trace. It reads no files.

One communication leaves up to three nodes: the call (`c10d::...`), what the process group notes about it
(`record_param_comms`: sequence number, group, split sizes), and the backend's own (`nccl:...`, `gloo:...`). They
are one unit here. What runs between two communications is one compute unit, cut where forward turns to backward
or the optimizer.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Final

from prismtrace import DType, Op, Phase, UnitKind
from prismtrace_chakra.job import Job, LocalGroup, RankUnits
from prismtrace_chakra.naming import dtype_of, num_elements, op_of
from prismtrace_chakra.pytorch_nodes import EtFile, EtNode

_BACKEND: Final = re.compile(r"^(?:nccl|ncclx|gloo|mpi|ucc|xccl|hccl|rccl|oneccl|mccl):", re.IGNORECASE)
_NOTED: Final = "record_param_comms"
_ROOTED: Final = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
_KINDS: Final = {Op.SEND: UnitKind.SEND, Op.RECV: UnitKind.RECV}
_ARGUMENT: Final = re.compile(r"(\w+)(?:=[^,)]*)?\s*(?:,|\)\s*->)")
_PHASES: Final = (
    ("autograd::engine::evaluate_function", Phase.BACKWARD),
    ("Optimizer.step", Phase.OPTIMIZER),
    ("## forward ##", Phase.FORWARD),
    ("## backward ##", Phase.BACKWARD),
    ("## optimizer ##", Phase.OPTIMIZER),
)


@dataclass
class _Noted:
    """What a `record_param_comms` node says."""

    verb: str
    seq: int | None
    is_p2p: bool
    pg_name: str | None
    rank: int | None
    splits: tuple[list[int], list[int]]
    start: int | None
    stride: int | None
    size: int | None


def _noted(node: EtNode) -> _Noted | None:
    """Read the arguments by their types: they differ from version to version, their order does not."""
    values = node.values
    at = next((k for k, v in enumerate(values) if isinstance(v, str) and k >= 2 and _is_number(values[k - 1])), None)
    if at is None:
        return None
    rank, verb, rest = values[at - 1], values[at], values[at + 1 :]
    group = values[at - 2]
    name: str | None
    if isinstance(group, list) and group and isinstance(group[0], str):
        name = group[0]
    else:
        name = str(group) if isinstance(group, str | int) and group != 0 else None
    seq: Any = values[at - 3] if at >= 3 else None
    is_p2p = False
    if isinstance(seq, list) and len(seq) == 2 and _is_number(seq[0]):
        seq, is_p2p = seq[0], bool(seq[1])
    lists = [[v for v in item if _is_number(v)] for item in rest[:2] if isinstance(item, list)]
    while len(lists) < 2:
        lists.append([])
    numbers = [item for item in rest if _is_number(item)]
    start, stride, size = numbers[:3] if len(numbers) >= 3 else (None, None, None)
    number = seq if _is_number(seq) else None
    return _Noted(verb, number, is_p2p, name, rank, (lists[0], lists[1]), start, stride, size)


def _is_number(value: Any) -> bool:
    return type(value) is int


def _is_address(name: str | None) -> bool:
    return name is not None and name.isdigit() and len(name) > 9


class _Builder:
    """Walks the nodes of one rank in the order of their ids and adds units."""

    def __init__(self, file: EtFile, rank: int, job: Job, *, path: str) -> None:
        self.file, self.rank, self.job, self.path = file, rank, job, path
        self.units = RankUnits(rank)
        self.groups = {group.name: group for group in file.groups}
        self._row_of: dict[int, int] = {}
        for row, node in enumerate(file.nodes):
            self._row_of.setdefault(node.id, row)
        self._owner = [-1] * len(file.nodes)
        self._phase = [Phase.UNSPECIFIED] * len(file.nodes)
        self._open: list[int] = []
        self._open_phase = Phase.UNSPECIFIED
        self._loose: dict[tuple[Op, int | None], deque[int]] = defaultdict(deque)
        self._by_seq: dict[tuple[str | None, int], int] = {}
        self._last_by_seq: dict[int, int] = {}
        self._awaited: set[int] = set()
        noted = (_noted(node) for node in file.nodes if node.name == _NOTED)
        self._addresses = {n.pg_name for n in noted if n is not None and n.verb != "wait" and _is_address(n.pg_name)}
        self.inferred = self.lost_waits = 0
        self._late: int | None = None
        for group in file.groups:
            job.hint_world(max(group.ranks, default=-1) + 1)

    def run(self) -> RankUnits:
        """Add every unit."""
        for row in self.file.facts.order:
            node = self.file.nodes[row]
            parent = self._row_of.get(node.parent, -1)
            if parent >= 0 and parent != row:
                self._owner[row], self._phase[row] = self._owner[parent], self._phase[parent]
            for text, phase in _PHASES:
                if text in node.name:
                    self._phase[row] = phase
            self._visit(row, node)
        self._flush()
        return self.units

    def _visit(self, row: int, node: EtNode) -> None:
        owner = self._owner[row]
        noted = _noted(node) if node.name == _NOTED else None
        if noted is not None:
            if noted.verb == "wait":
                return self._wait(row, noted)
            op = op_of(noted.verb)
            if op is Op.UNSPECIFIED:
                return self._compute(row)
            if owner < 0:
                owner = self._communication(row, node, op)
            return self._enrich(owner, noted)
        is_call = node.name.startswith("c10d::")
        if not is_call and not _BACKEND.match(node.name):
            return self._compute(row) if owner < 0 else self._belong(row, owner)
        op = op_of(node.name)
        if op is Op.UNSPECIFIED or (owner >= 0 and not is_call):
            self._settle(owner, op)
            return self._compute(row) if owner < 0 else self._belong(row, owner)
        if not is_call and (call := self._claim(node, op)) is not None:
            return self._belong(row, call)
        unit = self._communication(row, node, op)
        if is_call:
            self._loose[op, self._elements(node)].append(unit)
            if self._argument(node, "asyncOp", "async_op") is False:
                self._flush()
                self._awaited.add(unit)
                self.units.columns["is_async"][unit] = False
                self.units.add(kind=UnitKind.WAIT, awaits=unit, phase=self._phase[row])
        return None

    def _belong(self, row: int, unit: int) -> None:
        self._owner[row] = self.file.unit_of[row] = unit

    def _settle(self, unit: int, op: Op) -> None:
        """The backend's node of a call was found under it: a later one is another operation's."""
        if unit >= 0:
            for waiting in self._loose.values():
                if unit in waiting:
                    waiting.remove(unit)

    def _claim(self, node: EtNode, op: Op) -> int | None:
        """The call that a backend's node without parent belongs to: the first of its kind and size without one."""
        size = self._elements(node)
        wanted = [op, Op.REDUCE_SCATTER] if op is Op.ALL_REDUCE and node.name.startswith("gloo:") else [op]
        for each in wanted:  # gloo scatters by way of an all-reduce
            for key, waiting in self._loose.items():
                if key[0] is each and waiting and (size is None or key[1] in (size, None)):
                    return waiting.popleft()
        return None

    # --- compute ---------------------------------------------------------------------------------------------------

    def _compute(self, row: int) -> None:
        phase = self._phase[row]
        if self._open and phase is not self._open_phase:
            self._flush()
        self._open_phase = phase
        self._open.append(row)

    def _flush(self) -> None:
        rows, self._open = self._open, []
        if not rows:
            return
        timed = [node for node in map(self.file.nodes.__getitem__, rows) if node.start_ns is not None]
        start = min((node.start_ns for node in timed if node.start_ns is not None), default=None)
        end = max((node.end_ns for node in timed if node.end_ns is not None), default=None)
        if start is not None and end is not None:
            start = max(start, self._late if self._late is not None else start)
            self._late = end = max(start, end)
        unit = self.units.add(
            kind=UnitKind.COMPUTE,
            phase=self._open_phase,
            start_ns=start,
            end_ns=end,
            named={"pytorch_et.num_nodes": len(rows)},
        )
        for row in rows:
            self.file.unit_of[row] = unit

    # --- communication ---------------------------------------------------------------------------------------------

    def _communication(self, row: int, node: EtNode, op: Op) -> int:
        self._flush()
        inputs, outputs, dtype = self._tensors(node, op)
        values: dict[str, Any] = {}
        group = next(iter(self.groups.values())) if len(self.groups) == 1 else None
        if group is None:
            group = self._group_of_size(node, op, inputs, outputs)
        if op in (Op.SEND, Op.RECV):
            values["peer"] = self._argument(node, "dst", "src")
            values["tag"] = self._argument(node, "tag")
        elif op in _ROOTED:
            values["peer"] = self._argument(node, "root_rank", "root")
        for name in ("peer", "tag"):
            if name in values and not (_is_number(values[name]) and 0 <= values[name] < 1 << 31):
                values[name] = None
        # ranks in arguments count inside the group
        if values.get("peer") is not None:
            known = group is not None and values["peer"] < len(group.ranks)
            values["peer"] = group.ranks[values["peer"]] if known and group is not None else None
        unit = self.units.add(
            kind=_KINDS.get(op, UnitKind.COLLECTIVE),
            op=op,
            phase=self._phase[row],
            dtype=dtype,
            num_elements_in=None if op is Op.RECV else inputs,
            num_elements_out=None if op is Op.SEND else outputs,
            start_ns=node.start_ns,
            end_ns=node.end_ns,
            is_async=True,
            label=node.name[:1024],
            group=group,
            named={"pytorch_et.num_nodes": 1},
            **values,
        )
        self._belong(row, unit)
        return unit

    def _tensors(self, node: EtNode, op: Op) -> tuple[int | None, int | None, DType]:
        """Elements in and out, and the element type. `_base_` calls take the output first, then the input."""
        names = [name.lower() for name in self._argument_names(node)]
        found: dict[str, int] = {}
        dtype = DType.UNSPECIFIED
        plain: list[int] = []
        for position, value in enumerate(node.values):
            amount = num_elements(value)
            if amount is None:
                continue
            dtype = dtype or dtype_of(str(node.types[position]) if position < len(node.types) else "")
            name = names[position] if position < len(names) else ""
            side = "out" if "output" in name else "in" if "input" in name else ""
            if side:
                found[side] = found.get(side, 0) + amount
            else:
                plain.append(amount)
        made = [amount for amount in map(num_elements, node.out_values) if amount is not None]
        if op is Op.BARRIER:
            return None, None, DType.UNSPECIFIED
        inputs = found.get("in", plain[0] if plain else None)
        outputs = found.get("out", made[0] if made else None)
        if outputs is None and op in (Op.ALL_REDUCE, Op.BROADCAST, Op.RECV):
            outputs = inputs
        return inputs, outputs, dtype

    def _elements(self, node: EtNode) -> int | None:
        return self._tensors(node, Op.UNSPECIFIED)[0]

    def _argument_names(self, node: EtNode) -> list[str]:
        head, _, tail = node.schema.partition("(")
        return _ARGUMENT.findall(tail) if head.startswith("c10d::") else []

    def _argument(self, node: EtNode, *names: str) -> Any:
        known = self._argument_names(node)
        for name in names:
            if name in known and known.index(name) < len(node.values):
                return node.values[known.index(name)]
        return None

    def _group_of_size(self, node: EtNode, op: Op, inputs: int | None, outputs: int | None) -> LocalGroup | None:
        """The only group whose size explains the sizes of the operation."""
        size = 0
        if inputs and outputs:
            large, small = (outputs, inputs) if op in (Op.ALL_GATHER, Op.GATHER) else (inputs, outputs)
            if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.GATHER, Op.SCATTER) and large % small == 0:
                size = large // small
        splits = self._argument(node, "input_split_sizes", "output_split_sizes")
        if op is Op.ALL_TO_ALL and isinstance(splits, list) and splits:
            size = len(splits)
        found = [group for group in self.groups.values() if len(group.ranks) == size]
        if size and len(found) == 1:
            self.inferred += 1
            return found[0]
        return None

    def _enrich(self, unit: int, noted: _Noted) -> None:
        columns = self.units.columns
        group = self._group(noted)
        if group is not None:
            self.units.groups[unit] = group
        op = columns["op"][unit]
        if noted.seq is not None and not noted.is_p2p:
            self.units.raw_seq[unit] = noted.seq
        if noted.seq is not None:
            self._by_seq[noted.pg_name, noted.seq] = self._last_by_seq[noted.seq] = unit
        for name, splits in zip(("splits_in", "splits_out"), noted.splits, strict=True):
            if splits and op is Op.ALL_TO_ALL:
                columns[name][unit] = splits
        if (op in _ROOTED or op in (Op.SEND, Op.RECV)) and columns["peer"][unit] is None:
            ranks = group.ranks if group is not None else ()
            if noted.rank is not None and 0 <= noted.rank < len(ranks):
                columns["peer"][unit] = ranks[noted.rank]
        self._settle(unit, op)

    def _group(self, noted: _Noted) -> LocalGroup | None:
        if noted.pg_name in self.groups:
            return self.groups[noted.pg_name or ""]
        if noted.start is not None and noted.stride is not None and noted.size and 0 < noted.size <= 1 << 20:
            stride = noted.stride or 1
            if noted.start >= 0 and stride > 0 and (noted.pg_name is not None):
                ranks = tuple(range(noted.start, noted.start + stride * noted.size, stride))
                return self.groups.setdefault(noted.pg_name, LocalGroup(noted.pg_name, ranks=ranks))
        if noted.pg_name is None:
            return None
        # old versions note the address of the group, which differs from rank to rank
        if not _is_address(noted.pg_name):
            return LocalGroup(noted.pg_name)
        return LocalGroup("world") if len(self._addresses) == 1 else None

    def _wait(self, row: int, noted: _Noted) -> None:
        unit = None
        if noted.seq is not None:
            unit = self._by_seq.get((noted.pg_name, noted.seq), self._last_by_seq.get(noted.seq))
        if unit is None or unit in self._awaited:
            self.lost_waits += unit is None
            return self._compute(row)
        self._flush()
        self._awaited.add(unit)
        node = self.file.nodes[row]
        wait = self.units.add(
            kind=UnitKind.WAIT, awaits=unit, phase=self._phase[row], start_ns=node.start_ns, end_ns=node.end_ns
        )
        self.file.unit_of[row] = wait
        return None


def units_of(file: EtFile, rank: int, job: Job, *, path: str) -> RankUnits:
    """The units of one rank; says in the notes of the job what was guessed."""
    builder = _Builder(file, rank, job, path=path)
    units = builder.run()
    if builder.inferred:
        job.note(f"{path}: the group of {builder.inferred} collectives was taken from their sizes")
    if builder.lost_waits:
        job.note(f"{path}: {builder.lost_waits} waits are for operations from before the trace; they count as compute")
    return units
