"""The importer ``table``: third-party tables of operations, with options that say what their columns mean.

It knows no file layout of its own; ``straggler`` does, and uses what is here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from prism_sdk.abc import ConversionReport, TraceImporter
from prism_sdk.errors import UsageError
from prism_sdk.interop import options as reading
from prismtrace import ABSENT, Op, Phase, TraceReadError, TraceWriter, UnitKind
from prismtrace.model import COLUMNS, ColumnSpec, ColumnType, TableKind
from prismtrace.tables import Column, DictionaryColumn
from prismtrace_arrow.convert import column_of
from prismtrace_arrow.importing import Source, open_source, reading_file
from prismtrace_arrow.schema import FileInfo, column_type_of, named_spec
from prismtrace_arrow.sinks import whole_file

NS: Final[Mapping[str, int]] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_OPTIONS: Final = ("column.", "value.", "time", "clock", "absent", "keep", "world_size", "lossless")
_SPECS: Final = {spec.name: spec for spec in COLUMNS[TableKind.UNITS]}
_EXTRA: Final = ("rank", "duration_ns", "type")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Meaning:
    """What the columns and values of a foreign table mean.

    ``columns`` maps columns of a trace (and ``rank``, ``duration_ns``, ``type``) to columns of the table; ``values``
    maps values of the ``type`` column to words: kinds, operations and phases in lower case.
    """

    columns: Mapping[str, str]
    values: Mapping[str, str] = field(default_factory=dict)
    time: str = "ns"
    clock: str = "job"
    absent: int | None = None
    keep: str = ""

    @classmethod
    def of_options(cls, options: Mapping[str, str], *, preset: Meaning | None = None) -> Meaning:
        """The meaning that the user gave, on top of a preset."""
        columns, values = dict(preset.columns if preset else {}), dict(preset.values if preset else {})
        for key, text in options.items():
            if key.startswith("column."):
                columns[key.removeprefix("column.")] = text
            elif key.startswith("value."):
                values[key.removeprefix("value.")] = text
        for name in columns:
            if name not in _SPECS and name not in _EXTRA:
                known = ", ".join((*_EXTRA, *_SPECS))
                raise UsageError(f"-O column.{name}: units have no such column", hint=f"they have {known}")
        for needed in ("rank", "start_ns"):
            if needed not in columns:
                raise UsageError(f"nothing says which column is {needed}", hint=f"say it: -O column.{needed}=NAME")
        absent = preset.absent if preset else None
        time = reading.choice(options, "time", NS, default=preset.time if preset else "ns")
        clock = reading.choice(options, "clock", ("job", "step"), default=preset.clock if preset else "job")
        if clock == "step" and "step" not in columns:
            raise UsageError("-O clock=step needs a column of steps", hint="say it: -O column.step=NAME")
        absent = reading.integer(options, "absent", default=absent, low=-(2**62), high=2**62)
        keep = options.get("keep", preset.keep if preset else "")
        for text in values.values():
            words_of(text)
        return cls(columns, values, time, clock, absent, keep)


def words_of(text: str) -> tuple[int, int, int]:
    """Kind, operation and phase that words such as ``forward compute`` or ``all_reduce`` stand for; 0 where unsaid."""
    kind, op, phase = 0, 0, 0
    for word in text.replace(",", " ").upper().split():
        if word in Phase.__members__:
            phase = int(Phase[word])
        elif word in Op.__members__:
            op = int(Op[word])
            kind = int(UnitKind[word]) if word in UnitKind.__members__ else int(UnitKind.COLLECTIVE)
        elif word in UnitKind.__members__:
            kind = int(UnitKind[word])
        else:
            raise UsageError(f"{word.lower()!r} names no kind, operation or phase of a unit")
    return kind, op, phase


@dataclass
class Units:
    """The units of one job: equally long columns, and the rank of each row. Rows are sorted by rank, then start."""

    rank: NDArray[np.int64]
    columns: dict[str, Column]
    notes: list[str]

    def __len__(self) -> int:
        return len(self.rank)

    def numbers(self, name: str) -> NDArray[Any]:
        """A column of numbers; absent everywhere where the table has none."""
        found = self.columns.get(name)
        return found if isinstance(found, np.ndarray) else np.full(len(self), ABSENT, np.int64)

    def texts(self, name: str) -> DictionaryColumn[str]:
        """A column of strings."""
        found = self.columns.get(name)
        return found if isinstance(found, DictionaryColumn) else DictionaryColumn(np.full(len(self), -1, np.int32), ())


def read_units(source: Source, meaning: Meaning) -> Units:
    """All rows of a file as units. The columns are read whole: memory grows with the rows."""
    names = source.schema.names
    for name, column in meaning.columns.items():
        if column not in names:
            message = f"it has no column {column!r}, which should be {name}; it has {', '.join(names)}"
            raise TraceReadError(message, path=str(source.path))
    with reading_file(source.path):
        table = pa.concat_tables(list(source.batches())) if source.schema.names else pa.table({})
        table = table.combine_chunks()
        return _units_of(table, meaning)


def _units_of(table: pa.Table, meaning: Meaning) -> Units:
    notes: list[str] = []
    columns: dict[str, Column] = {}
    scale = NS[meaning.time]
    for name, column in meaning.columns.items():
        array = _only_chunk(table[column])
        if name in ("rank", "type"):
            continue
        try:
            if name in ("duration_ns",) or _SPECS[name].unit == "ns":
                columns[name] = _times(array, scale)
            else:
                columns[name] = column_of(_SPECS[name], _without(array, meaning.absent, _SPECS[name]))
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise ValueError(f"column {column!r} ({name}): {error}") from error
    rank = np.asarray(pc.cast(_only_chunk(table[meaning.columns["rank"]]), pa.int64()).to_numpy(zero_copy_only=False))
    if rank.dtype.kind != "i" or (len(rank) and not 0 <= rank.min() <= rank.max() < 1 << 31):
        raise ValueError(f"column {meaning.columns['rank']!r}: ranks are whole numbers from 0 on, in every row")
    duration = columns.pop("duration_ns", None)
    start = columns["start_ns"]
    assert isinstance(start, np.ndarray)
    if duration is not None and "end_ns" not in columns:
        assert isinstance(duration, np.ndarray)
        if (duration[duration != ABSENT] < 0).any():
            notes.append(
                f"{int((duration[duration != ABSENT] < 0).sum())} durations are negative: their ends are absent"
            )
        usable = (start != ABSENT) & (duration >= 0)
        columns["end_ns"] = np.where(usable, start + np.where(usable, duration, 0), ABSENT)
    if "type" in meaning.columns:
        _classify(columns, _only_chunk(table[meaning.columns["type"]]), meaning, notes)
    used = set(meaning.columns.values())
    rest = [name for name in table.schema.names if name not in used]
    _keep_rest(columns, table, rest, meaning, notes)
    order = np.lexsort((start, rank))
    if not np.array_equal(order, np.arange(len(order))):
        columns = {name: c[order] if isinstance(c, np.ndarray) else c.take(order) for name, c in columns.items()}
        rank = rank[order]
    return Units(rank, columns, notes)


def _only_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _times(array: pa.Array, scale: int) -> NDArray[np.int64]:
    """Times in nanoseconds, to the nearest one; NaN and null are absent."""
    if pa.types.is_timestamp(array.type):
        return _times(array.cast(pa.timestamp("ns", array.type.tz)).cast(pa.int64()), 1)
    if pa.types.is_duration(array.type):
        return _times(array.cast(pa.duration("ns")).cast(pa.int64()), 1)
    if pa.types.is_floating(array.type):
        with np.errstate(over="ignore"):  # refused below, by name
            values = np.asarray(array.cast(pa.float64()).to_numpy(zero_copy_only=False)) * scale
        present = ~np.isnan(values)
        if (np.abs(values[present]) >= 2.0**62).any():
            raise ValueError("a time is infinite, or more than 146 years away")
        rounded = np.rint(np.where(present, values, 0)).astype(np.int64)
        return np.where(present, rounded, ABSENT)
    whole = pc.cast(array, pa.int64())
    values = np.asarray(pc.fill_null(whole, ABSENT).to_numpy(zero_copy_only=False))
    present = ~np.asarray(pc.is_null(whole).to_numpy(zero_copy_only=False))
    far = (values[present] < -(2**62 // scale)) | (values[present] > 2**62 // scale)
    if far.any():
        raise ValueError("a time is more than 146 years away: is the unit (-O time) right?")
    return np.where(present, np.where(present, values, 0) * scale, ABSENT)


def _without(array: pa.Array, absent: int | None, spec: ColumnSpec) -> pa.Array:
    """The array with null where it holds the number that stands for absent."""
    if absent is None or not pa.types.is_integer(array.type) or not spec.optional:
        return array
    wide = array.cast(pa.int64())
    return pc.if_else(pc.equal(wide, absent), None, wide)


def _classify(columns: dict[str, Column], array: pa.Array, meaning: Meaning, notes: list[str]) -> None:
    """Kind, operation, phase and label of each row from the value of its type column."""
    if pa.types.is_dictionary(array.type) and not pa.types.is_string(array.type.value_type):
        array = array.dictionary_decode()
    text = column_of(_SPECS["label"], array if pa.types.is_dictionary(array.type) else array.cast(pa.string()))
    assert isinstance(text, DictionaryColumn)
    words = [words_of(meaning.values.get(value, "")) for value in text.values]
    unsaid = sorted({text.values[c] for c in np.unique(text.codes) if c >= 0 and not any(words[c])})
    if unsaid:
        listed = ", ".join(unsaid[:8])
        notes.append(f"{len(unsaid)} types have no kind ({listed}): -O value.TYPE='forward compute' gives them one")
    lookup = np.array([*words, (0, 0, 0)], np.uint8)
    for number, name in enumerate(("kind", "op", "phase")):
        columns.setdefault(name, lookup[text.codes, number])
    columns.setdefault("label", text)


def _keep_rest(
    columns: dict[str, Column], table: pa.Table, rest: Sequence[str], meaning: Meaning, notes: list[str]
) -> None:
    """Columns without a meaning become named columns where the user gives them an owner."""
    lost = []
    for name in rest:
        kind = column_type_of(table.schema.field(name).type)
        if not meaning.keep or kind is None:
            lost.append(name)
        else:
            full = f"{meaning.keep}.{name}"
            columns[full] = column_of(named_spec(full, kind), _only_chunk(table[name]))
    if lost:
        hint = "" if meaning.keep else "; -O keep=OWNER keeps them as OWNER.NAME"
        notes.append(f"columns left out: {', '.join(lost)}{hint}")


def lay_out_steps(units: Units) -> None:
    """Put steps one after the other whose times each count from the step's own start."""
    step, start, end = units.numbers("step"), units.numbers("start_ns"), units.numbers("end_ns")
    present, which = np.unique(step, return_inverse=True)
    latest = np.maximum(np.where(start == ABSENT, 0, start), np.where(end == ABSENT, 0, end))
    length = np.zeros(len(present), np.int64)
    np.maximum.at(length, which, latest)
    offset = (np.cumsum(length) - length)[which]
    for name, values in (("start_ns", start), ("end_ns", end)):
        if name in units.columns:
            units.columns[name] = np.where(values == ABSENT, ABSENT, values + offset)
    order = np.lexsort((units.numbers("start_ns"), units.rank))
    units.rank = units.rank[order]
    units.columns = {n: c[order] if isinstance(c, np.ndarray) else c.take(order) for n, c in units.columns.items()}
    units.notes.append(
        "times restart with each step: the steps were put one after the other, in order of their numbers"
    )


