"""A reader touches what it must and no more, threads share it, and files go on without being corrupted."""

from __future__ import annotations

import io
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_sample import Job
from trace_sample import write_sample

import prismtrace
from prismtrace import (
    TraceFormatError,
    TraceReader,
    TraceUnfinishedError,
    TraceUsageError,
    TraceWriteError,
    TraceWriter,
    compact,
)


class CountingFile(io.BytesIO):
    """A file object that remembers how many bytes were read."""

    num_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        raw = super().read(size)
        self.num_read += len(raw)
        return raw


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks with ten steps each, a chunk a step, noisy times."""
    path = tmp_path_factory.mktemp("large") / "large.prism"
    rng = np.random.default_rng(0)
    with TraceWriter(path) as writer:
        for rank in (0, 1):
            for step in range(10):
                n = 20_000
                start = np.cumsum(rng.integers(1000, 10**6, n))
                columns = {"kind": np.resize([1, 2, 5], n), "step": np.full(n, step), "start_ns": start}
                columns |= {"end_ns": start + rng.integers(1, 10**6, n), "seq": rng.integers(0, 2**40, n)}
                writer.add_units(rank, columns)
    return path


def test_one_rank_one_step_one_column_read_little(large: Path) -> None:
    raw = large.read_bytes()
    file = CountingFile(raw)
    with TraceReader(file) as reader:
        opened = file.num_read
        assert opened < 12_000
        whole = reader.units(1)
        of_rank = file.num_read - opened
        assert len(raw) * 0.4 < of_rank < len(raw) * 0.52
        step = reader.units(1, steps=3)
        of_step = file.num_read - opened - of_rank
        assert of_step < len(raw) * 0.055
        assert (step.seq == whole.seq[60_000:80_000]).all()
        column = reader.units(1, steps=3, columns=["start_ns"])
        of_column = file.num_read - opened - of_rank - of_step
        assert of_column < of_step * 0.45
        assert (column.start_ns == step.start_ns).all()
        before = file.num_read
        assert reader.num_units(0) == 200_000
        assert reader.step_range(1) == (0, 9)
        assert file.num_read == before


def test_units_come_in_pieces_of_bounded_size(large: Path) -> None:
    with TraceReader(large) as reader:
        whole = reader.units(0, columns=["seq", "step"])
        pieces = list(reader.iter_units(0, columns=["seq", "step"], max_rows=3000))
        assert max(len(piece) for piece in pieces) == 3000
        assert np.array_equal(np.concatenate([piece.seq for piece in pieces]), whole.seq)
        assert np.array_equal(np.concatenate([piece.row_index for piece in pieces]), np.arange(200_000))
        some = list(reader.iter_units(0, steps=range(2, 4), max_rows=15_000))
        assert [len(piece) for piece in some] == [15_000, 5000, 15_000, 5000]
        with pytest.raises(TraceUsageError, match="at least 1"):
            next(reader.iter_units(0, max_rows=0))


def test_iterating_needs_the_memory_of_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "long.prism"
    with TraceWriter(path) as writer:
        for part in range(40):
            start = np.arange(65_536) * 1000 + part
            writer.add_units(0, {"kind": np.ones(65_536, np.uint8), "start_ns": start, "end_ns": start + 10})
    code = """
        import resource, sys, prismtrace
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        reader = prismtrace.TraceReader(sys.argv[1])
        rows = len(next(reader.iter_units(0, max_rows=10_000)))
        before = peak()
        rows = sum(len(piece) for piece in reader.iter_units(0, max_rows=10_000))
        print(rows, peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines()), str(path)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    rows, kib = map(int, done.stdout.split())
    assert rows == 40 * 65_536
    assert kib < 20_000  # all rows at once would be 60 MiB


