"""The valid vectors: files that every reader reads, each with what it shows and what it needs.

Does not write them.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from building import GROUP, chunk, later_fields, shuffled, stream, trace, units, written
from dense_vectors import compacted, in_laps, with_a_role

from prismtrace import GraphKind, ProcessGroup, TraceWriter, compact, merge
from prismtrace._generated.schema import Compression, Encoding, StreamPart
from prismtrace.encoders import encode_integers
from prismtrace.encoding import Stream
from prismtrace.entries import RankRange
from prismtrace.metas import HeaderMeta, pack_header
from prismtrace.model import ColumnType, TableKind, named_spec
from prismtrace.strings import pack_strings
from prismtrace.writer import payload_digest


class Vector(NamedTuple):
    """A valid file. `features` are those that a reader must have."""

    summary: str
    raw: bytes
    features: tuple[str, ...] = ()
    twin: bool = True


def fill_everything(writer: TraceWriter) -> None:
    """Every table and every column, with values and absent."""
    writer.add_group(GROUP)
    blob = writer.add_payload(b"payload " * 16)
    for rank in (0, 1):
        for step in (0, 1):
            at = 1_000_000 * step + rank
            writer.add_units(
                rank,
                {
                    "kind": [1, 2, 5, 3 + rank, 5], "phase": [1, 2, 2, 4, 4], "step": [step] * 5,
                    "start_ns": [at, at + 700, at + 705, at + 900, at + 900],
                    "end_ns": [at + 700, at + 810, at + 810, None, at + 950],
                    "group_id": [0, GROUP.group_id, 0, GROUP.group_id, 0], "seq": [None, step, None, step, None],
                    "op": [0, 1, 0, 10 + rank, 0], "reduce_op": [0, 1, 0, 0, 0], "dtype": [0, 1, 0, 7, 0],
                    "num_elements_in": [None, 64, None, 8, None], "num_elements_out": [None, 64, None, None, None],
                    "peer": [None, None, None, 1 - rank, None], "tag": [None, None, None, 3, None],
                    "is_async": [False, True, False, True, False],
                    "awaits": [None, None, 5 * step + 1, None, 5 * step + 3],
                    "transfer_ns": [None, 90, None, None, None], "gap_ns": [0, None, 5, None, None],
                    "memory_bytes": [1 << 34, None, None, None, None], "microbatch": [0, 0, 0, None, None],
                    "stage": [rank] * 5, "model_chunk": [0, None, None, None, None],
                    "label": ["forward", None, None, "grüße", ""],
                    "payload_in": [None, blob, None, None, None], "payload_out": [None, blob, None, None, None],
                    "splits_in": [None, [32, 32], None, [], None], "splits_out": [None, [64, -1], None, None, None],
                },
            )  # fmt: skip
            writer.add_steps(
                rank,
                {
                    "step": [step], "start_ns": [None if step == 0 else at], "end_ns": [at + 950], "loss": [2.5],
                    "num_losses": [1], "memory_peak_bytes": [1 << 34], "cpu_time_ns": [900],
                },
            )  # fmt: skip
            writer.add_scalars(rank, {"step": [step, step], "name": ["loss", None], "value": [2.5, float("nan")]})
    writer.update_metadata({"job.status": "running", "torch.version": "2.13.0"})
    writer.set_metadata("job.status", "complete")


def fill_payloads(writer: TraceWriter) -> None:
    """One payload stored raw, one compressed, one empty."""
    writer.add_payload(bytes(np.random.default_rng(7).integers(0, 256, 500, np.uint8)))
    writer.add_payload(bytes(3000))
    writer.add_payload(b"")


def fill_events(writer: TraceWriter) -> None:
    """Two ranks with tracks and events, some fields in named columns."""
    for rank in (0, 1):
        writer.add_units(rank, {"kind": [1], "start_ns": [0], "end_ns": [100]})
        writer.add_tracks(
            rank,
            {
                "name": ["main", "stream 7", None], "process": ["python", None, None], "kind": [1, 2, 4],
                "process_id": [4000 + rank, None, None], "thread_id": [4000 + rank, None, None],
                "device": [None, rank, None], "stream": [None, 7, None],
            },
        )  # fmt: skip
        writer.add_events(
            rank,
            {
                "name": ["aten::mm", "gemm", "launch", "launch", "allocated"],
                "category": ["cpu_op", "kernel", None, None, None],
                "kind": [1, 1, 4, 6, 3], "track": [0, 1, 0, 1, 2], "start_ns": [10, 25, 12, 25, 30],
                "end_ns": [20, 90, None, None, None], "correlation_id": [5, 5, None, None, None],
                "flow_id": [None, None, 5, 5, None], "unit": [0, 0, None, None, None],
                "profiler.grid": [None, [16, 1, 1], None, None, None], "profiler.bytes": [None, None, None, None, 4096],
            },
        )  # fmt: skip


def fill_named(writer: TraceWriter) -> None:
    """A named column of every type, in chunks that do not all have it."""
    writer.add_units(
        0,
        {
            "kind": [1, 2, 1], "test.int": [1, None, -(2**62)], "test.float": [0.5, None, float("inf")],
            "test.bool": [True, False, True], "test.text": ["a", None, "b"],
            "test.digest": [None, bytes(range(16)), None],
            "test.list": [[1, 2], None, []], "test.unsigned": [2**64 - 1, 0, 1], "a.b.c": [0, 0, 0],
        },
    )  # fmt: skip
    writer.add_units(0, {"kind": [1]})
    writer.add_units(0, {"test.later": [7], "test.int": [5]})
    writer.add_steps(0, {"step": [1], "end_ns": [5], "test.int": ["another type in another table"]})


def fill_shared_strings(writer: TraceWriter) -> None:
    """Dictionaries that begin with shared strings, with and without own ones, and one without shared ones."""
    writer.share_strings(["forward", "backward", "ä"])
    writer.add_units(0, {"label": ["backward", None, "own", "ä"]})
    writer.add_units(1, {"label": ["forward", "forward"]})
    writer.add_units(2, {"label": ["own"], "test.text": ["other"]})
    writer.share_strings([])
    writer.add_units(3, {"label": ["forward"]})


def fill_roles(writer: TraceWriter) -> None:
    """A role, and ranks that differ from it in every way that a writer has."""
    start = [0, 1000, 2000, 3000, 9000, 9500, 9600, 9700]
    role = {
        "kind": [1, 2, 5, 1, 1, 2, 5, 1], "start_ns": start, "end_ns": [value + 90 for value in start],
        "group_id": [0, 7, 0, 0, 0, 8, 0, 0], "peer": [None, 3, None, None, None, 5, None, None],
        "label": ["a", None, "b", "a", "a", None, "b", "a"], "splits_in": [None, [1, 2], *[None] * 6],
        "test.tokens": [1, 2, 3, 4, 5, 6, 7, 8], "is_async": [False, True] * 4,
    }  # fmt: skip
    writer.add_role(11, role)
    writer.add_role(12, {"step": [0, 1], "end_ns": [100, 200], "loss": [2.0, 1.0]}, table=TableKind.STEPS)
    writer.add_units(0, role, role=11)
    writer.add_units(
        1, role | {"start_ns": [value + 5 for value in start], "peer": [None, 4, *[None] * 3, 6, None, None]}, role=11
    )
    writer.add_units(
        2, role | {"group_id": [0, 9, 0, 0, 0, 8, 0, 0], "label": [None] * 8, "is_async": [False] * 8}, role=11
    )
    noisy = [value + (i * 37) % 5 for i, value in enumerate(start)]
    writer.add_units(3, role | {"start_ns": noisy, "test.tokens": [None] * 8, "test.own": ["x"] * 8}, role=11)
    writer.add_units(3, {"kind": [1]})


def roles_of_several() -> bytes:
    """A chunk of several ranks with a map and shifts, of which the index counts some only, and one without a role."""
    role = chunk(
        stream(b"\x01\x02\x02", column=1, count=3),
        stream(shuffled([0, 20, 20], 1), column=4, count=3, encoding=Encoding.DELTA, base=100),
        stream(b"\x00\x07\x08", column=6, count=3),
        num_rows=3, rank=-1, role=5, first_ns=100, last_ns=120,
    )  # fmt: skip
    members = chunk(
        stream(bytes([7, 8, 17, 27, 37, 8, 28, 38]), column=6, count=8, part=StreamPart.MAP),
        stream(struct.pack("<3i", 0, 5, -5), column=4, count=3, part=StreamPart.SHIFT, width=4),
        num_rows=3, rank=2, role=5, ranks=(RankRange(2, 2, 4), RankRange(9, 1, 1)), first_ns=95, last_ns=125,
    )  # fmt: skip
    alike = chunk(stream(b"\x05", column=1, count=1), num_rows=1, rank=20, ranks=(RankRange(20, 3, 1),))

    def some(ranges: Any) -> None:
        ranges[0] = (6, 1, 1)  # rank 2 does not count

    def first(entries: Any) -> None:
        entries["rank"][1] = 6

    return trace(role, members, alike, change_ranges=some, change_index=first)


def many_ranks() -> bytes:
    """8,192 ranks in two roles, which differ in times and peers."""
    chunks = []
    for stage in (0, 1):
        ranks = np.arange(4096 * stage, 4096 * (stage + 1))
        start = np.array([0, 40, 45, 80]) + 1000 * stage
        columns = {"kind": [1, 3 + stage, 2, 5], "op": [0, 10 + stage, 1, 0], "seq": [None, 0, 0, None]}
        columns |= {"group_id": [0, 100, 1 + stage, 0], "start_ns": start.tolist(), "end_ns": (start + 30).tolist()}
        columns |= {"peer": [None, 4096 * (1 - stage), None, None], "awaits": [None, None, None, 2]}
        role = units(columns, rank=-1)
        chunks.append((role[0]._replace(role=1 + stage), role[1]))
        shifts = {4: ranks % 7, 5: ranks % 7, 13: ranks % 4096}
        parts = [encode_integers(values, column=column, part=StreamPart.SHIFT) for column, values in shifts.items()]
        several = (RankRange(4096 * stage, 4096, 1),)
        times = {"first_ns": 1000 * stage, "last_ns": 1000 * stage + 116}
        chunks.append(chunk(*parts, num_rows=4, ranks=several, rank=4096 * stage, role=1 + stage, **times))
    groups = [ProcessGroup(1 + s, f"dp{s}", ranks=tuple(range(4096 * s, 4096 * (s + 1)))) for s in (0, 1)]
    world = ProcessGroup(100, "world", ranks=tuple(range(8192)))
    return trace(*chunks, header=pack_header(HeaderMeta((1, 0), 0, 0, 1, 8192, "conformance")), groups=(*groups, world))


def merged_ranks() -> bytes:
    """Two files with roles, merged, of which the second replaces a rank of the first."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("a", "b", "out")]
        for path, ranks, offset in ((paths[0], range(6), 0), (paths[1], (2, 7), 50)):
            plain = Path(f"{path}.plain")
            with TraceWriter(plain, world_size=8) as writer:
                for rank in ranks:
                    writer.add_units(rank, {"kind": [1] * 12, "start_ns": np.arange(12) * 9 + rank + offset})
            with plain.open("rb") as file:  # not by name: it would be copied, for it hardly gets smaller
                compact(file, path, dense=False)
        merge(paths[:2], paths[2])
        return paths[2].read_bytes()


