"""Chooses importers and exporters for a conversion, and runs them so that the output is whole or not there.

It knows no format but the trace itself; formats come with plugins.
"""

from __future__ import annotations

import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from prism_sdk.abc import ConversionReport, TraceExporter, TraceImporter
from prism_sdk.damage import damage_of
from prism_sdk.errors import (
    OutputError,
    OutputExistsError,
    PrismError,
    UnknownFormatError,
    UnknownNameError,
    UnreadableError,
    UsageError,
)
from prism_sdk.plugins import PluginManager
from prism_sdk.writing import file_in_path

__all__ = ["KNOWN_PLUGINS", "convert", "head_of", "to_install"]

HEAD_BYTES: Final = 1 << 16
_TRACE_MAGIC: Final = b"\x89PRSM"
_PACKED: Final = {
    b"\x1f\x8b": "gzip, compressed more than once",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ": "xz-compressed",
}
KNOWN_PLUGINS: Final = {
    "prismtrace-kineto": "PyTorch profiler and Chrome JSON (.json, .json.gz)",
    "prismtrace-chakra": "Chakra .et and PyTorch execution traces",
    "prismtrace-flight-recorder": "NCCL flight-recorder dumps",
    "prismtrace-perfetto": "Perfetto (.perfetto-trace) and Chrome JSON for HolisticTraceAnalysis",
    "prismtrace-arrow": "Arrow and Parquet",
}
"""Distributions of this project that bring formats -> what they bring."""


def convert(
    manager: PluginManager,
    sources: Sequence[Path],
    *,
    output: Path,
    importer: str | None = None,
    exporter: str | None = None,
    options: Mapping[str, str] | None = None,
    overwrite: bool = False,
    report: Callable[[str], None],
) -> tuple[str, ConversionReport]:
    """Convert ``sources`` to ``output``, by way of a trace where both are of other formats.

    Returns:
        What was used (``kineto -> trace -> perfetto``), and the report of the last step with the notes of all.

    Raises:
        UsageError: the choice makes no sense, such as a trace into a trace, or the output cannot be one.
        UnknownFormatError: nobody, or more than one importer, knows the sources, or nobody writes the output.
        UnreadableError: a source cannot be read.
        OutputExistsError: the output exists.
        OutputError: it cannot be written.
    """
    heads = {source: head_of(source) for source in sources}
    traces = [source for source, head in heads.items() if head.startswith(_TRACE_MAGIC)]
    _check_output(output, sources, overwrite=overwrite)
    settings = dict(options or {})
    if traces and len(sources) > 1:
        hint = "`prism merge` joins traces; convert the other files alone"
        raise UsageError(f"{traces[0]} is a trace already, and there are other sources", hint=hint)
    to_trace = exporter is None and output.suffix == ".prism"
    if traces:
        _check_unpacked(traces[0])
        if to_trace or importer is not None:
            hint = "`prism slice` cuts, `prism compact` shrinks, `prism merge` joins; --to names another format"
            raise UsageError(f"{traces[0]} is a trace already", hint=hint)
        writer = _choose_exporter(manager, output, exporter)
        return f"trace -> {writer.name}", _export(writer, traces[0], output, settings, report, overwrite=overwrite)
    reader = _choose_importer(manager, heads, importer)
    if to_trace:
        return f"{reader.name} -> trace", _import(reader, sources, output, settings, report, overwrite=overwrite)
    writer = _choose_exporter(manager, output, exporter)
    with _beside(output, suffix=".prism") as between:
        first = _import(reader, sources, between, settings, report, overwrite=True)
        second = _export(writer, between, output, {}, report, overwrite=overwrite, of=sources[0])
    counts = {**{f"import_{name}": number for name, number in first.counts.items()}, **second.counts}
    notes = (*first.notes, *second.notes)
    return f"{reader.name} -> trace -> {writer.name}", replace(second, counts=counts, notes=notes)


def _check_unpacked(trace: Path) -> None:
    with open(trace, "rb") as file:
        if file.read(len(_TRACE_MAGIC)) != _TRACE_MAGIC:
            hint = "unpack it first (gzip -d); `prism compact` makes a smaller file that every command reads"
            raise UsageError(f"{trace} is a trace packed by gzip", hint=hint)


