"""Turns the tables of one rank into packets: tracks, slices, counters. Chooses no ranks and opens no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, ABSENT32, DType, Op, Phase, ProcessGroup, ReduceOp, UnitKind
from prismtrace.model import COLUMNS, ColumnType, TableKind
from prismtrace.tables import DictionaryColumn, ListColumn, StepTable, Table, UnitTable
from prismtrace_perfetto import naming
from prismtrace_perfetto.lanes import Lanes, NestedLanes
from prismtrace_perfetto.packets import BEGIN, COUNTER, END, INSTANT, PacketWriter
from prismtrace_perfetto.wire import Cells, join

FIRST_PID: Final = 1_000_000
ROWS: Final = 1 << 14
_ENUMS: Final = {"phase": Phase, "op": Op, "reduce_op": ReduceOp, "dtype": DType}
_SHOWN_OTHERWISE: Final = ("kind", "start_ns", "end_ns", "group_id", "label")
_COUNTERS_FROM: Final = 1 << 20
T = TypeVar("T", bound=Table)


@dataclass(frozen=True)
class Style:
    """What of a trace is shown."""

    messages: bool = True
    collectives: bool = True
    annotations: bool = True


@dataclass
class _Track:
    """One line of a rank: its lanes, and the uuid of each."""

    name: str
    order: int
    lanes: Lanes | NestedLanes
    uuids: list[int]


class RankTracks:
    """The tracks of one rank."""

    def __init__(
        self,
        writer: PacketWriter,
        rank: int,
        *,
        groups: Mapping[int, ProcessGroup],
        shift_ns: int,
        style: Style,
        counts: Counter[str],
    ) -> None:
        self.writer = writer
        self._groups = groups
        self.shift_ns = shift_ns
        self.style = style
        self.counts = counts
        self._tracks: dict[Any, _Track] = {}
        self._counters: dict[str, int] = {}
        self._process = writer.add_track(f"rank {rank}", pid=FIRST_PID + rank, order=rank)
        self.counts["tracks"] += 1

    def add_steps(self, steps: StepTable) -> None:
        """The steps that have a start, as slices; their memory and loss as counters."""
        end = steps.end_ns
        timed = np.flatnonzero((steps.start_ns != ABSENT) & (end >= steps.start_ns))
        self.counts["steps without a start (not shown)"] += len(steps) - len(timed)
        if len(timed):
            start, until = steps.start_ns[timed], end[timed]
            order = np.argsort(start, kind="stable")
            track = self.lanes("steps", "steps", start[order], until[order])
            texts = [f"step {number}" for number in steps.step[timed][order].tolist()]
            codes = np.arange(len(texts))
            self.writer.forget_strings()
            name = self.writer.interned("event_names", codes, texts)
            notes = [self.writer.note_numbers("step", steps.step[timed][order])]
            self.slices(start[order], until[order], track, name, self._category("step", len(texts)), notes)
            self.counts["steps"] += len(texts)
        memory = np.flatnonzero(steps.memory_peak_bytes != ABSENT)
        self.counter("memory peak of the step", "bytes", end[memory], steps.memory_peak_bytes[memory])
        loss = np.flatnonzero(~np.isnan(steps.loss))
        self.counter("loss", "", end[loss], steps.loss[loss])

    def add_units(self, units: UnitTable) -> None:
        """Some units, in the order in which they were issued."""
        for start in range(0, len(units), ROWS):
            rows = np.arange(start, min(start + ROWS, len(units)))
            self._add_units(rows_of(units, rows) if len(units) > ROWS else units)

    def _add_units(self, units: UnitTable) -> None:
        start, end = units.start_ns, units.end_ns
        timed = start != ABSENT
        self.counts["units without a start (not shown)"] += int(len(units) - np.count_nonzero(timed))
        rows = np.flatnonzero(timed)
        if not len(rows):
            return
        rows = rows[np.argsort(start[rows], kind="stable")]
        if len(rows) < len(units) or (np.diff(rows) < 0).any():
            units = rows_of(units, rows)
            start, end = units.start_ns, units.end_ns
        instant = end == ABSENT
        self.counts["units without an end (shown as instants)"] += int(np.count_nonzero(instant))
        backwards = ~instant & (end < start)
        self.counts["units that end before they start (shown as instants)"] += int(np.count_nonzero(backwards))
        instant = instant | backwards
        end = np.where(instant, start, end)
        self.writer.forget_strings()
        track = self._unit_tracks(units, start, end)
        flow, flows = naming.flows(units, messages=self.style.messages, collectives=self.style.collectives)
        codes, texts = naming.names(units)
        self.slices(
            start,
            end,
            track,
            self.writer.interned("event_names", codes, texts),
            self.writer.interned("event_categories", units.kind.astype(np.int64), naming.texts_of(UnitKind)),
            list(self._notes(units)) if self.style.annotations else [],
            instant=instant,
            flow=flow,
            flows=flows,
            arrives=flows & (units.kind == UnitKind.RECV) & ~instant,
        )
        self.counts["units"] += len(units)
        memory = np.flatnonzero(units.memory_bytes != ABSENT)
        self.counter("memory", "bytes", start[memory], units.memory_bytes[memory])

    def _unit_tracks(self, units: UnitTable, start: NDArray[Any], end: NDArray[Any]) -> NDArray[np.int64]:
        codes, places = naming.places(units)
        track = np.zeros(len(units), np.int64)
        for code, place in enumerate(places):
            mine = np.flatnonzero(codes == code)
            name = naming.track_name(place, self._groups)
            track[mine] = self.lanes(place, name, start[mine], end[mine])
        return track

    def lanes(
        self, key: Any, name: str, start: NDArray[Any], end: NDArray[Any], *, nested: bool = False
    ) -> NDArray[np.int64]:
        """The uuid of a lane for each slice of one track."""
        track = self._tracks.get(key)
        if track is None:
            order = 0 if key == "steps" else 1 if key == naming.HOST else 2 + len(self._tracks)
            track = self._tracks[key] = _Track(name, order << 10, NestedLanes() if nested else Lanes(), [])
        lane = track.lanes.assign(start, end)
        while len(track.uuids) < track.lanes.num_lanes:
            number = len(track.uuids)
            title = track.name if number == 0 else f"{track.name} (lane {number + 1})"
            order = track.order + min(number, 1023)
            track.uuids.append(self.writer.add_track(title, parent=self._process, order=order))
            self.counts["tracks"] += 1
            self.counts["lanes added for overlaps"] += number > 0
        moved = int(np.count_nonzero(lane))
        self.counts["overlapping slices moved to another lane"] += moved
        return np.array(track.uuids, np.int64)[lane]

    def slices(
        self,
        start: NDArray[Any],
        end: NDArray[Any],
        track: NDArray[Any],
        name: NDArray[Any],
        category: NDArray[Any],
        notes: list[Cells],
        *,
        instant: NDArray[np.bool_] | None = None,
        flow: NDArray[np.uint64] | None = None,
        flows: NDArray[np.bool_] | None = None,
        arrives: NDArray[np.bool_] | None = None,
        types: NDArray[np.uint8] | None = None,
        finished: NDArray[np.bool_] | None = None,
    ) -> None:
        """Write begin and end of each row side by side: of equal times, what ended first stands first.

        Arrows go from the slice that starts first to the other one, and a receive may start before its send. So the
        arrow of a message points at an instant at the end of the receive.
        """
        writer, shift = self.writer, self.shift_ns
        if types is None:
            types = np.full(len(start), BEGIN, np.uint8)
            if instant is not None:
                types[instant] = INSTANT
        here = flows if flows is None or arrives is None else flows & ~arrives
        parts = [
            writer.events(
                timestamp=start + shift, types=types, track=track, name=name, category=category, flow=flow, flows=here,
                notes=notes,
            )
        ]  # fmt: skip
        if arrives is not None and flow is not None and arrives.any():
            received = np.full(len(start), writer.intern("event_names", "received"), np.int64)
            kind = np.full(len(start), INSTANT, np.uint8)
            parts.append(
                writer.events(timestamp=end + shift, types=kind, track=track, name=received, flow=flow, present=arrives)
            )
            self.counts["messages received"] += int(np.count_nonzero(arrives))
        if finished is None and instant is not None:
            finished = ~instant
        ends = np.full(len(start), END, np.uint8)
        parts.append(writer.events(timestamp=end + shift, types=ends, track=track, present=finished))
        writer.flush_strings()
        writer.raw(join(parts).to_bytes())
        self.counts["slices"] += len(start) if finished is None else int(np.count_nonzero(finished))

    def _category(self, text: str, num_rows: int) -> NDArray[np.int64]:
        return np.full(num_rows, self.writer.intern("event_categories", text), np.int64)

    def _notes(self, units: UnitTable) -> Iterator[Cells]:
        """What a viewer lists beside a slice: every column that says something in its row."""
        writer = self.writer
        yield writer.note_numbers("unit", units.row_index)
        group_ids, which = np.unique(units.group_id, return_inverse=True)
        if group_ids.any():
            names = [naming.track_name((1, int(number)), self._groups) for number in group_ids]
            yield writer.note_texts("group", which.reshape(-1), names, units.group_id != 0)
        present = units.columns()
        specs = {spec.name: spec for spec in COLUMNS[TableKind.UNITS]}
        for name, column in present.items():
            if name in _SHOWN_OTHERWISE or isinstance(column, ListColumn):
                continue
            if isinstance(column, DictionaryColumn):
                if column.values and isinstance(column.values[0], str):
                    yield writer.note_texts(name, column.codes, list(column.values), column.codes >= 0)
                continue
            spec = specs.get(name)
            if name in _ENUMS:
                if column.any():
                    yield writer.note_texts(name, column.astype(np.int64), naming.texts_of(_ENUMS[name]), column != 0)
                continue
            if column.dtype.kind == "f":
                valid = ~np.isnan(column)
            elif column.dtype.kind == "b":
                valid = column
            elif spec is not None and not spec.optional:
                valid = column != 0
            else:
                valid = column != (ABSENT32 if spec is not None and spec.type is ColumnType.INT32 else ABSENT)
            if valid.any():
                yield writer.note_numbers(name, column, None if valid.all() else valid)

    def counter(self, name: str, unit: str, time: NDArray[Any], values: NDArray[Any]) -> None:
        if not len(time):
            return
        if name not in self._counters:
            order = _COUNTERS_FROM + len(self._counters)
            self._counters[name] = self.writer.add_track(name, parent=self._process, order=order, counter=unit)
            self.counts["tracks"] += 1
        track = np.full(len(time), self._counters[name], np.int64)
        types = np.full(len(time), COUNTER, np.uint8)
        cells = self.writer.events(timestamp=time + self.shift_ns, types=types, track=track, counter=values)
        self.writer.flush_strings()
        self.writer.raw(cells.to_bytes())
        self.counts["counter values"] += len(time)


def rows_of(table: T, rows: NDArray[Any]) -> T:
    """Some rows of a table, in some order."""
    columns = {n: c[rows] if isinstance(c, np.ndarray) else c.take(rows) for n, c in table.columns().items()}
    about: dict[str, Any] = {"named": table.named_specs} if hasattr(table, "named_specs") else {}
    return type(table)(table.rank, columns, row_index=table.row_index[rows], **about)
