"""The host memory that ranks share: whose its blocks are, and what real processes find in them after many moves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.runtime.oncuda.paging import build
from prism_sdk.runtime.oncuda.paging.hostpool import BLOCK_BYTES, HostPool
from prism_sdk.runtime.oncuda.paging.placing import find_room_beside
from prism_sdk.runtime.oncuda.paging.tenants import IN_HOST_MEMORY, Tenant
from tests.runtime.test_pages_library import HERE, MIB, driver, environment

__all__ = ["driver"]  # the fixture

needs_compiler = pytest.mark.skipif(
    not any(map(build.shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)


def touch(pool: HostPool, rank: int) -> None:
    """As the library does it in a rank."""
    pool._is_there[pool._owners == rank + 1] = True


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_blocks_are_one_ranks_each_and_fresh_only_when_nothing_else_is_free(data: st.DataObject) -> None:
    pool, have, there = HostPool(20 * 7 + 3, block_bytes=7), dict.fromkeys(range(4), 0), 0
    with contextlib.closing(pool):
        for _ in range(data.draw(st.integers(1, 30))):
            rank = data.draw(st.sampled_from(sorted(have)))
            match data.draw(st.sampled_from(["take", "touch", "free", "shrink"])):
                case "take":
                    wanted = data.draw(st.integers(0, 160))
                    missing = max(0, -(-wanted // 7) - have[rank])
                    fresh = max(0, missing - (there - sum(have.values()) if there else 0))
                    if pool.promised_bytes == 0:
                        assert pool.fresh_bytes(rank, wanted) == 7 * fresh
                    fits = sum(have.values()) + missing <= 20
                    assert pool.take(rank, wanted) is fits
                    have[rank] += missing if fits else 0
                    for one in have:  # everybody touches at once: what is there is known
                        touch(pool, one)
                    there += fresh if fits else 0
                case "touch":
                    touch(pool, rank)
                case "free":
                    pool.free(rank)
                    have[rank] = 0
            assert {one: pool.bytes_of(one) for one in have} == {one: 7 * count for one, count in have.items()}
            assert pool.held_bytes == 7 * there and pool.promised_bytes == 0


def test_a_rank_gets_its_own_blocks_again_where_they_are_free() -> None:
    with contextlib.closing(HostPool(60, block_bytes=1)) as pool:
        for rank in range(3):
            assert pool.take(rank, 20)
            touch(pool, rank)
        first = pool._owners.copy()
        for rank in (2, 0, 1):
            pool.free(rank)
        for rank in (1, 2, 0):
            assert pool.fresh_bytes(rank, 20) == 0 and pool.take(rank, 20)
        assert (pool._owners == first).all()


def test_what_is_given_back_is_the_systems_again() -> None:
    with contextlib.closing(HostPool(8 * BLOCK_BYTES)) as pool:
        for rank in range(2):
            assert pool.take(rank, 3 * BLOCK_BYTES)
            touch(pool, rank)
        pool._map[pool._data_offset :] = b"x" * (8 * BLOCK_BYTES)
        taken = os.fstat(pool.fd).st_blocks
        away, ahead = Tenant(0, where=IN_HOST_MEMORY), Tenant(1, parked_as=1)
        room = {"pool": pool, "room_in_host": lambda: 7 * BLOCK_BYTES - pool.held_bytes}
        assert find_room_beside(BLOCK_BYTES, [away, ahead], **room) and pool.bytes_of(1) == 3 * BLOCK_BYTES
        assert find_room_beside(3 * BLOCK_BYTES, [away, ahead], **room) and pool.bytes_of(1) == 0
        assert taken - os.fstat(pool.fd).st_blocks == 2 * BLOCK_BYTES // 512 and pool.held_bytes == 4 * BLOCK_BYTES
        assert not find_room_beside(5 * BLOCK_BYTES, [away, ahead], **room)  # what is away stays
        assert pool.held_bytes == pool.bytes_of(0) == 3 * BLOCK_BYTES
        start = pool._data_offset
        assert pool._map[start : start + 3 * BLOCK_BYTES] == b"x" * (3 * BLOCK_BYTES)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_limit_of_the_shell_that_is_too_low_is_named(limit: str) -> None:
    code = f"""
