"""Broken files give a named error with file and offset, or the same values as before: never other values."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import struct
import zlib
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest
from foreign_reader import Refused
from foreign_reader import read as foreign_read
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_sample import write_sample

import prismtrace
from prismtrace import (
    PrismTraceError,
    TraceFormatError,
    TraceLimitError,
    TraceReader,
    TraceReadError,
    TraceTruncatedError,
    TraceUnfinishedError,
    TraceUsageError,
    TraceVersionError,
)
from prismtrace.container import FRAME

IS_FUZZING = not settings.default.derandomize  # `make fuzz`: more of what is random, and others each time


def tries(count: int, *, seed: int) -> Iterator[random.Random]:
    """So often a source of random numbers, and four times as often when fuzzing."""
    rng = random.Random(None if IS_FUZZING else seed)
    yield from repeat(rng, count * 4 if IS_FUZZING else count)


def read_all(raw: bytes, *, allow_unfinished: bool = False) -> str:
    """Everything a file says, or the named error it ends in."""
    with TraceReader(io.BytesIO(raw), allow_unfinished=allow_unfinished) as reader:
        return json.dumps(prismtrace.to_json(reader))


def test_every_truncation_is_named(sample: Path) -> None:
    raw = sample.read_bytes()
    for length in range(len(raw)):
        with pytest.raises(TraceFormatError) as caught:
            read_all(raw[:length])
        assert isinstance(caught.value, TraceTruncatedError), length
        assert isinstance(caught.value, TraceUnfinishedError) or length < 200
        assert caught.value.offset is not None


def test_every_truncation_keeps_the_whole_records(sample: Path) -> None:
    raw = sample.read_bytes()
    with TraceReader(sample) as reader:
        whole = {rank: reader.units(rank).start_ns.tolist() for rank in reader.ranks}
    rows = []
    for length in range(256, len(raw)):
        with TraceReader(io.BytesIO(raw[:length]), allow_unfinished=True) as reader:
            assert reader.unfinished
            rows.append(sum(reader.num_units(rank) for rank in reader.ranks))
            if length % 16 == 0:
                for rank in reader.ranks:
                    part = reader.units(rank).start_ns.tolist()
                    assert part == whole[rank][: len(part)]
    assert rows == sorted(rows)
    assert rows[-1] == 20


def test_random_corruptions_are_detected_or_harmless(sample: Path) -> None:
    good = sample.read_bytes()
    wanted = read_all(good)
    num_tries = num_harmless = 0
    for rng in tries(1500, seed=1):
        num_tries += 1
        raw = bytearray(good)
        for _ in range(rng.choice((1, 2, 2, 8))):
            raw[rng.randrange(len(raw))] ^= rng.randrange(1, 256)
        try:
            assert read_all(bytes(raw)) == wanted
            num_harmless += 1
        except TraceFormatError as error:
            assert error.path == "<BytesIO>"
    assert num_harmless < num_tries / 5  # padding, and records that a finished file does not need


def test_the_foreign_reader_refuses_what_we_refuse(sample: Path) -> None:
    good = sample.read_bytes()
    wanted = foreign_read(good)
    for rng in tries(200, seed=2):
        raw = bytearray(good)
        raw[rng.randrange(len(raw))] ^= rng.randrange(1, 256)
        try:
            assert foreign_read(bytes(raw)) == wanted
        except Refused:
            with pytest.raises(TraceFormatError):
                read_all(bytes(raw))


def with_good_checksums(raw: bytearray) -> bytes:
    """The same bytes with every checksum of frames and meta sections made right again: what a hostile writer does."""
    offset = 8
    while offset + 32 <= len(raw) and raw[offset : offset + 4] == b"\xf6PRc":
        _, _, _, _, meta_length, _, data_length, _, _ = FRAME.unpack_from(raw, offset)
        if meta_length + data_length > len(raw):
            break
        struct.pack_into("<I", raw, offset + 12, zlib.crc32(raw[offset + 32 : offset + 32 + meta_length]))
        struct.pack_into("<I", raw, offset + 28, zlib.crc32(raw[offset : offset + 28]))
        offset += 32 + (meta_length + 7) // 8 * 8 + (data_length + 7) // 8 * 8
    struct.pack_into("<I", raw, len(raw) - 12, zlib.crc32(raw[-32:-12]))
    return bytes(raw)


@pytest.mark.parametrize("allow_unfinished", [False, True])
def test_hostile_bytes_with_good_checksums_end_in_a_named_error(sample: Path, allow_unfinished: bool) -> None:
    good = sample.read_bytes()
    for rng in tries(700, seed=3):
        raw = bytearray(good)
        for _ in range(rng.choice((1, 2, 4))):
            raw[rng.randrange(8, len(raw))] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
        try:
            read_all(with_good_checksums(raw), allow_unfinished=allow_unfinished)
        except PrismTraceError:
            pass


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=300), prefix=st.booleans())
def test_noise_is_no_trace(raw: bytes, prefix: bool) -> None:
    with pytest.raises(TraceFormatError):
        read_all((b"\x89PRSM\x01\r\n" if prefix else b"") + raw, allow_unfinished=True)


def test_validate_never_raises_on_broken_bytes(sample: Path) -> None:
    good = sample.read_bytes()
    for rng in tries(200, seed=4):
        raw = bytearray(good)
        raw[rng.randrange(len(raw))] ^= rng.randrange(1, 256)
        for item in prismtrace.validate(io.BytesIO(with_good_checksums(raw) if rng.random() < 0.5 else bytes(raw))):
            assert item.code.startswith("PT")


def test_a_later_version_is_refused_by_name(sample: Path) -> None:
    raw = bytearray(sample.read_bytes())
    raw[5] = 2
    with pytest.raises(TraceVersionError, match=r"format 2\.x"):
        read_all(bytes(raw))


def test_the_draft_is_refused_by_name(sample: Path) -> None:
    raw = bytearray(sample.read_bytes())
    raw[5] = 0
    with pytest.raises(TraceVersionError, match=r"format 0\.x.*a draft"):
        read_all(bytes(raw))


def test_a_size_bomb_is_refused_before_it_is_built(tmp_path: Path) -> None:
    path = tmp_path / "bomb.prism"
    with prismtrace.TraceWriter(path) as writer:
        for _ in range(40):
            writer.add_units(0, {"kind": [1] * 60_000})
        digest = writer.add_payload(bytes(50_000_000))
    assert path.stat().st_size < 60_000
    with TraceReader(path, max_result_bytes=10_000_000) as reader:
        with pytest.raises(TraceLimitError, match="fewer steps"):
            reader.units(0)
        assert len(reader.units(0, columns=["kind"], steps=3)) == 0
        with pytest.raises(TraceLimitError, match="payload"):
            reader.payload(digest)
    with TraceReader(path) as reader:
        assert reader.payload_bytes(digest) == 50_000_000


def test_places_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    for name, error in (
        (".", TraceReadError),
        ("fifo", TraceReadError),
        ("missing", TraceReadError),
        ("nul\0", TraceReadError),
        ("empty", TraceUnfinishedError),
    ):
        with pytest.raises(error):
            TraceReader(f"{tmp_path}/{name}")
    with pytest.raises(TraceUsageError):
        TraceReader(3)  # type: ignore[arg-type]


def test_a_closed_reader_says_so(sample: Path) -> None:
    reader = TraceReader(sample)
    reader.close()
    with pytest.raises(TraceReadError):
        reader.units(0)


def test_no_descriptor_is_left_open(sample: Path, tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left to the collector closes now, and not in between
    before = len(os.listdir("/proc/self/fd"))
    broken = tmp_path / "broken"
    broken.write_bytes(sample.read_bytes()[:300])
    for _ in range(20):
        with pytest.raises(TraceFormatError):
            TraceReader(broken)
        prismtrace.validate(sample)
    write_sample(tmp_path / "more.prism")
    assert len(os.listdir("/proc/self/fd")) == before
