"""How long a transfer takes in a group that this machine cannot run for real, one rank a core.

Responsible for a table measured between two ranks and for extending it to larger groups; the values it gives are
modelled, not measured, and the calibration says so.

Steps of the algorithms (gloo's, for n members and S bytes a member; a *step* moves one block between neighbours):
ring all-reduce 2(n-1) steps of S/n; ring all-gather n-1 steps of S; reduce-scatter and all-to-all n-1 steps of S/n;
trees (broadcast, reduce, barrier) ceil(log2 n) steps of S; gather and scatter n-1 blocks of S at the root.
A call has a cost of its own, whatever the group: T_1, that of the same call in a group of one. Between two ranks the
formulas count one step (all-reduce: two); so T_n(S) = T_1(S') + steps_n / steps_2 * (T_2(S') - T_1(S')) with
S' = block_n / block_2 * S. Tables hold means: stalls of a few ms, which some steps meet and others do not, add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prism_sdk.graph.calibrate import measure
from prism_sdk.graph.job import JobGraph
from prismtrace import ABSENT, DType, Op, UnitKind

_SAME_TABLE = {Op.GATHER: Op.BROADCAST, Op.SCATTER: Op.BROADCAST, Op.SEND: Op.RECV}
_FALLBACK_NS = 50_000

Table = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class TransferModel:
    """Measured times: for each operation, sizes in bytes and times in ns, both ascending in size."""

    tables: Mapping[Op, Table]  # between two ranks
    alone: Mapping[Op, Table] = field(default_factory=dict)  # in a group of one

    @classmethod
    def fit(cls, graph: JobGraph) -> TransferModel:
        """Means of the transfers that a trace of two ranks shows, by operation and size, without each first one."""
        c = graph.columns
        transfer = measure(graph).transfer_ns
        known = (transfer != ABSENT) & (c["kind"] != UnitKind.COMPUTE) & (c["kind"] != UnitKind.WAIT)
        single = {group_id for group_id, group in graph.groups.items() if len(group.ranks) == 1}
        found: dict[tuple[bool, Op], dict[int, dict[int, list[int]]]] = {}
        for row in np.flatnonzero(known).tolist():
            place = (int(c["group_id"][row]) in single, Op(int(c["op"][row])))
            by_rank = found.setdefault(place, {}).setdefault(_num_bytes(graph, row), {})
            by_rank.setdefault(int(graph.rank_of_row[row]), []).append(int(transfer[row]))
        tables: tuple[dict[Op, Table], dict[Op, Table]] = ({}, {})
        for (alone, op), by_size in found.items():
            sizes = sorted(by_size)
            times = tuple(
                float(np.mean([t for own in by_size[size].values() for t in own[1:] or own])) for size in sizes
            )
            tables[alone][op] = (tuple(float(size) for size in sizes), times)
        return cls(*tables)

    def transfer_ns(self, op: Op, *, num_bytes: int, group_size: int) -> int:
        """The modelled time of one operation in a group of `group_size` ranks, `num_bytes` contributed by each."""
        n = max(group_size, 1)
        if n == 1:
            return 0
        if op is Op.ALL_REDUCE or op is Op.REDUCE_SCATTER or op is Op.ALL_TO_ALL:
            return self._hops(op, num_bytes * 2 / n, n - 1)
        if op in (Op.ALL_GATHER, Op.GATHER, Op.SCATTER):
            return self._hops(op, num_bytes, n - 1)
        if op is Op.SEND:
            return 0  # buffered: what the message takes is counted where it is received
        steps = 1 if op is Op.RECV else math.ceil(math.log2(n))
        return self._hops(op, num_bytes, steps)

    def _hops(self, op: Op, num_bytes: float, num_hops: int) -> int:
        """The call's own cost and that of `num_hops` times what lies between it and the time of two ranks."""
        between = _look_up(self.tables, op, num_bytes)
        if between is None:
            return round(num_hops * _FALLBACK_NS)
        own = min(_look_up(self.alone, op, num_bytes) or 0.0, between)
        return round(own + num_hops * (between - own))


def _look_up(tables: Mapping[Op, Table], op: Op, num_bytes: float) -> float | None:
    table = tables.get(op) or tables.get(_SAME_TABLE.get(op, op))
    if table is None:
        return None
    sizes, times = table
    if len(sizes) > 1 and num_bytes > sizes[-1]:  # beyond the table: at the last slope
        slope = max(times[-1] - times[-2], 0.0) / (sizes[-1] - sizes[-2])
        return times[-1] + slope * (num_bytes - sizes[-1])
    return float(np.interp(num_bytes, sizes, times))


def _num_bytes(graph: JobGraph, row: int) -> int:
    c = graph.columns
    counts = [int(c[name][row]) for name in ("num_elements_in", "num_elements_out")]
    count = counts[1] if c["op"][row] in (Op.BROADCAST, Op.SCATTER, Op.RECV) else counts[0]
    return max(count, 0) * DType(int(c["dtype"][row])).itemsize_bytes


def modelled_transfers(
    graph: JobGraph, model: TransferModel, *, group_sizes: Mapping[int, int] | None = None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A transfer for every communication row of `graph`, ABSENT elsewhere.

    `group_sizes`: of groups that have lost members in `graph`.
    """
    c = graph.columns
    result = np.full(len(graph), ABSENT, dtype=np.int64)
    rows = np.flatnonzero((c["kind"] != UnitKind.COMPUTE) & (c["kind"] != UnitKind.WAIT))
    sizes = {group_id: len(group.ranks) for group_id, group in graph.groups.items()} | dict(group_sizes or {})
    cache: dict[tuple[int, int, int], int] = {}
    for row in rows.tolist():
        key = (int(c["op"][row]), _num_bytes(graph, row), sizes.get(int(c["group_id"][row]), 2))
        if key not in cache:
            cache[key] = model.transfer_ns(Op(key[0]), num_bytes=key[1], group_size=key[2])
        result[row] = cache[key]
    return result


def plausible_transfers(graph: JobGraph, measured: Sequence[JobGraph]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A transfer for every row of `graph` from like operations that were measured, for those that were not.

    An asynchronous operation that ended before anybody waited for it shows no completion; another of the same kind,
    group and size does. Without one, the nearest size of that kind counts, then a fixed fallback.
    """
    exact: dict[tuple[int, int, int], list[int]] = {}
    for other in measured:
        transfer = measure(other).transfer_ns
        for row in np.flatnonzero(transfer != ABSENT).tolist():
            if other.columns["kind"][row] not in (UnitKind.COMPUTE, UnitKind.WAIT):
                exact.setdefault(_key(other, row), []).append(int(transfer[row]))
    means = {key: int(np.mean(values)) for key, values in exact.items()}
    result = np.full(len(graph), _FALLBACK_NS, dtype=np.int64)
    cache: dict[tuple[int, int, int], int] = {}
    kinds = graph.columns["kind"]
    for row in np.flatnonzero((kinds != UnitKind.COMPUTE) & (kinds != UnitKind.WAIT)).tolist():
        key = _key(graph, row)
        if key not in cache:
            alike = [(abs(k[2] - key[2]), value) for k, value in means.items() if k[:2] == key[:2]]
            cache[key] = means.get(key, min(alike)[1] if alike else _FALLBACK_NS)
        result[row] = cache[key]
    return result


def _key(graph: JobGraph, row: int) -> tuple[int, int, int]:
    c = graph.columns
    return int(c["op"][row]), int(c["group_id"][row]), _num_bytes(graph, row)
