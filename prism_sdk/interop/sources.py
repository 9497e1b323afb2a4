"""Finds the files of a job's ranks (files, folders, tar archives, gzip) and reads them one after the other.

It does not look into what it reads, except for the rank that a file's name carries.
"""

from __future__ import annotations

import gzip
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prism_sdk.errors import UsageError
from prismtrace import TraceFormatError, TraceLimitError, TraceReadError, TraceTruncatedError

MAX_FILE_BYTES: Final = 4 << 30
"""Largest file, decompressed, that is read: a small archive can describe a very large one."""

_RANK: Final = re.compile(r"rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_LAST_NUMBER: Final = re.compile(r"(\d{1,9})(?!.*\d)")
_ARCHIVES: Final = (".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True)
class Part:
    """One file of one rank. `name` is what messages call it, `base` its name without folders.

    `chosen` is whether the user named this very file: others beside it may be of another format.
    """

    name: str
    base: str
    data: bytes
    chosen: bool = False


class ForeignFileError(TraceFormatError):
    """The file is whole and of another format."""


def rank_of_name(base: str) -> int | None:
    """The rank that a file name carries: after the word rank, else its last number."""
    if found := _RANK.search(base):
        return int(found[1])
    last = _LAST_NUMBER.search(base)
    return int(last[1]) if last else None


def flag(options: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """An option that is `true` or `false`."""
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false", "1", "0", "yes", "no"):
        raise UsageError(f"-O {name}={options[name]} is neither true nor false")
    return text in ("true", "1", "yes")


def number(options: Mapping[str, str], name: str) -> int | None:
    """An option that is a number of at least 0, or absent."""
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 31):
        raise UsageError(f"-O {name}={text} is not a number from 0 to {(1 << 31) - 1}")
    return int(text)


def parts(sources: Sequence[Path], wanted: Callable[[str], bool]) -> Iterator[Part]:
    """Every file that the user named, and those in folders and archives whose base name is `wanted`."""
    for source in sources:
        mode = _mode(source)
        if stat.S_ISDIR(mode):
            for path in sorted(source.rglob("*"), key=_natural):
                if wanted(path.name) and path.is_file():
                    yield Part(str(path), path.name, _read(path))
        elif not stat.S_ISREG(mode):
            raise TraceReadError("not a regular file", path=str(source))
        elif source.name.lower().endswith(_ARCHIVES):
            yield from _members(source, wanted)
        else:
            yield Part(str(source), source.name, _read(source), chosen=True)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(text), "") if text.isdigit() else (-1, text) for text in re.split(r"(\d+)", str(path))]


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        raise TraceReadError(error.strerror or "cannot be read", path=str(path), errno=error.errno) from error


def _read(path: Path) -> bytes:
    name = str(path)
    try:
        with open(path, "rb") as file:
            if file.read(2) == b"\x1f\x8b":
                file.seek(0)
                with gzip.open(file) as inner:
                    data = inner.read(MAX_FILE_BYTES + 1)
            else:
                file.seek(0)
                data = file.read(MAX_FILE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceTruncatedError(f"the gzip data are damaged: {error}", path=name) from error
    except OSError as error:
        raise TraceReadError(error.strerror or "cannot be read", path=name, errno=error.errno) from error
    return _bounded(data, name)


def _members(path: Path, wanted: Callable[[str], bool]) -> Iterator[Part]:
    name = str(path)
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                base = member.name.rsplit("/", 1)[-1]
                if not member.isreg() or base.startswith("._") or not wanted(base):
                    continue
                where = f"{name}:{member.name}"
                file = archive.extractfile(member)
                data = b"" if file is None else file.read(MAX_FILE_BYTES + 1)
                if data[:2] == b"\x1f\x8b":
                    data = _gunzip(data, where)
                yield Part(where, base, _bounded(data, where))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFormatError(f"the archive is damaged: {error}", path=name) from error
    except OSError as error:
        raise TraceReadError(error.strerror or str(error), path=name, errno=error.errno) from error


def _gunzip(data: bytes, where: str) -> bytes:
    engine = zlib.decompressobj(wbits=31)
    try:
        plain = engine.decompress(data, MAX_FILE_BYTES + 1)
    except zlib.error as error:
        raise TraceFormatError(f"the gzip data are damaged: {error}", path=where) from error
    if not engine.eof and len(plain) <= MAX_FILE_BYTES:
        raise TraceTruncatedError("the gzip data end too early", path=where)
    return plain


def _bounded(data: bytes, name: str) -> bytes:
    if len(data) > MAX_FILE_BYTES:
        raise TraceLimitError(f"more than {MAX_FILE_BYTES} bytes", path=name)
    return data
