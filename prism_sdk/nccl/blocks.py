"""Reads the blocks of a record file: checks them, goes past damage, and says what was lost.

It does not say what the records mean; `records` does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.errors import UnreadableError
from prism_sdk.nccl.format import (
    BLOCK,
    BLOCK_MARKER,
    CLOCK,
    COMM,
    COUNTERS,
    HEADER,
    MAGIC,
    START,
    STRING,
    VERSION,
    BlockKind,
)

__all__ = ["RawFile", "checksum", "read_blocks"]

_TRACE_MAGIC = b"\x89PRSM"  # with which a PrismTrace of any version begins
_ENTRY = {BlockKind.STRINGS: STRING, BlockKind.COMMS: COMM, BlockKind.CLOCK: CLOCK, BlockKind.COUNTERS: COUNTERS}


@dataclass(frozen=True)
class RawFile:
    """The whole blocks of one file, joined by kind.

    `words` are the records as rows of four 64-bit words, `thread_id` and `ring` say for each which thread made it.
    `lost_bytes` could not be read; `first_damage` is the offset of the first of them.
    """

    path: str
    header: Any
    words: NDArray[np.uint64]
    thread_id: NDArray[np.int32]
    ring: NDArray[np.uint16]
    strings: NDArray[Any]
    comms: NDArray[Any]
    clocks: NDArray[Any]
    counters: NDArray[Any]
    is_complete: bool
    num_bytes: int
    lost_bytes: int
    first_damage: int | None


def checksum(words: NDArray[np.uint64]) -> int:
    """The sum of the words, each times an odd number that rises from 1, modulo 2^64."""
    factors = np.arange(1, 2 * len(words) + 1, 2, dtype=np.uint64)
    return int((words * factors).sum(dtype=np.uint64))


_PACKED = {b"\x28\xb5\x2f\xfd": "zstd -d FILE", b"\x1f\x8b": "gunzip FILE", b"\xfd7zXZ\x00": "xz -d FILE"}


def read_blocks(path: str | os.PathLike[str]) -> RawFile:
    """Read a record file; damaged and cut-off blocks are left out and counted.

    Raises:
        UnreadableError: the file cannot be opened, or is not a record file of a version that this reads.
    """
    name = os.fspath(path)
    try:
        data = np.fromfile(name, np.uint8)
    except OSError as error:
        raise UnreadableError(name, reason=error.strerror or str(error)) from error
    header = _header(name, data)
    parts: dict[int, list[NDArray[Any]]] = {kind: [] for kind in BlockKind}
    rings: list[tuple[int, int, int]] = []
    at, lost, first_damage, last_kind = int(header["header_bytes"]), 0, None, 0
    while at < len(data):
        block = _block_at(data, at)
        if block is None:
            following = _next_block(data, at + 32)
            lost += following - at
            first_damage = at if first_damage is None else first_damage
            at = following
            continue
        kind, num_bytes = int(block["kind"]), int(block["num_bytes"])
        body = data[at + 32 : at + 32 + num_bytes]
        at += 32 + num_bytes
        last_kind = kind
        if kind not in parts:
            continue  # of a later version
        parts[kind].append(body)
        if kind == BlockKind.RECORDS:
            rings.append((num_bytes // START.itemsize, int(block["thread_id"]), int(block["ring"])))
    counts = [num for num, _, _ in rings]

    def joined(kind: BlockKind) -> NDArray[Any]:
        entry = _ENTRY[kind]
        whole = [body for body in parts[kind] if len(body) % entry.itemsize == 0]
        return np.concatenate(whole).view(entry) if whole else np.zeros(0, entry)

    records = parts[BlockKind.RECORDS]
    return RawFile(
        path=name,
        header=header,
        words=np.concatenate(records).view("<u8").reshape(-1, 4) if records else np.zeros((0, 4), np.uint64),
        thread_id=np.repeat(np.array([thread for _, thread, _ in rings], np.int32), counts),
        ring=np.repeat(np.array([ring for _, _, ring in rings], np.uint16), counts),
        strings=joined(BlockKind.STRINGS),
        comms=joined(BlockKind.COMMS),
        clocks=joined(BlockKind.CLOCK),
        counters=joined(BlockKind.COUNTERS),
        is_complete=last_kind == BlockKind.END and not lost,
        num_bytes=len(data),
        lost_bytes=lost,
        first_damage=first_damage,
    )


def _header(name: str, data: NDArray[np.uint8]) -> Any:
    magic = data[: len(MAGIC)].tobytes()
    if magic != MAGIC:
        what = "it is empty" if not len(data) else "it is not a record file of the NCCL profiler"
        raise UnreadableError(name, reason=what, hint=_hint(data))
    if len(data) < HEADER.itemsize:
        raise UnreadableError(name, reason=f"it ends within its header, at byte {len(data)}")
    header = data[: HEADER.itemsize].view(HEADER)[0]
    if header["version"] != VERSION:
        raise UnreadableError(
            name, reason=f"it has version {header['version']} of the record format, this reads {VERSION}",
            hint="use the prism of the release that the profiler library belongs to",
        )  # fmt: skip
    if header["header_bytes"] < HEADER.itemsize or header["header_bytes"] % 32 or header["record_bytes"] != 32:
        raise UnreadableError(name, reason="its header contradicts itself")
    return header


def _hint(data: NDArray[np.uint8]) -> str | None:
    if not len(data):
        return "did the job use NCCL, with NCCL_PROFILER_PLUGIN set? `prism observe --nccl-profiler` does it all"
    if data[: len(_TRACE_MAGIC)].tobytes() == _TRACE_MAGIC:
        return "a trace: `prism info` shows it; its record files are in the folder FILE.nccl beside it"
    packed = next((name for magic, name in _PACKED.items() if data[: len(magic)].tobytes() == magic), None)
    return None if packed is None else f"it is compressed: unpack it first ({packed})"


def _block_at(data: NDArray[np.uint8], at: int) -> Any | None:
    """The header of the block at `at`; None if no whole and undamaged block is there."""
    if at + 32 > len(data):
        return None
    header = data[at : at + 32]
    block = header.view(BLOCK)[0]
    if block["marker"] != BLOCK_MARKER or checksum(header[:24].view("<u8")) != block["header_checksum"]:
        return None
    end = at + 32 + int(block["num_bytes"])
    if end > len(data) or block["num_bytes"] % 32:
        return None
    return block if checksum(data[at + 32 : end].view("<u8")) == block["checksum"] else None


def _next_block(data: NDArray[np.uint8], at: int) -> int:
    """Where the next whole block begins, from `at` on; the end of the data if none does."""
    usable = (len(data) - at) // 32 * 32
    if usable > 0:
        markers = data[at : at + usable].reshape(-1, 32)[:, :4].copy().view("<u4").ravel()
        for place in np.flatnonzero(markers == BLOCK_MARKER).tolist():
            if _block_at(data, at + place * 32) is not None:
                return at + int(place) * 32
    return len(data)
