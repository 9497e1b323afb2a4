"""Registers the exporter ``perfetto`` with Prism; imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_sdk import hookimpl

if TYPE_CHECKING:
    from prism_sdk.abc import TraceExporter


@hookimpl
def prism_register_exporters() -> list[TraceExporter]:
    """Hand over the exporter of this plugin."""
    from prismtrace_perfetto.exporting import PerfettoExporter

    return [PerfettoExporter()]