def head_of(source: Path) -> bytes:
    """The first 64 KiB of a file, decompressed where it is gzip; empty for a folder.

    Raises:
        UnreadableError: it does not exist, is empty, is neither file nor folder, or may not be read.
    """
    try:
        mode = source.stat().st_mode
        if stat.S_ISDIR(mode):
            if not any(source.iterdir()):
                raise UnreadableError(str(source), reason="the folder is empty")
            return b""
        if not stat.S_ISREG(mode):
            raise UnreadableError(str(source), reason="neither a file nor a folder", hint="write it to a file first")
        with open(source, "rb") as file:
            raw = file.read(HEAD_BYTES)
    except OSError as error:
        raise UnreadableError(str(source), reason=error.strerror or type(error).__name__) from error
    if not raw:
        raise UnreadableError(str(source), reason="the file is empty")
    if not raw.startswith(b"\x1f\x8b"):
        return raw
    try:
        return zlib.decompressobj(31).decompress(raw, HEAD_BYTES)
    except zlib.error as error:
        raise UnreadableError(str(source), reason=f"damaged gzip ({error})") from error


def _check_output(output: Path, sources: Sequence[Path], *, overwrite: bool) -> None:
    for source in sources:
        if output.exists() and output.samefile(source):
            raise UsageError(f"the output {output} is one of the sources", hint="give -o another name")
    if output.is_dir() and any(output.iterdir()):
        raise UsageError(f"the output {output} is a folder that is not empty", hint="name a new one")
    if output.exists() and not output.is_dir() and not output.is_file():
        raise UsageError(f"the output {output} is a device, a pipe or a socket", hint="name a file")
    if os.path.lexists(output) and not output.is_dir() and not overwrite:
        raise OutputExistsError(str(output))
    if not output.absolute().parent.is_dir():
        blocking = file_in_path(output)
        if blocking is not None:
            raise UsageError(f"{blocking} is a file and no folder", hint="name another folder for the output")
        raise UsageError(f"there is no folder {output.parent}", hint="create it first")


def _installed(kind: str, known: Mapping[str, Any]) -> str:
    listing = "".join(f"\n    {name}: {item.description}" for name, item in sorted(known.items()))
    return f"installed {kind}: {listing or 'none'}"


def to_install(manager: PluginManager) -> str:
    """Which plugins of this project are not installed, and which are broken; empty when there is nothing to say."""
    records = manager.records()
    present = {record.distribution for record in records}
    missing = [f"{name} for {what}" for name, what in KNOWN_PLUGINS.items() if name not in present]
    broken = [f"{record.name} is broken: {record.reason}" for record in records if record.status == "broken"]
    return "; ".join([*(["to install: " + ", ".join(missing)] if missing else []), *broken])


@contextmanager
def _with_advice(manager: PluginManager) -> Iterator[None]:
    """Adds to the error for an unknown name which plugin may have it."""
    try:
        yield
    except UnknownNameError as error:
        error.hint = "\n  ".join(part for part in (error.hint, to_install(manager)) if part)
        raise


def _choose_importer(manager: PluginManager, heads: Mapping[Path, bytes], name: str | None) -> TraceImporter:
    if name is not None:
        with _with_advice(manager):
            return manager.importer(name)
    known = manager.importers()
    chosen: dict[Path, list[str]] = {}
    for source, head in heads.items():
        chosen[source] = [found for found, item in known.items() if _recognises(item, source, head)]
    advice = "\n  ".join(part for part in (_installed("importers", known), to_install(manager)) if part)
    for source, names in chosen.items():
        if not names:
            damage = damage_of(source, heads[source])
            if damage is not None:
                raise UnreadableError(str(source), reason=damage, hint="get the whole file")
            packed = next((what for magic, what in _PACKED.items() if heads[source].startswith(magic)), None)
            what = f"{source} is {packed}; unpack it first" if packed else f"no importer recognises {source}"
            raise UnknownFormatError(what, file=str(source), known=tuple(known), hint=advice, is_unreadable=True)
    common = set.intersection(*(set(names) for names in chosen.values()))
    if len(common) == 1:
        return known[common.pop()]
    if common:
        listing = ", ".join(sorted(common))
        first = next(iter(chosen))
        message = f"more than one importer recognises {first}: {listing}"
        raise UnknownFormatError(message, file=str(first), known=tuple(sorted(common)), hint="say which: --from NAME")
    listing = "; ".join(f"{source}: {', '.join(names)}" for source, names in list(chosen.items())[:4])
    message = f"the sources are of different formats ({listing})"
    raise UnknownFormatError(message, file=str(next(iter(chosen))), known=tuple(known), hint="convert them one by one")


