"""Reads a job whose ranks are alike: the graph holds one rank of each class, and a ``Fold`` says whom it stands for.

It calculates no figure, and gives up (None) where anything is unusual: then all ranks are read one by one.

Ranks that a file stores as members of one role (``prismtrace.alike``) have the same rows but for groups, peers and
sizes. Those of equal sizes that also meet alike ranks at the same places of their programs, as often, are a class
(``prism_sdk.graph.folding.refined_classes``): with equal times all that is found of them is equal.

A *lane* is what a rank calls again and again: a group whose collectives it takes part in, or the messages of one tag to
or from one peer in a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prism_sdk.graph import GraphError, JobGraph
from prism_sdk.graph.folding import mixed, refined_classes
from prism_sdk.graph.job import COLUMN_TYPES, read_columns
from prismtrace import ABSENT32, Op, ProcessGroup, TableKind, TraceReader, UnitKind
from prismtrace.alike import Alike, alike_ranks
from prismtrace.members import OfRanks
from prismtrace.rankchecks import Members
from prismtrace.sharing import Replaced

__all__ = ["FIRST_GROUP", "Fold", "load_folded"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

#: Groups of a folded graph are classes of lanes: their id is this and the number of the class.
FIRST_GROUP: Final = 2**62
_ROOTED: Final = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
#: Ranks that differ in one of these columns do not have the same program.
_PROGRAM: Final = frozenset({"kind", "step", "op", "seq", "tag"})
_COLLECTIVE, _SEND, _RECV = range(3)


@dataclass(frozen=True, kw_only=True)
class Fold:
    """R ranks, of which a folded graph with N rows holds some. A pair is a rank with one of its lanes."""

    #: All ranks, rising; and the position in the folded graph of the one that stands for each.
    ranks: tuple[int, ...]
    place: Int64Array
    #: All groups of the trace, by their own ids.
    groups: Mapping[int, ProcessGroup]
    #: (R + 1,) the pairs of rank p are ``pair_offsets[p]:pair_offsets[p + 1]``; (P,) the lane of each.
    pair_offsets: Int64Array = field(repr=False)
    lane_of_pair: Int64Array = field(repr=False)
    #: (L,) of each lane: its group's id, its class, and whether it is of messages.
    group_of_lane: UInt64Array = field(repr=False)
    class_of_lane: Int64Array = field(repr=False)
    is_message: npt.NDArray[np.bool_] = field(repr=False)
    #: (N,) which pair of its rank a row of the folded graph belongs to, -1 where it communicates nothing.
    pair_of_row: Int64Array = field(repr=False)
    #: (P,) how many members of a lane are alike in it.
    num_alike: Int64Array = field(repr=False)
    #: (P,) pairs by lane, then in the order in which an event has its members; of lane l from ``lane_offsets[l]`` on.
    pairs_by_lane: Int64Array = field(repr=False)
    lane_offsets: Int64Array = field(repr=False)
    #: (N_P + 1,) where the rows of each rank of the folded graph begin.
    row_offsets: Int64Array = field(repr=False)

    @cached_property
    def offsets(self) -> Int64Array:
        """(R + 1,) where the rows of each rank would begin if all were there."""
        sizes = np.diff(self.row_offsets)[self.place]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def counts(self) -> Int64Array:
        """How many ranks each rank of the folded graph stands for."""
        return np.bincount(self.place, minlength=len(self.row_offsets) - 1)

    @cached_property
    def first_position(self) -> Int64Array:
        """The position among all ranks of each rank of the folded graph: the first of its class."""
        return np.unique(self.place, return_index=True)[1]

    @cached_property
    def pair_position(self) -> Int64Array:
        """(P,) the position of the rank of each pair."""
        return np.repeat(np.arange(len(self.ranks)), np.diff(self.pair_offsets))

    def all_rows(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What the rows of all ranks have, from what those of the folded graph have."""
        sizes = np.diff(self.offsets)
        begins = np.repeat(self.row_offsets[self.place] - self.offsets[:-1], sizes)
        whole: npt.NDArray[Any] = values[begins + np.arange(len(begins))]
        return whole

    def rows_of_kept(self) -> Int64Array:
        """(N,) the row that each row of the folded graph would have if all ranks were there."""
        sizes = np.diff(self.row_offsets)
        begins = np.repeat(self.offsets[self.first_position] - self.row_offsets[:-1], sizes)
        return np.asarray(begins + np.arange(len(begins)))

    def folded_row(self, row: int) -> tuple[int, int]:
        """The position of the rank of a row among the rows of all ranks, and the row that stands for it."""
        position = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return position, int(row - self.offsets[position] + self.row_offsets[self.place[position]])

    def lane(self, position: int, row: int) -> int:
        """The lane in which a rank does what a row of the folded graph says."""
        first = self.pair_offsets[self.first_position[self.place[position]]]
        return int(self.lane_of_pair[self.pair_of_row[row] - first + self.pair_offsets[position]])

    def pairs(self, lane: int) -> Int64Array:
        """The pairs of a lane, in the order in which an event has its members."""
        return self.pairs_by_lane[self.lane_offsets[lane] : self.lane_offsets[lane + 1]]

    @cached_property
    def num_lanes(self) -> Int64Array:
        """How many lanes each class of lanes has."""
        return np.bincount(self.class_of_lane)

    def classes_of_groups(self) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """By rising group: its id, and how many lanes of which class it has."""
        keys = np.stack([self.group_of_lane, self.class_of_lane.astype(np.uint64)], axis=1)
        found, counts = np.unique(keys, axis=0, return_counts=True)
        by_group: dict[int, list[tuple[int, int]]] = {}
        for (group_id, number), count in zip(found.tolist(), counts.tolist(), strict=True):
            by_group.setdefault(group_id, []).append((number, count))
        return [(group_id, tuple(numbers)) for group_id, numbers in by_group.items()]


