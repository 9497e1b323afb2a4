"""One number a rank in memory that the launcher shares with them: the step that the rank is in.

Only the progress display reads it. A rank writes eight bytes a step and sends nothing; a recording has no use for it,
its ranks tell the coordinator.
"""

from __future__ import annotations

import contextlib
import mmap
import os

_NUMBER_BYTES = 8


class StepBoard:
    """Made by the launcher before any rank is forked; the file has no name, so nothing is left behind.

    The launcher closes `fd` once the ranks are gone; what they wrote last can still be read.
    """

    def __init__(self, num_ranks: int) -> None:
        self.fd = -1
        self._steps: memoryview | None = None
        with contextlib.suppress(OSError, ValueError):  # without it no steps are shown, and all else works
            self.fd = os.memfd_create("prism-steps", 0)
            os.ftruncate(self.fd, num_ranks * _NUMBER_BYTES)
            self._steps = memoryview(mmap.mmap(self.fd, num_ranks * _NUMBER_BYTES)).cast("q")

    def steps(self) -> list[int]:
        """The step of each rank, in the order in which the launch has them; empty where nobody knows."""
        return [] if self._steps is None else self._steps.tolist()


def step_cell(fd: int, position: int) -> memoryview | None:
    """The number of the rank at `position`, as an array of one to write to. Closes `fd`: the program needs none."""
    if fd < 0:
        return None
    try:
        return memoryview(mmap.mmap(fd, 0)).cast("q")[position : position + 1]
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
