"""``prism cat``: prints rows of a trace. Reading them is the work of ``prismtrace.rows``."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prism_sdk.cli.parsing import RANKS, STEP_OR_STEPS, once
from prism_sdk.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from prism_sdk.runtime.config import StepRange
    from prismtrace import RowBatch

_SHORT = {
    "units": ("step", "kind", "phase", "op", "group_id", "seq", "peer", "start_ns", "end_ns", "label"),
    "events": ("kind", "category", "name", "track", "start_ns", "end_ns", "unit"),
}
_MAX_CELL = 40


@click.command("cat")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--table", default="units", help="units (default), steps, scalars, events or tracks.")
@once("--rank", "--ranks", "ranks", type=RANKS, metavar="0,4-7", help="Only these ranks.")
@once(
    "--step", "--steps", "steps", type=STEP_OR_STEPS, metavar="N|A:B", help="Only step N, or steps from A up to B."
)
@once("--columns", metavar="NAME,...", help="Only these columns; `all` for every column that has a value.")
@click.option("--format", "style", type=click.Choice(["table", "csv", "jsonl"]), help="table (default), csv or jsonl.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@click.option("-n", "--head", type=click.IntRange(min=0), metavar="N", help="Stop after N rows.")
@click.option("--raw", is_flag=True, help="Print enumerations as numbers.")
def command(
    file: Path,
    table: str,
    ranks: tuple[int, ...] | None,
    steps: StepRange | None,
    columns: str | None,
    style: str | None,
    as_json: bool,
    head: int | None,
    raw: bool,
) -> int:
    """Print rows of a trace, one a line, in little memory however large the trace is.

    Absent values are empty (null in jsonl). Integers are printed in full: do not read group ids and times as doubles.
    Without --columns a table shows the usual ones, csv and jsonl all.

    \b
    Example:
        prism cat real.prism --rank 0 --step 2 | head
        prism cat real.prism --columns op,start_ns,end_ns --format csv > units.csv
        prism cat real.prism --table steps --json
    """
    from prismtrace import TraceReader, TraceUsageError, iter_rows
    from prismtrace.model import COLUMNS
    from prismtrace.rows import column_names, table_kind

    if as_json and style not in (None, "jsonl"):
        raise UsageError(f"--json and --format {style} are both given", hint="leave one out")
    style = "jsonl" if as_json else style or "table"
    with TraceReader(file, allow_unfinished=True) as reader:
        if reader.unfinished:
            click.echo(f"prism: {file} is unfinished: these are the rows before its end", err=True)
        try:
            kind = table_kind(table)
            strange = sorted(set(ranks or ()) - set(reader.ranks))
            if strange:
                raise UsageError(f"{file}: rank {strange[0]} has no data", hint="`prism info` lists the ranks")
            chosen: Sequence[str] | None = None
            if columns not in (None, "all"):
                chosen = [name.strip() for name in str(columns).split(",") if name.strip()]
                if not chosen:
                    raise UsageError(f"--columns {columns!r} names no column", hint="`all`, or leave it out")
            elif columns is None and style == "table" and table in _SHORT:
                chosen = _SHORT[table]
            elif style != "jsonl":
                chosen = column_names(reader, kind, ranks or reader.ranks)
            if steps is not None and "step" not in (spec.name for spec in COLUMNS[kind]):
                raise UsageError(f"{table} have no steps", hint="leave --steps out, or cut them with `prism slice`")
            wanted = None if steps is None else steps.as_range()
            batches = iter_rows(
                reader, table=kind, ranks=ranks, steps=wanted, columns=chosen, limit=head, names=not raw
            )
            if steps is not None and head != 0:
                batches = _not_empty(batches, f"{file} has no {table} in steps {steps}", ranks)
            without_value = {name for name in chosen or () if "." in name} if columns not in (None, "all") else set()
            for text in _FORMATS[style](_watched(batches, without_value), chosen or ()):
                click.echo(text, nl=False)
        except TraceUsageError as error:
            raise UsageError(str(error)) from error
    if without_value and head != 0:
        names = ", ".join(sorted(without_value))
        click.echo(f"prism: no row here has a value of {names} (--columns all shows those that have)", err=True)
    return ExitCode.OK


def _watched(batches: Iterator[RowBatch], without_value: set[str]) -> Iterator[RowBatch]:
    """The batches; what has a value in them is removed from `without_value`. Any OWNER.NAME may be asked for, so a
    mistyped one is no error."""
    for batch in batches:
        for name in tuple(without_value):
            if any(value is not None for value in batch.columns[name]):
                without_value.remove(name)
        yield batch


def _not_empty(batches: Iterator[RowBatch], what: str, ranks: Sequence[int] | None) -> Iterator[RowBatch]:
    """The batches, if there is a row; nothing is printed before that is known."""
    first = next(batches, None)
    if first is None:
        of = f" of rank {ranks[0]}" if ranks is not None and len(ranks) == 1 else " of these ranks" if ranks else ""
        raise UsageError(what + of, hint="`prism info` says which steps there are")
    return itertools.chain([first], batches)


def _as_jsonl(batches: Iterator[RowBatch], _: Sequence[str]) -> Iterator[str]:
    for batch in batches:
        names = ("rank", "row", *batch.columns)
        lines = []
        for row, *values in zip(batch.row_index, *batch.columns.values(), strict=True):
            record = dict(zip(names, (batch.rank, row, *map(_plain, values)), strict=True))
            lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        yield "".join(lines)


def _plain(value: Any) -> Any:
    """A float that JSON lacks as text."""
    return str(value) if isinstance(value, float) and (value != value or value in (_INFINITE, -_INFINITE)) else value


def _as_csv(batches: Iterator[RowBatch], columns: Sequence[str]) -> Iterator[str]:
    def line(writer_rows: list[list[Any]]) -> str:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(writer_rows)
        return buffer.getvalue()

    yield line([["rank", "row", *columns]])
    for batch in batches:
        lists = [batch.columns[name] for name in columns]
        rows = zip(batch.row_index, *lists, strict=True)
        yield line([[batch.rank, row, *("" if value is None else value for value in values)] for row, *values in rows])


def _as_table(batches: Iterator[RowBatch], columns: Sequence[str]) -> Iterator[str]:
    """A table whose widths are those of the first batch: later rows are not held back to be measured."""
    headers = ["rank", "row", *columns]
    widths: list[int] = []
    for batch in batches:
        lists = [batch.columns[name] for name in columns]
        cells = [
            [str(batch.rank), str(row), *map(_cell, values)]
            for row, *values in zip(batch.row_index, *lists, strict=True)
        ]
        if not widths:
            widths = [max(len(row[place]) for row in [headers, *cells]) for place in range(len(headers))]
            cells = [headers, ["-" * width for width in widths], *cells]
        padded = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
        yield "".join("  ".join(row).rstrip() + "\n" for row in padded)
    if not widths:
        yield "  ".join(headers) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = str(value).replace("\n", " ")
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 3] + "..."


_INFINITE = float("inf")
_FORMATS = {"table": _as_table, "csv": _as_csv, "jsonl": _as_jsonl}
