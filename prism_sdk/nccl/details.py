"""Everything that NCCL said beside its kernels as rows of events: channels, calls, launches, groups, proxy and network.

It makes rows and tracks for `attach`; it writes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.nccl.format import EventType
from prism_sdk.nccl.join import JoinedRank
from prism_sdk.nccl.tasks import fit_of
from prismtrace import ABSENT, EventKind, TrackKind

__all__ = ["detail_rows"]

_HOST_TYPES = tuple(kind for kind in EventType if kind not in (EventType.KERNEL_CH, EventType.KERNEL_PHASE))
_MAX_DEPTH = 8


def detail_rows(one: JoinedRank, *, first_track: int) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Columns of tracks (one a host thread, one a kernel channel of a communicator) and of events on them."""
    file = one.records.file
    events = file.events
    host = events.rows_of(*_HOST_TYPES)
    device = events.rows_of(EventType.KERNEL_CH, EventType.KERNEL_PHASE)
    start, end = events.start_ns.copy(), events.stop_ns.copy()
    for comm in np.unique(events.comm[device]).tolist():
        mine = device[events.comm[device] == comm]
        fit = fit_of(one.records.clocks, file, comm)
        start[mine] = fit.apply(events.gpu_start_ns[mine]) if fit else ABSENT
        end[mine] = fit.apply(events.gpu_stop_ns[mine]) if fit else ABSENT
    rows = np.concatenate([host, device])
    rows = rows[(start[rows] != ABSENT) & (end[rows] != ABSENT) & (end[rows] >= start[rows])]
    is_host = np.isin(events.type[rows], _HOST_TYPES)
    lanes = [
        (0, int(events.thread_id[row]), 0) if mine else (1, int(events.comm[row]), int(events.a[row]))
        for row, mine in zip(rows.tolist(), is_host.tolist(), strict=True)
    ]
    numbers = {lane: place for place, lane in enumerate(sorted(set(lanes)))}
    tracks: dict[str, list[Any]] = {
        "name": [], "process": [], "kind": [], "process_id": [], "thread_id": [], "device": [],
    }  # fmt: skip
    for kind, number, channel in numbers:
        comm_of = file.comms.get(number) if kind else None
        known = comm_of is not None and comm_of.device is not None
        tracks["name"].append(
            f"NCCL {comm_of.hash:016x} channel {channel}" if comm_of else f"NCCL calls of thread {number}"
        )
        tracks["process"].append(f"rank {one.rank}")
        tracks["kind"].append(int(TrackKind.DEVICE_STREAM if kind else TrackKind.HOST))
        tracks["process_id"].append(file.pid)
        tracks["thread_id"].append(ABSENT if kind else number)
        tracks["device"].append(comm_of.device if comm_of and known else -(2**31))
    is_channel = np.isin(events.type[rows], (EventType.KERNEL_CH, EventType.KERNEL_PHASE, EventType.PROXY_OP))
    return tracks, {
        "name": [EventType(kind).name.lower() for kind in events.type[rows].tolist()],
        "category": ["nccl"] * len(rows),
        "kind": np.full(len(rows), int(EventKind.SPAN)),
        "track": np.array([first_track + numbers[lane] for lane in lanes], np.int64),
        "start_ns": start[rows] + one.shift_ns,
        "end_ns": end[rows] + one.shift_ns,
        "unit": _units(one, rows),
        "nccl.channel": np.where(is_channel, events.a[rows].astype(np.int64), ABSENT),
        "nccl.num_bytes": np.full(len(rows), ABSENT, np.int64),
        "nccl.peer": _peers(one, rows),
    }


def _units(one: JoinedRank, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The unit of the nearest task among an event and its ancestors; a call has that of the task it asked for."""
    events, tasks = one.records.file.events, one.records.tasks
    unit = np.full(len(events) + 1, -1, np.int64)  # the last stands for no parent
    parents = events.parent[tasks.event]
    unit[parents[parents >= 0]] = one.unit[parents >= 0]
    unit[tasks.event] = one.unit
    found, at = np.full(len(rows), -1, np.int64), rows.copy()
    for _ in range(_MAX_DEPTH):
        found = np.where(found < 0, unit[at], found)
        at = np.where(at >= 0, np.append(events.parent, -1)[at], -1)
    return np.where(found >= 0, found, ABSENT)


def _peers(one: JoinedRank, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    events = one.records.file.events
    peer = (events.values[rows, 1] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return np.where(events.type[rows] == EventType.PROXY_OP, peer, ABSENT)