def every_encoding() -> bytes:
    """Each encoding where a reader must take it, also those that the writer of this repository does not choose."""
    dictionary = struct.pack("<2q", 7, -(2**62)) + bytes([1, 0, 1, 1])
    made = [
        stream(b"\x01\x02\x05\x03", column=1, count=4),
        stream(b"", column=3, count=4, encoding=Encoding.CONSTANT, width=0, base=-3),
        stream(shuffled([0, 2000, 1, 3], 2), column=4, count=4, encoding=Encoding.DELTA, width=2, base=10, scale=1000),
        stream(b"\x02\x00\x04\x01", column=5, count=4, encoding=Encoding.DIFFERENCE, scale=500, reference=4),
        stream(struct.pack("<4q", -1, 1, 2, 3), column=6, count=4, width=8),
        stream(dictionary, column=7, count=4, encoding=Encoding.DICTIONARY, base=2),
        stream(shuffled([65535, 0, 300, 1], 2), column=14, count=4, encoding=Encoding.SHUFFLED, width=2),
        stream(struct.pack("<2i", -5, 5), column=17, count=2, width=4),
        stream(b"\x09", column=17, count=1, part=StreamPart.VALIDITY),
        stream(shuffled([0, 2**64 - 1, 5, 6], 8), column=18, count=4, encoding=Encoding.OFFSET, width=8, base=2**62),
        stream(b"\x01\x00", column=23, count=2, encoding=Encoding.OFFSET),
        stream(b"\x06", column=23, count=1, part=StreamPart.VALIDITY),
        stream(b"\x02\x03", column=0, count=2, part=StreamPart.STRING_LENGTHS),
        stream("äabc".encode(), column=0, count=5, part=StreamPart.STRING_BYTES),
    ]
    packed = zstandard.ZstdCompressor().compress(bytes(range(64)) * 2)
    zstd = Stream(0, 128, len(packed), 128, zlib.crc32(packed), 1, 8, 0, 1, Encoding.PLAIN, Compression.ZSTD, 1)
    second = chunk((zstd, packed), num_rows=128, first_row=4)
    times = {"first_ns": 10_000, "last_ns": 12_000, "first_step": -3, "last_step": -3}
    return trace(chunk(*made, num_rows=4, **times), second)


