"""Nothing is lost between JSON, a losslessly imported trace, and JSON again."""

from __future__ import annotations

import gzip
import itertools
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_helpers import DATA, EXCERPTS, convert, document, parsed, restored, same, span
from prismtrace_kineto import lossless, nesting
from prismtrace_kineto.columns import ColumnBuilder, decimal_texts, decimals
from prismtrace_kineto.packing import Packer, PackError, Unpacker

import prismtrace


@pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.stem)
def test_real_traces_come_back(path: Path, tmp_path: Path) -> None:
    convert(tmp_path / "a.prism", path, lossless="true")
    assert prismtrace.validate(tmp_path / "a.prism") == []
    back = parsed(restored(tmp_path / "a.prism", tmp_path / "a.json"))
    assert same(back, parsed(path.read_bytes()))


def test_all_ranks_of_a_job_come_back(tmp_path: Path) -> None:
    from prismtrace_kineto.exporter import KinetoExporter

    convert(tmp_path / "a.prism", DATA / "dlrm-worker0.json", DATA / "dlrm-worker1.json", lossless="true")
    KinetoExporter().export_trace(tmp_path / "a.prism", output=tmp_path / "out", options={}, report=print)
    for rank in (0, 1):
        data = gzip.decompress((tmp_path / "out" / f"rank-{rank}.pt.trace.json.gz").read_bytes())
        assert same(parsed(data), parsed((DATA / f"dlrm-worker{rank}.json").read_bytes()))


NUMBERS = (
    st.integers()
    | st.integers(-5, 5)
    | st.decimals(places=3, min_value=-(10**12), max_value=10**12)
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.sampled_from([Decimal("NaN"), Decimal("-Infinity"), Decimal("Infinity"), Decimal("-0.0"), Decimal("1e400")])
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "bp", "s", "args", "track", "args.x", "flow", "%s", '"']
)
ARGS = st.dictionaries(
    st.sampled_from(["correlation", "External id", "x", "%d", "ts", ""]) | st.text(max_size=2), VALUES, max_size=4
)
PLACES = {"pid": st.sampled_from([1, 2, "a"]), "tid": st.sampled_from([1, 7, ""])}
USUAL = st.fixed_dictionaries(
    {
        "ph": st.sampled_from("XXXXiMC"),
        "cat": st.sampled_from(["cpu_op", "kernel", "%"]),
        "name": st.text(max_size=3),
        **PLACES,
        "ts": st.integers(0, 40) | st.decimals(0, 40, places=3),
        "dur": st.integers(-2, 40) | st.decimals(0, 40, places=3),
        "args": ARGS | st.fixed_dictionaries({"correlation": st.integers(0, 3)}),
    }
)
FLOWS = st.fixed_dictionaries(
    {
        "ph": st.sampled_from("stf"),
        "id": st.integers(0, 3),
        **PLACES,
        "ts": st.integers(0, 40),
        "cat": st.just("ac2g"),
        "name": st.just("ac2g"),
    },
    optional={"bp": st.just("e"), "odd": VALUES},
)
EVENTS = st.lists(USUAL | USUAL | FLOWS | st.dictionaries(KEYS, VALUES, max_size=6) | VALUES, max_size=25)


def with_flows(events: list[Any]) -> list[Any]:
    """Puts some flow events where the event before them is."""
    for before, event in itertools.pairwise(events):
        if (
            isinstance(before, dict)
            and isinstance(event, dict)
            and str(event.get("ph")) in "stf"
            and before.get("ph") == "X"
        ):
            event |= {key: before[key] for key in ("pid", "tid", "ts") if key in before}
    return events


