"""Columns of events as one compact block and back, nothing lost. Knows no files, and few keys.

Layout, in the order of the streams: strings; documents; shapes; the shape of every row; the track of every row; names;
times; all other columns. A column is kept once for each category and key, in row order or sorted by
name, whichever is smaller.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace_kineto import nesting
from prismtrace_kineto.columns import Columns, Flow, Shape
from prismtrace_kineto.packing import Packer, PackError, Unpacker

Array = NDArray[Any]
Ints = NDArray[np.int64]
_TIME_TYPES: Final = frozenset({"i", "d0", "d1", "d2", "d3", "v1", "v2", "v3"})
_CODED: Final = "srj"


@dataclass(frozen=True)
class DocumentText:
    """What stands around the events of one document."""

    rank: int
    name: str
    prefix: str
    suffix: str


def nanoseconds(kind: str, values: Array) -> Ints:
    """Microseconds of type `kind` as integer nanoseconds."""
    return values * np.int64(1000 if kind == "i" else 10 ** (3 - int(kind[1:])))


def from_nanoseconds(kind: str, values: Array) -> Ints:
    """The reverse of `nanoseconds`."""
    return values // np.int64(1000 if kind == "i" else 10 ** (3 - int(kind[1:])))


def time_fields(shape: Shape) -> tuple[int, int] | None:
    """Which columns of a shape are start and duration, if both are exact numbers and the place is known."""
    found = {name: index for index, (name, kind) in enumerate(shape.fields) if kind in _TIME_TYPES}
    if "ts" in found and "dur" in found and ("track", "t") in shape.fields:
        return found["ts"], found["dur"]
    return None


def _shape_json(shape: Shape) -> list[Any]:
    flow = shape.flow and [
        list(shape.flow.keys),
        [list(pair) for pair in shape.flow.constants],
        shape.flow.id_is_correlation,
    ]
    args = None if shape.args is None else list(shape.args)
    return [list(shape.keys), args, shape.ph, shape.cat, [list(pair) for pair in shape.fields], flow, shape.odd]


def _shape_of(data: list[Any]) -> Shape:
    keys, args, ph, cat, fields, flow, odd = data
    parsed = flow and Flow(tuple(flow[0]), tuple((name, value) for name, value in flow[1]), bool(flow[2]))
    pairs = tuple((str(name), str(kind)) for name, kind in fields)
    return Shape(tuple(keys), None if args is None else tuple(args), ph, cat, pairs, parsed or None, bool(odd))


@dataclass
class _Group:
    """One column over all shapes of a category that have it: which rows, and which part of it is which shape's."""

    kind: str
    shapes: list[int]
    fields: list[int]


def _groups(shapes: list[Shape], skip: set[tuple[int, int]]) -> dict[tuple[str, str, str, str], _Group]:
    groups: dict[tuple[str, str, str, str], _Group] = {}
    for index, shape in enumerate(shapes):
        for position, (name, kind) in enumerate(shape.fields):
            if (index, position) not in skip:
                key = (str(shape.ph), str(shape.cat), name, kind)
                group = groups.setdefault(key, _Group(kind, [], []))
                group.shapes.append(index)
                group.fields.append(position)
    return groups