@dataclass(frozen=True)
class _Program:
    """What some ranks have in common. L lanes, K ranks; a lane's `hash` is equal for all ranks that are in it."""

    ranks: Int64Array
    #: (K,) equal for ranks with the same values in all rows, but for groups and peers.
    own_class: Int64Array
    lane_of_row: Int64Array
    kind: Int64Array
    hash: UInt64Array
    group_id: UInt64Array
    #: (L, K) which ranks were the roots of its collectives, as a number.
    roots: UInt64Array


def load_folded(reader: TraceReader, *, ranks: Sequence[int], steps: range | None) -> tuple[JobGraph, Fold] | None:
    """The graph of one rank of each class, and whom it stands for.

    Args:
        reader: the trace.
        ranks: of the trace, rising; each has units.
        steps: only these.

    Returns:
        None where few ranks are alike, or anything about them is unusual or wrong: `JobGraph.load` says what.
    """
    programs = _programs(reader, ranks, steps)
    return None if programs is None else _folded(reader, np.array(ranks, dtype=np.int64), steps, programs)


def _programs(reader: TraceReader, ranks: Sequence[int], steps: range | None) -> list[_Program] | None:
    together, alone = alike_ranks(reader, ranks)
    members = Members(reader)
    programs: list[_Program] = []
    for alike in [*together, *(Alike(reader, (rank,)) for rank in alone)]:
        if 2 * (len(programs) + len(alone)) > len(ranks):
            return None
        found = _program(reader, alike, steps, members)
        if found is None:
            return None
        programs.append(found)
    return programs


def _program(reader: TraceReader, alike: Alike, steps: range | None, members: Members) -> _Program | None:
    num_ranks = len(alike.ranks)
    table = reader.units(alike.ranks[0], steps=steps)
    if len(table) and int(table.row_index[-1]) - table.first_index != len(table) - 1:
        return None
    ranks = np.array(alike.ranks, dtype=np.int64)
    columns: Mapping[str, Any] = table.columns()
    replaced: Mapping[str, Replaced] = {}
    own: list[Int64Array] = [np.zeros((1, num_ranks), dtype=np.int64)]
    if num_ranks > 1:
        of_units = alike.replaced(TableKind.UNITS, table.row_index, columns)
        if of_units is None or of_units[1].keys() & _PROGRAM:
            return None
        columns, replaced = of_units
        own += [values for name, (_, values) in replaced.items() if name not in ("group_id", "peer")]
        if reader.num_steps(alike.ranks[0]):
            of_steps = reader.steps(alike.ranks[0])
            told = alike.replaced(TableKind.STEPS, of_steps.row_index, of_steps.columns())
            if told is None:
                return None
            own += [values for _, values in told[1].values()]
    groups, peers = (
        OfRanks.of(np.asarray(columns.get(name, np.full(len(table), absent))), num_ranks, replaced.get(name))
        for name, absent in (("group_id", 0), ("peer", ABSENT32))
    )  # fmt: skip
    if not members.have(ranks, groups, peers, world=reader.world_size):
        return None
    own_class = np.unique(np.concatenate(own), axis=1, return_inverse=True)[1].reshape(-1)
    return _with_lanes(ranks, own_class, read_columns(table, ("kind", "op", "seq", "tag")), groups, peers)


