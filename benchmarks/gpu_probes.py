"""Tries, one by one, what Prism asks of a machine with GPUs, and measures what moving memory to the host is made of.

    python benchmarks/gpu_probes.py [NAME ...]

Every probe is small, says one line and lets the next one run whatever happens: this is what to run first on a new
machine. `memory` and `pinning` need no GPU, or one; `words` uses a second GPU where there is one.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 14, 15, 23
_GIB = 1 << 30
AHEAD_GIB = 8
_AHEAD = "taken ahead by 2 threads"


def versions() -> str:
    from prism_sdk.runtime.oncuda.driver import libcuda

    cuda, version = libcuda(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    nccl = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
    kernel, huge = os.uname().release, Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    return (f"torch {torch.__version__}, driver API {version.value}, NCCL {nccl.value}, {torch.cuda.device_count()} "
            f"GPUs, {os.cpu_count()} CPUs, Linux {kernel}, huge pages {huge}, "
            f"NVLS {os.environ.get('NCCL_NVLS_ENABLE')}")  # fmt: skip


def streams() -> str:
    """Waits and writes of streams, on the shared table; from release to the stream's going on."""
    from prism_sdk.runtime.oncuda import holdtable as fields
    from prism_sdk.runtime.oncuda.driver import Driver

    fd = fields.create_table()
    table = fields.HoldTable(fd)
    torch.cuda.current_stream().query()
    torch.zeros(1, device="cuda")
    driver = Driver()
    seen = driver.register(ctypes.addressof(ctypes.c_char.from_buffer(table.map)), fields.TABLE_BYTES)
    stream = torch.cuda.ExternalStream(driver.create_stream(is_urgent=True))
    times = []
    for number in range(200):
        ticket = table.ticket(number)
        driver.stream_wait(stream.cuda_stream, seen + 4 * table.word(number, fields.RELEASE), ticket)
        driver.stream_write(stream.cuda_stream, seen + 4 * table.word(number, fields.DONE), ticket)
        time.sleep(0.0005)
        began = time.monotonic_ns()
        table.words[table.word(number, fields.RELEASE)] = ticket
        while table.words[table.word(number, fields.DONE)] != ticket:
            pass
        times.append(time.monotonic_ns() - began)
    return f"release to stream {statistics.median(times) / 1e3:.1f} us median, {sorted(times)[190] / 1e3:.1f} us p95"


def words() -> str:
    """A word that one process's GPU writes is seen by a stream of another process, on the last GPU."""
    code = "import sys, benchmarks.gpu_probes as p; p.other_end(int(sys.argv[1]), int(sys.argv[2]))"
    from prism_sdk.runtime.oncuda import holdtable as fields

    fd = fields.create_table()
    table = fields.HoldTable(fd)
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    device = torch.cuda.device_count() - 1
    process = subprocess.Popen([sys.executable, "-c", code, str(fd), str(device)], pass_fds=[fd], env=environment)
    try:
        until = time.monotonic() + 60
        while not table.is_ready:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the other process did not come")
            time.sleep(0.01)
        began = time.monotonic_ns()
        table.words[table.word(0, fields.RELEASE)] = 1
        while table.words[table.word(0, fields.DONE)] != 1:
            if time.monotonic() > until:
                raise RuntimeError("the stream of the other process did not go on")
        return f"GPU {device} of another process went on after {(time.monotonic_ns() - began) / 1e3:.1f} us"
    finally:
        process.kill()
        process.wait()


def other_end(fd: int, device: int) -> None:
    """The other process of `words`."""
    from prism_sdk.runtime.oncuda import holdtable as fields
    from prism_sdk.runtime.oncuda.driver import Driver

    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    table, driver = fields.HoldTable(fd), Driver()
    seen = driver.register(ctypes.addressof(ctypes.c_char.from_buffer(table.map)), fields.TABLE_BYTES)
    stream = torch.cuda.ExternalStream(driver.create_stream(is_urgent=True))
    driver.stream_wait(stream.cuda_stream, seen + 4 * table.word(0, fields.RELEASE), 1)
    driver.stream_write(stream.cuda_stream, seen + 4 * table.word(0, fields.DONE), 1)
    table.set_ready()
    torch.cuda.synchronize()
    time.sleep(60)


