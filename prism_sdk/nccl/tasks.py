"""Collectives and messages of one process, each with the call that asked for it and the kernel that carried it out.

It resolves what NCCL's events leave in pieces; which unit of a trace a task belongs to is the business of `join`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.nccl.clock import ClockFit, fit_clock
from prism_sdk.nccl.format import ELEMENT_BYTES, FLAG_CAPTURED, EventType
from prism_sdk.nccl.records import RecordFile
from prismtrace import ABSENT

__all__ = ["Tasks", "collect_tasks", "device_of", "fit_clocks", "fit_of", "heard_stamps", "place_on_host_clock"]

_NO_ROW = -1


@dataclass(frozen=True)
class Tasks:
    """Tasks of one file in the order of their starts; row i of every column is one task.

    `count` and `dtype` are those of the caller, where the interface says them (version 5 on), else NCCL's own, in
    which gathers and broadcasts count bytes; `num_bytes` is what one rank passed in (or takes, of a receive).
    `called_ns` is the begin of the call, or of the task up to version 4. `launched_ns` is a time before which its
    kernel cannot have started. `gpu_*` are on the GPU's clock, `kernel_*` on the host's, once it is fitted. `group` is
    the event of its launch, `call` that of the outermost call (GroupApi), -1 for none. `num_in_group` is how many
    tasks one launch had: tasks of one launch share their kernel times.
    """

    event: NDArray[np.int64]
    is_message: NDArray[np.bool_]
    comm: NDArray[np.uint16]
    func: NDArray[Any]
    algo: NDArray[Any]
    proto: NDArray[Any]
    dtype: NDArray[Any]
    count: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    seq: NDArray[np.int64]
    peer: NDArray[np.int32]
    channels: NDArray[np.uint8]
    is_captured: NDArray[np.bool_]
    called_ns: NDArray[np.int64]
    has_call: NDArray[np.bool_]
    launched_ns: NDArray[np.int64]
    gpu_start_ns: NDArray[np.int64]
    gpu_stop_ns: NDArray[np.int64]
    kernel_start_ns: NDArray[np.int64]
    kernel_stop_ns: NDArray[np.int64]
    num_kernels: NDArray[np.int32]
    group: NDArray[np.int64]
    call: NDArray[np.int64]
    num_in_group: NDArray[np.int64]
    stream: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.event)


def collect_tasks(file: RecordFile) -> Tasks:
    """The tasks of a file; `kernel_start_ns` and `kernel_stop_ns` are absent until `place_on_host_clock`."""
    events, fields = file.events, file.tasks.fields
    rows = events.rows_of(EventType.COLL, EventType.P2P, EventType.CE_COLL)
    # without its fields, or its communicator (lost with a damaged block), nothing can be said of a task
    rows = rows[(events.task[rows] >= 0) & np.isin(events.comm[rows], list(file.comms))]
    mine = events.task[rows]
    own = fields[mine]
    api = events.parent[rows]
    is_api = (api >= 0) & np.isin(events.type[api], (EventType.COLL_API, EventType.P2P_API))
    is_api &= events.task[api] >= 0
    asked = fields[np.where(is_api, events.task[api], 0)] if len(fields) else fields
    count = np.where(is_api, asked["count"], own["count"]).astype(np.int64) if len(rows) else np.zeros(0, np.int64)
    dtype = np.where(is_api, asked["dtype"], own["dtype"]) if len(rows) else np.zeros(0, np.uint8)
    words = np.array([file.texts.get(code) for code in range(256)], dtype=object)
    sizes = np.array([ELEMENT_BYTES.get(word or "", 0) for word in words], np.int64)
    call = np.where(is_api, events.parent[api], _NO_ROW)
    group = file.tasks.group[mine]
    gpu_start, gpu_stop, num_kernels = _kernels(file, rows)
    ce = events.type[rows] == EventType.CE_COLL
    return Tasks(
        event=rows, is_message=events.type[rows] == EventType.P2P, comm=events.comm[rows], func=words[own["func"]],
        algo=words[own["algo"]], proto=words[own["proto"]], dtype=words[dtype], count=count,
        num_bytes=count * sizes[dtype], seq=own["seq"].astype(np.int64), peer=own["root"].astype(np.int32),
        channels=own["channels"].copy(),
        is_captured=((own["flags"] | np.where(is_api, asked["flags"], 0)) & FLAG_CAPTURED) != 0
        if len(rows) else np.zeros(0, np.bool_),
        called_ns=np.where(is_api, events.start_ns[api], events.start_ns[rows]), has_call=is_api,
        launched_ns=_launches(file, call, np.where(is_api, events.start_ns[api], ABSENT)),
        gpu_start_ns=gpu_start, gpu_stop_ns=gpu_stop, num_kernels=num_kernels,
        # a copy-engine collective has no kernel: its host times are all there is
        kernel_start_ns=np.where(ce, events.start_ns[rows], ABSENT),
        kernel_stop_ns=np.where(ce, events.stop_ns[rows], ABSENT),
        group=group, call=call, num_in_group=_sizes(group),
        stream=np.where(is_api, file.tasks.stream[np.where(is_api, events.task[api], 0)], 0).astype(np.uint64)
        if len(rows) else np.zeros(0, np.uint64),
    )  # fmt: skip


def _kernels(
    file: RecordFile, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """First start, last stop, and number of the kernel channels of each task."""
    events = file.events
    kernels = events.rows_of(EventType.KERNEL_CH)
    place = np.full(len(events) + 1, _NO_ROW, np.int64)
    place[rows] = np.arange(len(rows))
    owner = place[events.parent[kernels]]
    kernels, owner = kernels[owner >= 0], owner[owner >= 0]
    none = np.iinfo(np.int64).max
    first, last = np.full(len(rows), none), np.full(len(rows), ABSENT)
    num = np.zeros(len(rows), np.int32)
    started, stopped = events.gpu_start_ns[kernels], events.gpu_stop_ns[kernels]
    np.minimum.at(first, owner[started != ABSENT], started[started != ABSENT])
    np.maximum.at(last, owner, stopped)
    np.add.at(num, owner, 1)
    # a stamp that was overwritten makes no duration
    torn = (first == none) | (last == ABSENT) | (last < first)
    return np.where(torn, ABSENT, first), np.where(torn, ABSENT, last), num


def _launches(file: RecordFile, call: NDArray[np.int64], otherwise: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first launch of each outermost call; the begin of the call itself where no launch was recorded."""
    events = file.events
    launches = events.rows_of(EventType.KERNEL_LAUNCH)
    none = np.iinfo(np.int64).max
    first = np.full(len(events) + 1, none)
    np.minimum.at(first, events.parent[launches], events.start_ns[launches])
    found = first[call]
    return np.where((call >= 0) & (found != none), found, otherwise)


