#!/usr/bin/env python3
"""Writes the conformance vectors: small traces, what they say (JSON twins), and why the others must be refused.

Does not test anything: tests/trace/test_conformance.py does, with both readers. Run it only when the format changes
(`python spec/conformance/generate.py [FOLDER]`); the files are committed.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prismtrace import GraphKind, ProcessGroup, TraceWriter, to_json
from prismtrace._generated.schema import Compression, Encoding, StreamPart
from prismtrace.chunk import encode_chunk
from prismtrace.columns import normalise
from prismtrace.container import MAGIC, RecordKind, pack_record, pack_trailer
from prismtrace.encoding import Stream
from prismtrace.entries import CHUNK_ENTRY, PAYLOAD_ENTRY, ChunkMeta, chunk_entry
from prismtrace.metas import FooterMeta, HeaderMeta, pack_chunk, pack_footer, pack_header
from prismtrace.model import TableKind

HEADER = HeaderMeta((1, 0), 0, 0, int(GraphKind.OBSERVED), 2, "conformance")
GROUP = ProcessGroup(group_id=2**63 + 5, name="dp", description="data parallel", backend="gloo", ranks=(1, 0))
Chunk = tuple[ChunkMeta, list[Any]]


def units(columns: dict[str, Any], *, rank: int = 0, first_row: int = 0) -> Chunk:
    """An encoded chunk of units."""
    return encode_chunk(TableKind.UNITS, rank=rank, first_row=first_row, rows=normalise(TableKind.UNITS, columns))


def stream(raw: bytes, *, column: int, count: int, **changes: int) -> tuple[Stream, bytes]:
    """A stream with a right checksum around any bytes."""
    plain = Stream(0, count, len(raw), len(raw), zlib.crc32(raw), 1, column, 0, StreamPart.VALUES, 1, 1, 1)
    return plain._replace(**changes), raw


def chunk(*streams: tuple[Stream, bytes], num_rows: int, **changes: int) -> Chunk:
    """A chunk of hand-made streams."""
    meta = ChunkMeta(1, 0, 0, num_rows, 0, -1, 0, -1, tuple(item for item, _ in streams))._replace(**changes)
    return meta, [raw for _, raw in streams]


def trace(
    *chunks: Chunk,
    header: bytes | None = None,
    extras: list[tuple[int, bytes, bytes]] | None = None,
    change_index: Callable[[Any], None] = lambda entries: None,
) -> bytes:
    """A finished file around hand-made chunks."""
    raw = bytearray(MAGIC)

    def add(kind: int, meta: bytes, data: list[Any]) -> Any:
        frame, buffers = pack_record(kind, meta, data)
        raw.extend(b"".join(bytes(buffer) for buffer in buffers))
        return frame

    add(RecordKind.HEADER, header or pack_header(HEADER), [])
    for kind, meta, data in extras or []:
        add(kind, meta, [data])
    entries = []
    for meta, data in chunks:
        offset = len(raw)
        entries.append(chunk_entry(meta, add(RecordKind.CHUNK, pack_chunk(meta), data), offset))
    index = np.array(entries, CHUNK_ENTRY)
    change_index(index)
    footer = FooterMeta(0, index, np.zeros(0, PAYLOAD_ENTRY), (), {})
    offset = len(raw)
    frame = add(RecordKind.FOOTER, pack_footer(footer), [])
    return bytes(raw) + pack_trailer(offset, frame.length)


def padded_header() -> bytes:
    """A header with a field of a later minor version."""
    builder: Any = flatbuffers.Builder(128)
    builder.StartObject(30)
    builder.PrependUint64Slot(29, 12345, 0)
    builder.PrependUint16Slot(0, 1, 0)
    builder.PrependUint16Slot(1, 7, 0)
    builder.PrependUint8Slot(4, int(GraphKind.BARE), 0)
    builder.PrependInt32Slot(5, 2, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def written(fill: Callable[[TraceWriter], None], **arguments: Any) -> bytes:
    """What TraceWriter makes of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.prism"
        with TraceWriter(path, **arguments) as writer:
            fill(writer)
        return path.read_bytes()


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


