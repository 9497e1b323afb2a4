"""Writes a copy of a trace that can be shown to others: names of people, machines and folders become pseudonyms.

Does not change numbers, times or structure: what a model's sizes and timings give away stays.
"""

from __future__ import annotations

import os
import secrets as random_source
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from prismtrace import container, metas
from prismtrace.container import FRAME_BYTES, MAX_META_BYTES, RecordKind
from prismtrace.encoding import stream_bytes
from prismtrace.errors import TraceDataError, TraceResultError, TraceUsageError
from prismtrace.index import read_header, read_meta
from prismtrace.model import ProcessGroup, TableKind
from prismtrace.payloads import ATTACHMENT_PREFIX
from prismtrace.pseudonyms import Pseudonymiser, boundary, remains
from prismtrace.reader import TraceReader
from prismtrace.rewriting import (
    TABLES,
    add_rows,
    copy_payload,
    is_digest_column,
    is_text_column,
    iter_tables,
    new_trace,
    still_promised,
    used_values,
)
from prismtrace.source import PathSource, TraceInput
from prismtrace.tables import Column, DictionaryColumn
from prismtrace.writer import TraceWriter

REDACTED: Final = (
    "metadata: paths, URLs, e-mail and IP addresses, names of hosts and users; the command line but for its flags and "
    "numbers; the text of errors",
    "process groups: the same in names and descriptions",
    "labels, names of scalars, tracks and events, named string columns: the same",
    "payloads and attachments: dropped, and the digests that name them",
)
"""What `redact` removes, in words."""

KEPT: Final = (
    "all numbers: times, sizes, counts, steps, ranks, losses",
    "structure: kinds of units, operations, element types, process groups and their members",
    "names of metadata keys and of columns, versions, the flags of the command line",
    "words that do not look like a name, such as those of layers: --strings all replaces them",
)
"""What `redact` leaves as it is, in words."""

_WHOLE_KEYS: Final = frozenset({"job.error"})
_ARGUMENT_KEYS: Final = frozenset({"job.argv"})
_PLAIN_KEYS: Final = ("prism.version", "torch.version", "created", "job.status")
_PLAIN_PREFIXES: Final = ("record.", "slice.", "clock.offset", "recover.")
_WHOLE_KINDS: Final = frozenset({"arg", "text"})
"""Classes of ordinary words: replaced where they stood alone, and not looked for inside other texts."""

_SURE_BYTES: Final = 6
"""A secret of at least this many bytes is looked for in all bytes; shorter ones, which chance may form, in texts."""


@dataclass(frozen=True)
class RedactReport:
    """What was replaced: distinct secrets by class, and what was dropped. `reproducible`: a key was given."""

    counts: Mapping[str, int]
    num_texts: int
    num_texts_changed: int
    num_payloads_dropped: int
    num_attachments_dropped: int
    num_bytes_checked: int
    reproducible: bool


def redact(
    source: TraceInput,
    output: str | os.PathLike[str],
    *,
    key: str | bytes | None = None,
    names: Iterable[str] = (),
    keep_payloads: bool = False,
    all_strings: bool = False,
    overwrite: bool = False,
) -> RedactReport:
    """Writes `source` with pseudonyms in place of names; see REDACTED and KEPT. `output` appears only when it is sure.

    At the end the whole output is read again, decompressed, and searched for every text that was replaced.

    Args:
        source: a finished trace.
        output: the file to create.
        key: makes pseudonyms reproducible: the same name gives the same pseudonym under the same key (HMAC-SHA256).
            Keep it secret: who has it can try names. Without it each call has a random one.
        names: further words to replace, such as the name of a project; also inside longer words.
        keep_payloads: keeps payloads and attachments, whose bytes are not changed (and are searched at the end).
        all_strings: replaces every label, name and description, not only what looks like a secret.
        overwrite: replaces a file that exists.

    Raises:
        TraceResultError: a secret is still in the output (in a payload, say); nothing is written.
        TraceFormatError: the source is broken.
        TraceWriteError: the result cannot be written, or exists.
    """
    if key is not None and not key:
        raise TraceUsageError("an empty key protects nothing: leave it out, or give one")
    secret_key = random_source.token_bytes(32) if key is None else key.encode() if isinstance(key, str) else key
    names = pseudonymiser_names(names)
    with TraceReader(source) as reader:
        made = Pseudonymiser(secret_key, names=names)
        _learn(reader, made)
        job = _Redaction(reader, made, keep_payloads=keep_payloads, all_strings=all_strings)
        pairs = job.metadata()
        with new_trace(output, like=reader, metadata=pairs, overwrite=overwrite) as writer:
            job.copy(writer)
            writer.close()
            checked = check_absent(writer.path, made.secrets)
        return RedactReport(
            made.counts,
            len(job.texts),
            sum(before != after for before, after in job.texts.items()),
            0 if keep_payloads else len(reader.payload_digests),
            0 if keep_payloads else len(reader.attachments),
            checked,
            key is not None,
        )


