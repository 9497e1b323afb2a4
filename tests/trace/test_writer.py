"""The writer survives what happens to training jobs: full disks, kills, forks, threads."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from trace_sample import GROUP, write_sample

import prism_sdk
from prismtrace import (
    ProcessGroup,
    TraceReader,
    TraceUnfinishedError,
    TraceUsageError,
    TraceWriteError,
    TraceWriter,
    merge,
    payload_digest,
    recover,
    slice_trace,
)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Lets no file of this process grow above a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_named_and_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.prism"
    writer = TraceWriter(path)
    writer.add_units(0, {"kind": [1, 1]})
    with file_size_limit(5000):
        with pytest.raises(TraceWriteError) as caught:
            writer.add_payload(os.urandom(100_000))
        assert caught.value.errno == errno.EFBIG
        assert caught.value.path == str(path)
    with pytest.raises(TraceWriteError, match="earlier write failed"):
        writer.add_units(0, {"kind": [1]})
    with pytest.raises(TraceWriteError, match="earlier write failed"):
        writer.close()
    with TraceReader(path, allow_unfinished=True) as reader:
        assert reader.num_units(0) == 2
        assert reader.readable_bytes == path.stat().st_size


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_device_that_is_full(tmp_path: Path) -> None:
    link = tmp_path / "full.prism"
    link.symlink_to("/dev/full")
    with pytest.raises(TraceWriteError, match="exists"):
        TraceWriter(link)


def test_nothing_is_overwritten_unless_asked(sample: Path) -> None:
    before = sample.read_bytes()
    with pytest.raises(TraceWriteError, match="File exists"):
        TraceWriter(sample)
    assert sample.read_bytes() == before
    TraceWriter(sample, overwrite=True).close()
    with TraceReader(sample) as reader:
        assert reader.ranks == ()


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceWriteError, match="No such file"):
        TraceWriter(tmp_path / "no" / "t.prism")


def test_an_exception_leaves_an_unfinished_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "t.prism"
    with pytest.raises(RuntimeError), TraceWriter(path) as writer:
        writer.add_units(0, {"kind": [1]})
        raise RuntimeError
    with pytest.raises(TraceUnfinishedError, match="did not finish"):
        TraceReader(path)
    with TraceReader(path, allow_unfinished=True) as reader:
        assert reader.num_units(0) == 1


def test_a_killed_process_loses_nothing_that_was_added(tmp_path: Path) -> None:
    code = """
        import sys, os, signal, prismtrace
        writer = prismtrace.TraceWriter(sys.argv[1], metadata={"a": "b"})
        for step in range(7):
            writer.add_units(0, {"kind": [1] * 100, "step": [step] * 100})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "t.prism"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with TraceReader(path, allow_unfinished=True) as reader:
        assert reader.num_units(0) == 700
        assert reader.metadata == {"a": "b"}


def test_a_forked_child_cannot_write_into_the_parents_file(tmp_path: Path) -> None:
    path = tmp_path / "t.prism"
    writer = TraceWriter(path)
    child = os.fork()
    if child == 0:
        try:
            writer.add_units(0, {"kind": [1]})
        except TraceUsageError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    writer.add_units(0, {"kind": [1, 2]})
    writer.close()
    with TraceReader(path) as reader:
        assert reader.num_units(0) == 2


def test_threads_share_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "t.prism"
    with TraceWriter(path) as writer:

        def work(rank: int) -> None:
            for step in range(20):
                writer.add_units(rank, {"kind": np.ones(50, np.int64), "step": np.full(50, step)})
                writer.add_payload(bytes([step]) * 100)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with TraceReader(path) as reader:
        assert reader.ranks == tuple(range(6))
        assert len(reader.payload_digests) == 20
        assert all((np.diff(reader.units(rank).step) >= 0).all() for rank in reader.ranks)