def continued_rows() -> bytes:
    """Rows that begin where the row before ended: with and without absent ends and starts, and in other steps."""

    def pair(start: list[int], end: list[int], **changes: Any) -> list[Any]:
        begin = {"encoding": Encoding.CONTINUED, "reference": 5, **changes.get("begin", {})}
        finish = {"encoding": Encoding.DIFFERENCE, "reference": 4, **changes.get("finish", {})}
        return [
            stream(bytes(start), column=4, count=len(start), **begin),
            stream(bytes(end), column=5, count=len(end), **finish),
        ]

    absent = [
        stream(b"\x0b", column=4, count=1, part=StreamPart.VALIDITY),
        stream(b"\x09", column=5, count=1, part=StreamPart.VALIDITY),
    ]
    chunks = [
        chunk(*pair([0, 2, 1], [20, 40, 60], begin={"base": 100}), num_rows=3, first_ns=100, last_ns=160),
        chunk(*pair([0, 2, 4], [20, 40], begin={"base": 200}), *absent, num_rows=4, first_row=3),
        chunk(*pair([0, 2], [7, 9], begin={"scale": 1000}, finish={"scale": 500}), num_rows=2, first_row=7),
        chunk(
            *pair([0, 2], [6, 8], begin={"scale": 1000, "shift": 2, "base": 9}, finish={"scale": 1000, "shift": 2}),
            num_rows=2, first_row=9,
        ),
        chunk(*pair([0, 3], [250, 8], begin={"scale": 1000, "shift": 2}), num_rows=2, first_row=11),
    ]  # fmt: skip
    return trace(*chunks)


