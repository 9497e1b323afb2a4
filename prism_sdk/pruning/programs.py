"""The full schedule of a collective: what each member of a group sends and receives, step by step.

Responsible for the unpruned algorithms; who is left out, and what closes the gaps, is closing.py's.

All-reduce, reduce-scatter and all-gather go round a ring in the order of the group, as NCCL's ring does (its message t
from member i is chunk i - t). Broadcast and reduce follow a binomial tree, all-to-all exchanges with one member after
the other, gather and scatter are direct, and a barrier is a dissemination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from prismtrace import Op

__all__ = ["Action", "Move", "Step", "Traffic", "children", "parent", "program", "split", "traffic"]


class Move(Enum):
    """What a member does with a piece."""

    SEND = "send"
    RECEIVE = "receive"  # overwrites the piece
    FOLD = "fold"  # receives, and combines with what is there


@dataclass(frozen=True, slots=True)
class Action:
    """Send a piece to a peer, or receive it from there. Peers are ranks in the group."""

    move: Move
    peer: int
    piece: int


#: Actions that go on side by side; the next step begins when they are done.
Step = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one member sends and receives in a collective. Amounts are in the unit of the sizes (bytes or elements)."""

    num_sent: int
    sent: int
    num_received: int
    received: int


def program(op: Op, *, size: int, member: int, root: int | None = None) -> tuple[Step, ...]:
    """The steps of one member.

    Pieces are chunks of a buffer (all-reduce, reduce-scatter, see :func:`split`), the contributions of members by their
    rank (all-gather, gather), blocks by the rank of the other end (all-to-all, scatter at the root: by destination; of
    an all-to-all what is sent and what is received are two buffers), or the whole (0: broadcast, reduce, barrier).

    Args:
        op: the collective.
        size: members of the group, at least 1.
        member: rank in the group.
        root: rank in the group, of a broadcast, reduce, gather or scatter.

    Raises:
        ValueError: no collective, or a rank that is not in the group.
    """
    if not 0 <= member < size or (root is not None and not 0 <= root < size):
        raise ValueError(f"member {member} or root {root} is not in a group of {size}")
    if op in _ROOTED:
        if root is None:
            raise ValueError(f"{op.name.lower()} needs a root")
        return tuple(_ROOTED[op](size, member, root))
    if op not in _SYMMETRIC:
        raise ValueError(f"{op.name.lower()} is no collective")
    return tuple(_SYMMETRIC[op](size, member))


def split(count: int, size: int) -> tuple[int, ...]:
    """Where the chunks of a buffer of ``count`` elements begin, and the last one's end; lengths differ by at most 1."""
    return tuple(count * index // size for index in range(size + 1))


def traffic(steps: tuple[Step, ...], size_of: Callable[[Action], int]) -> Traffic:
    """Messages and amounts of a program; pieces of size 0 are not sent."""
    sent = [size_of(action) for step in steps for action in step if action.move is Move.SEND]
    received = [size_of(action) for step in steps for action in step if action.move is not Move.SEND]
    return Traffic(sum(map(bool, sent)), sum(sent), sum(map(bool, received)), sum(received))


def parent(position: int) -> int:
    """The parent in a binomial tree whose root has position 0."""
    return position & (position - 1)


def children(position: int, size: int) -> Iterator[int]:
    """The children in a binomial tree of ``size`` nodes, that of the largest subtree first."""
    bit = 1
    while bit < size and not position & bit:
        bit <<= 1
    while bit := bit >> 1:
        if position + bit < size:
            yield position + bit


def _all_reduce(size: int, member: int) -> Iterator[Step]:
    for t in range(1, 2 * size - 1):
        move = Move.FOLD if t < size else Move.RECEIVE
        yield _ring_step(size, member, (member - t) % size, move, (member - 1 - t) % size)


def _reduce_scatter(size: int, member: int) -> Iterator[Step]:
    for t in range(1, size):
        yield _ring_step(size, member, (member - t) % size, Move.FOLD, (member - 1 - t) % size)


def _all_gather(size: int, member: int) -> Iterator[Step]:
    for t in range(1, size):
        yield _ring_step(size, member, (member - t + 1) % size, Move.RECEIVE, (member - t) % size)


def _ring_step(size: int, member: int, sent: int, move: Move, received: int) -> Step:
    right, left = (member + 1) % size, (member - 1) % size
    return Action(Move.SEND, right, sent), Action(move, left, received)


def _all_to_all(size: int, member: int) -> Iterator[Step]:
    for t in range(1, size):
        right, left = (member + t) % size, (member - t) % size
        yield Action(Move.SEND, right, right), Action(Move.RECEIVE, left, left)


def _barrier(size: int, member: int) -> Iterator[Step]:
    distance = 1
    while distance < size:
        yield (
            Action(Move.SEND, (member + distance) % size, 0),
            Action(Move.RECEIVE, (member - distance) % size, 0),
        )
        distance *= 2


def _broadcast(size: int, member: int, root: int) -> Iterator[Step]:
    position = (member - root) % size
    if position:
        yield (Action(Move.RECEIVE, (parent(position) + root) % size, 0),)
    below = tuple(Action(Move.SEND, (child + root) % size, 0) for child in children(position, size))
    if below:
        yield below


def _reduce(size: int, member: int, root: int) -> Iterator[Step]:
    position = (member - root) % size
    for child in reversed(list(children(position, size))):
        yield (Action(Move.FOLD, (child + root) % size, 0),)
    if position:
        yield (Action(Move.SEND, (parent(position) + root) % size, 0),)


def _gather(size: int, member: int, root: int) -> Iterator[Step]:
    if member != root:
        yield (Action(Move.SEND, root, member),)
    elif size > 1:
        yield tuple(Action(Move.RECEIVE, other, other) for other in range(size) if other != root)


def _scatter(size: int, member: int, root: int) -> Iterator[Step]:
    if member != root:
        yield (Action(Move.RECEIVE, root, member),)
    elif size > 1:
        yield tuple(Action(Move.SEND, other, other) for other in range(size) if other != root)


_SYMMETRIC: dict[Op, Callable[[int, int], Iterator[Step]]] = {
    Op.ALL_REDUCE: _all_reduce,
    Op.REDUCE_SCATTER: _reduce_scatter,
    Op.ALL_GATHER: _all_gather,
    Op.ALL_TO_ALL: _all_to_all,
    Op.BARRIER: _barrier,
}
_ROOTED: dict[Op, Callable[[int, int, int], Iterator[Step]]] = {
    Op.BROADCAST: _broadcast,
    Op.REDUCE: _reduce,
    Op.GATHER: _gather,
    Op.SCATTER: _scatter,
}
