"""The options of commands that spread their work over machines. Spreading itself is ``prism_sdk.runtime.engines``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

ADDRESS = click.option(
    "--address", metavar="HOST:PORT", help="Of the Ray cluster.  [default: a new one on this machine]"
)  # fmt: skip


def engine_option(text: str) -> Callable[[Any], Any]:
    """``--engine``, with what it does to this command."""
    return click.option("--engine", type=click.Choice(["ray"]), help=text)
