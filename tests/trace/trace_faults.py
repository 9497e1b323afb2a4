"""Reads everything a trace says, under limits of time and memory, from bytes that were damaged on purpose.

Does not decide which damage to try for how long: the tests and benchmarks/fuzz_trace.py do that.
"""

from __future__ import annotations

import contextlib
import io
import random
import signal
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from prismtrace import ABSENT, PrismTraceError, ProcessGroup, TraceReader, TraceWriter, compact, validate
from prismtrace.tables import DictionaryColumn, ListColumn, Table

FRAME = struct.Struct("<4sBBHIIQII")
MARKER = b"\xf6PRc"
TABLES = ("units", "steps", "scalars", "events", "tracks")

READ_LIMIT_S = 20.0
MEMORY_LIMIT_BYTES = 256 << 20
HOSTILE_RESULT_BYTES = 32 << 20


class Hang(BaseException):
    """A read took too long. No Exception: nothing in between may swallow it."""


class Outcome(Enum):
    """What became of one damaged file."""

    REFUSED = "refused"
    HARMLESS = "harmless"
    PREFIX = "prefix"
    WRONG = "WRONG"
    CRASHED = "CRASHED"
    HUNG = "HUNG"
    BLOATED = "BLOATED"

    @property
    def is_fault(self) -> bool:
        """Whether the reader did something that it must never do."""
        return self.value.isupper()


@dataclass(frozen=True)
class Result:
    """An outcome, and what it was about: the name of an error, or where two readings differ."""

    outcome: Outcome
    detail: str = ""


@contextlib.contextmanager
def limited(seconds: float = READ_LIMIT_S) -> Iterator[None]:
    """Raises Hang after so much CPU time (the alarm of wall time belongs to pytest's own limit)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Memory:
    """The highest resident memory since it was made or reset; 0 where the system does not say."""

    def __init__(self) -> None:
        self.base = 0
        self.reset()

    def reset(self) -> None:
        """Starts anew from the present size."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.base = self._status("VmRSS:")

    def growth(self) -> int:
        """Bytes between the size at the start and the highest size since."""
        return max(0, self._status("VmHWM:") - self.base)

    @staticmethod
    def _status(key: str) -> int:
        with contextlib.suppress(OSError), open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(key.encode()):
                    return int(line.split()[1]) * 1024
        return 0


def _plain(column: Any) -> Any:
    if isinstance(column, DictionaryColumn):
        return tuple(column)
    if isinstance(column, ListColumn):
        return tuple(None if row is None else tuple(row.tolist()) for row in column)
    return column.dtype.str, np.ascontiguousarray(column).tobytes()


def _table(table: Table) -> dict[str, Any]:
    return {"row_index": _plain(table.row_index), **{name: _plain(column) for name, column in table.columns().items()}}


def everything(source: Any, *, allow_unfinished: bool = False, max_result_bytes: int = 1 << 28) -> dict[str, Any]:
    """All that a file says: every table and column of every rank, groups, metadata, payloads, attachments."""
    with TraceReader(source, allow_unfinished=allow_unfinished, max_result_bytes=max_result_bytes) as reader:
        told: dict[str, Any] = {
            "header": (reader.format_version, int(reader.graph_kind), reader.world_size, reader.writer),
            "metadata": dict(reader.metadata),
            "groups": dict(reader.groups),
            "payloads": {digest: reader.payload(digest) for digest in reader.payload_digests},
            "attachments": {name: reader.attachment(name) for name in reader.attachments},
        }
        for rank in reader.ranks:
            for name in TABLES:
                told[f"{name} of rank {rank}"] = _table(getattr(reader, name)(rank))
            part = [_table(part) for part in reader.iter_units(rank, columns=["kind", "end_ns", "label"])]
            told[f"part of rank {rank}"] = part
        return told


