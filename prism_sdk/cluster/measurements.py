"""Reads measured transfers and makes tables of them: small CSV or JSON files, observed traces.

It fits no model and writes no profile. The CSV and JSON form is the seam for other measuring tools, such as NCCL's
profiler: one measurement a row with ``op, algo, proto, size, ranks, nodes, time_us``; algo, proto, nodes may be absent.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prism_sdk.bounds import MAX_BYTES, MAX_QUANTITY, MAX_RANKS
from prism_sdk.cluster.profile import Cluster, Shape, Table
from prism_sdk.errors import UnreadableError, UsageError
from prism_sdk.graph.calibrate import measure
from prism_sdk.graph.job import JobGraph
from prism_sdk.wording import counted
from prismtrace import ABSENT, DType, Op, UnitKind

__all__ = [
    "Sample",
    "checked_sample",
    "joined_tables",
    "message_bytes",
    "read_measurements",
    "read_trace",
    "tables_of",
    "text_of",
]

_OPS = {op.name.lower(): op for op in Op if op is not Op.UNSPECIFIED}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured transfer; ``size_bytes`` as nccl-tests counts it."""

    op: Op
    size_bytes: int
    shape: Shape
    time_ns: float
    algo: str = ""
    proto: str = ""


def checked_sample(
    *, op: Op, size: Any, ranks: Any, nodes: Any, time_us: Any, algo: str = "", proto: str = ""
) -> Sample:  # fmt: skip
    """A sample of figures from a file, as numbers or texts; raises ValueError that says which of them is wrong."""
    num_ranks, num_nodes = _whole("ranks", ranks, 1, MAX_RANKS), _whole("nodes", nodes, 1, MAX_RANKS)
    if num_nodes > num_ranks:
        raise ValueError(f"{counted(num_ranks, 'rank')} cannot be spread over {num_nodes} nodes")
    time = _number("time_us", time_us)
    if not 0 < time <= MAX_QUANTITY:
        raise ValueError(f"time_us is {time:g}: it must be above 0, and at most {MAX_QUANTITY:g}")
    for name, text in (("algo", algo), ("proto", proto)):
        if not text.isprintable():
            raise ValueError(f"{name} {text!r} has characters that cannot be printed")
    return Sample(op=Op.SEND if op is Op.RECV else op, size_bytes=_whole("size", size, 0, MAX_BYTES), algo=algo,
                  proto=proto, time_ns=time * 1e3, shape=Shape(ranks=num_ranks, nodes=num_nodes))  # fmt: skip


def _number(name: str, value: Any) -> float:
    if value is None or value == "":
        raise ValueError(f"{name} is missing")
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{name} {str(value)[:40]!r} is not a number")


def _whole(name: str, value: Any, low: int, high: int) -> int:
    number = _number(name, value)
    if not low <= number <= high or number != int(number):
        raise ValueError(f"{name} {str(value)[:40]} is not a whole number from {low} to {high:,}")
    return int(number)


def read_measurements(path: str | os.PathLike[str]) -> list[Sample]:
    """A CSV file with a header, or JSON: a list of objects, or an object a line.

    Raises:
        UnreadableError: the file cannot be opened, is no text, or is cut off.
        UsageError: a row lacks something.
    """
    name = os.fspath(path)
    samples = []
    for number, row in enumerate(_rows(name), start=1):
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"{str(row)[:40]} is not an object with columns")
            algo, proto = (_word(row, key) for key in ("algo", "proto"))
            samples.append(checked_sample(
                op=_op_of(row), size=row.get("size"), ranks=row.get("ranks"), nodes=row.get("nodes") or 1, algo=algo,
                time_us=row.get("time_us"), proto=proto,
            ))  # fmt: skip
        except ValueError as error:
            raise UsageError(f"{name}: row {number}: {error}",
                             hint="columns are op, algo, proto, size, ranks, nodes, time_us") from error  # fmt: skip
    if not samples:
        raise UsageError(f"{name} holds no measurement", hint="one a row, under a header, or as JSON objects")
    return samples


def _rows(name: str) -> list[Any]:
    text = text_of(name)
    try:
        if name.endswith(".csv"):
            header, *lines = list(csv.reader(text.splitlines())) or [[]]
            keys = [key.strip().lower() for key in header]
            return [dict(zip(keys, map(str.strip, line), strict=False)) for line in lines if line]
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise UnreadableError(name, reason=f"it is no JSON: {error}", hint="was it cut off?") from error
    except csv.Error as error:
        raise UnreadableError(name, reason=f"it is no CSV: {error}") from error


def _op_of(row: Mapping[str, Any]) -> Op:
    value = row.get("op")
    if value in (None, ""):
        raise ValueError("op is missing")
    op = _OPS.get(str(value).lower())
    if op is None:
        raise ValueError(f"op {str(value)[:40]!r} is no operation; there are {', '.join(_OPS)}")
    return op


