"""Brings the dumps of all ranks together: which group each name means, and numbers that are equal on all ranks.

It does not judge and does not write.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prismtrace import Op, ProcessGroup
from prismtrace_flight_recorder.dumps import Dump, Entry

_MAX_INFERRED: Final = 1 << 20
"""Largest world whose ranks are listed when a dump does not name them."""


@dataclass
class Placed:
    """One operation of one rank with its place in the job. `end` is the entry that closes its batch."""

    entry: Entry
    group: ProcessGroup | None
    index_in_batch: int = 0
    end: Entry | None = None
    peer: int | None = None
    seq: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is complete; in a batch, whether the batch is."""
        return self.entry.is_done or (self.end is not None and self.end.is_done)

    @property
    def started_ns(self) -> int | None:
        """When the recorder saw that it had started."""
        return self.entry.started_ns if self.end is None else (self.entry.started_ns or self.end.started_ns)

    @property
    def completed_ns(self) -> int | None:
        """When the recorder saw that it was complete."""
        return self.entry.completed_ns if self.end is None else (self.entry.completed_ns or self.end.completed_ns)

    @property
    def is_p2p(self) -> bool:
        """Whether it is a send or a receive."""
        return self.entry.op in (Op.SEND, Op.RECV)


@dataclass
class Matched:
    """All ranks together. `collectives` is group id -> collective_seq_id -> rank -> operations."""

    dumps: dict[int, Dump]
    world_size: int
    groups: dict[int, ProcessGroup] = field(default_factory=dict)
    operations: dict[int, list[Placed]] = field(default_factory=dict)
    collectives: dict[int, dict[int, dict[int, list[Placed]]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def match(dumps: Mapping[int, Dump], *, world_size: int | None) -> Matched:
    """Place every operation of every rank."""
    known = [rank for dump in dumps.values() for ranks in dump.group_ranks.values() for rank in ranks]
    size = world_size if world_size is not None else max([*dumps, *known]) + 1
    job = Matched(dict(dumps), size)
    resolve = _Groups(job)
    for rank, dump in dumps.items():
        job.operations[rank] = _operations(dump, rank, resolve, job)
    _number_collectives(job)
    _number_messages(job)
    return job


class _Groups:
    """Finds the members of a group that a rank names."""

    def __init__(self, job: Matched) -> None:
        self._job = job
        self._users: dict[tuple[str, str], set[int]] = defaultdict(set)
        for rank, dump in job.dumps.items():
            for entry in dump.entries:
                self._users[entry.group, entry.description].add(rank)
        self._by_name: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for dump in job.dumps.values():
            for name, ranks in dump.group_ranks.items():
                if ranks not in self._by_name[name]:
                    self._by_name[name].append(ranks)
        self._found: dict[tuple[int, str], ProcessGroup | None] = {}
        self._inferred: dict[tuple[str, str], tuple[int, ...]] = {}

    def find(self, rank: int, entry: Entry) -> ProcessGroup | None:
        """The group that an entry of a rank is of; None when that rank is no member of what is known."""
        key = (rank, entry.group)
        if key not in self._found:
            self._found[key] = self._define(rank, entry)
        return self._found[key]

    def _define(self, rank: int, entry: Entry) -> ProcessGroup | None:
        ranks = self._job.dumps[rank].group_ranks.get(entry.group, ())
        if rank not in ranks:
            ranks = next((known for known in self._by_name.get(entry.group, ()) if rank in known), ())
        if not ranks:
            ranks = self._infer(entry)
        if any(member >= self._job.world_size for member in ranks):
            self._job.notes.append(f"group {entry.group!r} has members outside a world of {self._job.world_size}")
            return None
        content = "\0".join((entry.group, ",".join(map(str, ranks)))).encode()
        number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1
        made = ProcessGroup(number, entry.group, entry.description, entry.backend, ranks)
        return self._job.groups.setdefault(number, made)

    def _infer(self, entry: Entry) -> tuple[int, ...]:
        key = (entry.group, entry.description)
        if key not in self._inferred:
            if entry.description == "default_pg" and self._job.world_size <= _MAX_INFERRED:
                ranks, how = tuple(range(self._job.world_size)), "the whole world, as default_pg is"
            else:
                ranks, how = tuple(sorted(self._users[key])), "the ranks whose dumps use it"
            self._inferred[key] = ranks
            self._job.notes.append(
                f"no dump says who the members of group {entry.group!r} ({entry.description}) are: "
                f"taken as {how} ({ranks_text(ranks)})"
            )
        return self._inferred[key]


def _operations(dump: Dump, rank: int, resolve: _Groups, job: Matched) -> list[Placed]:
    placed: list[Placed] = []
    batches: dict[tuple[str, bool, int | None], list[Placed]] = defaultdict(list)
    unclear = 0
    for entry in dump.entries:
        number = entry.p2p_seq if entry.is_p2p else entry.seq
        key = (entry.group, entry.is_p2p, number)
        if entry.is_end:
            members = batches.pop(key, [])
            for each in members:
                each.end = entry
            job.counts["batches"] += 1
            if not members:
                job.counts["batches_without_members"] += 1
            continue
        each = Placed(entry, resolve.find(rank, entry), len(batches[key]))
        batches[key].append(each)
        if each.is_p2p and each.group is not None:
            each.peer = _peer(entry, each.group, rank)
            unclear += each.peer is None
        placed.append(each)
    if unclear:
        job.notes.append(f"{dump.path}: the other side of {unclear} sends and receives does not follow from the names")
    return placed


def _peer(entry: Entry, group: ProcessGroup, rank: int) -> int | None:
    """The global rank of the other side. Entries name ranks inside the group; some writers name global ones."""
    own, other = (entry.source, entry.target) if entry.op is Op.SEND else (entry.target, entry.source)
    if own is None or other is None:
        return None
    if own < group.size and other < group.size and group.ranks[own] == rank:
        return group.ranks[other]
    return other if own == rank and other in group.ranks else None


def _number_collectives(job: Matched) -> None:
    """Give operations of a batch, which share one number, numbers of their own that are equal on all ranks."""
    for rank, operations in job.operations.items():
        for each in operations:
            if not each.is_p2p and each.group is not None and each.entry.seq is not None:
                numbers = job.collectives.setdefault(each.group.group_id, {})
                same = numbers.setdefault(each.entry.seq, {}).setdefault(rank, [])
                each.index_in_batch = len(same)
                same.append(each)
    for numbers in job.collectives.values():
        extra = -1 if min(numbers) > 0 else 0
        for number in sorted(numbers):
            for operations in numbers[number].values():
                for each in operations:
                    each.seq = number + extra + each.index_in_batch
            extra += max(map(len, numbers[number].values())) - 1


def _number_messages(job: Matched) -> None:
    """Number the messages of each lane where neither side has lost entries: else they would pair wrongly."""
    whole = {rank for rank, dump in job.dumps.items() if is_whole(dump)}
    unnumbered = 0
    for rank, operations in job.operations.items():
        ordinals: Counter[Any] = Counter()
        for each in operations:
            if not each.is_p2p or each.group is None or each.peer is None:
                continue
            if rank not in whole or (each.peer in job.dumps and each.peer not in whole):
                unnumbered += 1
                continue
            lane = (each.group.group_id, each.entry.op, each.peer)
            each.seq = ordinals[lane]
            ordinals[lane] += 1
    if unnumbered:
        job.notes.append(
            f"{unnumbered} sends and receives have no seq: a side has lost entries, so that pairs cannot be told"
        )


def is_whole(dump: Dump) -> bool:
    """Whether the dump holds every operation since the start."""
    entries = dump.entries
    return not entries or (entries[0].record_id == 0 and entries[-1].record_id == len(entries) - 1)


def ranks_text(ranks: tuple[int, ...] | list[int] | set[int]) -> str:
    """Ranks in few words: `0-3, 8`."""
    parts: list[str] = []
    run: list[int] = []
    for rank in [*sorted(ranks), None]:
        if run and rank is not None and rank == run[-1] + 1:
            run.append(rank)
            continue
        if run:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        run = [] if rank is None else [rank]
    return ", ".join(parts[:16]) + (", ..." if len(parts) > 16 else "")
