"""Writes a copy of a trace with what NCCL did in it: columns beside the units, and kernels as events on tracks.

What belongs to what was decided by `join`; nothing of the trace itself is changed.

Columns of units (absent where NCCL did nothing): ``nccl.comm`` hash of the communicator, ``nccl.seq`` NCCL's number of
the collective, ``nccl.algo``, ``nccl.proto``, ``nccl.channels``, ``nccl.num_tasks``, ``nccl.num_bytes`` given to NCCL,
``nccl.kernel_start_ns`` and ``nccl.kernel_end_ns`` on the trace's clock. Where a unit has no ``transfer_ns`` it gets
the time of the operation without waiting for peers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.nccl.details import detail_rows
from prism_sdk.nccl.format import ABSENT_SEQ
from prism_sdk.nccl.job import NcclJob
from prism_sdk.nccl.join import Joined, JoinedRank, join
from prism_sdk.nccl.operations import operations
from prismtrace import ABSENT, EventKind, TableKind, TraceReader, TrackKind
from prismtrace.rewriting import TABLES, add_rows, copy_payload, iter_tables, new_trace
from prismtrace.writer import TraceWriter

__all__ = ["AttachReport", "attach"]

EVENTS = ("none", "tasks", "all")


@dataclass(frozen=True)
class AttachReport:
    """How the join came out, over all ranks."""

    num_ranks: int
    num_tasks: int
    num_joined: int
    num_unequal: int
    num_units: int
    num_units_joined: int
    num_without_kernel: int
    groups: Mapping[str, str]
    by: Mapping[int, str]
    clocks: Mapping[str, Mapping[str, Any]]
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def attach(
    trace: str | os.PathLike[str], job: NcclJob, output: str | os.PathLike[str], *, events: str = "tasks",
    overwrite: bool = False,
) -> AttachReport:  # fmt: skip
    """Join `job` to the trace and write the result.

    Args:
        trace: an observed trace of the same job.
        job: the record files.
        output: the trace to write; it may be the trace itself with `overwrite`.
        events: "tasks": a span for each kernel; "all": also channels, calls, launches and proxy work; "none".
        overwrite: replaces a file that exists.
    """
    with TraceReader(trace) as reader:
        joined = join(reader, job)
        of_rank = {one.rank: one for one in joined.ranks}
        times = _times(job)
        findings = [*job.findings(), *_findings(reader, job, joined)]
        metadata = {**reader.metadata, **_metadata(joined)}
        with new_trace(output, like=reader, metadata=metadata, overwrite=overwrite) as writer:
            for _, group in sorted(reader.groups.items()):
                writer.add_group(group)
            for rank in reader.ranks:
                _copy_rank(reader, writer, rank, of_rank.get(rank), times)
                if rank in of_rank and events != "none":
                    _add_events(reader, writer, of_rank[rank], with_details=events == "all")
            for digest in reader.payload_digests:
                copy_payload(reader, writer, digest)
        return _report(reader, job, joined, findings)


def _times(job: NcclJob) -> dict[tuple[int | None, int], int]:
    """(rank, task) -> the time of its operation without waiting."""
    found = {}
    for one in operations(job):
        if one.time_ns is not None and not one.is_shared:
            for place, tasks in one.members:
                found.update({(job.ranks[place].rank, task): one.time_ns for task in tasks})
    return found


def _copy_rank(
    reader: TraceReader, writer: TraceWriter, rank: int, one: JoinedRank | None,
    times: Mapping[tuple[int | None, int], int],
) -> None:  # fmt: skip
    for kind in TABLES:
        for table in iter_tables(reader, kind, rank):
            columns = table.columns()
            if kind is TableKind.UNITS and one is not None:
                columns.update(_unit_columns(one, np.asarray(table.row_index), np.asarray(table.transfer_ns), times))
            add_rows(writer, kind, rank, columns)


def _unit_columns(
    one: JoinedRank, rows: NDArray[np.int64], transfer_ns: NDArray[np.int64],
    times: Mapping[tuple[int | None, int], int],
) -> dict[str, Any]:  # fmt: skip
    """The columns of some units, in the order of `rows` (ascending unit_index)."""
    tasks, file = one.records.tasks, one.records.file
    place = np.searchsorted(rows, one.unit).clip(0, max(len(rows) - 1, 0))
    mine = np.flatnonzero((one.unit >= 0) & (rows[place] == one.unit)) if len(rows) else np.zeros(0, np.int64)
    if not len(mine):
        return {}
    at, num = place[mine], len(rows)
    hashes = np.array([file.comms[int(comm)].hash for comm in tasks.comm[mine]], np.uint64)
    comm = np.zeros(num, np.uint64)
    comm[at] = hashes
    count = np.bincount(at, minlength=num)
    seq = np.full(num, ABSENT, np.int64)
    seq[at] = np.where(tasks.seq[mine] == ABSENT_SEQ, ABSENT, tasks.seq[mine])
    seq[count != 1] = ABSENT
    channels = np.full(num, ABSENT, np.int64)
    np.maximum.at(channels, at, np.where(tasks.channels[mine] > 0, tasks.channels[mine].astype(np.int64), ABSENT))
    sizes = np.where(count > 0, 0, ABSENT).astype(np.int64)
    np.add.at(sizes, at, tasks.num_bytes[mine])
    start, end = np.full(num, np.iinfo(np.int64).max), np.full(num, ABSENT)
    timed = (tasks.kernel_start_ns[mine] != ABSENT) & (tasks.kernel_stop_ns[mine] != ABSENT)
    np.minimum.at(start, at[timed], tasks.kernel_start_ns[mine][timed] + one.shift_ns)
    np.maximum.at(end, at[timed], tasks.kernel_stop_ns[mine][timed] + one.shift_ns)
    start[end == ABSENT] = ABSENT
    time = np.full(num, ABSENT, np.int64)
    for task, row in zip(mine.tolist(), at.tolist(), strict=True):
        time[row] = max(time[row], times.get((one.records.rank, task), ABSENT))
    return {
        "nccl.comm": comm, "nccl.seq": seq, "nccl.algo": _words(tasks.algo, mine, at, num),
        "nccl.proto": _words(tasks.proto, mine, at, num), "nccl.channels": channels,
        "nccl.num_tasks": np.where(count > 0, count, ABSENT), "nccl.num_bytes": sizes,
        "nccl.kernel_start_ns": start, "nccl.kernel_end_ns": end,
        "transfer_ns": np.where(transfer_ns == ABSENT, time, transfer_ns),
    }  # fmt: skip


def _words(column: NDArray[Any], mine: NDArray[np.int64], at: NDArray[np.int64], num: int) -> list[str | None]:
    """The word of each unit; of several tasks with different words, all of them."""
    found: list[str | None] = [None] * num
    for task, row in zip(mine.tolist(), at.tolist(), strict=True):
        word = column[task]
        known = found[row]
        if word and (known is None or word not in known.split(",")):
            found[row] = word if known is None else f"{known},{word}"
    return found


def _add_events(reader: TraceReader, writer: TraceWriter, one: JoinedRank, *, with_details: bool) -> None:
    """A track for each communicator and a span for each kernel on it; with details, everything else too."""
    tasks, file = one.records.tasks, one.records.file
    first_track = len(reader.tracks(one.rank))
    numbers = sorted(file.comms)
    names = ("name", "process", "kind", "process_id", "thread_id", "device")
    tracks: dict[str, list[Any]] = {name: [] for name in names}
    for number in numbers:
        comm = file.comms[number]
        label = f" {comm.name}" if comm.name else ""
        tracks["name"].append(f"NCCL {comm.hash:016x}{label}")
        tracks["process"].append(f"rank {one.rank}")
        tracks["kind"].append(int(TrackKind.DEVICE_STREAM))
        tracks["process_id"].append(file.pid)
        tracks["thread_id"].append(ABSENT)
        tracks["device"].append(-(2**31) if comm.device is None else comm.device)
    shown = np.flatnonzero((tasks.kernel_start_ns != ABSENT) & (tasks.kernel_stop_ns != ABSENT))
    shown = shown[np.argsort(tasks.kernel_start_ns[shown], kind="stable")]
    rows: dict[str, Any] = {
        "name": [_name(tasks.func[task], tasks.algo[task], tasks.proto[task]) for task in shown.tolist()],
        "category": ["nccl"] * len(shown),
        "kind": np.full(len(shown), int(EventKind.SPAN)),
        "track": first_track + np.searchsorted(numbers, tasks.comm[shown]),
        "start_ns": tasks.kernel_start_ns[shown] + one.shift_ns,
        "end_ns": tasks.kernel_stop_ns[shown] + one.shift_ns,
        "unit": np.where(one.unit[shown] >= 0, one.unit[shown], ABSENT),
        "nccl.channel": np.full(len(shown), ABSENT, np.int64),
        "nccl.num_bytes": tasks.num_bytes[shown],
        "nccl.peer": np.where(tasks.is_message[shown], tasks.peer[shown].astype(np.int64), ABSENT),
    }
    if with_details:
        more_tracks, more = detail_rows(one, first_track=first_track + len(numbers))
        tracks = {name: [*column, *more_tracks[name]] for name, column in tracks.items()}
        rows = {
            name: [*column, *more[name]] if isinstance(column, list) else np.concatenate([column, more[name]])
            for name, column in rows.items()
        }
    if numbers:
        writer.add_tracks(one.rank, {name: column if name in ("name", "process") else np.array(column, np.int64)
                                     for name, column in tracks.items()})  # fmt: skip
    if len(rows["kind"]):
        writer.add_events(one.rank, rows)


def _name(func: str | None, algo: str | None, proto: str | None) -> str:
    return " ".join(word for word in (func, algo, proto) if word) or "unknown"


def _metadata(joined: Joined) -> dict[str, str]:
    groups = ",".join(f"{comm:016x}={group}" for comm, group in sorted(joined.groups.items()))
    return {"nccl.communicators": groups} if groups else {}


def _findings(reader: TraceReader, job: NcclJob, joined: Joined) -> list[str]:
    texts = []
    nameless = [one.file.path for one in job.ranks if one.rank is None]
    if nameless:
        texts.append(f"{len(nameless)} files do not say their rank and are left out, {nameless[0]} first")
    strange = [one.rank for one in job.ranks if one.rank is not None and one.rank not in reader.ranks]
    if strange:
        others = f", nor {len(strange) - 1} others" if strange[1:] else ""
        texts.append(f"the trace has no rank {strange[0]}{others}")
    for one in joined.ranks:
        lost = len(one.unit) - int(np.count_nonzero(one.unit >= 0))
        if lost:
            texts.append(f"rank {one.rank}: {lost} of {len(one.unit)} NCCL operations belong to no unit of the trace")
        if one.num_unequal:
            texts.append(f"rank {one.rank}: {one.num_unequal} NCCL operations move other byte counts than their units")
        if one.by == "order":
            texts.append(
                f"rank {one.rank}: its clock is not the trace's: joined by order, shifted by {one.shift_ns} ns"
            )
    return texts


def _report(reader: TraceReader, job: NcclJob, joined: Joined, findings: list[str]) -> AttachReport:
    def total(numbers: Any) -> int:
        return int(sum(numbers))

    names = {comm: reader.groups[group].name for comm, group in joined.groups.items() if group in reader.groups}
    return AttachReport(
        num_ranks=len(joined.ranks), num_tasks=total(len(one.unit) for one in joined.ranks),
        num_joined=total(np.count_nonzero(one.unit >= 0) for one in joined.ranks),
        num_unequal=total(one.num_unequal for one in joined.ranks),
        num_units=total(one.num_units for one in joined.ranks),
        num_units_joined=total(one.num_units_joined for one in joined.ranks),
        num_without_kernel=total(
            np.count_nonzero(one.records.tasks.kernel_stop_ns == ABSENT) for one in joined.ranks
        ),
        groups={f"{comm:016x}": name for comm, name in sorted(names.items())},
        by={one.rank: one.by for one in joined.ranks},
        clocks={device: vars(fit) for device, fit in job.clocks.items()},
        findings=tuple(findings), notes=tuple(job.notes()),
    )  # fmt: skip