def every_encoding() -> bytes:
    """Each encoding where a reader must take it, also those that the writer of this repository does not choose."""

    def shuffled(values: list[int], width: int) -> bytes:
        return np.array(values, f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()

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
    return trace(chunk(*made, num_rows=4), second)


def valid_vectors() -> dict[str, tuple[str, bytes]]:
    """Name -> what it shows, and the bytes."""
    padding = stream(b"\x09\x09", column=999, count=2, part=77, encoding=1)
    known = stream(b"\x01\x02", column=1, count=2)
    strange_table = chunk(stream(b"\x01", column=1, count=1), num_rows=1, table=77)
    return {
        "empty": ("no rank has rows", written(lambda writer: None)),
        "one_rank": ("one table of one rank", written(lambda w: w.add_units(0, {"kind": [1], "end_ns": [5]}) or None)),
        "everything": (
            "every table and column, groups, metadata that is overwritten, a payload",
            written(fill_everything, graph_kind=GraphKind.CALIBRATED, world_size=2, metadata={"created": "2026-01-01"}),
        ),
        "payloads": ("a raw, a compressed and an empty payload", written(fill_payloads)),
        "encodings": ("every encoding, scale, validity, arithmetic modulo 2**64", every_encoding()),
        "unknown": (
            "unknown header field, record kinds, table, column and stream part: to be skipped",
            trace(
                chunk(padding, known, num_rows=2),
                strange_table,
                header=padded_header(),
                extras=[(100, b"meta", b"data of a later version"), (200, b"", b"private")],
            ),
        ),
        "extremes": (
            "the largest and smallest values of every type",
            written(
                lambda w: w.add_units(
                    2**31 - 1,
                    {
                        "kind": [255, 0], "step": [2**31 - 1, -(2**31) + 1], "start_ns": [2**63 - 1, -(2**63) + 1],
                        "end_ns": [-(2**63) + 1, 2**63 - 1], "group_id": [2**64 - 1, 0],
                        "splits_in": [[2**63 - 1, -(2**63)], [0]],
                    },
                ) or None
            ),
        ),
    }  # fmt: skip


def changed(raw: bytes, offset: int, value: bytes | None = None) -> bytes:
    """The bytes with some replaced, or one flipped."""
    new = value if value is not None else bytes([raw[offset] ^ 0x40])
    return raw[:offset] + new + raw[offset + len(new) :]


def broken_index(**values: int) -> bytes:
    """A file whose index says something about its only chunk that is not so."""

    def change(entries: Any) -> None:
        for name, value in values.items():
            entries[name] = value

    return trace(chunk(stream(b"\x01\x02", column=1, count=2), num_rows=2), change_index=change)


def invalid_vectors() -> dict[str, tuple[str, str, bytes]]:
    """Name -> the kind of error, why, and the bytes."""
    good = trace(chunk(stream(b"\x01\x02", column=1, count=2), num_rows=2))
    first = good.index(b"\xf6PRc", 16)
    footer = good.index(b"\xf6PRc", first + 4)
    kind = stream(b"\x01\x02", column=1, count=2)

    def one(raw: bytes, num_rows: int = 2, **changes: int) -> bytes:
        return trace(chunk(stream(raw, **{"column": 4, "count": 2, **changes}), num_rows=num_rows))

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    label = stream(b"\x00\x05", column=23, count=2, encoding=Encoding.OFFSET)
    lengths = stream(b"\x01", column=0, count=1, part=StreamPart.STRING_LENGTHS)
    text = stream(b"\xff", column=0, count=1, part=StreamPart.STRING_BYTES)
    codes = stream(b"\x00\x00", column=23, count=2, encoding=Encoding.OFFSET)
    list_lengths = stream(b"\x02\x02", column=26, count=2, part=StreamPart.LENGTHS)
    validity = {"column": 4, "count": 1, "part": StreamPart.VALIDITY}
    payload = written(lambda w: w.add_payload(b"x" * 40) and None)
    return {
        "zero_bytes": ("unfinished", "nothing at all", b""),
        "no_trace": ("format", "another kind of file", b"{}\n" * 20),
        "text_mode": ("format", "CR LF became LF on the way", good.replace(b"\r\n", b"\n")),
        "cut_in_magic": ("unfinished", "cut in the magic bytes", good[:5]),
        "cut_in_header": ("truncated", "cut in the header", good[:50]),
        "cut_in_chunk": ("unfinished", "cut in a chunk", good[: first + 60]),
        "cut_in_footer": ("unfinished", "cut in the footer", good[: footer + 60]),
        "cut_in_trailer": ("unfinished", "one byte is missing at the end", good[:-1]),
        "header_checksum": ("checksum", "a bit of the header is flipped", changed(good, 50)),
        "frame_checksum": ("checksum", "a bit of a frame is flipped", changed(good, first + 16)),
        "meta_checksum": ("checksum", "a bit of a chunk header is flipped", changed(good, first + 40)),
        "stream_checksum": ("checksum", "a bit of a column is flipped", changed(good, footer - 8)),
        "footer_checksum": ("checksum", "a bit of the footer is flipped", changed(good, footer + 40)),
        "trailer_checksum": ("checksum", "a bit of the trailer is flipped", changed(good, len(good) - 30)),
        "payload_checksum": ("checksum", "a bit of a payload is flipped", changed(payload, payload.index(b"xxxx") + 9)),
        "future_major": ("version", "magic of format 2", changed(good, 5, b"\x02")),
        "draft": ("version", "magic of the draft", changed(good, 5, b"\x00")),
        "required_feature": (
            "version", "a required feature that format 1.0 does not have",
            trace(header=pack_header(replace(HEADER, required_features=1 << 40))),
        ),
        "unknown_encoding": ("version", "encoding 99", one(b"ab", encoding=99)),
        "unknown_compression": ("version", "compression 9", one(b"ab", compression=9)),
        "unknown_role": ("version", "stream part 99 in a known column", trace(chunk(kind, stream(
            b"ab", column=1, count=2, part=99), num_rows=2))),
        "rows_bomb": ("limit", "4 billion rows of a constant", trace(chunk(stream(
            b"", column=1, count=2**32 - 1, encoding=Encoding.CONSTANT, width=0), num_rows=2**32 - 1))),
        "stream_bomb": ("limit", "a stream of 4 GiB", one(b"", count=2**29 - 1, raw_length=2**32 - 8, width=8)),
        "zstd_bomb": ("format", "a frame that decompresses to more than it says", trace(chunk((
            Stream(0, 2, len(bomb), 2, zlib.crc32(bomb), 1, 4, 0, 1, 1, Compression.ZSTD, 1), bomb), num_rows=2))),
        "stream_length": ("format", "bytes and number of values differ", one(b"abc")),
        "scale_zero": ("format", "scale 0", one(b"ab", scale=0)),
        "stream_twice": ("data", "the same stream twice", trace(chunk(kind, kind, num_rows=2))),
        "too_few_values": ("data", "one value for two rows", one(b"a", count=1)),
        "validity_only": ("data", "validity of a column without values", one(b"\x01", **validity)),
        "validity_past_end": ("format", "bits for rows that do not exist", trace(chunk(
            stream(b"ab", column=4, count=2), stream(b"\x07", **validity), num_rows=2))),
        "required_absent": ("data", "an absent value in a column that has none", trace(chunk(
            stream(b"a", column=1, count=1), stream(b"\x01", **{**validity, "column": 1}), num_rows=2))),
        "sentinel": ("data", "the value that stands for absent", one(struct.pack("<2q", 1, -(2**63)), width=8)),
        "too_wide": ("data", "300 in an 8-bit column", one(struct.pack("<2h", 1, 300), width=2, column=1)),
        "code_outside": ("data", "a string that the dictionary lacks", trace(chunk(label, lengths, stream(
            b"a", column=0, count=1, part=StreamPart.STRING_BYTES), num_rows=2))),
        "invalid_utf8": ("format", "a string that is not UTF-8", trace(chunk(codes, lengths, text, num_rows=2))),
        "list_lengths": ("data", "lists longer than their elements", trace(chunk(list_lengths, stream(
            b"abc", column=26, count=3), num_rows=2))),
        "self_reference": ("data", "a column that refers to itself", one(
            b"ab", encoding=Encoding.DIFFERENCE, reference=4)),
        "absent_reference": ("data", "a difference to a column that is not there", one(
            b"ab", column=5, encoding=Encoding.DIFFERENCE, reference=4)),
        "index_outside": ("format", "the index points past the end", broken_index(offset=1 << 40)),
        "index_rows": ("data", "index and chunk differ in rows", broken_index(num_rows=1)),
        "index_rank": ("data", "index and chunk differ in rank", broken_index(rank=1)),
        "same_rows_twice": ("data", "two chunks with the same rows", trace(chunk(kind, num_rows=2), chunk(
            kind, num_rows=2, first_row=1))),
    }  # fmt: skip


def contradictory_vectors() -> dict[str, tuple[list[str], str, bytes]]:
    """Name -> the findings, why, and the bytes of a file that is read but contradicts itself."""
    collective = {"kind": [2], "group_id": [5], "op": [1], "seq": [0]}

    def job(rank_0: dict[str, Any], rank_1: dict[str, Any] | None = None, group: bool = True) -> bytes:
        def fill(writer: TraceWriter) -> None:
            if group:
                writer.add_group(ProcessGroup(group_id=5, ranks=(0, 1)))
            writer.add_units(0, rank_0)
            writer.add_units(1, rank_1 or rank_0)

        return written(fill, world_size=2)

    return {
        "dangling_group": (["PT012"], "a group that nobody defined", job(collective, group=False)),
        "duplicate_seq": (["PT030"], "one seq twice", job({**{k: v * 2 for k, v in collective.items()}})),
        "different_operations": (["PT031"], "all_reduce meets broadcast", job(collective, collective | {"op": [2]})),
        "missing_member": (["PT032"], "a collective that rank 1 lacks", job(collective, {"kind": [1]})),
        "lonely_send": (["PT033"], "a send that nobody receives", job(
            {"kind": [3], "group_id": [5], "op": [10], "seq": [0], "peer": [1]}, {"kind": [1]})),
        "awaits_itself": (["PT023"], "a wait that waits for itself", job({"kind": [5], "awaits": [0]})),
        "negative_duration": (["PT020"], "an end before its start", job(
            {"kind": [1], "start_ns": [5], "end_ns": [4]})),
        "outside_world": (["PT010"], "rank 2 in a world of 2", written(
            lambda w: w.add_units(2, {"kind": [1]}) or None, world_size=2)),
    }  # fmt: skip


def main(folder: Path) -> None:
    for name in ("valid", "invalid"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    valid, invalid = [], []
    for name, (summary, raw) in valid_vectors().items():
        path = folder / "valid" / f"{name}.prism"
        path.write_bytes(raw)
        twin = json.dumps(to_json(path), indent=1, ensure_ascii=False) + "\n"
        path.with_suffix(".json").write_text(twin, encoding="utf-8")
        valid.append({"file": f"valid/{name}.prism", "twin": f"valid/{name}.json", "summary": summary})
    for name, (error, summary, raw) in invalid_vectors().items():
        (folder / "invalid" / f"{name}.prism").write_bytes(raw)
        invalid.append({"file": f"invalid/{name}.prism", "error": error, "summary": summary})
    for name, (codes, summary, raw) in contradictory_vectors().items():
        (folder / "invalid" / f"{name}.prism").write_bytes(raw)
        invalid.append({"file": f"invalid/{name}.prism", "findings": codes, "summary": summary})
    manifest = {"format": "1.0", "valid": valid, "invalid": invalid}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