def text_of(value: Any) -> str:
    """JSON with decimals, as another program would write it."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {text_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return json.dumps(value)


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(events=EVENTS)
def test_any_events_come_back(events: list[Any], tmp_path: Path) -> None:
    source = tmp_path / "s.json"
    source.write_text(f'{{"distributedInfo": {{"rank": 0}}, "traceEvents": {text_of(with_flows(events))}, "last": 1}}')
    convert(tmp_path / "a.prism", source, lossless="true")
    assert same(parsed(restored(tmp_path / "a.prism", tmp_path / "a.json")), parsed(source.read_bytes()))
    convert(tmp_path / "b.prism", source, python="true")
    assert not prismtrace.has_errors(prismtrace.validate(tmp_path / "b.prism"))


def test_what_doubles_cannot_hold_is_kept(tmp_path: Path) -> None:
    numbers = [
        "1712195495519698.750",
        "9007199254740993",
        "123456789012345678901234567890",
        "0.1000000000000000055511151231",
        "1e400",
        "-0.0",
    ]
    events = ", ".join(
        f'{{"ph": "X", "ts": {n}, "dur": 0.001, "pid": 1, "tid": 1, "args": {{"v": {n}}}}}' for n in numbers
    )
    source = tmp_path / "a.json"
    source.write_text(f'{{"distributedInfo": {{"rank": 0}}, "traceEvents": [{events}]}}')
    convert(tmp_path / "a.prism", source, lossless="true")
    back = parsed(restored(tmp_path / "a.prism", tmp_path / "b.json"))
    assert [str(event["ts"]) for event in back["traceEvents"]] == [str(parsed(n.encode())) for n in numbers]


def test_bytes_that_are_no_utf8_and_lone_surrogates_come_back(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_bytes(document([span("NAME", 1, 2, x="\ud800")]).replace(b"NAME", b"a\xff\x80\x01b"))
    report = convert(tmp_path / "a.prism", source, lossless="true", events="true")
    assert same(parsed(restored(tmp_path / "a.prism", tmp_path / "b.json")), parsed(source.read_bytes()))
    assert report.counts["events"] == 1
    with prismtrace.TraceReader(tmp_path / "a.prism") as reader:
        assert list(reader.events(0).name) == ["a\\udcff\\udc80\x01b"]


@given(
    st.lists(
        st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9), min_size=1
    )
)
def test_decimals_and_their_integers(values: list[Decimal]) -> None:
    texts = [str(value) for value in values]
    made = decimals(texts)
    if made is not None:
        assert decimal_texts(*made) == texts
    else:
        assert any("E" in text or (Decimal(text).is_signed() and not Decimal(text)) for text in texts)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), max_size=40))
def test_spans_and_gaps(spans: list[tuple[int, int, int]]) -> None:
    track, start, length = (np.array([item[i] for item in spans], np.int64) for i in range(3))
    order = nesting.in_time_order(track, start, start + length)
    track, start, end = track[order], start[order], (start + length)[order]
    kept = ~nesting.crossing(track, start, end)
    track, start, end = track[kept], start[kept], end[kept]
    assert not nesting.crossing(track, start, end).any()
    begins, _, gaps = nesting.to_gaps(track, start, end)
    assert (gaps >= 0).all()
    again = nesting.from_gaps(track, begins, gaps)
    assert (again[0] == start).all()
    assert (again[1] == end).all()


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.randoms(use_true_random=False))
def test_any_integers_survive_packing(values: list[int], random: Any) -> None:
    array = np.array(values, np.int64)
    order = np.array(random.sample(range(len(values)), len(values)), np.int64)
    other = np.array([random.getrandbits(62) for _ in values], np.int64)
    packer = Packer()
    packer.integers(array, order=order, others=[other])
    packer.codes(np.abs(array % 100), order=order)
    for how in ("", "d", "s", "z"):
        packer.integers(array, order=order, how=how)
    unpacker = Unpacker(packer.finish())
    assert unpacker.integers(order=order, others=[other]).tolist() == values
    assert unpacker.codes(order=order).tolist() == np.abs(array % 100).tolist()
    for _ in range(4):
        assert unpacker.integers(order=order).tolist() == values


def test_damaged_blocks_are_refused() -> None:
    builder = ColumnBuilder()
    builder.add([span("a", number, 1) for number in range(50)])
    builder.end_document()
    block = lossless.encode(builder.finish(), [lossless.DocumentText(0, "a", "[", "]")])
    for place in range(len(block)):
        damaged = bytearray(block)
        damaged[place] ^= 0x55
        with pytest.raises(PackError):
            lossless.decode(bytes(damaged))
        with pytest.raises(PackError):
            lossless.decode(block[:place])