def occupying() -> str:
    """The kernel that occupies, in both of its ways."""
    from prism_sdk.runtime.oncuda.occupying import Occupier

    said = []
    for num_blocks in (24, 0):
        occupier = Occupier(num_blocks=num_blocks)
        occupier.occupy(1_000_000)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        occupier.occupy(1_000_000)
        end.record()
        torch.cuda.synchronize()
        said.append(f"{occupier.kind} of {num_blocks} blocks, asked for 1 ms: {start.elapsed_time(end):.4f} ms")
    return "; ".join(said)


def pair() -> str:
    """Two processes, two GPUs: a communicator without torch, and each call of it once."""
    if torch.cuda.device_count() < 2:
        return "skipped: one GPU"
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    code = "import sys, benchmarks.gpu_probes as p; p.pair_end(int(sys.argv[1]), sys.argv[2])"
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        processes = [
            subprocess.Popen([sys.executable, "-c", code, str(at), folder], env=environment, stdout=subprocess.PIPE,
                             text=True)
            for at in range(2)
        ]  # fmt: skip
        try:
            outs = [process.communicate(timeout=60)[0].strip() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise RuntimeError(f"exits {[process.returncode for process in processes]}, {outs}")
        return f"{outs[0]}, in all {time.monotonic() - began:.1f} s"


def pair_end(position: int, folder: str) -> None:
    """One process of `pair`."""
    from prism_sdk.runtime.oncuda.communicators import Scratch, first_calls
    from prism_sdk.runtime.oncuda.driver import Driver
    from prism_sdk.runtime.oncuda.nccl import NcclGroup

    torch.cuda.set_device(position)
    torch.zeros(1, device="cuda")
    driver, device = Driver(), torch.device("cuda", position)
    stream = torch.cuda.ExternalStream(driver.create_stream(is_urgent=True), device=device)
    before, began = driver.free_bytes(), time.monotonic()
    group = NcclGroup(Path(folder), "probe", position=position, size=2, stream=stream)
    with torch.cuda.stream(stream):
        for one in first_calls(group, Scratch(driver, device), position=position, size=2, is_lane=False, sender=0):
            one.wait()
    taken = (before - driver.free_bytes()) / 1e6
    print(f"communicator and first calls {time.monotonic() - began:.2f} s, {taken:.0f} MB of the device", flush=True)
    os._exit(0)


def fault(num_bytes: int, *, num_threads: int, is_huge: bool, step_bytes: int = 64 << 20) -> float:
    """GB/s at which fresh memory is handed out to threads that touch none of it twice."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    area = mmap.mmap(-1, num_bytes + (2 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = -(-ctypes.addressof(ctypes.c_char.from_buffer(area)) // (2 << 20)) * (2 << 20)
    libc.madvise(address, num_bytes, _MADV_HUGEPAGE if is_huge else _MADV_NOHUGEPAGE)
    offsets = iter(range(0, num_bytes, step_bytes))
    lock, failed = threading.Lock(), []

    def work() -> None:
        while True:
            with lock:
                at = next(offsets, None)
            if at is None:
                return
            if libc.madvise(address + at, min(step_bytes, num_bytes - at), _MADV_POPULATE_WRITE):
                failed.append(ctypes.get_errno())

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if failed:
        raise OSError(failed[0], os.strerror(failed[0]))
    return num_bytes / took / 1e9


def memory() -> str:
    """How fast the system hands out memory, by threads and size of pages; the first pass may be the host's own cost."""
    size = int(os.environ.get("PROBE_GIB", "4")) * _GIB
    said = []
    for num_threads in sorted({1, 2, 4, 8, os.cpu_count() or 1}):
        rates = [fault(size, num_threads=num_threads, is_huge=is_huge) for is_huge in (True, False)]
        said.append(f"{num_threads} threads {rates[0]:.1f} and {rates[1]:.1f}")
    return f"GB/s in huge and small pages: {', '.join(said)}"


def pinning() -> str:
    """How fast memory that is there is pinned, and copied from; in huge pages and small ones."""
    from prism_sdk.runtime.oncuda.driver import Driver

    torch.zeros(1, device="cuda")
    driver, said = Driver(), []
    size = 2 * _GIB
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for advice in (_MADV_HUGEPAGE, _MADV_NOHUGEPAGE):
        area = mmap.mmap(-1, size + (2 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = -(-ctypes.addressof(ctypes.c_char.from_buffer(area)) // (2 << 20)) * (2 << 20)
        libc.madvise(address, size, advice)
        libc.madvise(address, size, _MADV_POPULATE_WRITE)
        began = time.perf_counter()
        driver.register(address, size)
        pinned = time.perf_counter() - began
        stream = torch.cuda.current_stream()
        times = []
        for _ in range(3):
            began = time.perf_counter()
            driver.copy_in(stream.cuda_stream, target.data_ptr(), address, size)
            stream.synchronize()
            times.append(time.perf_counter() - began)
        said.append(f"pinned at {size / pinned / 1e9:.1f} GB/s, copied in at {size / min(times) / 1e9:.1f}")
    return f"huge pages {said[0]}; small {said[1]}"


def ahead() -> str:
    """How fast device memory leaves for fresh host memory, for what was used before, by others, or taken ahead."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    from prism_sdk.runtime.oncuda.paging.build import compiled_library
    from prism_sdk.runtime.oncuda.paging.hostpool import HostPool

    code = ("import sys; from prism_sdk.runtime.oncuda.paging import library; library.preload(sys.argv[1]); "
            "import benchmarks.gpu_probes as p; p.leave(*map(int, sys.argv[2:4]), *sys.argv[4:])")  # fmt: skip
    size, said = AHEAD_GIB * _GIB + (64 << 20), []
    pool = HostPool(size)
    for rank, moves in enumerate((("fresh", "used before"), ("used by another process",), (_AHEAD,))):
        pool.free(rank - 1)
        if moves == (_AHEAD,):
            pool.shrink(size)
        pool.take(rank, size)
        done = subprocess.run(
            [sys.executable, "-c", code, str(compiled_library()), str(pool.fd), str(rank), *moves], env=environment,
            capture_output=True, text=True, timeout=60, pass_fds=[pool.fd],
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr[-2000:])
        said.append(done.stdout.strip())
    return f"out at GB/s: {', '.join(said)}"


def leave(pool_fd: int, rank: int, *moves: str) -> None:
    """A process of `ahead`, which has loaded the library before torch."""
    from prism_sdk.runtime.oncuda.paging.library import Pages

    pages = Pages(pool_fd=pool_fd, rank=rank)
    kept = [torch.full((_GIB,), i, dtype=torch.uint8, device="cuda") for i in range(AHEAD_GIB)]
    torch.cuda.synchronize()
    said = []
    for what in moves:
        if what == _AHEAD:
            began = time.perf_counter()
            pages.prepare()
            while pages.ready_bytes() < len(kept) * _GIB and time.perf_counter() - began < 20:
                time.sleep(0.005)
            took = time.perf_counter() - began
        moved = pages.move_out()
        said.append(f"{what} {moved.num_bytes / max(moved.total_ns, 1):.1f} ({moved.fresh_bytes / _GIB:.1f} GiB fresh)")
        if what == _AHEAD:
            said[-1] += f" (taking {pages.ready_bytes() / took / 1e9:.1f})"
        moved_in = pages.move_in()
        if moved.status or moved_in.status:
            raise RuntimeError(f"{what}: {moved.status} {moved.code} {moved_in.status} {moved_in.code}")
    right = all(int(one[0]) == int(one[-1]) == i for i, one in enumerate(kept))
    print(f"{', '.join(said)}; values {'right' if right else 'WRONG'}", flush=True)
    os._exit(0 if right else 1)


PROBES: dict[str, Callable[[], str]] = {
    "versions": versions, "memory": memory, "streams": streams, "words": words, "occupying": occupying, "pair": pair,
    "pinning": pinning, "ahead": ahead,
}  # fmt: skip


def main() -> int:
    good = {}
    for name in sys.argv[1:] or PROBES:
        began = time.monotonic()
        try:
            said, good[name] = PROBES[name](), True
        except Exception:
            said, good[name] = traceback.format_exc(), False
        print(f"probe {name}: {'ok' if good[name] else 'BAD'}, {time.monotonic() - began:.1f} s: {said}", flush=True)
    print(json.dumps(good))
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
