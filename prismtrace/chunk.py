"""Encodes rows of one table into a chunk: of a rank, of a role, or of ranks that differ little from their role.

Does not write files and does not decode; `decoder` does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace._generated.schema import Encoding, StreamPart
from prismtrace.columns import DIGEST_BYTES, MAX_DICTIONARY, Rows
from prismtrace.dense import dense_interval, laps_of
from prismtrace.dictionaries import DICTIONARY_COLUMN
from prismtrace.encoders import (
    encode_bytes,
    encode_differences,
    encode_distinct,
    encode_floats,
    encode_integers,
    encode_interval,
)
from prismtrace.encoding import MAX_STREAM_BYTES, Stream
from prismtrace.entries import ChunkMeta, ranges_of
from prismtrace.errors import TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, FIRST_NAMED_COLUMN, ColumnSpec, ColumnType, TableKind
from prismtrace.roles import INTEGERS, Difference, Template, present, same_rows, wide
from prismtrace.strings import SharedStrings
from prismtrace.tables import Column, DictionaryColumn, ListColumn, missing_column

_INTERVAL: Final = ("start_ns", "end_ns")
NO_STEPS: Final = (0, -1)
NO_TIMES: Final = (0, -1)

Encoded = tuple[ChunkMeta, list[bytes | memoryview]]


def encode_chunk(
    table: TableKind,
    *,
    rank: int,
    first_row: int,
    rows: Rows,
    role: int = 0,
    shared: SharedStrings | None = None,
    dense: bool = False,
) -> Encoded:
    """The header of a chunk that needs no other, and the buffers of its data section. `dense`: as format 1.1 has it."""
    encoder = ChunkEncoder(table, rows, shared, laps=laps_of(rows) if dense else None)
    paired = encoder.add_interval(rows)
    for spec in rows.specs:
        if spec.name not in paired:
            encoder.add(spec, rows.columns[spec.name])
    return encoder.finish(rank=rank, first_row=first_row, role=role)


def encode_member(
    table: TableKind,
    *,
    rank: int,
    first_row: int,
    rows: Rows,
    role: int,
    template: Template,
    shared: SharedStrings | None = None,
    dense: bool = False,
) -> Encoded:
    """A chunk of a rank that holds only what differs from the role."""
    encoder = ChunkEncoder(table, rows, shared, laps=laps_of(rows) if dense else None)
    different: list[ColumnSpec] = []
    for difference in template.differences(rows):
        if difference.same:
            continue
        if difference.shift is not None:
            encoder.add_shift(difference.spec, [difference.shift])
        elif difference.mapped is not None:
            encoder.add_map(difference.spec, template, [difference])
        else:
            different.append(difference.spec)
    encoder.add_different(different, template)
    return encoder.finish(rank=rank, first_row=first_row, role=role)


def encode_members(
    table: TableKind,
    *,
    ranks: Sequence[int],
    first_row: int,
    role: int,
    template: Template,
    differences: Sequence[Sequence[Difference]],
) -> Encoded:
    """One chunk of several ranks (rising) that differ from the role by shifts and maps only."""
    encoder = ChunkEncoder(table, template.rows)
    changed: dict[str, tuple[int, int]] = {}
    for column in zip(*differences, strict=True):
        spec = column[0].spec
        if all(item.same for item in column):
            continue
        shifts = [item.shift for item in column if item.shift is not None]
        if len(shifts) == len(column):
            encoder.add_shift(spec, shifts)
        else:
            encoder.add_map(spec, template, column)
        if spec.name in ("start_ns", "end_ns", "step"):
            found = [_changed_range(template, item) for item in column]
            changed[spec.name] = min(low for low, _ in found), max(high for _, high in found)
    meta, data = encoder.finish(rank=ranks[0], first_row=first_row, role=role)
    meta = meta._replace(ranges=ranges_of(ranks) if len(ranks) > 1 else ())
    if "step" in changed:
        meta = meta._replace(first_step=changed["step"][0], last_step=changed["step"][1])
    if "start_ns" in changed or "end_ns" in changed:
        columns = _with_defaults(table, template.rows)
        times = [changed.get(name) or _range([columns.get(name)], ABSENT) for name in ("start_ns", "end_ns")]
        known = [bounds for bounds in times if bounds is not None]
        meta = meta._replace(first_ns=min(low for low, _ in known), last_ns=max(high for _, high in known))
    return meta, data


def _changed_range(template: Template, item: Difference) -> tuple[int, int]:
    if item.mapped is not None:
        return int(item.mapped.min()), int(item.mapped.max())
    column: Any = template.column(item.spec)
    valid = present(item.spec, column)
    values = wide(item.spec, column if valid is None else column[valid]) + np.int64(item.shift or 0)
    return int(values.min()), int(values.max())


def _with_defaults(table: TableKind, rows: Rows) -> Mapping[str, Column]:
    """The columns, also those that cannot be absent and were not given: they are 0 in every row."""
    missing = {"step", "start_ns", "end_ns"} - rows.columns.keys()
    if not missing or not rows.num_rows:
        return rows.columns
    zeros = {spec.name: np.zeros(1, np.int64) for spec in COLUMNS[table] if spec.name in missing and not spec.optional}
    return {**rows.columns, **zeros}


def step_range(columns: Mapping[str, Column]) -> tuple[int, int]:
    """First and last step of the rows; first > last when no row has one."""
    return _range([columns.get("step")], ABSENT32) or NO_STEPS


def time_range(columns: Mapping[str, Column]) -> tuple[int, int]:
    """Earliest and latest time of the rows; first > last when no row has one."""
    return _range([columns.get("start_ns"), columns.get("end_ns")], ABSENT) or NO_TIMES


def _range(columns: list[Any], absent: int) -> tuple[int, int] | None:
    found = []
    for column in columns:
        if column is not None and len(column):
            if int(column.min()) == absent:  # the smallest value of the type
                column = column[column != absent]
            if len(column):
                found.append((int(column.min()), int(column.max())))
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def _uses(rows: Rows, shared: SharedStrings) -> bool:
    """Whether some string of the rows is among the shared ones."""
    texts = [rows.columns[spec.name] for spec in rows.specs if spec.type is ColumnType.STRING]
    return any(
        value in shared.index for column in texts if isinstance(column, DictionaryColumn) for value in column.values
    )


def _stored_bytes(streams: Sequence[tuple[Stream, Any]]) -> int:
    return sum(stream.stored_length for stream, _ in streams)


class ChunkEncoder:
    """Collects the streams of one chunk; `laps`, for times as format 1.1 has them, says how far apart like rows are."""

    def __init__(
        self, table: TableKind, rows: Rows, shared: SharedStrings | None = None, *, laps: Sequence[int] | None = None
    ) -> None:
        self._table, self._rows, self._laps = table, rows, laps
        self._shared = shared if shared is not None and _uses(rows, shared) else None
        self._streams: list[tuple[Stream, bytes | memoryview]] = []
        self._strings: dict[str, int] = {}
        self._digests: dict[bytes, int] = {}
        self._named: list[ColumnSpec] = []

    def _numbered(self, spec: ColumnSpec) -> ColumnSpec:
        """The column with its id in this chunk."""
        if spec.column_id < FIRST_NAMED_COLUMN:
            return spec
        self._named.append(replace(spec, column_id=FIRST_NAMED_COLUMN + len(self._named)))
        return self._named[-1]

    def add(self, spec: ColumnSpec, column: Column, *, explicit: bool = False, near: Column | None = None) -> None:
        """Adds a column. `explicit`: also one without values; `near`: the role's column, of equal type."""
        spec = self._numbered(spec)
        if isinstance(column, DictionaryColumn):
            self._add_codes(spec, column, explicit=explicit)
        elif isinstance(column, ListColumn):
            self._add_lists(spec, column, explicit=explicit)
        elif spec.type is ColumnType.FLOAT64:
            self._add_floats(spec, column, explicit=explicit)
        else:
            self._add_integers(spec, column, explicit=explicit, near=near)

    def add_different(self, specs: Sequence[ColumnSpec], template: Template) -> None:
        """Adds columns of which nothing is left but their own values, or differences to the role's."""
        begun = len(self._streams)
        near = template.rows.columns.get(_INTERVAL[0])
        paired = self.add_interval(self._rows, near) if set(_INTERVAL) <= {spec.name for spec in specs} else ()
        together = self._streams[begun:]
        del self._streams[begun:]
        apart = 0
        for spec in sorted(specs, key=lambda spec: spec.name not in paired):
            column = self._rows.columns.get(spec.name)
            full = missing_column(spec, num_rows=self._rows.num_rows) if column is None else column
            self.add(spec, full, explicit=True, near=template.rows.columns.get(spec.name))
            apart = len(self._streams) if spec.name in paired else apart
        if paired and _stored_bytes(together) < _stored_bytes(self._streams[begun:apart]):
            self._streams[begun:apart] = together

    def add_interval(self, rows: Rows, near: Any = None) -> tuple[str, ...]:
        """Adds start_ns and end_ns together where that can be done; returns the columns that were added."""
        specs = {spec.name: spec for spec in rows.specs if spec.name in _INTERVAL}
        if len(specs) < 2:
            return ()
        start_spec, end_spec = (specs[name] for name in _INTERVAL)
        start, end = (wide(specs[name], rows.columns[name]) for name in _INTERVAL)  # type: ignore[arg-type]
        begun, ended = present(start_spec, start), present(end_spec, end)
        if begun is not None and (ended is None or (ended & ~begun).any()):
            return ()
        values = start if begun is None else start[begun]
        if len(values) < 2 or (values == values[0]).all() or (ended is not None and not ended.any()):
            return ()
        for spec, valid in ((start_spec, begun), (end_spec, ended)):
            if valid is not None:
                self._add_validity(spec, valid, explicit=False)
        which = ended if begun is None or ended is None else ended[begun]
        ends = end if ended is None else end[ended]
        ids = (start_spec.column_id, end_spec.column_id)
        if self._laps is None:
            self._streams += encode_interval(values, ends, columns=ids, part=StreamPart.VALUES, ended=which)
            return _INTERVAL
        known = None if near is None else present(start_spec, near)
        if near is not None:
            near = wide(start_spec, near if known is None else near[known]) if same_rows(begun, known) else None
        streams = dense_interval(values, ends, columns=ids, ended=which, laps=self._laps, near=near)
        if streams[0][0].encoding == Encoding.ROLE_DIFFERENCE and begun is not None:
            self._streams = [s for s in self._streams if s[0].column != ids[0]]  # the role says which rows have one
        self._streams += streams
        return _INTERVAL

    def add_shift(self, spec: ColumnSpec, shifts: Sequence[int]) -> None:
        """Adds what each rank's values are above the role's."""
        column = self._numbered(spec).column_id
        self._streams.append(encode_integers(np.array(shifts, np.int64), column=column, part=StreamPart.SHIFT))

    def add_map(self, spec: ColumnSpec, template: Template, differences: Sequence[Difference]) -> None:
        """Adds what stands in place of the role's values for each rank; values that stay are left out."""
        distinct = template.distinct(spec)
        mapped = [item.mapped for item in differences if item.mapped is not None]
        assert distinct is not None
        assert len(mapped) == len(differences)
        table = np.stack([distinct[0], *mapped], axis=1)
        table = table[(table[:, 1:] != table[:, :1]).any(axis=1)]
        values = np.concatenate([table[:, 0], table[:, 1:].reshape(-1)])
        column = self._numbered(spec).column_id
        self._streams.append(encode_distinct(values, column=column, part=StreamPart.MAP))

    def finish(self, *, rank: int, first_row: int, role: int) -> Encoded:
        """Header and data of the chunk."""
        if self._strings:
            encoded = [text.encode("utf-8") for text in self._strings]
            lengths = np.array([len(text) for text in encoded], np.int64)
            if lengths.sum() > MAX_STREAM_BYTES or len(lengths) > MAX_DICTIONARY:
                message = f"{len(lengths)} strings of {lengths.sum()} bytes in one chunk; add fewer rows at a time"
                raise TraceUsageError(message)
            self._streams += [
                encode_integers(lengths, column=DICTIONARY_COLUMN, part=StreamPart.STRING_LENGTHS),
                encode_bytes(b"".join(encoded), column=DICTIONARY_COLUMN, part=StreamPart.STRING_BYTES),
            ]
        if self._digests:
            if len(self._digests) > MAX_DICTIONARY:
                raise TraceUsageError(f"{len(self._digests)} digests in one chunk; add fewer rows at a time")
            raw = b"".join(self._digests)
            stream = encode_bytes(raw, column=DICTIONARY_COLUMN, part=StreamPart.DIGESTS, width=DIGEST_BYTES)
            self._streams.append(stream)
        used = {stream.column for stream, _ in self._streams}
        meta = ChunkMeta(
            int(self._table),
            rank,
            first_row,
            self._rows.num_rows,
            *step_range(_with_defaults(self._table, self._rows)),
            *time_range(_with_defaults(self._table, self._rows)),
            tuple(stream for stream, _ in self._streams),
            tuple(spec for spec in self._named if spec.column_id in used),
            role,
            strings=self._shared.digest if self._shared else b"",
        )
        return meta, [stored for _, stored in self._streams]

    def _add_validity(self, spec: ColumnSpec, valid: NDArray[np.bool_], *, explicit: bool) -> bool:
        """Adds a validity stream where needed; False when no row has a value and the column is left out."""
        count = int(np.count_nonzero(valid))
        if count == 0 and not explicit:
            return False
        if count < len(valid):
            bits = np.packbits(valid, bitorder="little").tobytes()
            self._streams.append(encode_bytes(bits, column=spec.column_id, part=StreamPart.VALIDITY))
        return True

    def _add_integers(self, spec: ColumnSpec, column: Any, *, explicit: bool, near: Any) -> None:
        values = wide(spec, column)
        valid = present(spec, column)
        before = len(self._streams)
        if valid is not None:
            if not self._add_validity(spec, valid, explicit=explicit):
                return
            values = values.take(np.flatnonzero(valid))
        elif not spec.optional and not values.any() and not explicit:
            return
        if spec.type is ColumnType.UINT64:
            self._streams.append(encode_distinct(values, column=spec.column_id, part=StreamPart.VALUES))
        else:
            reference, reference_id = self._reference(spec, valid)
            self._streams.append(
                encode_integers(
                    values,
                    column=spec.column_id,
                    part=StreamPart.VALUES,
                    delta=spec.delta,
                    scalable=spec.unit == "ns",
                    reference=reference,
                    reference_column=reference_id,
                )
            )
        if near is not None and near.dtype == column.dtype:
            self._replace_by_difference(spec, values, near, valid, before)

    def _reference(self, spec: ColumnSpec, valid: NDArray[np.bool_] | None) -> tuple[NDArray[np.int64] | None, int]:
        base = self._rows.columns.get(spec.reference) if spec.reference else None
        if isinstance(base, np.ndarray):
            there = base if valid is None else base[valid]
            if (there != ABSENT).all():
                return there, next(other.column_id for other in COLUMNS[self._table] if other.name == spec.reference)
        return None, 0

    def _replace_by_difference(
        self, spec: ColumnSpec, values: NDArray[np.int64], near: Any, valid: NDArray[np.bool_] | None, before: int
    ) -> None:
        """Replaces the streams from `before` on by the difference to the role, where that is smaller."""
        known = present(spec, near)
        if spec.type not in INTEGERS or not same_rows(valid, known):
            return
        near = wide(spec, near if known is None else near[known])
        short = encode_differences(values, near, column=spec.column_id, part=StreamPart.VALUES)
        if short[0].stored_length < _stored_bytes(self._streams[before:]):
            self._streams[before:] = [short]

    def _add_floats(self, spec: ColumnSpec, column: Any, *, explicit: bool) -> None:
        values = column.astype(np.float64, copy=False)
        if spec.optional:
            valid = ~np.isnan(values)
            if not self._add_validity(spec, valid, explicit=explicit):
                return
            values = values[valid]
        self._streams.append(encode_floats(values, column=spec.column_id, part=StreamPart.VALUES))

    def _add_codes(self, spec: ColumnSpec, column: DictionaryColumn[Any], *, explicit: bool) -> None:
        is_text = spec.type is ColumnType.STRING
        dictionary: dict[Any, int] = self._strings if is_text else self._digests
        shared: dict[Any, int] = self._shared.index if is_text and self._shared else {}
        valid = column.codes >= 0
        if not self._add_validity(spec, valid, explicit=explicit):
            return
        codes = column.codes[valid]
        remap = np.zeros(len(column.values), np.int64)
        remap[codes] = 1
        for code in np.flatnonzero(remap).tolist():
            value = column.values[code]
            place = shared.get(value)
            remap[code] = len(shared) + dictionary.setdefault(value, len(dictionary)) if place is None else place
        self._streams.append(encode_integers(remap[codes], column=spec.column_id, part=StreamPart.VALUES))

    def _add_lists(self, spec: ColumnSpec, column: ListColumn, *, explicit: bool) -> None:
        if not self._add_validity(spec, column.valid, explicit=explicit):
            return
        lengths = np.diff(column.offsets)[column.valid]
        values = column.values[int(column.offsets[0]) : int(column.offsets[-1])]
        self._streams.append(encode_integers(lengths, column=spec.column_id, part=StreamPart.LENGTHS))
        self._streams.append(encode_integers(values, column=spec.column_id, part=StreamPart.VALUES))