def test_threads_share_a_reader_of_roles(tmp_path: Path) -> None:
    job = Job(pp=2, dp=8, tp=2)
    with TraceWriter(tmp_path / "plain", world_size=job.world_size) as writer:
        writer.share_strings(["forward", "backward"])
        for rank in range(job.world_size):
            units = job.units(rank)
            writer.add_units(
                rank, units | {"label": [["forward", "backward"][i % 2] for i in range(len(units["kind"]))]}
            )
    compact(tmp_path / "plain", tmp_path / "small")
    wanted = prismtrace.to_json(tmp_path / "plain")["ranks"]
    wrong: list[str] = []
    for source in (str(tmp_path / "small"), io.BytesIO((tmp_path / "small").read_bytes())):
        with TraceReader(source) as reader:

            def work(first: int, reader: TraceReader = reader) -> None:
                for rank in range(first, first + job.world_size):
                    rank %= job.world_size
                    units = reader.units(rank)
                    columns = wanted[str(rank)]["units"]["columns"]
                    if [str(v) for v in units.start_ns.tolist()] != columns["start_ns"]:
                        wrong.append("start")
                    if units.labels() != columns["label"]:
                        wrong.append("label")
                    if reader.groups != {} or [str(v) for v in units.group_id.tolist()] != columns["group_id"]:
                        wrong.append("group")

            threads = [threading.Thread(target=work, args=(4 * i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert wrong == []


def test_file_objects_and_maps_read_roles_too(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.add_role(5, {"kind": [1, 2], "peer": [None, 3]})
        writer.add_units(0, {"kind": [1, 2], "peer": [None, 4]}, role=5)
    twin = prismtrace.to_json(tmp_path / "t")
    with (tmp_path / "t").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert prismtrace.to_json(mapped) == prismtrace.to_json(file) == twin


def test_shared_strings_are_stored_once(tmp_path: Path) -> None:
    names = [f"void kernel_{i}<float, {'x' * 50}>" for i in range(200)]
    sizes = []
    for shared in (False, True):
        path = tmp_path / str(shared)
        with TraceWriter(path) as writer:
            if shared:
                writer.share_strings(names)
            for rank in range(20):
                writer.add_events(rank, {"name": [*names, f"own {rank}"], "start_ns": list(range(201))})
            writer.share_strings([])
            writer.add_events(20, {"name": [names[0]]})
        sizes.append(path.stat().st_size)
        with TraceReader(path) as reader:
            assert list(reader.events(7).name) == [*names, "own 7"]
            assert list(reader.events(20).name) == [names[0]]
    assert sizes[1] < sizes[0] * 0.75
    with TraceReader(tmp_path / "False") as one, TraceReader(tmp_path / "True") as two:
        assert all(list(one.events(rank).name) == list(two.events(rank).name) for rank in one.ranks)


def test_append_goes_on_with_a_finished_file(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "t.prism", ranks=(0,))
    with TraceWriter.append(path) as writer:
        assert writer.add_units(0, {"kind": [1], "x.y": [1.5]}) == 10
        assert writer.add_units(1, {"kind": [1]}) == 0
        writer.set_metadata("job.status", "appended")
        writer.add_role(9, {"kind": [3, 4]})
    with TraceWriter.append(path) as writer:
        writer.add_units(2, {"kind": [3, 5]}, role=9)
        with pytest.raises(TraceUsageError, match="was FLOAT64 before"):
            writer.add_units(0, {"x.y": ["text"]})
    with TraceReader(path) as reader:
        assert reader.num_units(0) == 11
        assert reader.units(0)["x.y"].tolist()[-1] == 1.5
        assert reader.units(2).kind.tolist() == [3, 5]
        assert reader.metadata["job.status"] == "appended"
        assert reader.groups
        assert len(reader.payload_digests) == 1


def test_append_to_an_unfinished_file(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "t.prism", close=False)
    with path.open("ab") as file:
        file.write(b"torn record")
    with pytest.raises(TraceUnfinishedError):
        TraceWriter.append(path)
    with TraceWriter.append(path, allow_unfinished=True) as writer:
        writer.add_units(0, {"kind": [1]})
    with TraceReader(path) as reader:
        assert reader.num_units(0) == 11
        assert reader.num_units(1) == 10


def test_append_keeps_a_file_that_it_refuses(tmp_path: Path) -> None:
    write_sample(tmp_path / "a.prism")
    with TraceWriter(tmp_path / "b.prism") as writer:
        writer.add_units(0, {"kind": [1]})
    path = tmp_path / "c.prism"
    prismtrace.merge([tmp_path / "a.prism", tmp_path / "b.prism"], path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-60])
    for error in (TraceUnfinishedError, TraceFormatError):
        before = path.read_bytes()
        with pytest.raises(error):
            TraceWriter.append(path)
        assert path.read_bytes() == before
        path.write_bytes(raw[: len(raw) // 2] + b"\xff" + raw[len(raw) // 2 + 1 :])
    with pytest.raises(TraceWriteError, match="No such file"):
        TraceWriter.append(tmp_path / "missing.prism")


def test_an_interrupted_append_loses_nothing(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "t.prism")
    twin = prismtrace.to_json(path)
    writer = TraceWriter.append(path)
    writer.abandon()
    prismtrace.recover(path, tmp_path / "out")
    assert prismtrace.to_json(tmp_path / "out") == twin


@pytest.mark.parametrize("second", ["append", "overwrite", "atomic"])
def test_two_writers_of_one_file_are_refused(tmp_path: Path, second: str) -> None:
    path = tmp_path / "t.prism"
    code = f"""
import sys, prismtrace
try:
    {
        "prismtrace.TraceWriter.append(sys.argv[1])"
        if second == "append"
        else f"prismtrace.TraceWriter(sys.argv[1], overwrite=True, atomic={second == 'atomic'})"
    }
except prismtrace.TraceWriteError as error:
    sys.exit("another writer" in str(error))
"""

    def attempt() -> int:
        return subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode

    writer = TraceWriter(path)
    writer.add_units(0, {"kind": [1]})
    before = path.read_bytes()
    assert attempt() == 1
    assert path.read_bytes() == before
    child = os.fork()  # a child that outlives the writer does not keep the lock
    if child == 0:
        threading.Event().wait(30)
        os._exit(0)
    writer.close()
    try:
        assert attempt() == 0
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_an_atomic_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "t.prism"
    with pytest.raises(RuntimeError), TraceWriter(path, atomic=True) as writer:
        writer.add_units(0, {"kind": [1]})
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    with TraceWriter(path, atomic=True) as writer:
        writer.add_units(0, {"kind": [1]})
        assert not path.exists()
    assert os.listdir(tmp_path) == ["t.prism"]
    with pytest.raises(TraceWriteError, match="File exists"):
        TraceWriter(path, atomic=True)
    with pytest.raises(RuntimeError), TraceWriter(path, atomic=True, overwrite=True) as writer:
        raise RuntimeError
    with TraceReader(path) as reader:
        assert reader.num_units(0) == 1


def test_a_lost_role_takes_its_ranks_with_it(tmp_path: Path) -> None:
    path = tmp_path / "t.prism"
    with TraceWriter(path) as writer:
        writer.add_role(7, {"kind": [1, 2]})
        writer.add_units(0, {"kind": [1, 3]}, role=7)
        writer.add_units(1, {"kind": [1]})
    raw: Any = bytearray(path.read_bytes())
    with TraceReader(path) as reader:
        offset = int(reader._index.chunk_entries["offset"][0])
    raw[offset + 40] ^= 1
    path.write_bytes(raw)
    report = prismtrace.recover(path, tmp_path / "out")
    assert [part.reason.split(" that")[0] for part in report.lost][-1] == "the rows of role 7"
    with TraceReader(tmp_path / "out") as reader:
        assert reader.ranks == (1,)