def _with_lanes(
    ranks: Int64Array, own_class: Int64Array, columns: Mapping[str, npt.NDArray[Any]], groups: OfRanks, peers: OfRanks
) -> _Program:
    kind, tag = columns["kind"], columns["tag"]
    rows = np.flatnonzero((kind >= UnitKind.COLLECTIVE) & (kind <= UnitKind.RECV))
    what = np.where(kind[rows] == UnitKind.SEND, _SEND, np.where(kind[rows] == UnitKind.RECV, _RECV, _COLLECTIVE))
    is_message = what != _COLLECTIVE
    keys = np.stack([what, groups.codes[rows], np.where(is_message, peers.codes[rows], 0),
                     np.where(is_message, tag[rows], 0)], axis=1)  # fmt: skip
    _, first, lane = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    lane = lane.reshape(-1)
    lane_of_row = np.full(len(kind), -1, dtype=np.int64)
    lane_of_row[rows] = lane
    what = what[first]
    group_id = groups.values[groups.codes[rows[first]]].view(np.uint64)
    peer = peers.values[peers.codes[rows[first]]]
    source = np.where(what[:, None] == _COLLECTIVE, -1, np.where(what[:, None] == _SEND, ranks, peer))
    destination = np.where(what[:, None] == _COLLECTIVE, -1, np.where(what[:, None] == _SEND, peer, ranks))
    tags = np.where(what == _COLLECTIVE, 0, tag[rows[first]])[:, None]
    number = mixed(mixed(mixed(mixed(group_id) + _unsigned(source)) + _unsigned(destination)) + _unsigned(tags))
    roots = np.zeros(group_id.shape, dtype=np.uint64)
    has_root = np.flatnonzero(~is_message & np.isin(columns["op"][rows], _ROOTED))
    which = peers.values[peers.codes[rows[has_root]]]
    seq = columns["seq"][rows[has_root]][:, None]
    np.add.at(roots, lane[has_root], mixed(mixed(_unsigned(seq)) + _unsigned(which)))
    return _Program(ranks, own_class, lane_of_row, what, number, group_id, roots)


def _unsigned(values: npt.NDArray[Any]) -> UInt64Array:
    return values.astype(np.int64).view(np.uint64)


