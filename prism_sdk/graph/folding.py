"""Makes the graph that a sandbox sees of a large job: of all virtual ranks that behave alike only one is kept.

It contracts nothing (``prism_sdk.graph.contract``), loads no job (``prism_sdk.simulate.loading`` does) and refuses
nothing: where ranks do not fold, it says None.

Two virtual ranks are alike when they have the same program and the same weights, and meet alike ranks at the same
places of their programs. That is the coarsest partition of ranks that refining gives: it begins with programs, weights
and each sandbox rank by itself, and splits ranks whose lanes differ in which classes they hold, until nothing splits.

Members of a class have the same clock at every row, as functions of what the sandbox does: a clock is a maximum over
sums of weights and clocks before it, those are equal by induction, and a maximum does not change when equal members are
left out. So the boundary plan of the folded graph gives what that of the whole graph gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.job import COLUMN_TYPES, JobGraph, read_columns
from prismtrace import ABSENT32, GraphKind, ProcessGroup, TraceReader, UnitKind

__all__ = ["FoldedJob", "RoleJob", "fold_alike", "folded_graph", "mixed", "refined_classes"]

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
#: What a graph for contraction needs no more: sizes are those of groups that have lost members.
_LEFT_OUT = frozenset({"num_elements_in", "num_elements_out"})


class RolePrograms(Protocol):
    """The rows of all programs one after the other."""

    @property
    def kind(self) -> npt.NDArray[np.uint8]: ...
    @property
    def lane_of(self) -> npt.NDArray[np.int32]: ...
    def rows(self, program: int) -> slice:
        """The rows of a program."""
        ...


class RoleLanes(Protocol):
    """How ranks meet: by rank and lane, and by lane of the job."""

    @property
    def offsets(self) -> Int64Array: ...
    @property
    def lane(self) -> Int64Array: ...
    @property
    def group_id(self) -> UInt64Array: ...
    @property
    def source(self) -> Int64Array: ...
    @property
    def destination(self) -> Int64Array: ...
    @property
    def num_events(self) -> Int64Array: ...
    @property
    def first_seq(self) -> Int64Array: ...


class RoleJob(Protocol):
    """A job with each program and each set of weights held once, as ``prism_sdk.simulate.job`` describes it."""

    @property
    def source(self) -> str: ...
    @property
    def graph_kind(self) -> GraphKind: ...
    @property
    def world_size(self) -> int: ...
    @property
    def groups(self) -> Mapping[int, ProcessGroup]: ...
    @property
    def ranks(self) -> Int64Array: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def programs(self) -> RolePrograms: ...
    @property
    def lanes(self) -> RoleLanes: ...
    @property
    def program(self) -> Int64Array: ...
    @property
    def weight_base(self) -> Int64Array: ...
    @property
    def origin_ns(self) -> Int64Array: ...
    def position(self, rank: int) -> int:
        """The position of a rank, -1 where the job does not have it."""
        ...


@dataclass(frozen=True)
class FoldedJob:
    """A folded graph. `group_sizes`: how many members its groups have in the whole job."""

    graph: JobGraph
    group_sizes: dict[int, int]


def folded_graph(reader: TraceReader, job: RoleJob, *, sandbox_ranks: Collection[int]) -> JobGraph | None:
    """The folded graph, with the real ranks, groups and numbers of all that the sandbox takes part in.

    Args:
        reader: the trace; the units of the ranks that are kept are read from it.
        job: all ranks of that trace.
        sandbox_ranks: ranks of the job that run for real.

    Returns:
        None where folding does not help: the graph is not calibrated, or hardly any ranks are alike.
    """
    if job.graph_kind is not GraphKind.CALIBRATED:
        return None
    found = _folded(reader, job, frozenset(sandbox_ranks), weights=job.weight_base)
    return None if found is None else found.graph


def fold_alike(
    reader: TraceReader, job: RoleJob, *, alone: Collection[int], stands_for: Sequence[int]
) -> FoldedJob | None:
    """The folded graph of a job whose ranks take as long as the rank that stands for them, whatever the trace says.

    Ranks that are `alone` are kept with their groups and numbers; element counts are kept as well.

    Args:
        reader: the trace; the units of the ranks that are kept are read from it.
        job: all ranks of that trace, which needs no times.
        alone: ranks that nobody stands for.
        stands_for: by rank of the world.

    Returns:
        None where some rank would meet itself, or hardly any are alike.

    Raises:
        GraphError: the ranks do not fit together.
    """
    weights = np.asarray(stands_for, np.int64)[job.ranks]
    return _folded(reader, job, frozenset(alone), weights=weights, left_out=frozenset())


def _folded(
    reader: TraceReader, job: RoleJob, alone: frozenset[int], *, weights: Int64Array,
    left_out: frozenset[str] = _LEFT_OUT,
) -> FoldedJob | None:  # fmt: skip
    color, lane_color = _classes(job, alone, weights)
    kept = np.unique(color, return_index=True)[1]
    if 2 * len(kept) > job.num_ranks:
        return None
    return _graph(reader, job, color, lane_color, kept, alone, left_out)


def mixed(values: npt.NDArray[Any]) -> UInt64Array:
    """Spreads 64-bit numbers (the finalizer of SplitMix64), so that sums of them tell sets apart."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _classes(job: RoleJob, sandbox: frozenset[int], weights: Int64Array) -> tuple[Int64Array, UInt64Array]:
    """The class of each rank position, and a number of each lane that is equal for lanes of alike members."""
    lanes = job.lanes
    alone = np.where(np.isin(job.ranks, sorted(sandbox)), job.ranks + 1, 0)
    keys = np.stack([job.program, weights, job.origin_ns, alone], axis=1)
    fixed = mixed(lanes.num_events) ^ mixed(mixed(lanes.first_seq) + (lanes.source >= 0).astype(np.uint64))
    return refined_classes(keys, offsets=lanes.offsets, lane=lanes.lane, fixed=fixed, is_counted=False)


