"""Turns integer arrays into encoded, compressed streams and back.

Does not know tables, files or what a column means.
"""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from prismtrace._generated.schema import Compression, Encoding, StreamPart
from prismtrace.errors import TraceChecksumError, TraceDataError, TraceFormatError, TraceLimitError, TraceVersionError

STREAM_DTYPE: Final = np.dtype(
    [
        ("base", "<i8"),
        ("num_values", "<u4"),
        ("stored_length", "<u4"),
        ("raw_length", "<u4"),
        ("crc", "<u4"),
        ("scale", "<u4"),
        ("column", "<u2"),
        ("reference", "<u2"),
        ("part", "u1"),
        ("encoding", "u1"),
        ("compression", "u1"),
        ("width", "u1"),
        ("reserved", "<u4"),
    ]
)
"""The struct `Stream` of the schema."""

MAX_STREAM_BYTES: Final = 1 << 28
"""Limit of one decoded stream (spec/trace-format.md, limits)."""

COMPRESSION_LEVEL: Final = 3
_MIN_COMPRESS_BYTES: Final = 24
_local = threading.local()


@dataclass(frozen=True)
class Stream:
    """The descriptor of one encoded stream."""

    base: int
    num_values: int
    stored_length: int
    raw_length: int
    crc: int
    scale: int
    column: int
    reference: int
    part: int
    encoding: int
    compression: int
    width: int
    reserved: int = 0

    def row(self) -> tuple[int, ...]:
        """The fields in the order of the schema's struct."""
        return tuple(self.__dict__.values())


def compress(raw: bytes | memoryview) -> tuple[int, bytes | memoryview]:
    """The compression chosen for `raw`, and the stored bytes."""
    if len(raw) < _MIN_COMPRESS_BYTES:
        return Compression.NONE, raw
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    stored = compressor.compress(raw)
    return (Compression.ZSTD, stored) if len(stored) < len(raw) else (Compression.NONE, raw)


