"""Writes a trace as Chakra: one .et file a rank. It does not choose how a simulator should run it.

COMPUTE -> COMP, COLLECTIVE -> COMM_COLL, SEND and RECV -> COMM_SEND and COMM_RECV, WAIT -> a COMP node of no duration
that has a data dependency on what it waits for. Host order is control dependencies, as the format's section 7.3 has it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from prism_sdk.abc import ConversionReport, TraceExporter
from prism_sdk.errors import OutputError, UsageError
from prism_sdk.interop.sources import flag
from prismtrace import ABSENT, DType, Op, ProcessGroup, TraceReader, UnitKind, UnitTable
from prismtrace_chakra import exact, wire
from prismtrace_chakra.naming import COMM_TYPE_OF
from prismtrace_chakra.wire import AttributeName, block, packed, varint

SCHEMA_VERSION: Final = "0.0.4"
_NODE_TYPE: Final = {
    UnitKind.COLLECTIVE: wire.COMM_COLL,
    UnitKind.SEND: wire.COMM_SEND,
    UnitKind.RECV: wire.COMM_RECV,
}
_ITEMSIZE: Final = {int(dtype): dtype.itemsize_bytes for dtype in DType}
_FLUSH_BYTES: Final = 1 << 20


class ChakraExporter(TraceExporter):
    """One Chakra execution trace a rank, in a new folder; one file for a trace of one rank and a name in .et."""

    name = "chakra"
    description = "Chakra execution traces, one .et file a rank (-O prism_attributes=false leaves ours out)"
    suffixes = (".chakra", ".et")

    def export_trace(
        self,
        source: Path,
        *,
        output: Path,
        options: Mapping[str, str],
        report: Callable[[str], None],
    ) -> ConversionReport:
        """See the base class. Options: prism_attributes (default true, for the way back), prefix (of file names)."""
        if unknown := sorted(set(options) - {"prism_attributes", "prefix", "lossless"}):
            raise UsageError(f"-O {unknown[0]} is not an option here; there are prefix and prism_attributes")
        prefix = options.get("prefix", "trace")
        if not prefix or "/" in prefix or prefix.startswith("."):
            raise UsageError(f"-O prefix={prefix} is no beginning of a file name")
        ours = flag(options, "prism_attributes", default=True)
        part = output.with_name(f".{output.name}.part")
        _remove(part)
        try:
            with TraceReader(source) as reader:
                ranks = [rank for rank in reader.ranks if reader.num_units(rank)]
                if not ranks:
                    raise UsageError(f"{source} has no units to write as Chakra nodes")
                single = len(ranks) == 1 and output.suffix == ".et"
                if output.exists() and (output.is_dir() or not single):
                    raise UsageError(f"{output} exists", hint="name a new folder")
                if not single:
                    part.mkdir()
                written = _Export(reader, ours=ours)
                for done, rank in enumerate(ranks):
                    written.rank(rank, part if single else part / f"{prefix}.{rank}.et")
                    if (done + 1) % 64 == 0:
                        report(f"{done + 1} of {len(ranks)} ranks written")
                os.replace(part, output)
                return ConversionReport(output, written.counts(len(ranks)), tuple(written.notes(reader)))
        except OSError as error:
            raise OutputError(file=str(output), reason=error.strerror or str(error)) from error
        finally:
            _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class _Export:
    """Writes the ranks of one trace and counts what Chakra could not hold."""

    def __init__(self, reader: TraceReader, *, ours: bool) -> None:
        self._reader, self._ours = reader, ours
        self._groups: Mapping[int, ProcessGroup] = reader.groups
        self.num_nodes = self.num_bytes = self.num_messages = self.negative = self.unnamed = 0
        self._columns = exact.writers()
        self._known = {
            name: AttributeName(name, kind)
            for name, kind in (
                ("is_cpu_op", "bool"),
                ("comm_type", "int64"),
                ("comm_size", "int64"),
                ("comm_src", "int32"),
                ("comm_dst", "int32"),
                ("comm_tag", "int32"),
                ("root_rank", "int32"),
                ("pg_name", "string"),
            )
        }

    def counts(self, num_ranks: int) -> dict[str, int]:
        """Facts for the report."""
        return {
            "ranks": num_ranks,
            "nodes": self.num_nodes,
            "bytes": self.num_bytes,
            "groups": len(self._groups),
        }

    def notes(self, reader: TraceReader) -> list[str]:
        """What was lost."""
        notes = ["Chakra has whole microseconds"]
        notes[0] += "; nanoseconds are in the attributes prism.*" if self._ours else "; nanoseconds are lost"
        if any(reader.num_steps(rank) for rank in reader.ranks):
            notes.append("steps and scalars have no place in Chakra: they were left out")
        if reader.payload_digests:
            notes.append("payloads were left out; units keep their digests" if self._ours else "payloads were left out")
        if self.negative:
            notes.append(f"{self.negative} start times before 0 are written as 0")
        if self.unnamed:
            notes.append(f"{self.unnamed} collectives have no operation that Chakra names: they carry no comm_type")
        return notes

    def rank(self, rank: int, path: Path) -> None:
        """Write the file of one rank."""
        units = self._reader.units(rank)
        buffer = bytearray()
        with open(path, "xb") as file:
            self._frame(buffer, self._description(rank))
            for node in self._nodes(rank, units):
                self._frame(buffer, node)
                if len(buffer) > _FLUSH_BYTES:
                    self.num_bytes += file.write(buffer)
                    buffer.clear()
            self.num_bytes += file.write(buffer)
        self.num_nodes += len(units)

    @staticmethod
    def _frame(buffer: bytearray, message: bytes) -> None:
        buffer += varint(len(message))
        buffer += message

    def _description(self, rank: int) -> bytes:
        parts = [block(1, SCHEMA_VERSION.encode())]
        parts.append(AttributeName("rank", "int64", field=2).one(rank))
        if self._ours:
            major, minor = self._reader.format_version
            parts.append(AttributeName(exact.MARK, "string", field=2).one(f"{major}.{minor}"))
            parts.append(AttributeName("prism.rank", "int64", field=2).one(rank))
            parts.append(AttributeName("prism.world_size", "int64", field=2).one(self._reader.world_size))
            parts.append(AttributeName("prism.graph_kind", "int64", field=2).one(int(self._reader.graph_kind)))
            parts.append(exact.describe_groups(list(self._groups.values())))
            for key, value in self._reader.metadata.items():
                parts.append(AttributeName(f"prism.metadata.{key}", "string", field=2).one(value))
        return b"".join(parts)

    def _nodes(self, rank: int, units: UnitTable) -> Any:
        first = units.first_index
        ours = self._prism_attributes(units) if self._ours else [b""] * len(units)
        host = -1
        labels = list(units.label)
        columns = zip(
            units.kind.tolist(),
            units.op.tolist(),
            units.start_ns.tolist(),
            units.end_ns.tolist(),
            units.awaits.tolist(),
            labels,
            ours,
            strict=True,
        )
        comm = self._communication(rank, units)
        for row, (kind, op, start, end, awaits, label, extra) in enumerate(columns):
            waits = kind == UnitKind.WAIT
            name = label or (Op(op).name.lower() if op and op in Op._value2member_map_ else _kind_name(kind))
            parts = [b"\x08", varint(row + first + 1), block(2, name.encode())]
            parts.append(b"\x18" + varint(_NODE_TYPE.get(kind, wire.COMP)))
            if host >= 0:
                parts.append(packed(4, [host + first + 1]))
            if waits and awaits != ABSENT:
                parts.append(packed(5, [awaits + 1]))
            if start != ABSENT:
                if start < 0:
                    self.negative += 1
                parts.append(b"\x30" + varint(max(0, start) // 1000))
                if end != ABSENT and not waits:
                    parts.append(b"\x38" + varint(max(0, (end - start + 500) // 1000)))
            parts.append(comm.get(row, self._host_attribute))
            parts.append(extra)
            if kind in (UnitKind.COMPUTE, UnitKind.WAIT):
                host = row
            yield b"".join(parts)

    @property
    def _host_attribute(self) -> bytes:
        return self._known["is_cpu_op"].one(True)

    def _communication(self, rank: int, units: UnitTable) -> dict[int, bytes]:
        """The attributes of each communication unit that Chakra knows."""
        found: dict[int, bytes] = {}
        known = self._known
        device = known["is_cpu_op"].one(False)
        for row in np.flatnonzero(np.isin(units.kind, list(_NODE_TYPE))).tolist():
            kind, op = int(units.kind[row]), int(units.op[row])
            parts = [device]
            if kind == UnitKind.COLLECTIVE:
                number = COMM_TYPE_OF.get(Op(op)) if op in Op._value2member_map_ else None
                if number is None:
                    self.unnamed += 1
                else:
                    parts.append(known["comm_type"].one(number))
            given, taken = int(units.num_elements_in[row]), int(units.num_elements_out[row])
            elements = taken if kind == UnitKind.RECV or given == ABSENT else given
            if elements != ABSENT:
                parts.append(known["comm_size"].one(elements * _ITEMSIZE.get(int(units.dtype[row]), 0)))
            peer, tag = int(units.peer[row]), int(units.tag[row])
            if peer >= 0:
                if kind == UnitKind.COLLECTIVE:
                    parts.append(known["root_rank"].one(peer))
                else:
                    source, target = (rank, peer) if kind == UnitKind.SEND else (peer, rank)
                    parts += [known["comm_src"].one(source), known["comm_dst"].one(target)]
            if kind != UnitKind.COLLECTIVE:
                parts.append(known["comm_tag"].one(tag if 0 <= tag < 1 << 31 else 0))
            if (group := self._groups.get(int(units.group_id[row]))) is not None:
                parts.append(known["pg_name"].one(group.name or str(group.group_id)))
            found[row] = b"".join(parts)
        return found

    def _prism_attributes(self, units: UnitTable) -> list[bytes]:
        """For each unit the attributes prism.*: every registered column that holds something."""
        made = [[] for _ in range(len(units))]  # type: list[list[bytes]]
        for name, (spec, writer) in self._columns.items():
            column = getattr(units, name)
            for row, value in enumerate(exact.rows(spec, column)):
                if value is not None:
                    made[row].append(writer.many(value) if isinstance(value, list) else writer.one(value))
        return [b"".join(parts) for parts in made]


def _kind_name(kind: int) -> str:
    return UnitKind(kind).name.lower() if kind in UnitKind._value2member_map_ else "unit"
