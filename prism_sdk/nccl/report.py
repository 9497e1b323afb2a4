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
from prism_sdk.nccl.operations import operations
from prismtrace import Op

__all__ = ["BandwidthRow", "NcclReport", "bus_factor", "make_report"]


def bus_factor(name: str, num_ranks: int) -> float:
    """What algbw is multiplied by to give busbw; 1 for one rank, and for what is no collective."""
    op = Op.__members__.get(name.upper())
    return 1.0 if op is None or num_ranks < 2 else factor_of_op(op, num_ranks)


@dataclass(frozen=True)
class BandwidthRow:
    """Operations that are alike. Bandwidths are decimal gigabytes a second, of the median time; None without times."""

    name: str
    num_ranks: int | None
    num_bytes: int
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


def make_report(job: NcclJob) -> NcclReport:
    """Count and time all operations of a job."""
    times: Mapping[tuple[object, ...], list[int]] = defaultdict(list)
    numbers: dict[tuple[object, ...], int] = defaultdict(int)
    total = shared = untimed = incomplete = 0
    for one in operations(job):
        key = (one.name, one.num_ranks, one.num_bytes, one.dtype, one.algo, one.proto, one.channels)
        numbers[key] += 1
        total += 1
        needed = 2 if one.name == "send_recv" else one.num_ranks
        incomplete += needed is not None and one.num_members < needed
        if one.is_shared:
            shared += 1
        elif one.time_ns is None:
            untimed += 1
        else:
            times[key].append(one.time_ns)
    rows = [_row(key, num, times.get(key, [])) for key, num in numbers.items()]
    rows.sort(key=lambda row: (row.name, row.num_ranks or 0, row.num_bytes, row.algo, row.proto))
    return NcclReport(tuple(rows), len(job.ranks), total, shared, untimed, incomplete, tuple(job.findings()))


def _row(key: tuple[object, ...], num: int, times: list[int]) -> BandwidthRow:
    name, num_ranks, num_bytes, dtype, algo, proto, channels = key
    assert isinstance(name, str) and isinstance(num_bytes, int) and isinstance(channels, int)
    assert num_ranks is None or isinstance(num_ranks, int)
    median = float(np.median(times)) if times else None
    algbw = num_bytes / median if median else None  # bytes a nanosecond are gigabytes a second
    busbw = algbw * bus_factor(name, num_ranks) if algbw is not None and num_ranks is not None else None
    return BandwidthRow(
        name=name, num_ranks=num_ranks, num_bytes=num_bytes, dtype=str(dtype), algo=str(algo), proto=str(proto),
        channels=channels, num_operations=num, num_timed=len(times), median_ns=median,
        min_ns=min(times) if times else None, p90_ns=float(np.percentile(times, 90)) if times else None,
        algbw_gb_per_s=algbw, busbw_gb_per_s=busbw,
    )  # fmt: skip
