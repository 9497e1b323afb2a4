"""Finds the unit of a trace that each task of NCCL belongs to, and the process group of each communicator.

It compares times and orders; writing the result is the work of `attach`.

A unit is posted, then NCCL is called, then the next unit is posted: so a task belongs to the last unit before its
call that could have asked for it. Up to version 4 of the interface calls are not recorded and a task appears when its
group is launched: then the tasks of a launch are given to the units before it, in order. The same is done for whole
ranks whose clock is not that of the trace. Where a trace has the times of devices, a unit is posted when the host
came to it (`prism.issued_ns`), which may be long before the device did.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism_sdk.errors import UsageError
from prism_sdk.nccl.format import ELEMENT_BYTES
from prism_sdk.nccl.job import NcclJob, RankRecords
from prismtrace import ABSENT, DType, Op, TraceReader, UnitKind, UnitTable

__all__ = ["Joined", "JoinedRank", "join", "unit_bytes"]

_MESSAGES = frozenset({Op.SEND, Op.RECV, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER})
_MAY_BE: Mapping[str, frozenset[Op]] = {
    "AllReduce": frozenset({Op.ALL_REDUCE, Op.BARRIER}),
    "Broadcast": frozenset({Op.BROADCAST, Op.ALL_GATHER, Op.SCATTER}),  # gathers of unequal parts are broadcasts
    "Reduce": frozenset({Op.REDUCE, Op.REDUCE_SCATTER}),
    "AllGather": frozenset({Op.ALL_GATHER, Op.GATHER}),
    "ReduceScatter": frozenset({Op.REDUCE_SCATTER}),
    "AlltoAll": frozenset({Op.ALL_TO_ALL}),
    "Gather": frozenset({Op.GATHER}),
    "Scatter": frozenset({Op.SCATTER}),
    "Send": frozenset({Op.SEND, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER}),
    "Recv": frozenset({Op.RECV, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER}),
    "SendRecv": _MESSAGES,
}
"""What NCCL runs -> the operations of PyTorch that ask for it."""

_TAKES_MANY = frozenset({Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER})
_DTYPE_BYTES = {
    DType.FLOAT32: 4, DType.FLOAT64: 8, DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1, DType.INT64: 8, DType.INT32: 4, DType.INT16: 2, DType.INT8: 1, DType.UINT8: 1,
    DType.BOOL: 1, DType.COMPLEX64: 8, DType.COMPLEX128: 16,
}  # fmt: skip
_COMMUNICATION = (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV)
_ISSUED = "prism.issued_ns"
_COLUMNS = (
    "kind", "start_ns", "end_ns", "group_id", "seq", "op", "dtype", "num_elements_in", "num_elements_out", "peer",
    _ISSUED,
)  # fmt: skip


@dataclass(frozen=True)
class JoinedRank:
    """`unit[i]` is the unit_index of task i of this rank, -1 for none; `shift_ns` brings NCCL's host times to the
    trace's clock. `num_unequal` tasks move another number of bytes than their unit says."""

    records: RankRecords
    rank: int
    unit: NDArray[np.int64]
    by: str
    shift_ns: int
    num_unequal: int
    num_units: int
    """Communication units of groups that NCCL serves."""
    num_units_joined: int


@dataclass(frozen=True)
class Joined:
    """All ranks, and communicator hash -> group id."""

    ranks: tuple[JoinedRank, ...]
    groups: Mapping[int, int]


def join(reader: TraceReader, job: NcclJob) -> Joined:
    """Bring the tasks of a job to the units of its trace. Ranks that the trace does not have are left out.

    Raises:
        UsageError: two files are of one rank.
    """
    twice = [rank for rank, num in Counter(one.rank for one in job.ranks if one.rank is not None).items() if num > 1]
    if twice:
        names = [one.file.path for one in job.ranks if one.rank == twice[0]]
        raise UsageError(
            f"rank {twice[0]} has {len(names)} files: {', '.join(names[:3])}",
            hint="they are of several runs, or of a restarted rank: give those of one run",
        )
    joined = []
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for records in job.ranks:
        if records.rank is None or records.rank not in reader.ranks:
            continue
        units = reader.units(records.rank, columns=_COLUMNS)
        members = {group_id: group.ranks for group_id, group in reader.groups.items()}
        one = _join_rank(records, records.rank, _Lane(units, records, members), units, _candidates(reader, records))
        joined.append(one)
        for comm, file_comm in records.file.comms.items():
            mine = one.unit[(records.tasks.comm == comm) & (one.unit >= 0)]
            votes[file_comm.hash].update(np.asarray(units.group_id)[mine].tolist())
    groups = {comm: counted.most_common(1)[0][0] for comm, counted in votes.items() if counted}
    return Joined(tuple(joined), groups)


