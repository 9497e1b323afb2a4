"""What each member of a process group contributes to an operation when some members are absent.

Responsible for naming, for every member, the running rank and the group from which its contribution comes; the
operations themselves are coordinating.py's.

An absent member is represented by the rank of its role that runs.  That rank may be a member of the same group (a
replica of data parallelism), or of the group of the same family that is its own (a sampled rank's tensor-parallel
neighbour): then the contribution is that of the operation with the same number in that other group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.matching import Contribution
from prism_sdk.runtime.roles.layout import Families, Family, GroupFact, RolePlan


@dataclass(frozen=True)
class Source:
    """Where contributions of members come from: a running rank, as a member of a group of its own."""

    group_id: int
    rank: int
    position: int  # in that group


@dataclass(frozen=True)
class GroupView:
    """A group that holds a running rank. `of_member[i]`: index in `sources` of what stands for member i."""

    fact: GroupFact
    sources: tuple[Source, ...]
    of_member: NDArray[np.int32]
    num_running: int
    others: tuple[int, ...]  # ids of the other groups that contributions come from
    dependants: list[int] = field(default_factory=list)  # groups that take contributions from this one

    @cached_property
    def is_exact(self) -> bool:
        """Whether every member's place is that of the rank that stands for it, in its own group."""
        return all(source.position == place for place, source in enumerate(map(self.source_of, range(self.size))))

    @property
    def size(self) -> int:
        return len(self.fact.ranks)

    def source_of(self, position: int) -> Source:
        return self.sources[int(self.of_member[position])]


@dataclass(frozen=True)
class SharedSources:
    """What the members gave, each different contribution once; indexed by member."""

    given: tuple[tuple[Contribution, list[int] | None], ...]
    of_member: NDArray[np.int32]

    def __getitem__(self, member: int) -> tuple[Contribution, list[int] | None]:
        return self.given[int(self.of_member[member])]

    def weights(self) -> list[int]:
        """How many members each contribution stands for."""
        return np.bincount(self.of_member, minlength=len(self.given)).tolist()


class Views:
    """Views of all groups that hold a running rank, made as they are asked for."""

    def __init__(self, families: Families, plan: RolePlan) -> None:
        self.families = families
        self.plan = plan
        self._views: dict[int, GroupView] = {}
        self._takers: dict[tuple[int, int, int], int] = {}
        self._stands_for = np.array(plan.representatives, np.int32)[plan.role_of]
        self._stands_for[list(plan.running)] = plan.running

    def view(self, group_id: int) -> GroupView:
        """The view of a group; those of its family's other groups with running ranks are made with it."""
        found = self._views.get(group_id)
        if found is None:
            family, _ = self._find(group_id)
            indexes = {int(family.group_of[rank]) for rank in self.plan.running} - {-1}
            made = [self._make(family, family.groups[index]) for index in sorted(indexes)]
            self._views.update((view.fact.group_id, view) for view in made)
            for view in made:
                for other in view.others:
                    self._views[other].dependants.append(view.fact.group_id)
            found = self._views[group_id]
        return found

    def _find(self, group_id: int) -> tuple[Family, GroupFact]:
        found = self.families.find(group_id)
        if found is None:
            raise UnsupportedError(f"a process group that rank 0 does not know of (id {group_id:#x})",
                                   hint="record this job with all ranks, without --roles")  # fmt: skip
        return found

    def _make(self, family: Family, fact: GroupFact) -> GroupView:
        members = np.array(fact.ranks, np.int64)
        standing = self._stands_for[members]
        ranks, of_member = np.unique(standing, return_inverse=True)
        sources = tuple(self._source(family, fact, int(rank)) for rank in ranks)
        others = {source.group_id for source in sources} - {fact.group_id}
        num_running = int((standing == members).sum())
        return GroupView(fact, sources, of_member.astype(np.int32), num_running, tuple(sorted(others)))

    def _source(self, family: Family, fact: GroupFact, rank: int) -> Source:
        group = family.group_with(rank)
        if group is None:
            raise UnsupportedError(
                f"rank {rank} stands for members of the group {fact.description or fact.name!r} of ranks "
                f"{_shortened(fact.ranks)}, and is in no group of that kind",
                hint="state the roles with --roles, so that ranks of one role are in the same kinds of groups",
            )
        return Source(group.group_id, rank, int(family.position_of[rank]))

    # -- messages ---------------------------------------------------------------------------------------------------

    def sender(self, group_id: int, source: int, destination: int) -> tuple[int, int, int]:
        """The message (group, source, destination) that stands for the one that a running `destination` waits for.

        An absent source is stood for by a rank q.  Where q has the source's place in its own group, that is its
        message to the destination's place there; else the one to the rank as far away from q, around the group.
        """
        if source in self.plan.is_running:
            return group_id, source, destination
        family, fact = self._find(group_id)
        stand_in = self._source(family, fact, int(self._stands_for[source]))
        mine, theirs = int(family.position_of[source]), int(family.position_of[destination])
        place = theirs
        if stand_in.position != mine:
            place = (stand_in.position + theirs - mine) % len(fact.ranks)
        group = family.group_with(stand_in.rank)
        assert group is not None
        return stand_in.group_id, stand_in.rank, group.ranks[place]

    def num_takers(self, group_id: int, source: int, destination: int) -> int:
        """How many running ranks take the message that a running `source` sends to `destination`."""
        key = (group_id, source, destination)
        known = self._takers.get(key)
        if known is None:
            family, fact = self._find(group_id)
            mine, theirs = int(family.position_of[source]), int(family.position_of[destination])
            known = sum(self._takes(family, rank, key, mine, theirs, len(fact.ranks)) for rank in self.plan.running)
            self._takers[key] = known
        return known

    def _takes(self, family: Family, rank: int, key: tuple[int, int, int], mine: int, theirs: int, size: int) -> bool:
        group = family.group_with(rank)
        if group is None:
            return False
        at = int(family.position_of[rank])
        candidates = {mine, (at + mine - theirs) % size}
        return any(
            group.ranks[place] != rank and self.sender(group.group_id, group.ranks[place], rank) == key
            for place in candidates
        )


def _shortened(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
