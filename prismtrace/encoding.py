"""Describes streams, compresses their bytes, and turns encoded streams back into arrays.

Does not encode (`encoders` does), and does not know tables, files or what a column means.
"""

from __future__ import annotations

import threading
import zlib
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from prismtrace._generated.schema import Compression, Encoding, StreamPart
from prismtrace.bits import unpack
from prismtrace.errors import TraceChecksumError, TraceDataError, TraceFormatError, TraceLimitError, TraceVersionError
from prismtrace.ticks import MAX_SHIFT, Tick

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
        ("shift", "u1"),
        ("reserved_0", "u1"),
        ("reserved_1", "<u2"),
    ]
)
"""The struct `Stream` of the schema."""

MAX_STREAM_BYTES: Final = 1 << 28
"""Limit of one decoded stream (spec/trace-format.md, limits)."""

REFERRING: Final = frozenset((Encoding.DIFFERENCE, Encoding.ROLE_DIFFERENCE, Encoding.CONTINUED))
"""Encodings whose values need those of another column."""

NARROW: Final = frozenset((Encoding.OFFSET, Encoding.CONSTANT))
"""Encodings whose values can be had in the type of their column."""

ZIGZAG: Final = REFERRING | {Encoding.DELTA}
"""Encodings of signed numbers, which may be kept as lengths and bits, and in laps."""

COMPRESSION_LEVEL: Final = 3
_MIN_COMPRESS_BYTES: Final = 24
_local = threading.local()


class Stream(NamedTuple):
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
    shift: int = 0
    reserved_0: int = 0
    lap: int = 0

    @property
    def tick(self) -> Tick:
        """What values are multiples of."""
        return Tick(self.scale, self.shift)

    def bounds(self) -> tuple[int, int] | None:
        """Between what the values must lie by the look of the descriptor; None when it does not say."""
        if self.shift:
            return None
        if self.encoding == Encoding.CONSTANT:
            return self.base * self.scale, self.base * self.scale
        if self.encoding == Encoding.OFFSET and self.width < 8:
            return self.base * self.scale, (self.base + (1 << 8 * self.width) - 1) * self.scale
        return None


Encoded = tuple[Stream, bytes | memoryview]


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
        announced = zstandard.frame_content_size(stored)
        if announced != raw_length:
            message = f"the zstd frame announces {announced} bytes, the descriptor {raw_length}"
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


def _unzigzag(values: NDArray[Any]) -> NDArray[np.int64]:
    """A new int64 array; the work is done in the width of `values`."""
    halves = values >> 1
    signs = values & 1
    np.negative(signs, out=signs)
    halves ^= signs
    return halves.view(f"<i{values.itemsize}").astype(np.int64, copy=False)


def _expected_length(stream: Stream) -> int:
    if stream.encoding == Encoding.CONSTANT:
        return 0
    extra = stream.base * 8 if stream.encoding == Encoding.DICTIONARY else 0
    return stream.num_values * stream.width + extra


def _may_lap(stream: Stream) -> bool:
    return stream.encoding in ZIGZAG and stream.part == StreamPart.VALUES and stream.lap < stream.num_values


def check_stream(stream: Stream, *, path: str, offset: int) -> None:
    """Refuses a descriptor whose sizes do not fit each other, before anything is allocated."""
    if not 1 <= stream.encoding <= Encoding.CONTINUED:
        raise TraceVersionError(
            f"unknown encoding {stream.encoding}: a later library reads it", path=path, offset=offset
        )
    constant = stream.encoding == Encoding.CONSTANT
    if stream.width not in ((0,) if constant else (1, 2, 4, 8, 16)) or (
        stream.width == 16 and stream.part != StreamPart.DIGESTS
    ):
        raise TraceFormatError(f"width {stream.width} in encoding {stream.encoding}", path=path, offset=offset)
    if stream.scale == 0 or stream.reserved_0 or (stream.lap and not _may_lap(stream)):
        raise TraceFormatError("scale 0 or reserved bits in a stream", path=path, offset=offset)
    if stream.shift > MAX_SHIFT:
        raise TraceFormatError(f"shift {stream.shift} in a stream", path=path, offset=offset)
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
    stream: Stream,
    raw: bytes,
    *,
    path: str,
    offset: int,
    reference: NDArray[np.int64] | None = None,
    bits: bytes | None = None,
) -> NDArray[np.int64]:
    """The int64 values of a stream (unsigned columns reinterpreted); arithmetic is modulo 2**64.

    `reference`: for DIFFERENCE and ROLE_DIFFERENCE the values of the other column, for CONTINUED the ticks from the
    start of each row to its end. `bits`: the bits of the numbers below the highest, if they are kept apart.
    """
    count, tick = stream.num_values, stream.tick
    if stream.encoding in REFERRING:
        if reference is None or len(reference) != count:
            raise TraceDataError(f"column {stream.column} refers to values that are absent", path=path, offset=offset)
        return apply_differences(stream, decode_zigzag(stream, raw, bits), reference)
    if stream.encoding == Encoding.DELTA:
        values = decode_zigzag(stream, raw, bits)
        np.cumsum(values, out=values)
        values += np.int64(stream.base)
        return tick.values(values)
    return tick.values(_plain_ticks(stream, raw, path=path, offset=offset))


