"""Brings the tasks of several ranks together into operations (collectives, messages, all-to-alls), with their times.

It prints nothing and knows no trace.

The time of an operation is the shortest of its members' kernel times. A kernel waits for its peers, so kernel times of
early ranks contain waiting; the last rank to arrive waits for nobody. That needs no common clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism_sdk.nccl.format import ABSENT_SEQ
from prism_sdk.nccl.job import NcclJob, RankRecords
from prism_sdk.nccl.tasks import Tasks
from prismtrace import ABSENT

__all__ = ["Operation", "operations"]

_NAMES = {
    "AllReduce": "all_reduce", "Broadcast": "broadcast", "Reduce": "reduce", "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter", "AlltoAll": "all_to_all", "Gather": "gather", "Scatter": "scatter",
    "Send": "send_recv", "Recv": "send_recv", "SendRecv": "send_recv",
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One operation over its members.

    `num_bytes` is the size as nccl-tests counts it: what all_reduce, broadcast and reduce get, the whole of a gathered
    or scattered buffer, one message. `time_ns` is None without kernel times. `is_shared`: the launch held other
    operations too, and the time is that of all of them.
    """

    name: str
    comm: int
    seq: int | None
    num_ranks: int | None
    num_bytes: int
    dtype: str
    algo: str
    proto: str
    channels: int
    time_ns: int | None
    is_shared: bool
    num_members: int
    num_nodes: int
    """Hosts that its members' records are of."""
    members: tuple[tuple[int, tuple[int, ...]], ...]
    """(place of the rank in the job, its tasks)."""


def operations(job: NcclJob) -> Iterator[Operation]:
    """All operations of a job, those of one communicator in the order of their first task on the first rank."""
    found: dict[tuple[object, ...], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for place, records in enumerate(job.ranks):
        for key, tasks in _keys(records):
            found[key].append((place, tasks))
    for key, members in found.items():
        yield _operation(job, key, members)


def _keys(records: RankRecords) -> Iterator[tuple[tuple[object, ...], tuple[int, ...]]]:
    """A key that is equal on all members of an operation -> the tasks of it on this rank."""
    tasks, comms = records.tasks, records.file.comms
    launches: dict[tuple[int, int], list[int]] = defaultdict(list)
    num_lane: dict[tuple[object, ...], int] = defaultdict(int)
    for task in range(len(tasks)):
        comm = comms[int(tasks.comm[task])]
        if not tasks.is_message[task]:
            yield (comm.hash, tasks.func[task], int(tasks.seq[task])), (task,)
        elif tasks.group[task] >= 0:
            launches[int(tasks.comm[task]), int(tasks.group[task])].append(task)
        else:
            launches[int(tasks.comm[task]), -1 - task].append(task)
    for (number, _), members in launches.items():
        comm = comms[number]
        if comm.rank is not None and comm.num_ranks is not None and _is_all_to_all(tasks, members, comm.num_ranks):
            lane: tuple[object, ...] = (comm.hash, "AlltoAll")
            yield (*lane, num_lane[lane]), tuple(members)
            num_lane[lane] += 1
            continue
        for task in members:
            sides = (comm.rank, int(tasks.peer[task]))
            lane = (comm.hash, "message", *(sides if tasks.func[task] == "Send" else sides[::-1]))
            # a message to oneself has both sides on one rank
            side = (*lane, tasks.func[task])
            yield (*lane, num_lane[side]), (task,)
            num_lane[side] += 1


def _is_all_to_all(tasks: Tasks, members: list[int], num_ranks: int) -> bool:
    """Whether one launch sends to everybody (oneself perhaps not) and receives from everybody as much."""
    if num_ranks < 3 and len(members) < 4:
        return False  # of two ranks it cannot be told from a pair of messages
    for func in ("Send", "Recv"):
        mine = [task for task in members if tasks.func[task] == func]
        peers = {int(tasks.peer[task]) for task in mine}
        if len(mine) != len(peers) or len(peers) < num_ranks - 1:
            return False
    return True


def _operation(job: NcclJob, key: tuple[object, ...], members: list[tuple[int, tuple[int, ...]]]) -> Operation:
    place, own = members[0]
    records, first = job.ranks[place], own[0]
    tasks = records.tasks
    comm = records.file.comms[int(tasks.comm[first])]
    name = "all_to_all" if key[1] == "AlltoAll" else _NAMES.get(str(tasks.func[first]), str(tasks.func[first]))
    num_bytes = int(tasks.num_bytes[first])
    if name in ("all_gather", "reduce_scatter"):
        num_bytes *= comm.num_ranks or 1
    elif name == "all_to_all":
        sent = [int(tasks.num_bytes[task]) for task in own if tasks.func[task] != "Recv"]
        num_bytes = sum(sent) * (comm.num_ranks or 1) // max(len(sent), 1)
    times = [time for at, group in members if (time := _kernel_time(job.ranks[at].tasks, group)) is not None]
    seq = int(tasks.seq[first])
    return Operation(
        name=name, comm=comm.hash, seq=None if seq == ABSENT_SEQ else seq, num_ranks=comm.num_ranks,
        num_bytes=num_bytes, dtype=str(tasks.dtype[first] or "").removeprefix("nccl").lower(),
        algo=str(tasks.algo[first] or ""), proto=str(tasks.proto[first] or ""), channels=int(tasks.channels[first]),
        time_ns=min(times) if times else None,
        is_shared=any(_is_shared(job.ranks[at].tasks, group) for at, group in members),
        num_members=len({at for at, _ in members}), members=tuple(members),
        num_nodes=len({(job.ranks[at].file.host, job.ranks[at].file.boot_id) for at, _ in members}),
    )  # fmt: skip


def _kernel_time(tasks: Tasks, group: Iterable[int]) -> int | None:
    rows: NDArray[np.int64] = np.array(list(group))
    timed = rows[(tasks.kernel_start_ns[rows] != ABSENT) & (tasks.kernel_stop_ns[rows] != ABSENT)]
    if not len(timed):
        return None
    return int(tasks.kernel_stop_ns[timed].max() - tasks.kernel_start_ns[timed].min())


def _is_shared(tasks: Tasks, group: tuple[int, ...]) -> bool:
    """Whether other tasks ran in the same launch; a send and a receive with one peer are one exchange."""
    first = group[0]
    if tasks.group[first] < 0:
        return False
    num = int(tasks.num_in_group[first])
    return num > (2 if tasks.is_message[first] and len(group) == 1 else len(group))
