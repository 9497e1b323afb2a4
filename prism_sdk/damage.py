"""Says how a file that nobody recognises is damaged, where its name or its first bytes tell which format it is.

It repairs nothing, and knows nothing of what such files hold.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Final

__all__ = ["damage_of"]

#: Format -> endings of names, and the bytes that its files begin and end with.
_FRAMED: Final = {
    "Parquet": ((".parquet",), b"PAR1"),
    "Arrow IPC": ((".arrow", ".feather"), b"ARROW1"),
}
#: Larger JSON is not parsed just for a message.
_MAX_JSON_BYTES: Final = 1 << 26


def damage_of(source: Path, head: bytes) -> str | None:
    """What is wrong with the file; None where nothing can be said.

    Args:
        source: the file.
        head: its first bytes, decompressed where it is gzip; empty for a folder.
    """
    if not head:
        return None
    try:
        for name, (endings, magic) in _FRAMED.items():
            if head.startswith(magic) or source.name.lower().endswith(endings):
                return _damage_of_framed(source, name, magic)
        if head.lstrip()[:1] in (b"{", b"[") or source.name.lower().endswith((".json", ".json.gz")):
            return _damage_of_json(source)
    except OSError:
        return None  # the importers say what the operating system refuses
    return None


def _damage_of_framed(source: Path, name: str, magic: bytes) -> str | None:
    size = source.stat().st_size
    with open(source, "rb") as file:
        begin = file.read(len(magic))
        file.seek(max(0, size - len(magic)))
        end = file.read()
    if begin != magic:
        return f"it is no {name} file: it does not begin with {magic.decode()}"
    if end != magic or size < 2 * len(magic):
        return f"damaged {name}: it does not end with {magic.decode()}: its end is cut off, or not written yet"
    return None


def _damage_of_json(source: Path) -> str | None:
    with open(source, "rb") as file:
        raw = file.read(_MAX_JSON_BYTES + 1)
    if raw.startswith(b"\x1f\x8b"):
        try:
            with gzip.open(source) as unpacked:
                raw = unpacked.read(_MAX_JSON_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            return f"damaged gzip ({error})"
    if len(raw) > _MAX_JSON_BYTES:
        return None
    try:
        json.loads(raw)
    except UnicodeDecodeError as error:
        return f"damaged JSON: it is not UTF-8, at byte {error.start}"
    except json.JSONDecodeError as error:
        if _is_json_lines(raw):
            return None
        is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        cut = ": its end is cut off, or not written yet" if is_cut else ""
        return f"damaged JSON: {error.msg} at line {error.lineno}, column {error.colno}{cut}"
    except RecursionError:
        return "JSON that is nested too deeply"
    return None


def _is_json_lines(raw: bytes) -> bool:
    """Whether each of several lines is JSON: the first tells, as the whole was found not to be."""
    first, _, rest = raw.lstrip().partition(b"\n")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return bool(rest.strip())
