"""Families of process groups, and which ranks of a job run for real because no other rank does the same.

Responsible for finding roles from the groups that a program makes; how absent ranks take part is views.py's.

A *family* is what one line of a program makes in a loop: groups of one size and description that share no rank, such as
all tensor-parallel groups.  A rank's *role* is where it stands in the group of each family along which ranks differ
(tensor, pipeline, expert, context parallel); along families of replicas (data parallel) ranks do the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.config import DEFAULT_MAX_ROLES
from prism_sdk.runtime.groupids import stable_group_id

Int32Array = NDArray[np.int32]

_REPLICAS = frozenset({"dp", "ddp", "data", "replicate", "replica", "replicas"})
_SHARDS = frozenset({"shard", "shards", "fsdp", "zero"})
_MODEL = frozenset({
    "tp", "tensor", "pp", "pipe", "pipeline", "stage", "ep", "expert", "experts", "cp", "context", "sp", "sequence",
    "model", "embedding",
})  # fmt: skip

_PIPELINE, _EXPERT, _OTHER, _SHARD, _UNKNOWN = 0, 1, 4, 5, 6
_AXES = {
    _PIPELINE: frozenset({"pp", "pipe", "pipeline", "stage"}),
    _EXPERT: frozenset({"ep", "expert", "experts"}),
    2: frozenset({"cp", "context", "sp", "sequence"}),
    3: frozenset({"tp", "tensor"}),
}
"""Kinds of model parallelism, those whose ranks are the least alike first: stages run other layers at other times,
experts are sent other numbers of rows, parts of a sequence or a tensor only hold other values."""


@dataclass(frozen=True)
class GroupFact:
    """A process group as the program made it. `generation`: how often that name and those ranks were made before."""

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    generation: int = 0

    @cached_property
    def group_id(self) -> int:
        return stable_group_id(self.name, self.ranks, self.generation)


@dataclass
class Family:
    """Groups of one size and description that share no rank, in the order in which they were made."""

    description: str
    backend: str
    size: int
    group_of: Int32Array  # by rank: index in `groups`, -1 for none
    position_of: Int32Array  # by rank: place in its group
    groups: list[GroupFact] = field(default_factory=list)

    def takes(self, fact: GroupFact) -> bool:
        """Whether no rank of the group is in a group of the family yet."""
        return bool((self.group_of[list(fact.ranks)] < 0).all())

    def add(self, fact: GroupFact) -> None:
        members = list(fact.ranks)
        self.group_of[members] = len(self.groups)
        self.position_of[members] = np.arange(len(members), dtype=np.int32)
        self.groups.append(fact)

    def group_with(self, rank: int) -> GroupFact | None:
        """The group of the family that `rank` is in."""
        index = int(self.group_of[rank])
        return None if index < 0 else self.groups[index]

    @property
    def label(self) -> str:
        """What messages call it."""
        return repr(self.description) if self.description else "(no description)"

    @property
    def words(self) -> set[str]:
        """The words of its description."""
        return set(re.split(r"[^a-z]+", self.description.lower()))

    @property
    def is_fused(self) -> bool:
        """Whether it joins replicas and ranks of model parallelism, or replicas of a part of the model only."""
        return bool(self.words & _REPLICAS and self.words & _MODEL)

    @property
    def kind(self) -> str:
        """What its ranks are to each other: "replicas", "model", "shards", or "unknown"."""
        words = self.words
        if words & _SHARDS:
            return "shards"
        if words & _REPLICAS:
            return "replicas"
        return "model" if words & _MODEL else "unknown"

    @property
    def precedence(self) -> int:
        """How soon it has to tell ranks apart where not all families can: `_PIPELINE` first, `_UNKNOWN` last."""
        if self.kind != "model":
            return _SHARD if self.kind == "shards" else _UNKNOWN
        axes = [number for number, names in _AXES.items() if self.words & names]
        return axes[0] if len(axes) == 1 else _OTHER


class Families:
    """All process groups of a job, sorted into families as they come."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.all: list[Family] = []
        self._open: dict[tuple[str, str, int], list[Family]] = {}
        self._family_of: dict[tuple[str, tuple[int, ...], int], Family] = {}
        self._by_id: dict[int, tuple[Family, GroupFact]] = {}
        self._num_indexed: dict[int, int] = {}

    def add(self, fact: GroupFact) -> None:
        """One more group; one that is known already is not added again."""
        known = (fact.name, fact.ranks, fact.generation)
        if known in self._family_of:
            return
        same = self._open.setdefault((fact.description, fact.backend, len(fact.ranks)), [])
        family = next((one for one in same if one.takes(fact)), None)
        if family is None:
            nowhere = np.full(self.world_size, -1, np.int32)
            family = Family(fact.description, fact.backend, len(fact.ranks), nowhere, nowhere.copy())
            same.append(family)
            self.all.append(family)
        family.add(fact)
        self._family_of[known] = family

    def adopt(self, family: Family) -> None:
        """A family that is made already."""
        self.all.append(family)
        self._family_of.update({(fact.name, fact.ranks, fact.generation): family for fact in family.groups})

    def knows(self, fact: GroupFact) -> bool:
        return (fact.name, fact.ranks, fact.generation) in self._family_of

    def find(self, group_id: int) -> tuple[Family, GroupFact] | None:
        """The group with an id, and its family."""
        found = self._by_id.get(group_id)
        if found is None:  # ids cost a hash over all members: of groups made since the last look only
            for number, family in enumerate(self.all):
                for fact in family.groups[self._num_indexed.get(number, 0) :]:
                    self._by_id[fact.group_id] = (family, fact)
                self._num_indexed[number] = len(family.groups)
            found = self._by_id.get(group_id)
        return found

    def groups(self) -> Iterable[GroupFact]:
        """Every group, by family."""
        return (fact for family in self.all for fact in family.groups)


