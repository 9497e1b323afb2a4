"""What a sandbox rank is expected to do, and which recorded values it will be given, read from the graph.

Responsible for turning recorded rows into a rank's expectations; meeting them at run time is emulate.py's.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.graph.errors import UnmatchedUnitError
from prism_sdk.graph.plan import Stream
from prism_sdk.pruning import COMBINED
from prism_sdk.runtime.prefetch import Item, PayloadSequence
from prismtrace import ABSENT, ABSENT32, DType, Op, ReduceOp, TraceReader, UnitKind

OWN = -2  # the rank's own recorded contribution, to tell whether it still contributes the same
_REDUCTIONS = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})
_SIZES = frozenset({DType.INT64, DType.INT32})


@dataclass(frozen=True)
class Expected:
    """One communication of a sandbox rank as recorded."""

    unit_index: int
    step: int
    op: Op
    reduce_op: ReduceOp
    dtype: DType
    group_id: int
    group_ranks: tuple[int, ...]
    seq: int
    peer: int | None
    tag: int
    num_elements_in: int
    num_elements_out: int
    stream: Stream | None  # None: no boundary operation, all members are real
    sources: tuple[int, ...] = ()  # of each payload: group rank, COMBINED or OWN
    send_bytes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # all-to-all: of each virtual member
    first_item: int = 0  # number of its first payload in the rank's sequence
    size_may_differ: bool = False  # bytes whose number the members told each other just before
    alike: NDArray[np.int32] | None = None  # by member: the one whose payload is its own too (ranks of one role)

    def giver(self, member: int) -> int:
        """The member whose payload says what `member` gives."""
        return member if self.alike is None else int(self.alike[member])

    def kind(self) -> tuple[object, ...]:
        """Equal for operations of which one can stand for the other."""
        is_any_size = self.size_may_differ or self.op is Op.ALL_TO_ALL  # of routed tokens, say
        sizes = () if is_any_size else (self.num_elements_in, self.num_elements_out)
        return self.op, self.reduce_op, self.dtype, self.group_id, self.peer, self.tag, *sizes

    def describe(self) -> str:
        peer = "" if self.peer is None else f" with rank {self.peer}"
        reduce_op = f" {self.reduce_op.name.lower()}" if self.reduce_op else ""
        counts = f"{self.num_elements_in} to {self.num_elements_out} elements"
        name, ranks = self.op.name.lower(), _short(self.group_ranks)
        return f"{name}{reduce_op}{peer} of {counts} {self.dtype.text} over ranks {ranks}"


@dataclass(frozen=True)
class Script:
    """All communication of one sandbox rank, in order, and where the steps are that stand for later ones (a round)."""

    rank: int
    expected: tuple[Expected, ...]
    round_begin: int
    round_end: int  # what comes behind the last whole step ends the job
    last_step: int
    sequence: PayloadSequence
    has_values: bool
    steps_per_round: int = 1
    stood_for_by: int | None = None  # the rank whose rows these are, where the recording had no process for it

    @property
    def items_per_round(self) -> int:
        """Payloads from one pass through the round to the next (with those of the operations that end the job)."""
        return len(self.sequence.items) - self.sequence.repeat_from

    def is_of_round(self, step: int) -> bool:
        """Whether a recorded step is one of those that stand for others."""
        return self.last_step - self.steps_per_round < step <= self.last_step

    def repeating(self, num_steps: int) -> Script:
        """The script whose last `num_steps` whole steps stand for those beyond."""
        script = replace(self, steps_per_round=num_steps)
        in_round = [place for place, one in enumerate(self.expected) if script.is_of_round(one.step)]
        begin, end = (in_round[0], in_round[-1] + 1) if in_round else (len(self.expected), len(self.expected))
        given = (one.first_item for one in self.expected[begin:end] if one.stream is not None)
        sequence = replace(self.sequence, repeat_from=next(given, len(self.sequence.items)))
        return replace(script, round_begin=begin, round_end=end, sequence=sequence)

    def kinds(self) -> list[tuple[object, ...]]:
        """What is communicated in each step up to the last; equal where steps can stand for one another."""
        kinds: list[list[object]] = [[] for _ in range(self.last_step + 1)]
        for one in self.expected:
            if one.step <= self.last_step:
                kinds[one.step].append(one.kind())
        return [tuple(kind) for kind in kinds]

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def load(path: Path) -> Script:
        script = pickle.loads(path.read_bytes())
        assert isinstance(script, Script)
        return script


class RecordedValues:
    """Payload digests of what ranks contribute to operations (absent: those of all groups)."""

    def __init__(self, reader: TraceReader, ranks: Sequence[int], group_ids: set[int] | None = None) -> None:
        columns = ["kind", "op", "group_id", "seq", "peer", "tag", "dtype", "payload_in", "splits_in"]
        self.collective: dict[tuple[int, int, int], tuple[bytes | None, tuple[int, ...] | None]] = {}
        self.message: dict[tuple[int, int, int, int, int], bytes | None] = {}
        for rank in ranks:
            table = reader.units(rank, columns=columns)
            kinds, seqs, groups = table.kind.tolist(), table.seq.tolist(), table.group_id.tolist()
            for row, kind in enumerate(kinds):
                if kind == UnitKind.COLLECTIVE:
                    if group_ids is not None and groups[row] not in group_ids:
                        continue
                    splits = table.splits_in_at(row) if table.op[row] == Op.ALL_TO_ALL else None
                    size = DType(int(table.dtype[row])).itemsize_bytes
                    sizes = None if splits is None else tuple(int(n) * size for n in splits)
                    self.collective[groups[row], seqs[row], rank] = (table.payload_in_at(row), sizes)
                elif kind == UnitKind.SEND:
                    key = (groups[row], rank, int(table.peer[row]), _tag(table.tag[row]), seqs[row])
                    self.message[key] = table.payload_in_at(row)


class AlikeMembers:
    """Which members of a group gave the same: those of one role, in a trace that was recorded by roles."""

    def __init__(self, reader: TraceReader) -> None:
        self._reader = reader
        self._role_of: NDArray[np.int64] | None = None
        self._known: dict[tuple[int, int], NDArray[np.int32]] = {}
        if is_by_roles(reader):
            role_of = -1 - np.arange(reader.world_size, dtype=np.int64)
            for number, ranks in enumerate(reader.roles.values()):
                role_of[list(ranks)] = number
            self._role_of = role_of

    def of(self, group_id: int, rank: int) -> NDArray[np.int32] | None:
        """For each member the first one that gave the same, `rank` standing for itself; None where none are alike."""
        if self._role_of is None:
            return None
        found = self._known.get((group_id, rank))
        if found is None:
            ranks = np.array(self._reader.groups[group_id].ranks, np.int64)
            keys = np.where(ranks == rank, np.iinfo(np.int64).max, self._role_of[ranks])
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            found = self._known[group_id, rank] = first[inverse.reshape(-1)].astype(np.int32)
        return found

    def givers(self, group_id: int, rank: int) -> list[int]:
        """The members whose payloads say what all others than `rank` gave."""
        ranks = self._reader.groups[group_id].ranks
        alike = self.of(group_id, rank)
        members = range(len(ranks)) if alike is None else np.unique(alike).tolist()
        return [member for member in members if ranks[member] != rank]


def is_by_roles(reader: TraceReader) -> bool:
    """Whether of most ranks only those of their role ran when the trace was recorded."""
    return "roles.representatives" in reader.metadata


def is_grown(reader: TraceReader) -> bool:
    """Whether `prism expand` gave the job another number of replicas than ran."""
    return "expand.source" in reader.metadata


def _fits(one: Expected, known: Sequence[Item]) -> bool:
    """Whether recorded shards have the size that they have among another number of replicas."""
    size = one.dtype.itemsize_bytes
    if one.op is Op.REDUCE_SCATTER:
        return not known or known[0].num_bytes == one.num_elements_out * size
    return one.op is not Op.ALL_GATHER or all(item.num_bytes == one.num_elements_in * size for item in known)


def _contributors(
    reader: TraceReader, sandbox: Sequence[int], alike: AlikeMembers
) -> tuple[set[int], list[int]]:  # fmt: skip
    """The groups whose members' own contributions a sandbox is given, and the ranks that contribute or send to it.

    Reductions are given as results, which the sandbox's own rows have; so most ranks of a large job are not read.
    """
    group_ids: set[int] = set()
    ranks: set[int] = set()
    for rank in sandbox:
        table = reader.units(rank, columns=["kind", "op", "group_id", "peer"])
        kind, op, peer = np.asarray(table.kind), np.asarray(table.op), np.asarray(table.peer)
        is_communication = (kind >= UnitKind.COLLECTIVE) & (kind <= UnitKind.RECV)
        if not set(np.unique(np.asarray(table.group_id)[is_communication]).tolist()) <= reader.groups.keys():
            raise UnmatchedUnitError(f"{reader.path}: rank {rank} has communication that names no group: nobody knows "
                                     "whom it meets", hint="record the job with Prism")  # fmt: skip
        given = (kind == UnitKind.COLLECTIVE) & ~np.isin(op, [int(o) for o in (*_REDUCTIONS, Op.BARRIER)])
        rooted = given & np.isin(op, [int(Op.BROADCAST), int(Op.SCATTER)])
        ranks.update(np.unique(peer[rooted | (kind == UnitKind.RECV)]).tolist())
        group_ids.update(np.unique(np.asarray(table.group_id)[given]).tolist())
        for group_id in np.unique(np.asarray(table.group_id)[given & ~rooted]).tolist():
            members = reader.groups[group_id].ranks
            ranks.update(members[member] for member in alike.givers(group_id, rank))
    return group_ids, sorted(ranks & set(reader.ranks))


def _tag(value: Any) -> int:
    return 0 if value == ABSENT else int(value)


def read_scripts(reader: TraceReader, sandbox: Sequence[int]) -> dict[int, Script]:
    """The script of each sandbox rank. Payloads that were not recorded leave `has_values` False."""
    alike = AlikeMembers(reader)
    group_ids, ranks = _contributors(reader, sandbox, alike)
    values = RecordedValues(reader, ranks, group_ids)
    return {rank: _script(reader, rank, frozenset(sandbox), values, alike) for rank in sandbox}


def _script(
    reader: TraceReader, rank: int, sandbox: frozenset[int], values: RecordedValues, alike: AlikeMembers
) -> Script:  # fmt: skip
    table = reader.units(rank)
    steps = reader.steps(rank)
    last_step = int(steps.step[-1]) if len(steps) else 0
    expected: list[Expected] = []
    items: list[Item] = []
    complete = True
    previous: dict[tuple[Any, ...], Expected] = {}  # of each group, and of each direction between two ranks
    for row, kind in enumerate(table.kind.tolist()):
        if kind not in (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV):
            continue
        one = _expected(reader, table, row, rank, sandbox)
        if one.stream is not None:
            one = replace(one, alike=alike.of(one.group_id, rank))
            sources, digests, sizes = _sources(one, table, row, rank, values, alike)
            complete &= None not in digests
            known = [Item(d, reader.payload_bytes(d)) for d in digests if d is not None]
            if len(known) < len(digests) or (is_grown(reader) and not _fits(one, known)):
                complete, sources, known = False, (), []
            one = replace(one, sources=sources, send_bytes=sizes, first_item=len(items))
            items += known
        line = (one.group_id, one.op, one.peer) if one.op in (Op.SEND, Op.RECV) else (one.group_id,)
        if _is_sized_by(previous.get(line), one):
            one = replace(one, size_may_differ=True)
        previous[line] = one
        expected.append(one)
    sequence = PayloadSequence(tuple(items), len(items))
    script = Script(rank, tuple(expected), len(expected), len(expected), last_step, sequence, complete)
    return script.repeating(1)


def _expected(reader: TraceReader, table: Any, row: int, rank: int, sandbox: frozenset[int]) -> Expected:
    op = Op(int(table.op[row]))
    group_id = int(table.group_id[row])
    ranks = reader.groups[group_id].ranks
    peer = None if table.peer[row] == ABSENT32 else int(table.peer[row])
    tag = _tag(table.tag[row])
    kind = int(table.kind[row])
    stream: Stream | None = None
    if kind == UnitKind.COLLECTIVE:
        if not sandbox.issuperset(ranks):
            stream = Stream(kind, group_id)
    elif peer not in sandbox:
        source, destination = (rank, peer) if op is Op.SEND else (peer, rank)
        stream = Stream(kind, group_id, source or 0, destination or 0, int(table.tag[row]))
    count_in, count_out = int(table.num_elements_in[row]), int(table.num_elements_out[row])
    return Expected(
        unit_index=table.first_index + row, step=int(table.step[row]), op=op,
        reduce_op=ReduceOp(int(table.reduce_op[row])), dtype=DType(int(table.dtype[row])), group_id=group_id,
        group_ranks=ranks, seq=int(table.seq[row]), peer=peer, tag=tag, num_elements_in=max(count_in, 0),
        num_elements_out=max(count_out, 0), stream=stream,
    )  # fmt: skip


def _sources(
    one: Expected, table: Any, row: int, rank: int, values: RecordedValues, alike: AlikeMembers
) -> tuple[tuple[int, ...], list[bytes | None], dict[int, tuple[int, ...]]]:
    """Which payloads the operation needs: (source, digest) pairs, and the splits of an all-to-all."""
    ranks = one.group_ranks
    if one.op is Op.RECV:
        return (0,), [values.message.get((one.group_id, one.peer or 0, rank, one.tag, one.seq))], {}
    if one.op in (Op.SEND, Op.BARRIER):
        return (), [], {}
    if one.op in _REDUCTIONS:
        if one.op is Op.REDUCE and one.peer != rank:
            return (), [], {}
        own = table.payload_in_at(row)
        sources: tuple[int, ...] = (COMBINED,) if own is None else (COMBINED, OWN)
        return sources, [table.payload_out_at(row), *([] if own is None else [own])], {}
    if one.op in (Op.BROADCAST, Op.SCATTER):
        members = [] if one.peer == rank else [ranks.index(one.peer or 0)]
    elif one.op is Op.GATHER and one.peer != rank:
        members = []
    else:
        members = alike.givers(one.group_id, rank)
    digests, sizes = [], {}
    for member in members:
        digest, splits = values.collective.get((one.group_id, one.seq, ranks[member]), (None, None))
        digests.append(digest)
        if splits is not None:
            sizes[member] = splits
    return tuple(map(one.giver, members)), digests, sizes


def _is_sized_by(before: Expected | None, one: Expected) -> bool:
    """Whether the operation carries as many bytes as the one before it said, as object collectives do.

    Pickled objects have another size where they hold a path, a time or a loss, so both must be met whatever the size.
    """
    if before is None or before.dtype not in _SIZES or before.op in _REDUCTIONS:
        return False
    return one.dtype is DType.UINT8 and one.op not in _REDUCTIONS and one.op is not Op.ALL_TO_ALL


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:16])) + (",..." if len(ranks) > 16 else "")
