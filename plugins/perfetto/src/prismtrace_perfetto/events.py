"""Turns the events of one rank (imported or profiled ones, beside its units) into packets. Writes no units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, ABSENT32
from prismtrace.tables import DictionaryColumn, ListColumn
from prismtrace_perfetto.naming import mixed
from prismtrace_perfetto.packets import BEGIN, END, INSTANT
from prismtrace_perfetto.ranks import ROWS, RankTracks, rows_of
from prismtrace_perfetto.wire import Cells

SPAN, POINT, COUNTER, METADATA, OPEN, CLOSE = 1, 2, 3, 7, 8, 9
FLOWS: Final = (4, 5, 6)
_REGISTERED: Final = ("name", "category", "kind", "track", "start_ns", "end_ns", "flow_id")


def add_events(ranks: RankTracks, events: Any, tracks: Any) -> None:
    """Spans become slices, instants and flow events instants, counters counters; the rest is counted.

    Spans of one ``correlation_id`` (a launch and what it launched) and events of one ``flow_id`` are joined by arrows.
    """
    kind, start = events.kind, events.start_ns
    ranks.counts["events without a time (not shown)"] += int(np.count_nonzero((start == ABSENT) & (kind != METADATA)))
    ranks.counts["metadata events (not shown)"] += int(np.count_nonzero(kind == METADATA))
    timed = (start != ABSENT) & (kind != METADATA)
    counters = timed & (kind == COUNTER)
    if counters.any():
        _add_counters(ranks, rows_of(events, np.flatnonzero(counters)))
    rows = np.flatnonzero(timed & ~counters)
    end = np.where(events.end_ns == ABSENT, start, events.end_ns)[rows]
    rows = rows[np.lexsort((-end, start[rows]))]
    titles = [_title(tracks, row) for row in range(len(tracks))]
    for first in range(0, len(rows), ROWS):
        _add_rows(ranks, rows_of(events, rows[first : first + ROWS]), titles)


def _title(tracks: Any, row: int) -> str:
    """What a track is called: its name, else what it is."""
    if tracks.name[row]:
        return str(tracks.name[row])
    if tracks.stream[row] != ABSENT:
        return f"stream {tracks.stream[row]}"
    return f"thread {tracks.thread_id[row]}" if tracks.thread_id[row] != ABSENT else f"track {row}"


def _add_rows(ranks: RankTracks, events: Any, titles: list[str]) -> None:
    writer, kind, start = ranks.writer, events.kind, events.start_ns
    writer.forget_strings()
    spans = (events.end_ns != ABSENT) & (events.end_ns >= start) & np.isin(kind, (0, SPAN))
    end = np.where(spans, events.end_ns, start)
    open_close = np.isin(kind, (OPEN, CLOSE))
    place = np.where(events.track == ABSENT32, -1, events.track)
    uuid = np.zeros(len(events), np.int64)
    for number in np.unique(place).tolist():
        title = titles[number] if 0 <= number < len(titles) else "events" if number < 0 else f"track {number}"
        for apart in (False, True):
            mine = np.flatnonzero((place == number) & (open_close == apart))
            if len(mine):
                zero = np.zeros(len(mine), np.int64)  # of begin and end events alone nothing is known of their lengths
                times = (zero, zero) if apart else (start[mine], end[mine])
                name = f"{title} (begin and end)" if apart else title
                uuid[mine] = ranks.lanes(("events", number, apart), name, *times, nested=True)
    codes = np.where(events.name.codes >= 0, events.name.codes, len(events.name.values))
    name = writer.interned("event_names", codes, [*events.name.values, "event"])
    codes = np.where(events.category.codes >= 0, events.category.codes, len(events.category.values))
    category = writer.interned("event_categories", codes, [*events.category.values, "event"])
    flow, flows = _flows(events)
    ranks.slices(
        start,
        end,
        uuid,
        name,
        category,
        list(_notes(ranks, events)) if ranks.style.annotations else [],
        instant=~spans & ~open_close,
        flow=flow,
        flows=flows if ranks.style.messages else np.zeros(len(events), np.bool_),
        types=np.where(spans | (kind == OPEN), BEGIN, np.where(kind == CLOSE, END, INSTANT)).astype(np.uint8),
        finished=spans,
    )
    ranks.counts["events"] += len(events)


def _flows(events: Any) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    own = events.flow_id != ABSENT
    launched = ~own & (events.correlation_id != ABSENT) & (events.kind == SPAN)
    number = np.where(own, events.flow_id, events.correlation_id).astype(np.int64).view(np.uint64)
    salt = np.where(own, np.uint64(1), np.uint64(2)) + np.uint64(events.rank * 4)
    return mixed(mixed(salt) ^ number), own | launched


def _notes(ranks: RankTracks, events: Any) -> Iterator[Cells]:
    for name, column in events.columns().items():
        if name in _REGISTERED or isinstance(column, ListColumn):
            continue
        if isinstance(column, DictionaryColumn):
            if column.values and isinstance(column.values[0], str):
                present = column.codes >= 0
                yield ranks.writer.note_texts(name, column.codes, list(column.values), present)
            continue
        present = ~np.isnan(column) if column.dtype.kind == "f" else column != ABSENT
        if present.any():
            yield ranks.writer.note_numbers(name, column, present)


def _add_counters(ranks: RankTracks, events: Any) -> None:
    """A counter for each name and each column of numbers beside the registry's."""
    for name, column in events.columns().items():
        if "." not in name or not isinstance(column, np.ndarray) or column.dtype.kind not in "if":
            continue
        present = ~np.isnan(column) if column.dtype.kind == "f" else column != ABSENT
        for code in np.unique(events.name.codes[present]).tolist():
            rows = np.flatnonzero(present & (events.name.codes == code))
            title = events.name.values[code] if code >= 0 else "counter"
            ranks.counter(f"{title} {name}", "", events.start_ns[rows], column[rows])