def write_units(writer: TraceWriter, units: Units) -> dict[str, int]:
    """Add all units, and one row of the steps table for each step of a rank."""
    edges = np.flatnonzero(np.diff(units.rank, prepend=-1, append=-1)).tolist() if len(units) else []
    num_steps = 0
    for start, stop in itertools.pairwise(edges):
        rank = int(units.rank[start])
        part = {name: column[start:stop] for name, column in units.columns.items()}
        writer.add_units(rank, part)
        steps = _steps_of(units, start, stop)
        num_steps += len(steps["step"])
        writer.add_steps(rank, steps)
    return {"ranks": max(0, len(edges) - 1), "units": len(units), "steps": num_steps}


def _steps_of(units: Units, start: int, stop: int) -> dict[str, NDArray[np.int64]]:
    spec = _SPECS["step"]
    step, end = units.numbers("step")[start:stop], units.numbers("end_ns")[start:stop]
    absent = spec.default if spec.type is ColumnType.INT32 and step.dtype == np.int32 else ABSENT
    timed = (step != absent) & (end != ABSENT)
    present, which = np.unique(step[timed], return_inverse=True)
    ends = np.full(len(present), ABSENT, np.int64)
    np.maximum.at(ends, which, end[timed])
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    return {"step": present, "start_ns": np.concatenate([[ABSENT], ends[:-1]])[: len(ends)], "end_ns": ends}


