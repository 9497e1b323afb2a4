"""The slots of a recording: which are free, and which CPUs belong to each.

Responsible for counting; who gets one is the coordinator's.
"""

from __future__ import annotations

from collections.abc import Collection

from prism_sdk.runtime.cpus import slot_cpus


class Slots:
    """The slots of this machine, each with its share of the CPUs."""

    def __init__(self, num_slots: int, *, pin: bool = True) -> None:
        self._cpus = [slot_cpus(slot, num_slots) for slot in range(num_slots)] if pin else []
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def are_free(self) -> bool:
        """Whether any rank may get one."""
        return bool(self._free)

    def fitting(self, ready: Collection[int]) -> Collection[int]:
        """Those of the ranks that could have one as far as places go, in their order."""
        return ready

    def are_short_for(self, ready: Collection[int]) -> bool:
        """Whether one of the ranks is kept from running because there is no slot."""
        return not self._free

    def take(self, rank: int) -> int:
        """A free slot for `rank`."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Nobody has it any more."""
        self._free.append(slot)

    def cpus(self, slot: int) -> tuple[int, ...]:
        """What its holder is bound to; empty: to nothing."""
        return self._cpus[slot] if self._cpus else ()