def every_tick() -> bytes:
    """Binary fractions and float32 steps, in all encodings that count."""
    half = {"scale": 1001, "shift": 3}
    floats = {"scale": 10**6, "shift": 32}
    first = [
        stream(struct.pack("<4h", -5, 4, 5, 12), column=4, count=4, width=2, **half),
        stream(b"\x00\x01\x02\x08", column=5, count=4, encoding=Encoding.DIFFERENCE, reference=4, **half),
        stream(b"\x01\x02\x04\x07", column=7, count=4, encoding=Encoding.OFFSET, base=-3, **half),
        stream(b"", column=11, count=4, encoding=Encoding.CONSTANT, width=0, base=3, **half),
        stream(
            struct.pack("<2q", 3, -3) + b"\x00\x01\x00\x01",
            column=12,
            count=4,
            encoding=Encoding.DICTIONARY,
            base=2,
            **half,
        ),
        stream(b"\x02\x04\x01\x03", column=18, count=4, encoding=Encoding.DELTA, base=1 << 40, scale=10**9, shift=31),
    ]
    bits = [struct.unpack("<i", struct.pack("<f", value))[0] for value in (60.5, 61.25, 0.1, 130.0)]
    second = [
        stream(shuffled(bits, 4), column=4, count=4, encoding=Encoding.OFFSET, width=4, **floats),
        stream(shuffled([100, 2001, 3, 65535], 2), column=5, count=4, width=2,
               encoding=Encoding.DIFFERENCE, reference=4, **floats),
        stream(shuffled([v - (1 << 32) & 0xFFFFFFFF for v in (-5, 0, -bits[0], 7)], 4), column=17, count=4, width=4,
               encoding=Encoding.SHUFFLED, **floats),
    ]  # fmt: skip
    return trace(chunk(*first, num_rows=4), chunk(*second, num_rows=4, first_row=4))


def padded() -> bytes:
    """A file of minor 7 with everything that a later minor may add."""
    padding = stream(b"\x09\x09", column=999, count=2, part=77, encoding=1)
    other = stream(b"\x09", column=0, count=1, part=99)
    strange = stream(b"\x01\x01", column=40_000, count=2)
    later = stream(b"zz", column=32_769, count=2, part=55, encoding=88)
    known = stream(b"\x01\x63", column=1, count=2)
    named = named_spec("test.known", ColumnType.INT64)
    unknown = replace(named, name="test.later", column_id=32_769, type=55)  # type: ignore[arg-type]
    value = stream(b"\x05\x06", column=32_768, count=2)
    table = chunk(stream(b"\x01", column=1, count=1), num_rows=1, table=77)
    with later_fields():
        body = chunk(padding, other, known, strange, value, later, num_rows=2, named=(named, unknown))
        header = pack_header(HeaderMeta((1, 7), 0, 1 << 3 | 1 << 60, 99, 2, "later"))
        return trace(
            body, table,
            header=header, groups=(GROUP, ProcessGroup(3, ranks=(0, 1))), payloads=[b"kept"],
            extras=[(100, b"meta", b"data of a later version"), (200, b"", b"private"), (7, b"x" * 9, b"")],
        )  # fmt: skip


