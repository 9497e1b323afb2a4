"""Says what a unit is called in a viewer, on which track it lies, and which flow it is part of. Writes nothing."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, ABSENT32, Op, Phase, UnitKind
from prismtrace.tables import DictionaryColumn, UnitTable

HOST: Final = (0, 0)
_SENDS, _RECEIVES, _COLLECTIVES = 2, 3, 1


def text_of(enum: type[IntEnum], value: int) -> str:
    """The name of an enum value in text; its number where this version has no name for it."""
    known = enum._value2member_map_.get(value)
    return f"{enum.__name__.lower()} {value}" if known is None else str(getattr(known, "name", value)).lower()


@functools.cache
def texts_of(enum: type[IntEnum]) -> tuple[str, ...]:
    """The name of every possible value of an enum column."""
    return tuple(text_of(enum, value) for value in range(256))


def names(units: UnitTable) -> tuple[NDArray[np.int64], list[str]]:
    """What each unit is called: its label, or what it is. As codes into a list of texts."""
    label: DictionaryColumn[str] = units.label
    packed = units.kind.astype(np.int64) << 16 | units.op.astype(np.int64) << 8 | units.phase
    combinations, which = np.unique(packed, return_inverse=True)
    texts = [*label.values, *(_name(*divmod(int(value) >> 8, 256), int(value) & 255) for value in combinations)]
    return np.where(label.codes >= 0, label.codes, len(label.values) + which.reshape(-1)), texts


def _name(kind: int, op: int, phase: int) -> str:
    if kind in (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV) and op:
        return text_of(Op, op)
    if kind == UnitKind.COMPUTE and phase:
        return text_of(Phase, phase)
    return text_of(UnitKind, kind) if kind else "unit"


def places(units: UnitTable) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """The track of each unit: the host, or a group's collectives, sends or receives. As codes into a list."""
    direction = np.zeros(len(units), np.int64)
    for kind, number in ((UnitKind.COLLECTIVE, _COLLECTIVES), (UnitKind.SEND, _SENDS), (UnitKind.RECV, _RECEIVES)):
        direction[units.kind == kind] = number
    group = np.where(direction > 0, units.group_id, np.uint64(0))
    group_ids, which = np.unique(group, return_inverse=True)
    pairs, codes = np.unique(direction * len(group_ids) + which.reshape(-1), return_inverse=True)
    found = [divmod(int(pair), len(group_ids)) for pair in pairs]
    return codes.reshape(-1).astype(np.int64), [(kind, int(group_ids[number])) for kind, number in found]


def track_name(place: tuple[int, int], groups: Any) -> str:
    """What the track of a place is called."""
    direction, group_id = place
    if direction == 0:
        return "host"
    group = groups.get(group_id)
    name = group.name if group is not None and group.name else f"group {group_id}"
    return name + {_COLLECTIVES: "", _SENDS: " send", _RECEIVES: " recv"}[direction]


def flows(units: UnitTable, *, messages: bool, collectives: bool) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """The flow of each unit, equal for both sides of a message and for all members of a collective.

    The number is a hash of what identifies the operation, so that ranks need not know each other.
    """
    known = units.seq != ABSENT
    peer = units.peer.astype(np.int64)
    sends, receives = units.kind == UnitKind.SEND, units.kind == UnitKind.RECV
    between = (sends | receives) & known & (units.peer != ABSENT32)
    together = (units.kind == UnitKind.COLLECTIVE) & known & (units.group_id != 0)
    source = np.where(sends, units.rank, np.where(receives, peer, -1))
    target = np.where(sends, peer, np.where(receives, units.rank, -1))
    tag = np.where(between, np.where(units.tag == ABSENT, -1, units.tag), -1)
    number = np.full(len(units), np.uint64(0x5072_6973_6D46_6C6F))
    for part in (units.group_id, source, target, tag, units.seq):
        number = mixed(number ^ np.ascontiguousarray(part).astype(np.int64, copy=False).view(np.uint64))
    return number, (between & messages) | (together & collectives)


def mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