import os, resource
from prism_sdk.errors import RunError
from prism_sdk.runtime.oncuda.paging.hostpool import HostPool
resource.setrlimit(resource.{limit}, (1 << 34, 1 << 34))
HostPool(1 << 30).close()
before = os.listdir("/proc/self/fd")
try:
    HostPool(1 << 40)
except RunError as error:
    print(error.message, error.hint, os.listdir("/proc/self/fd") == before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "cannot be set up" in done.stdout and "ulimit -v" in done.stdout, done.stderr
    assert done.stdout.endswith("True\n")


# -- processes --------------------------------------------------------------------------------------------------------


class Process:
    """A rank with so much device memory, which does as it is told."""

    def __init__(self, pool: HostPool, rank: int, size: int, environ: dict[str, str]) -> None:
        command = [sys.executable, HERE / "pages_job.py", "shared", build.compiled_library(), str(pool.fd), str(rank)]
        self.pool, self.rank, self.size, self.is_out = pool, rank, size, False
        self.process = subprocess.Popen(
            [*command, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, pass_fds=[pool.fd],
            text=True,
        )  # fmt: skip
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def tell(self, what: str) -> list[int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()) or [])

    def leave(self) -> int | None:
        """How much fresh host memory it took; None: the pool has no room."""
        if not self.pool.take(self.rank, self.size):
            return None
        status, num_bytes, fresh = self.tell("out")
        assert (status, num_bytes) == (0, self.size)
        self.is_out = True
        return fresh

    def come(self) -> None:
        assert self.tell("in") == [0, self.size, 0]
        self.pool.free(self.rank)
        self.is_out = False

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.pool.free(self.rank)


@contextlib.contextmanager
def processes(
    driver: Path, tmp_path: Path, *sizes: int, pool_bytes: int, **more: str
) -> Iterator[list[Process]]:  # fmt: skip
    environ = environment(driver, tmp_path, device_bytes=sum(sizes), **more)
    with contextlib.closing(HostPool(pool_bytes)) as pool, contextlib.ExitStack() as stack:
        found = []
        for rank, size in enumerate(sizes):
            found.append(Process(pool, rank, size, environ))
            stack.callback(found[-1].kill)
        yield found


@needs_compiler
@pytest.mark.parametrize("seed", range(3))
def test_contents_are_right_after_many_moves_of_ranks_that_exceed_the_pool(
    driver: Path, tmp_path: Path, seed: int
) -> None:
    order = random.Random(seed)
    sizes = [24 * MIB, 10 * MIB, 16 * MIB, 24 * MIB]
    with processes(driver, tmp_path, *sizes, pool_bytes=50 * MIB) as ranks:
        pool, fresh, num_refused, num_left = ranks[0].pool, 0, 0, 0
        for _ in range(60):
            rank = order.choice(ranks)
            if rank.is_out:
                rank.come()
                continue
            if order.random() < 0.3 and pool.take(rank.rank, rank.size):  # ahead; perhaps taken back at once
                rank.tell("prepare")
                if order.random() < 0.5:
                    pool.free(rank.rank)
            for other in ranks:
                if not other.is_out and other is not rank:
                    pool.free(other.rank)
            most = pool.fresh_bytes(rank.rank, rank.size) + pool.promised_bytes
            taken = rank.leave()
            num_refused, num_left = num_refused + (taken is None), num_left + (taken is not None)
            assert (taken or 0) <= most
            fresh += taken or 0
        for rank in ranks:
            if rank.is_out:
                rank.come()
        assert num_refused and num_left > 10 and fresh <= 50 * MIB  # each block was fresh once


@needs_compiler
def test_after_the_first_round_the_system_hands_out_nothing(driver: Path, tmp_path: Path) -> None:
    with processes(driver, tmp_path, *[20 * MIB] * 4, pool_bytes=60 * MIB) as ranks:
        assert [ranks[i].leave() for i in (0, 1, 2)] == [20 * MIB] * 3
        assert ranks[3].leave() is None  # no room; the rank goes on with what it has
        for number in range(8):
            ranks[number % 4].come()
            assert ranks[(number + 3) % 4].leave() == 0
        assert ranks[0].pool.held_bytes == 60 * MIB


@needs_compiler
def test_a_rank_that_touches_blocks_ahead_changes_nothing_in_them(driver: Path, tmp_path: Path) -> None:
    with processes(driver, tmp_path, 20 * MIB, pool_bytes=20 * MIB) as (rank,):
        pool = rank.pool
        assert pool.take(0, 20 * MIB)
        pool._map[pool._data_offset :] = b"x" * (20 * MIB)  # as if another rank had been given them, and filled them
        rank.tell("prepare")
        until = time.monotonic() + 20
        while pool.promised_bytes:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert pool._map[pool._data_offset :] == b"x" * (20 * MIB)


OLD_SYSTEM = """
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>
int madvise(void *at, size_t size, int advice) {
    if (advice != 22 && advice != 25) return (int)syscall(SYS_madvise, at, size, advice);
    errno = EINVAL;
    return -1;
}
"""


@needs_compiler
def test_a_system_that_cannot_populate_hands_out_memory_ahead_all_the_same(driver: Path, tmp_path: Path) -> None:
    """What is noted as there must be there, or the host would be taken to have room for it once more (Linux 5.4)."""
    source, library = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text(OLD_SYSTEM)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    with processes(driver, tmp_path, 20 * MIB, pool_bytes=30 * MIB, LD_PRELOAD=str(library)) as (rank,):
        pool = rank.pool
        assert pool.take(0, 20 * MIB)
        before = os.fstat(pool.fd).st_blocks
        rank.tell("prepare")
        until = time.monotonic() + 20
        while pool.promised_bytes:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert os.fstat(pool.fd).st_blocks - before == 20 * MIB // 512
        assert rank.leave() == 0
        rank.come()


@needs_compiler
def test_blocks_of_a_rank_that_dies_are_there_for_others(driver: Path, tmp_path: Path) -> None:
    with processes(driver, tmp_path, *[20 * MIB] * 3, pool_bytes=40 * MIB) as ranks:
        assert ranks[0].leave() == ranks[1].leave() == 20 * MIB and ranks[2].leave() is None
        ranks[0].kill()
        assert ranks[2].leave() == 0
        ranks[1].come()
        ranks[2].come()
        assert not any(map(ranks[0].pool.bytes_of, range(3)))


@needs_compiler
def test_nothing_of_the_memory_is_left_after_the_launcher_was_killed(driver: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [
        sys.executable,
        "-m",
        "prism_sdk.cli.main",
        "record",
        "-o",
        tmp_path / "o.prism",
        "--nproc-per-node",
        "4",
    ]
    options = ["--slots", "1", "--device-memory", "100MiB", "--parked-memory", "200MiB"]
    launcher = subprocess.Popen(
        [*command, *options, "--", HERE / "pages_job.py", "job", "4", "100000"], stderr=subprocess.DEVNULL,
        env=environment(driver, tmp_path, device_bytes=100 * MIB),
    )  # fmt: skip
    try:
        held: set[int] = set()
        until = time.monotonic() + 60
        while len(held) < 3:  # the launcher, the fork server, a rank
            assert time.monotonic() < until and launcher.poll() is None
            time.sleep(0.1)
            inodes = inodes_of_pools(launcher.pid)
            held = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if inodes & inodes_of_pools(pid)}
        launcher.kill()
        launcher.wait()
        while any(inodes & inodes_of_pools(pid) for pid in held):
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        launcher.kill()
        launcher.wait()


def inodes_of_pools(pid: int) -> set[int]:
    """Of those that the process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "prism-pool" in line:
                found.add(int(line.split()[4]))
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if "prism-pool" in os.readlink(path):
                found.add(path.stat().st_ino)
    return found


@needs_compiler
def test_no_process_of_the_program_keeps_the_memory(driver: Path, tmp_path: Path) -> None:
    with processes(driver, tmp_path, 4 * MIB, pool_bytes=8 * MIB) as (rank,):
        assert rank.leave() == 4 * MIB
        pid = rank.process.pid
        assert "prism-pool" in Path(f"/proc/{pid}/maps").read_text()
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert links and not any("prism-pool" in link for link in links)  # children would inherit it
