"""The pool of recorded values: a real assistant process fills it, and every byte that comes out is right."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.runtime.prefetch import (
    Consumer,
    Item,
    PayloadSequence,
    Ring,
    create_ring,
    load_sequence,
    place_in_circle,
    places_to_stay,
    save_sequence,
)
from prismtrace import GraphKind, TraceReader, TraceWriter

pytestmark = pytest.mark.timeout(60)


class Pool:
    """A trace of payloads, a ring, and what a sandbox rank sees of them."""

    def __init__(self, folder: Path, sizes: list[int], *, repeat_from: int, capacity: int) -> None:
        rng = random.Random(5)
        self.blobs = [rng.randbytes(size) for size in sizes]
        self.path = folder / "values.prism"
        with TraceWriter(self.path, graph_kind=GraphKind.BARE, world_size=1) as writer:
            digests = [writer.add_payload(blob) for blob in self.blobs]
        items = tuple(Item(digest, len(blob)) for digest, blob in zip(digests, self.blobs, strict=True))
        self.sequence = PayloadSequence(items, repeat_from)
        self.sequence_path = folder / "sequence"
        save_sequence(self.sequence_path, self.sequence)
        assert load_sequence(self.sequence_path) == self.sequence
        self.fd = create_ring(capacity)
        self.ring = Ring(self.fd)
        self.reader = TraceReader(self.path)
        self.consumer = Consumer(self.fd, self.reader, self.sequence)

    def blob(self, index: int) -> bytes:
        span = len(self.blobs) - self.sequence.repeat_from
        if index >= len(self.blobs):
            index = self.sequence.repeat_from + (index - len(self.blobs)) % span
        return self.blobs[index]

    def use(self, first: int, count: int = 1) -> None:
        self.consumer.announce(first)
        self.check(first, count)

    def check(self, first: int, count: int = 1) -> None:
        views = self.consumer.take(first, count)
        assert [bytes(view) for view in views] == [self.blob(first + i) for i in range(count)]
        self.consumer.release(first, count)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "the assistant did not do it"
            time.sleep(0.002)

    @contextmanager
    def assistant(self) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "prism_sdk.runtime.prefetch"]
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # as many threads read
        process = subprocess.Popen(
            [*command, str(os.getpid()), str(self.fd), str(self.path), str(self.sequence_path), cpus],
            pass_fds=[self.fd], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process
            assert process.poll() is None, process.communicate()[1]
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make_pool(sizes: list[int], *, repeat_from: int, capacity: int) -> Pool:
        pools.append(Pool(tmp_path, sizes, repeat_from=repeat_from, capacity=capacity))
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.reader.close()
        os.close(pool.fd)


SIZES = [100, 0, 4096, 1, 777, 0, 66_000, 3, 8, 12345]  # the large one is read by a thread
TOTAL = sum(SIZES)


def test_everything_is_there_before_it_is_asked_for(make: Callable[..., Pool]) -> None:
    pool = make(SIZES, repeat_from=len(SIZES), capacity=2 * TOTAL)
    with pool.assistant():  # with nothing to repeat it is done, and stays: who ends early is missed
        pool.wait(lambda: pool.ring.produced == len(SIZES))
        pool.use(0, 3)
        for index in range(3, len(SIZES)):
            pool.use(index)
    counts = pool.consumer.counts
    assert (counts.hits, counts.misses, counts.hit_bytes, counts.miss_bytes) == (len(SIZES), 0, TOTAL, 0)


def test_empty_payloads_keep_nobody_waiting(make: Callable[..., Pool]) -> None:
    pool = make([0, 400, 0, 0, 500], repeat_from=5, capacity=1000)
    with pool.assistant():
        pool.wait(lambda: pool.ring.produced == 5)
        for index in range(5):
            pool.use(index)
    assert not pool.consumer.counts.misses


def test_a_trace_that_cannot_be_read_is_said_in_a_line(make: Callable[..., Pool]) -> None:
    pool = make(SIZES, repeat_from=0, capacity=1 << 16)
    with pool.path.open("r+b") as file:
        file.seek(8)
        file.write(os.urandom(pool.path.stat().st_size - 16))
    process = subprocess.run(
        [sys.executable, "-m", "prism_sdk.runtime.prefetch", str(os.getpid()), str(pool.fd), str(pool.path),
         str(pool.sequence_path), ""], pass_fds=[pool.fd], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 1
    assert process.stderr.startswith("prism: values of other ranks cannot be read: ")
    assert str(pool.path) in process.stderr and process.stderr.count("\n") == 1


def test_without_an_assistant_everything_is_read_on_demand(make: Callable[..., Pool]) -> None:
    pool = make(SIZES, repeat_from=0, capacity=1 << 16)
    for index in range(3 * len(SIZES)):
        pool.use(index)
    assert (pool.consumer.counts.hits, pool.consumer.counts.misses) == (0, 3 * len(SIZES))
    assert pool.consumer.counts.miss_bytes == 3 * TOTAL


def test_a_payload_larger_than_the_pool_is_read_on_demand_and_the_rest_comes_in(make: Callable[..., Pool]) -> None:
    pool = make([500, 5000, 600, 700], repeat_from=4, capacity=2000)
    with pool.assistant():
        pool.wait(lambda: pool.ring.produced == 4)
        pool.use(0, 4)
    counts = pool.consumer.counts
    assert (counts.hits, counts.hit_bytes) == (3, 1800)
    assert (counts.misses, counts.miss_bytes) == (1, 5000)


def test_it_goes_on_with_the_last_step(make: Callable[..., Pool]) -> None:
    pool = make(SIZES, repeat_from=6, capacity=2 * TOTAL)
    with pool.assistant():
        for index in range(200):
            if index % 7 == 0:
                pool.wait(lambda index=index: pool.ring.produced > index)  # type: ignore[misc]
            pool.use(index)
    assert pool.consumer.counts.hits >= 200 // 7


@pytest.mark.parametrize("capacity", [1, 100, 1000, 8192, 70_000, 90_000])
def test_a_tiny_pool_misses_and_errs_in_nothing(make: Callable[..., Pool], capacity: int) -> None:
    rng = random.Random(capacity)
    pool = make(SIZES, repeat_from=2, capacity=capacity)
    index = 0
    with pool.assistant() as process:
        pool.wait(lambda: pool.ring.produced > 0)
        while index < 400:
            count = rng.randint(1, 3)
            pool.use(index, count)
            index += count + (rng.randint(1, 5) if rng.random() < 0.1 else 0)  # some are skipped for ever
            if rng.random() < 0.3:
                time.sleep(0.001)
        assert process.poll() is None
    counts = pool.consumer.counts
    assert counts.hits > 0
    assert counts.hit_bytes + counts.miss_bytes > 0


@pytest.mark.parametrize("capacity", [3000, 20_000, 200_000])
def test_operations_may_take_their_values_in_another_order(make: Callable[..., Pool], capacity: int) -> None:
    """Works are waited for in any order: what an older operation still needs is not overwritten by newer values."""
    rng = random.Random(capacity)
    pool = make([1000] * 4 + [1500, 700, 0, 900], repeat_from=0, capacity=capacity)
    issued, waiting = 0, []
    with pool.assistant():
        pool.wait(lambda: pool.ring.produced > 1)
        while issued < 400:
            if len(waiting) < 6 and rng.random() < 0.6:
                pool.consumer.announce(issued)
                waiting.append(issued)
                issued += 1
            elif waiting:
                pool.check(waiting.pop(rng.randrange(len(waiting))))
                time.sleep(0.0005)
        while waiting:
            pool.check(waiting.pop())
    assert pool.consumer.counts.hits > 50


def test_what_nobody_takes_does_not_stop_the_program(make: Callable[..., Pool]) -> None:
    pool = make([1000] * 8, repeat_from=0, capacity=5000)
    with pool.assistant():
        pool.wait(lambda: pool.ring.produced > 1)
        pool.consumer.announce(0)  # and never waited for
        for index in range(1, 60):
            pool.use(index)


def test_the_assistant_skips_what_the_rank_has_read_for_itself(make: Callable[..., Pool]) -> None:
    pool = make([1000] * 50, repeat_from=0, capacity=4500)
    for index in range(40):
        pool.use(index)
    with pool.assistant():
        pool.wait(lambda: pool.ring.produced > 42)
        pool.use(40, 2)
    assert pool.consumer.counts.hits == 2


@settings(max_examples=300, deadline=None)
@given(capacity=st.integers(1, 60), sizes=st.lists(st.integers(0, 40), max_size=60), data=st.randoms())
def test_places_never_overlap(capacity: int, sizes: list[int], data: random.Random) -> None:
    held: list[tuple[int, int, int]] = []
    head = 0
    for index, size in enumerate(sizes):
        while (offset := place_in_circle(size, capacity, head, held)) is None:
            if not held:
                assert size > capacity  # an empty pool takes everything that is not larger than itself
                break
            held.pop(0)
        if offset is None:
            continue
        end = offset + size
        assert 0 <= offset <= end <= capacity
        assert all(end <= begin or offset >= stop for _, begin, stop in held if begin < stop and size)
        held.append((index, offset, end))
        head = end
        for _ in range(data.randint(0, 2)):
            if held:
                held.pop(0)


@settings(max_examples=300, deadline=None)
@given(
    capacity=st.integers(1, 100),
    steps=st.lists(st.integers(0, 12), max_size=12).flatmap(
        lambda ids: st.tuples(st.just(ids), st.integers(0, len(ids)))
    ),
)
def test_what_stays_has_a_place_of_its_own(capacity: int, steps: tuple[list[int], int]) -> None:
    ids, repeat_from = steps
    sequence = PayloadSequence(tuple(Item(bytes([i]) * 16, 3 * i) for i in ids), repeat_from)
    places = places_to_stay(sequence, capacity)
    repeated = {item.digest: item.num_bytes for item in sequence.items[repeat_from:]}
    if not places:
        assert not repeated or sum(repeated.values()) > capacity // 2
        return
    assert places.keys() == repeated.keys()
    ends = sorted((offset, offset + repeated[digest]) for digest, offset in places.items())
    assert ends[0][0] >= 0 and ends[-1][1] == capacity
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(ends))
    others = {i: 3 * i for i in ids[:repeat_from] if bytes([i]) * 16 not in repeated}
    assert ends[0][0] >= min(sum(others.values()), capacity // 2)


def test_what_is_repeated_is_read_once(make: Callable[..., Pool]) -> None:
    """Also by a file that is gone meanwhile: nothing of it is opened or read again."""
    pool = make([70_000, 1000, 40_000, 0, 30_000], repeat_from=2, capacity=200_000)
    with pool.assistant():
        pool.wait(lambda: pool.ring.produced > 50)
        pool.path.write_bytes(b"\0" * pool.path.stat().st_size)
        for index in range(3000):
            pool.wait(lambda index=index: pool.ring.produced > index)  # type: ignore[misc]
            pool.use(index)
    assert (pool.consumer.counts.hits, pool.consumer.counts.misses) == (3000, 0)


def test_what_a_sequence_repeats() -> None:
    items = tuple(Item(bytes([i]) * 16, i) for i in range(5))
    sequence = PayloadSequence(items, 3)
    assert [sequence.from_index(i).num_bytes for i in range(10)] == [0, 1, 2, 3, 4, 3, 4, 3, 4, 3]  # type: ignore[union-attr]
    assert PayloadSequence(items, 5).from_index(5) is None
    assert PayloadSequence((), 0).from_index(0) is None
