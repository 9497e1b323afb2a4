"""Which contributions lie in the memory of which machine, and what a message needs before it can be understood there.

Responsible for bookkeeping; it moves no bytes.

Each machine has an arena of its own with a stretch for every rank of the job, so a region has the same offset wherever
it lies: its owner writes it on its own machine, and a copy goes to the same place on each machine that reads it.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from prism_sdk.runtime.arena import RANK_SPAN_BYTES
from prism_sdk.runtime.matching import Contribution
from prism_sdk.runtime.roles.views import SharedSources

Region = tuple[int, int]
"""(offset, bytes) in the arena."""

_NUM_UNPACKED = 256


class Mirrors:
    """Copies of regions on machines other than their owner's."""

    def __init__(self, machine_of: Callable[[int], int]) -> None:
        self._machine_of = machine_of
        self._there: dict[int, set[int]] = {}  # offset -> machines that have a copy
        self._coming: dict[int, set[int]] = {}
        self._unpacked: OrderedDict[int, tuple[bytes, tuple[Region, ...]]] = OrderedDict()

    def home(self, offset: int) -> int:
        """The machine of the rank that owns what lies at `offset`."""
        return self._machine_of(offset // RANK_SPAN_BYTES)

    def needed(self, message: tuple[Any, ...], machine: int) -> dict[int, int]:
        """Offset -> bytes of what a message to a rank of `machine` refers to and is not there yet."""
        return {
            offset: num_bytes for offset, num_bytes in self._regions(message)
            if self.home(offset) != machine and machine not in self._there.get(offset, ())
        }  # fmt: skip

    def order(self, offset: int, machine: int) -> bool:
        """Note that a copy is on its way to `machine`; False when it was before."""
        coming = self._coming.setdefault(offset, set())
        if machine in coming:
            return False
        coming.add(machine)
        return True

    def arrived(self, offset: int, machine: int) -> None:
        """The copy is there."""
        self._coming.get(offset, set()).discard(machine)
        self._there.setdefault(offset, set()).add(machine)

    def drop(self, offset: int) -> Iterable[int]:
        """The owner may write over a region: copies count no more. Returns the machines that have one."""
        self._coming.pop(offset, None)
        return self._there.pop(offset, ())

    def _regions(self, message: tuple[Any, ...]) -> tuple[Region, ...]:
        if message[0] not in ("ready", "combine"):
            return ()
        sources = message[1]
        if not isinstance(sources, bytes):
            return _regions_of(sources)
        known = self._unpacked.get(id(sources))  # one object goes to all members of a group
        if known is None or known[0] is not sources:
            known = self._unpacked[id(sources)] = (sources, _regions_of(pickle.loads(sources)))
            if len(self._unpacked) > _NUM_UNPACKED:
                self._unpacked.popitem(last=False)
        return known[1]


def _regions_of(sources: Any) -> tuple[Region, ...]:
    given: Iterable[tuple[Contribution, Any]]
    given = sources.given if isinstance(sources, SharedSources) else sources.values()
    return tuple(contribution for contribution, _ in given if isinstance(contribution, tuple))