def apply_differences(stream: Stream, numbers: NDArray[np.int64], reference: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values that differences to a reference stand for, as a new array; the numbers of CONTINUED are used up."""
    tick = stream.tick
    if stream.encoding == Encoding.CONTINUED:
        if len(numbers):
            numbers[:1] += np.int64(stream.base)
            numbers[1:] += reference[:-1]
        return tick.values(np.cumsum(numbers, out=numbers))
    if tick.shift:
        return tick.values(numbers + tick.ticks(reference))
    if tick.scale != 1:
        numbers = numbers * np.int64(tick.scale)
    return numbers + reference


def decode_zigzag(stream: Stream, raw: bytes, bits: bytes | None = None) -> NDArray[np.int64]:
    """The signed numbers of a stream of differences, as a new array. `bits`: as in `decode_integers`."""
    if bits is None:
        numbers = _unzigzag(_unshuffled(raw, stream.width, stream.num_values))
    elif stream.width != 1:
        raise ValueError(f"numbers of {stream.width} bytes beside their bits")
    else:
        numbers = _unzigzag(unpack(raw, bits, stream.num_values))
    return _without_laps(numbers, stream.lap) if stream.lap else numbers


def _without_laps(numbers: NDArray[np.int64], lap: int) -> NDArray[np.int64]:
    """Numbers, each of which was kept as the difference to the one a lap before."""
    whole = len(numbers) // lap * lap
    table = numbers[:whole].reshape(-1, lap)
    np.cumsum(table, axis=0, out=table)
    numbers[whole:] += numbers[whole - lap : whole][: len(numbers) - whole]
    return numbers


def _plain_ticks(stream: Stream, raw: bytes, *, path: str, offset: int) -> NDArray[np.int64]:
    """The ticks of a stream that refers to no other column."""
    count, width = stream.num_values, stream.width
    if stream.encoding == Encoding.CONSTANT:
        return np.full(count, stream.base, np.int64)
    if stream.encoding == Encoding.PLAIN:
        return np.frombuffer(raw, f"<i{width}", count).astype(np.int64)
    if stream.encoding == Encoding.SHUFFLED:
        return _unshuffled(raw, width, count).view(f"<i{width}").astype(np.int64)
    if stream.encoding == Encoding.OFFSET:
        values = _unshuffled(raw, width, count).astype(np.uint64, copy=False).view(np.int64)
        if stream.base:
            values += np.int64(stream.base)
        return values
    distinct = np.frombuffer(raw, "<i8", stream.base)
    codes = _unshuffled(memoryview(raw)[stream.base * 8 :], width, count)
    if count and int(codes.max()) >= stream.base:
        raise TraceDataError(f"column {stream.column}: code outside its dictionary", path=path, offset=offset)
    found: NDArray[np.int64] = distinct.take(codes)
    return found


def decode_narrow(stream: Stream, raw: bytes, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The values of an OFFSET or CONSTANT stream in the type of their column, without a detour over int64.

    None for other streams, and where a value may not fit: the smallest of a signed type, which stands for absent,
    counts as one that does not. Bytes may be those of `raw` itself.
    """
    if stream.encoding not in NARROW or stream.shift or stream.scale != 1:
        return None
    flags = dtype.kind == "b"
    least, most = (0, 1) if flags else (int(np.iinfo(dtype).min) + (dtype.kind == "i"), int(np.iinfo(dtype).max))
    whole = np.dtype(np.uint8) if flags else dtype
    if not least <= stream.base <= most:
        return None
    if stream.encoding == Encoding.CONSTANT:
        return np.full(stream.num_values, stream.base, whole).view(dtype)
    values = _unshuffled(raw, stream.width, stream.num_values)
    if len(values) and stream.base + int(values.max()) > most:
        return None
    narrow = values.astype(whole, copy=stream.base != 0)
    if stream.base:
        narrow += whole.type(stream.base)
    return narrow.view(dtype)


def decode_floats(stream: Stream, raw: bytes, *, path: str, offset: int) -> NDArray[np.float64]:
    """The float64 values of a stream."""
    if stream.encoding == Encoding.CONSTANT:
        return np.full(stream.num_values, stream.base, np.int64).view(np.float64)
    if stream.width != 8 or stream.encoding not in (Encoding.PLAIN, Encoding.SHUFFLED):
        raise TraceFormatError(f"floats in encoding {stream.encoding}", path=path, offset=offset)
    if stream.encoding == Encoding.PLAIN:
        return np.frombuffer(raw, "<f8", stream.num_values).copy()
    return _unshuffled(raw, 8, stream.num_values).view(np.float64)
