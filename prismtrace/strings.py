"""Packs the strings that several chunks share into a payload, and reads them back.

Does not decide which strings are shared.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from prismtrace.columns import MAX_DICTIONARY, MAX_STRING_BYTES
from prismtrace.errors import TraceDataError, TraceLimitError, TraceUsageError


@dataclass(frozen=True)
class SharedStrings:
    """Distinct strings that chunks may refer to by position; `digest` names the payload that holds them."""

    digest: bytes
    values: tuple[str, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """String -> position."""
        return {text: place for place, text in enumerate(self.values)}


def pack_strings(texts: Sequence[str]) -> bytes:
    """The payload: the number of strings, the bytes of each, and their UTF-8 bytes back to back."""
    try:
        encoded = [text.encode("utf-8") for text in texts]
    except (AttributeError, UnicodeEncodeError) as error:
        raise TraceUsageError(f"shared strings must be valid str: {error}") from error
    if len(encoded) > MAX_DICTIONARY:
        raise TraceUsageError(f"{len(encoded)} shared strings; the limit is {MAX_DICTIONARY}")
    if len(set(encoded)) != len(encoded) or any(len(text) > MAX_STRING_BYTES for text in encoded):
        raise TraceUsageError(f"shared strings must be distinct and at most {MAX_STRING_BYTES} bytes long")
    lengths = np.array([len(text) for text in encoded], "<u4")
    return struct.pack("<I", len(encoded)) + lengths.tobytes() + b"".join(encoded)


def parse_strings(raw: bytes, *, path: str, offset: int) -> tuple[str, ...]:
    """The strings of such a payload."""
    count = int.from_bytes(raw[:4], "little")
    if count > MAX_DICTIONARY:
        raise TraceLimitError(f"{count} shared strings", path=path, offset=offset)
    if len(raw) < 4 + 4 * count:
        raise TraceDataError(f"{count} shared strings in {len(raw)} bytes", path=path, offset=offset)
    ends = 4 + 4 * count + np.cumsum(np.frombuffer(raw, "<u4", count, 4).astype(np.int64))
    if len(raw) != (int(ends[-1]) if count else 4):
        raise TraceDataError("the lengths of shared strings do not add up", path=path, offset=offset)
    starts = [4 + 4 * count, *ends.tolist()]
    return tuple(raw[start:end].decode("utf-8") for start, end in itertools.pairwise(starts))
