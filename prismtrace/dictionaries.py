"""Decodes the dictionaries of a chunk: its strings, the shared ones before them, and its digests.

Does not know columns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prismtrace._generated.schema import Encoding, StreamPart
from prismtrace.chunk import DICTIONARY_COLUMN
from prismtrace.columns import DIGEST_BYTES
from prismtrace.encoding import Stream, decode_integers
from prismtrace.errors import TraceDataError, TraceFormatError

Raw = Callable[[int, int], tuple[Stream, bytes, int] | None]


class Dictionaries:
    """The dictionaries of one chunk. `raw(column, part)` gives a checked stream, its bytes and its place."""

    def __init__(self, raw: Raw, shared: Callable[[], tuple[str, ...]], *, path: str) -> None:
        self._raw, self._shared, self._path = raw, shared, path
        self._strings: tuple[str, ...] | None = None
        self._digests: tuple[bytes, ...] | None = None

    def strings(self) -> tuple[str, ...]:
        """The shared strings, then the chunk's own."""
        if self._strings is None:
            lengths = self._raw(DICTIONARY_COLUMN, StreamPart.STRING_LENGTHS)
            data = self._raw(DICTIONARY_COLUMN, StreamPart.STRING_BYTES)
            if lengths is None and data is None:
                self._strings = self._shared()
                return self._strings
            if lengths is None or data is None:
                place = (lengths or data or (None, b"", 0))[2]
                message = "a string dictionary without lengths or without bytes"
                raise TraceDataError(message, path=self._path, offset=place)
            if data[0].encoding != Encoding.PLAIN or data[0].width != 1:
                raise TraceFormatError("string dictionary", path=self._path, offset=data[2])
            sizes = decode_integers(lengths[0], lengths[1], path=self._path, offset=lengths[2])
            if not add_up(sizes, len(data[1])):
                raise TraceDataError("string lengths do not add up", path=self._path, offset=lengths[2])
            raw = data[1]
            ends = np.cumsum(sizes).tolist()
            own = tuple(raw[start:end].decode("utf-8") for start, end in zip([0, *ends], ends, strict=False))
            self._strings = (*self._shared(), *own)
        return self._strings

    def digests(self) -> tuple[bytes, ...]:
        """The digests of the chunk."""
        if self._digests is None:
            found = self._raw(DICTIONARY_COLUMN, StreamPart.DIGESTS)
            if found is None:
                return ()
            stream, raw, offset = found
            if stream.encoding != Encoding.PLAIN or stream.width != DIGEST_BYTES:
                raise TraceFormatError("digest dictionary", path=self._path, offset=offset)
            self._digests = tuple(raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES))
        return self._digests


def add_up(sizes: NDArray[np.int64], total: int) -> bool:
    """Whether these are sizes, and `total` is their sum."""
    if len(sizes) and (int(sizes.min()) < 0 or int(sizes.max()) > total):
        return False
    return int(sizes.sum()) == total
