"""Printing: tables, JSON, and numbers in units that people read.

It holds no wording of any one command and never decides an exit code.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

__all__ = ["Ticker", "echo_json", "echo_table", "format_bytes", "format_ns", "json_ready"]


class Ticker:
    """Says on stderr how far something is, every few seconds once it takes long; call it with (done, total)."""

    def __init__(self, what: str, *, of: str, first_s: float = 2.0, every_s: float = 5.0) -> None:
        self._what, self._of, self._every_s = what, of, every_s
        self._next_s = time.monotonic() + first_s

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._every_s
            click.echo(f"prism: {self._what}: {done:,} of {total:,} {self._of}", err=True)


def echo_json(value: object, *, indent: int | None = 2) -> None:
    """Print ``value`` as strict JSON on stdout."""
    click.echo(json.dumps(json_ready(value), indent=indent, ensure_ascii=False, allow_nan=False))


def json_ready(value: Any) -> Any:
    """``value`` with paths, enums, dataclasses and numpy numbers turned into JSON's own; NaN becomes null."""
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, enum.IntEnum) else value.value
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_ready(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [json_ready(item) for item in value]
    if hasattr(value, "tolist"):
        return json_ready(value.tolist())
    return str(value)


def echo_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> None:
    """Print a table with aligned columns; the columns in ``right`` are aligned to the right."""
    cells = [list(headers), *[["" if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(headers))]
    for number, row in enumerate(cells):
        words = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(words).rstrip())
        if number == 0:
            click.echo("  ".join("-" * width for width in widths))


def format_ns(value: float | None) -> str:
    """A duration with the unit that fits; a dash when absent."""
    if value is None or not math.isfinite(value):
        return "-"
    for limit, divisor, unit in ((1e3, 1, "ns"), (1e6, 1e3, "us"), (1e9, 1e6, "ms")):
        if abs(value) < limit:
            return f"{value / divisor:.0f} ns" if unit == "ns" else f"{value / divisor:.3f} {unit}"
    return f"{value / 1e9:.3f} s"


def format_bytes(value: float | None) -> str:
    """A size in binary units; a dash when absent."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
