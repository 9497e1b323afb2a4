"""The dictionaries of a chunk: its strings, after those that it shares with other chunks, and its payload digests.

It knows no columns; the decoder looks up their codes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from prismtrace._generated.schema import Encoding, StreamPart
from prismtrace.columns import DIGEST_BYTES, MAX_DICTIONARY
from prismtrace.encoding import Stream, decode_integers
from prismtrace.errors import TraceDataError, TraceFormatError, TraceLimitError

DICTIONARY_COLUMN: Final = 0
"""Column id of the streams that hold the chunk's own string and digest dictionaries."""


Raw = Callable[[int, int], "tuple[Stream, bytes, int] | None"]


class Dictionaries:
    """Decodes each dictionary once, when it is asked for.

    `raw`, which fetches a stream, its bytes and their offset, is passed in each time: kept here, it would tie the
    decoder and this object together until the garbage collector comes, and decoded chunks with them.

    Args:
        streams: the chunk's streams by column and part, each with its position in the data section.
        path, offset: where the data section is.
        shared: gives the strings that come before the chunk's own.
    """

    def __init__(
        self, streams: Mapping[tuple[int, int], tuple[Stream, int]], *,
        path: str, offset: int, shared: Callable[[], tuple[str, ...]],
    ) -> None:  # fmt: skip
        self._streams, self._shared = streams, shared
        self._path, self._offset = path, offset
        self._strings: tuple[str, ...] | None = None
        self._digests: tuple[bytes, ...] | None = None

    def _part(self, raw: Raw, part: int) -> tuple[Stream, bytes, int] | None:
        found = self._streams.get((DICTIONARY_COLUMN, part))
        if found is None:
            return None
        # before anything of it is fetched or built
        if part != StreamPart.STRING_BYTES and found[0].num_values > MAX_DICTIONARY:
            message = f"a dictionary of {found[0].num_values} values"
            raise TraceLimitError(message, path=self._path, offset=self._offset + found[1])
        return raw(DICTIONARY_COLUMN, part)

    def strings(self, raw: Raw) -> tuple[str, ...]:
        """The shared strings and the chunk's own."""
        if self._strings is None:
            lengths, data = self._part(raw, StreamPart.STRING_LENGTHS), self._part(raw, StreamPart.STRING_BYTES)
            if lengths is None and data is None:
                self._strings = self._shared()
                return self._strings
            if lengths is None or data is None:
                raise self._error("a string dictionary without lengths or without bytes")
            if data[0].encoding != Encoding.PLAIN or data[0].width != 1:
                raise TraceFormatError("string dictionary", path=self._path, offset=data[2])
            sizes = decode_integers(lengths[0], lengths[1], path=self._path, offset=lengths[2])
            if not add_up(sizes, len(data[1])):
                raise self._error("string lengths do not add up")
            text = data[1]
            ends = np.cumsum(sizes).tolist()
            own = tuple(text[start:end].decode("utf-8") for start, end in zip([0, *ends], ends, strict=False))
            self._strings = (*self._shared(), *own)
        return self._strings

    def digests(self, raw: Raw) -> tuple[bytes, ...]:
        """The payload digests."""
        if self._digests is None:
            found = self._part(raw, StreamPart.DIGESTS)
            if found is None:
                return ()
            stream, every, offset = found
            if stream.encoding != Encoding.PLAIN or stream.width != DIGEST_BYTES:
                raise TraceFormatError("digest dictionary", path=self._path, offset=offset)
            self._digests = tuple(every[i : i + DIGEST_BYTES] for i in range(0, len(every), DIGEST_BYTES))
        return self._digests

    def _error(self, message: str) -> TraceDataError:
        return TraceDataError(message, path=self._path, offset=self._offset)


def add_up(sizes: NDArray[np.int64], total: int) -> bool:
    """Whether these are sizes, and `total` is their sum."""
    if len(sizes) and (int(sizes.min()) < 0 or int(sizes.max()) > total):
        return False
    return int(sizes.sum()) == total