def decompress(stored: bytes | memoryview, *, compression: int, raw_length: int, path: str, offset: int) -> bytes:
    """The bytes of a stream or payload; `raw_length` has been checked against a limit before."""
    if compression == Compression.NONE:
        if len(stored) != raw_length:
            raise TraceFormatError(f"{len(stored)} bytes stored, {raw_length} announced", path=path, offset=offset)
        return bytes(stored)
    if compression != Compression.ZSTD:
        raise TraceVersionError(
            f"unknown compression {compression}: a later library reads it", path=path, offset=offset
        )
    try:
        parameters = zstandard.get_frame_parameters(stored)
        if parameters.content_size != raw_length:
            message = f"the zstd frame announces {parameters.content_size} bytes, the descriptor {raw_length}"
            raise TraceFormatError(message, path=path, offset=offset)
        decompressor = getattr(_local, "decompressor", None)
        if decompressor is None:
            decompressor = _local.decompressor = zstandard.ZstdDecompressor()
        raw: bytes = decompressor.decompress(stored, max_output_size=raw_length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise TraceFormatError(f"not a zstd frame: {error}", path=path, offset=offset) from error
    if len(raw) != raw_length:
        raise TraceFormatError(f"{len(raw)} bytes decompressed, {raw_length} announced", path=path, offset=offset)
    return raw


def _width_of(span: int) -> int:
    return 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4 if span < 1 << 32 else 8


def _shuffled(values: NDArray[Any], width: int) -> bytes:
    if width == 1:
        return values.astype(np.uint8).tobytes()
    return values.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()


def _unshuffled(raw: bytes | memoryview, width: int, count: int) -> NDArray[Any]:
    """Unsigned integers of `width` bytes; a read-only view of `raw` when they are bytes."""
    planes = np.frombuffer(raw, np.uint8, count * width).reshape(width, count)
    if width == 1:
        first: NDArray[Any] = planes[0]
        return first
    if width == 8:
        interleaved = np.empty((count, width), np.uint8)
        for index in range(width):
            interleaved[:, index] = planes[index]
        return interleaved.reshape(-1).view("<u8")
    values: NDArray[Any] = planes[-1].astype(f"<u{width}")
    for plane in planes[-2::-1]:
        values <<= 8
        values |= plane
    return values


def _zigzag(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def _unzigzag(values: NDArray[Any]) -> NDArray[np.int64]:
    """A new int64 array; the work is done in the width of `values`."""
    halves = values >> 1
    signs = values & 1
    np.negative(signs, out=signs)
    halves ^= signs
    return halves.view(f"<i{values.itemsize}").astype(np.int64, copy=False)


_SCALES: Final = (1_000_000, 1000)


def encode_integers(
    values: NDArray[np.int64],
    *,
    column: int,
    part: int,
    delta: bool = False,
    scalable: bool = False,
    reference: NDArray[np.int64] | None = None,
    reference_column: int = 0,
) -> tuple[Stream, bytes | memoryview]:
    """Encodes int64 values (unsigned columns reinterpreted); `delta` and `reference` are hints."""
    count = len(values)
    low, high = (int(values.min()), int(values.max())) if count else (0, 0)
    if low == high:
        return _stream(b"", column, part, Encoding.CONSTANT, 0, count, base=low)
    scale = 1
    if scalable and not values[0] % 1000 and not values[-1] % 1000:
        scale = next((s for s in _SCALES if not (values % s).any()), 1)
    if reference is not None:
        difference = values - reference
        step = scale if scale == 1 or not (difference % scale).any() else 1
        coded = _zigzag(difference // step if step != 1 else difference)
        width = _width_of(int(coded.max()))
        if width <= _width_of((high - low) // step):
            raw = _shuffled(coded, width)
            return _stream(raw, column, part, Encoding.DIFFERENCE, width, count, scale=step, reference=reference_column)
    if scale != 1:
        values = values // scale
        low, high = low // scale, high // scale
    flat_width = _width_of(high - low)
    if delta:
        coded = _zigzag(np.diff(values, prepend=values[:1]))
        width = _width_of(int(coded.max()))
        if width <= flat_width:
            raw = _shuffled(coded, width)
            return _stream(raw, column, part, Encoding.DELTA, width, count, base=int(values[0]), scale=scale)
    raw = _shuffled((values - low).view(np.uint64), flat_width)
    return _stream(raw, column, part, Encoding.OFFSET, flat_width, count, base=low, scale=scale)


def encode_distinct(values: NDArray[np.int64], *, column: int, part: int) -> tuple[Stream, bytes | memoryview]:
    """Encodes int64 values that are large and few: a dictionary and codes."""
    distinct, codes = _distinct(values)
    if len(distinct) <= 1 or len(distinct) > len(values) // 4:
        return encode_integers(values, column=column, part=part)
    width = _width_of(len(distinct) - 1)
    raw = distinct.astype("<i8").tobytes() + _shuffled(codes, width)
    return _stream(raw, column, part, Encoding.DICTIONARY, width, len(values), base=len(distinct))


_HASH_BITS: Final = 12
_HASH_FACTORS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


def _distinct(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """What np.unique gives with return_inverse. Few distinct values are found by hashing, without sorting all."""
    for factor in _HASH_FACTORS:
        slots = (values.view(np.uint64) * np.uint64(factor) >> np.uint64(64 - _HASH_BITS)).view(np.int64)
        held = np.zeros(1 << _HASH_BITS, np.int64)
        held[slots] = values
        if not np.array_equal(held.take(slots), values):
            continue  # two values share a slot
        used = np.zeros(1 << _HASH_BITS, np.bool_)
        used[slots] = True
        places = np.flatnonzero(used)
        distinct = held[places]
        order = np.argsort(distinct)
        code_of = np.zeros(1 << _HASH_BITS, np.uint16)
        code_of[places[order]] = np.arange(len(places))
        return distinct[order], code_of.take(slots)
    return np.unique(values, return_inverse=True)


def encode_floats(values: NDArray[np.float64], *, column: int, part: int) -> tuple[Stream, bytes | memoryview]:
    """Encodes float64 values, every bit kept."""
    bits = np.ascontiguousarray(values).view(np.int64)
    if len(bits) and (bits == bits[0]).all():
        return _stream(b"", column, part, Encoding.CONSTANT, 0, len(bits), base=int(bits[0]))
    return _stream(_shuffled(bits.view(np.uint64), 8), column, part, Encoding.SHUFFLED, 8, len(bits))


def encode_bytes(raw: bytes, *, column: int, part: int, width: int = 1) -> tuple[Stream, bytes | memoryview]:
    """Encodes bytes as they are, in values of `width` bytes."""
    return _stream(raw, column, part, Encoding.PLAIN, width, len(raw) // width)


def _stream(
    raw: bytes,
    column: int,
    part: int,
    encoding: int,
    width: int,
    count: int,
    *,
    base: int = 0,
    scale: int = 1,
    reference: int = 0,
) -> tuple[Stream, bytes | memoryview]:
    compression, stored = compress(raw) if part != StreamPart.DIGESTS else (Compression.NONE, raw)
    crc = zlib.crc32(stored)
    stream = Stream(
        base, count, len(stored), len(raw), crc, scale, column, reference, part, encoding, compression, width
    )
    return stream, stored


def _expected_length(stream: Stream) -> int:
    if stream.encoding == Encoding.CONSTANT:
        return 0
    extra = stream.base * 8 if stream.encoding == Encoding.DICTIONARY else 0
    return stream.num_values * stream.width + extra


def check_stream(stream: Stream, *, path: str, offset: int) -> None:
    """Refuses a descriptor whose sizes do not fit each other, before anything is allocated."""
    if not 1 <= stream.encoding <= Encoding.SHUFFLED:
        raise TraceVersionError(
            f"unknown encoding {stream.encoding}: a later library reads it", path=path, offset=offset
        )
    constant = stream.encoding == Encoding.CONSTANT
    if stream.width not in ((0,) if constant else (1, 2, 4, 8, 16)) or (
        stream.width == 16 and stream.part != StreamPart.DIGESTS
    ):
        raise TraceFormatError(f"width {stream.width} in encoding {stream.encoding}", path=path, offset=offset)
    if stream.scale == 0 or stream.reserved:
        raise TraceFormatError("scale 0 or reserved bits in a stream", path=path, offset=offset)
    if stream.encoding == Encoding.DICTIONARY and not 0 < stream.base <= max(stream.num_values, 1):
        raise TraceFormatError(f"dictionary of {stream.base} values", path=path, offset=offset)
    if stream.num_values * 8 > MAX_STREAM_BYTES or stream.raw_length > MAX_STREAM_BYTES:
        raise TraceLimitError(
            f"stream of {stream.num_values} values, {stream.raw_length} bytes", path=path, offset=offset
        )
    if stream.raw_length != _expected_length(stream):
        message = f"{stream.raw_length} bytes for {stream.num_values} values of {stream.width} bytes"
        raise TraceFormatError(message, path=path, offset=offset)


def stream_bytes(stream: Stream, stored: memoryview, *, path: str, offset: int) -> bytes:
    """The decompressed bytes of a stream that check_stream has accepted."""
    if zlib.crc32(stored) != stream.crc:
        raise TraceChecksumError(f"checksum of a stream of column {stream.column}", path=path, offset=offset)
    return decompress(stored, compression=stream.compression, raw_length=stream.raw_length, path=path, offset=offset)


def decode_integers(
    stream: Stream, raw: bytes, *, path: str, offset: int, reference: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The int64 values of a stream (unsigned columns reinterpreted); arithmetic is modulo 2**64."""
    count, width = stream.num_values, stream.width
    if stream.encoding == Encoding.CONSTANT:
        values = np.full(count, stream.base, np.int64)
    elif stream.encoding == Encoding.PLAIN:
        values = np.frombuffer(raw, f"<i{width}", count).astype(np.int64)
    elif stream.encoding == Encoding.SHUFFLED:
        values = _unshuffled(raw, width, count).view(f"<i{width}").astype(np.int64)
    elif stream.encoding == Encoding.OFFSET:
        values = _unshuffled(raw, width, count).astype(np.uint64, copy=False).view(np.int64)
        if stream.base:
            values += np.int64(stream.base)
    elif stream.encoding == Encoding.DELTA:
        values = _unzigzag(_unshuffled(raw, width, count))
        np.cumsum(values, out=values)
        values += np.int64(stream.base)
    elif stream.encoding == Encoding.DIFFERENCE:
        if reference is None or len(reference) != count:
            raise TraceDataError(f"column {stream.column} refers to values that are absent", path=path, offset=offset)
        values = _unzigzag(_unshuffled(raw, width, count))
        if stream.scale != 1:
            values *= np.int64(stream.scale)
        values += reference
        return values
    else:
        distinct = np.frombuffer(raw, "<i8", stream.base)
        codes = _unshuffled(memoryview(raw)[stream.base * 8 :], width, count)
        if count and int(codes.max()) >= stream.base:
            raise TraceDataError(f"column {stream.column}: code outside its dictionary", path=path, offset=offset)
        values = distinct.take(codes)
    if stream.scale != 1:
        values *= np.int64(stream.scale)
    return values


def decode_floats(stream: Stream, raw: bytes, *, path: str, offset: int) -> NDArray[np.float64]:
    """The float64 values of a stream."""
    if stream.encoding == Encoding.CONSTANT:
        return np.full(stream.num_values, stream.base, np.int64).view(np.float64)
    if stream.width != 8 or stream.encoding not in (Encoding.PLAIN, Encoding.SHUFFLED):
        raise TraceFormatError(f"floats in encoding {stream.encoding}", path=path, offset=offset)
    if stream.encoding == Encoding.PLAIN:
        return np.frombuffer(raw, "<f8", stream.num_values).copy()
    return _unshuffled(raw, 8, stream.num_values).view(np.float64)
