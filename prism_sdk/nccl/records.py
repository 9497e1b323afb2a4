"""From the records of one process to its events: starts joined with stops, names resolved, GPU stamps in place.

It knows one file; what several ranks' files say together is the business of `tasks`, `clock` and `join`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.nccl.blocks import RawFile, read_blocks
from prism_sdk.nccl.format import MORE, START, STATE, STATE_GPU_STOP, STOP, TASK, EventType, RecordKind
from prismtrace import ABSENT

__all__ = ["Communicator", "Events", "RecordFile", "TaskFields", "read_records"]

_HAS_TASK = (EventType.COLL, EventType.P2P, EventType.COLL_API, EventType.P2P_API, EventType.CE_COLL)


@dataclass(frozen=True)
class Communicator:
    """A communicator of one process. `num_ranks`, `rank` are None where the interface (up to version 3) hides them."""

    number: int
    hash: int
    name: str
    rank: int | None
    num_ranks: int | None
    num_nodes: int | None
    created_ns: int
    destroyed_ns: int | None
    device: int | None
    device_uuid: str | None
    interface_version: int


@dataclass(frozen=True)
class Events:
    """Events in the order of their starts; row i of every column is one event. Absent times are `ABSENT`.

    `parent` is a row, -1 for none or for one that is not in the file. `task` is a row of the file's `TaskFields`, -1
    for none. `gpu_start_ns`, `gpu_stop_ns` are the GPU's own clock (kernel channels and phases). `values` are the
    numbers that some types carry (spec/nccl-records.md).
    """

    type: NDArray[np.uint8]
    comm: NDArray[np.uint16]
    id: NDArray[np.uint64]
    parent: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    stop_ns: NDArray[np.int64]
    gpu_start_ns: NDArray[np.int64]
    gpu_stop_ns: NDArray[np.int64]
    thread_id: NDArray[np.int32]
    a: NDArray[np.uint8]
    b: NDArray[np.uint8]
    c: NDArray[np.uint16]
    task: NDArray[np.int64]
    values: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.type)

    def rows_of(self, *types: EventType) -> NDArray[np.int64]:
        """The rows of some types."""
        return np.flatnonzero(np.isin(self.type, [int(kind) for kind in types]))


@dataclass(frozen=True)
class TaskFields:
    """What NCCL says of collectives, messages and the calls of them; row i belongs to the event `event[i]`.

    `func`, `dtype`, `algo`, `proto` and `variant` are codes, `RecordFile.text` has the words. `group` is the row of
    the launch that the task went in, -1 for none.
    """

    event: NDArray[np.int64]
    fields: NDArray[Any]
    group: NDArray[np.int64]
    user_tag: NDArray[np.uint64]
    stream: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.event)


@dataclass(frozen=True)
class RecordFile:
    """Everything that one process recorded, and what is missing from it."""

    path: str
    pid: int
    rank: int | None
    local_rank: int | None
    world_size: int | None
    host: str
    boot_id: str
    event_mask: int
    sample_every: int
    comms: Mapping[int, Communicator]
    events: Events
    tasks: TaskFields
    texts: Mapping[int, str]
    monotonic_ns: NDArray[np.int64]
    realtime_ns: NDArray[np.int64]
    is_complete: bool
    lost_bytes: int
    first_damage: int | None
    num_lost_events: int
    """Starts that found no room, or no ring."""
    num_lost_stops: int
    num_sampled_out: int
    num_orphans: int
    """Events left out because their parent was lost or left out."""
    num_missing_stops: int
    num_extra_stops: int
    """Second stops of one event, and stops of events that are not in the file."""

    def text(self, code: int) -> str | None:
        """The word behind a code; None for 0 and for a code whose word was lost."""
        return self.texts.get(int(code))


def read_records(path: str | os.PathLike[str]) -> RecordFile:
    """Read a record file; one that was cut off is read up to there.

    Raises:
        UnreadableError: it is not a record file, or cannot be opened.
    """
    raw = read_blocks(path)
    words = raw.words
    kinds = (words[:, 0] & np.uint64(0xFF)).astype(np.uint8)
    place = np.flatnonzero(kinds == RecordKind.START)
    place = place[np.argsort(words[place].view(START)["time_ns"].ravel(), kind="stable")]
    starts = words[place].view(START).ravel()
    rows_of = _Rows(starts["id"])
    stop_ns, num_extra = _stops(words[kinds == RecordKind.STOP].view(STOP).ravel(), rows_of, len(starts))
    follows = np.append(kinds, 0)[place + 1]
    has_task = np.isin(starts["type"], _HAS_TASK) & (follows == RecordKind.TASK)
    values = _values(words, kinds, place, after=1 + has_task)
    is_gpu = np.isin(starts["type"], (EventType.KERNEL_CH, EventType.KERNEL_PHASE))
    gpu_start = np.where(is_gpu & (values[:, 0] > 0), values[:, 0].astype(np.int64), ABSENT)
    task_of = np.full(len(starts), -1, np.int64)
    task_of[has_task] = np.arange(np.count_nonzero(has_task))
    parent = rows_of(starts["parent"])
    comm = starts["comm"].copy()
    for _ in range(3):  # a kernel channel may carry another communicator's context: its task's is right
        takes = np.isin(starts["type"], (EventType.KERNEL_CH, EventType.KERNEL_PHASE, EventType.PROXY_OP)) & (
            parent >= 0
        )
        comm[takes] = comm[parent[takes]]
    gpu_stop, told = _gpu_stops(words[kinds == RecordKind.STATE].view(STATE).ravel(), rows_of, len(starts))
    events = Events(
        type=starts["type"].copy(), comm=comm, id=starts["id"].copy(), parent=parent,
        start_ns=starts["time_ns"].copy(), stop_ns=np.where(stop_ns == ABSENT, told, stop_ns),
        gpu_start_ns=gpu_start, gpu_stop_ns=gpu_stop,
        thread_id=raw.thread_id[place], a=starts["a"].copy(), b=starts["b"].copy(), c=starts["c"].copy(),
        task=task_of, values=values,
    )  # fmt: skip
    return _record_file(raw, events, _tasks(words, place, has_task, values, rows_of), num_extra)


class _Rows:
    """Ids of events -> their rows. Ids are dense: an ordinal in each ring, so this is a table and not a search."""

    def __init__(self, ids: NDArray[np.uint64]) -> None:
        ring, ordinal = self._parts(ids)
        self._most = np.zeros(256, np.int64)
        np.maximum.at(self._most, ring, ordinal)
        self._first = np.concatenate([[0], np.cumsum(self._most[:-1] + 1)])
        self._dense = int(self._most.sum()) < 8 * len(ids) + 2**20  # else something is wrong with them
        self._order = np.zeros(0, np.int64)
        self._table = np.zeros(0, np.int64)
        self._ids = ids
        if self._dense:
            self._table = np.full(int(self._first[-1] + self._most[-1] + 1), -1, np.int64)
            self._table[self._first[ring] + ordinal] = np.arange(len(ids))
        else:
            self._order = np.argsort(ids, kind="stable")

    @staticmethod
    def _parts(ids: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return (ids >> np.uint64(4) & np.uint64(0xFF)).astype(np.int64), (ids >> np.uint64(12)).astype(np.int64)

    def __call__(self, wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The row of each id, -1 where there is none."""
        if not len(self._ids):
            return np.full(len(wanted), -1, np.int64)
        if self._dense:
            ring, ordinal = self._parts(wanted)
            rows = self._table[np.where(ordinal <= self._most[ring], self._first[ring] + ordinal, 0)]
        else:
            place = np.searchsorted(self._ids, wanted, sorter=self._order).clip(0, len(self._ids) - 1)
            rows = self._order[place]
        return np.where((rows >= 0) & (self._ids[rows] == wanted), rows, -1)


