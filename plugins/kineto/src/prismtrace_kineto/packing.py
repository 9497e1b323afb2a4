"""Integer arrays and strings as one compact, self-checking block of bytes. Knows nothing of traces.

Each stream takes the cheapest of some simple codings (offsets, differences between neighbours, rows sorted by a context
that the reader has too, differences against another array), byte-shuffled, then LZMA. Short streams share one LZMA
stream. The reader asks for the streams in the order in which they were written.
"""

from __future__ import annotations

import json
import lzma
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

Array = NDArray[Any]
MAGIC: Final = b"PKJ1"
_HEAD: Final = struct.Struct("<4sIIII")
_MAX_RAW: Final = 1 << 31
_SMALL: Final = 2048
_SAMPLE: Final = 1 << 15


class PackError(ValueError):
    """The bytes are not what a Packer wrote."""


def _filters(size: int, *, text: bool) -> list[dict[str, int]]:
    dictionary = max(1 << 12, 1 << max(size - 1, 1).bit_length())
    return [
        {
            "id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": min(dictionary, 1 << 26),
            "lc": 4 if text else 0, "lp": 0, "pb": 0, "mf": lzma.MF_HC4, "nice_len": 64,
        }
    ]  # fmt: skip


def _compress(raw: bytes, *, text: bool = False) -> bytes:
    return lzma.compress(raw, lzma.FORMAT_RAW, filters=_filters(len(raw), text=text))


def _decompress(stored: bytes, size: int, *, text: bool = False) -> bytes:
    if not 0 <= size <= _MAX_RAW:
        raise PackError(f"a stream of {size} bytes")
    try:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_filters(size, text=text))
        raw = decoder.decompress(stored, max_length=size)
    except lzma.LZMAError as error:
        raise PackError(f"a damaged stream: {error}") from error
    if len(raw) != size:
        raise PackError(f"{len(raw)} bytes where {size} were announced")
    return raw


def _width(span: int) -> int:
    return 0 if span == 0 else 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4 if span < 1 << 32 else 8


def _planes(values: NDArray[np.uint64], width: int) -> bytes:
    if width == 0:
        return b""
    return values.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()


def _from_planes(raw: bytes, width: int, count: int) -> NDArray[np.uint64]:
    if width == 0:
        return np.zeros(count, np.uint64)
    data = np.frombuffer(raw, np.uint8, count * width).reshape(width, count)
    return np.ascontiguousarray(data.T).reshape(-1).view(f"<u{width}").astype(np.uint64)


