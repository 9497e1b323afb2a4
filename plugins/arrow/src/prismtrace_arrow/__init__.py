"""Registers the importers and exporters of Arrow and Parquet with Prism; imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_sdk import hookimpl

if TYPE_CHECKING:
    from prism_sdk.abc import TraceExporter, TraceImporter


@hookimpl
def prism_register_importers() -> list[TraceImporter]:
    """Hand over the importers of this plugin."""
    from prismtrace_arrow.importing import ArrowImporter, ParquetImporter
    from prismtrace_arrow.mapping import TableImporter
    from prismtrace_arrow.straggler import StragglerImporter

    return [ArrowImporter(), ParquetImporter(), StragglerImporter(), TableImporter()]


@hookimpl
def prism_register_exporters() -> list[TraceExporter]:
    """Hand over the exporters of this plugin."""
    from prismtrace_arrow.exporting import ArrowExporter, ParquetExporter

    return [ArrowExporter(), ParquetExporter()]