def _sizes(group: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(group):
        return np.zeros(0, np.int64)
    _, inverse, count = np.unique(group, return_inverse=True, return_counts=True)
    return np.where(group >= 0, count[inverse], 1)


def device_of(file: RecordFile, comm: int) -> str:
    """A name for the GPU of a communicator, equal for processes that share it: its UUID, else the file's name."""
    found = file.comms.get(comm)
    if found is not None and found.device_uuid is not None:
        return found.device_uuid
    name = os.path.basename(file.path)
    return name if found is None or found.device is None else f"{name}:{found.device}"


def heard_stamps(files: Sequence[tuple[RecordFile, Tasks]]) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each GPU (time of a kernel's end on its clock, host time at which that was known), as NCCL gave them.

    They hold whichever kernel a stamp belongs to. Versions of the interface without GPU times give none.
    """
    heard: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for file, _ in files:
        events = file.events
        kernels = events.rows_of(EventType.KERNEL_CH)
        known = (events.gpu_stop_ns[kernels] != ABSENT) & (events.stop_ns[kernels] != ABSENT)
        kernels = kernels[known]
        for comm in np.unique(events.comm[kernels]).tolist():
            mine = kernels[events.comm[kernels] == comm]
            heard.setdefault(device_of(file, comm), []).append((events.gpu_stop_ns[mine], events.stop_ns[mine]))
    return {device: _joined(parts) for device, parts in heard.items()}


def fit_clocks(
    files: Sequence[tuple[RecordFile, Tasks]], heard: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
) -> dict[str, ClockFit]:
    """One fit for each GPU of `heard`, between that and the launches of tasks."""
    launched: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for file, tasks in files:
        timed = (tasks.gpu_start_ns != ABSENT) & (tasks.launched_ns != ABSENT)
        for comm in np.unique(tasks.comm).tolist():
            mine = timed & (tasks.comm == comm)
            launched.setdefault(device_of(file, comm), []).append((tasks.gpu_start_ns[mine], tasks.launched_ns[mine]))
    fits: dict[str, ClockFit] = {}
    for device, told in heard.items():
        fit = fit_clock(_joined(launched.get(device, [])), told)
        if fit is not None:
            fits[device] = fit
    return fits


def _joined(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *(part[0] for part in parts)]), np.concatenate([none, *(part[1] for part in parts)])


def fit_of(fits: Mapping[str, ClockFit], file: RecordFile, comm: int) -> ClockFit | None:
    """The fit of the GPU of a communicator."""
    return fits.get(device_of(file, comm))


def place_on_host_clock(file: RecordFile, tasks: Tasks, fits: Mapping[str, ClockFit]) -> Tasks:
    """The same tasks with the times of their kernels on the host's clock."""
    start, stop = tasks.kernel_start_ns.copy(), tasks.kernel_stop_ns.copy()
    for comm in np.unique(tasks.comm).tolist():
        fit = fit_of(fits, file, comm)
        mine = (tasks.comm == comm) & (tasks.gpu_start_ns != ABSENT)
        if fit is not None:
            start[mine], stop[mine] = fit.apply(tasks.gpu_start_ns[mine]), fit.apply(tasks.gpu_stop_ns[mine])
    return replace(tasks, kernel_start_ns=start, kernel_stop_ns=stop)