def difference(told: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first place where two readings differ; empty when they are equal."""
    for key in dict.fromkeys([*wanted, *told]):
        if told.get(key) != wanted.get(key):
            return key
    return ""


def read_damaged(raw: bytes, wanted: dict[str, Any], memory: Memory) -> Result:
    """Reads damaged bytes and says whether the reader behaved."""
    memory.reset()
    try:
        with limited():
            told = everything(io.BytesIO(raw))
    except PrismTraceError as error:
        result = Result(Outcome.REFUSED, type(error).__name__)
    except Hang as error:
        result = Result(Outcome.HUNG, str(error))
    except Exception as error:
        result = Result(Outcome.CRASHED, f"{type(error).__name__}: {error}")
    else:
        where = difference(told, wanted)
        result = Result(Outcome.WRONG, where) if where else Result(Outcome.HARMLESS)
    if memory.growth() > MEMORY_LIMIT_BYTES:
        return Result(Outcome.BLOATED, f"{memory.growth() >> 20} MiB more")
    return result


def check_hostile(raw: bytes, memory: Memory, *, allow_unfinished: bool = False) -> Result:
    """Reads and validates bytes of which nothing is known; PrismTraceError is the only way to refuse them."""
    memory.reset()
    outcome, detail = Outcome.HARMLESS, ""
    try:
        with limited():
            try:
                everything(io.BytesIO(raw), allow_unfinished=allow_unfinished, max_result_bytes=HOSTILE_RESULT_BYTES)
            except PrismTraceError as error:
                outcome, detail = Outcome.REFUSED, type(error).__name__
            validate(io.BytesIO(raw))
    except Hang as error:
        outcome, detail = Outcome.HUNG, str(error)
    except Exception as error:
        outcome, detail = Outcome.CRASHED, f"{type(error).__name__}: {error}"
    if memory.growth() > MEMORY_LIMIT_BYTES:
        return Result(Outcome.BLOATED, f"{memory.growth() >> 20} MiB more")
    return Result(outcome, detail)


def structure_bytes(raw: bytes) -> list[int]:
    """The positions that are no data: magic, frames, meta sections, the trailer."""
    places = list(range(8))
    offset = 8
    while raw[offset : offset + 4] == MARKER and offset + 32 <= len(raw):
        _, _, _, _, meta_length, _, data_length, _, _ = FRAME.unpack_from(raw, offset)
        start = offset + 32 + (meta_length + 7) // 8 * 8
        places.extend(range(offset, start))
        offset = start + (data_length + 7) // 8 * 8
    places.extend(range(offset, len(raw)))
    return places


def corrupted(raw: bytes, structure: list[int], rng: random.Random) -> bytes:
    """The bytes with two of them changed: anywhere, both in the structure, or side by side."""
    damaged = bytearray(raw)
    way = rng.random()
    if way < 0.5:
        first, second = rng.sample(range(len(raw)), 2)
    elif way < 0.8:
        first, second = rng.sample(structure, 2)
    else:
        first = rng.randrange(len(raw) - 1)
        second = first + 1
    for place in (first, second):
        damaged[place] ^= rng.choice((1, 0x80, 0xFF, rng.randrange(1, 256)))
    return bytes(damaged)


def write_big(path: Path, *, ranks: int = 3, rows: int = 3000) -> Path:
    """A file of some 100 kB: several chunks a rank, every table, payloads raw and compressed, a zstd string table."""
    rng = np.random.default_rng(7)
    with TraceWriter(path, world_size=ranks, metadata={"model": "m" * 300}, overwrite=True) as writer:
        writer.add_group(ProcessGroup(group_id=5, name="dp", ranks=tuple(range(ranks))))
        digests = [writer.add_payload(rng.bytes(3000)), writer.add_payload(b"ab" * 3000)]
        for rank in range(ranks):
            for part in range(2):
                start = np.cumsum(rng.integers(1_000, 9_000_000, rows)) + 10**12 * part
                communicates = np.arange(rows) % 5 == 4
                writer.add_units(
                    rank,
                    {
                        "kind": np.where(communicates, 2, 1).astype(np.uint8),
                        "step": np.arange(rows) // 50 + 60 * part,
                        "start_ns": start,
                        "end_ns": np.where(np.arange(rows) % 97 == 0, ABSENT, start + rng.integers(10, 10**6, rows)),
                        "group_id": np.where(communicates, 5, 0).astype(np.uint64),
                        "seq": np.where(communicates, np.arange(rows), ABSENT),
                        "test.tokens": np.where(communicates, ABSENT, 512 + np.arange(rows) % 3),
                        "label": [f"layer {i % 40}" if i % 3 else None for i in range(rows)],
                        "payload_in": [digests[i % 2] if i % 400 == 4 else None for i in range(rows)],
                        "splits_in": [[i, 2 * i] if i % 500 == 4 else None for i in range(rows)],
                    },
                )
            writer.add_steps(rank, {"step": range(60), "end_ns": range(0, 60_000, 1000), "loss": rng.normal(size=60)})
            writer.add_scalars(rank, {"step": range(60), "name": ["loss"] * 60, "value": rng.normal(size=60)})
            writer.add_tracks(rank, {"name": ["host", "stream 7"], "kind": [1, 2], "stream": [None, 7]})
            begun = np.cumsum(rng.integers(1, 90_000, rows))
            writer.add_events(
                rank,
                {
                    "name": [f"kernel {i % 50}" for i in range(rows)],
                    "kind": np.ones(rows, np.uint8),
                    "track": np.arange(rows) % 2,
                    "start_ns": begun,
                    "end_ns": begun + rng.integers(1, 5000, rows),
                    "correlation_id": np.arange(rows) * 7,
                    "test.ratio": rng.normal(size=rows),
                },
            )
        writer.add_attachment("notes.txt", b"a note " * 50)
    return path


def write_roles(path: Path, *, ranks: int = 6, rows: int = 1500) -> Path:
    """A file of roles: ranks that share everything but peer and group, shifted ranks, ranks with times of their own."""
    rng = np.random.default_rng(8)
    plain = path.with_suffix(".plain")
    sends = np.arange(rows) % 4 == 1
    shared = np.cumsum(rng.integers(1_000, 9_000_000, rows))
    with TraceWriter(plain, world_size=ranks, overwrite=True) as writer:
        for rank in range(ranks):
            writer.add_group(ProcessGroup(group_id=100 + rank // 2, ranks=(rank // 2 * 2, rank // 2 * 2 + 1)))
            start = shared + (7_000 * rank if rank < 4 else rng.integers(0, 900, rows))
            writer.add_units(
                rank,
                {
                    "kind": np.where(sends, 3, 1).astype(np.uint8),
                    "step": np.arange(rows) // 50,
                    "start_ns": start,
                    "end_ns": start + 500 + (0 if rank < 4 else rng.integers(0, 99, rows)),
                    "group_id": np.where(sends, 100 + rank // 2, 0).astype(np.uint64),
                    "peer": np.where(sends, rank ^ 1, -(2**31)).astype(np.int32),
                    "label": [f"layer {i % 40}" if i % 3 else None for i in range(rows)],
                    "test.tokens": np.full(rows, 512 + rank % 2),
                },
            )
    compact(plain, path, overwrite=True)
    plain.unlink()
    return path