class TableImporter(TraceImporter):
    """Reads any Parquet or Arrow file with one operation a row, once the user has said what its columns mean."""

    name = "table"
    description = "a Parquet or Arrow table of operations: -O column.rank=NAME -O column.start_ns=NAME ..."

    def recognises(self, source: Path, head: bytes) -> bool:
        """Never: what columns mean cannot be guessed."""
        return False

    def import_trace(
        self, sources: Sequence[Path], *, output: Path, options: Mapping[str, str], report: Report
    ) -> ConversionReport:
        """Read the files as one job."""
        reading.check_known(options, _OPTIONS, of=f"the importer {self.name}")
        meaning = Meaning.of_options(options)
        world_size = reading.integer(options, "world_size", default=0, low=0, high=2**31 - 1) or 0
        units = joined([read_units(open_table(path), meaning) for path in sources])
        if meaning.clock == "step":
            lay_out_steps(units)
        with whole_file(output) as temporary:
            metadata = {"import.format": self.name, "import.time_unit": meaning.time}
            with TraceWriter(temporary, world_size=world_size, metadata=metadata, overwrite=True) as writer:
                counts = write_units(writer, units)
        return ConversionReport(output, counts, tuple(units.notes))


def open_table(path: Path) -> Source:
    """A Parquet or Arrow file with any columns."""
    with reading_file(path):
        if not path.is_file():
            raise TraceReadError("not a regular file" if path.exists() else "there is no such file", path=str(path))
        with path.open("rb") as file:
            kind = "arrow" if file.read(6) == b"ARROW1" else "parquet"
    return open_source(path, kind, table="units")


