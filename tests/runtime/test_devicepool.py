"""The pool of recorded values on a device: nothing is written over in use, nothing is forgotten."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prism_sdk.runtime.manifest import OWN  # noqa: E402
from prism_sdk.runtime.oncuda.devicepool import DevicePool, pool_bytes_for, wants_of  # noqa: E402
from prism_sdk.runtime.prefetch import Consumer, Ring, create_ring  # noqa: E402
from prismtrace import TraceReader  # noqa: E402
from tests.runtime.test_holding import SUM, Job, fill_ring, floats, tensor  # noqa: E402

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class SlowCopier:
    """Copies when told to, in order."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.open = memory, []  # type: ignore[var-annotated]

    def copy(self, offset: int, source: memoryview) -> Any:
        token = SimpleNamespace(is_done=False, run=lambda: None)

        def run() -> None:
            self.memory[offset : offset + len(source)] = torch.frombuffer(bytearray(source), dtype=torch.uint8)
            token.is_done = True

        token.run = run
        self.open.append(token)
        return token

    def is_done(self, token: Any) -> bool:
        return bool(token.is_done)

    def let_wait(self, token: Any, stream: Any) -> None:
        while not token.is_done:  # in order, as on a stream
            self.run_one()

    def run_one(self) -> None:
        next(one for one in self.open if not one.is_done).run()


def test_nothing_is_written_over_before_it_was_used(job: Job) -> None:
    """A pool far smaller than what goes through it, copies that come late, operations done out of order."""
    rng = random.Random(8)
    blobs = [rng.randbytes(rng.choice([0, 4, 700, 3000])) for _ in range(120)]
    for blob in blobs:
        out = torch.zeros(len(blob) // 4)
        job.add("broadcast_", ([out], None, 0, 0), {0: blob})
    script = job.script()
    capacity = pool_bytes_for(script, limit=0)
    assert capacity < 9000
    memory = torch.zeros(capacity, dtype=torch.uint8)
    ring_fd = create_ring(1 << 20)
    fill_ring(ring_fd, script, job.path, capacity=2000)  # large ones are no part of the ring
    ring = Ring(ring_fd)
    copier = SlowCopier(memory)
    under_way: list[tuple[int, list[Any]]] = []
    with TraceReader(job.path) as reader:

        def reap() -> None:
            index, placed = under_way.pop(rng.randrange(len(under_way)))
            pool.let_wait(placed, None)
            assert bytes(pool.bytes_of(placed[0]).tolist()) == blobs[index]
            pool.hand_back(placed)

        pool = DevicePool(memory, script, Consumer(ring_fd, reader, script.sequence), copier, reap=reap)
        for index in range(len(blobs)):
            if index % 10 == 9:
                pool.skip(index, 1)  # the host takes it
                continue
            if index % 10 == 4:  # nobody takes it
                continue
            under_way.append((index, pool.take(index, 1)))
            open_ = [token for token in copier.open if not token.is_done]
            assert ring.consumed <= len(copier.open) + index  # never past what is not copied
            for _ in open_[: rng.randint(0, len(open_))]:
                copier.run_one()
        while under_way:
            reap()
        for token in copier.open:
            copier.let_wait(token, None)
        pool.pump()
        assert ring.consumed == len(blobs)
        assert pool.hits == 96 and not pool.misses
    os.close(ring_fd)


def test_what_is_under_way_to_the_device_stays_on_the_host(job: Job) -> None:
    """Also what was too large for the ring, and is in memory of its own: a device may read it late."""
    job.add("broadcast_", ([torch.zeros(1000)], None, 0, 0), {0: bytes(4000)})
    script = job.script()
    fill_ring(ring_fd := create_ring(1 << 20), script, job.path, capacity=2000)
    given: list[Any] = []
    token = SimpleNamespace(is_done=False)

    class Copier:
        def copy(self, offset: int, source: memoryview) -> Any:
            given.append(source.obj)
            return token

        def is_done(self, token: Any) -> bool:
            return bool(token.is_done)

        def let_wait(self, token: Any, stream: Any) -> None:
            token.is_done = True

    memory = torch.zeros(pool_bytes_for(script, limit=0), dtype=torch.uint8)
    with TraceReader(job.path) as reader:
        pool = DevicePool(memory, script, Consumer(ring_fd, reader, script.sequence), Copier(), reap=lambda: None)
        pool.take(0, 1)
        with pytest.raises(BufferError):  # somebody holds it
            given[0].append(0)
        token.is_done = True
        pool.pump()
        given[0].append(0)
    os.close(ring_fd)


def test_of_a_scattered_reduction_only_the_own_shard_is_compared(job: Job) -> None:
    args = (tensor(0, 0), torch.zeros(6), None, SUM)
    job.add("_reduce_scatter_base_", args, {-1: floats(7, 8), OWN: floats(1, 2, 3, 4, 5, 6)})
    assert [(w.start, w.num_bytes, w.scratch_bytes) for w in wants_of(job.script())] == [(0, 8, 0), (8, 8, 2)]
