"""Adds up who exchanges how many bytes with whom, in a square of at most 64 x 64 fields. It draws nothing.

A message counts from its sender to its receiver. A collective counts as if each member exchanged an equal part of what
it contributes with every other member: the traffic that the operation means, whatever algorithm carried it. In an
all_reduce that is its size times 2 (n - 1) / n, in others (n - 1) / n, and in rooted ones only to or from the root.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis import Job, bus_factor
from prismtrace import ABSENT, DType, Op, UnitKind

__all__ = ["TrafficMatrix", "traffic_matrix"]


@dataclass(frozen=True, kw_only=True)
class TrafficMatrix:
    """Bytes from ranks (down) to ranks (across); field i has ranks ``bounds[i] .. bounds[i + 1] - 1``."""

    bounds: tuple[int, ...]
    values_bytes: npt.NDArray[np.float64] = field(repr=False)
    num_unknown: int

    @property
    def total_bytes(self) -> float:
        """All bytes."""
        return float(self.values_bytes.sum())


def traffic_matrix(job: Job, *, max_fields: int = 64) -> TrafficMatrix:
    """The traffic of all loaded steps. Operations whose size or group is not known are counted in ``num_unknown``."""
    graph, c = job.graph, job.graph.columns
    world = max(graph.world_size, max(graph.ranks) + 1)
    num = min(world, max_fields)
    bounds = np.linspace(0, world, num + 1).astype(np.int64)
    field_of = np.searchsorted(bounds, np.arange(world), side="right") - 1
    values = np.zeros((num, num))
    sizes = np.array([DType(code).itemsize_bytes if code in DType._value2member_map_ else 0 for code in range(256)])
    item = sizes[c["dtype"]]
    unknown = 0
    sends = np.flatnonzero(c["kind"] == UnitKind.SEND)
    known = (c["num_elements_in"][sends] != ABSENT) & (c["peer"][sends] >= 0) & (c["peer"][sends] < world)
    known &= item[sends] > 0
    unknown += int((~known).sum())
    sends = sends[known]
    np.add.at(values, (field_of[graph.rank_of_row[sends]], field_of[c["peer"][sends]]),
              c["num_elements_in"][sends].astype(np.float64) * item[sends])  # fmt: skip
    rows = np.flatnonzero((c["kind"] == UnitKind.COLLECTIVE) & (c["op"] != Op.BARRIER))
    size = np.maximum(np.where(c["num_elements_in"][rows] == ABSENT, 0, c["num_elements_in"][rows]),
                      np.where(c["num_elements_out"][rows] == ABSENT, 0, c["num_elements_out"][rows]))  # fmt: skip
    bytes_of = size.astype(np.float64) * item[rows]
    unknown += int((bytes_of == 0).sum())
    keys, place = np.unique(np.stack([c["group_id"][rows], c["op"][rows].astype(np.uint64),
                                      (c["peer"][rows].astype(np.int64) + (1 << 31)).astype(np.uint64)], axis=1),
                            axis=0, return_inverse=True)  # fmt: skip
    for index, (group_id, op_code, peer) in enumerate(keys.tolist()):
        group = graph.groups.get(int(group_id))
        mine = place.reshape(-1) == index
        if group is None or group.size < 2 or op_code not in Op._value2member_map_:
            unknown += int(mine.sum())
            continue
        sent = np.zeros(world)
        np.add.at(sent, graph.rank_of_row[rows[mine]], bytes_of[mine] * bus_factor(Op(op_code), group.size))
        _spread(values, field_of, np.array(group.ranks), sent, Op(op_code), int(peer) - (1 << 31))
    return TrafficMatrix(bounds=tuple(bounds.tolist()), values_bytes=values, num_unknown=unknown)


def _spread(
    values: npt.NDArray[np.float64], field_of: npt.NDArray[np.int64], members: npt.NDArray[np.int64],
    sent: npt.NDArray[np.float64], op: Op, root: int,
) -> None:  # fmt: skip
    """Add what members send to the fields; everybody to everybody else, or to and from the root."""
    num = len(values)
    of_member = sent[members]
    by_field = np.bincount(field_of[members], weights=of_member, minlength=num)
    heads = np.bincount(field_of[members], minlength=num).astype(np.float64)
    if 0 <= root < len(field_of) and op in (Op.BROADCAST, Op.SCATTER, Op.REDUCE, Op.GATHER):
        others = np.bincount(field_of[members], weights=of_member * (members != root), minlength=num)
        if op in (Op.BROADCAST, Op.SCATTER):
            values[field_of[root], :] += others
        else:
            values[:, field_of[root]] += others
        return
    # a member sends 1 / (n - 1) of its part to each other member: in its own field there is one less
    share = by_field / (len(members) - 1)
    values += np.outer(share, heads)
    values[np.arange(num), np.arange(num)] -= share
