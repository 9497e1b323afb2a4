"""Finds what each NCCL kernel of a document says about its group and operation. Does not build units.

What the kernel itself says counts first; else what the CPU event ``record_param_comms`` says that has the same
External id or encloses the launch. What neither says stays absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, DType, Op, ProcessGroup, ReduceOp
from prismtrace_kineto import naming
from prismtrace_kineto.timeline import Timeline

Ints = NDArray[np.int64]
SEQ_KEYS: Final = ("Seq", "seq", "seq_num")


@dataclass(frozen=True)
class Communication:
    """One NCCL kernel: the row of its event and what is known of the operation."""

    row: int
    op: Op
    reduce_op: ReduceOp
    dtype: DType
    group_id: int
    seq: int | None
    num_in: int | None
    num_out: int | None
    peer: int | None
    label: str
    splits_in: tuple[int, ...] | None = None
    splits_out: tuple[int, ...] | None = None


def group_id(name: str, ranks: Sequence[int]) -> int:
    """The same on every rank: from name and members."""
    text = json.dumps([name, list(ranks)], separators=(",", ":"))
    return (
        int.from_bytes(hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest(), "little") or 1
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int and -(1 << 62) < value < 1 << 62 else None


def _quantity(value: Any) -> int | None:
    number = _whole(value)
    return number if number is not None and number >= 0 else None


def _list(value: Any) -> tuple[int, ...] | None:
    """Integers written as a JSON list or as the text of one; None when it is cut short or something else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        return None
    return tuple(value)


class Groups:
    """The process groups of a job, collected from all documents."""

    def __init__(self) -> None:
        self.by_id: dict[int, ProcessGroup] = {}
        self.notes: dict[str, int] = {}

    def note(self, text: str) -> None:
        """Counts something to tell."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def add(self, name: str, ranks: Sequence[int], *, description: str = "", backend: str = "") -> int:
        """A group by name and members; 0 when these cannot be a group."""
        if not ranks or len(set(ranks)) != len(ranks) or any(not 0 <= rank < 1 << 31 for rank in ranks):
            return 0
        number = group_id(name, ranks)
        known = self.by_id.get(number)
        group = ProcessGroup(number, _clean(name), _clean(description), _clean(backend), tuple(ranks))
        if known is None or (not known.description and description):
            if known is not None:
                group = ProcessGroup(number, known.name, group.description, known.backend or group.backend, known.ranks)
            self.by_id[number] = group
        return number

    def declared(self, distributed: Any) -> dict[str, int]:
        """The groups of `distributedInfo.pg_config` by name."""
        result: dict[str, int] = {}
        entries = distributed.get("pg_config") if isinstance(distributed, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict):
                self.note("entries of pg_config are no objects")
                continue
            name, ranks = str(entry.get("pg_name", "")), _list(entry.get("ranks"))
            if not ranks:
                self.note("groups of pg_config have no readable list of ranks")
                continue
            description, backend = str(entry.get("pg_desc", "")), str(entry.get("backend_config", ""))
            number = self.add(name, ranks, description=description, backend=backend)
            if number:
                result[name] = number
        return result


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def launches(line: Timeline) -> tuple[Ints, Ints]:
    """For every event on a device: the row of the call that launched it (-1 = none), and how many had no single one."""
    runtime = np.flatnonzero(line.in_categories(naming.RUNTIME_CATEGORIES) & (line.correlation > 0))
    order = runtime[np.argsort(line.correlation[runtime], kind="stable")]
    ids = line.correlation[order]
    unique = np.ones(len(ids), np.bool_)
    if len(ids) > 1:
        same = ids[1:] == ids[:-1]
        unique[1:] &= ~same
        unique[:-1] &= ~same
    ids, order = ids[unique], order[unique]
    result = np.full(len(line), -1, np.int64)
    device = np.flatnonzero(line.in_categories(naming.GPU_CATEGORIES))
    if len(ids):
        place = np.minimum(np.searchsorted(ids, line.correlation[device]), len(ids) - 1)
        found = ids[place] == line.correlation[device]
        result[device[found]] = order[place[found]]
    return result, device


class _Records:
    """The record_param_comms events of a document: by External id, and by thread and time."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        strings = line.columns.strings
        code = strings.index(naming.COMMUNICATION_RECORD) if naming.COMMUNICATION_RECORD in strings else -2
        rows = np.flatnonzero((line.name == code) & (line.end_ns != ABSENT))
        self.by_id: dict[int, int] = {}
        self.by_track: dict[int, tuple[Ints, Ints, Ints]] = {}
        for row in rows.tolist():
            self.by_id.setdefault(int(line.external_id[row]), row)
        for track in np.unique(line.track[rows]).tolist():
            mine = rows[line.track[rows] == track]
            mine = mine[np.argsort(line.start_ns[mine], kind="stable")]
            self.by_track[track] = (line.start_ns[mine], line.end_ns[mine], mine)

    def find(self, row: int, launch: int) -> int:
        """The record of a kernel; -1 when there is none."""
        found = self.by_id.get(int(self.line.external_id[row]), -1)
        if found < 0 and launch >= 0 and int(self.line.track[launch]) in self.by_track:
            starts, ends, rows = self.by_track[int(self.line.track[launch])]
            time = int(self.line.start_ns[launch])
            place = int(np.searchsorted(starts, time, side="right")) - 1
            if place >= 0 and ends[place] >= time:
                found = int(rows[place])
        return found


