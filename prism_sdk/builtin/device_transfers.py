"""How long NCCL takes in groups that the GPUs at hand cannot run: from a cluster profile, or two GPUs and the profile.

Responsible for giving every communication of a graph a transfer and saying where it comes from; formulas and tables are
prism_sdk.cluster's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prism_sdk.cluster.estimate import Estimate, estimate
from prism_sdk.cluster.measurements import message_bytes, read_trace, tables_of
from prism_sdk.cluster.profile import Cluster
from prism_sdk.errors import CalibrationError
from prism_sdk.graph.job import JobGraph
from prismtrace import ABSENT, DType, Op, UnitKind

_RECEIVED = (Op.BROADCAST, Op.SCATTER, Op.RECV)
_MOST_SIZES = 24  # of one operation that a probe measures


@dataclass(frozen=True)
class Transfers:
    """A transfer for every communication row of a graph (ABSENT elsewhere), where each comes from, and in words."""

    transfer_ns: npt.NDArray[np.int64]
    provenance: npt.NDArray[np.uint8] | None  # the registry's numbers; None: nobody asks
    source: str


def contributed_bytes(graph: JobGraph, row: int) -> int:
    """What one rank contributes to an operation, or receives of it where only the root contributes."""
    c = graph.columns
    count = int(c["num_elements_out" if c["op"][row] in _RECEIVED else "num_elements_in"][row])
    return max(count, 0) * DType(int(c["dtype"][row])).itemsize_bytes


def cluster_transfers(
    graph: JobGraph, cluster: Cluster, *, source: str = "", group_sizes: Mapping[int, int] | None = None
) -> Transfers:
    """The transfers that a profile says; rank r of the job is GPU r of the cluster.

    `group_sizes`: how large groups really are of which the graph has not all ranks; they count as neighbours.

    Raises:
        CalibrationError: the job has more ranks than the cluster GPUs.
    """
    if graph.world_size > cluster.num_gpus:
        raise CalibrationError(
            f"the job has {graph.world_size:,} ranks, {cluster.name} {cluster.num_gpus:,} GPUs", strategy="slices",
            hint="name another profile with -O cluster=NAME",
        )  # fmt: skip
    c = graph.columns
    transfer = np.full(len(graph), ABSENT, dtype=np.int64)
    provenance = np.zeros(len(graph), dtype=np.uint8)
    known: dict[tuple[int, int, tuple[int, ...]], Estimate] = {}
    for row in np.flatnonzero(graph.event_of_row >= 0).tolist():
        kind, op, group = c["kind"][row], int(c["op"][row]), graph.groups[int(c["group_id"][row])]
        is_message = kind != UnitKind.COLLECTIVE
        members = (int(graph.rank_of_row[row]), int(c["peer"][row])) if is_message else tuple(group.ranks)
        if not is_message and group_sizes is not None:
            members = tuple(range(group_sizes.get(group.group_id, len(members))))
        size = contributed_bytes(graph, row)
        key = (op, size, members)
        if key not in known:
            size = message_bytes(op, contributed=size, group_size=len(members))
            known[key] = estimate(cluster, Op(op), num_bytes=size, shape=cluster.shape(members))
        # what a message takes is counted where it is received
        transfer[row] = 0 if kind == UnitKind.SEND else round(known[key].time_ns)
        provenance[row] = known[key].provenance
    return Transfers(transfer, provenance, source)


def fitted_cluster(cluster: Cluster, trace: Path) -> Cluster:
    """The profile with the times that a probe between GPUs of this machine shows in place of its own."""
    tables = tables_of(read_trace(trace, cluster), source="probe")
    measured = {table.op for table in tables}
    return replace(cluster, tables=(*tables, *(table for table in cluster.tables if table.op not in measured)))


def sizes_of(graph: JobGraph) -> dict[str, list[int]]:
    """The bytes that one rank contributes, by name of the operation, for a probe to measure; the largest of many."""
    c = graph.columns
    found: dict[str, set[int]] = {}
    for row in np.flatnonzero(graph.event_of_row >= 0).tolist():
        op = Op(int(c["op"][row]))
        if op not in (Op.SEND, Op.BARRIER):
            found.setdefault(op.name.lower(), set()).add(contributed_bytes(graph, row))
    return {name: sorted(sizes - {0})[-_MOST_SIZES:] for name, sizes in sorted(found.items())}


def has_mixed_messages(graph: JobGraph, slices: Sequence[Sequence[int]]) -> bool:
    """Whether two ranks of one slice send each other messages in a group that is not within the slice."""
    c = graph.columns
    home = {rank: frozenset(ranks) for ranks in slices for rank in ranks}
    for row in np.flatnonzero(c["kind"] == UnitKind.SEND).tolist():
        mine = home[int(graph.rank_of_row[row])]
        if int(c["peer"][row]) in mine and not mine.issuperset(graph.groups[int(c["group_id"][row])].ranks):
            return True
    return False
