"""Reads measured transfers and makes tables of them: nccl-tests logs, small CSV or JSON files, observed traces.

It fits no model and writes no profile. The CSV and JSON form is the seam for other measuring tools, such as NCCL's
profiler: one measurement a row with ``op, algo, proto, size, ranks, nodes, time_us``; algo, proto, nodes may be absent.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism_sdk.cluster.profile import Cluster, Shape, Table
from prism_sdk.errors import UnreadableError, UsageError
from prism_sdk.graph.calibrate import measure
from prism_sdk.graph.job import JobGraph
from prism_sdk.wording import counted
from prismtrace import ABSENT, DType, Op, UnitKind

__all__ = ["Sample", "message_bytes", "read_measurements", "read_nccl_tests", "read_trace", "tables_of"]

_OPS = {op.name.lower(): op for op in Op if op is not Op.UNSPECIFIED}
_NCCL_TESTS = {
    "all_reduce": Op.ALL_REDUCE, "allreduce": Op.ALL_REDUCE, "all_gather": Op.ALL_GATHER, "allgather": Op.ALL_GATHER,
    "reduce_scatter": Op.REDUCE_SCATTER, "reducescatter": Op.REDUCE_SCATTER, "alltoall": Op.ALL_TO_ALL,
    "broadcast": Op.BROADCAST, "reduce": Op.REDUCE, "sendrecv": Op.SEND, "gather": Op.GATHER, "scatter": Op.SCATTER,
}  # fmt: skip
_BINARY = re.compile(r"\b([a-z_]+?)_perf(?:_mpi)?\b")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device", re.MULTILINE)
_ROW = re.compile(r"^\s+(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured transfer; ``size_bytes`` as nccl-tests counts it."""

    op: Op
    size_bytes: int
    shape: Shape
    time_ns: float
    algo: str = ""
    proto: str = ""


def read_nccl_tests(path: str | os.PathLike[str], *, op: str | None = None) -> list[Sample]:
    """The out-of-place times of a log of nccl-tests. ``op`` is needed where the log does not name the binary.

    Raises:
        UnreadableError: the file cannot be opened, or is no log of nccl-tests.
        UsageError: it has no times, or nothing says which operation it is of.
    """
    name = os.fspath(path)
    text = _text(name)
    ranks = {int(rank): host for rank, host in _RANK.findall(text)}
    if not ranks:
        reason = "no line '#  Rank  0 Pid ... on HOST device ...': it is no log of nccl-tests"
        raise UnreadableError(name, reason=reason, hint="give the whole output, with its header")
    found = [word for word in _BINARY.findall(text) if word in _NCCL_TESTS]
    word = op or (found[0] if found else Path(name).name.split("_perf")[0])
    if word not in _NCCL_TESTS:
        raise UsageError(
            f"{name}: which operation is it?", hint="add --op all_reduce, or keep the command line in the log"
        )
    shape = Shape(ranks=len(ranks), nodes=len(set(ranks.values())))
    samples = []
    for line in text.splitlines():
        match = _ROW.match(line)
        if match and float(match[6]) > 0 and int(match[1]) > 0:
            samples.append(Sample(op=_NCCL_TESTS[word], size_bytes=int(match[1]), shape=shape,
                                  time_ns=float(match[6]) * 1e3))  # fmt: skip
    if not samples:
        raise UsageError(f"{name}: the log of nccl-tests has no rows with times", hint="did the run end early?")
    return samples


def read_measurements(path: str | os.PathLike[str]) -> list[Sample]:
    """A CSV file with a header, or JSON: a list of objects, or an object a line.

    Raises:
        UnreadableError: the file cannot be opened, is no text, or is cut off.
        UsageError: a row lacks something.
    """
    name = os.fspath(path)
    text = _text(name)
    rows: list[dict[str, Any]]
    try:
        if name.endswith(".csv"):
            rows = list(csv.DictReader(text.splitlines()))
        elif text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise UnreadableError(name, reason=f"it is no JSON: {error}") from error
    samples = []
    for number, row in enumerate(rows, start=1):
        try:
            op = _OPS[str(row["op"]).lower()]
            shape = Shape(ranks=int(row["ranks"]), nodes=int(row.get("nodes") or 1))
            algo, proto = str(row.get("algo") or ""), str(row.get("proto") or "")
            time_ns = float(row["time_us"]) * 1e3
            samples.append(
                Sample(op=op, size_bytes=int(row["size"]), time_ns=time_ns, algo=algo, proto=proto, shape=shape)
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{name}: row {number}: {error} is missing or wrong",
                             hint="columns are op, algo, proto, size, ranks, nodes, time_us") from error  # fmt: skip
    return samples


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
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
            continue
        spreads = [float(np.std(sizes[size]) / np.mean(sizes[size])) for size in known if len(sizes[size]) > 1]
        tables.append(Table(op=op, shape=shape, size_bytes=tuple(known), algo=algo, proto=proto, source=source,
                            time_ns=tuple(float(np.median(sizes[size])) for size in known),
                            spread_percent=round(100.0 * float(np.mean(spreads)), 2) if spreads else 0.0))  # fmt: skip
    return tables