def joined(parts: Sequence[Units]) -> Units:
    """The units of several files of one job."""
    if len(parts) == 1:
        return parts[0]
    names = set.intersection(*(set(part.columns) for part in parts))
    columns: dict[str, Column] = {}
    for name in names:
        found: list[Any] = [part.columns[name] for part in parts]
        if isinstance(found[0], np.ndarray):
            columns[name] = np.concatenate(found)
        elif isinstance(found[0], DictionaryColumn):
            values = list(dict.fromkeys(value for column in found for value in column.values))
            place = {value: code for code, value in enumerate(values)}
            codes = [np.array([*(place[v] for v in c.values), -1], np.int32)[c.codes] for c in found]
            columns[name] = DictionaryColumn(np.concatenate(codes), tuple(values))
    rank = np.concatenate([part.rank for part in parts])
    start = columns["start_ns"]
    order = np.lexsort((start, rank))  # type: ignore[arg-type]
    columns = {n: c[order] if isinstance(c, np.ndarray) else c.take(order) for n, c in columns.items()}
    notes = list(dict.fromkeys(note for part in parts for note in part.notes))
    lost = sorted(set.union(*(set(part.columns) for part in parts)) - set(columns))
    if lost:
        notes.append(f"columns that not every file has were left out: {', '.join(lost)}")
    return Units(rank[order], columns, notes)


__all__ = ["FileInfo", "Meaning", "TableImporter", "Units", "lay_out_steps", "open_table", "read_units", "write_units"]
