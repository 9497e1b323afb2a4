"""Columns of the events and tracks tables for one document. Does not write them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, ABSENT32, DictionaryColumn, EventKind, TrackKind
from prismtrace_kineto.timeline import Timeline

Ints = NDArray[np.int64]
_KINDS: Final = {
    "X": EventKind.SPAN, "i": EventKind.INSTANT, "I": EventKind.INSTANT, "R": EventKind.INSTANT,
    "n": EventKind.INSTANT, "C": EventKind.COUNTER, "s": EventKind.FLOW_START, "t": EventKind.FLOW_STEP,
    "f": EventKind.FLOW_END, "B": EventKind.BEGIN, "b": EventKind.BEGIN, "E": EventKind.END, "e": EventKind.END,
    "M": EventKind.METADATA,
}  # fmt: skip
_MAX_STRING: Final = 1 << 16


def printable(text: str) -> str:
    """Valid UTF-8 of a length that a table takes; what is not UTF-8 is shown as an escape."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) * 4 < _MAX_STRING else text.encode()[: _MAX_STRING - 4].decode("utf-8", "ignore")


def _dictionary(codes: Ints, strings: list[Any]) -> DictionaryColumn[str]:
    distinct, inverse = np.unique(codes, return_inverse=True)
    known: dict[str, int] = {}
    local = [-1 if code < 0 or strings[code] is None else known.setdefault(printable(strings[code]), len(known))
             for code in distinct.tolist()]  # fmt: skip
    place = np.array(local, np.int32)[inverse] if len(codes) else np.zeros(0, np.int32)
    return DictionaryColumn(place.astype(np.int32), tuple(known))


def event_columns(line: Timeline, unit_of: Ints, *, python: bool) -> tuple[dict[str, Any], int]:
    """What the events table keeps, and how many Python calls were left out. Metadata events become tracks."""
    odd = np.array([shape.odd for shape in line.columns.shapes], np.bool_)
    kept = ~line.is_phase("M") & ~odd[line.shape]
    is_python = line.in_categories(frozenset({"python_function"}))
    left_out = 0
    if not python:
        left_out = int((kept & is_python).sum())
        kept &= ~is_python
    rows = np.flatnonzero(kept)
    kinds = np.array([int(_KINDS.get(str(letter), EventKind.UNSPECIFIED)) for letter in line.phases] or [0], np.uint8)
    columns: dict[str, Any] = {
        "name": _dictionary(line.name[rows], line.columns.strings),
        "category": _dictionary(line.category[rows], line.categories),
        "kind": kinds[line.phase[rows]] if len(rows) else np.zeros(0, np.uint8),
        "track": np.where(line.track[rows] >= 0, line.track[rows], ABSENT32).astype(np.int32),
        "start_ns": line.start_ns[rows],
        "end_ns": line.end_ns[rows],
        "correlation_id": line.correlation[rows],
        "flow_id": line.flow_id[rows],
        "unit": unit_of[rows],
    }
    if (line.external_id[rows] != ABSENT).any():
        columns["kineto.external_id"] = line.external_id[rows]
    phase = line.flow_phase[rows]
    if (phase >= 0).any():
        columns["kineto.flow_kind"] = DictionaryColumn(phase.astype(np.int32), ("start", "step", "end"))
    return columns, left_out


def track_columns(line: Timeline) -> dict[str, Any]:
    """One row for each pair of process and thread that an event names."""
    count = len(line.tracks)
    threads: dict[tuple[Any, Any], str] = {}
    processes: dict[Any, str] = {}
    for row in np.flatnonzero(line.is_phase("M")).tolist():
        kind = line.names(np.array([row]))[0]
        pid, tid = line.tracks[line.track[row]] if line.track[row] >= 0 else (None, None)
        name = line.argument(row, "name")
        if isinstance(name, str) and kind == "thread_name":
            threads[pid, tid] = printable(name)
        elif isinstance(name, str) and kind == "process_name":
            processes[pid] = printable(name)
    device = line.in_categories(frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}))
    on_device = set(np.unique(line.track[device]).tolist())
    host = line.in_categories(frozenset({"cpu_op", "cuda_runtime", "user_annotation"}))
    hosts = set(np.unique(line.track[host]).tolist())
    names = ("name", "process", "kind", "process_id", "thread_id", "device", "stream")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for number, (pid, tid) in enumerate(line.tracks):
        is_device = number in on_device
        kind_of = TrackKind.DEVICE_STREAM if is_device else TrackKind.HOST if number in hosts else TrackKind.OTHER
        columns["name"].append(threads.get((pid, tid), None if _number(tid) is not None else printable(str(tid))))
        columns["process"].append(processes.get(pid, None if _number(pid) is not None else printable(str(pid))))
        columns["kind"].append(int(kind_of))
        columns["process_id"].append(_number(pid))
        columns["thread_id"].append(_number(tid))
        columns["device"].append(_number(pid) if is_device and 0 <= (_number(pid) or 0) < 1 << 31 else None)
        columns["stream"].append(_number(tid) if is_device else None)
    return columns if count else {}


def _number(value: Any) -> int | None:
    return value if type(value) is int and ABSENT < value < 1 << 63 else None
