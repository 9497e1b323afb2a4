"""Registers the importer ``flight_recorder`` with Prism; reads nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_sdk import hookimpl

if TYPE_CHECKING:
    from prism_sdk.abc import TraceImporter


@hookimpl
def prism_register_importers() -> list[TraceImporter]:
    """Hand over the importer."""
    from prismtrace_flight_recorder.importer import FlightRecorderImporter

    return [FlightRecorderImporter()]
