"""Brings together what the members of a collective, or the two ends of a message, contribute.

Responsible for operations in flight and for finding mismatches; it neither computes nor decides who runs.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prism_sdk.errors import CollectiveMismatchError
from prismtrace.model import DType, Op, ReduceOp

# A contribution as it travels: bytes (small), (offset, num_bytes) in the arena, or None
Contribution = bytes | tuple[int, int] | None
# ("c", group_id, seq) | ("p", group_id, source, destination, tag, seq) | ("a", group_id, destination, tag, serial)
Key = tuple[Any, ...]

_SIGNATURE_FIELDS = ("operation", "reduction", "dtype", "root", "element count")
_REDUCTIONS = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})


@dataclass(slots=True)
class Post:
    """What one member posted."""

    rank: int
    contribution: Contribution
    send_bytes: list[int] | None
    where: str
    clock: int = 0  # logical time (Lamport): of a rank's operations, and after those it depends on


@dataclass(slots=True)
class Operation:
    """One collective (or message) in flight; freed when every member has taken its result."""

    key: Key
    group: str
    size: int
    signature: tuple[Any, ...]
    posts: dict[int, Post] = field(default_factory=dict)  # by group rank
    combiner: int | None = None  # rank that computes the reduction
    result: tuple[int, Contribution, Any] | None = None  # (rank that owns it, where it lies, payload digest)
    taken: int = 0
    clock: int = 0  # logical time at which the last member so far posted
    _packed: bytes | None = None

    def add(self, group_rank: int, post: Post) -> None:
        """One more member is here."""
        self.posts[group_rank] = post
        self.clock = max(self.clock, post.clock)

    def packed(self) -> bytes:
        """What every member gave, pickled once for all who read it: a reply each would be quadratic in the group."""
        if self._packed is None:
            given = {group_rank: (post.contribution, post.send_bytes) for group_rank, post in self.posts.items()}
            self._packed = pickle.dumps(given, protocol=5)
        return self._packed

    @property
    def is_reduction(self) -> bool:
        return self.signature[0] in _REDUCTIONS

    @property
    def root(self) -> int | None:
        """Group rank of the root; None where the operation has none."""
        root: int | None = self.signature[3]
        return root

    @property
    def complete(self) -> bool:
        return len(self.posts) == self.size

    def reduced(self, rank: int, *, claim: bool) -> tuple[Any, ...] | None:
        """The reply to a wait for a complete reduction: the result, the task to compute it, or None while one does."""
        if self.result is not None:
            return ("ready", {-1: (self.result[1], None)}, self.result[2], self.clock)
        if self.combiner is not None:
            return None
        if claim:
            self.combiner = rank
        sources = {group_rank: (post.contribution, None) for group_rank, post in self.posts.items()}
        return ("combine", sources, None, self.clock)

    def missing(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Global ranks that have not posted yet."""
        return tuple(rank for group_rank, rank in enumerate(ranks) if group_rank not in self.posts)

    def regions(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """(owner rank, region) of everything that lies in the arena for this operation."""
        for post in self.posts.values():
            if isinstance(post.contribution, tuple):
                yield post.rank, post.contribution
        if self.result is not None and isinstance(self.result[1], tuple):
            yield self.result[0], self.result[1]


def describe(signature: tuple[Any, ...], position: int) -> str:
    """One field of a signature in words."""
    value = signature[position]
    names = (Op, ReduceOp, DType)
    if position < len(names):
        return names[position](value).name.lower()
    return "any" if value is None else str(value)


class Matcher:
    """Operations in flight, and the groups they belong to."""

    def __init__(self) -> None:
        self.operations: dict[Key, Operation] = {}
        self.groups: dict[int, tuple[str, tuple[int, ...]]] = {}  # group_id -> (name, ranks)
        # messages nobody has taken: (group_id, destination, tag) -> {source: [seq, ...]}
        self.mail: dict[tuple[int, int, int], dict[int, list[int]]] = {}

    def add_group(self, group_id: int, name: str, ranks: tuple[int, ...] | None) -> None:
        if ranks is not None:
            self.groups[group_id] = (name, ranks)

    def group_name(self, group_id: int) -> str:
        return self.groups.get(group_id, (f"#{group_id:x}", ()))[0]

    def group_ranks(self, group_id: int) -> tuple[int, ...]:
        return self.groups.get(group_id, ("", ()))[1]

    def post(self, key: Key, size: int, group_rank: int, signature: tuple[Any, ...], post: Post) -> Operation:
        """Add one member's contribution.

        Raises CollectiveMismatchError when it differs from what an earlier member called.
        """
        operation = self.operations.get(key)
        if operation is None:
            operation = self.operations[key] = self.begin(key, size, signature)
        elif operation.signature != signature:
            self._check(operation, signature, post)
        operation.add(group_rank, post)
        if key[0] == "p":
            _, group_id, source, destination, tag, seq = key
            self.mail.setdefault((group_id, destination, tag), {}).setdefault(source, []).append(seq)
        return operation

    def begin(self, key: Key, size: int, signature: tuple[Any, ...]) -> Operation:
        """A new operation, without a post yet; `size` members take its result."""
        return Operation(key, self.group_name(key[1]), size, signature)

    def _check(self, operation: Operation, signature: tuple[Any, ...], post: Post) -> None:
        for position, name in enumerate(_SIGNATURE_FIELDS):
            ours, theirs = operation.signature[position], signature[position]
            if ours != theirs and not (position == 4 and (ours is None or theirs is None)):
                first = next(iter(operation.posts.values()))
                raise CollectiveMismatchError(
                    operation.group, seq=operation.key[2], field=name,
                    values={
                        first.rank: f"{describe(operation.signature, position)} at {first.where}",
                        post.rank: f"{describe(signature, position)} at {post.where}",
                    },
                )  # fmt: skip

    def match_any(self, key: Key) -> Key | None:
        """The message that a receive from any source gets; None when there is none.

        Of the oldest messages of all sources, the one sent earliest by logical time (a sender that ran ahead must not
        overtake one that is late), then the lowest source: the same in every recording.
        """
        _, group_id, destination, tag, _serial = key
        mail = self.mail.get((group_id, destination, tag), {})
        keys = [("p", group_id, source, destination, tag, numbers[0]) for source, numbers in mail.items() if numbers]
        if not keys:
            return None
        return min(keys, key=lambda k: (self.operations[k].posts[0].clock, k[2]))

    def take(self, key: Key) -> list[tuple[int, tuple[int, int]]]:
        """One member has its result. Returns the arena regions that are free now, when it was the last one."""
        operation = self.operations[key]
        operation.taken += 1
        if operation.taken < operation.size:
            return []
        del self.operations[key]
        if key[0] == "p":
            _, group_id, source, destination, tag, seq = key
            self.mail[group_id, destination, tag][source].remove(seq)
        return list(operation.regions())