def pseudonymiser_names(names: Iterable[str]) -> tuple[str, ...]:
    """The further names, of which none may be too short to be told from chance."""
    chosen = tuple(names)
    for name in chosen:
        if is_too_short(name):
            raise TraceUsageError(f"the name {name!r} is shorter than 3 characters: it would be found everywhere")
    return chosen


def is_too_short(name: str) -> bool:
    """Whether a name would be found by chance: 3 letters are enough, or 2 of the wide characters of East Asia."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name) < 3


def _learn(reader: TraceReader, made: Pseudonymiser) -> None:
    for key, value in reader.metadata.items():
        if not key.startswith(_PLAIN_PREFIXES) and key not in _PLAIN_KEYS:
            made.learn(value, key=key)
    for group in reader.groups.values():
        made.learn(group.name)
        made.learn(group.description)
    seen: set[str] = set()
    for _, _, columns in _all_columns(reader):
        for column in columns.values():
            if is_text_column(column):
                for text in used_values(column):
                    if text not in seen:
                        seen.add(text)
                        made.learn(text)


def _all_columns(reader: TraceReader) -> Iterator[tuple[TableKind, int, dict[str, Column]]]:
    for rank in reader.ranks:
        for kind in TABLES:
            for table in iter_tables(reader, kind, rank):
                yield kind, rank, table.columns()


class _Redaction:
    """One copy in the making. `texts` remembers every text of tables and groups, before and after."""

    def __init__(self, reader: TraceReader, made: Pseudonymiser, *, keep_payloads: bool, all_strings: bool) -> None:
        self._reader, self._made = reader, made
        self._keep_payloads, self._all_strings = keep_payloads, all_strings
        self.texts: dict[str, str] = {}

    def _text(self, text: str) -> str:
        known = self.texts.get(text)
        if known is None:
            known = self._made.whole(text) if self._all_strings else self._made.replace(text)
            self.texts[text] = known
        return known

    def metadata(self) -> dict[str, str]:
        """The metadata of the copy."""
        pairs = {}
        for key, value in self._reader.metadata.items():
            if key.startswith(ATTACHMENT_PREFIX):
                if self._keep_payloads:
                    pairs[key] = value
                continue
            pairs[self._made.replace(key)] = self._value(key, value)
        return pairs if self._keep_payloads else pairs | still_promised(pairs, lost={"payload"})

    def _value(self, key: str, value: str) -> str:
        if key in _PLAIN_KEYS or key.startswith(_PLAIN_PREFIXES):
            return value
        if key in _ARGUMENT_KEYS:
            return self._made.arguments(value)
        if key in _WHOLE_KEYS or self._all_strings:
            return self._made.whole(value)
        return self._made.replace(value)

    def copy(self, writer: TraceWriter) -> None:
        """Writes groups, tables and, if they are kept, payloads."""
        for _, group in sorted(self._reader.groups.items()):
            writer.add_group(self._group(group))
        for kind, rank, columns in _all_columns(self._reader):
            changed = {name: self._column(column) for name, column in columns.items()}
            add_rows(writer, kind, rank, {name: column for name, column in changed.items() if column is not None})
        if self._keep_payloads:
            for digest in self._reader.payload_digests:
                copy_payload(self._reader, writer, digest)
        counts = " ".join(f"{kind}={number}" for kind, number in self._made.counts.items())
        writer.set_metadata("redact.counts", counts)

    def _group(self, group: ProcessGroup) -> ProcessGroup:
        return replace(group, name=self._text(group.name), description=self._text(group.description))

    def _column(self, column: Column) -> Column | None:
        if is_digest_column(column):
            return column if self._keep_payloads else None
        if not is_text_column(column):
            return column
        assert isinstance(column, DictionaryColumn)
        used = set(used_values(column))
        return DictionaryColumn(column.codes, tuple(self._text(text) if text in used else "" for text in column.values))


def check_absent(path: str, secrets: Mapping[str, str]) -> int:
    """Reads a whole trace, decompressed, and refuses it when a secret is in it; returns how many bytes were read.

    Texts are searched for every secret; all other bytes for those that chance does not form.
    """
    checked = 0
    everywhere = {text.encode("utf-8"): (text, kind) for text, kind in secrets.items() if kind not in _WHOLE_KINDS}
    everywhere = {raw: item for raw, item in everywhere.items() if len(raw) >= _SURE_BYTES}
    for where, raw in _all_bytes(path):
        checked += len(raw)
        for needle, (text, kind) in everywhere.items():
            if needle in raw and boundary(text, kind).search(raw.decode("utf-8", "replace")):
                raise _still_there(kind, where, text)
    with TraceReader(path) as reader:
        for text in _all_texts(reader):
            for secret, kind in secrets.items():
                if text == secret if kind in _WHOLE_KINDS else remains(text, secret, kind):
                    raise _still_there(kind, "a text", secret)
    return checked


def _still_there(kind: str, where: str, secret: str) -> TraceResultError:
    message = (
        f"a {kind} of the source ({len(secret)} characters) is still in {where} of the result, so nothing was written: "
        "drop payloads, replace all strings, or give the word as a name"
    )
    return TraceResultError(message)


def _all_texts(reader: TraceReader) -> Iterator[str]:
    """Every distinct text of a trace."""
    seen = set(reader.metadata) | set(reader.metadata.values())
    for group in reader.groups.values():
        seen |= {group.name, group.description}
    yield from seen
    for _, _, columns in _all_columns(reader):
        for name, column in columns.items():
            for text in (name, *(used_values(column) if is_text_column(column) else ())):
                if text not in seen:
                    seen.add(text)
                    yield text


def _all_bytes(path: str) -> Iterator[tuple[str, bytes]]:
    """Every meta section, every decompressed stream and payload of a file, with the name of the place."""
    source = PathSource(path)
    try:
        _, offset = read_header(source)
        yield "the header", bytes(source.read_at(0, offset))
        while offset + FRAME_BYTES <= source.size and bytes(source.read_at(offset, 4)) == container.MARKER:
            frame, meta = read_meta(source, offset, limit=MAX_META_BYTES)
            place = f"the record at byte {offset}"
            yield place, meta
            start = offset + frame.data_start
            if frame.kind == RecordKind.CHUNK:
                position = start
                for stream in metas.parse_chunk(meta, path=path, offset=offset).streams:
                    stored = source.read_at(position, stream.stored_length)
                    if zlib.crc32(stored) != stream.crc:
                        raise TraceDataError("a stream changed while it was checked", path=path, offset=position)
                    yield place, bytes(stream_bytes(stream, stored, path=path, offset=position))
                    position += stream.stored_length
            offset += frame.length
    finally:
        source.close()
    with TraceReader(path) as reader:
        for digest in reader.payload_digests:
            yield f"payload {digest.hex()}", reader.payload(digest)


def describe_rules() -> dict[str, Any]:
    """What is redacted and what is kept, for people and programs."""
    return {"redacted": list(REDACTED), "kept": list(KEPT)}