def refined_classes(
    keys: Int64Array, *, offsets: Int64Array, lane: Int64Array, fixed: UInt64Array, is_counted: bool
) -> tuple[Int64Array, UInt64Array]:
    """The coarsest partition of ranks whose members have equal keys and hold lanes of equal classes, place by place.

    Args:
        keys: (R, K) what members of a class have in common.
        offsets: (R + 1,) rank p holds the lanes ``lane[offsets[p]:offsets[p + 1]]``, in the order of its program.
        lane: numbers of lanes, each from 0 to L - 1.
        fixed: (L,) what lanes of one class have in common.
        is_counted: whether it matters how many alike members a lane has.

    Returns:
        The class of each rank, from 0, and a number of each lane that is equal for lanes of alike members.
    """
    num_ranks = len(offsets) - 1
    position = np.repeat(np.arange(num_ranks), np.diff(offsets))
    local = np.arange(len(position)) - offsets[position]
    color = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    while True:
        member = mixed(mixed(color[position]) + local.astype(np.uint64))
        sums = np.zeros(len(fixed), dtype=np.uint64)
        if is_counted:
            np.add.at(sums, lane, member)
        else:
            order = np.lexsort((member, lane))
            sorted_lane, sorted_member = lane[order], member[order]
            is_new = np.ones(len(order), dtype=np.bool_)
            is_new[1:] = (sorted_lane[1:] != sorted_lane[:-1]) | (sorted_member[1:] != sorted_member[:-1])
            np.add.at(sums, sorted_lane[is_new], sorted_member[is_new])
        lane_color = mixed(sums ^ fixed)
        seen = np.zeros(num_ranks, dtype=np.uint64)
        np.add.at(seen, position, mixed(lane_color[lane] + mixed(local)))
        pairs = np.stack([color.astype(np.uint64), seen], axis=1)
        finer = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
        if finer.max(initial=0) == color.max(initial=0):
            return color, lane_color
        color = finer


