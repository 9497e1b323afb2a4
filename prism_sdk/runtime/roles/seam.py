"""The rank's side of a recording by roles.

Responsible for reductions in which a contribution stands for many members, for gathers that repeat it, and for process
groups that cost nothing where the rank is no member.  Whom a contribution stands for is decided by the coordinator.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from prism_sdk.errors import AsymmetryError, CollectiveMismatchError
from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.observe import trace_group
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.record import Conversation, RecordSeam
from prism_sdk.runtime.roles.layout import RolePlan
from prism_sdk.runtime.roles.views import SharedSources
from prism_sdk.runtime.tensors import Bytes, ReadInto, combine_weighted, deliver_repeated
from prism_sdk.runtime.tracer import Tracer
from prism_sdk.runtime.wire import Channel
from prismtrace.model import Op

_SCOUT = 0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BLOCK_BYTES = 1 << 18


class RoleConversation(Conversation):
    """Also names process groups: before anything else is said, all that were made until then."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.facts: list[tuple[str, str, str, tuple[int, ...], int]] = []

    def tell(self, message: tuple[Any, ...]) -> None:
        self._name_groups()
        super().tell(message)

    def ask(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        self._name_groups()
        return super().ask(message)

    def _name_groups(self) -> None:
        if self.facts:
            facts, self.facts = self.facts, []
            super().tell(("groups", facts))


class RoleSeam(RecordSeam):
    """As in a full recording, but of most members of a group only the role runs."""

    conversation: RoleConversation

    def __init__(self, spec: RankSpec, tracer: Tracer, channel: Channel) -> None:
        super().__init__(spec, tracer, channel)
        self._plan = spec.plan
        self.conversation.learn = self._learn

    def make_conversation(self, channel: Channel) -> Conversation:
        return RoleConversation(channel)

    def _learn(self, plan: RolePlan) -> None:
        self._plan = plan

    def install(self) -> None:
        super().install()
        _give_back_freed_memory()
        skip_foreign_groups(self.conversation if self.spec.rank == _SCOUT else None)

    def group_created(self, group: GroupState) -> None:
        self.groups.append(group)
        trace_group(self.tracer, group)
        fact = (group.name, group.description, group.backend, group.ranks, group.generation)
        if self.spec.rank == _SCOUT:
            self.conversation.facts.append(fact)
        self.conversation.tell(("group", group.group_id, group.label, fact))

    def given(self, call: Call) -> list[torch.Tensor] | None:
        if call.op is Op.BROADCAST and not call.has_contribution and self._stands_for(call, call.root or 0):
            return call.outputs  # what it holds is what the root holds, by symmetry
        return super().given(call)

    def _stands_for(self, call: Call, member: int) -> bool:
        """Whether this rank may have to give what an absent member would; before the roles are known it may."""
        plan, rank = self._plan, call.group.ranks[member]
        return plan is None or (rank not in plan.is_running and plan.representative(rank) == self.spec.rank)

    def _complete(self, call: Call, *details: Any) -> int:
        """Sizes that do not fit are no fault of the program where a sampled rank meets another's data (routing)."""
        try:
            return super()._complete(call, *details)
        except CollectiveMismatchError as error:
            plan = self._plan
            if plan is None or self.spec.rank not in plan.samples:
                raise
            standing = plan.representatives[int(plan.role_of[self.spec.rank])]
            what = f"{call.op.name.lower()} with members that do not run, whose sizes follow from other data: {error}"
            raise AsymmetryError(self.spec.rank, representative=standing, what=what.partition("\n")[0]) from error

    def _place(self, data: Bytes, *, size: int = 1) -> Any:
        return super()._place(data)  # few ranks read it, however large the group is

    def combined(self, call: Call, sources: Any, read_into: ReadInto) -> list[torch.Tensor]:
        assert isinstance(sources, SharedSources)
        _, first = np.unique(sources.of_member, return_index=True)
        parts = list(zip(first.tolist(), sources.weights(), strict=True))
        return combine_weighted(call, parts, len(call.group.ranks), read_into)

    def deliver(self, call: Call, sources: Any, read_into: ReadInto) -> None:
        if not isinstance(sources, SharedSources) or not deliver_repeated(call, sources.of_member, read_into):
            super().deliver(call, sources, read_into)


def _give_back_freed_memory() -> None:
    """Blocks of 256 KiB and more leave the process when they are freed.

    Gathers over thousands of ranks free buffers of many MiB again and again. glibc would take the first of them as a
    sign to keep such blocks, and every rank that waits for its turn would hold its largest ones.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, _LARGE_BLOCK_BYTES)


def skip_foreign_groups(conversation: RoleConversation | None) -> None:
    """A group that this rank is no member of is only counted, and named if it is this rank that names groups.

    At 8,192 ranks a program may make some ten thousand groups, and be a member of twenty.
    """
    original = distributed_c10d._new_group_with_tag
    made: dict[tuple[str, int], int] = {}

    def new_group_with_tag(
        ranks: Any = None, timeout: Any = None, backend: Any = None, backend_options: Any = None, pg_tag: Any = None,
        use_local_synchronization: bool = False, group_desc: Any = None, device_id: Any = None, sort_ranks: bool = True,
    ) -> Any:  # fmt: skip
        def as_usual() -> Any:
            return original(
                ranks, timeout, backend, backend_options, pg_tag, use_local_synchronization, group_desc,
                device_id=device_id, sort_ranks=sort_ranks,
            )  # fmt: skip

        if ranks is None or pg_tag or use_local_synchronization or not dist.is_initialized():
            return as_usual()
        world = distributed_c10d._get_default_group()
        if world.rank() in ranks or not len(ranks) or not 0 <= min(ranks) <= max(ranks) < world.size():
            return as_usual()
        if len(set(ranks)) != len(ranks):
            return as_usual()  # which refuses it
        members = tuple(sorted(ranks) if sort_ranks else ranks)
        name = str(distributed_c10d._process_group_name(members, use_hashed_name=False))
        if conversation is not None:
            generation = made.get((name, hash(members)), 0)
            made[name, hash(members)] = generation + 1
            kind = str(dist.Backend(backend or distributed_c10d._world.pg_map[world][0]))
            conversation.facts.append((name, group_desc or "", kind, members, generation))
        return dist.GroupMember.NON_GROUP_MEMBER

    distributed_c10d._new_group_with_tag = new_group_with_tag