def _candidates(reader: TraceReader, records: RankRecords) -> dict[int, frozenset[int]]:
    """Communicator number -> the groups it may serve: same members as far as known, or a pair inside of a group."""
    found = {}
    for number, comm in records.file.comms.items():
        fits = set()
        for group in reader.groups.values():
            if records.rank not in group.ranks:
                continue
            place = group.ranks.index(records.rank)
            same = comm.num_ranks is None or comm.num_ranks == len(group.ranks)
            if (same and (comm.rank is None or comm.rank == place)) or (comm.num_ranks == 2 and len(group.ranks) > 2):
                fits.add(group.group_id)
        found[number] = frozenset(fits)
    return found


class _Lane:
    """The communication units of one rank, in the order in which they were posted."""

    def __init__(self, units: UnitTable, records: RankRecords, members: Mapping[int, tuple[int, ...]]) -> None:
        self._records, self._members = records, members
        posted_ns = np.asarray(units[_ISSUED] if _ISSUED in units.column_names else units.start_ns)
        self.rows = np.flatnonzero(np.isin(units.kind, _COMMUNICATION) & (posted_ns != ABSENT))
        self.rows = self.rows[np.argsort(posted_ns[self.rows], kind="stable")]
        self.start_ns = posted_ns[self.rows]
        ends = units.end_ns[units.end_ns != ABSENT]
        self.last_ns = max(ends.max(initial=ABSENT), self.start_ns[-1] if len(self.start_ns) else ABSENT)
        self.group = np.asarray(units.group_id)[self.rows].tolist()
        self.peer = np.asarray(units.peer)[self.rows].tolist()
        self.op = [Op(op) if op in Op._value2member_map_ else Op.UNSPECIFIED for op in units.op[self.rows].tolist()]

    def accepts(self, place: int, task: int, groups: frozenset[int]) -> bool:
        """Whether a unit may have asked for a task: group, operation, and the other side of a message."""
        tasks, group = self._records.tasks, self.group[place]
        if group not in groups or self.op[place] not in _MAY_BE.get(tasks.func[task] or "", frozenset()):
            return False
        comm, members = self._records.file.comms[int(tasks.comm[task])], self._members[group]
        if self.op[place] in (Op.SEND, Op.RECV) and comm.num_ranks == len(members) and self.peer[place] >= 0:
            peer = int(tasks.peer[task])
            return 0 <= peer < len(members) and members[peer] == int(self.peer[place])
        return True


def _join_rank(
    records: RankRecords, rank: int, lane: _Lane, units: UnitTable, candidates: Mapping[int, frozenset[int]]
) -> JoinedRank:
    tasks = records.tasks
    place = _by_time(records, lane, candidates)
    by, shift = "time", 0
    if len(tasks) and np.count_nonzero(place >= 0) * 2 < min(len(tasks), len(lane.rows)):
        in_order = _by_order(records, lane, candidates, np.full(len(tasks), -1, np.int64), np.arange(len(tasks)))
        if np.count_nonzero(in_order >= 0) > np.count_nonzero(place >= 0):
            place, by = in_order, "order"
            known = np.flatnonzero(place >= 0)
            shift = int(np.median(lane.start_ns[place[known]] - tasks.called_ns[known]))
    unit = np.where(place >= 0, lane.rows[place] if len(lane.rows) else -1, -1)
    served = set().union(*candidates.values()) if candidates else set()
    num_units = sum(group in served for group in lane.group)
    return JoinedRank(
        records, rank, unit, by, shift, _num_unequal(records, units, unit), num_units,
        len(np.unique(unit[unit >= 0])),
    )  # fmt: skip


