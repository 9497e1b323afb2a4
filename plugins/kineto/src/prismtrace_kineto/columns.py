"""Turns events into typed columns, one set for each shape of event. Knows nothing of files, ranks or meanings.

A shape is the ordered list of an event's keys and of those of its ``args``, with the type of every value, plus ``ph``
and ``cat``. A flow event that directly follows an event of the same place and time becomes part of that event's row.
Types: ``i`` int64, ``dN`` decimals with N digits (int64 without the point), ``vN`` decimals with at most N digits and
no zeros at the end, ``r`` other numbers as text, ``s`` strings, ``b`` booleans, ``n`` null, ``j`` anything as JSON
text, ``t`` process and thread as one number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_TYPES: Final = {int: "i", Decimal: "d", str: "s", bool: "b", type(None): "n"}
_FLOW_KEYS: Final = frozenset({"ph", "id", "pid", "tid", "ts", "cat", "name", "bp"})
_FLOW_PHASES: Final = frozenset("stf")
_RESERVED: Final = frozenset({"track", "flow", "none", "event"})
_MAX_SCALE: Final = 9
ROWS_PER_FLUSH: Final = 1 << 15


@dataclass(frozen=True)
class Flow:
    """The flow event behind an event: its keys, its constant values, and whether its id is args.correlation."""

    keys: tuple[str, ...]
    constants: tuple[tuple[str, str], ...]
    id_is_correlation: bool
    id_type: str = "i"


@dataclass(frozen=True)
class Shape:
    """Keys and types of one kind of event. `fields` are the columns: (path, type); "" in front means in `args`."""

    keys: tuple[str, ...]
    args: tuple[str, ...] | None
    ph: str | None
    cat: str | None
    fields: tuple[tuple[str, str], ...]
    flow: Flow | None = None
    odd: bool = False


@dataclass
class _Slot:
    """Rows of one shape that are not converted yet."""

    keys: tuple[str, ...]
    args: tuple[str, ...] | None
    ph: str | None
    cat: str | None
    names: tuple[str, ...]
    types: tuple[str, ...]
    flow: Flow | None = None
    odd: bool = False
    index: int = 0
    has_track: bool = False
    rows: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass
class Columns:
    """Events as columns: `order` names the shape of every row, `data[shape]` holds the columns of a shape."""

    shapes: list[Shape]
    order: NDArray[np.uint32]
    data: list[list[Array]]
    ends: list[int]
    """Row after the last one of each document."""
    tracks: list[list[tuple[Any, Any]]]
    """Process and thread ids of each document, by track number."""
    strings: list[str]

    def positions(self) -> list[NDArray[np.int64]]:
        """The rows of each shape."""
        by_shape = np.argsort(self.order, kind="stable")
        bounds = np.searchsorted(self.order[by_shape], np.arange(len(self.shapes) + 1))
        return [by_shape[bounds[i] : bounds[i + 1]] for i in range(len(self.shapes))]


def json_text(value: Any) -> str:
    """A JSON text from which `decode` gives the same value; decimals are written as they are."""
    if isinstance(value, Decimal):
        return str(value)
    try:
        return json.dumps(value, separators=(",", ":"))
    except TypeError:
        if isinstance(value, dict):
            return "{" + ",".join(f"{json.dumps(key)}:{json_text(item)}" for key, item in value.items()) + "}"
        return "[" + ",".join(json_text(item) for item in value) + "]"


class ColumnBuilder:
    """Collects the events of one or more documents, in order."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._known: dict[Any, _Slot] = {}
        self._flows: dict[Any, _Slot] = {}
        self._order: list[int] = []
        self._orders: list[Array] = []
        self._shapes: dict[tuple[int, Shape], int] = {}  # two slots may come to one shape; their rows stay apart
        self._data: list[list[list[Array]]] = []
        self._strings: dict[str, int] = {}
        self._json: dict[str, int] = {}
        self._tracks: dict[Any, int] = {}
        self._all_tracks: list[list[tuple[Any, Any]]] = []
        self._ends: list[int] = []
        self._num_rows = 0
        self._last: tuple[_Slot, int, dict[str, Any]] | None = None

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return self._num_rows + len(self._order)

    def add(self, events: Iterable[Any]) -> None:
        """Appends events to the current document."""
        known, order, tracks, last = self._known, self._order, self._tracks, self._last
        key: Any
        for event in events:
            try:
                phase = event.get("ph")
                if last is not None and phase in _FLOW_PHASES and self._attach(event, last):
                    last = None
                    continue
                args = event.get("args")
                if args.__class__ is dict:
                    values = (*event.values(), *args.values())
                    key = (tuple(event), tuple(args), phase, event.get("cat"), tuple(map(type, values)))
                else:
                    values = tuple(event.values())
                    key = (tuple(event), None, phase, event.get("cat"), tuple(map(type, values)))
                slot = known.get(key)
                if slot is None:
                    slot = self._new_slot(event, key)
                last = None
                if slot.has_track:
                    pid, tid = event["pid"], event["tid"]
                    place = (pid.__class__, pid, tid.__class__, tid)
                    track = tracks.get(place)
                    if track is None:
                        track = tracks[place] = len(tracks)
                    values = (*values, track)
                    if phase == "X":
                        last = (slot, track, event)
                slot.rows.append(values)
                order.append(slot.index)
            except (TypeError, AttributeError, KeyError):
                slot = self._odd_slot()
                slot.rows.append((event,))
                last = None
                order.append(slot.index)
        self._last = last
        if len(order) >= ROWS_PER_FLUSH:
            self._flush()

    def end_document(self) -> None:
        """What follows belongs to another document."""
        self._last = None
        self._flush()
        self._ends.append(self._num_rows)
        self._all_tracks.append([(pid, tid) for _, pid, _, tid in self._tracks])
        self._tracks.clear()

    def finish(self) -> Columns:
        """All columns; the builder is empty afterwards except for nothing worth keeping."""
        data: list[list[Array]] = []
        for parts in self._data:
            data.append([np.concatenate(list(column)) for column in zip(*parts, strict=True)] if parts else [])
            parts.clear()
        order = np.concatenate(self._orders) if self._orders else np.zeros(0, np.uint32)
        return Columns(
            [shape for _, shape in self._shapes], order, data, self._ends, self._all_tracks, list(self._strings)
        )

    # --- slots -------------------------------------------------------------------------------------------------------

    def _add_slot(self, slot: _Slot) -> _Slot:
        slot.index, slot.has_track = len(self._slots), "t" in slot.types
        self._slots.append(slot)
        return slot

    def _new_slot(self, event: dict[str, Any], key: Any) -> _Slot:
        keys, args, phase, cat, types = key
        if any(name.startswith("args.") or name in _RESERVED for name in keys):
            raise KeyError("a key that columns are named by")
        names: list[str] = list(keys)
        letters = [_TYPES.get(kind, "j") for kind in types]
        if args is not None:
            names += [f"args.{name}" for name in args]
            letters[keys.index("args")] = "n"
        if phase.__class__ is str:
            letters[keys.index("ph")] = "n"
        if cat.__class__ is str:
            letters[keys.index("cat")] = "n"
        if "pid" in event and "tid" in event and event["pid"].__class__ in _TYPES and event["tid"].__class__ in _TYPES:
            letters[keys.index("pid")] = letters[keys.index("tid")] = "n"
            names.append("track")
            letters.append("t")
        slot = _Slot(
            keys, args, phase if phase.__class__ is str else None, cat if cat.__class__ is str else None,
            tuple(names), tuple(letters),
        )  # fmt: skip
        self._known[key] = self._add_slot(slot)
        return slot

    def _odd_slot(self) -> _Slot:
        if "odd" not in self._known:
            self._known["odd"] = self._add_slot(_Slot((), None, None, None, ("event",), ("j",), odd=True))
        return self._known["odd"]

    def _attach(self, event: dict[str, Any], last: tuple[_Slot, int, dict[str, Any]]) -> bool:
        """Puts a flow event into the row before it, where nothing of it gets lost."""
        before, track, host = last
        if "ts" not in event or "ts" not in host or "pid" not in event or "tid" not in event:
            return False
        number, pid, tid, time, start = event.get("id"), event["pid"], event["tid"], event["ts"], host["ts"]
        if self._tracks.get((pid.__class__, pid, tid.__class__, tid)) != track or number.__class__ is not int:
            return False
        if time.__class__ is not start.__class__ or str(time) != str(start):
            return False
        args = host.get("args")
        same = args.__class__ is dict and args.get("correlation") == number and args["correlation"].__class__ is int
        key = (before.index, tuple(event), event["ph"], event.get("cat"), event.get("name"), event.get("bp"), same)
        slot = self._flows.get(key)
        if slot is None:
            constants = tuple((name, event[name]) for name in event if name not in ("id", "pid", "tid", "ts"))
            if not _FLOW_KEYS.issuperset(event) or any(value.__class__ is not str for _, value in constants):
                return False
            names, types = before.names, before.types
            if not same:
                names, types = (*names, "flow"), (*types, "i")
            flow = Flow(tuple(event), constants, same)
            slot = self._add_slot(_Slot(before.keys, before.args, before.ph, before.cat, names, types, flow))
            self._flows[key] = slot
        row = before.rows.pop()
        slot.rows.append(row if same else (*row, number))
        self._order[-1] = slot.index
        return True

    # --- columns ------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if not self._order:
            return
        final = np.zeros(len(self._slots), np.uint32)
        for index, slot in enumerate(self._slots):
            if slot.rows:
                final[index] = self._convert(index, slot)
        self._orders.append(final[np.array(self._order, np.int64)])
        self._num_rows += len(self._order)
        self._order.clear()
        self._last = None

    def _convert(self, number: int, slot: _Slot) -> int:
        fields: list[tuple[str, str]] = []
        arrays: list[Array] = []
        for name, letter, values in zip(slot.names, slot.types, zip(*slot.rows, strict=True), strict=True):
            if letter != "n":
                kind, array = self._typed(letter, values)
                fields.append((name, kind))
                arrays.append(array)
        if not fields:
            fields, arrays = [("none", "b")], [np.zeros(len(slot.rows), np.uint8)]
        slot.rows.clear()
        shape = Shape(slot.keys, slot.args, slot.ph, slot.cat, tuple(fields), slot.flow, slot.odd)
        index = self._shapes.setdefault((number, shape), len(self._shapes))
        if index == len(self._data):
            self._data.append([])
        self._data[index].append(arrays)
        return index

    def _typed(self, letter: str, values: tuple[Any, ...]) -> tuple[str, Array]:
        if letter in "it":
            try:
                return letter, np.array(values, np.int64)
            except OverflowError:
                return "r", self._codes(map(str, values))
        if letter == "s":
            return "s", self._codes(values)
        if letter == "b":
            return "b", np.array(values, np.uint8)
        if letter == "d":
            texts = list(map(str, values))
            return decimals(texts) or ("r", self._codes(texts))
        return "j", self._json_codes(values)

    def _codes(self, texts: Iterable[str]) -> NDArray[np.int64]:
        strings = self._strings
        result = []
        for text in texts:
            code = strings.get(text)
            if code is None:
                code = strings[text] = len(strings)
            result.append(code)
        return np.array(result, np.int64)

    def _json_codes(self, values: Iterable[Any]) -> NDArray[np.int64]:
        known = self._json
        if len(known) > 1 << 16:
            known.clear()
        result = []
        for value in values:
            key = repr(value)
            code = known.get(key)
            if code is None:
                code = known[key] = int(self._codes([json_text(value)])[0])
            result.append(code)
        return np.array(result, np.int64)