class _Layout:
    """What encoder and decoder both know once the shapes of all rows are known."""

    def __init__(self, shapes: list[Shape], order: Array, ends: list[int]) -> None:
        self.shapes, self.order, self.ends = shapes, order, ends
        by_shape = np.argsort(order, kind="stable")
        bounds = np.searchsorted(order[by_shape], np.arange(len(shapes) + 1))
        self.positions = [by_shape[bounds[i] : bounds[i + 1]] for i in range(len(shapes))]
        self.document = np.repeat(np.arange(len(ends)), np.diff([0, *ends])) if ends else np.zeros(0, np.int64)
        categories: dict[str | None, int] = {}
        self.category = np.array([categories.setdefault(shape.cat, len(categories)) for shape in shapes], np.int64)
        self.timed = [time_fields(shape) for shape in shapes]

    def rows(self, group: _Group) -> tuple[Ints, Ints]:
        """The rows of a group, ascending, and the permutation that sorts its concatenated parts that way."""
        rows = np.concatenate([self.positions[index] for index in group.shapes])
        order = np.argsort(rows, kind="stable")
        return rows[order], order

    def special(self) -> set[tuple[int, int]]:
        """Columns that are not stored as groups: tracks, names, times."""
        result: set[tuple[int, int]] = set()
        for index, shape in enumerate(self.shapes):
            for position, (name, kind) in enumerate(shape.fields):
                if name == "track" or (name == "name" and kind == "s") or position in (self.timed[index] or ()):
                    result.add((index, position))
        return result

    def collect(self, data: list[list[Array]], name: str, kind: str) -> Ints:
        """A column over all rows; -1 where a row has none."""
        values = np.full(len(self.order), -1, np.int64)
        for index, shape in enumerate(self.shapes):
            if (name, kind) in shape.fields:
                values[self.positions[index]] = data[index][shape.fields.index((name, kind))]
        return values

    def spread(self, data: list[list[Array]], name: str, kind: str, values: Array) -> None:
        """The reverse of `collect`."""
        for index, shape in enumerate(self.shapes):
            if (name, kind) in shape.fields:
                data[index][shape.fields.index((name, kind))] = values[self.positions[index]]


def encode(columns: Columns, documents: list[DocumentText]) -> bytes:
    """The block."""
    packer = Packer()
    packer.strings(columns.strings)
    packer.value(columns.ends)
    texts = [text for document in documents for text in (document.name, document.prefix, document.suffix)]
    packer.strings(texts)
    packer.value([document.rank for document in documents])
    packer.strings([json.dumps([[_plain(pid), _plain(tid)] for pid, tid in tracks]) for tracks in columns.tracks])
    packer.strings([json.dumps([_shape_json(shape) for shape in columns.shapes], separators=(",", ":"))])
    packer.integers(columns.order, how="")
    layout = _Layout(columns.shapes, columns.order, columns.ends)
    data = columns.data
    track = layout.collect(data, "track", "t")
    has_track = track >= 0
    packer.integers(track[has_track], order=np.argsort(columns.order[has_track], kind="stable"))
    names = layout.collect(data, "name", "s")
    named = names >= 0
    packer.codes(names[named])
    _encode_times(packer, layout, data, track, names)
    known: dict[tuple[int, ...], list[Array]] = {}
    for group in _groups(columns.shapes, layout.special()).values():
        rows, order = layout.rows(group)
        values = np.concatenate([data[s][f] for s, f in zip(group.shapes, group.fields, strict=True)])[order]
        by_name = np.argsort(names[rows], kind="stable")
        if group.kind in _CODED:
            packer.codes(values, order=by_name)
        else:
            others = known.setdefault(tuple(group.shapes), [])
            packer.integers(values, order=by_name, others=others)
            if len(others) < 4:
                others.append(values.astype(np.int64))
    return packer.finish()


def decode(block: bytes) -> tuple[Columns, list[DocumentText]]:
    """What `encode` was given; raises PackError."""
    try:
        return _decode(Unpacker(block))
    except PackError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise PackError(f"the packed events contradict each other: {error}") from error


