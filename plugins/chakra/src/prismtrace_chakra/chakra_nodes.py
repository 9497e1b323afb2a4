"""Reads one Chakra .et file into nodes and derives the units of its rank. It does not write traces.

A node that communicates becomes a unit of its own. What lies between two of them becomes one compute unit, and the
first node that depends on a communication which was not awaited yet is preceded by a wait unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from prismtrace import Op, TraceFormatError, TraceTruncatedError, UnitKind
from prismtrace_chakra import wire
from prismtrace_chakra.graph import GraphFacts, inspect
from prismtrace_chakra.job import Job, LocalGroup, RankUnits
from prismtrace_chakra.naming import COMM_TYPES, dtype_of, op_of, reduction_of

COMMUNICATION: Final = (wire.COMM_SEND, wire.COMM_RECV, wire.COMM_COLL)
_KIND: Final = {
    wire.COMM_SEND: UnitKind.SEND,
    wire.COMM_RECV: UnitKind.RECV,
    wire.COMM_COLL: UnitKind.COLLECTIVE,
}
_MAX_NS: Final = 1 << 62
_ABSOLUTE_US: Final = 1_000_000_000


@dataclass(slots=True)
class Node:
    """One node as it stands in the file; text is str, attributes are name -> (kind, value), start_us -1 is absent."""

    id: int
    name: str
    type: int
    ctrl_deps: tuple[int, ...]
    data_deps: tuple[int, ...]
    start_us: int
    duration_us: int
    attributes: dict[str, tuple[str, Any]]
    inputs: tuple[str, str, str]
    outputs: tuple[str, str, str]

    def integer(self, name: str) -> int | None:
        """The value of an attribute that is a number."""
        found = self.attributes.get(name)
        return found[1] if found is not None and type(found[1]) is int else None

    def string(self, name: str) -> str | None:
        """The value of an attribute that is text."""
        found = self.attributes.get(name)
        return found[1] if found is not None and isinstance(found[1], str) else None

    @property
    def on_host(self) -> bool:
        """Whether the node ran on the host; nodes that do not say so did."""
        found = self.attributes.get("is_cpu_op")
        return True if found is None else bool(found[1])


@dataclass
class ChakraFile:
    """One file: its description, its nodes in file order, and what their dependencies look like."""

    version: str
    attributes: dict[str, tuple[str, Any]]
    nodes: list[Node]
    has_starts: bool
    facts: GraphFacts
    unit_of: list[int] = field(default_factory=list)
    truncated: str | None = None


def read(data: bytes, *, path: str, strict: bool) -> ChakraFile:
    """Read a whole file. A file that was cut is read up to the cut, unless `strict`.

    Raises:
        TraceFormatError: a message cannot be read, or there is no node.
    """
    describing, noding = wire.classes()
    version, attributes, nodes, truncated = "", {}, [], None
    try:
        for number, (offset, raw) in enumerate(wire.frames(data, path=path)):
            if number == 0 and not raw.startswith(b"\x08"):
                description = wire.parse(describing, raw, path=path, offset=offset)
                version, attributes = wire.text(description.version), wire.attributes(description)
            else:
                nodes.append(_node(wire.parse(noding, raw, path=path, offset=offset)))
    except TraceTruncatedError as error:
        if strict or not nodes:
            raise
        truncated = error.message if error.offset is None else f"byte {error.offset}: {error.message}"
    if not nodes:
        raise TraceFormatError("holds no node: this is no .et file", path=path)
    has_starts = _mark_starts(nodes)
    preference = [max(node.start_us, 0) for node in nodes] if has_starts else [0] * len(nodes)
    dependencies = [node.ctrl_deps + node.data_deps for node in nodes]
    facts = inspect([node.id for node in nodes], dependencies, preference)
    return ChakraFile(version, attributes, nodes, has_starts, facts, [-1] * len(nodes), truncated)


def _mark_starts(nodes: list[Node]) -> bool:
    """Whether nodes say when they start. 0 is how the format says nothing: it stays only beside small numbers."""
    smallest = min((node.start_us for node in nodes if node.start_us), default=0)
    if smallest >= _ABSOLUTE_US:
        for node in nodes:
            node.start_us = node.start_us or -1
    return smallest > 0


def _node(message: Any) -> Node:
    inputs, outputs = message.inputs, message.outputs
    return Node(
        message.id,
        wire.text(message.name),
        message.type,
        tuple(message.ctrl_deps),
        tuple(message.data_deps),
        message.start_time_micros,
        message.duration_micros,
        wire.attributes(message),
        (wire.text(inputs.values), wire.text(inputs.shapes), wire.text(inputs.types)),
        (wire.text(outputs.values), wire.text(outputs.shapes), wire.text(outputs.types)),
    )


class _Builder:
    """Walks the nodes in order and adds units."""

    def __init__(self, file: ChakraFile, rank: int, job: Job, *, path: str) -> None:
        self.file, self.job, self.path = file, job, path
        self.units = RankUnits(rank)
        self._row_of: dict[int, int] = {}
        for row, node in enumerate(file.nodes):
            self._row_of.setdefault(node.id, row)
        self._open: list[int] = []
        self._unit_of_node: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._late = -_MAX_NS
        self.described = any("comm_type" in n.attributes or "comm_size" in n.attributes for n in file.nodes)
        self.host_calls = self.unset = self.contradicted = self.overlapping = 0

    def run(self) -> RankUnits:
        """Add every unit."""
        for row in self.file.facts.order:
            node = self.file.nodes[row]
            if node.type in COMMUNICATION and self._counts(node):
                self._flush()
                self._communication(row, node)
            else:
                self._wait_for(node)
                self._open.append(row)
        self._flush()
        return self.units

    def _counts(self, node: Node) -> bool:
        """Whether a communication node stands for the operation, and not for the host's call of it."""
        if not self.described or "comm_type" in node.attributes or "comm_size" in node.attributes:
            return True
        self.host_calls += 1
        return False

    def _wait_for(self, node: Node) -> None:
        for other in (*node.data_deps, *node.ctrl_deps):
            row = self._row_of.get(other)
            unit = -1 if row is None else self._unit_of_node.get(row, -1)
            if unit < 0 or unit in self._awaited:
                continue
            self._flush()
            self._awaited.add(unit)
            self.units.add(kind=UnitKind.WAIT, awaits=unit, label=None if node.on_host else "device")

    def _flush(self) -> None:
        rows, self._open = self._open, []
        if not rows:
            return
        unit = len(self.units)
        for row in rows:
            self.file.unit_of[row] = unit
        hosts = [node for node in map(self.file.nodes.__getitem__, rows) if node.on_host]
        start = end = None
        timed = [node for node in hosts if node.start_us >= 0]
        if self.file.has_starts and timed:
            start = min(node.start_us for node in timed) * 1000
            end = max(node.start_us + node.duration_us for node in timed) * 1000
            if start < self._late:
                self.overlapping += 1
                start, end = self._late, max(end, self._late)
            start, end = self._bounded(start), self._bounded(end)
            self._late = end
        named = {
            "chakra.num_nodes": len(rows),
            "chakra.host_ns": min(_MAX_NS, sum(node.duration_us for node in hosts) * 1000),
            "chakra.device_ns": min(
                _MAX_NS, sum(n.duration_us for n in map(self.file.nodes.__getitem__, rows) if not n.on_host) * 1000
            ),
        }
        self.units.add(kind=UnitKind.COMPUTE, start_ns=start, end_ns=end, named=named)

    def _bounded(self, time: int) -> int:
        if time <= _MAX_NS:
            return time
        self.job.note(f"{self.path}: times beyond 2^62 ns were cut")
        return _MAX_NS

    def _communication(self, row: int, node: Node) -> None:
        kind, op = self._operation(node)
        size = node.integer("comm_size")
        dtype = dtype_of(node.inputs[2]) or dtype_of(node.outputs[2])
        elements = size // dtype.itemsize_bytes if size is not None and size >= 0 and dtype else None
        start = end = None
        if self.file.has_starts and node.start_us >= 0:
            start = self._bounded(node.start_us * 1000)
            end = self._bounded((node.start_us + node.duration_us) * 1000)
        values: dict[str, Any] = {"num_elements_out" if kind is UnitKind.RECV else "num_elements_in": elements}
        if kind in (UnitKind.SEND, UnitKind.RECV):
            values["peer"] = self._peer(node, "comm_dst" if kind is UnitKind.SEND else "comm_src")
            values["tag"] = node.integer("comm_tag")
        elif (root := node.integer("root_rank")) is not None and 0 <= root < 1 << 31:
            values["peer"] = root
        unit = self.units.add(
            kind=kind,
            op=op,
            dtype=dtype,
            reduce_op=reduction_of(node.name, op),
            start_ns=start,
            end_ns=end,
            label=node.name[:1024] or None,
            is_async=True,
            group=self._group(node),
            named={
                "chakra.comm_bytes": size if size is not None and 0 <= size < _MAX_NS else None,
                "chakra.device_ns": min(_MAX_NS, node.duration_us * 1000),
                "chakra.num_nodes": 1,
            },
            **values,
        )
        self.file.unit_of[row] = self._unit_of_node[row] = unit

    def _peer(self, node: Node, name: str) -> int | None:
        peer = node.integer(name)
        return peer if peer is not None and 0 <= peer < 1 << 31 else None

    def _operation(self, node: Node) -> tuple[UnitKind, Op]:
        kind = _KIND[node.type]
        if kind is UnitKind.SEND:
            return kind, Op.SEND
        if kind is UnitKind.RECV:
            return kind, Op.RECV
        number = node.integer("comm_type")
        by_name = op_of(node.name)
        if by_name in (Op.SEND, Op.RECV):
            by_name = Op.UNSPECIFIED
        if number is None or not 0 <= number < len(COMM_TYPES):
            return kind, by_name
        op = COMM_TYPES[number]
        if number == 0:
            self.unset += 1
            if by_name not in (Op.UNSPECIFIED, Op.ALL_REDUCE):
                self.contradicted += 1
                return kind, by_name
        return kind, op

    def _group(self, node: Node) -> LocalGroup | None:
        name = node.string("pg_name")
        if name is None and (number := node.integer("pg_name")) is not None:
            name = str(number)
        return LocalGroup(name if name is not None else "world")


def units_of(file: ChakraFile, rank: int, job: Job, *, path: str) -> RankUnits:
    """The units of one rank; says in the notes of the job what was guessed."""
    builder = _Builder(file, rank, job, path=path)
    units = builder.run()
    job.counts["host_calls_of_communication"] += builder.host_calls
    if builder.host_calls:
        job.note(
            "communication nodes without comm_type and comm_size beside ones that have them are the host's calls: "
            "they count as compute"
        )
    if builder.unset:
        job.note(
            "comm_type 0 means ALL_REDUCE, and also that a writer left it unset: it is taken as all_reduce unless "
            "the name of the node says another collective"
        )
    if builder.contradicted:
        job.note(f"{path}: {builder.contradicted} nodes of comm_type 0 are named after another one: the name counts")
    if builder.overlapping:
        job.note(f"{path}: {builder.overlapping} compute units began before the one before ended; moved to its end")
    return units


__all__ = ["COMMUNICATION", "ChakraFile", "Node", "read", "units_of"]
