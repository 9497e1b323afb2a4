"""Collects the units of the ranks of a job, agrees on groups and numbers, and writes one trace, whole or not at all.

It does not read any foreign format: the importers hand it rows.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from prism_sdk.abc import ConversionReport
from prism_sdk.errors import UsageError
from prismtrace import GraphKind, ProcessGroup, TraceReadError, TraceWriter, UnitKind

MAX_NOTES: Final = 200
_MAX_WORLD: Final = 1 << 20
_COLUMNS: Final = {
    "kind": 0,
    "phase": 0,
    "start_ns": None,
    "end_ns": None,
    "op": 0,
    "reduce_op": 0,
    "dtype": 0,
    "num_elements_in": None,
    "num_elements_out": None,
    "peer": None,
    "tag": None,
    "is_async": False,
    "awaits": None,
    "label": None,
    "splits_in": None,
    "splits_out": None,
}


@dataclass(frozen=True)
class LocalGroup:
    """A group as one rank names it. `ranks` is empty when the source does not say who its members are."""

    name: str
    description: str = field(default="", compare=False)
    backend: str = field(default="", compare=False)
    ranks: tuple[int, ...] = ()


@dataclass
class RankUnits:
    """The units of one rank as they are built, row by row; columns that no row has are left out later."""

    rank: int
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    named: dict[str, list[Any]] = field(default_factory=dict)
    groups: list[LocalGroup | None] = field(default_factory=list)
    raw_seq: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.groups)

    def add(
        self,
        *,
        group: LocalGroup | None = None,
        raw_seq: int | None = None,
        named: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> int:
        """Add one unit and return its index. Columns that are not given have the registry's default."""
        row = len(self.groups)
        for name, default in _COLUMNS.items():
            self.columns[name].append(values.get(name, default))
        for name, value in (named or {}).items():
            column = self.named.setdefault(name, [])
            column.extend([None] * (row - len(column)))
            column.append(value)
        self.groups.append(group)
        self.raw_seq.append(raw_seq)
        return row


