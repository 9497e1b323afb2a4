"""The exporters ``kineto`` and ``chrome``: a trace -> JSON files. Building the events is other modules' work."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final, cast

from prism_sdk.abc import ConversionReport, TraceExporter
from prism_sdk.errors import OutputError, OutputExistsError, UsageError
from prismtrace import TraceFormatError, TraceReader
from prismtrace_kineto import lossless, restore
from prismtrace_kineto.chrome import ChromeJob
from prismtrace_kineto.importer import ATTACHMENT
from prismtrace_kineto.packing import PackError

_REPORT_SECONDS: Final = 2.0


class _JsonExporter(TraceExporter):
    """What both exporters share. A name that ends in .json or .json.gz is one file, others are folders."""

    def export_trace(
        self, source: Path, *, output: Path, options: Mapping[str, str], report: Callable[[str], None]
    ) -> ConversionReport:  # fmt: skip
        """See the base class. Imported JSON is used where there is some: lossless=true demands it, false forbids it."""
        for name, value in options.items():
            if name not in ("lossless", "events"):
                raise UsageError(
                    f"-O {name}=...: the exporter {self.name} has no such option", hint="it has events, lossless"
                )
            if value.lower() not in ("true", "false"):
                raise UsageError(f"-O {name}={value} is neither true nor false")
        wanted = options.get("lossless", "true" if self.name == "kineto" else "").lower()
        with TraceReader(source) as reader:
            blocks = sorted(
                (name for name in reader.attachments if name == ATTACHMENT or name.startswith(ATTACHMENT + ".")),
                key=lambda n: (len(n), n),
            )
            if wanted == "true" and not blocks:
                raise UsageError(
                    f"{source} holds no imported Kineto events",
                    hint="import with -O lossless=true first, or export any trace with --to chrome",
                )
            if not wanted and any(key.startswith("slice.") for key in reader.metadata):
                wanted = "false"  # the attachment still holds the whole job
            if blocks and wanted != "false":
                return _export_lossless(reader, blocks, output, report)
            job = ChromeJob(reader, with_events=options.get("events", "true").lower() == "true")
            return _export_units(job, output, report)


class KinetoExporter(_JsonExporter):
    """The JSON that a lossless import read."""

    name = "kineto"
    description = "Kineto JSON again, event for event, from a trace that was imported with lossless=true"
    suffixes = (".pt.trace.json.gz", ".pt.trace.json")


class ChromeExporter(_JsonExporter):
    """Chrome trace JSON from any trace."""

    name = "chrome"
    description = (
        "Chrome trace JSON for chrome://tracing, Perfetto and HolisticTraceAnalysis (-O events=false: units only)"
    )
    suffixes = (".json.gz", ".json")


def _is_file(output: Path) -> bool:
    return output.name.endswith((".json", ".json.gz"))


@contextlib.contextmanager
def _opened(path: Path, *, packed: bool) -> Iterator[IO[bytes]]:
    with path.open("wb") as raw:
        if packed:
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
                yield cast("IO[bytes]", file)
        else:
            yield raw


@contextlib.contextmanager
def _target(output: Path) -> Iterator[Path]:
    """A temporary file or folder that becomes `output` when the block ends well."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        if _is_file(output):
            yield temporary
            os.replace(temporary, output)
        else:
            if output.exists():
                raise OutputExistsError(str(output), hint="name a new folder, or a file that ends in .json")
            temporary.mkdir()
            yield temporary
            os.replace(temporary, output)
    except OSError as error:
        raise OutputError(str(output), reason=error.strerror or str(error)) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _export_lossless(
    reader: TraceReader, blocks: list[str], output: Path, report: Callable[[str], None]
) -> ConversionReport:  # fmt: skip
    count = files = 0
    told = time.monotonic()
    with _target(output) as target:
        for block in blocks:
            try:
                columns, documents = lossless.decode(reader.attachment(block))
            except PackError as error:
                raise TraceFormatError(f"attachment {block!r}: {error}", path=str(reader.path), offset=0) from error
            if _is_file(output) and (len(blocks) > 1 or len(documents) > 1):
                raise UsageError(f"{output} is one file, the trace has {len(documents)} ranks", hint="name a folder")
            for number, around in enumerate(documents):
                path = target if _is_file(output) else target / f"rank-{around.rank}.pt.trace.json.gz"
                with _opened(path, packed=not _is_file(output) or output.name.endswith(".gz")) as file:
                    count += restore.write_document(columns, number, around, file)
                files += 1
                if time.monotonic() - told > _REPORT_SECONDS:
                    told = time.monotonic()
                    report(f"{files} ranks written")
    notes = ("order, keys and values of the events are those of the imported JSON; white space is not",)
    return ConversionReport(output, {"files": files, "rows": count}, notes)


def _export_units(job: ChromeJob, output: Path, report: Callable[[str], None]) -> ConversionReport:
    if not job.ranks:
        raise UsageError("the trace has no units and no events", hint="`prism info` shows what it holds")
    count = files = 0
    told = time.monotonic()
    with _target(output) as target:
        if _is_file(output):
            with _opened(target, packed=output.name.endswith(".gz")) as file:
                count += job.write(job.ranks, file)
            files = 1
        else:
            for rank in job.ranks:
                with _opened(target / f"rank-{rank}.json.gz", packed=True) as file:
                    count += job.write((rank,), file)
                files += 1
                if time.monotonic() - told > _REPORT_SECONDS:
                    told = time.monotonic()
                    report(f"{files} of {len(job.ranks)} ranks written")
    return ConversionReport(output, {"files": files, "events": count}, tuple(job.notes()))
