"""Registers the importers ``chakra`` and ``pytorch_et`` and the exporter ``chakra`` with Prism.

It does not load protobuf or orjson: that happens when a file is read or written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_sdk import hookimpl

if TYPE_CHECKING:
    from prism_sdk.abc import TraceExporter, TraceImporter


@hookimpl
def prism_register_importers() -> list[TraceImporter]:
    """Hand over the two importers."""
    from prismtrace_chakra.importers import ChakraImporter, PyTorchExecutionTraceImporter

    return [ChakraImporter(), PyTorchExecutionTraceImporter()]


@hookimpl
def prism_register_exporters() -> list[TraceExporter]:
    """Hand over the exporter."""
    from prismtrace_chakra.exporter import ChakraExporter

    return [ChakraExporter()]
