"""The host memory that ranks move their device memory to: blocks of one file of memory that all of them share.

Responsible for who has which block, and for giving blocks back to the system; it copies nothing.

The launcher alone says whose a block is, before it asks a rank to move; a rank reads that, and notes which blocks the
system has handed out (pool.c).  A block that is free again keeps its memory for the next rank.  The file has no name:
it is gone with the processes, however they end.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from prism_sdk.errors import RunError

__all__ = ["BLOCK_BYTES", "HostPool"]

BLOCK_BYTES = 2 << 20
"""A huge page, as in pool.c."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostPool:
    """The blocks of one launch.

    Args:
        num_bytes: how large it may become; 0: there is none, and no file either.

    Raises:
        RunError: the system does not let it be so large.
    """

    def __init__(self, num_bytes: int = 0, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes, num_blocks = block_bytes, num_bytes // block_bytes
        self._data_offset = -(-(16 + 5 * num_blocks) // BLOCK_BYTES) * BLOCK_BYTES
        size = self._data_offset + num_blocks * block_bytes
        self.fd = os.memfd_create("prism-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if num_blocks else -1
        try:
            if num_blocks:
                os.ftruncate(self.fd, size)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise RunError(
                f"the host memory for device memory of parked ranks cannot be set up: {error}",
                hint="allow more address space (ulimit -v) and larger files (ulimit -f), or less: --parked-memory SIZE",
            ) from error
        header = np.frombuffer(self._map, np.uint64, 2)
        header[:] = num_blocks, self._data_offset
        self._owners = np.frombuffer(self._map, np.int32, num_blocks, 16)  # rank + 1; 0: nobody's
        self._is_there = np.frombuffer(self._map, np.bool_, num_blocks, 16 + 4 * num_blocks)
        self._had_last = np.zeros(num_blocks, np.int32)  # that rank has it mapped

    def close(self) -> None:
        """The memory is the system's again once no rank has it mapped."""
        self._owners = self._had_last = np.empty(0, np.int32)
        self._is_there = np.empty(0, np.bool_)
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    # -- how much -----------------------------------------------------------------------------------------------------

    def bytes_of(self, rank: int) -> int:
        """What a rank has."""
        return self._bytes(self._owners == rank + 1)

    @property
    def held_bytes(self) -> int:
        """Memory of the system that the pool has, or has promised to ranks."""
        return self._bytes((self._owners != 0) | self._is_there)

    @property
    def promised_bytes(self) -> int:
        """What of that the system has not handed out yet."""
        return self._bytes((self._owners != 0) & ~self._is_there)

    def fresh_bytes(self, rank: int, num_bytes: int) -> int:
        """How much the pool would grow if the rank had `num_bytes`."""
        free = self._is_there & (self._owners == 0)
        return max(0, self._missing(rank, num_bytes) - int(np.count_nonzero(free))) * self.block_bytes

    def _bytes(self, chosen: np.ndarray) -> int:
        return int(np.count_nonzero(chosen)) * self.block_bytes

    def _missing(self, rank: int, num_bytes: int) -> int:
        return max(0, -(-num_bytes // self.block_bytes) - int(np.count_nonzero(self._owners == rank + 1)))

    # -- whose --------------------------------------------------------------------------------------------------------

    def take(self, rank: int, num_bytes: int) -> bool:
        """Let the rank have so much: first of what the system has handed out, and of that what it had before.

        False: so much there is not."""
        free = np.flatnonzero(self._owners == 0)
        missing = self._missing(rank, num_bytes)
        if missing > len(free):
            return False
        order = np.lexsort((self._had_last[free] != rank + 1, ~self._is_there[free]))
        chosen = free[order[:missing]]
        self._owners[chosen] = self._had_last[chosen] = rank + 1
        return True

    def free(self, rank: int) -> None:
        """The rank has nothing there any more; the memory stays for the next one."""
        self._owners[self._owners == rank + 1] = 0

    def shrink(self, num_bytes: int) -> int:
        """Give what nobody has back to the system, about so much of it. Returns how much it was."""
        idle = np.flatnonzero(self._is_there & (self._owners == 0))[::-1][: -(-num_bytes // self.block_bytes)]
        self._is_there[idle] = False
        self._had_last[idle] = 0
        for block in idle.tolist():
            self._map.madvise(mmap.MADV_REMOVE, self._data_offset + block * self.block_bytes, self.block_bytes)
        return len(idle) * self.block_bytes
