"""Registers the adapters ``fsdp`` and ``transformers`` with Prism; imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_sdk import hookimpl

if TYPE_CHECKING:
    from prism_sdk.abc import FrameworkAdapter


@hookimpl
def prism_register_adapters() -> list[FrameworkAdapter]:
    """Hand over the adapters of this plugin."""
    from prismtrace_fsdp.adapter import DataParallelAdapter
    from prismtrace_fsdp.routers import RoutersAdapter

    return [DataParallelAdapter(), RoutersAdapter()]
