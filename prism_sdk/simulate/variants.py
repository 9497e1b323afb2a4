"""Makes variants of a job: other weights for some ranks, the rest shared with the original.

It decides no weights.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from prism_sdk.simulate.job import SimJob

__all__ = ["VariantWeights"]

Int64Array = npt.NDArray[np.int64]


class VariantWeights:
    """Collects new weights by rank position; ranks with one set of weights and one key share the new set, too."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._bases = job.weight_base.copy()
        self._parts: list[tuple[Int64Array, Int64Array, npt.NDArray[np.uint8]]] = []
        self._next = len(job.main)
        self._sets: dict[tuple[int, int, Hashable], int] = {}

    def _key(self, position: int, key: Hashable) -> tuple[int, int, Hashable]:
        return int(self._job.weight_base[position]), int(self._job.program[position]), key

    def known(self, position: int, key: Hashable) -> bool:
        """Whether a rank with the same weights and this key was there before; its set is then taken."""
        base = self._sets.get(self._key(position, key))
        if base is None:
            return False
        self._bases[position] = base
        return True

    def put(
        self, position: int, key: Hashable, main: Int64Array, side: Int64Array, provenance: npt.NDArray[np.uint8]
    ) -> None:
        """The weights of a rank position."""
        self._sets[self._key(position, key)] = self._bases[position] = self._next
        self._parts.append((main, side, provenance))
        self._next += len(main)

    def finish(self) -> SimJob:
        """The variant; weights that no rank has any more are left out."""
        job = self._job
        if not self._parts:
            return job
        keeps_old = bool((self._bases < len(job.main)).any())
        first = [(job.main, job.side, job.provenance)] if keeps_old else []
        parts = [*first, *self._parts]
        bases = self._bases if keeps_old else self._bases - len(job.main)
        return replace(
            job, weight_base=bases, main=np.concatenate([part[0] for part in parts]),
            side=np.concatenate([part[1] for part in parts]), provenance=np.concatenate([part[2] for part in parts]),
        )  # fmt: skip
