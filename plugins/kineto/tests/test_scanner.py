"""Finding events in JSON text: whole, cut off, damaged, hostile."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_helpers import DATA, parsed, same
from prismtrace_kineto import scanner, sources
from prismtrace_kineto.scanner import TraceScanner


def scan(data: bytes) -> tuple[list[Any], TraceScanner]:
    found = TraceScanner(io.BytesIO(data))
    return [event for block in found.blocks() for event in block], found


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few events, so that every kind of cut happens."""
    monkeypatch.setattr(scanner, "READ_BYTES", 700)


@pytest.mark.usefixtures("small_reads")
def test_every_prefix_keeps_its_whole_events() -> None:
    data = (DATA / "nccl_data.json").read_bytes()
    events = parsed(data)["traceEvents"]
    start = data.index(b"[", data.index(b'"traceEvents"')) + 1
    known = 0
    for cut in range(start, len(data), 151):
        found, scanned = scan(data[:cut])
        assert same(found, events[: len(found)])
        assert len(found) == data[start:cut].count(b"\n  }")
        known = len(found)
        assert scanned.report.truncated
    assert known == len(events)


@pytest.mark.usefixtures("small_reads")
def test_every_prefix_of_the_head_is_told() -> None:
    data = b'{"a": 1, "b": {"c": [2, "x"]}, "traceEvents": [{"ph": "X"}], "z": 0.5}'
    for cut in range(1, len(data)):
        events, scanned = scan(data[:cut])
        assert scanned.report.truncated
        assert events == ([{"ph": "X"}] if cut > data.index(b"}]") else [])
        closed = scanned.suffix or ("]}" if scanned.report.has_events else "")
        whole = {**parsed(data), "traceEvents": []}
        for key, value in parsed((scanned.prefix + closed).encode()).items():
            assert whole[key] == value


def test_a_cut_gzip_file_gives_what_it_holds() -> None:
    data = (DATA / "mi300.json").read_bytes()
    packed = gzip.compress(data)
    for cut in range(20, len(packed), 997):
        stream = sources.GzipStream(io.BytesIO(packed[:cut]))
        got = stream.read()
        assert data.startswith(got)
        assert stream.damage
    stream = sources.GzipStream(io.BytesIO(packed + packed))
    assert stream.read() == data + data
    assert not stream.damage
    stream = sources.GzipStream(io.BytesIO(packed + b"\0\0\0"))
    assert stream.read() == data
    assert not stream.damage


WORDS = st.sampled_from(
    ["},{", '"', "\\", "]", "[", "}", "{", ",", ":", " ", "\n", "a", "é", "traceEvents", "\x01", "\u2028"]
)
STRINGS = st.lists(WORDS, max_size=6).map("".join)
THINGS = st.recursive(
    st.none() | st.booleans() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(THINGS, max_size=12), before=st.dictionaries(STRINGS, THINGS, max_size=3), size=st.integers(8, 300)
)
def test_any_json_is_split_rightly(events: list[Any], before: dict[str, Any], size: int) -> None:
    before.pop("traceEvents", None)
    whole = {**before, "traceEvents": events, "after": [{"x": 1}, {"y": "]"}]}
    for separators in ((",", ":"), (", ", ": ")):
        old, scanner.READ_BYTES = scanner.READ_BYTES, size
        try:
            found, scanned = scan(json.dumps(whole, separators=separators, ensure_ascii=False).encode())
        finally:
            scanner.READ_BYTES = old
        assert found == events
        assert not scanned.report.truncated
        assert parsed((scanned.prefix + scanned.suffix).encode()) == {**whole, "traceEvents": []}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_anywhere_never_raises_but_says_so(data: st.DataObject) -> None:
    events = [{"ph": "X", "name": f"n{index}", "args": {"a": [index, {"b": "c"}]}} for index in range(30)]
    text = bytearray(json.dumps({"traceEvents": events}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(17, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        found, scanned = scan(bytes(text))
    except ValueError as error:
        assert "neither an object nor an array" in str(error)
        return
    whole = [event for event in found if event in events]
    told = scanned.report.truncated or scanned.report.num_trailing or not scanned.report.has_events
    assert len(whole) >= len(events) - 6 or told


def test_an_event_in_the_middle_is_lost_alone() -> None:
    events = [{"ph": "X", "name": str(index), "args": {"list": [{"a": 1}, {"b": 2}]}} for index in range(9)]
    text = json.dumps({"traceEvents": events}).replace('"name": "4"', '"name": "4')
    found, scanned = scan(text.encode())
    assert [event for event in events if event not in found] == [events[4]]
    assert all(event in events for event in found)
    assert scanned.report.num_damaged == 1
    assert scanned.report.first_damage == text.index('{"ph": "X", "name": "4')


def test_twice_the_same_key_is_counted() -> None:
    found, scanned = scan(
        b'[{"ph": "X", "a": 1, "a": 2, "args": {"b": 1, "b": 2}}, {"ph": "X"}, {"ph": "Y", "ph": "Z"}]'
    )
    assert found == [{"ph": "X", "a": 2, "args": {"b": 2}}, {"ph": "X"}, {"ph": "Z"}]
    assert scanned.report.num_duplicate_keys == 3


def test_hostile_texts_end_quickly() -> None:
    deep = b'{"traceEvents": [' + b"[" * 100_000
    assert scan(deep)[1].report.truncated
    many = b'{"traceEvents": [' + b'{"ph":' * 50_000
    assert scan(many)[1].report.truncated
    digits = b'{"traceEvents": [{"ph": "X", "ts": ' + b"1" * 10_000 + b"}, {}]}"
    assert len(scan(digits)[0]) == 2
    for text in (b"", b"   ", b"hello", b"\x00\x01", b"12"):
        with pytest.raises(ValueError, match="neither"):
            scan(text)