def communications(
    line: Timeline, rank: int, launch: Ints, groups: Groups, declared: Mapping[str, int]
) -> list[Communication]:  # fmt: skip
    """Every NCCL kernel of a document, in the order of the events."""
    kernels = np.flatnonzero(line.in_categories(frozenset({"kernel"})) & (line.start_ns != ABSENT))
    verdict: dict[str, bool] = {}
    records = _Records(line)
    result: list[Communication] = []
    for row, name in zip(kernels.tolist(), line.names(kernels), strict=True):
        if verdict.setdefault(name, naming.is_communication(name)):
            result.append(_communication(line, row, name, rank, records, int(launch[row]), groups, declared))
    return result


def _communication(
    line: Timeline, row: int, name: str, rank: int, records: _Records, launch: int, groups: Groups,
    declared: Mapping[str, int],
) -> Communication:  # fmt: skip
    record: int | None = None

    def said(*keys: str) -> Any:
        nonlocal record
        for key in keys:
            value = line.argument(row, key)
            if value is not None:
                return value
        if record is None:
            record = records.find(row, launch)
        if record >= 0:
            for key in keys:
                value = line.argument(record, key)
                if value is not None:
                    return value
        return None

    word = said("Collective name")
    op = naming.op_of(str(word)) if word is not None else Op.UNSPECIFIED
    if op is Op.UNSPECIFIED:
        op = naming.op_of_kernel(name)
    number = _group(said, rank, groups, declared)
    reduce_op = (
        naming.reduce_op_of_kernel(name)
        if op in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)
        else ReduceOp.UNSPECIFIED
    )
    peer = None
    if op in (Op.SEND, Op.RECV):
        peer = _peer(said("Dst Rank" if op is Op.SEND else "Src Rank"), number, rank, groups)
    dtype = naming.DTYPES.get(str(said("dtype")).lower(), DType.UNSPECIFIED)
    return Communication(
        row, op, reduce_op, dtype, number, _quantity(said(*SEQ_KEYS)), _quantity(said("In msg nelems")),
        _quantity(said("Out msg nelems")), peer, str(word or ""), _list(said("In split size")) or None,
        _list(said("Out split size")) or None,
    )  # fmt: skip


def _group(said: Any, rank: int, groups: Groups, declared: Mapping[str, int]) -> int:
    name, ranks = said("Process Group Name"), _list(said("Process Group Ranks"))
    if name is None and not ranks:
        groups.note("NCCL kernels name no process group: their units have none, and match no other rank's")
        return 0
    name = str(name or "")
    number = groups.add(name, ranks, description=str(said("Process Group Description") or "")) if ranks else 0
    number = number or declared.get(name, 0)
    if not number:
        groups.note("NCCL kernels name a process group whose ranks the trace does not tell")
        return 0
    if rank not in groups.by_id[number].ranks:
        groups.note("NCCL kernels name a process group that this rank is not in: left without a group")
        return 0
    return number


def _peer(value: Any, number: int, rank: int, groups: Groups) -> int | None:
    peer = _quantity(value)
    if peer is None:
        groups.note("sends or receives do not say the other rank")
        return None
    members = groups.by_id[number].ranks if number else ()
    if not members or peer in members:
        if members and tuple(members) != tuple(range(len(members))) and peer < len(members):
            groups.note("peers of sends or receives could be global or group ranks: taken as global")
        return peer
    if peer < len(members):
        groups.note("peers of sends or receives are group ranks: translated")
        return members[peer]
    groups.note("peers of sends or receives are not in the group: left out")
    return None