def _word(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key) or ""
    if not isinstance(value, str):
        raise ValueError(f"{key} {str(value)[:40]} is not a text")
    return value


def text_of(name: str) -> str:
    """The text of a file; raises UnreadableError."""
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UnreadableError(name, reason=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UnreadableError(name, reason=f"it is not UTF-8 text, at byte {error.start}") from error


def message_bytes(op: int, *, contributed: int, group_size: int) -> int:
    """The size that nccl-tests counts, from the bytes that one rank contributes (or receives, of broadcasts)."""
    return contributed * group_size if op in (Op.ALL_GATHER, Op.GATHER) else contributed


def read_trace(path: str | os.PathLike[str], cluster: Cluster) -> list[Sample]:
    """The transfers that an observed trace shows; ranks lie on the nodes of the cluster in order."""
    graph = JobGraph.load(path)
    c = graph.columns
    transfer = measure(graph).transfer_ns
    first = graph.event_rows[graph.event_offsets[:-1]]
    shapes = {group_id: cluster.shape(tuple(group.ranks)) for group_id, group in graph.groups.items()}
    samples = []
    for event, row in enumerate(first.tolist()):
        rows = graph.event_rows[graph.event_offsets[event] : graph.event_offsets[event + 1]]
        known = [int(r) for r in rows if transfer[r] != ABSENT and c["kind"][r] != UnitKind.SEND]
        op = int(c["op"][rows[-1]])
        name = "num_elements_out" if op in (Op.BROADCAST, Op.SCATTER, Op.RECV) else "num_elements_in"
        count = max(int(c[name][rows[-1]]), 0)
        if not known or op not in _OPS.values() or count == 0:
            continue
        group = graph.groups[int(c["group_id"][row])]
        is_message = op == Op.RECV
        ends = (int(graph.rank_of_row[rows[0]]), int(graph.rank_of_row[rows[-1]]))
        shape = cluster.shape(ends) if is_message else shapes[int(c["group_id"][row])]
        contributed = count * DType(int(c["dtype"][rows[-1]])).itemsize_bytes
        size = message_bytes(op, contributed=contributed, group_size=len(group.ranks))
        time = float(np.mean(transfer[known]))
        samples.append(Sample(op=Op.SEND if is_message else Op(op), size_bytes=size, shape=shape, time_ns=time))
    return samples


def tables_of(samples: Iterable[Sample], *, source: str, cluster: Cluster | None = None) -> list[Table]:
    """Tables of medians, by operation, shape, algorithm and protocol."""
    groups: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    for sample in samples:
        if cluster is not None and sample.shape.per_node > cluster.domain_gpus:
            shape = f"{counted(sample.shape.ranks, 'rank')} on {counted(sample.shape.nodes, 'node')}"
            raise UsageError(f"{source}: {shape} do not fit on {cluster.name} with "
                             f"{counted(cluster.domain_gpus, 'GPU')} a domain")  # fmt: skip
        key = (sample.op, sample.shape, sample.algo, sample.proto)
        groups.setdefault(key, {}).setdefault(sample.size_bytes, []).append(sample.time_ns)
    tables = []
    for (op, shape, algo, proto), sizes in sorted(groups.items()):
        known: Sequence[int] = sorted(size for size, times in sizes.items() if float(np.median(times)) > 0)
        if not known:
            continue  # of a trace: nobody waited for any of them
        spreads = [float(np.std(sizes[size]) / np.mean(sizes[size])) for size in known if len(sizes[size]) > 1]
        tables.append(Table(op=op, shape=shape, size_bytes=tuple(known), algo=algo, proto=proto, source=source,
                            time_ns=tuple(float(np.median(sizes[size])) for size in known),
                            spread_percent=round(100.0 * float(np.mean(spreads)), 2) if spreads else 0.0))  # fmt: skip
    return tables


def joined_tables(sources: Sequence[tuple[str, Iterable[Sample]]], *, cluster: Cluster) -> list[Table]:
    """One table for each operation, shape, algorithm and protocol, of the samples of all sources that have it.

    Raises:
        UsageError: a source has nothing for a table, or groups that the cluster has no room for.
    """
    together: list[Sample] = []
    named: dict[tuple[Any, ...], list[str]] = {}
    for source, samples in sources:
        known = list(samples)
        tables = tables_of(known, source=source, cluster=cluster)
        if not tables:
            raise UsageError(f"{source}: no transfer in it has a time")
        together += known
        for table in tables:
            named.setdefault((table.op, table.shape, table.algo, table.proto), []).append(source)
    return [
        replace(table, source="; ".join(dict.fromkeys(named[table.op, table.shape, table.algo, table.proto])))
        for table in tables_of(together, source="")
    ]