def valid_vectors() -> dict[str, Vector]:
    """Name -> the vector."""
    everything = {"graph_kind": GraphKind.CALIBRATED, "world_size": 2, "metadata": {"created": "2026-01-01"}}
    shared = pack_strings(["a", "b"])
    by_hand = chunk(stream(b"\x01\x00", column=23, count=2), num_rows=2, strings=payload_digest(shared))
    lists = {"group_id": [1, 2, 3], "ranks": [(0, 2, 4, 6), (7, 5, 3), (0, 1, 5)]}

    def groups(writer: TraceWriter) -> None:
        for group_id, ranks in zip(lists["group_id"], lists["ranks"], strict=True):
            writer.add_group(ProcessGroup(group_id, ranks=ranks))  # type: ignore[arg-type]
        writer.add_group(ProcessGroup(4, "all", "everybody", "nccl", ranks=tuple(range(8))))

    return {
        "empty": Vector("no rank has rows", written(lambda writer: None)),
        "one_rank": Vector("one table of one rank", written(lambda w: w.add_units(0, {"kind": [1], "end_ns": [5]}))),
        "everything": Vector(
            "every table of the runtime and every column, groups, metadata that is overwritten, a payload",
            written(fill_everything, **everything), ("payloads",),
        ),
        "gap": Vector("rows are missing between two chunks", trace(
            units({"kind": [1]}), units({"kind": [2]}, first_row=5))),
        "payloads": Vector("a raw, a compressed and an empty payload", written(fill_payloads), ("payloads",)),
        "encodings": Vector("every encoding, scale, validity, arithmetic modulo 2**64", every_encoding()),
        "continued": Vector("rows that begin where the row before ended", continued_rows(), ("ticks",)),
        "ticks": Vector("values in binary fractions and in float32 steps", every_tick(), ("ticks",)),
        "minor_0": Vector("format 1.0", trace(units({"kind": [1]}))),
        "minor_7": Vector("format 1.7 with nothing new", trace(
            units({"kind": [1]}), header=pack_header(HeaderMeta((1, 7), 0, 0, 1, 2, "later")))),
        "padded": Vector(
            "format 1.7 with unknown fields, record kinds, table, column, stream part, enumerators, optional features",
            padded(), ("payloads", "named_columns"),
        ),
        "extremes": Vector(
            "the largest and smallest values of every type",
            written(
                lambda w: w.add_units(
                    2**31 - 1,
                    {
                        "kind": [255, 0], "step": [2**31 - 1, -(2**31) + 1], "start_ns": [2**63 - 1, -(2**63) + 1],
                        "end_ns": [-(2**63) + 1, 2**63 - 1], "group_id": [2**64 - 1, 0],
                        "splits_in": [[2**63 - 1, -(2**63)], [0]],
                    },
                )
            ),
        ),
        "groups": Vector("members as a list, and as ranges with positive and negative strides", written(
            groups, world_size=8)),
        "named_columns": Vector("named columns of every type", written(fill_named), ("named_columns",)),
        "events": Vector("events and tracks", written(fill_events, world_size=2), ("events", "named_columns")),
        "attachments": Vector(
            "two attachments, one of which was replaced",
            written(lambda w: [w.add_attachment(n, d) for n, d in (("log", b"1"), ("a.json", b"{}"), ("log", b"2"))]),
            ("payloads",),
        ),
        "shared_strings": Vector("shared strings", written(fill_shared_strings), ("shared_strings", "payloads")),
        "shared_strings_alone": Vector(
            "shared strings without own ones, by hand", trace(by_hand, payloads=[shared]),
            ("shared_strings", "payloads"),
        ),
        "roles": Vector(
            "ranks that differ from their role in many ways", written(fill_roles), ("roles", "named_columns")
        ),
        "roles_of_several": Vector(
            "a chunk of several ranks with a map and shifts, of which the index counts some", roles_of_several(),
            ("roles",),
        ),
        "roles_merged": Vector("merged files with roles", merged_ranks(), ("roles",)),
        "stacked": Vector("a stacked chunk of a role, by hand", with_a_role(), ("roles", "dense")),
        "laps": Vector("laps and bits, numbers of every length", in_laps(), ("dense", "ticks")),
        "compacted": Vector("what compact makes of small ranks", compacted(), ("roles", "dense"), twin=False),
        "roles_8192": Vector("8,192 ranks in two roles", many_ranks(), ("roles",), twin=False),
    }  # fmt: skip
