"""Finds the documents behind what the user named: files, folders, gzip and tar. Does not parse JSON."""

from __future__ import annotations

import re
import stat
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from prism_sdk.errors import UnreadableError

_ENDINGS: Final = (".json", ".json.gz")
_TARS: Final = (".tar", ".tar.gz", ".tgz")
_RANK_HINTS: Final = (
    re.compile(r"rank[-_=.]?(\d+)", re.IGNORECASE),
    re.compile(r"worker[-_]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])r(\d+)(?=[-_.]|$)", re.IGNORECASE),
)
_INPUT_BYTES: Final = 1 << 18


class GzipStream:
    """Decompresses as it goes. What is cut off or damaged ends the data early and is told in `damage`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._rest = b""
        self._inflate: Any = None
        self.damage = ""
        self._pending = b""

    def read(self, size: int = -1) -> bytes:
        """At least one byte, at most `size`, or nothing at the end; with -1 everything."""
        if size < 0:
            parts = []
            while part := self.read(1 << 20):
                parts.append(part)
            return b"".join(parts)
        while not self.damage:
            if self._inflate is None:
                if not self._fill():
                    return b""
                if self._pending[:2] != b"\x1f\x8b" and not self._rest_is_gzip():
                    return b""
                self._inflate = zlib.decompressobj(wbits=31)
            if not self._pending and not self._fill():
                self._end_early()
                return cast(bytes, self._inflate.flush())
            try:
                data: bytes = self._inflate.decompress(self._pending, size)
            except zlib.error as error:
                self.damage = f"damaged gzip data ({error})"
                return b""
            if self._inflate.eof:
                self._pending, self._inflate = self._inflate.unused_data, None
            else:
                self._pending = self._inflate.unconsumed_tail
            if data:
                return data
        return b""

    def _fill(self) -> bool:
        if not self._pending:
            try:
                self._pending = self._file.read(_INPUT_BYTES)
            except EOFError as error:
                self.damage = str(error)
        return bool(self._pending)

    def _end_early(self) -> None:
        self.damage = self.damage or "the gzip data end early"

    def _rest_is_gzip(self) -> bool:
        """Zeros behind the last member are padding; anything else is damage."""
        if self._pending.strip(b"\0"):
            self.damage = "bytes that are no gzip follow the gzip data"
        self._pending = b""
        return False


class _Member:
    """A file in a tar archive: that it is cut off is an EOFError."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except tarfile.TarError as error:
            raise EOFError(f"the archive is cut off: {error}") from error


class _FullReads:
    """A file object whose reads are whole, as tarfile expects."""

    def __init__(self, stream: GzipStream) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        parts, left = [], size
        while left and (part := self._stream.read(left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


@dataclass(frozen=True)
class Document:
    """One JSON text: its name for messages and its decompressed bytes. Valid until the next one is asked for."""

    name: str
    file: IO[bytes]
    gzip: GzipStream | None = None
    num_bytes: int = 0

    def rank_hint(self) -> int | None:
        """The rank that the name suggests."""
        for part in reversed(re.split(r"[/\\]", self.name)):
            for pattern in _RANK_HINTS:
                found = pattern.search(part)
                if found and len(found[1]) < 8:
                    return int(found[1])
        return None


def expand(sources: Sequence[Path]) -> list[Path]:
    """The files behind files and folders, in a stable order; raises UnreadableError."""
    files: list[Path] = []
    for source in sources:
        try:
            mode = source.stat().st_mode
            if stat.S_ISDIR(mode):
                found = sorted(
                    path for path in source.rglob("*") if path.name.endswith((*_ENDINGS, *_TARS)) and path.is_file()
                )
                if not found:
                    hint = "name a folder that holds .json, .json.gz or .tar.gz files"
                    raise UnreadableError(str(source), reason="the folder holds no trace", hint=hint)
                files += found
            elif stat.S_ISREG(mode):
                files.append(source)
            else:
                reason = "it is neither a file nor a folder"
                raise UnreadableError(str(source), reason=reason, hint="write the stream to a file first")
        except OSError as error:
            raise UnreadableError(str(source), reason=error.strerror or str(error)) from error
    return files


def documents(files: Sequence[Path], notes: list[str]) -> Iterator[Document]:
    """Every JSON text in the files, one after another."""
    for path in files:
        try:
            with path.open("rb") as file:
                yield from _documents_of(path, file, notes)
        except OSError as error:
            raise UnreadableError(str(path), reason=error.strerror or str(error)) from error


def _documents_of(path: Path, file: IO[bytes], notes: list[str]) -> Iterator[Document]:
    head = file.read(512)
    file.seek(0)
    size = path.stat().st_size
    if head[:4] == b"PK\x03\x04":
        raise UnreadableError(str(path), reason="it is a zip archive", hint="unpack it and name the folder")
    stream = GzipStream(file) if head[:2] == b"\x1f\x8b" else None
    if path.name.endswith(_TARS):
        yield from _members(path, file, stream, notes)
    else:
        yield Document(str(path), cast("IO[bytes]", stream or file), stream, size)


def _members(path: Path, file: IO[bytes], stream: GzipStream | None, notes: list[str]) -> Iterator[Document]:
    source = cast("IO[bytes]", _FullReads(stream)) if stream else file
    count = 0
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for member in archive:
                if not member.isfile() or Path(member.name).name.startswith("._"):
                    continue
                if not member.name.endswith(_ENDINGS):
                    notes.append(f"{path}: {member.name} is not .json or .json.gz and was left out")
                    continue
                content = archive.extractfile(member)
                if content is None:
                    continue
                count += 1
                inner = cast("IO[bytes]", _Member(content))
                packed = GzipStream(inner) if member.name.endswith(".gz") else None
                yield Document(f"{path}:{member.name}", cast("IO[bytes]", packed or inner), packed, member.size)
    except tarfile.TarError as error:
        if not count:
            raise UnreadableError(str(path), reason=f"not a tar archive: {error}") from error
        notes.append(f"{path}: the archive is damaged after {count} traces ({error}); what follows is lost")
    if stream is not None and stream.damage:
        notes.append(f"{path}: {stream.damage}; what follows is lost")
    if not count:
        hint = "pack the .json or .json.gz files themselves"
        raise UnreadableError(str(path), reason="the archive holds no trace", hint=hint)
