"""Which machine each rank of a recording runs on, and the slots of each.

Responsible for counting and dividing; machines are numbered, and what they are is known to host.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

from prism_sdk.runtime.slots import Slots


def divide(num_slots: int, num_cpus: Sequence[int]) -> tuple[int, ...]:
    """Slots of each machine: `num_slots` in all, as its CPUs are to those of all machines."""
    total = sum(num_cpus)
    shares = [num_slots * cpus / total for cpus in num_cpus]
    found = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda machine: (found[machine] - shares[machine], machine))
    for machine in by_rest[: num_slots - sum(found)]:
        found[machine] += 1
    return tuple(found)


class Places:
    """Where ranks are: neighbours together if all ranks of `world_size` run, else where there is most room."""

    def __init__(self, num_slots: Sequence[int], *, world_size: int | None) -> None:
        self._num_slots = tuple(num_slots)
        self._world_size = world_size
        self._ends = list(accumulate(num_slots))
        self._load = [0] * len(num_slots)
        self._machines: dict[int, int] = {}

    def machine_of(self, rank: int) -> int:
        """Number of the machine of a rank; decided when it is asked for the first time."""
        machine = self._machines.get(rank)
        if machine is None:
            machine = self._machines[rank] = self._choose(rank)
            self._load[machine] += 1
        return machine

    def _choose(self, rank: int) -> int:
        if self._world_size is not None:
            return bisect_right(self._ends, rank * self._ends[-1] / self._world_size)
        able = [machine for machine, slots in enumerate(self._num_slots) if slots]
        return min(able, key=lambda machine: (self._load[machine] + 1) / self._num_slots[machine])


class MachineSlots(Slots):
    """Slots of several machines: a rank can have only one of its own machine."""

    def __init__(self, num_slots: Sequence[int], places: Places, *, pin: bool = True) -> None:
        self._num_slots, self._places, self._pin = tuple(num_slots), places, pin
        self._firsts = [0, *accumulate(num_slots)]
        self._unused = [list(range(first + num - 1, first - 1, -1))
                        for first, num in zip(self._firsts, num_slots, strict=False)]  # fmt: skip

    @property
    def are_free(self) -> bool:
        return any(self._unused)

    def fitting(self, ready: Collection[int]) -> Collection[int]:
        return [rank for rank in ready if self._unused[self._places.machine_of(rank)]]

    def are_short_for(self, ready: Collection[int]) -> bool:
        return len(self.fitting(ready)) < len(ready)

    def take(self, rank: int) -> int:
        return self._unused[self._places.machine_of(rank)].pop()

    def give_back(self, slot: int) -> None:
        self._unused[bisect_right(self._firsts, slot) - 1].append(slot)

    def cpus(self, slot: int) -> tuple[int, ...]:
        """(number of the slot on its machine, slots there): which CPUs that is, only the machine knows."""
        machine = bisect_right(self._firsts, slot) - 1
        return (slot - self._firsts[machine], self._num_slots[machine]) if self._pin else ()
