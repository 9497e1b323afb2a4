"""What stands in for the members that a pruned group leaves out.

Responsible for which messages the virtual side takes from sandbox members and which it gives them, with their
contents by name; the schedule of the sandbox members is the full one and stays untouched (programs.py).

Sandbox members keep the schedule of the whole group, and links between virtual members are cut. In a ring a gap of m
virtual members between sandbox members a and b is closed by the one before b, which is both a's right and b's left
neighbour. A chunk that enters the gap as message t would leave it m hops later as message t + m, hence

    what b receives as message r is what a sent as message r - m

The first m messages come from nobody: the closing member makes them up. The last m of a go nowhere. One virtual member
(the leftmost: the closing one of the first gap) adds the combined contribution of *all* virtual members to each chunk
that passes it. It does so in its first n messages, in which any member of the full ring adds its own: in them each
chunk passes it just once. Closing members of other gaps add nothing. So every sandbox member ends with the full result
and has exchanged what it would have in the full ring.

The closing member must be able to buffer what it has taken and may not send yet: up to n - k - 1 chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prism_sdk.pruning.programs import Move, parent, program
from prismtrace import Op

__all__ = ["COMBINED", "Closing", "Emission", "Intake", "NEUTRAL", "closing"]

#: Supply of an emission: what all virtual members contribute together, combined by the reduction.
COMBINED = -1
#: Supply of an emission: nothing but what it takes; without intakes the neutral element of the reduction.
NEUTRAL = -2


@dataclass(frozen=True, slots=True)
class Intake:
    """A message of a sandbox member to a virtual one."""

    source: int
    destination: int
    piece: int


@dataclass(frozen=True, slots=True)
class Emission:
    """A message of a virtual member to a sandbox one.

    It holds what was taken in (`takes`: indices of intakes), combined with the `supply`: the piece of COMBINED, of the
    recorded contribution of one virtual member (its rank in the group), or nothing (NEUTRAL). It is number `ordinal`
    of the `num_received` messages that its destination receives.
    """

    source: int
    destination: int
    piece: int
    takes: tuple[int, ...]
    supply: int
    ordinal: int
    num_received: int


@dataclass(frozen=True, slots=True)
class Closing:
    """The virtual side of a collective.

    Both lists are in order on each lane (source and destination). Emissions are in an order in which none waits for
    what an emission behind it makes possible.
    """

    intakes: tuple[Intake, ...]
    emissions: tuple[Emission, ...]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A message that a sandbox member expects of a virtual one."""

    source: int
    destination: int
    piece: int
    ordinal: int


def closing(op: Op, *, size: int, sandbox: Sequence[int], root: int | None = None) -> Closing:
    """What the virtual members of a group do for its sandbox members (ranks in the group).

    Raises:
        ValueError: as :func:`~prism_sdk.pruning.programs.program` does.
    """
    inside = frozenset(sandbox)
    intakes: list[Intake] = []
    wanted: list[_Wanted] = []
    counts: dict[int, int] = {}
    for member in sorted(inside):
        counts[member] = 0
        for step in program(op, size=size, member=member, root=root):
            for action in step:
                if action.move is Move.SEND:
                    if action.peer not in inside:
                        intakes.append(Intake(member, action.peer, action.piece))
                    continue
                if action.peer not in inside:
                    wanted.append(_Wanted(action.peer, member, action.piece, counts[member]))
                counts[member] += 1
    if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER):
        emissions = _rings(op, size, inside, intakes, wanted, counts)
    elif op is Op.BROADCAST:
        emissions = _broadcast(size, root or 0, inside, intakes, wanted, counts)
    elif op is Op.REDUCE:
        emissions = _reduce(size, root or 0, inside, intakes, wanted, counts)
    else:
        emissions = [
            _emission(one, counts, supply=NEUTRAL if op is Op.BARRIER else one.source)
            for one in sorted(wanted, key=lambda one: one.ordinal)
        ]
    return Closing(tuple(intakes), tuple(emissions))


def _emission(one: _Wanted, counts: dict[int, int], *, supply: int, takes: tuple[int, ...] = ()) -> Emission:
    return Emission(one.source, one.destination, one.piece, takes, supply, one.ordinal, counts[one.destination])


def _rings(
    op: Op, size: int, inside: frozenset[int], intakes: list[Intake], wanted: list[_Wanted], counts: dict[int, int]
) -> list[Emission]:
    """The index shift over gaps, with the compensation at the leftmost virtual member."""
    sent: dict[int, list[int]] = {}  # intakes of each sandbox member, by number of the message
    for index, intake in enumerate(intakes):
        sent.setdefault(intake.source, []).append(index)
    leftmost = min((one.destination for one in wanted), default=0)
    emissions = []
    for one in sorted(wanted, key=lambda one: one.ordinal):
        before = _before_gap(size, inside, one.destination)
        gap = (one.destination - before - 1) % size
        number = one.ordinal - gap
        takes = (sent[before][number],) if number >= 0 else ()
        if op is Op.ALL_GATHER:
            supply = NEUTRAL if takes else one.piece
        else:
            supply = COMBINED if one.destination == leftmost and one.ordinal < size else NEUTRAL
        emissions.append(_emission(one, counts, supply=supply, takes=takes))
    return emissions


def _before_gap(size: int, inside: frozenset[int], member: int) -> int:
    """The sandbox member on the other side of the gap to the left of `member`; it may be the same one."""
    at = (member - 1) % size
    while at not in inside:
        at = (at - 1) % size
    return at


def _broadcast(
    size: int, root: int, inside: frozenset[int], intakes: list[Intake], wanted: list[_Wanted], counts: dict[int, int]
) -> list[Emission]:
    """Of the nearest sandbox member above in the tree, else what the root contributed in the recording."""
    taken = {(intake.source, intake.destination): index for index, intake in enumerate(intakes)}
    emissions = []
    for one in sorted(wanted, key=lambda one: _depth((one.destination - root) % size)):
        at = (one.source - root) % size
        while at and (parent(at) + root) % size not in inside:
            at = parent(at)
        if at:
            takes = (taken[(parent(at) + root) % size, (at + root) % size],)
            emissions.append(_emission(one, counts, supply=NEUTRAL, takes=takes))
        else:
            emissions.append(_emission(one, counts, supply=root))
    return emissions


def _reduce(
    size: int, root: int, inside: frozenset[int], intakes: list[Intake], wanted: list[_Wanted], counts: dict[int, int]
) -> list[Emission]:
    """Partial results of the sandbox members below; one message adds the combined contribution of the virtual ones."""
    below: dict[int, list[int]] = {}  # intakes by the virtual member through which they come up to a sandbox one
    for index, intake in enumerate(intakes):
        at = (intake.destination - root) % size
        while at and (parent(at) + root) % size not in inside:
            at = parent(at)
        if at:
            below.setdefault((at + root) % size, []).append(index)
    ordered = sorted(wanted, key=lambda one: (-_depth((one.source - root) % size), one.ordinal))
    leftmost = min(ordered, key=lambda one: (one.source, one.destination), default=None)
    return [
        _emission(
            one, counts, supply=COMBINED if one is leftmost else NEUTRAL, takes=tuple(below.get(one.source, ()))
        )
        for one in ordered
    ]  # fmt: skip


def _depth(position: int) -> int:
    return position.bit_count()