def _decode(unpacker: Unpacker) -> tuple[Columns, list[DocumentText]]:
    strings = unpacker.strings()
    ends = [int(end) for end in unpacker.value()]
    texts = unpacker.strings()
    ranks = unpacker.value()
    documents = [DocumentText(rank, *texts[3 * number : 3 * number + 3]) for number, rank in enumerate(ranks)]
    tracks = [[(_lifted(pid), _lifted(tid)) for pid, tid in json.loads(text)] for text in unpacker.strings()]
    shapes = [_shape_of(item) for item in json.loads(unpacker.strings()[0])]
    order = unpacker.integers()
    layout = _Layout(shapes, order, ends)
    data: list[list[Array]] = [[np.zeros(0, np.int64)] * len(shape.fields) for shape in shapes]
    has_track = np.array([("track", "t") in shape.fields for shape in shapes], np.bool_)[order]
    track = np.full(len(order), -1, np.int64)
    track[has_track] = unpacker.integers(order=np.argsort(order[has_track], kind="stable"))
    layout.spread(data, "track", "t", track)
    named = np.array([("name", "s") in shape.fields for shape in shapes], np.bool_)[order]
    names = np.full(len(order), -1, np.int64)
    names[named] = unpacker.codes()
    layout.spread(data, "name", "s", names)
    _decode_times(unpacker, layout, data, track, names)
    known: dict[tuple[int, ...], list[Array]] = {}
    for group in _groups(shapes, layout.special()).values():
        rows, sorting = layout.rows(group)
        by_name = np.argsort(names[rows], kind="stable")
        if group.kind in _CODED:
            values = unpacker.codes(order=by_name)
        else:
            others = known.setdefault(tuple(group.shapes), [])
            values = unpacker.integers(order=by_name, others=others)
            if len(others) < 4:
                others.append(values)
        parts = np.empty_like(values)
        parts[sorting] = values
        start = 0
        for shape_index, field_index in zip(group.shapes, group.fields, strict=True):
            size = len(layout.positions[shape_index])
            data[shape_index][field_index] = parts[start : start + size]
            start += size
    return Columns(shapes, order.astype(np.uint32), data, ends, tracks, strings), documents


def _plain(value: Any) -> Any:
    return {"d": str(value)} if type(value).__name__ == "Decimal" else value


def _lifted(value: Any) -> Any:
    from decimal import Decimal

    return Decimal(value["d"]) if isinstance(value, dict) else value


# --- times ---------------------------------------------------------------------------------------------------------