def decimals(texts: list[str]) -> tuple[str, NDArray[np.int64]] | None:
    """Decimal texts as integers, when every text can be made from its integer again."""
    joined = " ".join(texts)
    if not set(joined) <= set("0123456789.- ") or max(map(len, texts)) > 21:
        return None
    if "-0" in joined and any(text[0] == "-" and not text.strip("-0.") for text in texts):
        return None  # an integer has no negative zero
    scales = {len(text) - text.find(".") - 1 if "." in text else 0 for text in texts}
    scale = max(scales)
    if scale > _MAX_SCALE:
        return None
    if len(scales) == 1:
        kind, plain = f"d{scale}", joined.replace(".", "")
    else:
        if any("." not in text or (text[-1] == "0" and text[-2] != ".") for text in texts):
            return None
        kind = f"v{scale}"
        plain = " ".join(text.replace(".", "") + "0" * (scale - len(text) + text.find(".") + 1) for text in texts)
    try:
        return kind, np.array(list(map(int, plain.split())), np.int64)
    except OverflowError:
        return None


def decimal_texts(kind: str, values: NDArray[np.int64]) -> list[str]:
    """What `decimals` was given."""
    scale = int(kind[1:])
    texts: list[str] = []
    for value in values.tolist():
        sign, digits = ("-", str(-value)) if value < 0 else ("", str(value))
        if not scale:
            texts.append(sign + digits)
            continue
        digits = digits.zfill(scale + 1)
        fraction = digits[-scale:]
        if kind[0] == "v":
            fraction = fraction.rstrip("0") or "0"
        texts.append(f"{sign}{digits[:-scale]}.{fraction}")
    return texts