def _folded(
    reader: TraceReader, ranks: Int64Array, steps: range | None, programs: list[_Program]
) -> tuple[JobGraph, Fold] | None:
    positions = [np.searchsorted(ranks, program.ranks) for program in programs]
    keys = np.zeros((len(ranks), 2), dtype=np.int64)
    for number, (program, at) in enumerate(zip(programs, positions, strict=True)):
        keys[at] = np.stack([np.full(len(at), number), program.own_class], axis=1)
    of_pair = np.concatenate([np.repeat(at, len(p.kind)) for p, at in zip(programs, positions, strict=True)])
    order = np.argsort(of_pair, kind="stable")
    of_pair = of_pair[order]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(of_pair, minlength=len(ranks)))]).astype(np.int64)
    kind = np.concatenate([np.tile(p.kind, len(p.ranks)) for p in programs])[order]
    hashes, group_id, roots = (np.concatenate([getattr(p, name).T.reshape(-1) for p in programs])[order]
                               for name in ("hash", "group_id", "roots"))  # fmt: skip
    _, first, lane = np.unique(hashes, return_index=True, return_inverse=True)
    lane, group_of_lane, is_message = lane.reshape(-1), group_id[first], kind[first] != _COLLECTIVE
    sizes = np.bincount(lane, minlength=len(first))
    if (roots != roots[first][lane]).any():
        return None
    chosen = set(ranks.tolist())
    members = {number: set(reader.groups[number].ranks) for number in np.unique(group_of_lane).tolist()}
    num_here = {number: len(all_of & chosen) for number, all_of in members.items()}
    expected = np.array([num_here[number] for number in group_of_lane.tolist()], dtype=np.int64)
    if (~is_message & (sizes != expected)).any():
        return None  # members that never come
    is_whole = sizes == np.array([len(members[number]) for number in group_of_lane.tolist()], dtype=np.int64)
    fixed = mixed(is_message * 2 + is_whole * np.uint64(1))
    color, lane_color = refined_classes(keys, offsets=offsets, lane=lane, fixed=fixed, is_counted=True)
    kept = np.unique(color, return_index=True)[1]
    if 2 * len(kept) > len(ranks):
        return None
    place = np.searchsorted(np.sort(kept), kept[color])
    class_of_lane = np.unique(lane_color, return_inverse=True)[1].reshape(-1)
    local = np.arange(len(of_pair)) - offsets[of_pair]
    alike = mixed(mixed(_unsigned(lane)) + mixed(_unsigned(place[of_pair])) * np.uint64(3) + _unsigned(local))
    _, same, counts = np.unique(alike, return_inverse=True, return_counts=True)
    by_lane = np.lexsort((of_pair, kind == _RECV, lane))
    kept = np.sort(kept)
    kept_pairs = np.flatnonzero(np.isin(of_pair, kept))
    meets = np.stack([of_pair[kept_pairs], class_of_lane[lane[kept_pairs]], kind[kept_pairs]], axis=1)
    if len(np.unique(meets, axis=0)) < len(meets):
        return None  # it would meet itself
    fold = Fold(
        ranks=tuple(ranks.tolist()), place=place, groups=reader.groups, pair_offsets=offsets, lane_of_pair=lane,
        group_of_lane=group_of_lane, class_of_lane=class_of_lane, is_message=is_message,
        pair_of_row=np.zeros(0, dtype=np.int64), num_alike=counts[same.reshape(-1)], pairs_by_lane=by_lane,
        lane_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), row_offsets=np.zeros(0, dtype=np.int64),
    )  # fmt: skip
    names = list(COLUMN_TYPES)
    by_rank: dict[int, dict[str, npt.NDArray[Any]]] = {}
    first_index: dict[int, int] = {}
    pair_of_row = []
    for at in kept.tolist():
        rank = int(ranks[at])
        table = reader.units(rank, steps=steps, columns=names)
        local_lane = programs[keys[at, 0]].lane_of_row
        pairs = np.where(local_lane >= 0, local_lane + offsets[at], -1)
        by_rank[rank] = _renamed(read_columns(table, names), fold, ranks, kept, pairs)
        first_index[rank] = table.first_index
        pair_of_row.append(pairs)
    numbers = class_of_lane[lane[kept_pairs]]
    groups = {}
    for number in np.unique(numbers).tolist():
        mine = np.unique(ranks[of_pair[kept_pairs[numbers == number]]])
        groups[FIRST_GROUP + number] = ProcessGroup(FIRST_GROUP + number, ranks=tuple(mine.tolist()))
    try:
        graph = JobGraph.from_columns(by_rank, world_size=reader.world_size, groups=groups, first_index=first_index,
                                      graph_kind=reader.graph_kind, source=reader.path)  # fmt: skip
    except GraphError:
        return None
    fold = replace(fold, pair_of_row=np.concatenate(pair_of_row), row_offsets=graph.offsets)
    if graph.num_events:
        begins = graph.event_offsets[:-1]
        of_event = lane[fold.pair_of_row[graph.event_rows[begins]]]
        for name in ("op", "dtype"):
            values = graph.columns[name][graph.event_rows]
            differs = np.minimum.reduceat(values, begins) != np.maximum.reduceat(values, begins)
            if (differs & ~is_message[of_event]).any():
                return None  # a collective is told by those of its first member
        whole = np.where(is_message[of_event], graph.event_is_whole, is_whole[of_event])
        graph = replace(graph, event_is_whole=whole)
    return graph, fold


def _renamed(
    columns: dict[str, npt.NDArray[Any]], fold: Fold, ranks: Int64Array, kept: Int64Array, pairs: Int64Array
) -> dict[str, npt.NDArray[Any]]:
    """The columns of a rank with classes of lanes for groups, and peers that are in the folded graph."""
    columns = dict(columns)
    talks = pairs >= 0
    lanes = fold.lane_of_pair[pairs[talks]]
    group_id, peer = columns["group_id"].astype(np.uint64), columns["peer"].astype(np.int64)
    group_id[talks] = FIRST_GROUP + fold.class_of_lane[lanes].astype(np.uint64)
    # the roots of collectives agree, but members of a class may have several
    mine = np.where(fold.is_message[lanes], peer[talks], ABSENT32)
    at = np.searchsorted(ranks, mine).clip(0, len(ranks) - 1)
    peer[talks] = np.where(ranks[at] == mine, ranks[kept[fold.place[at]]], mine)
    return {**columns, "group_id": group_id, "peer": peer.astype(np.int32)}
