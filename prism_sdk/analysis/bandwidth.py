"""Says how fast communication was, by group, operation and size. It does not say what a network could do.

``algbw = S / t`` and ``busbw = algbw * factor`` as NVIDIA's nccl-tests define them (doc/PERFORMANCE.md, and the
``GetBw`` functions of its sources for gather and scatter), in decimal gigabytes a second. S is the operation's size:

| operation | S in bytes | factor, n members |
|---|---|---|
| all_reduce | what each member contributes | 2 (n - 1) / n |
| all_gather | what each member receives | (n - 1) / n |
| reduce_scatter, all_to_all | what each member contributes | (n - 1) / n |
| gather, scatter | what the root has: n times a member's part | (n - 1) / n |
| broadcast, reduce, send, recv | the message | 1 |

``t`` is the transfer: from the last arrival to the end, on the slowest member. nccl-tests starts all members together,
so there nobody waits; here waiting is taken out. Where arrivals are unknown t runs from the post, and contains waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from prism_sdk.analysis.folded import FIRST_GROUP, Fold
from prism_sdk.analysis.job import Job
from prismtrace import ABSENT, DType, Op, UnitKind

__all__ = ["Bandwidth", "bandwidths", "bus_factor"]

_PARTIAL = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """The operations of one group, kind and size."""

    group_id: int
    group_name: str
    num_members: int
    op: str
    dtype: str
    size_bytes: int
    num_operations: int
    #: Median over the operations, as are the bandwidths; None where no time is known, or it is 0.
    time_ns: float | None
    min_time_ns: int | None
    max_time_ns: int | None
    algbw_gb_per_s: float | None
    busbw_gb_per_s: float | None
    #: True where t begins at the last arrival.
    is_transfer: bool


def bus_factor(op: Op, num_members: int) -> float:
    """The factor between algbw and busbw (this module's table)."""
    if num_members < 1:
        raise ValueError(f"a group has at least 1 member, not {num_members}")
    if op is Op.ALL_REDUCE:
        return 2 * (num_members - 1) / num_members
    return (num_members - 1) / num_members if op in _PARTIAL else 1.0


def bandwidths(job: Job) -> tuple[Bandwidth, ...]:
    """One entry for each group, operation, element type and size, the most total time first. Barriers have none."""
    graph = job.graph
    c = graph.columns
    rows = np.flatnonzero((c["kind"] >= UnitKind.COLLECTIVE) & (c["kind"] <= UnitKind.RECV))
    rows = rows[(c["kind"][rows] != UnitKind.SEND) | (graph.event_of_row[rows] < 0)]
    rows = rows[c["op"][rows] != Op.BARRIER]
    known = (job.completion_ns[rows] != ABSENT) & (c["start_ns"][rows] != ABSENT)
    arrival = job.arrival_ns[rows]
    begin = np.where(arrival == ABSENT, c["start_ns"][rows], arrival)
    time = np.where(known, job.completion_ns[rows] - begin, -1)
    size = np.maximum(np.where(c["num_elements_in"][rows] == ABSENT, 0, c["num_elements_in"][rows]),
                      np.where(c["num_elements_out"][rows] == ABSENT, 0, c["num_elements_out"][rows]))  # fmt: skip
    event = np.where(graph.event_of_row[rows] >= 0, graph.event_of_row[rows], -1 - rows)
    # one entry an operation: the slowest member, the largest size (a root has more than the others)
    events, place = np.unique(event, return_inverse=True)
    slowest = np.full(len(events), -1, dtype=np.int64)
    largest = np.zeros(len(events), dtype=np.int64)
    np.maximum.at(slowest, place, time)
    np.maximum.at(largest, place, size)
    first = np.full(len(events), np.iinfo(np.int64).max)
    np.minimum.at(first, place, rows)
    arrived = np.ones(len(events), dtype=np.bool_)
    np.logical_and.at(arrived, place, arrival != ABSENT)
    keys = np.stack([c[name][first].astype(np.uint64) for name in ("group_id", "op", "dtype")]
                    + [largest.astype(np.uint64), arrived.astype(np.uint64)], axis=1)  # fmt: skip
    names = job.titles
    if job.fold is None:
        found = _entries(job, names, keys, slowest, first)
    else:
        found = _of_groups(job, job.fold, names, keys, slowest, first)
    return tuple(sorted(found, key=lambda b: -(b.time_ns or 0) * b.num_operations))


def _entries(
    job: Job, names: Mapping[int, str], keys: np.ndarray, slowest: np.ndarray, first: np.ndarray
) -> list[Bandwidth]:
    """One entry for equal keys, rising: group, operation, element type, size, and whether arrivals are known.

    Args:
        job: the loaded trace.
        names: what groups are called.
        keys: (E, 5) of each operation.
        slowest: (E,) its time, -1 where unknown.
        first: (E,) its first row.
    """
    found = []
    order = np.lexsort(keys.T[::-1])
    differs = (keys[order][1:] != keys[order][:-1]).any(axis=1)
    for chosen in np.split(order, np.flatnonzero(differs) + 1) if len(order) else ():
        key = keys[chosen[0]]
        found.append(_entry(job, [int(value) for value in key], slowest[chosen], sample=int(first[chosen[0]]),
                            name=names.get(int(key[0]), "")))  # fmt: skip
    return found


def _of_groups(
    job: Job, fold: Fold, names: Mapping[int, str], keys: np.ndarray, slowest: np.ndarray, first: np.ndarray
) -> list[Bandwidth]:
    """As `_entries`, of all groups: those with as many lanes of the same classes, and as many members, have the same.

    `keys` have classes of lanes in place of groups.
    """
    found: list[Bandwidth] = []
    known: dict[tuple[object, ...], list[Bandwidth]] = {}
    order = np.argsort(keys[:, 0], kind="stable")
    for group_id, numbers in fold.classes_of_groups():
        what = (numbers, fold.groups[group_id].size)
        if what not in known:
            mine = []
            for number, count in numbers:
                ends = np.searchsorted(keys[order, 0], np.array([FIRST_GROUP + number, FIRST_GROUP + number + 1],
                                                                dtype=np.uint64))  # fmt: skip
                mine.append(np.repeat(order[ends[0] : ends[1]], count))
            chosen = np.concatenate(mine)
            of_group = keys[chosen]
            of_group[:, 0] = group_id
            known[what] = _entries(job, names, of_group, slowest[chosen], first[chosen])
        name = names.get(group_id, "")
        found += [replace(entry, group_id=group_id, group_name=name) for entry in known[what]]
    return found


def _entry(job: Job, key: list[int], times: np.ndarray, *, sample: int, name: str) -> Bandwidth:
    group_id, op_code, dtype_code, num_elements, arrived = key
    op = Op(op_code) if op_code in Op._value2member_map_ else Op.UNSPECIFIED
    dtype = DType(dtype_code) if dtype_code in DType._value2member_map_ else DType.UNSPECIFIED
    kind = UnitKind(int(job.graph.columns["kind"][sample]))
    if kind is not UnitKind.COLLECTIVE and op is Op.UNSPECIFIED:
        op = Op.SEND if kind is UnitKind.SEND else Op.RECV
    group = job.groups.get(group_id)
    members = 2 if kind is not UnitKind.COLLECTIVE else group.size if group is not None else 0
    known = times[times >= 0]
    middle = float(np.median(known)) if len(known) else None
    size_bytes = num_elements * dtype.itemsize_bytes
    algbw = size_bytes / middle if middle and size_bytes else None
    return Bandwidth(
        group_id=group_id, group_name=name,
        num_members=members, op=op.name.lower(), dtype=dtype.text, size_bytes=size_bytes, num_operations=len(times),
        time_ns=middle, min_time_ns=int(known.min()) if len(known) else None,
        max_time_ns=int(known.max()) if len(known) else None, algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * bus_factor(op, members) if algbw is not None and members else None,
        is_transfer=bool(arrived),
    )  # fmt: skip
