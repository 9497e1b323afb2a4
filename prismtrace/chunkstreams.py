"""Finds the streams of a chunk and fetches their checked bytes.

Does not know what they say.
"""

from __future__ import annotations

from collections.abc import Callable

from prismtrace._generated.schema import Encoding, StreamPart
from prismtrace.encoding import ZIGZAG, Stream, check_stream, stream_bytes
from prismtrace.entries import ChunkMeta
from prismtrace.errors import TraceDataError


class ChunkStreams:
    """The streams of one chunk by column and part. `fetch(start, length)` returns bytes of its data section."""

    def __init__(
        self, meta: ChunkMeta, *, fetch: Callable[[int, int], memoryview], path: str, data_offset: int
    ) -> None:
        self._fetch, self._path, self._data_offset = fetch, path, data_offset
        self._streams: dict[tuple[int, int], tuple[Stream, int]] = {}
        position = 0
        for stream in meta.streams:
            key = (stream.column, stream.part)
            if key in self._streams:
                raise self._error(f"two streams of part {stream.part} for column {stream.column}")
            self._streams[key] = (stream, position)
            position += stream.stored_length
        self.data_length = position
        self._parts: dict[int, frozenset[int]] = {}
        for column, part in self._streams:
            self._parts[column] = self._parts.get(column, frozenset()) | {part}

    def _error(self, message: str, position: int = 0) -> TraceDataError:
        return TraceDataError(message, path=self._path, offset=self._data_offset + position)

    def _raw(self, column: int, part: int) -> tuple[Stream, bytes, int] | None:
        found = self._streams.get((column, part))
        if found is None:
            return None
        stream, position = found
        offset = self._data_offset + position
        check_stream(stream, path=self._path, offset=offset)
        stored = self._fetch(position, stream.stored_length)
        return stream, stream_bytes(stream, stored, path=self._path, offset=offset), offset

    def _bits(self, column: int, stream: Stream) -> bytes | None:
        """The bits of numbers that are kept apart from their lengths; None when they are not."""
        found = self._raw(column, StreamPart.BITS)
        if found is None:
            return None
        if stream.encoding not in ZIGZAG or found[0].encoding != Encoding.PLAIN or found[0].width != 1:
            raise self._error(f"the bits of column {column} do not go with its values")
        return found[1]
