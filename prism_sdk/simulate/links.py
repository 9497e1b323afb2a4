"""Says which links the operations of a job share, and runs the job with the links shared.

It knows no formulas of transfers (``prism_sdk.cluster`` has them) and prints nothing.

The model. A transfer that is alone takes as long as its weight says, and during that time needs a certain share of each
of its links (its *demand*: bytes over what the link carries in that time; latency needs nothing). Transfers that
overlap in time run at

    rate = the least, over its links, of 1 / max(1, sum of the demands on the link)

of the rate that they have alone, and it changes whenever one begins or ends. A link that has less than is asked for
gives all the same fraction, and carries just what it can; so transfers of equal demand share it equally. What a
transfer that is held up elsewhere leaves unused on a link is not given to the others, as it would be by max-min
fairness. Where no two transfers that use one link overlap, all times are what they are without sharing, to the ns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prism_sdk.simulate import flows
from prism_sdk.simulate.compiling import call
from prism_sdk.simulate.job import Links, SimJob
from prismtrace import Op

if TYPE_CHECKING:
    from prism_sdk.cluster.profile import Cluster, Shape

__all__ = ["SharedRun", "run_shared", "shared_links"]

Int64Array = npt.NDArray[np.int64]
_NUM_OPS = 32
_LARGE_BYTES = 2**40
_LOW = np.iinfo(np.int64).min


def shared_links(job: SimJob, cluster: Cluster) -> Links:
    """The links of each lane of the job; rank r is GPU r of the cluster."""
    from prism_sdk.cluster.links import busy_ns, link_names, links_of, num_nics_of
    from prism_sdk.cluster.measurements import message_bytes

    kinds: dict[tuple[Shape, int, bool], int] = {}
    by_ranks: dict[tuple[object, ...], tuple[int, list[int], list[int]]] = {}
    lane_kind: list[int] = []
    first_link, first_network, found = [0], [], []
    lanes = job.lanes
    for lane in range(len(lanes.group_id)):
        source, destination = int(lanes.source[lane]), int(lanes.destination[lane])
        is_message = source >= 0
        key: tuple[object, ...] = (source, destination) if is_message else (int(lanes.group_id[lane]),)
        if key not in by_ranks:
            ranks = (source, destination) if is_message else tuple(job.groups[int(lanes.group_id[lane])].ranks)
            kind = (cluster.shape(ranks), num_nics_of(cluster, ranks), is_message)
            inside, network = links_of(cluster, ranks, is_message=is_message)
            if len(set(ranks)) < 2:
                inside, network = [], []
            by_ranks[key] = kinds.setdefault(kind, len(kinds)), inside, network
        number, inside, network = by_ranks[key]
        lane_kind.append(number)
        found += inside
        first_network.append(len(found))
        found += network
        first_link.append(len(found))
    per_byte = np.zeros((max(len(kinds), 1), _NUM_OPS, 2))
    for (shape, num_nics, is_message), number in kinds.items():
        for op in range(_NUM_OPS):
            known = Op.SEND if is_message else Op(op) if op in Op._value2member_map_ and op else None
            if known is not None:
                size = message_bytes(known, contributed=_LARGE_BYTES, group_size=shape.ranks)
                busy = busy_ns(cluster, known, num_bytes=size, shape=shape, num_nics=num_nics)
                per_byte[number, op] = np.array(busy) / _LARGE_BYTES
    return _joined(np.array(found, dtype=np.int64), np.array(first_link, dtype=np.int64),
                   np.array(first_network, dtype=np.int64), np.array(lane_kind, dtype=np.int64), per_byte,
                   len(link_names(cluster)))  # fmt: skip


def _joined(
    links: Int64Array, first_link: Int64Array, first_network: Int64Array, lane_kind: Int64Array,
    per_byte: npt.NDArray[np.float64], num_links: int,
) -> Links:  # fmt: skip
    """The links with the lanes that use each of them: twice the lane, plus 1 where it is a link of the network."""
    lane = np.repeat(np.arange(len(lane_kind)), np.diff(first_link))
    is_network = np.arange(len(links)) >= first_network[lane] if len(links) else np.zeros(0, dtype=np.bool_)
    order = np.argsort(links, kind="stable")
    return Links(
        links=links, first_link=first_link, first_network=first_network, lane_kind=lane_kind, per_byte=per_byte,
        first_user=np.searchsorted(links[order], np.arange(num_links + 1)).astype(np.int64),
        users=(2 * lane + is_network)[order].astype(np.int64),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """What came of a run with shared links."""

    num_finished: int
    #: By rank position, its first place in ``complete_ns``, which has the completion of each communication unit.
    unit_begin: Int64Array
    complete_ns: Int64Array
    #: By event: how much longer it takes than alone, ns.
    longer_ns: Int64Array


def run_shared(
    job: SimJob, links: Links, *, remaining: npt.NDArray[np.int32], arrival: Int64Array, last: npt.NDArray[np.int32],
    clock: Int64Array, cursor: Int64Array, step_offsets: Int64Array, step_end: Int64Array,
    slow: tuple[Int64Array, Int64Array, npt.NDArray[np.float64]],
) -> SharedRun:  # fmt: skip
    """Run the job; fills the arrays as ``kernel.run`` does."""
    p, lanes = job.programs, job.lanes
    total, num_lanes = lanes.total_events + 1, max(len(lanes.group_id), 1)
    sizes = job.sizes
    unit_begin = (np.cumsum(sizes) - sizes).astype(np.int64)
    bound_begin = p.bound_offsets[:-1][job.program]

    def filled(size: int, value: int, dtype: Callable[..., object] = np.int64) -> npt.NDArray[np.int64]:
        return np.full(size, value, dtype=dtype)  # type: ignore[call-overload,no-any-return]

    complete, alone, finish = filled(len(job) + 1, 0), filled(total, 0), filled(total, _LOW)
    num_finished = call(
        flows.run_shared, p.kind, p.op, p.num_bytes, p.lane_of, p.ordinal, p.awaited, p.bounds, job.main, job.side,
        p.offsets[:-1][job.program], p.offsets[1:][job.program], bound_begin, p.bound_offsets[1:][job.program],
        job.weight_base, lanes.offsets, lanes.event, lanes.lane, unit_begin, step_offsets,
        job.scale, slow[0], slow[1], slow[2], remaining, arrival, last, job.chained, clock, cursor,
        bound_begin.copy(), step_end, filled(job.num_ranks + 1, 0), filled(job.num_ranks, -1), complete,
        filled(len(job) + 1, -1), filled(total, -1), filled(total, 0, np.uint8), filled(total, 0), filled(total, -1),
        filled(total, 0), filled(total, 0), np.zeros(2 * total), filled(2 * total, 0), alone,
        np.ones(total), np.zeros(total), filled(total, 0), finish, filled(total, -1), filled(num_lanes, -1),
        filled(num_lanes, 0), links.per_byte.reshape(-1), links.lane_kind, _NUM_OPS, links.first_link,
        links.first_network, links.links, filled(max(len(links.first_user) - 1, 1), 0), links.first_user, links.users,
        lanes.num_collectives, num_units=len(job),
    )  # fmt: skip
    longer = np.where(finish > _LOW, finish - arrival - alone, 0)[:-1]
    return SharedRun(num_finished=num_finished, unit_begin=unit_begin, complete_ns=complete, longer_ns=longer)