def _recognises(importer: TraceImporter, source: Path, head: bytes) -> bool:
    try:
        return bool(importer.recognises(source, head))
    except Exception:
        return False


def _choose_exporter(manager: PluginManager, output: Path, name: str | None) -> TraceExporter:
    if name is not None:
        with _with_advice(manager):
            return manager.exporter(name)
    known = manager.exporters()
    endings = [(suffix, found) for found, item in known.items() for suffix in item.suffixes]
    matches = [(len(suffix), found) for suffix, found in endings if output.name.endswith(suffix)]
    longest = max((length for length, _ in matches), default=0)
    names = sorted({found for length, found in matches if length == longest})
    if len(names) == 1:
        return known[names[0]]
    if names:
        message = f"more than one exporter writes {output.name}: {', '.join(names)}"
        raise UnknownFormatError(message, file=str(output), known=tuple(names), hint="say which: --to NAME")
    listing = ", ".join(sorted({suffix for suffix, _ in endings} | {".prism"}))
    advice = "\n  ".join(part for part in (_installed("exporters", known), to_install(manager)) if part)
    message = f"no exporter writes {output.name} (known endings: {listing}; --to NAME names one for any other)"
    raise UnknownFormatError(message, file=str(output), known=tuple(known), hint=advice)


def _import(
    importer: TraceImporter,
    sources: Sequence[Path],
    output: Path,
    options: Mapping[str, str],
    report: Callable[[str], None],
    *,
    overwrite: bool,
) -> ConversionReport:
    with _beside(output) as temporary:
        with _plugin_errors(f"the importer {importer.name!r}", str(sources[0]), temporary, output):
            done = importer.import_trace(sources, output=temporary, options=options, report=report)
        _put(temporary, output, overwrite=overwrite)
    return replace(done, output=output)


def _export(
    exporter: TraceExporter,
    source: Path,
    output: Path,
    options: Mapping[str, str],
    report: Callable[[str], None],
    *,
    overwrite: bool,
    of: Path | None = None,
) -> ConversionReport:
    with _beside(output) as temporary:
        with _plugin_errors(f"the exporter {exporter.name!r}", str(of or source), temporary, output):
            done = exporter.export_trace(source, output=temporary, options=options, report=report)
        _put(temporary, output, overwrite=overwrite)
    return replace(done, output=output)


@contextmanager
def _plugin_errors(who: str, file: str, temporary: Path, output: Path) -> Iterator[None]:
    """A plugin that raises something of its own becomes one message that names it; of two names the user knows one."""
    from prismtrace import PrismTraceError, TraceWriteError

    try:
        yield
    except OutputError as error:
        if temporary.name not in str(error.file):
            raise
        raise OutputError(str(output), reason=error.reason, hint=error.hint) from error
    except TraceWriteError as error:
        if temporary.name not in error.path:
            raise
        raise error.of(str(output)) from error
    except (PrismError, PrismTraceError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and temporary.name in str(error.filename):
            raise OutputError(str(output), reason=error.strerror or type(error).__name__) from error
        reason = f"{who} failed on it: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UnreadableError(file, reason=reason.rstrip(": "), hint="PRISM_DEBUG=1 shows where") from error


@contextmanager
def _beside(output: Path, *, suffix: str = "") -> Iterator[Path]:
    """A private name in the folder of the output that keeps its endings; whatever is left there is removed."""
    temporary = output.with_name(f".tmp{os.getpid()}.{output.name}{suffix}")
    try:
        yield temporary
    finally:
        with suppress(OSError):  # what went wrong before is to be said
            if temporary.is_dir() and not temporary.is_symlink():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)


def _put(temporary: Path, output: Path, *, overwrite: bool) -> None:
    if not temporary.exists():
        raise OutputError(str(output), reason="the plugin wrote nothing")
    try:
        if output.exists() and not output.is_dir() and not overwrite:
            raise OutputExistsError(str(output))
        os.replace(temporary, output)
    except OSError as error:
        raise OutputError(str(output), reason=error.strerror or type(error).__name__) from error
