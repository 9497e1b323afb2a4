"""Grows or shrinks a recorded job along data parallelism: more replicas of what was recorded.

Responsible for the new numbers of ranks, groups and elements; it changes no times.  The result is a trace by roles: one
rank of each kind stands for its copies, so that few ranks run when it is calibrated.

Ranks are numbered on a grid: rank = high * (stride * size) + index * stride + low, where index counts replicas.  Groups
either hold all replicas in one pattern, and grow, or lie inside a block of neighbouring replicas (expert parallelism
folded into data parallelism), and are copied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.bounds import MAX_RANKS
from prism_sdk.errors import UnsupportedError, UsageError
from prism_sdk.graph.facts import facts_of_copies
from prism_sdk.graph.shares import shared_anew
from prism_sdk.runtime.roles.layout import Families, Family, GroupFact
from prism_sdk.runtime.roles.mapping import DIFFERING, Mapper
from prismtrace import Op, ProcessGroup, TableKind, TraceReader, TraceWriter, add_alike
from prismtrace.alike import alike_ranks
from prismtrace.model import ABSENT32, COLUMNS

Int64Array = NDArray[np.int64]

_KEPT = frozenset(spec.name for specs in COLUMNS.values() for spec in specs) - frozenset(DIFFERING)


@dataclass(frozen=True)
class Axis:
    """The replicas of a job on the grid of its ranks. `block`: so many neighbours are copied together."""

    size: int
    stride: int
    block: int = 1

    def index(self, ranks: Any) -> Any:
        """Which replica each rank belongs to."""
        return ranks // self.stride % self.size

    def renumbered(self, ranks: Any, index: Any, size: int) -> Any:
        """The numbers of the ranks at other indexes of an axis of another size."""
        return ranks // (self.stride * self.size) * (self.stride * size) + index * self.stride + ranks % self.stride


@dataclass(frozen=True)
class GrowReport:
    """What `grow` did."""

    num_replicas_before: int
    num_replicas: int
    world_size: int
    num_groups: int


def grow(source: Path, output: Path, *, num_replicas: int, overwrite: bool = False) -> GrowReport:
    """Write the job of `source` with another number of data-parallel replicas.

    Replica i does what replica i modulo the old number did.  In groups that grow, what a rank contributes to an
    all-gather of floating-point numbers and receives from a reduce-scatter shrinks, as shards do.

    Raises UsageError where the ranks form no such grid, and UnsupportedError for operations that cannot be grown.
    """
    with TraceReader(source) as reader:
        old = _families(reader)
        axis = _axis(old, str(source))
        if num_replicas % axis.block or num_replicas < axis.block:
            raise UsageError(f"{num_replicas} replicas cannot be made: {source} has blocks of {axis.block} that belong "
                             "together", hint=f"give a multiple of {axis.block}")  # fmt: skip
        num_ranks = reader.world_size // axis.size * num_replicas
        if num_ranks > MAX_RANKS:
            raise UsageError(f"{num_replicas} replicas would make {num_ranks} ranks; at most {MAX_RANKS} are supported")
        grower = _Grower(reader, old, axis, num_replicas)
        facts = {
            **grower.facts(),
            "expand.source": source.name,
            "expand.replicas": f"{axis.size}:{num_replicas}",
            **grower.roles(),
        }
        with TraceWriter(
            output, graph_kind=reader.graph_kind, world_size=grower.world_size, metadata=facts, overwrite=overwrite,
            atomic=True,
        ) as writer:  # fmt: skip
            grower.write(writer)
        return GrowReport(axis.size, num_replicas, grower.world_size, sum(1 for _ in grower.new.groups()))


def _families(reader: TraceReader) -> Families:
    families = Families(reader.world_size)
    groups = reader.groups.values()
    for group in sorted(groups, key=lambda g: (int(g.name) if g.name.isdigit() else -1, g.name, g.ranks)):
        families.add(GroupFact(group.name, group.description, group.backend, group.ranks))
    return families


def _axis(families: Families, source: str) -> Axis:
    """The axis of replicas: along the largest groups that say they are replicas, else along all ranks.

    Groups of replicas and something else, as of tensor and data parallelism, are larger and say it only without others.
    """
    world = families.world_size
    replicas = [one for one in families.all if one.kind == "replicas" and one.size > 1]
    named = [one for one in replicas if not one.is_fused] or [one for one in replicas if one.size < world]
    others = [one for one in families.all if one.kind != "replicas" and 1 < one.size < world]
    if not named:
        if others:
            raise UsageError(f"{source} has no groups that say they are data parallel",
                             hint="their description has to have a word such as dp, data or replicate")  # fmt: skip
        return Axis(world, 1)
    family = max(named, key=lambda one: one.size)
    first = np.array(family.groups[0].ranks)
    strides = np.unique(np.diff(first))
    axis = Axis(family.size, int(strides[0]) if len(strides) else 1)
    ranks = np.arange(world)
    on_grid = len(strides) == 1 and world % (axis.size * axis.stride) == 0
    if not on_grid or (family.position_of != axis.index(ranks)).any() or (family.group_of < 0).any():
        raise UsageError(f"the groups {family.label} of {source} do not lie on a grid of ranks")
    for block in range(1, axis.size + 1):
        if axis.size % block == 0:
            whole = Axis(axis.size, axis.stride, block)
            if all(_fits(one, whole) for one in families.all):
                return whole
    raise UsageError(f"{source} does not consist of replicas: some groups hold an irregular part of them")


def _fits(family: Family, axis: Axis) -> bool:
    members = _members(family)
    return _grows(family, members, axis) or bool(_inside(members, axis).all())


def _grows(family: Family, members: Int64Array, axis: Axis) -> bool:
    """Whether the groups hold all replicas; those of model parallelism never grow."""
    return family.kind != "model" and bool(_spans(members, axis).all())


def _members(family: Family) -> Int64Array:
    return np.array([fact.ranks for fact in family.groups], np.int64)


def _inside(members: Int64Array, axis: Axis) -> NDArray[np.bool_]:
    """Which groups lie in one block of replicas."""
    block = axis.index(members) // axis.block
    return np.asarray((block == block[:, :1]).all(axis=1))


def _spans(members: Int64Array, axis: Axis) -> NDArray[np.bool_]:
    """Which groups hold the same places of every block."""
    num_blocks = axis.size // axis.block
    if members.shape[1] % num_blocks:
        return np.zeros(len(members), np.bool_)
    index = axis.index(members)
    place = axis.renumbered(members, index % axis.block, axis.block)
    order = np.lexsort((place, index // axis.block), axis=1)
    blocks = np.take_along_axis(index // axis.block, order, 1).reshape(len(members), num_blocks, -1)
    places = np.take_along_axis(place, order, 1).reshape(len(members), num_blocks, -1)
    is_each = (blocks == np.arange(num_blocks)[None, :, None]).all(axis=(1, 2))
    return np.asarray(is_each & (places == places[:, :1]).all(axis=(1, 2)))


class _Grower:
    def __init__(self, reader: TraceReader, old: Families, axis: Axis, size: int) -> None:
        self._reader, self._old, self._axis, self._size = reader, old, axis, size
        self.world_size = old.world_size // axis.size * size
        ranks = np.arange(self.world_size)
        grown = Axis(size, axis.stride, axis.block)
        index = grown.index(ranks)
        num_blocks = axis.size // axis.block
        like = index // axis.block % num_blocks * axis.block + index % axis.block
        self._template = grown.renumbered(ranks, like, axis.size)  # by new rank: the old rank that it does as
        self.new = Families(self.world_size)
        self._grows: dict[int, bool] = {}
        self._family_of: dict[int, tuple[Family, Family]] = {}
        self._old_group: dict[int, int] = {}  # by new group the old one that it grew from
        self._num_groups = 0
        self._numbered = all(fact.name.isdigit() for fact in old.groups())  # as torch names groups: by their number
        for family in old.all:
            self._grow_family(family)

    def _grow_family(self, family: Family) -> None:
        members, axis = _members(family), self._axis
        grows = _grows(family, members, axis)
        made = Families(self.world_size)
        recorded = self._recorded(family)
        old_ids = {(group.name, group.ranks): group.group_id for group in recorded}
        found: list[tuple[GroupFact, Int64Array]] = []
        for fact, ranks in zip(family.groups, members, strict=True):
            found += [(fact, one) for one in ([self._spanning(ranks)] if grows else self._copies(ranks))]
        firsts = [fact.ranks[0] for fact in family.groups]
        if firsts == sorted(firsts):  # the order in which a program that makes them in this order would
            found.sort(key=lambda item: int(item[1][0]))
        for fact, one in found:
            self._num_groups += 1
            name = str(self._num_groups - 1) if self._numbered else f"{fact.name}@{one[0]}"
            grown = GroupFact(name, fact.description, fact.backend, tuple(one.tolist()))
            self._old_group[grown.group_id] = old_ids[fact.name, fact.ranks]
            made.add(grown)
        if len(made.all) != 1:
            raise UnsupportedError(f"groups {family.label} that overlap once they are grown")
        new = made.all[0]
        self.new.adopt(new)
        for group in recorded:
            self._family_of[group.group_id] = (family, new)
        self._grows[id(new)] = grows

    def _recorded(self, family: Family) -> list[ProcessGroup]:
        facts = {(fact.name, fact.ranks) for fact in family.groups}
        return [group for group in self._reader.groups.values() if (group.name, group.ranks) in facts]

    def _spanning(self, ranks: Int64Array) -> Int64Array:
        axis = self._axis
        index = axis.index(ranks)
        first = ranks[index < axis.block]
        blocks = np.arange(self._size // axis.block)
        found = [axis.renumbered(first, block * axis.block + axis.index(first), self._size) for block in blocks]
        return np.sort(np.concatenate(found))

    def _copies(self, ranks: Int64Array) -> Iterator[Int64Array]:
        axis = self._axis
        index, num_blocks = axis.index(ranks), axis.size // axis.block
        for block in range(int(index[0]) // axis.block, self._size // axis.block, num_blocks):
            yield axis.renumbered(ranks, block * axis.block + index % axis.block, self._size)

    # -- rows -------------------------------------------------------------------------------------------------------

    def write(self, writer: TraceWriter) -> None:
        reader = self._reader
        writer.add_groups(
            ProcessGroup(fact.group_id, fact.name, fact.description, fact.backend, fact.ranks)
            for fact in self.new.groups()
        )
        for digest in reader.payload_digests:
            writer.add_payload(reader.payload(digest))
        mapper = Mapper(self.new)
        for rank, copies in self._copied:
            self._write(writer, rank, copies, mapper)

    def facts(self) -> dict[str, str]:
        """The metadata of the new job; of ranks it has what is said of those that stand for others."""
        standing = [(self._here(rank), rank) for rank, _ in self._copied]
        return facts_of_copies(self._reader.metadata, ranks=standing, groups=self._old_group.items())

    def roles(self) -> dict[str, str]:
        """What the metadata says of who stands for whom: of each kind of rank one, by its new number."""
        standing = sorted(self._here(rank) for rank, _ in self._copied)
        return {
            "roles.origin": f"{len(standing)} ranks, grown", "roles.num_roles": str(len(standing)),
            "roles.representatives": json.dumps(standing), "roles.samples": "[]", "roles.disagreements": "[]",
        }  # fmt: skip

    @cached_property
    def _copied(self) -> list[tuple[int, list[int]]]:
        """The ranks of which rows are taken, and the ranks of the new job that have them."""
        found = []
        for ranks in self._classes():
            first = ranks[0]
            if self._axis.index(first) >= self._size:
                if len(ranks) == 1:
                    continue
                raise UsageError(
                    f"rank {first} speaks for others and is not in the first {self._size} replicas\n"
                    f"  keep at least {int(self._axis.index(first)) + 1}, or record the smaller job"
                )
            copies = np.flatnonzero(np.isin(self._template, ranks)).tolist()
            if copies:
                found.append((first, copies))
        return found

    def _classes(self) -> Iterator[Sequence[int]]:
        """Ranks with equal rows, but for what follows from their numbers."""
        together, alone = alike_ranks(self._reader, self._reader.ranks)
        for alike in together:
            if alike.have(_KEPT):
                yield alike.ranks
            else:
                alone += alike.ranks
        for rank in sorted(alone):
            yield (rank,)

    def _here(self, rank: int) -> int:
        """The number of an old rank in the new job."""
        return int(self._axis.renumbered(np.int64(rank), self._axis.index(np.int64(rank)), self._size))

    def _write(self, writer: TraceWriter, rank: int, ranks: Sequence[int], mapper: Mapper) -> None:
        units = self._reader.units(rank)
        changed = self._translated(units, rank)
        role = int.from_bytes(hashlib.blake2b(f"{rank} {ranks}".encode(), digest_size=8).digest(), "little") or 1
        replaced = mapper.columns(_Units(units, changed), self._here(rank), ranks)
        add_alike(writer, ranks, {**units.columns(), **changed}, role=role, replaced=replaced)
        for kind, table in (
            (TableKind.STEPS, self._reader.steps(rank)), (TableKind.SCALARS, self._reader.scalars(rank)),
            (TableKind.EVENTS, self._reader.events(rank)), (TableKind.TRACKS, self._reader.tracks(rank)),
        ):  # fmt: skip
            if len(table):
                add_alike(writer, ranks, table, role=role, table=kind)

    def _translated(self, units: Any, rank: int) -> dict[str, NDArray[Any]]:
        """Group ids, peers and counts of one rank's rows in the new job."""
        axis, here = self._axis, self._here(rank)
        groups = units.group_id.copy()
        peers = units.peer.copy()
        known = peers != ABSENT32
        peers[known] = axis.renumbered(peers[known].astype(np.int64), axis.index(peers[known].astype(np.int64)),
                                       self._size)  # fmt: skip
        counts = {name: units[name].copy() for name in ("num_elements_in", "num_elements_out")}
        for group_id in np.unique(units.group_id).tolist():
            if group_id == 0:
                continue
            old, new = self._family_of[group_id]
            fact = new.group_with(here)
            assert fact is not None
            rows = np.flatnonzero(units.group_id == group_id)
            groups[rows] = fact.group_id
            if self._grows[id(new)]:
                _rescale(units, rows, counts, before=old.size, after=new.size)
        return {"group_id": groups, "peer": peers, **counts}


class _Units:
    """A table of units, some columns of which have other values."""

    def __init__(self, units: Any, changed: dict[str, Any]) -> None:
        self._units, self._changed = units, changed

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, name: str) -> Any:
        return self._changed[name] if name in self._changed else self._units[name]

    def __len__(self) -> int:
        return len(self._units)


def _rescale(units: Any, rows: Int64Array, counts: dict[str, Int64Array], *, before: int, after: int) -> None:
    """Element counts of operations in a group of `after` ranks in place of `before`."""
    op, given, got = units.op[rows], counts["num_elements_in"], counts["num_elements_out"]
    if (op == Op.ALL_TO_ALL).any():
        raise UnsupportedError("an all-to-all over data-parallel replicas, whose splits would be others")
    given[rows], got[rows] = shared_anew(op, units.dtype[rows], given[rows], got[rows], before=before, after=after)
