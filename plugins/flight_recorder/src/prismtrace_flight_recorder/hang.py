"""Says what the dumps tell about a hang: who has not joined what, what is not complete, where ranks disagree.

It only reads what `matching` put together, and speaks of the numbers that stand in the dumps (collective_seq_id).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from prismtrace import Op, ProcessGroup
from prismtrace_flight_recorder.matching import Matched, Placed, is_whole, ranks_text

_MAX_EACH: Final = 20
_SAME_SIZE: Final = (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER)


def explain(job: Matched) -> list[str]:
    """Sentences for a person who looks for the reason of a hang, the most telling first."""
    missing = _gaps(job.dumps, job.world_size)
    notes: list[str] = []
    for number in job.collectives:
        notes += _not_joined(job, job.groups[number])
    for number in job.collectives:
        notes += _disagreements(job, job.groups[number])
    for number in job.collectives:
        notes += _not_complete(job, job.groups[number])
    notes += _messages(job)
    if missing:
        notes.append(f"no dump of ranks {missing}: what they had joined is not known")
    cut = [rank for rank, dump in job.dumps.items() if not is_whole(dump)]
    for rank in cut[:_MAX_EACH]:
        firsts = _firsts(job, rank)
        notes.append(
            f"rank {rank}: the ring buffer begins with record {job.dumps[rank].lost_entries}; first kept: {firsts}"
        )
    if len(cut) > _MAX_EACH:
        notes.append(f"the buffers of {len(cut) - _MAX_EACH} more ranks begin late")
    return notes


def _gaps(present: Iterable[int], world_size: int) -> str:
    """The ranks below `world_size` that are not present, in few words; a dump may claim any size of the world."""
    parts: list[str] = []
    first = 0
    for rank in [*sorted(rank for rank in present if rank < world_size), world_size]:
        if rank > first:
            parts.append(str(first) if rank == first + 1 else f"{first}-{rank - 1}")
        first = rank + 1
    return ", ".join(parts[:16]) + (", ..." if len(parts) > 16 else "")


def _title(group: ProcessGroup) -> str:
    what = f" ({group.description})" if group.description else ""
    return f"group {group.name!r}{what} of ranks {ranks_text(group.ranks)}"


def _firsts(job: Matched, rank: int) -> str:
    first: dict[str, int] = {}
    for each in job.operations[rank]:
        if each.group is not None and not each.is_p2p and each.entry.seq is not None:
            first.setdefault(each.group.name, each.entry.seq)
    return ", ".join(f"{seq} of group {name!r}" for name, seq in list(first.items())[:8]) or "no collective"


def _not_joined(job: Matched, group: ProcessGroup) -> list[str]:
    numbers = job.collectives[group.group_id]
    last: dict[int, int] = {}
    for number, by_rank in numbers.items():
        for rank in by_rank:
            last[rank] = max(last.get(rank, -1), number)
    top = max(numbers)
    behind: dict[int | None, list[int]] = defaultdict(list)
    for rank in group.ranks:
        if rank in job.dumps and last.get(rank, -1) < top:
            behind[last.get(rank)].append(rank)
    notes = []
    for reached, ranks in sorted(behind.items(), key=lambda item: -1 if item[0] is None else item[0]):
        after = [number for number in sorted(numbers) if reached is None or number > reached]
        first = next((number for number in after if not set(numbers[number]) & set(ranks)), None)
        if first is None:
            continue
        those = numbers[first]
        example = next(iter(those.values()))[0]
        verb = "has" if len(ranks) == 1 else "have"
        if reached is not None:
            so_far = f"their last is {reached}" if len(ranks) > 1 else f"its last is {reached}"
        elif all(is_whole(job.dumps[rank]) for rank in ranks):
            so_far = "none in this group so far"
        else:
            so_far = "none in this group that the buffer still holds"
        notes.append(
            f"{_title(group)}: {_ranks(ranks)} {verb} not joined {example.entry.name}, collective_seq_id {first} "
            f"({so_far}); {_ranks(list(those))} {_wait(those)}{_from(example)}"
        )
    return notes


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}"


def _wait(those: dict[int, list[Placed]]) -> str:
    return "joined it" if all(each.is_done for placed in those.values() for each in placed) else "wait there"


def _from(example: Placed) -> str:
    return f", called by {example.entry.frame}" if example.entry.frame else ""


def _not_complete(job: Matched, group: ProcessGroup) -> list[str]:
    """The first collective that every rank has joined and that is not complete everywhere."""
    numbers = job.collectives[group.group_id]
    for number in sorted(numbers):
        by_rank = numbers[number]
        open_ranks = [rank for rank, placed in by_rank.items() if not all(each.is_done for each in placed)]
        if not open_ranks or not set(group.ranks) <= set(by_rank):
            continue
        example = by_rank[open_ranks[0]][0]
        states = {by_rank[rank][0].entry.state or "no state" for rank in open_ranks}
        return [
            f"{_title(group)}: all ranks joined {example.entry.name}, collective_seq_id {number}, and it is not "
            f"complete on {_ranks(open_ranks)} ({', '.join(sorted(states))}){_from(example)}"
        ]
    return []


def _disagreements(job: Matched, group: ProcessGroup) -> list[str]:
    notes: list[str] = []
    for number, by_rank in sorted(job.collectives[group.group_id].items()):
        for place in range(max(map(len, by_rank.values()))):
            those = {rank: placed[place] for rank, placed in by_rank.items() if place < len(placed)}
            reason = _difference(those)
            if reason:
                notes.append(f"{_title(group)}: ranks disagree at collective_seq_id {number}: {reason}")
            if len(notes) >= _MAX_EACH:
                return notes
    return notes


def _difference(those: dict[int, Placed]) -> str:
    ops: dict[str, list[int]] = defaultdict(list)
    for rank, each in those.items():
        ops[each.entry.name].append(rank)
    if len({each.entry.op for each in those.values()}) > 1:
        return "; ".join(f"{_ranks(ranks)} called {name}" for name, ranks in ops.items())
    first = next(iter(those.values()))
    fields = ["dtype", *(["num_in", "num_out"] if first.entry.op in _SAME_SIZE else [])]
    for name in fields:
        values: dict[object, list[int]] = defaultdict(list)
        for rank, each in those.items():
            values[getattr(each.entry, name)].append(rank)
        values.pop(None, None)
        if len(values) > 1:
            what = {"dtype": "element type", "num_in": "elements in", "num_out": "elements out"}[name]
            shown = (
                f"{_ranks(ranks)} {value.name.lower() if hasattr(value, 'name') else value}"
                for value, ranks in values.items()
            )
            return f"{what} of {first.entry.name}: {'; '.join(shown)}"
    return ""


def _messages(job: Matched) -> list[str]:
    """Sends and receives that are not complete, with what the other side says."""
    notes: list[str] = []
    posted: dict[tuple[int, int, int, Op], int] = defaultdict(int)
    for rank, operations in job.operations.items():
        for each in operations:
            if each.is_p2p and each.group is not None and each.peer is not None and each.seq is not None:
                key = (each.group.group_id, rank, each.peer, each.entry.op)
                posted[key] = max(posted[key], each.seq + 1)
    for rank, operations in job.operations.items():
        for each in operations:
            if not each.is_p2p or each.is_done or each.group is None or each.peer is None:
                continue
            if len(notes) >= _MAX_EACH:
                return [*notes, "more sends and receives are not complete"]
            other = Op.RECV if each.entry.op is Op.SEND else Op.SEND
            name = f"{each.entry.op.name.lower()} {'to' if each.entry.op is Op.SEND else 'from'} rank {each.peer}"
            if each.peer not in job.dumps:
                what = "which left no dump"
            elif each.seq is None:
                what = "whether the other side posted its part cannot be told"
            elif posted[each.group.group_id, each.peer, rank, other] > each.seq:
                what = "the other side posted its part"
            else:
                what = f"which has not posted its {other.name.lower()}"
            notes.append(
                f"{_title(each.group)}: rank {rank} has not completed {name} (p2p_seq_id {each.entry.p2p_seq}), "
                f"{what}{_from(each)}"
            )
    return notes