def _encode_times(packer: Packer, layout: _Layout, data: list[list[Array]], track: Ints, names: Ints) -> None:
    start = np.zeros(len(layout.order), np.int64)
    length = np.full(len(layout.order), -1, np.int64)
    timed = np.zeros(len(layout.order), np.bool_)
    for index, fields in enumerate(layout.timed):
        if fields is not None:
            for target, position in zip((start, length), fields, strict=True):
                kind = layout.shapes[index].fields[position][1]
                target[layout.positions[index]] = nanoseconds(kind, data[index][position])
            timed[layout.positions[index]] = True
    lane = _lanes(layout, track)
    rows = np.flatnonzero(timed)
    flat = length[rows] < 0
    spans = rows[~flat]
    spans = spans[nesting.in_time_order(lane[spans], start[spans], start[spans] + length[spans])]
    crosses = nesting.crossing(lane[spans], start[spans], start[spans] + length[spans])
    odd = np.sort(np.concatenate([rows[flat], spans[crosses]]))
    spans = spans[~crosses]
    packer.integers(np.searchsorted(rows, odd), how="d")
    packer.integers(start[odd], how="d")
    packer.integers(length[odd], others=[])
    # Which row each span is: its category, then how far it is from its place in the order of rows.
    category = layout.category[layout.order[spans]]
    packer.integers(category, how="")
    packer.integers(_displacement(lane[spans], category, spans), how="z")
    begins, who, gaps = nesting.to_gaps(lane[spans], start[spans], start[spans] + length[spans])
    packer.data(np.packbits(begins).tobytes())
    first = np.diff(lane[spans][who], prepend=-1) != 0
    packer.integers(gaps[first], how="d")
    rest = gaps[~first]
    scale = 1000 if len(rest) and not (rest % 1000).any() else 1
    packer.value(scale)
    context = names[spans][who] * 2 + begins + 2
    size = _sizes(context[~first], rest // scale)
    packer.integers(size[1])
    packer.integers(rest // scale, order=_by_context(context, first, size), how="s")


def _decode_times(unpacker: Unpacker, layout: _Layout, data: list[list[Array]], track: Ints, names: Ints) -> None:
    timed = np.array([fields is not None for fields in layout.timed], np.bool_)
    rows = np.flatnonzero(timed[layout.order]) if len(layout.order) else np.zeros(0, np.int64)
    lane = _lanes(layout, track)
    start = np.zeros(len(layout.order), np.int64)
    length = np.zeros(len(layout.order), np.int64)
    odd = rows[unpacker.integers()]
    start[odd] = unpacker.integers()
    length[odd] = unpacker.integers(others=[])
    category = unpacker.integers()
    displaced = unpacker.integers()
    ordinary = np.setdiff1d(rows, odd, assume_unique=True)
    # Spans lie track by track; within one, the n-th of a category is the n-th row of it, moved by its displacement.
    lanes = np.sort(lane[ordinary])
    spans = np.empty(len(ordinary), np.int64)
    wanted = np.lexsort((np.arange(len(lanes)), category, lanes))
    there = np.lexsort((ordinary, layout.category[layout.order[ordinary]], lane[ordinary]))
    spans[wanted] = ordinary[there[np.arange(len(there)) + displaced[wanted]]]
    begins = np.unpackbits(np.frombuffer(unpacker.data(), np.uint8), count=2 * len(spans)).astype(np.bool_)
    who = nesting.spans_of(begins)
    first = np.diff(lane[spans][who], prepend=-1) != 0
    gaps = np.empty(len(begins), np.int64)
    gaps[first] = unpacker.integers()
    scale = unpacker.value()
    context = names[spans][who] * 2 + begins + 2
    distinct = np.unique(context[~first])
    size = (distinct, unpacker.integers())
    gaps[~first] = unpacker.integers(order=_by_context(context, first, size)) * scale
    start[spans], end = nesting.from_gaps(lane[spans], begins, gaps)
    length[spans] = end - start[spans]
    for index, fields in enumerate(layout.timed):
        if fields is not None:
            for source, position in zip((start, length), fields, strict=True):
                kind = layout.shapes[index].fields[position][1]
                data[index][position] = from_nanoseconds(kind, source[layout.positions[index]])


def _lanes(layout: _Layout, track: Ints) -> Ints:
    """Tracks numbered over all documents."""
    return layout.document * np.int64(1 << 32) + track


def _displacement(lane: Array, category: Array, spans: Array) -> Ints:
    """For the n-th span of a lane and category: how many places its row is from the n-th row of them."""
    by_time = np.lexsort((np.arange(len(spans)), category, lane))
    by_row = np.lexsort((spans, category, lane))
    place = np.empty(len(spans), np.int64)
    place[by_row] = np.arange(len(spans))
    result = np.empty(len(spans), np.int64)
    result[by_time] = place[by_time] - np.arange(len(spans))
    return result


def _sizes(context: Array, gaps: Array) -> tuple[Ints, Ints]:
    """Each context, and how large its gaps are on a coarse scale."""
    distinct, inverse = np.unique(context, return_inverse=True)
    order = np.lexsort((gaps, inverse))
    bounds = np.searchsorted(inverse[order], np.arange(len(distinct) + 1))
    middle = gaps[order][(bounds[:-1] + bounds[1:]) // 2] if len(distinct) else np.zeros(0, np.int64)
    return distinct, np.round(6 * np.log2(1 + np.maximum(middle, 0))).astype(np.int64)


def _by_context(context: Array, first: Array, sizes: tuple[Ints, Ints]) -> Ints:
    """A permutation of the gaps that brings alike ones together: by this point and the one before, by their sizes."""
    distinct, size = sizes
    before = np.concatenate([context[:1], context[:-1]])[~first]
    here = context[~first]
    known = np.append(size, 0)

    ordered = np.lexsort((np.arange(len(known)), known))
    position = np.empty(len(known), np.int64)
    position[ordered] = np.arange(len(known))

    def rank(points: Array) -> Ints:
        place = np.searchsorted(distinct, points)
        missing = np.append(distinct, -1)[place] != points
        return position[np.where(missing, len(distinct), place)]

    return np.lexsort((rank(before), rank(here)))
