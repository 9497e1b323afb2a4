"""A file that lost bytes at its end or in its middle gives back every whole chunk, and says which bytes are lost."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trace_faults import FRAME, MARKER, everything, limited

from prism_sdk.cli.main import run
from prismtrace import (
    ProcessGroup,
    TraceFormatError,
    TraceReader,
    TraceTruncatedError,
    TraceUnfinishedError,
    TraceWriter,
    recover,
)

CHUNK, PAYLOAD = 2, 3


@dataclass(frozen=True)
class Record:
    """Where a record lies and what kind it is."""

    start: int
    end: int
    kind: int


def records(raw: bytes) -> Iterator[Record]:
    offset = 8
    while raw[offset : offset + 4] == MARKER:
        _, kind, _, _, meta_length, _, data_length, _, _ = FRAME.unpack_from(raw, offset)
        end = offset + 32 + (meta_length + 7) // 8 * 8 + (data_length + 7) // 8 * 8
        yield Record(offset, end, kind)
        offset = end


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two ranks, two chunks each, a payload: some 2 kB."""
    path = tmp_path / "small.prism"
    with TraceWriter(path, world_size=2, metadata={"job.status": "running"}) as writer:
        writer.add_group(ProcessGroup(group_id=3, name="dp", ranks=(0, 1)))
        writer.add_payload(b"payload " * 9)
        for part in range(2):
            for rank in range(2):
                start = [1000 * part + 100 * i + rank for i in range(4)]
                writer.add_units(rank, {"kind": [1, 1, 2, 5], "step": [part] * 4, "start_ns": start})
    return path


def rows_of(path: Path) -> dict[int, list[int]]:
    with TraceReader(path) as reader:
        return {rank: reader.units(rank).start_ns.tolist() for rank in reader.ranks}


def whole_before(raw: bytes, length: int) -> dict[int, int]:
    """Kind -> number of records that end within the first `length` bytes."""
    counts = {CHUNK: 0, PAYLOAD: 0}
    for record in records(raw):
        if record.end <= length and record.kind in counts:
            counts[record.kind] += 1
    return counts


def test_a_cut_at_every_byte(small: Path, tmp_path: Path) -> None:
    raw, whole = small.read_bytes(), rows_of(small)
    header_end = next(records(raw)).end
    cut, saved = tmp_path / "cut.prism", tmp_path / "saved.prism"
    for length in range(len(raw)):
        cut.write_bytes(raw[:length])
        with pytest.raises(TraceTruncatedError) as caught:
            TraceReader(cut)
        assert caught.value.offset is not None
        if length < header_end:
            with pytest.raises(TraceTruncatedError):
                recover(cut, saved, overwrite=True)
            continue
        assert isinstance(caught.value, TraceUnfinishedError)
        report = recover(cut, saved, overwrite=True)
        kept = whole_before(raw, length)
        assert (report.num_chunks, report.num_payloads) == (kept[CHUNK], kept[PAYLOAD])
        assert not report.was_finished
        boundary = max(record.end for record in records(raw) if record.end <= length)
        assert [(part.start, part.end) for part in report.lost] == ([(boundary, length)] if boundary < length else [])
        rows = rows_of(saved)
        assert sum(map(len, rows.values())) == 4 * kept[CHUNK] == report.num_rows
        assert all(part == whole[rank][: len(part)] for rank, part in rows.items())
        with TraceReader(cut, allow_unfinished=True) as reader:
            assert reader.unfinished and reader.readable_bytes == boundary
            assert {rank: reader.units(rank).start_ns.tolist() for rank in reader.ranks} == rows


