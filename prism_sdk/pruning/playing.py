"""Carries out a member's program and the virtual side of a collective, over whatever moves the bytes.

Responsible for the order of sends, receives and reductions; buffers, arithmetic and transport are handed in.

Both are generators of what has to be waited for: a rank waits for each, a test may play many members in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from prism_sdk.pruning.closing import NEUTRAL, Closing, Emission
from prism_sdk.pruning.programs import Move, Step

__all__ = ["Lanes", "Pending", "play", "play_closing"]

#: Anything with a length that can be sent whole: a numpy array, a tensor of one dimension.
Buffer = Any


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Block until the message has been received, or what is sent may be overwritten."""


class Lanes(Protocol):
    """Moves messages between members of one group, in order on each lane. None of its calls blocks."""

    def send(self, source: int, destination: int, buffer: Buffer) -> Pending:
        """Start to send a buffer. Ranks are those in the whole group."""

    def receive(self, source: int, destination: int, buffer: Buffer) -> Pending:
        """Start to receive into a buffer."""


def play(
    steps: Sequence[Step], *, member: int, lanes: Lanes, outgoing: Callable[[int], Buffer],
    incoming: Callable[[int], Buffer], fold: Callable[[Buffer, Buffer], object], like: Callable[[Buffer], Buffer],
) -> Iterator[Pending]:  # fmt: skip
    """Carry out a member's program. Pieces without elements are passed over.

    Args:
        steps: what :func:`~prism_sdk.pruning.programs.program` returned.
        member: the member's rank in the group.
        lanes: moves the bytes.
        outgoing: the buffer of a piece that is sent.
        incoming: the buffer that a piece is received into, or that holds what it is combined with.
        fold: ``fold(a, b)`` combines b into a.
        like: an empty buffer of the size of another one.
    """
    for step in steps:
        received: list[Pending] = []
        folds: list[tuple[Buffer, Buffer]] = []
        for action in step:
            if action.move is Move.SEND or not len(incoming(action.piece)):
                continue
            target = incoming(action.piece)
            room = target if action.move is Move.RECEIVE else like(target)
            received.append(lanes.receive(action.peer, member, room))
            if action.move is Move.FOLD:
                folds.append((target, room))
        for action in step:
            if action.move is Move.SEND and len(outgoing(action.piece)):
                received.append(lanes.send(member, action.peer, outgoing(action.piece)))
        yield from received
        for target, room in folds:
            fold(target, room)


def play_closing(
    closing: Closing, *, lanes: Lanes, size_of: Callable[[int, int, int], int], empty: Callable[[int], Buffer],
    neutral: Callable[[int], Buffer], supply: Callable[[Emission], Buffer], fold: Callable[[Buffer, Buffer], object],
    pace: Callable[[Emission], object],
) -> Iterator[Pending]:  # fmt: skip
    """Carry out the virtual side. All that is sent to it is received at once, into buffers of their own: it is elastic.

    Args:
        closing: what :func:`~prism_sdk.pruning.closing.closing` returned.
        lanes: moves the bytes.
        size_of: elements of a message, by source, destination and piece.
        empty: a buffer of so many elements.
        neutral: a buffer of so many neutral elements of the reduction.
        supply: the supplied part of an emission that is not NEUTRAL; it is read only.
        fold: ``fold(a, b)`` combines b into a.
        pace: called before each emission; returns when it is time to send.
    """
    rooms: list[Buffer] = []
    arrivals: list[Pending | None] = []
    for intake in closing.intakes:
        room = empty(size_of(intake.source, intake.destination, intake.piece))
        rooms.append(room)
        arrivals.append(lanes.receive(intake.source, intake.destination, room) if len(room) else None)
    sent: list[Pending] = []
    for emission in closing.emissions:
        count = size_of(emission.source, emission.destination, emission.piece)
        if not count:
            continue
        value: Buffer = None
        for index in emission.takes:
            arrival, arrivals[index] = arrivals[index], None
            if arrival is not None:
                yield arrival
            if value is None:
                value = rooms[index]
            else:
                fold(value, rooms[index])
        if emission.supply != NEUTRAL:
            supplied = supply(emission)
            if value is None:
                value = supplied
            else:
                fold(value, supplied)
        pace(emission)
        sent.append(lanes.send(emission.source, emission.destination, neutral(count) if value is None else value))
    for arrival in arrivals:
        if arrival is not None:
            yield arrival
    yield from sent