@dataclass(frozen=True)
class RolePlan:
    """Which rank stands for which. `notes`: what of it is an approximation."""

    world_size: int
    role_of: Int32Array  # by rank
    representatives: tuple[int, ...]  # by role
    samples: tuple[int, ...] = ()  # run as well, to verify the symmetry; they stand for nobody
    origin: str = ""  # in words: what tells the roles apart
    notes: tuple[str, ...] = ()

    @cached_property
    def running(self) -> tuple[int, ...]:
        """Every rank that has a process, ascending."""
        return tuple(sorted({*self.representatives, *self.samples}))

    @cached_property
    def is_running(self) -> frozenset[int]:
        return frozenset(self.running)

    @property
    def num_roles(self) -> int:
        return len(self.representatives)

    def representative(self, rank: int) -> int:
        """The rank that stands for `rank`; itself when it runs."""
        return rank if rank in self.is_running else self.representatives[int(self.role_of[rank])]

    def represented(self, role: int) -> NDArray[np.int64]:
        """The ranks without a process for which the representative of `role` stands, ascending."""
        ranks = np.flatnonzero(self.role_of == role)
        return ranks[~np.isin(ranks, self.running)]

    def num_represented(self, rank: int) -> int:
        """For how many ranks a running rank stands, itself included."""
        role = int(self.role_of[rank])
        return 1 + len(self.represented(role)) if self.representatives[role] == rank else 1


def plan_of_groups(
    families: Families, *, num_samples: int, wanted_ranks: Sequence[int] = (), max_roles: int = DEFAULT_MAX_ROLES
) -> RolePlan:  # fmt: skip
    """The plan that follows from process groups.

    Families of replicas and those of all ranks tell no ranks apart. Of the others, model parallel before shards before
    unknown ones, those whose ranks are the least alike first, and small groups first, each does as long as there are no
    more than `max_roles` roles; those left over are named in the notes, for there the values are not those of the full
    job. `wanted_ranks` run as samples, with all whom they meet in the families that tell roles apart: what these tell
    each other is their own then.

    Raises UnsupportedError where stages of a pipeline would be taken as replicas: they do other things, at other times.
    """
    world = families.world_size
    wanted = [one for one in families.all if 1 < one.size < world and one.kind != "replicas"]
    keys = np.zeros(world, np.int64)
    used: list[str] = []
    telling: list[Family] = []
    notes: dict[str, None] = {}
    for family in sorted(wanted, key=lambda one: (one.precedence, one.size)):
        merged = keys * (family.size + 1) + family.position_of + 1
        found, finer = np.unique(merged, return_inverse=True)
        if len(found) > max_roles and family.precedence == _PIPELINE:
            raise UnsupportedError(
                f"the stages of {family.label} make {len(found)} roles, more than --max-roles {max_roles}, and "
                "stages cannot be taken as replicas",
                hint=f"allow a process for each: --max-roles {len(found)}, or more where other groups tell ranks apart",
            )
        if len(found) > max_roles:
            notes[f"ranks of {family.label} (groups of {family.size}) are taken as replicas: telling them apart would "
                  f"need {len(found)} processes, more than --max-roles {max_roles}"] = None  # fmt: skip
        elif len(found) > len(np.unique(keys)):
            used.append(f"{family.description or 'groups of'} {family.size}")
            telling.append(family)
            keys = finer.astype(np.int64)
    origin = " x ".join(dict.fromkeys(used)) or "all ranks are replicas"
    plan = make_plan(keys, num_samples=num_samples, origin=origin, notes=tuple(notes))
    return with_samples(plan, _met_by(wanted_ranks, telling))


