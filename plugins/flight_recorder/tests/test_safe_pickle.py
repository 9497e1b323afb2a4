"""Pickles are hostile: plain data come back, everything else is refused before anything runs."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prismtrace_flight_recorder import safe_pickle

from prismtrace import TraceFormatError, TraceTruncatedError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_come_back(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if protocol < 3 and (b"_codecs" in data or b"__builtin__" in data):
        with pytest.raises(TraceFormatError, match="nothing was run"):  # bytes are built by a call there
            safe_pickle.loads(data, path="x")
    else:
        assert safe_pickle.loads(data, path="x") == value


class Runs:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_something_is_refused(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "was_run"
    data = pickle.dumps({"version": "2.10", "entries": [Runs(target)], "pg_config": {}}, protocol)
    with pytest.raises(TraceFormatError, match="nothing was run"):
        safe_pickle.loads(data, path="evil")
    assert not target.exists()
    pickle.loads(data)
    assert target.exists(), "the same bytes do run with the standard loader"


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02Pname\n.",
        b"\x80\x02NQ.",
        b"\x80\x02}}b.",
        b"\x80\x05\x97.",
        b"\x80\x04\x8f.",
        b"\xff",
    ],
)
def test_instructions_that_are_no_plain_data(data: bytes) -> None:
    with pytest.raises(TraceFormatError, match="has the instruction"):
        safe_pickle.loads(data, path="evil")


def test_the_message_says_what_was_wanted() -> None:
    with pytest.raises(TraceFormatError, match=r"evil: byte 2: .*GLOBAL of os\.system"):
        safe_pickle.loads(b"\x80\x02cos\nsystem\n.", path="evil")


def test_what_would_allocate_without_bound_is_refused() -> None:
    with pytest.raises(TraceFormatError, match="out of line"):
        safe_pickle.loads(b"\x80\x02Nr" + struct.pack("<I", 0xFFFFFFF0) + b".", path="bomb")
    with pytest.raises(TraceFormatError, match="out of line"):
        safe_pickle.loads(b"Np999999999\n.", path="bomb")
    with pytest.raises(TraceTruncatedError):
        safe_pickle.loads(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".", path="bomb")
    with pytest.raises(TraceFormatError, match="a number of"):
        safe_pickle.loads(b"\x80\x02\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20) + b".", path="bomb")
    with pytest.raises(TraceFormatError, match="digits"):
        safe_pickle.loads(b"I" + b"9" * 10_000 + b"\n.", path="bomb")


def test_deep_nesting_is_no_trouble() -> None:
    data = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert isinstance(safe_pickle.loads(data, path="deep"), list)


def test_cut_anywhere() -> None:
    data = pickle.dumps({"version": "2.10", "entries": [{"a": [1, 2.5, "x", None, True, b"y"] * 3}]}, 2)
    for cut in range(len(data)):
        with pytest.raises(TraceFormatError, match="cut"):
            safe_pickle.loads(data[:cut], path="cut")


@given(st.binary(max_size=200))
def test_random_bytes_never_crash(data: bytes) -> None:
    try:
        safe_pickle.loads(data, path="random")
    except TraceFormatError as error:
        assert "random" in str(error)


@given(st.data())
def test_damaged_pickles_never_crash(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"version": "2.10", "entries": [{"record_id": 1, "sizes": [[2, 3]]}] * 2}, 4))
    for _ in range(2):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        safe_pickle.loads(bytes(whole), path="damaged")
    except TraceFormatError as error:
        assert "damaged" in str(error)
