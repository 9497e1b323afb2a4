"""What format 1.1 added reads as the plain file does, with both readers, whatever the ranks look like."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_reader import read as foreign_read
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import prismtrace
from prismtrace import TraceLimitError, TraceReader, TraceWriter, compact
from prismtrace._generated.schema import StreamPart
from prismtrace.bits import bit_lengths, pack, unpack
from prismtrace.encoding import Stream
from prismtrace.metas import DENSE


def streams_of(path: Path) -> list[Stream]:
    """All streams of all chunks."""
    with TraceReader(path) as reader:
        loaded = [reader._chunk_reader._load(entry, whole=True) for entry in reader._index.chunk_entries]
    return [stream for chunk in loaded for stream in chunk.meta.streams]


def small_rank(rank: int, num_rows: int, *, period: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(rank)
    length = (np.arange(num_rows) % period + 1) * 10**6 + rng.integers(0, 50_000, num_rows)
    end = np.cumsum(length + rng.integers(0, 3000, num_rows))
    kind = np.where(np.arange(num_rows) % period == 2, 2, 1).astype(np.uint8)
    return {
        "kind": kind, "step": np.arange(num_rows) // period, "start_ns": end - length, "end_ns": end,
        "group_id": np.where(kind == 2, 7 + rank % 2, 0).astype(np.uint64), "stage": [rank] * num_rows,
        "label": [None if k == 1 else f"r{rank % 3}" for k in kind.tolist()],
        "splits_in": [[rank, 1] if k == 2 else None for k in kind.tolist()],
    }  # fmt: skip


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 64).map(lambda n: (1 << n) - 1), max_size=80))
def test_bits_come_back(values: list[int]) -> None:
    numbers = np.array(values, np.uint64)
    lengths, bits = pack(numbers)
    assert bit_lengths(numbers).tolist() == [value.bit_length() for value in values]
    assert len(bits) == (sum(max(value.bit_length() - 1, 0) for value in values) + 7) // 8
    assert unpack(lengths, bits, len(values)).tolist() == values
    with pytest.raises(ValueError, match="bits"):
        unpack(lengths, bits + b"\0", len(values))


Tables = st.dictionaries(
    st.integers(0, 6),
    st.tuples(st.sampled_from([1, 2, 5, 12, 13]), st.integers(0, 3), st.integers(0, 2**31 - 1)),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(tables=Tables, alike=st.booleans(), tick=st.sampled_from([1, 1000, 238]), absent=st.booleans())
@example(tables={0: (12, 0, 0), 1: (12, 0, 1), 2: (12, 1, 0)}, alike=True, tick=1, absent=False)
def test_any_ranks_read_the_same(tables: dict[int, tuple[int, int, int]], alike: bool, tick: int, absent: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder) / "plain", Path(folder) / "small"
        with TraceWriter(plain, world_size=7) as writer:
            for rank, (num_rows, variant, seed) in tables.items():
                rng = np.random.default_rng(seed)
                start = np.cumsum(rng.integers(-(2**40), 2**40, num_rows)) * tick
                end: list[int | None] = (start + rng.integers(0, 2**20, num_rows) * tick).tolist()
                begun: list[int | None] = start.tolist()
                if absent:
                    end[0] = None
                    begun[-1] = end[-1] = None
                kind = np.full(num_rows, 1 if alike else variant, np.uint8)
                columns: dict[str, Any] = {"kind": kind, "step": np.arange(num_rows) // 4, "start_ns": begun}
                columns |= {"end_ns": end, "awaits": None, "stage": [rank if variant else None] * num_rows}
                columns |= {"test.tokens": rng.integers(0, 9, num_rows)} if variant == 2 else {}
                columns |= {"test.note": [str(rank)] * num_rows} if variant == 3 else {}
                writer.add_units(rank, columns)
                if variant == 1:
                    writer.add_steps(rank, {"step": [0, 1], "end_ns": [5, 6 + rank], "loss": [0.5, float("nan")]})
        with plain.open("rb") as file:  # not by name: it would be copied where it gets no smaller
            compact(file, small)
        wanted = prismtrace.to_json(plain) | {"format": "1.1"}
        assert prismtrace.to_json(small) == wanted
        assert foreign_read(small.read_bytes()) == wanted


def test_small_ranks_share_a_chunk(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "plain", world_size=12) as writer:
        for rank in range(12):
            writer.add_units(rank, small_rank(rank, 400 if rank % 4 else 397))
    compact(tmp_path / "plain", tmp_path / "small")
    wanted = prismtrace.to_json(tmp_path / "plain") | {"format": "1.1"}
    assert prismtrace.to_json(tmp_path / "small") == wanted
    assert foreign_read((tmp_path / "small").read_bytes()) == wanted
    assert (tmp_path / "small").stat().st_size < 0.65 * (tmp_path / "plain").stat().st_size
    with TraceReader(tmp_path / "small") as reader:
        assert len(reader._index.chunk_entries) <= 4
        assert [reader.num_units(rank) for rank in (0, 1)] == [397, 400]
        one, other = reader.units(5, steps=range(3, 5)), small_rank(5, 400)
        assert one.start_ns.tolist() == other["start_ns"][12:20].tolist()
        assert one.first_index == 12
        assert reader.units(6, columns=["end_ns"]).end_ns.tolist() == small_rank(6, 400)["end_ns"].tolist()
        assert [len(part) for part in reader.iter_units(7, max_rows=150)] == [150, 150, 100]
        assert not reader.units(5).start_ns.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            reader.units(5).kind[0] = 1
    told = streams_of(tmp_path / "small")
    assert {4, 5} <= {stream.column for stream in told if stream.part == StreamPart.BITS}
    assert {stream.lap for stream in told if stream.column in (4, 5)} > {0}


def test_ranks_of_a_role_are_stacked_on_it(tmp_path: Path) -> None:
    def times(rank: int) -> NDArray[np.int64]:
        return np.arange(100) * 10**6 + np.random.default_rng(rank).integers(0, 400, 100)

    with TraceWriter(tmp_path / "plain", world_size=20) as writer:
        for rank in range(20):
            columns = small_rank(0, 100) | {"stage": [0] * 100, "start_ns": times(rank), "end_ns": times(rank) + 900}
            writer.add_units(rank, columns | {"group_id": small_rank(rank, 100)["group_id"]})
    compact(tmp_path / "plain", tmp_path / "small")
    wanted = prismtrace.to_json(tmp_path / "plain") | {"format": "1.1"}
    assert prismtrace.to_json(tmp_path / "small") == wanted
    assert foreign_read((tmp_path / "small").read_bytes()) == wanted
    with TraceReader(tmp_path / "small") as reader:
        assert len(reader.roles) == 1
        assert len(reader._index.chunk_entries) == 3
        first, second = reader.units(8), reader.units(9)
        assert np.shares_memory(first.kind, second.kind)  # what is the role's is there once
        assert first.group_id[2] != second.group_id[2]
        assert first.start_ns.tolist() == times(8).tolist()


def test_old_readers_are_told(tmp_path: Path) -> None:
    for dense in (False, True):
        with TraceWriter(tmp_path / "plain", overwrite=True) as writer:
            for rank in range(3):
                writer.add_units(rank, small_rank(rank, 50))
        compact(tmp_path / "plain", tmp_path / "small", dense=dense, overwrite=True)
        with TraceReader(tmp_path / "small") as reader:
            header = reader._index.header
            assert header.required_features == (DENSE if dense else 0)
            assert reader.format_version == ((1, 1) if dense else (1, 0))
        told = streams_of(tmp_path / "small")
        assert any(stream.lap or stream.part == StreamPart.BITS for stream in told) == dense


def test_what_is_made_of_dense_files_keeps_the_bit(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "plain") as writer:
        for rank in range(6):
            writer.add_units(rank, small_rank(rank, 50))
    compact(tmp_path / "plain", tmp_path / "small")
    with TraceWriter(tmp_path / "more") as writer:
        writer.add_units(9, small_rank(9, 10))
        writer.add_units(3, small_rank(3, 20))
    prismtrace.merge([tmp_path / "small", tmp_path / "more"], tmp_path / "merged")
    raw = (tmp_path / "small").read_bytes()
    (tmp_path / "cut").write_bytes(raw[:-200])
    prismtrace.recover(tmp_path / "cut", tmp_path / "recovered")
    with TraceWriter.append(tmp_path / "small") as writer:
        assert writer.add_units(2, small_rank(2, 10)) == 50
    for name in ("merged", "recovered", "small"):
        with TraceReader(tmp_path / name) as reader:
            assert reader._index.header.required_features == DENSE
            assert reader.units(4).start_ns.tolist() == small_rank(4, 50)["start_ns"].tolist()
        foreign_read((tmp_path / name).read_bytes())
    with TraceReader(tmp_path / "merged") as reader:
        assert reader.units(3).start_ns.tolist() == small_rank(3, 20)["start_ns"].tolist()  # the later file counts
    prismtrace.slice_trace(tmp_path / "merged", tmp_path / "slice", ranks=[1, 4])
    with TraceReader(tmp_path / "slice") as reader:
        assert reader.ranks == (1, 4)
        assert reader.units(1).end_ns.tolist() == small_rank(1, 50)["end_ns"].tolist()


def test_a_bound_on_results_holds_for_the_ranks_that_are_decoded_together(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "plain") as writer:
        for rank in range(30):
            writer.add_units(rank, small_rank(rank, 1000))
    compact(tmp_path / "plain", tmp_path / "small")
    with TraceReader(tmp_path / "small", max_result_bytes=1 << 20) as reader:
        assert len(reader.units(3, columns=["kind"])) == 1000
        with pytest.raises(TraceLimitError, match="stacked"):
            reader.units(3)
