"""What-if change of the number of data-parallel replicas: ranks are copied or left out, groups grow or shrink.

It changes no weights; transfers of groups that grew come from a cluster profile (``transfers``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prism_sdk.bounds import MAX_RANKS
from prism_sdk.errors import UsageError
from prism_sdk.graph.facts import facts_of_copies
from prism_sdk.simulate.job import ALONE, Lanes, Programs, SimJob
from prismtrace import Op, ProcessGroup

__all__ = ["DataParallel"]

Int64Array = npt.NDArray[np.int64]
_SHARDS = re.compile("shard|fsdp|zero")
_MODEL = frozenset({"tensor", "tp", "expert", "ep", "context", "cp", "pipeline", "pp", "model"})
_REPLICAS = re.compile("data.parallel|dp|replica")


@dataclass(frozen=True)
class DataParallel:
    """The job with ``size`` replicas. Replica i of the new job does what replica i modulo the old number did.

    Replicas are what is left when the data-parallel groups (``groups``, by name; without them those whose name or
    description says so, of replicas before shards, else those of more than one rank whose members all do the same) and
    groups of all ranks are taken away: they must be equal in structure. Where other groups join neighbouring replicas
    (expert parallelism folded into data parallelism), such a block is copied as a whole. Ranks are numbered block by
    block. What a rank contributes to an all-gather of such a group becomes smaller as the group grows: the whole stays
    the same (sharded parameters).
    """

    size: int
    groups: frozenset[str] = frozenset()

    def apply(self, job: SimJob) -> SimJob:
        """Copy or drop replicas; raises UsageError where the job does not consist of equal replicas."""
        if self.size < 1:
            raise UsageError("a job has at least one replica")
        if self.size > MAX_RANKS:
            raise UsageError(f"{self.size} replicas are too many: a job has at most {MAX_RANKS} ranks")
        wide = self._wide_groups(job)
        parts = _components(job, wide)
        num, block = len(parts), self._block(job, wide, parts[0])
        if any(not _are_alike(job, part, parts[0]) for part in parts):
            names = sorted(_name(job, g) for g in wide)[:6]
            raise UsageError(f"{job.source} does not fall into equal replicas without the groups {names}",
                             hint="name the data-parallel groups: --dp-groups")  # fmt: skip
        if self.size % block:
            raise UsageError(f"{self.size} replicas cannot be made: {job.source} has blocks of {block} that belong "
                             "together", hint=f"give a multiple of {block}")  # fmt: skip
        if self.size // block * len(parts[0]) > MAX_RANKS:
            raise UsageError(f"{self.size} replicas of {len(parts[0])} ranks are too many: a job has at most "
                             f"{MAX_RANKS} ranks")  # fmt: skip
        chosen = [parts[index % num] for index in range(self.size // block)]
        old = np.concatenate(chosen)
        lanes, groups, old_group = self._lanes(job, wide, chosen)
        programs = _rescaled_gathers(job, wide, num / len(chosen))
        note = f"{self.size} data-parallel replicas in place of {num * block}"
        if len(chosen) != num:
            note += "; transfers of groups that grow or shrink are as they were, unless a cluster profile gives them"
            if len(chosen) > num:
                note += ", and ranks that share processors do not slow each other: the step may be longer"
        return replace(
            job, world_size=len(old), ranks=np.arange(len(old), dtype=np.int64), lanes=lanes, groups=groups,
            programs=programs, program=job.program[old], weight_base=job.weight_base[old],
            origin_ns=job.origin_ns[old], stage=job.stage[old], memory_bytes=job.memory_bytes[old],
            scale=job.scale[old], chained=_chained(groups, lanes), slowdowns={}, notes=(*job.notes, note),
            source_rows=None if job.source_rows is None else job.source_rows.copied(old),
            metadata=facts_of_copies(job.metadata, ranks=enumerate(job.ranks[old].tolist()), groups=old_group.items()),
        )  # fmt: skip

    def _wide_groups(self, job: SimJob) -> frozenset[int]:
        used = {int(g) for g in job.lanes.group_id}
        everyone = {g for g in used if len(job.groups[g].ranks) == job.num_ranks}
        if self.groups:
            named = {g for g in used if job.groups[g].name in self.groups}
            missing = self.groups - {job.groups[g].name for g in named}
            if missing:
                raise UsageError(f"{job.source} has no group {sorted(missing)[0]!r}", hint="`prism info` lists groups")
            return frozenset(named | everyone)
        words = {g: _text(job, g) for g in used - everyone}
        shards = {g for g, text in words.items() if _SHARDS.search(text)}
        said = {g for g, text in words.items() if _REPLICAS.search(text)} - shards or shards
        if said:
            return frozenset(said | everyone)
        alike = set()
        for g in used - everyone:
            programs = {int(job.program[job.position(rank)]) for rank in job.groups[g].ranks}
            if len(programs) == 1 and len(job.groups[g].ranks) > 1:
                alike.add(g)
        return frozenset(alike | everyone)

    def _block(self, job: SimJob, wide: frozenset[int], part: Int64Array) -> int:
        """How many replicas a part has: members of a group that joins replicas and nothing else."""
        ranks = set(job.ranks[part].tolist())
        found = [1]
        for g in wide:
            text = _text(job, g)
            is_of_replicas = _REPLICAS.search(text) and not _SHARDS.search(text)
            if is_of_replicas and not _MODEL & set(re.split("[^a-z]+", text)):
                found.append(len(ranks.intersection(job.groups[g].ranks)))
        return max(found)

    def _lanes(
        self, job: SimJob, wide: frozenset[int], chosen: list[Int64Array]
    ) -> tuple[Lanes, dict[int, ProcessGroup], dict[int, int]]:
        """The new lanes and groups, and by new group the old one that it comes from."""
        lanes = job.lanes
        is_wide = np.isin(lanes.group_id, np.array(sorted(wide), dtype=np.uint64)) & (lanes.source < 0)
        crossing = np.isin(lanes.group_id, np.array(sorted(wide), dtype=np.uint64)) & (lanes.source >= 0)
        if crossing.any():
            name = job.groups[int(lanes.group_id[np.flatnonzero(crossing)[0]])].name
            raise UsageError(
                f"{job.source} sends messages between its replicas, in group {name!r}",
                hint="name the data-parallel groups with --dp-groups; a pipeline in the group of all ranks is a single "
                "replica: record two",
            )
        width = len(chosen[0])
        ids: dict[tuple[int, int], int] = {}  # (old lane, replica or -1) -> new lane, in order of first use
        used: list[list[int]] = []
        for index, part in enumerate(chosen):
            for position in part.tolist():
                mine = lanes.lane[lanes.offsets[position] : lanes.offsets[position + 1]].tolist()
                used.append([ids.setdefault((lane, -1 if is_wide[lane] else index), len(ids)) for lane in mine])
        keys = sorted(ids, key=lambda key: (bool(lanes.source[key[0]] >= 0), ids[key]))  # collectives first
        place = {ids[key]: new for new, key in enumerate(keys)}
        old_lane = np.array([key[0] for key in keys], dtype=np.int64)
        replica = np.array([key[1] for key in keys], dtype=np.int64)
        lane = np.array([place[one] for mine in used for one in mine], dtype=np.int64)
        num_members = np.bincount(lane, minlength=len(keys)).astype(np.int64)
        num_events = lanes.num_events[old_lane]
        first_event = np.cumsum(num_events) - num_events
        # where a rank is in its replica gives its new number
        inside = {int(job.ranks[p]): at for part in chosen for at, p in enumerate(part.tolist())}

        def moved(ranks: Int64Array) -> Int64Array:
            within = np.array([inside.get(int(r), -1) for r in ranks], dtype=np.int64)
            return np.where(ranks >= 0, np.maximum(replica, 0) * width + within, -1)

        groups: dict[int, ProcessGroup] = {}
        group_of: dict[tuple[int, int], int] = {}
        new_group = np.zeros(len(keys), dtype=np.uint64)
        for new, (one, copy) in enumerate(keys):
            key = (int(lanes.group_id[one]), copy)
            if key not in group_of:
                group_of[key] = len(group_of) + 1
                group = job.groups[key[0]]
                copies = range(len(chosen)) if copy < 0 else (copy,)
                places = sorted({inside[r] for r in group.ranks if r in inside})
                members = tuple(c * width + at for c in copies for at in places)
                name = group.name if copy < 0 else f"{group.name}@{copy}"
                groups[group_of[key]] = ProcessGroup(group_of[key], name, group.description, group.backend, members)
            new_group[new] = group_of[key]
        offsets = np.concatenate([[0], np.cumsum([len(mine) for mine in used])]).astype(np.int64)
        return Lanes(
            offsets=offsets, lane=lane, event=first_event[lane], group_id=new_group,
            source=moved(lanes.source[old_lane]),
            destination=moved(lanes.destination[old_lane]), tag=lanes.tag[old_lane], num_members=num_members,
            num_events=num_events, first_event=first_event, first_seq=lanes.first_seq[old_lane],
        ), groups, {new: old for (old, _), new in group_of.items()}  # fmt: skip


def _are_alike(job: SimJob, part: Int64Array, other: Int64Array) -> bool:
    """Whether ranks do the same, in the same lanes; how many bytes they send may follow from data (routing)."""
    p = job.programs
    return len(part) == len(other) and all(
        mine == theirs
        or all(
            np.array_equal(column[p.rows(mine)], column[p.rows(theirs)])
            for column in (p.kind, p.op, p.lane_of, p.ordinal)
        )
        for mine, theirs in set(zip(job.program[part].tolist(), job.program[other].tolist(), strict=True))
    )


def _text(job: SimJob, group_id: int) -> str:
    return f"{job.groups[group_id].name} {job.groups[group_id].description}".lower()


def _name(job: SimJob, group_id: int) -> str:
    return job.groups[group_id].name or hex(group_id)


def _components(job: SimJob, wide: frozenset[int]) -> list[Int64Array]:
    """Positions of ranks that are joined by other groups than the wide ones, smallest first."""
    parent = list(range(job.num_ranks))

    def find(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    first: dict[int, int] = {}
    for position in range(job.num_ranks):
        for lane in job.lanes.lane[job.lanes.offsets[position] : job.lanes.offsets[position + 1]].tolist():
            if int(job.lanes.group_id[lane]) in wide and job.lanes.source[lane] < 0:
                continue
            other = first.setdefault(lane, position)
            parent[find(position)] = find(other)
    parts: dict[int, list[int]] = {}
    for position in range(job.num_ranks):
        parts.setdefault(find(position), []).append(position)
    return [np.array(part, dtype=np.int64) for part in sorted(parts.values())]


def _chained(groups: Mapping[int, ProcessGroup], lanes: Lanes) -> npt.NDArray[np.uint8]:
    # which operations of measured traces do not wait for the one before them is known for the old events only, but for
    # those that wait for nobody
    chained = np.ones(max(lanes.num_collectives, 1), dtype=np.uint8)
    is_alone = np.array([groups[one].backend == ALONE for one in lanes.group_id.tolist()], dtype=np.bool_)
    chained[: lanes.num_collectives][np.repeat(is_alone, lanes.num_events)[: lanes.num_collectives]] = 0
    return chained


def _rescaled_gathers(job: SimJob, wide: frozenset[int], factor: float) -> Programs:
    p = job.programs
    num_bytes = p.num_bytes.copy()
    done: set[int] = set()
    for position in range(job.num_ranks):
        program = int(job.program[position])
        if program in done:
            continue
        done.add(program)
        rows = p.rows(program)
        lanes = job.lanes.lane[job.lanes.offsets[position] : job.lanes.offsets[position + 1]]
        is_wide = np.array([int(job.lanes.group_id[lane]) in wide for lane in lanes] + [False], dtype=np.bool_)
        gathers = (p.op[rows] == Op.ALL_GATHER) & is_wide[p.lane_of[rows]] & (num_bytes[rows] >= 0)
        mine = num_bytes[rows]
        mine[gathers] = np.round(mine[gathers] * factor).astype(np.int64)
        num_bytes[rows] = mine
    return replace(p, num_bytes=num_bytes)
