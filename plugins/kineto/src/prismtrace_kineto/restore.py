"""Writes the JSON of losslessly imported documents again. Does not read traces or choose file names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace_kineto.columns import Columns, Shape, decimal_texts, json_text
from prismtrace_kineto.lossless import DocumentText

Array = NDArray[Any]
_ROWS: Final = 1 << 15


class _Texts:
    """JSON texts of the strings of a block, each made once."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._quoted: dict[int, str] = {}

    def quoted(self, codes: list[int]) -> list[str]:
        """String values."""
        known, strings = self._quoted, self._strings
        result = []
        for code in codes:
            text = known.get(code)
            if text is None:
                text = known[code] = json.dumps(strings[code])
            result.append(text)
        return result

    def column(self, kind: str, values: Array) -> list[str]:
        """The values of one column."""
        if kind == "s":
            return self.quoted(values.tolist())
        if kind in "rj":
            return [self._strings[code] for code in values.tolist()]
        if kind == "b":
            return ["true" if value else "false" for value in values.tolist()]
        if kind[0] in "dv":
            return decimal_texts(kind, values)
        return list(map(str, values.tolist()))


def _template(shape: Shape) -> tuple[str, list[str]]:
    """A %-template of an event of this shape, and the fields that fill it (`pid` and `tid` come from the track)."""
    names = {name for name, _ in shape.fields}
    fields: list[str] = []

    def slot(name: str) -> str:
        fields.append(name)
        return "%s"

    def pair(key: str, value: str) -> str:
        return f"{json.dumps(key).replace('%', '%%')}: {value}"

    def constant(value: str) -> str:
        return json.dumps(value).replace("%", "%%")

    def top(key: str) -> str:
        if key == "args" and shape.args is not None:
            inner = (pair(name, slot(f"args.{name}") if f"args.{name}" in names else "null") for name in shape.args)
            return "{" + ", ".join(inner) + "}"
        if key == "ph" and shape.ph is not None:
            return constant(shape.ph)
        if key == "cat" and shape.cat is not None:
            return constant(shape.cat)
        if key in ("pid", "tid") and "track" in names:
            return slot(key)
        return slot(key) if key in names else "null"

    text = "{" + ", ".join(pair(key, top(key)) for key in shape.keys) + "}"
    if shape.flow is not None:
        constants = dict(shape.flow.constants)

        def of_flow(key: str) -> str:
            if key == "id":
                return slot("args.correlation" if shape.flow and shape.flow.id_is_correlation else "flow")
            return constant(constants[key]) if key in constants else slot(key)

        text += ",\n{" + ", ".join(pair(key, of_flow(key)) for key in shape.flow.keys) + "}"
    return text, fields


def event_texts(columns: Columns, document: int) -> Iterator[list[str]]:
    """The events of one document as JSON texts, some thousand rows at a time."""
    first = columns.ends[document - 1] if document else 0
    last = columns.ends[document]
    texts = _Texts(columns.strings)
    tracks = [(json_text(pid), json_text(tid)) for pid, tid in columns.tracks[document]]
    templates = [None if shape.odd else _template(shape) for shape in columns.shapes]
    used = np.bincount(columns.order[:first], minlength=len(columns.shapes))
    for start in range(first, last, _ROWS):
        order = columns.order[start : min(start + _ROWS, last)]
        rows = [""] * len(order)
        for index in np.unique(order).tolist():
            places = np.flatnonzero(order == index).tolist()
            low, high = int(used[index]), int(used[index]) + len(places)
            used[index] = high
            values = _rows(columns, index, low, high, templates[index], texts, tracks)
            for place, text in zip(places, values, strict=True):
                rows[place] = text
        yield rows


def _rows(
    columns: Columns, index: int, low: int, high: int, template: tuple[str, list[str]] | None, texts: _Texts,
    tracks: list[tuple[str, str]],
) -> list[str]:  # fmt: skip
    shape, data = columns.shapes[index], columns.data[index]
    if template is None:
        return texts.column("j", data[0][low:high])
    text, fields = template
    if not fields:
        return [text % ()] * (high - low)
    made: dict[str, list[str]] = {}
    for (name, kind), column in zip(shape.fields, data, strict=True):
        if kind == "t":
            pairs = [tracks[track] for track in column[low:high].tolist()]
            made["pid"], made["tid"] = [pid for pid, _ in pairs], [tid for _, tid in pairs]
        else:
            made[name] = texts.column(kind, column[low:high])
    return [text % row for row in zip(*(made[name] for name in fields), strict=True)]


def write_document(columns: Columns, document: int, around: DocumentText, file: IO[bytes]) -> int:
    """Writes one document and returns the number of rows. A document that was cut off is closed properly."""
    file.write(around.prefix.encode("utf-8", "surrogateescape"))
    count = 0
    for rows in event_texts(columns, document):
        file.write(((",\n" if count else "\n") + ",\n".join(rows)).encode("utf-8"))
        count += len(rows)
    suffix = around.suffix or ("\n]}" if around.prefix.startswith("{") else "\n]")
    file.write(suffix.encode("utf-8", "surrogateescape"))
    return count