def test_the_command_exits_with_3_after_any_cut(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = small.read_bytes()
    cut, saved = tmp_path / "cut.prism", tmp_path / "saved.prism"
    ends = [8, *(record.end for record in records(raw))]
    for length in sorted({0, 5, *ends, *(end - 1 for end in ends), *(end + 9 for end in ends[:-1]), len(raw) - 1}):
        cut.write_bytes(raw[:length])
        code = run(["recover", str(cut), "-o", str(saved), "--overwrite", "--json"])
        assert code == 3, length
        text = capsys.readouterr()
        if length < ends[1]:
            assert f"byte {0 if length < 8 else 8}" in text.err
            continue
        report = json.loads(text.out)
        boundary = max(end for end in ends if end <= length)
        assert report["was_finished"] is False and report["lost_bytes"] == length - boundary
        assert run(["recover", str(cut), "-o", str(saved), "--overwrite"]) == 3
        expected = f"lost bytes {boundary} to {length}" if boundary < length else f"from byte {length} on"
        assert expected in capsys.readouterr().out
    assert run(["recover", str(small), "-o", str(saved), "--overwrite"]) == 0


def check_saved(damaged: bytes, small: Path, folder: Path, *, num_chunks: int) -> None:
    """Recovery keeps so many chunks and never a changed row, and names what it left out."""
    bad, saved = folder / "bad.prism", folder / "saved.prism"
    bad.write_bytes(damaged)
    with limited():
        report = recover(bad, saved, overwrite=True)
    whole = rows_of(small)
    assert report.num_chunks == num_chunks
    with TraceReader(saved) as reader:
        for rank in reader.ranks:
            units = reader.units(rank)
            assert units.start_ns.tolist() == [whole[rank][row] for row in units.row_index.tolist()]
    assert report.lost
    for part in report.lost:
        assert 0 <= part.start < part.end <= len(damaged) and part.reason


def test_bytes_removed_from_the_middle(small: Path, tmp_path: Path) -> None:
    raw = small.read_bytes()
    listed = list(records(raw))
    first = listed[0].end
    for start in range(first, len(raw) - 48, 5):
        for count in (1, 8, 40):
            damaged = raw[:start] + raw[start + count :]
            with pytest.raises(TraceFormatError):
                TraceReader(io.BytesIO(damaged)).units(0)
            touched = {r for r in listed if r.start < start + count and start < r.end}
            aligned = count % 8 == 0  # records are looked for at multiples of 8 only
            kept = {r for r in listed if r.kind == CHUNK and (r.end <= start or (aligned and r not in touched))}
            check_saved(damaged, small, tmp_path, num_chunks=len(kept))


def test_a_tail_of_zeros(small: Path, tmp_path: Path) -> None:
    raw = small.read_bytes()
    listed = list(records(raw))
    for start in range(listed[0].end, len(raw), 7):
        damaged = raw[:start] + bytes(len(raw) - start)
        if damaged == raw:
            continue
        with pytest.raises(TraceUnfinishedError):
            TraceReader(io.BytesIO(damaged))
        # a record whose lost bytes were padding is whole
        kept = {r for r in listed if r.kind == CHUNK and damaged[r.start : r.end] == raw[r.start : r.end]}
        check_saved(damaged, small, tmp_path, num_chunks=len(kept))


def test_a_tail_that_was_written_twice(small: Path, tmp_path: Path) -> None:
    raw = small.read_bytes()
    listed = list(records(raw))
    for start in range(0, len(raw), 9):
        damaged = raw + raw[start:]
        try:
            told: Any = everything(io.BytesIO(damaged))
        except TraceFormatError:
            pass
        else:
            assert told == everything(small)
    for record in listed[1:]:
        bad, saved = tmp_path / "bad.prism", tmp_path / "saved.prism"
        bad.write_bytes(raw[: record.end] + raw[record.start :])
        report = recover(bad, saved, overwrite=True)
        assert rows_of(saved) == rows_of(small)
        assert any("has the same rows" in part.reason for part in report.lost) == (record.kind == CHUNK)


def test_a_trailer_that_points_elsewhere(small: Path) -> None:
    raw = bytearray(small.read_bytes())
    (footer,) = struct.unpack_from("<Q", raw, len(raw) - 32)
    for place in (0, 8, footer - 8, footer + 8, len(raw), 1 << 63):
        moved = bytearray(raw)
        struct.pack_into("<Q", moved, len(raw) - 32, place)
        with pytest.raises(TraceFormatError):
            TraceReader(io.BytesIO(moved))
