"""How much free memory the shared file keeps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from prism_sdk.runtime import arena
from prism_sdk.runtime.arena import Arena, create_arena
from prism_sdk.runtime.gauges import Memory

MIB = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_arena(4)
    yield fd
    os.close(fd)


def use(one: Arena, sizes: list[int]) -> None:
    for size in sizes:
        offset = one.allocate(size)
        one.write(offset, [memoryview(bytes(size))])
        one.release(offset, size)


def held(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_sizes_that_come_again_keep_their_memory_and_others_little(fd: int) -> None:
    one = Arena(fd, 1, num_ranks=4)
    use(one, [20 * MIB + 4096 * i for i in range(8)])
    assert held(fd) <= 16 * MIB
    use(one, [30 * MIB, 40 * MIB] * 3)
    assert 70 * MIB <= held(fd) <= 86 * MIB


@pytest.mark.parametrize(("total", "kept"), [(None, 0), (2 * 1024 * MIB, 64 * MIB), (1 << 50, 90 * MIB)])
def test_at_most_a_share_of_the_host_s_memory_is_kept(fd: int, total: int | None, kept: int) -> None:
    memory = None if total is None else Memory(0, total)
    with mock.patch.object(arena, "host_memory", lambda: memory):
        one = Arena(fd, 1, num_ranks=4)
    use(one, [20 * MIB, 30 * MIB, 40 * MIB] * 2)
    assert held(fd) <= kept
    assert held(fd) > kept - 40 * MIB