def _stops(stops: NDArray[Any], rows_of: _Rows, num: int) -> tuple[NDArray[np.int64], int]:
    rows = rows_of(stops["id"])
    known = rows >= 0
    none = np.iinfo(np.int64).max
    result = np.full(num, none, np.int64)
    np.minimum.at(result, rows[known], stops["time_ns"][known])  # the first stop counts
    result[result == none] = ABSENT
    return result, int(len(stops) - np.count_nonzero(result != ABSENT))


def _gpu_stops(states: NDArray[Any], rows_of: _Rows, num: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ends on the GPU's clock, and when the host was told."""
    states = states[np.isin(states["state"], STATE_GPU_STOP)]
    rows = rows_of(states["id"])
    result, told = np.full(num, ABSENT, np.int64), np.full(num, ABSENT, np.int64)
    told[rows[rows >= 0]] = states["time_ns"][rows >= 0]
    timed = (rows >= 0) & (states["value"] > 0)
    result[rows[timed]] = states["value"][timed].astype(np.int64)
    return result, told


def _values(
    words: NDArray[np.uint64], kinds: NDArray[np.uint8], place: NDArray[np.int64], *, after: Any
) -> NDArray[np.uint64]:
    """The three numbers that follow a start; zeros where none do."""
    result = np.zeros((len(place), 3), np.uint64)
    where = place + after
    inside = np.flatnonzero(where < len(words))
    inside = inside[kinds[where[inside]] == RecordKind.MORE]
    result[inside] = words[where[inside]].view(MORE)["value"].reshape(-1, 3)
    return result


def _tasks(
    words: NDArray[np.uint64], place: NDArray[np.int64], has_task: NDArray[np.bool_], values: NDArray[np.uint64],
    rows_of: _Rows,
) -> TaskFields:  # fmt: skip
    rows = np.flatnonzero(has_task)
    fields = words[place[rows] + 1].view(TASK).ravel() if len(rows) else np.zeros(0, TASK)
    return TaskFields(rows, fields, rows_of(values[rows, 0]), values[rows, 1], values[rows, 2])


def _record_file(raw: RawFile, events: Events, tasks: TaskFields, num_extra: int) -> RecordFile:
    header = raw.header
    totals = dict.fromkeys(("lost_starts", "lost_stops", "lost_states", "sampled_out", "orphans"), 0)
    last = {int(row["ring"]): row for row in raw.counters}  # totals: the last of each ring counts
    for row in last.values():
        for name in totals:
            totals[name] += int(row[name])
    no_ring = max((int(row["no_ring"]) for row in raw.counters), default=0)
    return RecordFile(
        path=raw.path, pid=int(header["pid"]), rank=_number(header["rank"]), local_rank=_number(header["local_rank"]),
        world_size=_number(header["world_size"]), host=_text(header["host"]), boot_id=_text(header["boot_id"]),
        event_mask=int(header["event_mask"]), sample_every=int(header["sample_every"]),
        comms=MappingProxyType({int(row["number"]): _communicator(row) for row in raw.comms}),
        events=events, tasks=tasks,
        texts=MappingProxyType({int(row["code"]): _text(row["text"]) for row in raw.strings}),
        monotonic_ns=np.append(raw.clocks["monotonic_ns"], header["monotonic_ns"]).astype(np.int64),
        realtime_ns=np.append(raw.clocks["realtime_ns"], header["realtime_ns"]).astype(np.int64),
        is_complete=raw.is_complete, lost_bytes=raw.lost_bytes, first_damage=raw.first_damage,
        num_lost_events=totals["lost_starts"] + no_ring, num_lost_stops=totals["lost_stops"] + totals["lost_states"],
        num_sampled_out=totals["sampled_out"], num_orphans=totals["orphans"],
        num_missing_stops=int(np.count_nonzero(events.stop_ns == ABSENT)), num_extra_stops=num_extra,
    )  # fmt: skip


def _communicator(row: Any) -> Communicator:
    uuid = row["device_uuid"].tobytes()
    return Communicator(
        number=int(row["number"]), hash=int(row["hash"]), name=_text(row["name"]), rank=_number(row["rank"]),
        num_ranks=int(row["num_ranks"]) or None, num_nodes=int(row["num_nodes"]) or None,
        created_ns=int(row["created_ns"]),
        destroyed_ns=None if row["destroyed_ns"] == ABSENT else int(row["destroyed_ns"]),
        device=_number(row["device"]), device_uuid=uuid.hex() if any(uuid) else None,
        interface_version=int(row["interface_version"]),
    )  # fmt: skip


def _number(value: Any) -> int | None:
    return int(value) if value >= 0 else None


def _text(value: Any) -> str:
    return bytes(value).split(b"\0")[0].decode("utf-8", "replace")
