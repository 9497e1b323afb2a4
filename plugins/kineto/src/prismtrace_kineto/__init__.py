"""Registers the importer ``kineto`` and the exporters ``kineto`` and ``chrome``; imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_sdk import hookimpl

if TYPE_CHECKING:
    from prism_sdk.abc import TraceExporter, TraceImporter


@hookimpl
def prism_register_importers() -> list[TraceImporter]:
    """Hand over the one importer of this plugin."""
    from prismtrace_kineto.importer import KinetoImporter

    return [KinetoImporter()]


@hookimpl
def prism_register_exporters() -> list[TraceExporter]:
    """Hand over both exporters of this plugin."""
    from prismtrace_kineto.exporter import ChromeExporter, KinetoExporter

    return [KinetoExporter(), ChromeExporter()]