class Job:
    """One trace in the making. A context manager: without `finish` nothing is left behind."""

    def __init__(
        self,
        output: Path,
        *,
        graph_kind: GraphKind,
        world_size: int | None,
        report: Callable[[str], None],
        where: str = "",
    ) -> None:
        self._where = where or str(output)
        self.counts: Counter[str] = Counter()
        self._told: dict[str, str] = {}
        self._varying: set[str] = set()
        self.kinds: dict[str, str] = {}
        self._notes: dict[str, None] = {}
        self._output, self._part = output, output.with_name(f".{output.name}.part")
        self._graph_kind, self._report = graph_kind, report
        self._world_size, self._world_hint = world_size, 0
        self._units: dict[int, RankUnits] = {}
        self._exact: dict[int, dict[str, Any]] = {}
        self._groups: dict[int, ProcessGroup] = {}
        self._sources: dict[int, str] = {}
        self._made: TraceWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made is not None:
            self._made.__exit__(None, None, None)
        self._part.unlink(missing_ok=True)

    @property
    def _writer(self) -> TraceWriter:
        """The file in the making; it is created when the first rows are written."""
        if self._made is None:
            size = self._world_size if self._world_size is not None else self._world_hint
            size = size if size < 1 << 31 else 0  # too large to be stated
            self._made = TraceWriter(self._part, graph_kind=self._graph_kind, world_size=size, overwrite=True)
        return self._made

    def hint_world(self, size: int) -> None:
        """Say that the source speaks of a world of at least `size` ranks; the user's own word counts more."""
        self._world_hint = max(self._world_hint, size)

    def use_graph_kind(self, kind: GraphKind) -> None:
        """Say what the times are worth; before anything is written."""
        self._graph_kind = kind

    def note(self, text: str) -> None:
        """Something that was lost, repaired or guessed; the same text counts once."""
        self._notes[text] = None

    def describe(self, key: str, value: str) -> None:
        """A fact about the job that a rank's file tells; it is kept where all ranks say the same."""
        if self._told.setdefault(key, value) != value:
            self._varying.add(key)

    def claim(self, rank: int, source: str) -> None:
        """Say that `source` is what `rank` left.

        Raises:
            UsageError: another source is of the same rank, or the rank is outside the world.
        """
        if rank in self._sources:
            hint = "name only one of them, or say which rank each is by importing them alone with -O rank=N"
            raise UsageError(f"{self._sources[rank]} and {source} are both of rank {rank}", hint=hint)
        if self._world_size is not None and rank >= self._world_size:
            raise UsageError(f"{source} is of rank {rank}, in a world of {self._world_size}")
        self._sources[rank] = source
        if len(self._sources) % 64 == 0:
            self._report(f"{len(self._sources)} ranks read")

    def add_units(self, units: RankUnits) -> None:
        """Take the units of one rank."""
        self._units[units.rank] = units

    def add_exact(self, rank: int, columns: Mapping[str, Any], groups: Mapping[int, ProcessGroup]) -> None:
        """Take columns that came from a trace of ours: ids of groups and numbers stay."""
        self._exact[rank] = dict(columns)
        self._groups.update(groups)

    def add_events(self, rank: int, columns: Mapping[str, Any], tracks: Mapping[str, Any]) -> None:
        """Write events of a rank at once."""
        self._writer.add_tracks(rank, dict(tracks))
        self._writer.add_events(rank, dict(columns))
        self.counts["events"] += len(columns["kind"])

    def attach(self, name: str, data: bytes) -> None:
        """Keep bytes that no column can hold."""
        writer: Any = self._writer
        writer.add_attachment(name, data)
        self.counts["attachments"] += 1

    def finish(self) -> ConversionReport:
        """Agree on groups, write the units, and put the trace where it belongs.

        Raises:
            TraceReadError: there was nothing to import.
        """
        if not self._sources:
            raise TraceReadError("holds no file that this importer reads", path=self._where)
        self.hint_world(max(self._sources) + 1)
        members = self._members()
        for group in self._groups.values():
            self.hint_world(max(group.ranks) + 1)
        numbering = self._numbering()
        self._check_peers()
        for rank, units in sorted(self._units.items()):
            self._write(rank, units, members, numbering)
        for rank, columns in sorted(self._exact.items()):
            self._writer.add_units(rank, columns)
            self.counts["units"] += len(columns["kind"])
        for group in self._groups.values():
            self._writer.add_group(group)
        self.counts["ranks"], self.counts["groups"] = len(self._sources), len(self._groups)
        for key, value in self._told.items():
            if key not in self._varying:
                self._writer.set_metadata(key, value)
        self._writer.close()
        os.replace(self._part, self._output)
        notes = list(self._notes)
        if len(notes) > MAX_NOTES:
            notes = [*notes[:MAX_NOTES], f"{len(notes) - MAX_NOTES} more notes"]
        return ConversionReport(self._output, dict(self.counts), tuple(notes))

    # --- groups ----------------------------------------------------------------------------------------------------

    def _members(self) -> dict[LocalGroup, ProcessGroup | None]:
        """What each group as a rank names it is in the trace; None where nobody knows its members."""
        users: dict[LocalGroup, set[int]] = defaultdict(set)
        for rank, units in self._units.items():
            for group in set(units.groups):
                if group is not None:
                    users[group].add(rank)
        found: dict[LocalGroup, ProcessGroup | None] = {}
        for group, ranks in users.items():
            known = group.ranks
            if not known and len(ranks) > 1:
                known = tuple(sorted(ranks))
                self.note(
                    f"group {group.name!r}: the source does not say who its members are; taken as the "
                    f"{len(known)} ranks that use the name"
                )
            outsiders = sorted(ranks - set(known))
            if known and outsiders:
                self.note(f"group {group.name!r} of {len(known)} ranks is also used by rank {outsiders[0]}: left out")
                known = ()
            found[group] = None if not known else self._define(group, known)
        return found

    def _define(self, group: LocalGroup, ranks: tuple[int, ...]) -> ProcessGroup:
        content = "\0".join((group.name, ",".join(map(str, ranks)))).encode()
        number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1
        made = ProcessGroup(number, group.name, group.description, group.backend, ranks)
        return self._groups.setdefault(number, made)

    def _check_peers(self) -> None:
        """A peer says how large the world is, unless that is known, or the number is beyond sense."""
        limit = _MAX_WORLD if self._world_size is None else self._world_size
        dropped = 0
        for units in self._units.values():
            peers = units.columns["peer"]
            for row, peer in enumerate(peers):
                if peer is None:
                    continue
                if peer >= limit:
                    peers[row], dropped = None, dropped + 1
                else:
                    self.hint_world(peer + 1)
        if dropped:
            self.note(f"{dropped} peers are outside a world of {limit} ranks: left out")

    def _numbering(self) -> dict[LocalGroup, bool]:
        """Whether the numbers that the source gave to the collectives of a group can be kept: rising on every rank."""
        keep: dict[LocalGroup, bool] = {}
        last: dict[tuple[int, LocalGroup], int] = {}
        for rank, units in self._units.items():
            for group, seq, kind in zip(units.groups, units.raw_seq, units.columns["kind"], strict=True):
                if group is None or kind != UnitKind.COLLECTIVE:
                    continue
                good = seq is not None and seq >= 0 and seq > last.get((rank, group), -1)
                keep[group] = keep.get(group, True) and good
                if seq is not None:
                    last[rank, group] = seq
        return keep

    def _write(
        self,
        rank: int,
        units: RankUnits,
        members: Mapping[LocalGroup, ProcessGroup | None],
        keep: Mapping[LocalGroup, bool],
    ) -> None:
        if not len(units):
            self.note(f"rank {rank} has no unit")
            return
        group_ids = np.zeros(len(units), np.uint64)
        seqs: list[int | None] = [None] * len(units)
        ordinals: Counter[Any] = Counter()
        columns = units.columns
        unplaced = 0
        for row, local in enumerate(units.groups):
            kind = columns["kind"][row]
            if kind not in (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV):
                continue
            group = None if local is None else members[local]
            self.counts[UnitKind(kind).name.lower()] += 1
            if group is None or local is None:
                unplaced += 1
                continue
            group_ids[row] = group.group_id
            peer = columns["peer"][row]
            if peer is not None and peer not in group.ranks:
                self.note(f"rank {rank}: a peer is not a member of group {group.name!r}: left out")
                columns["peer"][row] = peer = None
            if kind == UnitKind.COLLECTIVE:
                lane: Any = local
                if keep.get(local):
                    seqs[row] = units.raw_seq[row]
                    continue
            elif peer is None:
                continue
            else:
                lane = (local, kind, peer, columns["tag"][row] or 0)
            seqs[row] = ordinals[lane]
            ordinals[lane] += 1
        if unplaced:
            self.note(f"rank {rank}: the group of {unplaced} communication units is not known")
        written: dict[str, Any] = {
            name: values for name, values in columns.items() if any(value != _COLUMNS[name] for value in values)
        }
        written |= {"kind": columns["kind"], "group_id": group_ids, "seq": seqs}
        for name, values in units.named.items():
            written[name] = [*values, *[None] * (len(units) - len(values))]
        self._writer.add_units(rank, written)
        self.counts["units"] += len(units)