def _zigzag(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def _unzigzag(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (values >> np.uint64(1)).view(np.int64) ^ -(values & np.uint64(1)).view(np.int64)


_estimator: Final = zstandard.ZstdCompressor(level=1)


def _coded(values: NDArray[np.int64], how: str, order: Array | None, other: Array | None) -> tuple[int, int, bytes]:
    """Base, width and bytes of `values` in the coding `how`."""
    if "r" in how and other is not None:
        values = values - other
    if "s" in how and order is not None:
        values = values[order]
    if "d" in how:
        base = int(values[0]) if len(values) else 0
        coded = _zigzag(np.diff(values, prepend=values[:1]))
        coded[:1] = 0
    elif "z" in how:
        base, coded = 0, _zigzag(values)
    else:
        base = int(values.min()) if len(values) else 0
        coded = (values - np.int64(base)).view(np.uint64)
    width = _width(int(coded.max())) if len(coded) else 0
    return base, width, _planes(coded, width)


class Packer:
    """Collects streams; `finish` gives the block."""

    def __init__(self) -> None:
        self._header: list[Any] = []
        self._large: list[bytes] = []
        self._small: list[bytes] = []

    def integers(
        self, values: Array, *, order: Array | None = None, others: Sequence[Array] = (), how: str | None = None
    ) -> None:
        """Adds an int64 array. `order` is a permutation and `others` arrays of the same length; the reader has both."""
        values = np.ascontiguousarray(values, np.int64)
        ways = [("", -1), ("d", -1)]
        if order is not None:
            ways.append(("s", -1))
        for number, _ in enumerate(others):
            ways += [("r", number), ("rd", number)]
            if order is not None:
                ways.append(("rs", number))
        chosen = (how, -1) if how is not None else self._cheapest(values, ways, order, others)
        base, width, raw = _coded(values, chosen[0] or "", order, others[chosen[1]] if chosen[1] >= 0 else None)
        self._header.append([chosen[0] or "", chosen[1], len(values), base, width, self._put(raw)])

    def _cheapest(
        self, values: Array, ways: list[tuple[str, int]], order: Array | None, others: Sequence[Array]
    ) -> tuple[str, int]:
        if len(values) == 0 or (values == values[0]).all():
            return ways[0]
        best: tuple[int, tuple[str, int]] | None = None
        for way in ways:
            _, _, raw = _coded(values, way[0], order, others[way[1]] if way[1] >= 0 else None)
            if len(raw) > 4 * _SAMPLE:
                cuts = np.linspace(0, len(raw) - _SAMPLE, 4).astype(int)
                raw_sample = b"".join(raw[cut : cut + _SAMPLE] for cut in cuts)
                cost = len(_estimator.compress(raw_sample)) * len(raw) // len(raw_sample)
            else:
                cost = len(_estimator.compress(raw))
            if best is None or cost < best[0]:
                best = (cost, way)
        assert best is not None
        return best[1]

    def codes(self, values: Array, *, order: Array | None = None) -> None:
        """Adds numbers of strings: numbered anew in order of appearance, so that they are small."""
        distinct, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        appearance = np.argsort(first, kind="stable")
        rank = np.empty(len(distinct), np.int64)
        rank[appearance] = np.arange(len(distinct))
        self.integers(distinct[appearance], how="d")
        self.integers(rank[inverse], order=order)

    def data(self, raw: bytes, *, text: bool = False) -> None:
        """Adds bytes."""
        self._header.append([len(raw), int(text), self._put(raw, text=text)])

    def strings(self, texts: Sequence[str]) -> None:
        """Adds strings, lone surrogates too."""
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        self.integers(np.array([len(text) for text in encoded], np.int64), how="")
        self.data(b"".join(encoded), text=True)

    def value(self, value: Any) -> None:
        """Adds a small JSON value."""
        self._header.append(value)

    def _put(self, raw: bytes, *, text: bool = False) -> int:
        """Stored length; -1 for bytes in the shared stream."""
        if len(raw) < _SMALL and not text:
            self._small.append(raw)
            return -1
        stored = _compress(raw, text=text)
        self._large.append(stored)
        return len(stored)

    def finish(self) -> bytes:
        """The block."""
        header = json.dumps(self._header, separators=(",", ":")).encode()
        small = b"".join(self._small)
        parts = [_compress(header, text=True), _compress(small), *self._large]
        body = b"".join(parts)
        head = _HEAD.pack(MAGIC, len(header), len(parts[0]), len(small), len(parts[1]))
        return head + struct.pack("<I", zlib.crc32(head + body)) + body


class Unpacker:
    """Reads a block of a Packer."""

    def __init__(self, block: bytes) -> None:
        start = _HEAD.size + 4
        if len(block) < start or block[:4] != MAGIC:
            raise PackError("not a block of packed events")
        _, header_size, header_stored, small_size, small_stored = _HEAD.unpack_from(block)
        body = block[start:]
        if struct.unpack_from("<I", block, _HEAD.size)[0] != zlib.crc32(block[: _HEAD.size] + body):
            raise PackError("the checksum of the packed events is wrong")
        try:
            self._header = json.loads(_decompress(body[:header_stored], header_size, text=True))
        except (ValueError, RecursionError) as error:
            raise PackError(f"the header of the packed events is damaged: {error}") from error
        self._small = _decompress(body[header_stored : header_stored + small_stored], small_size)
        self._body = body
        self._at = header_stored + small_stored
        self._small_at = 0
        self._next = 0

    def value(self) -> Any:
        """The next JSON value."""
        if self._next >= len(self._header):
            raise PackError("a stream is missing")
        self._next += 1
        return self._header[self._next - 1]

    def _take(self, size: int, stored: int, *, text: bool = False) -> bytes:
        if stored < 0:
            raw = self._small[self._small_at : self._small_at + size]
            self._small_at += size
        else:
            raw = _decompress(self._body[self._at : self._at + stored], size, text=text)
            self._at += stored
        if len(raw) != size:
            raise PackError("a stream is cut off")
        return raw

    def integers(self, *, order: Array | None = None, others: Sequence[Array] = ()) -> NDArray[np.int64]:
        """The next int64 array."""
        how, other, count, base, width, stored = self.value()
        if not 0 <= count <= _MAX_RAW // 8:
            raise PackError(f"an array of {count} values")
        coded = _from_planes(self._take(count * width, stored), width, count)
        if "d" in how:
            values = np.cumsum(_unzigzag(coded)) + np.int64(base)
        elif "z" in how:
            values = _unzigzag(coded)
        else:
            values = coded.view(np.int64) + np.int64(base)
        if "s" in how and order is not None:
            placed = np.empty_like(values)
            placed[order] = values
            values = placed
        return values + others[other] if "r" in how else values

    def codes(self, *, order: Array | None = None) -> NDArray[np.int64]:
        """What `Packer.codes` was given."""
        distinct = self.integers()
        return distinct[self.integers(order=order)]

    def data(self) -> bytes:
        """The next bytes."""
        size, text, stored = self.value()
        return self._take(size, stored, text=bool(text))

    def strings(self) -> list[str]:
        """The next strings."""
        lengths = self.integers()
        raw = self.data()
        ends = np.cumsum(lengths).tolist()
        if (ends[-1] if ends else 0) != len(raw):
            raise PackError("the strings do not fit their lengths")
        return [raw[end - size : end].decode("utf-8", "surrogatepass") for end, size in zip(ends, lengths, strict=True)]