def _graph(
    reader: TraceReader, job: RoleJob, color: Int64Array, lane_color: UInt64Array, kept: Int64Array,
    sandbox: frozenset[int], left_out: frozenset[str],
) -> FoldedJob | None:  # fmt: skip
    lanes, p = job.lanes, job.programs
    stands_for = job.ranks[kept][color]  # by position: the rank that is kept of its class
    touched = np.zeros(len(lane_color), dtype=np.bool_)
    for rank in sandbox:
        at = job.position(rank)
        touched[lanes.lane[lanes.offsets[at] : lanes.offsets[at + 1]]] = True
    groups: dict[int, ProcessGroup] = {}
    sizes: dict[int, int] = {}
    numbers: dict[int, int] = {}
    members: dict[int, set[int]] = {}
    columns_by_rank: dict[int, dict[str, npt.NDArray[Any]]] = {}
    first_index = {}
    names = [name for name in COLUMN_TYPES if name not in left_out]

    def stand_in(rank: int) -> int:
        return int(stands_for[job.position(rank)])

    for at in kept.tolist():
        rank = int(job.ranks[at])
        mine = lanes.lane[lanes.offsets[at] : lanes.offsets[at + 1]]
        group_of, peer_of = np.zeros(len(mine), np.uint64), np.zeros(len(mine), np.int32)
        is_renamed = np.zeros(len(mine), np.bool_)
        kinds = p.kind[p.rows(int(job.program[at]))]
        lane_of = p.lane_of[p.rows(int(job.program[at]))]
        kind_of = np.zeros(len(mine), np.uint8)
        kind_of[lane_of[lane_of >= 0]] = kinds[lane_of >= 0]
        if len({(int(lane_color[lane]), int(kind)) for lane, kind in zip(mine, kind_of, strict=True)}) < len(mine):
            return None  # it would meet itself
        for i, lane in enumerate(mine.tolist()):
            group_id = int(lanes.group_id[lane])
            if touched[lane]:
                if group_id not in groups:
                    ranks = {stand_in(r) for r in job.groups[group_id].ranks if job.position(r) >= 0}
                    groups[group_id] = _with_ranks(job.groups[group_id], group_id, ranks)
            else:
                key = int(lane_color[lane])
                number = numbers.setdefault(key, _unused(job, len(numbers)))
                members.setdefault(number, set()).add(rank)
                groups[number] = _with_ranks(job.groups[group_id], number, members[number])
                group_id = number
            group_of[i] = group_id
            sizes[group_id] = len(job.groups[int(lanes.group_id[lane])].ranks)
            is_renamed[i] = not touched[lane]
            other = int(lanes.destination[lane] if kind_of[i] == UnitKind.SEND else lanes.source[lane])
            peer_of[i] = stand_in(other) if other >= 0 and job.position(other) >= 0 else other
            if kind_of[i] != UnitKind.COLLECTIVE and not touched[lane]:
                members[group_id].add(int(peer_of[i]))
                groups[group_id] = _with_ranks(groups[group_id], group_id, members[group_id])
        table = reader.units(rank, columns=names)
        columns = {name: np.array(values) for name, values in read_columns(table, names).items()}
        is_moved = lane_of >= 0
        is_message = is_moved & (kinds != UnitKind.COLLECTIVE)
        columns["group_id"] = columns["group_id"].astype(np.uint64)
        columns["group_id"][is_moved] = group_of[lane_of[is_moved]]
        columns["peer"][is_message] = peer_of[lane_of[is_message]]
        renamed = np.flatnonzero(is_moved & (kinds == UnitKind.COLLECTIVE))
        renamed = renamed[is_renamed[lane_of[renamed]]]
        columns["peer"][renamed] = ABSENT32  # members come from several groups, each with a root of its own
        columns_by_rank[rank] = columns
        first_index[rank] = table.first_index
    graph = JobGraph.from_columns(columns_by_rank, world_size=job.world_size, groups=groups, first_index=first_index,
                                  graph_kind=job.graph_kind, source=job.source)  # fmt: skip
    return FoldedJob(graph, sizes)


def _with_ranks(group: ProcessGroup, group_id: int, ranks: Collection[int]) -> ProcessGroup:
    return ProcessGroup(group_id, group.name, group.description, group.backend, tuple(sorted(ranks)))


def _unused(job: RoleJob, number: int) -> int:
    """A group id for a class of lanes that the trace does not have."""
    group_id = 2**62 + number
    while group_id in job.groups:
        group_id += 2**32
    return group_id