def with_samples(plan: RolePlan, ranks: Iterable[int]) -> RolePlan:
    """The plan with more samples."""
    return replace(plan, samples=tuple(sorted({*plan.samples, *ranks} - set(plan.representatives))))


def _met_by(ranks: Sequence[int], families: Sequence[Family]) -> set[int]:
    """These ranks, those in groups with them, those in groups with these, and so on."""
    found, queue = set(ranks), list(ranks)
    while queue:
        rank = queue.pop()
        for family in families:
            fact = family.group_with(rank)
            new = set(fact.ranks) - found if fact is not None else set()
            found |= new
            queue += new
    return found


def make_plan(
    keys: Sequence[int] | NDArray[np.int64], *, num_samples: int, origin: str, notes: tuple[str, ...] = (),
    representatives: Sequence[int] | None = None,
) -> RolePlan:  # fmt: skip
    """The plan in which ranks with equal keys have one role, and the lowest rank (or the one named) stands for it."""
    _, first, inverse = np.unique(np.asarray(keys), return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    role_of = place[inverse].astype(np.int32)
    chosen = tuple(int(r) for r in np.sort(first)) if representatives is None else tuple(representatives)
    samples = _samples(role_of, chosen, num_samples)
    return RolePlan(len(role_of), role_of, chosen, samples, origin, notes)


def _samples(role_of: Int32Array, representatives: tuple[int, ...], num: int) -> tuple[int, ...]:
    """The last rank, then ranks spread evenly over the world; of different roles as long as there are some."""
    world = len(role_of)
    taken = set(representatives)
    found: list[int] = []
    seen: set[int] = set()
    spread = [world - 1, *(world * (2 * i + 1) // (2 * num) for i in range(num))]
    for strict in (True, False):
        for start in spread:
            for step in range(min(world, 4096)):
                rank = (start - step) % world
                if len(found) < num and rank not in taken and not (strict and int(role_of[rank]) in seen):
                    found.append(rank)
                    taken.add(rank)
                    seen.add(int(role_of[rank]))
                    break
    return tuple(sorted(found))


def parse_layout(text: str, world_size: int) -> list[tuple[str, int]]:
    """``tp=2,dp=8,pp=4`` -> [("tp", 2), ("dp", 8), ("pp", 4)]: the first varies fastest from rank to rank.

    Raises ValueError, which says what is wrong.
    """
    found: list[tuple[str, int]] = []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not name or not re.fullmatch("[0-9]{1,18}", size) or int(size) < 1:
            raise ValueError(f"{part.strip()!r} in {text!r} is not NAME=SIZE with a size of 1 or more")
        if name in dict(found):
            raise ValueError(f"{name!r} is named twice in {text!r}")
        found.append((name, int(size)))
    total = prod(size for _, size in found)
    if total != world_size:
        raise ValueError(f"{text!r} makes {total} ranks, and the job has {world_size}")
    return found


def plan_of_layout(
    axes: Sequence[tuple[str, int]], *, num_samples: int, wanted_ranks: Sequence[int] = ()
) -> RolePlan:  # fmt: skip
    """The plan of a stated layout: ranks that differ along another axis than replicas have different roles.

    `wanted_ranks` run as samples, each with its whole replica.
    """
    world = prod(size for _, size in axes)
    ranks, keys, replica = np.arange(world), np.zeros(world, np.int64), np.zeros(world, np.int64)
    stride, used = 1, []
    for name, size in axes:
        words = set(re.split(r"[^a-z]+", name.lower()))
        if not words & _REPLICAS or words & _SHARDS:
            keys = keys * size + ranks // stride % size
            used.append(f"{name} {size}")
        else:
            replica = replica * size + ranks // stride % size
        stride *= size
    plan = make_plan(keys, num_samples=num_samples, origin=" x ".join(used) or "all ranks are replicas")
    return with_samples(plan, np.flatnonzero(np.isin(replica, replica[list(wanted_ranks)])).tolist())
