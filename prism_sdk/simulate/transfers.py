"""Gives the operations of a job the transfer times that a cluster profile says.

It knows no formulas: ``prism_sdk.cluster`` has them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from prism_sdk.cluster.estimate import Estimate, estimate
from prism_sdk.cluster.measurements import message_bytes
from prism_sdk.cluster.profile import Cluster, Shape
from prism_sdk.errors import UsageError
from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.variants import VariantWeights
from prism_sdk.simulate.weights import UNKNOWN_TRANSFER, find_rows
from prism_sdk.wording import counted
from prismtrace import Op, UnitKind

__all__ = ["lane_shapes", "with_cluster"]

Int64Array = npt.NDArray[np.int64]
_OPS = frozenset(int(op) for op in Op if op is not Op.UNSPECIFIED)
#: Eleven days: sums of thousands of transfers stay within 64 bits.
LONGEST_NS = 1e15


def with_cluster(
    job: SimJob, cluster: Cluster, *, which: Literal["all", "missing"] = "all", relative_to: Cluster | None = None
) -> SimJob:
    """The job with transfers of a cluster profile.

    Args:
        job: loaded with its sizes.
        cluster: the profile; rank r of the job is GPU r of the cluster.
        which: ``all`` transfers, or only those that the graph lacks (``missing``).
        relative_to: keep the measured transfers and scale each by the ratio of the two profiles; for changes of links.

    Raises:
        UsageError: the job has more ranks than the cluster GPUs, or operations whose size is not known.
    """
    if job.world_size > cluster.num_gpus:
        raise UsageError(f"{job.source} has {job.world_size:,} ranks, {cluster.name} {cluster.num_gpus:,} GPUs",
                         hint="raise num_nodes in the profile")  # fmt: skip
    shapes = lane_shapes(job, cluster)
    before = None if relative_to is None else lane_shapes(job, relative_to)
    cache: dict[tuple[int, int, Shape], Estimate] = {}
    used: Counter[str] = Counter()
    out = VariantWeights(job)
    without_size = 0

    def look_up(
        profile: Cluster, op: int, num_bytes: int, shape: Shape, known: dict[tuple[int, int, Shape], Estimate]
    ) -> Estimate:
        key = (op, num_bytes, shape)
        if key not in known:
            size = message_bytes(op, contributed=num_bytes, group_size=shape.ranks)
            known[key] = estimate(profile, Op(op), num_bytes=size, shape=shape)
        return known[key]

    old: dict[tuple[int, int, Shape], Estimate] = {}
    for position in range(job.num_ranks):
        lanes = job.lanes.lane[job.lanes.offsets[position] : job.lanes.offsets[position + 1]].tolist()
        mine = tuple(shapes[lane] for lane in lanes)
        theirs = mine if before is None else tuple(before[lane] for lane in lanes)
        if out.known(position, (mine, theirs)):
            continue
        rows, weights = find_rows(job, position)
        main, provenance = job.main[weights].copy(), job.provenance[weights].copy()
        kind, lane_of = job.programs.kind[rows], job.programs.lane_of[rows]
        wanted = lane_of >= 0
        if which == "missing":
            wanted &= main == UNKNOWN_TRANSFER
        for row in np.flatnonzero(wanted).tolist():
            if kind[row] == UnitKind.SEND:
                if main[row] == UNKNOWN_TRANSFER or relative_to is None:
                    main[row], provenance[row] = 0, 3  # what the message takes is counted where it is received
                continue
            num_bytes = int(job.programs.num_bytes[rows][row])
            op = int(Op.RECV if kind[row] == UnitKind.RECV else job.programs.op[rows][row])
            if num_bytes < 0 and op == Op.BARRIER:
                num_bytes = 0
            if num_bytes < 0 or op not in _OPS:
                without_size += 1
                main[row] = 0 if main[row] == UNKNOWN_TRANSFER else main[row]
                continue
            found = look_up(cluster, op, num_bytes, mine[lane_of[row]], cache)
            time_ns = found.time_ns
            if relative_to is not None:
                base = look_up(relative_to, op, num_bytes, theirs[lane_of[row]], old).time_ns
                time_ns = int(main[row]) * time_ns / base if base > 0 and main[row] >= 0 else int(main[row])
            if not time_ns < LONGEST_NS:
                among = counted(mine[lane_of[row]].ranks, "rank")
                what = f"{Op(op).name.lower()} of {num_bytes:,} bytes among {among}"
                raise UsageError(f"{cluster.name}: {what} would take {time_ns / 1e9:.3g} s",
                                 hint="are the units of the profile right?")  # fmt: skip
            main[row] = round(time_ns)
            provenance[row] = found.provenance if relative_to is None else 3
            used[found.basis.split(",")[0]] += 1
        out.put(position, (mine, theirs), main, job.side[weights], provenance)
    most = (f"{name} ({counted(count, 'unit', separator=',')})" for name, count in used.most_common(4))
    notes = [f"transfers of {cluster.name}: {', '.join(most) or 'none'}"]
    errors = [item.error_percent for item in cache.values() if item.error_percent]
    if errors:
        notes.append(
            f"interpolation in the tables errs by {np.mean(errors):.1f} % on average, {max(errors):.1f} % at most"
        )
    if without_size:
        notes.append(f"{without_size} communication units do not say how much they move: they keep their time")
    return replace(out.finish(), notes=(*job.notes, *notes))


def lane_shapes(job: SimJob, cluster: Cluster) -> list[Shape]:
    """The shape of each lane's group on a cluster."""
    by_group: dict[int, Shape] = {}
    found = []
    lanes = job.lanes
    for lane in range(len(lanes.group_id)):
        source, destination = int(lanes.source[lane]), int(lanes.destination[lane])
        if source >= 0:
            found.append(cluster.shape((source, destination)))
            continue
        group_id = int(lanes.group_id[lane])
        if group_id not in by_group:
            by_group[group_id] = cluster.shape(tuple(job.groups[group_id].ranks))
        found.append(by_group[group_id])
    return found
