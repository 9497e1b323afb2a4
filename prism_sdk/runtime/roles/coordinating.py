"""The coordinator of a recording by roles: operations complete although most of their members are absent.

Responsible for starting the ranks that run once the roles are known, and for what absent members contribute; slots and
switching are those of the coordinator of a full recording.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prism_sdk.errors import AsymmetryError, CollectiveMismatchError, PrismError, UnsupportedError
from prism_sdk.runtime.config import DEFAULT_MAX_ROLES
from prism_sdk.runtime.coordinator import Coordinator
from prism_sdk.runtime.matching import Key, Matcher, Operation, Post, describe
from prism_sdk.runtime.progress import Snapshot
from prism_sdk.runtime.roles.keys import RoleKeyValues
from prism_sdk.runtime.roles.layout import Families, GroupFact, RolePlan, plan_of_groups
from prism_sdk.runtime.roles.views import GroupView, SharedSources, Source, Views
from prism_sdk.runtime.standing import WAITING, RankState
from prism_sdk.wording import counted
from prismtrace.model import DType, Op

_OF_PARTS = (Op.ALL_GATHER, Op.ALL_TO_ALL)
_OF_GROUPS = frozenset({"post", "wait", "poll", "taken", "combined"})

SCOUT = 0
"""The rank that starts first, and whose process groups tell the roles."""


class RolesChanged(PrismError):
    """The program made groups, after it had begun to communicate, that tell more ranks apart: it starts again."""

    def __init__(self, plan: RolePlan) -> None:
        super().__init__(f"process groups that were made later tell {plan.num_roles} roles apart")
        self.plan = plan


@dataclass(slots=True)
class RoleOperation(Operation):
    """One collective of which only some members have a process; `size` counts who takes something of it."""

    view: GroupView | None = None
    matcher: RoleMatcher | None = None

    def post_of(self, source: Source) -> Post | None:
        """What a source has contributed; None while it has not."""
        assert self.matcher is not None
        operation: Operation | None = self
        if source.group_id != self.key[1]:
            operation = self.matcher.operations.get(("c", source.group_id, self.key[2]))
        return None if operation is None else operation.posts.get(source.position)

    @property
    def complete(self) -> bool:
        assert self.view is not None
        return all(self.post_of(source) is not None for source in self.view.sources)

    def missing(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        assert self.view is not None
        return tuple(source.rank for source in self.view.sources if self.post_of(source) is None)

    def shared(self) -> SharedSources:
        """Every member's contribution, each once."""
        assert self.view is not None
        posts = [self.post_of(source) for source in self.view.sources]
        given = tuple((post.contribution, post.send_bytes) for post in posts if post is not None)
        return SharedSources(given, self.view.of_member)

    def packed(self) -> bytes:
        if self._packed is None:
            self._packed = pickle.dumps(self.shared(), protocol=5)
        return self._packed


class RoleMatcher(Matcher):
    """Operations in flight, and what groups take from one another."""

    views: Views

    def __init__(self) -> None:
        super().__init__()
        self._taken_early: dict[Key, int] = {}

    def begin(self, key: Key, size: int, signature: tuple[Any, ...]) -> Operation:
        if key[0] != "c":
            return super().begin(key, size, signature)
        view = self.views.view(key[1])
        size = view.num_running + len(view.dependants)
        operation = RoleOperation(key, self.group_name(key[1]), size, signature, view=view, matcher=self)
        operation.taken = self._taken_early.pop(key, 0)
        return operation

    def take(self, key: Key) -> list[tuple[int, tuple[int, int]]]:
        """One taker has its part; as in a full recording, but other groups may take something as well."""
        operation = self.operations.get(key)
        if operation is None:
            self._taken_early[key] = self._taken_early.get(key, 0) + 1
            return []
        regions = [*super().take(key)]
        if key[0] == "c" and key not in self.operations:
            for other in self.views.view(key[1]).others:
                regions += self.take(("c", other, key[2]))
        return regions

    def check_others(self, operation: RoleOperation) -> None:
        """Raise AsymmetryError when the same operation of another group, which is to stand for this one, differs."""
        assert operation.view is not None
        for other in operation.view.others:
            theirs = self.operations.get(("c", other, operation.key[2]))
            if theirs is None or theirs.signature == operation.signature:
                continue
            mine, first = next(iter(operation.posts.values())), next(iter(theirs.posts.values()))
            try:
                self._check(operation, theirs.signature, first)
            except CollectiveMismatchError as error:
                calls = "; ".join(f"rank {rank}: {value}" for rank, value in error.values.items())
                what = f"the {error.field} of operation {error.seq} in group {error.group} differs ({calls})"
                raise self.asymmetry(mine.rank, what) from None

    def asymmetry(self, rank: int, what: str) -> AsymmetryError:
        plan = self.views.plan
        return AsymmetryError(rank, representative=plan.representatives[int(plan.role_of[rank])], what=what)


