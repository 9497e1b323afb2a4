"""What the tests of this plugin share: the excerpts, strict comparison of JSON, short ways to import and export."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from prismtrace_kineto.exporter import ChromeExporter, KinetoExporter
from prismtrace_kineto.importer import KinetoImporter

from prism_sdk.abc import ConversionReport

DATA = Path(__file__).parent / "data"
EXCERPTS = sorted(DATA.glob("*.json"))


def parsed(data: bytes) -> Any:
    """JSON with decimals in place of doubles."""
    text = data.decode("utf-8", "surrogateescape")
    return json.loads(text, parse_float=Decimal, parse_constant=Decimal, strict=False)


def same(one: Any, other: Any) -> bool:
    """Equal in type, value and order of keys; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Decimal):
        return one.compare_total(other) == 0 or one == other
    return bool(one == other)


def convert(output: Path, *sources: Path, **options: str) -> ConversionReport:
    """Imports files."""
    return KinetoImporter().import_trace(sources, output=output, options=options, report=print)


def restored(trace: Path, output: Path) -> bytes:
    """The JSON of a trace of one rank that was imported losslessly."""
    KinetoExporter().export_trace(trace, output=output, options={}, report=print)
    return output.read_bytes()


def chrome(trace: Path, output: Path, **options: str) -> ConversionReport:
    """Exports units and events."""
    return ChromeExporter().export_trace(trace, output=output, options=options, report=print)


def document(events: list[Any], **top: Any) -> bytes:
    """A trace of rank 0 with these events."""
    return json.dumps({"distributedInfo": {"rank": 0, "world_size": 1}, **top, "traceEvents": events}).encode()


def span(
    name: str, start: Any, length: Any, *, cat: str = "cpu_op", pid: Any = 1, tid: Any = 1, **args: Any
) -> dict[str, Any]:
    """One event with a length."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length, "args": args}
