"""A job of two kinds, which checks that its device memory is what it left there; it holds no test.

Under `prism record` ranks meet after each change of their memory.  Without arguments but a library it is one process
that moves its own pages.  Both use the runtime's functions directly, as torch built for CUDA does.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Any

MIB = 1 << 20


def runtime() -> Any:
    ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(None)  # where the library comes first


def allocate(functions: Any, size: int) -> int | None:
    address = ctypes.c_void_p()
    return None if functions.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) else address.value


def job(num_blocks: int, steps: int) -> None:
    import torch
    import torch.distributed as dist

    functions = runtime()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    blocks = []
    for _ in range(num_blocks):
        address = allocate(functions, 10 * MIB)
        if address is None:
            raise torch.OutOfMemoryError(f"CUDA out of memory: rank {rank}")
        ctypes.memset(address, rank + 1, 10 * MIB)
        blocks.append(address)
    for step in range(steps):
        value = torch.full((1000,), float(rank + step))
        dist.all_reduce(value)
        if "--dies" in sys.argv and rank == 1 and step == 1:
            os.kill(os.getpid(), 9)
        for address in blocks:
            assert ctypes.string_at(address, 10 * MIB) == bytes([rank + 1 + step]) * (10 * MIB), (rank, step)
            ctypes.memset(address, rank + 2 + step, 10 * MIB)
    for address in blocks:
        functions.cudaFree(ctypes.c_void_p(address))
    os.write(1, f"{rank} {value[0].item()}\n".encode())
    dist.destroy_process_group()


def alone(library_path: str, disk: str) -> None:
    from pathlib import Path

    from prism_sdk.runtime.oncuda.paging import library
    from prism_sdk.runtime.oncuda.paging.hostpool import HostPool

    library.preload(library_path)
    functions = runtime()
    pool = HostPool(70 * MIB)
    before = allocate(functions, 3 * MIB)  # nobody serves yet
    pages = library.Pages(pool_fd=pool.fd, rank=4, disk=Path(disk), limit_bytes=200 * MIB, num_workers=3)
    functions.cudaFree(ctypes.c_void_p(before))
    sizes = [2 * MIB, 20 * MIB, 6 * MIB, 512, 30 * MIB, 3_000_000]
    kept = []
    for size in sizes:
        address, data = allocate(functions, size), os.urandom(size)
        assert address is not None
        ctypes.memmove(address, data, size)
        kept.append((address, data))
    stats = pages.stats()
    assert (stats.movable_bytes, stats.fixed_bytes, stats.num_pages) == (62 * MIB, 512, 6), stats
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    functions.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    assert (total.value, total.value - free.value) == (200 * MIB, 62 * MIB + 512)
    properties = (ctypes.c_uint64 * 128)()
    assert functions.cudaGetDeviceProperties(properties, 0) == 0 and properties[36] == 200 * MIB
    assert allocate(functions, 160 * MIB) is None and pages.stats().refused_bytes == 160 * MIB
    in_use = 62 * MIB + 512
    moved = pages.move_out()
    assert (moved.status, moved.num_bytes) == (2, 62 * MIB)  # it has no host memory yet, and stays where it is
    assert pool.take(3, 4 * MIB) and pool.take(4, 62 * MIB) and pool.promised_bytes == 66 * MIB
    pages.prepare()
    until = time.monotonic() + 20
    while pages.ready_bytes() < 62 * MIB:  # the system hands out memory before anything moves
        assert time.monotonic() < until, pages.ready_bytes()
    for where in (library.IN_HOST_MEMORY, library.ON_DISK, library.IN_HOST_MEMORY):
        assert pages.real_memory() == (256 * MIB - in_use, 256 * MIB)
        moved = pages.move_out(where)
        assert (moved.status, moved.num_bytes, moved.fresh_bytes) == (0, 62 * MIB, 0), (moved.status, moved.code)
        assert pages.real_memory()[0] == 256 * MIB - 512 and pages.stats().where == where
        assert pages.move_out(where).num_bytes == 0  # it is out already
        pages.prepare()  # what is out stays as it is
        taken = (ctypes.c_void_p * 1)()
        blocked = threading.Thread(target=lambda: taken.__setitem__(0, allocate(functions, 2 * MIB)))  # noqa: B023
        blocked.start()
        blocked.join(0.05)
        assert blocked.is_alive()  # an allocation waits until the pages are back
        moved = pages.move_in()
        blocked.join()
        assert (moved.status, moved.num_bytes) == (0, 62 * MIB)
        functions.cudaFree(ctypes.c_void_p(taken[0]))
        for address, data in kept:
            assert ctypes.string_at(address, len(data)) == data
    assert pool.promised_bytes == 4 * MIB  # of the other rank, whose memory is its own
    pool.free(4)
    assert pool.shrink(62 * MIB) == 62 * MIB and pool.take(4, 62 * MIB)
    pages.prepare()
    moved = pages.move_out()  # in the midst of it
    assert moved.num_bytes == 62 * MIB and pool.promised_bytes == 4 * MIB
    assert pages.move_in().num_bytes == 62 * MIB
    for address, data in kept:
        assert ctypes.string_at(address, len(data)) == data
    assert os.fstat(pages.disk_fd).st_size == 0  # nothing is left there
    refuses_to_move(functions, pages)
    for address, _ in kept:
        assert functions.cudaFree(ctypes.c_void_p(address)) == 0
    assert pages.stats().num_pages == 0 and pages.real_memory()[0] == 256 * MIB
    print("good")


def shared(library_path: str, pool_fd: int, rank: int, size: int) -> None:
    """A rank that is told on stdin to leave, to return (what it finds is checked, and changed), to touch its blocks."""
    import json

    from prism_sdk.runtime.oncuda.paging import library

    library.preload(library_path)
    functions = runtime()
    pages = library.Pages(pool_fd=pool_fd, rank=rank, num_workers=2)
    os.close(pool_fd)
    address = allocate(functions, size)
    assert address is not None
    data = os.urandom(size)
    ctypes.memmove(address, data, size)
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "prepare\n":
            pages.prepare()
            print(json.dumps(None), flush=True)
            continue
        moved = pages.move_out() if line == "out\n" else pages.move_in()
        if line == "in\n":
            assert ctypes.string_at(address, size) == data
            data = data[1:] + data[:1]
            ctypes.memmove(address, data, size)
        print(json.dumps([moved.status, moved.num_bytes, moved.fresh_bytes]), flush=True)


def context(library_path: str) -> None:
    """Says what the library takes the context for."""
    from prism_sdk.runtime.oncuda.paging import library

    library.preload(library_path)
    functions = runtime()
    pages = library.Pages(limit_bytes=600 * MIB)
    assert allocate(functions, 2 * MIB) is not None and allocate(functions, 100 * MIB) is None
    print(pages.stats().overhead_bytes >> 20)


def others(library_path: str) -> None:
    """What a real run had beside the program's memory counts in place of all that is there of others."""
    from prism_sdk.runtime.oncuda.paging import library

    library.preload(library_path)
    functions = runtime()
    pages = library.Pages(limit_bytes=200 * MIB, is_alone=True, others_bytes=90 * MIB)
    foreign = ctypes.CDLL("libcuda.so.1")  # memory of Prism's own, which a real run does not have
    handle = ctypes.c_uint64()
    assert foreign.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(50 * MIB), None, ctypes.c_uint64(0)) == 0
    assert allocate(functions, 100 * MIB) is not None
    assert allocate(functions, 12 * MIB) is None and pages.stats().refused_bytes == 12 * MIB
    assert allocate(functions, 10 * MIB) is not None
    print("good")


def refuses_to_move(functions: Any, pages: Any) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert pages.hold_still() and pages.move_out().status == 5
    ended.set()
    thread.join()
    assert not pages.hold_still()
    assert pages.move_out().status == 0
    foreign = ctypes.CDLL("libcuda.so.1")  # somebody else takes the room
    handle = ctypes.c_uint64()
    assert foreign.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(200 * MIB), None, ctypes.c_uint64(0)) == 0
    moved = pages.move_in()
    assert (moved.status, moved.num_bytes) == (1, 62 * MIB - (56 * MIB - 512)), (moved.status, moved.num_bytes)
    assert foreign.cuMemRelease(handle) == 0
    assert pages.move_in().status == 0


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "context":
        context(sys.argv[2])
    elif sys.argv[1] == "shared":
        shared(sys.argv[2], *map(int, sys.argv[3:6]))
    elif sys.argv[1] == "others":
        others(sys.argv[2])
    else:
        alone(*sys.argv[1:3])