class RoleCoordinator(Coordinator):
    """Multiplexes the ranks that run over the slots, and completes operations for those that do not."""

    def __init__(
        self, num_slots: int, *, world_size: int, num_samples: int, max_roles: int = DEFAULT_MAX_ROLES,
        sample_ranks: Sequence[int] = (), plan: RolePlan | None = None, is_stated: bool = False, pin: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(num_slots, pin=pin)
        self.families = Families(world_size)
        self.plan = plan
        self.starts_again = False  # the attempt is over, and nothing of it counts
        self.notes: dict[str, None] = {}  # approximations that the program's operations show
        self._is_stated = is_stated
        self._num_samples, self._max_roles, self._sample_ranks = num_samples, max_roles, sample_ranks
        self._matcher: RoleMatcher = RoleMatcher()
        self._store = self._pairs = RoleKeyValues()
        self._held: list[tuple[Any, ...]] = []  # what the scout said before the roles were known
        self._unnamed: dict[tuple[str, tuple[int, ...]], int] = {}  # groups that the scout has not named yet
        self._unsettled: set[int] = set()  # groups named last: others of their kind may still be made
        self._delayed: dict[int, deque[tuple[Any, ...]]] = {}  # what ranks said of such groups, and after it
        self._is_grown = False  # the scout has made groups since the roles were decided

    def start(self) -> None:
        super().start()
        if self.plan is not None:
            self._adopt(self.plan)

    def snapshot(self) -> Snapshot | None:
        found = super().snapshot()
        if found is None or self.plan is None:
            return found
        return replace(found, num_virtual=self.plan.world_size - len(self.plan.running))

    # -- roles ------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._adopt(self._found_plan())
        for message in self._held:
            super().message(SCOUT, message)
        self._held.clear()

    def _found_plan(self) -> RolePlan:
        return plan_of_groups(
            self.families, num_samples=self._num_samples, wanted_ranks=self._sample_ranks, max_roles=self._max_roles
        )

    def _adopt(self, plan: RolePlan) -> None:
        """Start the ranks of the plan that do not run yet."""
        self.plan = self._pairs.plan = plan
        self._matcher.views = Views(self.families, plan)
        self.host.report(f"{counted(plan.num_roles, 'role')} ({plan.origin}), "
                         f"{counted(len(plan.samples), 'rank')} more to verify them: "
                         f"{len(plan.running)} of {counted(plan.world_size, 'rank')} run")  # fmt: skip
        for note in plan.notes:
            self.host.report(f"an approximation: {note}")
        for rank in plan.running:
            if rank not in self._states:
                self.host.add(self.make_spec(rank))
                self._states[rank] = RankState(rank)
                self._ready.append(rank)
        if SCOUT in self.host.ranks and self.host.ranks[SCOUT].channel is not None:
            self.host.send(SCOUT, ("plan", plan))
        self._grant()

    def _on_groups(self, rank: int, message: tuple[Any, ...]) -> None:
        """The scout names all groups, those that it is no member of as well."""
        for fact in message[1]:
            self.families.add(group := GroupFact(*fact))
            self._unnamed.pop((fact[0], fact[3]), None)
            if self.plan is not None:
                self._unsettled.add(group.group_id)
        self._is_grown = self.plan is not None and not self._is_stated
        self._resume_delayed()

    def _settle(self) -> None:
        """The scout communicates, or nobody can run: it has named all groups that it made until then."""
        self._unsettled.clear()
        self._resume_delayed()

    def _resume_delayed(self) -> None:
        for other in list(self._delayed):
            queue = self._delayed[other]
            while queue and not self._must_wait(queue[0]):
                self._handle(other, queue.popleft())
            if not queue:
                del self._delayed[other]

    def _on_group(self, rank: int, message: tuple[Any, ...]) -> None:
        _, group_id, label, fact = message
        self._matcher.add_group(group_id, label, fact[3])
        if rank == SCOUT or self.families.knows(GroupFact(*fact)):
            return
        if fact[0].isdigit():  # numbered as all ranks make it: the scout will name it, and its like, in their order
            self._unnamed[fact[0], fact[3]] = group_id
        else:
            self.families.add(GroupFact(*fact))

    def _must_wait(self, message: tuple[Any, ...]) -> bool:
        """Whether a message is of a group of which the scout has not yet named the others of its kind."""
        if message[0] not in _OF_GROUPS:
            return False
        return message[1][1] in self._unsettled or message[1][1] in self._unnamed.values()

    def _delay(self, rank: int, message: tuple[Any, ...]) -> bool:
        if rank == SCOUT or not (rank in self._delayed or self._must_wait(message)):
            return False
        self._delayed.setdefault(rank, deque()).append(message)
        if message[0] in ("wait", "poll", "store"):  # until then others may run
            self._park(rank, message)
            self._grant()
        return True

    def message(self, rank: int, message: tuple[Any, ...]) -> None:
        try:
            if rank == SCOUT:
                if self._unsettled and message[0] in _OF_GROUPS:
                    self._settle()
                message = self._hear_scout(message)
                if not message:
                    return
            if not self._delay(rank, message):
                self._handle(rank, message)
        except (RolesChanged, AsymmetryError) as error:
            self._fail_unless_again(error)
        except PrismError as error:
            self.host.fail(error)

    def _handle(self, rank: int, message: tuple[Any, ...]) -> None:
        super().message(rank, message)

    def _fail_unless_again(self, error: PrismError) -> None:
        samples = () if self.plan is None else self.plan.samples
        self.starts_again = not isinstance(error, AsymmetryError) or error.rank in samples
        self.host.fail(error)

    def _hear_scout(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is to be done now of what the scout says; empty when it waits until the roles are known."""
        if self.plan is None:
            if message[0] in ("post", "taken", "combined"):
                self._held.append(message)
                return ()
            if message[0] in ("wait", "poll") and message[2] != "none":
                self._decide()
        elif self._is_grown and message[0] in ("wait", "poll"):
            self._is_grown = False
            found = self._found_plan()
            if found.num_roles > self.plan.num_roles:
                raise RolesChanged(found)
        return message

    # -- operations -------------------------------------------------------------------------------------------------

    def _known(self, key: Key, rank: int) -> Key:
        """The operation that stands for the one a rank means: another rank's message for that of an absent one."""
        if key[0] == "a":
            reason = "a receive from any source, where ranks are recorded by roles"
            raise UnsupportedError(reason, rank=rank, hint="record this job with all ranks, without --roles")
        if key[0] != "p" or self.plan is None:
            return key
        _, group_id, source, destination, tag, seq = key
        return ("p", *self._matcher.views.sender(group_id, source, destination), tag, seq)

    def _on_post(self, rank: int, message: tuple[Any, ...]) -> None:
        key, contribution = message[1], message[5]
        if key[0] == "p":
            num = self._matcher.views.num_takers(*key[1:4])
            if num == 0:
                if isinstance(contribution, tuple):
                    self._states[rank].released.append(contribution)
                return
            message = ("post", key, num, *message[3:])
        super()._on_post(rank, message)
        if key[0] != "c":
            return
        operation = self._matcher.operations.get(key)
        if isinstance(operation, RoleOperation):
            self._matcher.check_others(operation)
            self._note_repeated(operation)
        for group_id in self._matcher.views.view(key[1]).dependants:
            other = self._matcher.operations.get(("c", group_id, key[2]))
            if isinstance(other, RoleOperation):
                self._matcher.check_others(other)
                self._serve_waiters(other.key)

    def _note_repeated(self, operation: RoleOperation) -> None:
        """Note where the parts of absent members are taken to be those of another member."""
        view, (op, _, dtype, *_) = operation.view, operation.signature
        if view is None or op not in _OF_PARTS or not _is_floating(DType(dtype)) or view.is_exact:
            return
        name = f"{Op(op).name.lower()} in {operation.group} of {len(view.fact.ranks)} ranks"
        self.notes[f"{name}: what absent ranks give is what the rank gives that stands for them, so values are not "
                   "those of the full job"] = None  # fmt: skip

    def _on_wait(self, rank: int, message: tuple[Any, ...]) -> None:
        super()._on_wait(rank, ("wait", self._known(message[1], rank), *message[2:]))

    def _on_poll(self, rank: int, message: tuple[Any, ...]) -> None:
        super()._on_poll(rank, ("poll", self._known(message[1], rank), *message[2:]))

    def _on_taken(self, rank: int, message: tuple[Any, ...]) -> None:
        super()._on_taken(rank, ("taken", self._known(message[1], rank)))

    def _try(self, rank: int, message: tuple[Any, ...], *, claim: bool = True) -> tuple[Any, ...] | None:
        _, key, needs, root = message
        operation = self._matcher.operations.get(key)
        if key[0] == "c" and needs == "root":
            return self._try_root(rank, key, root)
        if isinstance(operation, RoleOperation) and needs == "all" and operation.is_reduction:
            is_due = operation.result is None and operation.complete and operation.combiner is None
            operation.combiner = rank if is_due and claim else operation.combiner
            if is_due:
                return ("combine", operation.packed(), None, operation.clock)
        return super()._try(rank, message, claim=claim)

    def _try_root(self, rank: int, key: Key, root: int) -> tuple[Any, ...] | None:
        """What the root gives, or the member that stands for an absent one."""
        operation = self._matcher.operations.get(key)
        if not isinstance(operation, RoleOperation) or operation.view is None:
            return None
        source = operation.view.source_of(root)
        if operation.signature[0] == Op.SCATTER and source.group_id == key[1] and source.position != root:
            raise UnsupportedError("a scatter from a rank that does not run", rank=rank,
                                   hint="state the roles so that it has one of its own")  # fmt: skip
        post = operation.post_of(source)
        return None if post is None else ("ready", {root: (post.contribution, post.send_bytes)}, None, post.clock)

    # -- when nobody can run ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        scout = self._states.get(SCOUT)
        if self.plan is None and scout is not None and scout.state == WAITING and not self._holders:
            try:
                self._decide()  # it waits for a key of another rank
            except UnsupportedError as error:
                self.host.fail(error)
                return
            self._grant()
        if self._unsettled and not (self._holders or self._ready or self._lent):
            self._settle()
            self._grant()
        super().tick()

    def _report_deadlock(self, waiting: list[RankState]) -> None:
        for state in waiting:
            message = state.waits_for
            if self.plan is None or message is None or message[0] != "wait" or state.rank not in self.plan.samples:
                continue
            operation = self._matcher.operations.get(message[1])
            if not isinstance(operation, RoleOperation) or operation.view is None:
                continue
            absent = [s for s in operation.view.sources if operation.post_of(s) is None]
            if absent and all(source.group_id != message[1][1] for source in absent):
                where = next(iter(operation.posts.values())).where
                what = f"it calls {describe(operation.signature, 0)} number {message[1][2]} of its group " \
                       f"{operation.group} at {where}, which rank {absent[0].rank} never does in its own"  # fmt: skip
                self._fail_unless_again(self._matcher.asymmetry(state.rank, what))
                return
        super()._report_deadlock(waiting)


def _is_floating(dtype: DType) -> bool:
    return dtype.name.startswith(("FLOAT", "BFLOAT", "COMPLEX"))
