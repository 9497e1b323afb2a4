"""Refuses groups and metadata that cannot be written: what is too long or has no meaning.

Does not know the limits of chunks, streams and records; those stand beside the code that keeps them.
"""

from __future__ import annotations

from typing import Final

from prismtrace.errors import TraceUsageError
from prismtrace.model import ProcessGroup

MAX_KEY_BYTES: Final = 1 << 10
MAX_VALUE_BYTES: Final = 1 << 24
MAX_GROUP_TEXT_BYTES: Final = 1 << 16


def check_entry(key: str, value: str) -> None:
    """Refuses a metadata entry that cannot be written."""
    if not isinstance(key, str) or not isinstance(value, str):  # type: ignore[redundant-expr]
        raise TraceUsageError(f"metadata are pairs of str, not {type(key).__name__} -> {type(value).__name__}")
    if not key or len(_utf8(key)) > MAX_KEY_BYTES or len(_utf8(value)) > MAX_VALUE_BYTES:
        raise TraceUsageError(f"metadata {key[:40]!r}: empty key, or key or value too long")


def check_group(group: ProcessGroup) -> None:
    """Refuses a process group that cannot be written."""
    if not 0 < group.group_id < 1 << 64:
        raise TraceUsageError(f"group_id {group.group_id} must be in 1 .. 2**64 - 1 (0 means no group)")
    for text in (group.name, group.description, group.backend):
        if len(_utf8(text)) > MAX_GROUP_TEXT_BYTES:
            raise TraceUsageError(f"group {group.group_id}: a text of {len(text)} characters")
    if any(not 0 <= rank < 1 << 31 for rank in group.ranks):
        raise TraceUsageError(f"group {group.group_id} has a rank out of range")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TraceUsageError(f"{text[:40]!r} is not valid Unicode: {error.reason}") from error
