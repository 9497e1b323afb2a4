"""Registers the strategy ``fastest`` with Prism; imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_sdk import hookimpl

if TYPE_CHECKING:
    from prism_sdk.abc import CalibrationStrategy


@hookimpl
def prism_register_strategies() -> list[CalibrationStrategy]:
    """Hand over the one strategy of this plugin."""
    from prismtrace_example.fastest import Fastest

    return [Fastest()]
