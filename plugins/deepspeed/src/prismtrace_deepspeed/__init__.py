"""Registers the adapter ``deepspeed`` with Prism; imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_sdk import hookimpl

if TYPE_CHECKING:
    from prism_sdk.abc import FrameworkAdapter


@hookimpl
def prism_register_adapters() -> list[FrameworkAdapter]:
    """Hand over the one adapter of this plugin."""
    from prismtrace_deepspeed.adapter import DeepSpeedAdapter

    return [DeepSpeedAdapter()]
