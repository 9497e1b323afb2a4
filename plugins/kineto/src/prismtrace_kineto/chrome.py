"""Builds Chrome trace JSON from units, steps, events and tracks. Does not choose file names or compress.

In a file of one rank the device is process 0 and the host process 1. In a file of several ranks, rank r has the
processes 2r and 2r + 1, and flows join the members of a collective (by arrival) and both sides of a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, ABSENT32, DType, EventKind, Op, ProcessGroup, TraceReader, TrackKind, UnitKind, UnitTable

Ints = NDArray[np.int64]
COMPUTE_STREAM: Final = 7
_FIRST_COMMUNICATION_STREAM: Final = 20
_HOST_THREAD: Final = 1
_STEP_THREAD: Final = 2
_ISSUE_THREAD: Final = 3
_PHASES: Final = {
    EventKind.SPAN: "X", EventKind.INSTANT: "i", EventKind.COUNTER: "C", EventKind.FLOW_START: "s",
    EventKind.FLOW_STEP: "t", EventKind.FLOW_END: "f", EventKind.BEGIN: "B", EventKind.END: "E",
}  # fmt: skip
_KERNELS: Final = {
    Op.ALL_REDUCE: "AllReduce", Op.BROADCAST: "Broadcast", Op.REDUCE: "Reduce", Op.ALL_GATHER: "AllGather",
    Op.REDUCE_SCATTER: "ReduceScatter", Op.SEND: "SendRecv", Op.RECV: "SendRecv", Op.ALL_TO_ALL: "SendRecv",
}  # fmt: skip
_COMMUNICATIONS: Final = (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV)
_BATCH: Final = 1 << 14


def microseconds(time_ns: int) -> str:
    """Nanoseconds as decimal microseconds, every digit kept."""
    sign, value = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return f"{sign}{value // 1000}.{value % 1000:03d}"


class ChromeJob:
    """One trace that is being exported."""

    def __init__(self, reader: TraceReader, *, with_events: bool) -> None:
        self.reader = reader
        self.with_events = with_events
        events = {rank for rank in reader.ranks if with_events and reader.num_events(rank)}
        self.ranks = tuple(rank for rank in reader.ranks if reader.num_units(rank) or rank in events)
        self.base_ns = self._base(self.ranks)
        self.num_untimed = 0

    def _base(self, ranks: Iterable[int]) -> int:
        """A whole millisecond before the first time of the job: the same for all ranks, so that ts stay small."""
        first: int | None = None
        for rank in ranks:
            tables = [self.reader.units(rank, columns=["start_ns"]).start_ns, self.reader.steps(rank).start_ns]
            if self.with_events and self.reader.num_events(rank):
                tables.append(self.reader.events(rank, columns=["start_ns"]).start_ns)
            for times in tables:
                times = times[times != ABSENT]
                if len(times):
                    first = min(int(times.min()), first if first is not None else int(times.min()))
        return 0 if first is None else first // 1_000_000 * 1_000_000

    def notes(self) -> Iterator[str]:
        """What could not be shown."""
        if self.num_untimed:
            yield f"{self.num_untimed} units or events have no time and are left out"

    def write(self, ranks: Sequence[int], file: IO[bytes]) -> int:
        """Writes one file with the given ranks and returns the number of events."""
        top: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": self.base_ns}
        groups = self.reader.groups.values()
        if len(ranks) == 1:
            config = [_group_json(group) for group in groups]
            world = self.reader.world_size or max(self.reader.ranks) + 1
            top["distributedInfo"] = {
                "backend": next((group.backend for group in groups if group.backend), "nccl"), "rank": ranks[0],
                "world_size": world, "pg_count": len(config), "pg_config": config,
            }  # fmt: skip
        file.write((json.dumps(top)[:-1] + ', "traceEvents": [').encode())
        count, batch = 0, list[str]()
        for text in self._events(ranks):
            batch.append(text)
            if len(batch) == _BATCH:
                file.write(((",\n" if count else "\n") + ",\n".join(batch)).encode())
                count += len(batch)
                batch.clear()
        if batch:
            file.write(((",\n" if count else "\n") + ",\n".join(batch)).encode())
        file.write(b"\n]}")
        return count + len(batch)

    def _time(self, time_ns: int) -> str:
        return microseconds(time_ns - self.base_ns)

    def _events(self, ranks: Sequence[int]) -> Iterator[str]:
        single = len(ranks) == 1
        flows = _Flows(self.reader)
        for rank in ranks:
            device, host = (0, 1) if single else (2 * rank, 2 * rank + 1)
            units = self.reader.units(rank)
            yield _metadata("process_name", device, 0, name=f"rank {rank}")
            yield _metadata("process_name", host, 0, name=f"rank {rank} host")
            yield _metadata("process_labels", device, 0, labels="GPU 0")
            yield _metadata("process_labels", host, 0, labels="CPU")
            yield _metadata("process_sort_index", host, 0, sort_index=2 * rank)
            yield _metadata("process_sort_index", device, 0, sort_index=2 * rank + 1)
            yield _metadata("thread_name", device, COMPUTE_STREAM, name=f"stream {COMPUTE_STREAM} compute")
            streams: dict[int, int] = {}
            shown = np.zeros(len(units), np.bool_)
            if self.with_events and self.reader.num_events(rank):
                yield from self._table(rank, units, device, host, shown, flows if not single else None)
            yield from self._units(rank, units, device, host, shown, streams, flows if not single else None)
            for group, stream in streams.items():
                name = self.reader.groups[group].name if group in self.reader.groups else "no group"
                yield _metadata("thread_name", device, stream, name=f"stream {stream} communication {name}".strip())
            if not (self.with_events and self.reader.num_events(rank)):
                yield from self._steps(rank, host)
        if not single:
            yield from flows.texts(self._time)

    def _step_times(self, rank: int) -> dict[int, tuple[int, int]]:
        """Start and end of the steps."""
        steps = self.reader.steps(rank)
        rows = zip(steps.step.tolist(), steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True)
        return {step: (start, end) for step, start, end in rows if start != ABSENT}

    def _steps(self, rank: int, host: int) -> Iterator[str]:
        steps = self._step_times(rank)
        if steps:
            yield _metadata("thread_name", host, _STEP_THREAD, name="steps")
        for step, (start, end) in steps.items():
            name, length = f"ProfilerStep#{step}", microseconds(end - start)
            yield _span(name, "user_annotation", host, _STEP_THREAD, self._time(start), length, {})

    def _units(
        self, rank: int, units: UnitTable, device: int, host: int, shown: NDArray[np.bool_], streams: dict[int, int],
        flows: _Flows | None,
    ) -> Iterator[str]:  # fmt: skip
        waits = False
        labels = units.labels()
        steps = self._step_times(rank)
        for row in np.flatnonzero(~shown).tolist():
            start, end = int(units.start_ns[row]), int(units.end_ns[row])
            kind = int(units.kind[row])
            if start == ABSENT or end == ABSENT:
                self.num_untimed += 1
                continue
            arguments = unit_arguments(units, row, self.reader.groups)
            place = (device, COMPUTE_STREAM)
            name, category = labels[row] or _title(units, row), "kernel"
            if kind in _COMMUNICATIONS:
                group = int(units.group_id[row])
                stream = streams.setdefault(group, _FIRST_COMMUNICATION_STREAM + len(streams))
                place = (device, stream)
                if "nccl" not in name.lower():
                    name = f"ncclKernel_{_KERNELS.get(_op(units, row), 'Generic')} {name}".strip()
            elif kind == UnitKind.WAIT:
                place, category = (host, _HOST_THREAD), "user_annotation"
                if not waits:
                    waits = True
                    yield _metadata("thread_name", host, _HOST_THREAD, name="waits")
            if category == "kernel":
                arguments = {"device": device, "stream": place[1], "correlation": row + 1, **arguments}
                if steps:  # HolisticTraceAnalysis tells a kernel's step by the host call of its correlation
                    first, last = steps.get(int(units.step[row]), (start, start))
                    issued = self._time(max(first, min(start, last)))
                    yield _span("issue", "cuda_runtime", host, _ISSUE_THREAD, issued, "0.000", {"correlation": row + 1})
            yield _span(name, category, *place, self._time(start), microseconds(end - start), arguments)
            if flows is not None and kind in _COMMUNICATIONS:
                flows.add(rank, units, row, place, start, end)

    def _table(
        self, rank: int, units: UnitTable, device: int, host: int, shown: NDArray[np.bool_], flows: _Flows | None
    ) -> Iterator[str]:  # fmt: skip
        events, tracks = self.reader.events(rank), self.reader.tracks(rank)
        places: list[tuple[int, int, bool]] = []
        names = list(tracks.name)
        taken: dict[tuple[int, int], int] = {}
        for row in range(len(tracks)):
            is_device = int(tracks.kind[row]) == TrackKind.DEVICE_STREAM
            thread = int(tracks.stream[row] if is_device else tracks.thread_id[row])
            place = (device if is_device else host, thread if thread != ABSENT else 1 << 20)
            while taken.setdefault(place, row) != row:
                place = (place[0], place[1] + (1 << 20))
            places.append((*place, is_device))
            if names[row]:
                yield _metadata("thread_name", place[0], place[1], name=names[row])
        elsewhere = (host, (1 << 20) - 1, False)
        extra = events["kineto.external_id"] if "kineto.external_id" in events.column_names else None
        columns = zip(
            list(events.name), list(events.category), events.kind.tolist(), events.track.tolist(),
            events.start_ns.tolist(), events.end_ns.tolist(), events.correlation_id.tolist(), events.flow_id.tolist(),
            events.unit.tolist(), strict=True,
        )  # fmt: skip
        for row, (name, category, kind, track, start, end, correlation, flow, unit) in enumerate(columns):
            letter = _PHASES.get(kind)
            if start == ABSENT or letter is None or (letter == "X" and end == ABSENT):
                self.num_untimed += 1
                continue
            pid, tid, is_device = places[track] if track != ABSENT32 and track < len(places) else elsewhere
            arguments: dict[str, Any] = (
                {} if extra is None or extra[row] == ABSENT else {"External id": int(extra[row])}
            )
            if is_device and category != "gpu_user_annotation":  # analysers take what has a stream for a kernel
                arguments |= {"device": 0, "stream": tid}
            if correlation != ABSENT:
                arguments["correlation"] = correlation
            if unit != ABSENT and unit < len(units):
                arguments |= unit_arguments(units, unit, self.reader.groups)
                shown[unit] = True
                if flows is not None and int(units.kind[unit]) in _COMMUNICATIONS:
                    flows.add(rank, units, unit, (pid, tid), start, end)
            if letter == "X":
                yield _span(
                    name or "", category or "", pid, tid, self._time(start), microseconds(end - start), arguments
                )
            else:
                more = (
                    f', "id": {flow}' if letter in "stf" and flow != ABSENT else ', "s": "t"' if letter == "i" else ""
                )
                yield (
                    f'{{"ph": "{letter}", "cat": {json.dumps(category or "")}, "name": {json.dumps(name or "")}, '
                    f'"pid": {pid}, "tid": {tid}, "ts": {self._time(start)}{more}, "args": {json.dumps(arguments)}}}'
                )


def _op(units: UnitTable, row: int) -> Op:
    value = int(units.op[row])
    return Op(value) if value in Op._value2member_map_ else Op.UNSPECIFIED


def _title(units: UnitTable, row: int) -> str:
    kind, op = int(units.kind[row]), _op(units, row)
    if kind in _COMMUNICATIONS and op:
        return op.name.lower()
    return UnitKind(kind).name.lower() if kind in UnitKind._value2member_map_ else f"kind#{kind}"


def unit_arguments(units: UnitTable, row: int, groups: Any) -> dict[str, Any]:
    """What a unit knows, under the keys that Kineto uses where it has one."""
    result: dict[str, Any] = {}
    if units.step[row] != ABSENT32:
        result["step"] = int(units.step[row])
    for name, absent in (
        ("microbatch", ABSENT32),
        ("stage", ABSENT32),
        ("model_chunk", ABSENT32),
        ("memory_bytes", ABSENT),
    ):
        value = int(getattr(units, name)[row])
        if value != absent:
            result[name] = value
    if int(units.kind[row]) not in _COMMUNICATIONS:
        return result
    op = _op(units, row)
    if op:
        result["Collective name"] = op.name.lower()
    group: ProcessGroup | None = groups.get(int(units.group_id[row]))
    if group is not None:
        result |= {
            "Process Group Name": group.name, "Process Group Description": group.description,
            "Process Group Ranks": str(list(group.ranks)), "Group size": group.size,
        }  # fmt: skip
    for key, value, absent in (
        ("Seq", units.seq[row], ABSENT), ("In msg nelems", units.num_elements_in[row], ABSENT),
        ("Out msg nelems", units.num_elements_out[row], ABSENT),
        ("Dst Rank" if op is Op.SEND else "Src Rank", units.peer[row], ABSENT32),
    ):  # fmt: skip
        if value != absent:
            result[key] = int(value)
    if units.dtype[row] in DType._value2member_map_ and units.dtype[row]:
        result["dtype"] = DType(int(units.dtype[row])).name.lower()
    return result


def _group_json(group: ProcessGroup) -> dict[str, Any]:
    return {
        "pg_name": group.name, "pg_desc": group.description, "backend_config": group.backend, "pg_size": group.size,
        "ranks": list(group.ranks),
    }  # fmt: skip


def _metadata(name: str, pid: int, tid: int, /, **arguments: Any) -> str:
    return f'{{"ph": "M", "name": "{name}", "pid": {pid}, "tid": {tid}, "ts": 0, "args": {json.dumps(arguments)}}}'


def _span(name: str, category: str, pid: int, tid: int, start: str, length: str, arguments: dict[str, Any]) -> str:
    return (
        f'{{"ph": "X", "cat": {json.dumps(category)}, "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid}, '
        f'"ts": {start}, "dur": {length}, "args": {json.dumps(arguments)}}}'
    )


class _Flows:
    """Arrows between ranks: along the arrivals of each collective, from each send to its receive."""

    def __init__(self, reader: TraceReader) -> None:
        self._reader = reader
        self._members: dict[tuple[Any, ...], list[tuple[int, int, tuple[int, int], bool]]] = {}

    def add(self, rank: int, units: UnitTable, row: int, place: tuple[int, int], start: int, end: int) -> None:
        """One communication that is shown; without a group or a seq nothing says what it belongs to."""
        group, seq, kind = int(units.group_id[row]), int(units.seq[row]), int(units.kind[row])
        if not group or seq == ABSENT:
            return
        if kind == UnitKind.COLLECTIVE:
            key: tuple[Any, ...] = (group, seq)
        else:
            peer = int(units.peer[row])
            pair = (rank, peer) if kind == UnitKind.SEND else (peer, rank)
            key = (group, seq, *pair, int(units.tag[row]))
        self._members.setdefault(key, []).append((start, end, place, kind == UnitKind.RECV))

    def texts(self, time: Any) -> Iterator[str]:
        """The flow events of all that were added."""
        for number, (key, members) in enumerate(self._members.items(), 1):
            if len(members) < 2:
                continue
            is_message = len(key) > 2
            members.sort(key=lambda member: (member[3], member[0]) if is_message else (member[0],))
            name = "message" if is_message else "collective"
            for index, (start, end, (pid, tid), _) in enumerate(members):
                letter = "s" if index == 0 else "f" if index == len(members) - 1 else "t"
                at = start if index == 0 else min(max(start, members[0][0]), end)
                bind = ', "bp": "e"' if letter == "f" else ""
                yield (
                    f'{{"ph": "{letter}", "cat": "{name}", "name": "{name}", "id": {number}, "pid": {pid}, '
                    f'"tid": {tid}, "ts": {time(at)}{bind}}}'
                )