def test_payloads_are_kept_once_and_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "t.prism"
    noise = os.urandom(1 << 20)
    with TraceWriter(path) as writer:
        digests = [writer.add_payload(blob) for blob in (noise, bytearray(noise), bytes(1 << 20), b"", np.arange(6.0))]
        assert digests[0] == digests[1] == payload_digest(noise)
        with pytest.raises(TraceUsageError, match="contiguous"):
            writer.add_payload(np.arange(10)[::2])
        with pytest.raises(TraceUsageError, match="buffer"):
            writer.add_payload(3)
    assert path.stat().st_size < (1 << 20) + 2000
    with TraceReader(path) as reader:
        assert reader.payload(digests[0]) == noise
        assert reader.payload(digests[2]) == bytes(1 << 20)
        assert reader.payload(digests[3]) == b""
        target = np.zeros(8)
        assert reader.read_payload_into(digests[4], target) == 48
        assert target.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
        big = np.zeros(1 << 20, np.uint8)
        assert reader.read_payload_into(digests[0], big) == 1 << 20
        assert big.tobytes() == noise
        assert reader.read_payload_into(digests[2], big) == 1 << 20
        assert not big.any()
        with pytest.raises(TraceUsageError, match="writable"):
            reader.read_payload_into(digests[0], bytes(1 << 20))
        with pytest.raises(TraceUsageError, match="at least"):
            reader.read_payload_into(digests[0], bytearray(10))
        with pytest.raises(TraceUsageError, match="no payload"):
            reader.payload(bytes(16))


def test_groups_and_metadata_are_checked(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.prism") as writer:
        writer.add_group(GROUP)
        writer.add_group(GROUP)
        with pytest.raises(TraceUsageError, match="has ranks"):
            writer.add_group(ProcessGroup(group_id=GROUP.group_id, ranks=(0, 2)))
        with pytest.raises(TraceUsageError, match="group_id"):
            writer.add_group(ProcessGroup(group_id=0))
        with pytest.raises(TraceUsageError, match="pairs of str"):
            writer.set_metadata("a", 3)  # type: ignore[arg-type]
    with pytest.raises(TraceUsageError, match="closed"):
        writer.set_metadata("a", "b")


def test_writing_is_cheap_enough_for_a_training_rank(tmp_path: Path) -> None:
    n = 16_384
    rng = np.random.default_rng(0)
    start = np.cumsum(rng.integers(1000, 3_000_000, n))
    columns = {
        "kind": np.resize([1, 2, 5], n),
        "step": np.arange(n) // 200,
        "start_ns": start,
        "end_ns": start + rng.integers(100, 500_000, n),
        "group_id": np.where(np.arange(n) % 3 == 1, np.uint64(2**63 + 5), np.uint64(0)),
        "seq": np.arange(n) // 3,
        "num_elements_in": 1000 * (np.arange(n) % 7),
        "awaits": np.arange(n) - 1,
        "memory_bytes": rng.integers(0, 1 << 34, n),
        "label": [f"layer {i % 40}" for i in range(n)],
    }
    times = []
    with TraceWriter(tmp_path / "t.prism") as writer:
        for _ in range(9):
            began = time.process_time()  # others may want the CPU at the same time
            writer.add_units(0, columns)
            times.append(time.process_time() - began)
    assert sorted(times)[2] < 0.02  # about 3 ms on an idle machine


def test_unfinished_sample_is_not_different_from_a_finished_one(tmp_path: Path) -> None:
    one, two = write_sample(tmp_path / "1"), write_sample(tmp_path / "2", close=False)
    with TraceReader(one) as a, TraceReader(two, allow_unfinished=True) as b:
        assert a.units(0).start_ns.tolist() == b.units(0).start_ns.tolist()
        assert a.metadata == b.metadata
        assert a.groups == b.groups
        assert a.payload_digests == b.payload_digests


def test_devices_and_pipes_are_never_replaced(tmp_path: Path) -> None:
    pipe, good = tmp_path / "pipe", write_sample(tmp_path / "good")
    os.mkfifo(pipe)
    for attempt in (
        lambda: TraceWriter(pipe, overwrite=True),
        lambda: TraceWriter(pipe, overwrite=True, atomic=True),
        lambda: slice_trace(good, pipe, overwrite=True),
        lambda: merge([good], pipe, overwrite=True),
        lambda: recover(good, pipe, overwrite=True),
    ):
        with pytest.raises(TraceWriteError, match="a device, a pipe or a socket"):
            attempt()
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "pipe"]


def test_the_version_is_said_once(sample: Path) -> None:
    version = importlib.metadata.version("prismtrace")
    assert prism_sdk.__version__ == version
    with TraceReader(sample) as reader:
        assert reader.writer == f"prismtrace {version}"
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in text and version not in text
