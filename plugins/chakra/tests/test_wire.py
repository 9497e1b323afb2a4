"""The wire format: what is written is what the protobuf library reads, and broken bytes become named errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prismtrace_chakra import chakra_nodes, wire
from prismtrace_chakra.wire import AttributeName, block, packed, varint

from prismtrace import TraceFormatError, TraceTruncatedError

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)


def frame(message: bytes) -> bytes:
    return varint(len(message)) + message


def node(
    number: int, name: str = "n", kind: int = wire.COMP, *, ctrl: list[int] | None = None, extra: bytes = b""
) -> bytes:
    return b"\x08" + varint(number) + block(2, name.encode()) + b"\x18" + varint(kind) + packed(4, ctrl or []) + extra


def file_of(*nodes: bytes) -> bytes:
    return b"".join(map(frame, (block(1, b"0.0.4"), *nodes)))


@given(
    UINT64, st.text(max_size=40), st.lists(UINT64, max_size=5), INT64, st.text(max_size=40), st.booleans(), st.binary()
)
def test_what_we_write_is_what_the_library_reads(
    number: int, name: str, deps: list[int], value: int, text: str, yes: bool, raw: bytes
) -> None:
    extra = b"".join(
        (
            AttributeName("a", "int64").one(value),
            AttributeName("b", "string").one(text),
            AttributeName("c", "bool").one(yes),
            AttributeName("d", "bytes").one(raw),
            AttributeName("e", "uint64").many(deps),
            AttributeName("f", "string").many([text, name]),
            AttributeName("g", "int32").one(-1),
        )
    )
    message: Any = wire.classes()[1]()
    message.ParseFromString(node(number, name, wire.COMM_COLL, ctrl=deps, extra=extra))
    assert (message.id, message.name, message.type, list(message.ctrl_deps)) == (number, name.encode(), 7, deps)
    assert wire.attributes(message) == {
        "a": ("int64", value),
        "b": ("string", text),
        "c": ("bool", yes),
        "d": ("bytes", raw),
        "e": ("uint64_list", tuple(deps)),
        "f": ("string_list", (text, name)),
        "g": ("int32", -1),
    }
    again: Any = wire.classes()[1]()
    again.ParseFromString(message.SerializeToString())
    assert wire.attributes(again) == wire.attributes(message)


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_frames_come_back(messages: list[bytes]) -> None:
    data = b"".join(map(frame, messages))
    assert [raw for _, raw in wire.frames(data, path="x")] == messages


def test_a_file_cut_anywhere_gives_its_whole_nodes() -> None:
    nodes = [node(number, "node" * 20, ctrl=[number - 1] if number > 1 else []) for number in range(1, 6)]
    data = file_of(*nodes)
    ends = [len(file_of(*nodes[:count])) for count in range(6)]
    for cut in range(len(data)):
        whole = sum(end <= cut for end in ends) - 1
        if whole < 1:
            with pytest.raises(TraceFormatError):
                chakra_nodes.read(data[:cut], path="cut.et", strict=False)
            continue
        found = chakra_nodes.read(data[:cut], path="cut.et", strict=False)
        assert len(found.nodes) == whole
        assert (found.truncated is None) == (cut in ends)
        if cut not in ends:
            with pytest.raises(TraceTruncatedError, match=r"cut\.et: byte \d+"):
                chakra_nodes.read(data[:cut], path="cut.et", strict=True)


@given(st.binary(max_size=300))
def test_random_bytes_never_crash(data: bytes) -> None:
    try:
        chakra_nodes.read(data, path="random.et", strict=False)
    except TraceFormatError as error:
        assert "random.et" in str(error)


@given(st.data())
def test_damaged_bytes_never_crash(data: st.DataObject) -> None:
    whole = bytearray(file_of(*(node(k, "abc", extra=AttributeName("tid", "int64").one(k)) for k in range(1, 5))))
    for _ in range(2):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        chakra_nodes.read(bytes(whole), path="damaged.et", strict=False)
    except TraceFormatError as error:
        assert "damaged.et" in str(error)


def test_a_length_that_is_none_is_named_with_its_offset() -> None:
    with pytest.raises(TraceFormatError, match="byte 2: a length of more than 10 bytes"):
        list(wire.frames(b"\x01a" + b"\xff" * 12, path="x"))
    with pytest.raises(TraceFormatError, match=r"a message of \d+ bytes: this is no .et file"):
        list(wire.frames(varint(1 << 40), path="x"))


def test_names_that_are_no_utf8_are_read() -> None:
    raw = b"\x08\x01" + block(2, b"caf\xe9") + b"\x18\x04"
    assert chakra_nodes.read(file_of(raw), path="x", strict=True).nodes[0].name == "caf\\xe9"
