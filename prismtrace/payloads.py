"""Reads payloads by their digests.

Does not read chunks, and does not interpret the bytes.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from prismtrace._generated.schema import Compression
from prismtrace.encoding import decompress
from prismtrace.errors import TraceChecksumError, TraceLimitError, TraceUsageError, reading
from prismtrace.index import Index
from prismtrace.source import Source

ATTACHMENT_PREFIX: Final = "attachment."
"""Begins the metadata keys that name attachments; the value is the digest in hexadecimal digits."""


def as_bytes(buffer: Any) -> memoryview:
    """A flat view of the bytes of any contiguous buffer."""
    try:
        view = memoryview(buffer)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise TraceUsageError(f"a contiguous buffer is needed: {error}") from error


class PayloadReader:
    """Reads the payloads of one file. Safe to use from several threads."""

    def __init__(self, source: Source, index: Index, *, max_bytes: int) -> None:
        self._source, self._index, self._path, self._max_bytes = source, index, source.name, max_bytes

    def entry(self, digest: bytes) -> Any:
        """What the index says about a payload."""
        place = self._index.payloads.get(digest)
        if place is None:
            raise TraceUsageError(f"{self._path}: no payload {digest.hex()}")
        return self._index.payload_entries[place]

    def read(self, digest: bytes) -> bytes:
        """The bytes of a payload."""
        entry = self.entry(digest)
        offset, raw_length = int(entry["data_offset"]), int(entry["raw_length"])
        compression = int(entry["compression"])
        if compression != Compression.NONE and raw_length > self._max_bytes:
            raise TraceLimitError(f"payload of {raw_length} bytes", path=self._path, offset=offset)
        stored = self._source.read_at(offset, int(entry["stored_length"]))
        if zlib.crc32(stored) != int(entry["data_crc"]):
            raise TraceChecksumError("checksum of a payload", path=self._path, offset=offset)
        with reading("payload", path=self._path, offset=offset):
            return decompress(stored, compression=compression, raw_length=raw_length, path=self._path, offset=offset)

    def read_into(self, digest: bytes, view: memoryview, *, verify: bool) -> int:
        """Reads a payload into the start of a buffer and returns its size."""
        entry = self.entry(digest)
        offset, raw_length = int(entry["data_offset"]), int(entry["raw_length"])
        if view.readonly or len(view) < raw_length:
            raise TraceUsageError(f"a writable buffer of at least {raw_length} bytes is needed")
        target = view[:raw_length]
        if int(entry["compression"]) != Compression.NONE or int(entry["stored_length"]) != raw_length:
            target[:] = self.read(digest)
        else:
            self._source.read_into(offset, target)
            if verify and zlib.crc32(target) != int(entry["data_crc"]):
                raise TraceChecksumError("checksum of a payload", path=self._path, offset=offset)
        return raw_length