def _by_time(records: RankRecords, lane: _Lane, candidates: Mapping[int, frozenset[int]]) -> NDArray[np.int64]:
    tasks = records.tasks
    place = np.full(len(tasks), -1, np.int64)
    if not len(lane.rows):
        return place
    before = np.searchsorted(lane.start_ns, tasks.called_ns, side="right") - 1
    before[tasks.called_ns > lane.last_ns] = -1  # the trace ends before, or has another clock
    # without calls, the tasks of one launch appear together, after all their units
    late = ~tasks.has_call & (tasks.num_in_group > 1)
    for task in np.flatnonzero(~late & (before >= 0)).tolist():
        groups = candidates[int(tasks.comm[task])]
        for back in range(int(before[task]), max(int(before[task]) - 4, -1), -1):  # threads may post in between
            if lane.accepts(back, task, groups):
                place[task] = back
                break
    if late.any():
        place = _by_order(records, lane, candidates, place, np.flatnonzero(late), before=before)
    return place


def _by_order(
    records: RankRecords, lane: _Lane, candidates: Mapping[int, frozenset[int]], place: NDArray[np.int64],
    wanted: NDArray[np.int64], *, before: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:  # fmt: skip
    """Give each launch (or call) the next units that could have asked for it; for `before`, none after that one."""
    tasks = records.tasks
    place, used = place.copy(), np.zeros(len(lane.rows), np.bool_)
    used[place[place >= 0]] = True
    next_of: dict[tuple[int, str | None, int], int] = defaultdict(int)  # NCCL sorts messages by peer
    launches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for task in wanted.tolist():
        outer = tasks.call[task] if tasks.call[task] >= 0 else tasks.group[task]
        launches[int(outer), -1 if outer >= 0 else task].append(task)
    for members in launches.values():
        shared: int | None = None
        for task in members:
            groups = candidates[int(tasks.comm[task])]
            if shared is not None and lane.accepts(shared, task, groups):
                place[task] = shared
                continue
            key = (int(tasks.comm[task]), tasks.func[task], int(tasks.peer[task]))
            end = len(lane.rows) if before is None else int(before[task]) + 1
            at = next_of[key]
            while at < end and (used[at] or not lane.accepts(at, task, groups)):
                at += 1
            next_of[key] = at
            if at < end:
                place[task] = at
                used[at] = True
                shared = at if lane.op[at] in _TAKES_MANY else None
    return place


def unit_bytes(units: UnitTable) -> NDArray[np.int64]:
    """Bytes that one call of NCCL is given for each unit (what it takes, of a receive); `ABSENT` where unknown."""
    sizes = np.zeros(256, np.int64)
    for dtype, size in _DTYPE_BYTES.items():
        sizes[int(dtype)] = size
    takes_output = np.isin(units.op, (Op.RECV, Op.REDUCE_SCATTER, Op.BROADCAST))
    count = np.where(takes_output, units.num_elements_out, units.num_elements_in)
    other = np.where(takes_output, units.num_elements_in, units.num_elements_out)
    count = np.where((units.op == Op.BROADCAST) & ((count == ABSENT) | (count == 0)), other, count)
    known = (count != ABSENT) & (sizes[units.dtype] > 0)
    return np.where(known, count * sizes[units.dtype], ABSENT)


def _num_unequal(records: RankRecords, units: UnitTable, unit: NDArray[np.int64]) -> int:
    """Tasks that are alone in their unit and move another number of bytes than it says."""
    tasks = records.tasks
    if not len(units):
        return 0
    alone = (unit >= 0) & (np.bincount(unit[unit >= 0], minlength=len(units))[np.maximum(unit, 0)] == 1)
    says = unit_bytes(units)[np.maximum(unit, 0)]
    sized = np.array([(word or "") in ELEMENT_BYTES for word in tasks.dtype], np.bool_)
    is_barrier = np.asarray(units.op)[np.maximum(unit, 0)] == Op.BARRIER
    # up to version 4 gathers and broadcasts count bytes, which comes to the same
    return int(np.count_nonzero(alone & sized & (says != ABSENT) & ~is_barrier & (tasks.num_bytes != says)))
