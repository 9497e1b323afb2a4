"""Writes packets of a Perfetto trace: descriptors, interned strings, and slices by the thousand. Reads no trace.

What is rare is built with the message classes of the ``perfetto`` package; slices are encoded by ``wire`` with field
numbers that are taken from those classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from prismtrace_perfetto import wire
from prismtrace_perfetto.wire import Cells

SEQUENCE: Final = 1
MAX_STRINGS: Final = 1 << 17
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


def _numbers(message: Any) -> dict[str, int]:
    return {field.name: field.number for field in message.DESCRIPTOR.fields}


_PACKET: Final = _numbers(pb.TracePacket)
_EVENT: Final = _numbers(pb.TrackEvent)
_NOTE: Final = _numbers(pb.DebugAnnotation)
_TRACE_PACKET: Final = _numbers(pb.Trace)["packet"]
_TABLES: Final = ("event_names", "event_categories", "debug_annotation_names", "debug_annotation_string_values")


class Writable(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> object:
        """Append bytes."""


class PacketWriter:
    """Appends packets of one sequence to a file, and remembers which strings it has already written."""

    def __init__(self, file: Writable) -> None:
        self._file = file
        self._strings: dict[str, dict[str, int]] = {}
        self._fresh: list[tuple[str, str, int]] = []
        self._next_uuid = 1
        self.num_slices = 0
        self.num_bytes = 0
        self._clear()

    def _clear(self) -> None:
        self._strings = {table: {} for table in _TABLES}
        self._fresh = []
        packet = pb.TracePacket(sequence_flags=pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
        self.packet(packet)

    def packet(self, packet: pb.TracePacket) -> None:
        """Write one packet."""
        packet.trusted_packet_sequence_id = SEQUENCE
        raw = packet.SerializeToString()
        self.raw(wire.tag(_TRACE_PACKET, wire.LENGTH) + wire.varint_bytes(len(raw)) + raw)

    def raw(self, data: bytes) -> None:
        """Write encoded packets."""
        self._file.write(data)
        self.num_bytes += len(data)

    def forget_strings(self) -> None:
        """Start over with interned strings when there are very many, so that neither side keeps all of them."""
        if sum(map(len, self._strings.values())) > MAX_STRINGS:
            self._clear()

    def intern(self, table: str, text: str) -> int:
        """The number that stands for a string."""
        known = self._strings[table]
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            self._fresh.append((table, text, number))
        return number

    def flush_strings(self) -> None:
        """Write the strings that came up since the last call: before the packets that use them."""
        if not self._fresh:
            return
        packet = pb.TracePacket(sequence_flags=pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE)
        for table, text, number in self._fresh:
            entries = getattr(packet.interned_data, table)
            if table in ("event_names", "event_categories", "debug_annotation_names"):
                entries.add(iid=number, name=text)
            else:
                entries.add(iid=number, str=text.encode("utf-8"))
        self._fresh = []
        self.packet(packet)

    def add_track(
        self,
        name: str,
        *,
        parent: int | None = None,
        order: int = 0,
        pid: int | None = None,
        counter: str | None = None,
    ) -> int:
        """Describe a track and return its uuid: a process with ``pid``, a counter with ``counter`` (its unit)."""
        uuid, self._next_uuid = self._next_uuid, self._next_uuid + 1
        descriptor = pb.TrackDescriptor(uuid=uuid, sibling_order_rank=order)
        if parent is not None:
            descriptor.parent_uuid = parent
        if pid is not None:
            descriptor.process.pid = pid
            descriptor.process.process_name = name
            descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT
        else:
            descriptor.name = name
        if counter == "bytes":
            descriptor.counter.unit = pb.CounterDescriptor.UNIT_SIZE_BYTES
        elif counter is not None:
            descriptor.counter.unit_name = counter
        self.packet(pb.TracePacket(track_descriptor=descriptor))
        return uuid

    def add_clock(self, first_ns: int, realtime_ns: int | None) -> None:
        """Say which clock times are on, and what time of day it was."""
        snapshot = pb.ClockSnapshot(primary_trace_clock=pb.BUILTIN_CLOCK_BOOTTIME)
        snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_BOOTTIME, timestamp=first_ns)
        snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_MONOTONIC, timestamp=first_ns)
        if realtime_ns is not None:
            snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_REALTIME, timestamp=realtime_ns)
        self.packet(pb.TracePacket(timestamp=first_ns, clock_snapshot=snapshot))

    def note_numbers(self, name: str, values: NDArray[Any], present: NDArray[np.bool_] | None = None) -> Cells:
        """An annotation with a number a row."""
        name_field = self._note_name(name, len(values))
        if values.dtype.kind == "f":
            value = wire.fixed64_field(_NOTE["double_value"], values)
        elif values.dtype.kind == "b":
            value = wire.varint_field(_NOTE["bool_value"], values)
        else:
            field = "uint_value" if values.dtype == np.uint64 else "int_value"
            value = wire.varint_field(_NOTE[field], values)
        return wire.message_field(_EVENT["debug_annotations"], [name_field, value], present)

    def note_texts(
        self, name: str, codes: NDArray[Any], texts: Sequence[str], present: NDArray[np.bool_] | None = None
    ) -> Cells:
        """An annotation with a string a row: ``texts[code]``."""
        value = wire.varint_field(
            _NOTE["string_value_iid"], self.interned("debug_annotation_string_values", codes, texts)
        )
        return wire.message_field(_EVENT["debug_annotations"], [self._note_name(name, len(codes)), value], present)

    def interned(self, table: str, codes: NDArray[Any], texts: Sequence[str]) -> NDArray[np.int64]:
        """The numbers of interned strings, for codes into ``texts``; only strings that are used are written."""
        numbers = np.ones(len(texts) + 1, np.int64)
        used = np.zeros(len(texts) + 1, np.bool_)
        used[codes] = True
        for code in np.flatnonzero(used[:-1]).tolist():
            numbers[code] = self.intern(table, texts[code])
        return np.asarray(numbers[codes])

    def _note_name(self, name: str, num_rows: int) -> Cells:
        number = self.intern("debug_annotation_names", name)
        return wire.constant(num_rows, wire.tag(_NOTE["name_iid"], wire.VARINT) + wire.varint_bytes(number))

    def events(
        self,
        *,
        timestamp: NDArray[Any],
        types: NDArray[np.uint8],
        track: NDArray[Any],
        name: NDArray[Any] | None = None,
        category: NDArray[Any] | None = None,
        flow: NDArray[np.uint64] | None = None,
        flows: NDArray[np.bool_] | None = None,
        counter: NDArray[Any] | None = None,
        notes: Iterable[Cells] = (),
        present: NDArray[np.bool_] | None = None,
    ) -> Cells:
        """One packet with a track event a row."""
        parts = [wire.varint_field(_EVENT["type"], types), wire.varint_field(_EVENT["track_uuid"], track)]
        titled = types != END  # an end with a name ends only a slice of that name
        shown = None if titled.all() else titled
        if category is not None:
            parts.append(wire.varint_field(_EVENT["category_iids"], category, shown))
        if name is not None:
            parts.append(wire.varint_field(_EVENT["name_iid"], name, shown))
        if flow is not None:
            parts.append(wire.fixed64_field(_EVENT["flow_ids"], flow, flows))
        if counter is not None and counter.dtype.kind == "f":
            parts.append(wire.fixed64_field(_EVENT["double_counter_value"], counter))
        elif counter is not None:
            parts.append(wire.varint_field(_EVENT["counter_value"], counter))
        parts += notes
        fixed = wire.tag(_PACKET["trusted_packet_sequence_id"], wire.VARINT) + wire.varint_bytes(SEQUENCE)
        fixed += wire.tag(_PACKET["sequence_flags"], wire.VARINT) + wire.varint_bytes(2)
        packet = [
            wire.constant(len(timestamp), fixed),
            wire.varint_field(_PACKET["timestamp"], timestamp),
            wire.message_field(_PACKET["track_event"], parts),
        ]
        return wire.message_field(_TRACE_PACKET, packet, present)
