"""Bandwidth tables of what NCCL did: algbw and busbw by operation, size, algorithm and protocol, as nccl-tests counts.

It reads a job and gives rows; printing them is the command line's work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prism_sdk.analysis.bandwidth import bus_factor as factor_of_op
from prism_sdk.nccl.job import NcclJob
from prism_sdk.nccl.operations import Operation, operations
from prismtrace import Op

__all__ = ["BandwidthRow", "NcclReport", "bus_factor", "make_report"]


def bus_factor(name: str, num_ranks: int) -> float:
    """What algbw is multiplied by to give busbw; 1 for one rank, and for what is no collective."""
    op = Op.__members__.get(name.upper())
    return 1.0 if op is None or num_ranks < 2 else factor_of_op(op, num_ranks)


@dataclass(frozen=True)
class BandwidthRow:
    """Operations that are alike. Bandwidths are decimal gigabytes a second, of the median time; None without times.

    `num_bytes` is the size, the median of them where sizes from `min_bytes` to `max_bytes` are taken together.
    """

    name: str
    num_ranks: int | None
    num_nodes: int
    num_bytes: int
    min_bytes: int
    max_bytes: int
    dtype: str
    algo: str
    proto: str
    channels: int
    num_operations: int
    num_timed: int
    median_ns: float | None
    min_ns: int | None
    p90_ns: float | None
    algbw_gb_per_s: float | None
    busbw_gb_per_s: float | None


@dataclass(frozen=True)
class NcclReport:
    """The table, and what stays out of it.

    `num_shared` operations ran in one launch with others: their times cannot be told apart and are left out of the
    medians. `num_without_time` have no kernel times (interfaces before version 4, copies within one rank).
    """

    rows: tuple[BandwidthRow, ...]
    num_ranks: int
    num_operations: int
    num_shared: int
    num_without_time: int
    num_incomplete: int
    """Operations of which not all members left records."""
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def make_report(job: NcclJob, *, by: str = "size") -> NcclReport:
    """Count and time all operations of a job.

    Args:
        job: the record files.
        by: "size": a row for each size; "power": one for all sizes from a power of two up to the next, else alike.
    """
    found: Mapping[tuple[object, ...], list[Operation]] = defaultdict(list)
    total = shared = untimed = incomplete = 0
    for one in operations(job):
        size = one.num_bytes if by == "size" else one.num_bytes.bit_length()
        found[one.name, one.num_ranks, one.num_nodes, size, one.dtype, one.algo, one.proto, one.channels].append(one)
        total += 1
        needed = 2 if one.name == "send_recv" else one.num_ranks
        incomplete += needed is not None and one.num_members < needed
        shared += one.is_shared
        untimed += one.time_ns is None and not one.is_shared
    rows = [_row(alike) for alike in found.values()]
    rows.sort(key=lambda row: (row.name, row.num_ranks or 0, row.num_bytes, row.algo, row.proto))
    return NcclReport(
        tuple(rows), len(job.ranks), total, shared, untimed, incomplete, tuple(job.findings()),
        tuple(job.notes()),
    )  # fmt: skip


def _row(alike: list[Operation]) -> BandwidthRow:
    one = alike[0]
    timed = [other for other in alike if other.time_ns is not None and not other.is_shared]
    times = [other.time_ns for other in timed if other.time_ns is not None]
    sizes = sorted(other.num_bytes for other in alike)
    size = sizes[len(sizes) // 2]
    median = float(np.median(times)) if times else None
    # bytes a nanosecond are gigabytes a second
    algbw = float(np.median([other.num_bytes for other in timed])) / median if median else None
    factor = bus_factor(one.name, one.num_ranks) if one.num_ranks is not None else None
    return BandwidthRow(
        name=one.name, num_ranks=one.num_ranks, num_nodes=one.num_nodes, num_bytes=size,
        min_bytes=sizes[0], max_bytes=sizes[-1],
        dtype=one.dtype, algo=one.algo, proto=one.proto, channels=one.channels, num_operations=len(alike),
        num_timed=len(times), median_ns=median, min_ns=min(times) if times else None,
        p90_ns=float(np.percentile(times, 90)) if times else None, algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * factor if algbw is not None and factor is not None else None,
    )  # fmt: skip
