"""Shared memory that carries tensor bytes between ranks.

Responsible for one anonymous file, its per-rank regions and their reuse; it does not know which operation the bytes
belong to.

The file is a memfd created before any rank is forked: it has no name, so nothing is left behind however a run ends.  It
is sparse and each rank owns a fixed stretch of it, so a rank allocates without asking anybody.  Bytes move by pread and
pwrite, not through a mapping: no page-table cost in ranks that only pass by, and private memory stays small.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Iterable

from prism_sdk.errors import RunError
from prism_sdk.runtime.gauges import host_memory

RANK_SPAN_BYTES = 1 << 40  # address space of one rank in the sparse file; pages exist only where written
_ALIGN = 4096
_IO_LIMIT = 1 << 30  # one pread/pwrite moves at most 2 GiB - 4 KiB on Linux

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
# free regions beyond this are given back to the system: of a rank, and, where that is more, of all ranks together those
# of sizes that come again (most of a job with other sizes in each step would never be used again)
_KEEP_FREE_BYTES, _KEEP_FREE_BYTES_OF_ALL = 16 << 20, 4 << 30
_KEEP_SHARE_OF_ALL = 1 / 8  # of the host's memory, at most


def create_arena(world_size: int) -> int:
    """Create the shared file for `world_size` ranks; returns its descriptor (inheritable by fork)."""
    fd = os.memfd_create("prism-arena", 0)
    try:
        os.ftruncate(fd, RANK_SPAN_BYTES * world_size)
    except OSError as error:
        os.close(fd)
        raise RunError(
            f"the memory that ranks share cannot be set up: {error}",
            hint="the file size limit of the shell counts for it too: ulimit -f unlimited",
        ) from error
    return fd


def tensor_memory(data_ptr: int, num_bytes: int) -> memoryview:
    """A view of the memory at `data_ptr`. Unlike tensor.numpy() this leaves the tensor's storage resizable."""
    return memoryview((ctypes.c_char * num_bytes).from_address(data_ptr)).cast("B")


class Arena:
    """One rank's end of the shared file."""

    def __init__(self, fd: int, rank: int, *, num_ranks: int) -> None:
        """`num_ranks`: how many share the host's memory."""
        self.fd = fd
        memory = host_memory()
        share = int(memory.total_bytes * _KEEP_SHARE_OF_ALL) if memory is not None else 0
        self._keep_bytes = max(_KEEP_FREE_BYTES, min(_KEEP_FREE_BYTES_OF_ALL, share) // num_ranks)
        self._next = RANK_SPAN_BYTES * rank
        self._limit = RANK_SPAN_BYTES * (rank + 1)
        self._free: dict[int, list[tuple[int, bool]]] = defaultdict(list)  # size -> (offset, pages resident)
        self._free_bytes = 0
        self._repeated: set[int] = set()  # sizes of which a free region was used again

    def allocate(self, num_bytes: int) -> int:
        """Reserve a region; returns its offset in the file. Equal sizes are reused, as training steps repeat them."""
        size = -(-max(num_bytes, 1) // _ALIGN) * _ALIGN
        if self._free[size]:
            offset, resident = self._free[size].pop()
            self._repeated.add(size)
            self._free_bytes -= size if resident else 0
            return offset
        offset = self._next
        if offset + size > self._limit:
            raise MemoryError(f"the arena of one rank is limited to {RANK_SPAN_BYTES} bytes")
        self._next += size
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """Give a region back; its pages return to the system when much is free already."""
        size = -(-max(num_bytes, 1) // _ALIGN) * _ALIGN
        limit = self._keep_bytes if size in self._repeated else _KEEP_FREE_BYTES
        resident = self._free_bytes + size <= limit
        if resident:
            self._free_bytes += size
        else:
            self.give_up(offset, num_bytes)
        self._free[size].append((offset, resident))

    def give_up(self, offset: int, num_bytes: int) -> None:
        """Let the system have the pages of a region, whoever owns it."""
        size = -(-max(num_bytes, 1) // _ALIGN) * _ALIGN
        _libc.fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, offset, size)

    def write(self, offset: int, views: Iterable[memoryview]) -> None:
        """Write `views` one after the other from `offset`."""
        for view in views:
            position = 0
            while position < len(view):
                position += os.pwrite(self.fd, view[position : position + _IO_LIMIT], offset + position)
            offset += len(view)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`."""
        position = 0
        while position < len(view):
            position += os.preadv(self.fd, [view[position : position + _IO_LIMIT]], offset + position)
