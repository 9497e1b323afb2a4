"""Files of a hostile writer, with checksums that are right: named errors only, in bounded time and memory.

What both readers accept they read alike. benchmarks/fuzz_trace.py --structure does the same at length.
"""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from foreign_reader import Refused
from foreign_reader import read as foreign_read
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_edits import FOOTER, STRING_LENGTHS, Record, edited, get_field, put_together, set_field, take_apart
from trace_faults import Memory, check_hostile, everything

import prismtrace
from prismtrace import PrismTraceError, TraceFormatError, TraceLimitError, TraceReader

VECTORS = Path(prismtrace.__file__).resolve().parents[1] / "spec/conformance/valid"
NAMES = sorted(path.stem for path in VECTORS.glob("*.prism"))
SMALL = [name for name in NAMES if name != "roles_8192"]  # to read all of its ranks takes seconds


def load(name: str) -> tuple[list[Record], bytes]:
    raw = (VECTORS / f"{name}.prism").read_bytes()
    return take_apart(raw), raw[:8]


@pytest.mark.parametrize("name", NAMES)
def test_taking_apart_and_putting_together_changes_nothing(name: str) -> None:
    records, magic = load(name)
    assert put_together(records, magic, finished=True) == (VECTORS / f"{name}.prism").read_bytes()
    cut = io.BytesIO(put_together(records, magic, finished=False))
    with TraceReader(cut, allow_unfinished=True) as reader:
        assert reader.unfinished


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=60 if settings.default.derandomize else 240, deadline=None)  # more for `make fuzz`
@given(rng=st.randoms(use_true_random=False), finished=st.booleans())
def test_hostile_structure(name: str, rng: random.Random, finished: bool) -> None:
    records, magic = load(name)
    raw = put_together(edited(records, rng), magic, finished=finished)
    result = check_hostile(raw, Memory(), allow_unfinished=not finished)
    assert not result.outcome.is_fault, result


@pytest.mark.parametrize("name", SMALL)
def test_what_both_readers_accept_they_read_alike(name: str, tmp_path: Path) -> None:
    records, magic = load(name)
    rng = random.Random(5)
    bad, saved = tmp_path / "bad.prism", tmp_path / "saved.prism"
    agreed = 0
    for number in range(80):
        bad.write_bytes(put_together(edited(records, rng), magic, finished=False))
        try:
            prismtrace.recover(bad, saved, overwrite=True)
            everything(saved, max_result_bytes=1 << 20)  # the second reader is slow: no large tables
            assert foreign_read(saved.read_bytes()) == prismtrace.to_json(saved), number
            agreed += 1
        except (PrismTraceError, Refused):
            continue
    assert agreed > 10


def test_an_index_entry_too_short_for_a_record() -> None:
    records, magic = load("one_rank")
    footer = next(record for record in records if record.kind == FOOTER)
    good = put_together(records, magic, finished=True)
    chunk = next(i for i in range(8, len(good), 8) if good[i : i + 5] == b"\xf6PRc\x02")
    place = bytes(footer.meta).index(struct.pack("<Q", chunk)) + 8
    for length in (0, 8, 31):
        footer.meta[place : place + 8] = struct.pack("<Q", length)
        with TraceReader(io.BytesIO(put_together(records, magic, finished=True))) as reader:
            with pytest.raises(TraceFormatError) as caught:
                reader.units(reader.ranks[0])
            assert caught.value.offset == chunk


def test_findings_of_a_million_ranks_take_no_more_memory_than_those_that_are_returned() -> None:
    records, magic = load("stacked")
    footer = next(record for record in records if record.kind == FOOTER)
    place = bytes(footer.meta).index(struct.pack("<iIi", 9, 1, 1))
    footer.meta[place : place + 12] = struct.pack("<iIi", 9, 900_000, 1)
    raw = put_together(records, magic, finished=True)
    tracemalloc.start()
    try:
        found = prismtrace.validate(io.BytesIO(raw), max_findings=50)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {item.code for item in found} == {"PT010"} and len(found) == 50
    assert peak < 160 << 20


def test_a_dictionary_of_empty_strings_without_end() -> None:
    records, magic = load("everything")
    bombs = 0
    for record in records:
        position = 0
        for place in record.streams:
            stored_length = get_field(record, place, "stored_length")
            if (get_field(record, place, "column"), get_field(record, place, "part")) == (0, STRING_LENGTHS):
                del record.data[position : position + stored_length]
                bomb = {"encoding": 2, "width": 0, "base": 0, "num_values": 1 << 24}
                for name, value in {**bomb, "raw_length": 0, "stored_length": 0, "compression": 1, "crc": 0}.items():
                    set_field(record, place, name, value)
                stored_length = 0
                bombs += 1
            position += stored_length
    assert bombs
    memory = Memory()
    with pytest.raises(TraceLimitError, match="dictionary of 16777216"):
        everything(io.BytesIO(put_together(records, magic, finished=False)), allow_unfinished=True)
    assert memory.growth() < 64 << 20
