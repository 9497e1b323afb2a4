"""Checks where a command is to write, before it works; it writes nothing. Whoever writes checks again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from prism_sdk.errors import OutputExistsError, UsageError
from prism_sdk.writing import file_in_path

__all__ = ["check_folder", "check_output", "overwrite_option"]

F = TypeVar("F", bound=Callable[..., Any])


def overwrite_option(function: F) -> F:
    """Adds ``--overwrite`` to a command."""
    return click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")(function)


def check_folder(output: Path) -> None:
    """Whether there can be a file of this name.

    Raises:
        click.BadParameter: it is empty, or "-", a folder, a device, a pipe or a socket, or its folder does not exist.
    """
    if output == Path():
        raise click.BadParameter("it is empty, or . which is a folder; give a file name.", param_hint="'--output'")
    if str(output) == "-":
        raise click.BadParameter("a file is written, not standard output; give it a name.", param_hint="'--output'")
    if output.is_dir():
        raise click.BadParameter(f"{output} is a folder; give a file name.", param_hint="'--output'")
    if output.exists() and not output.is_file():
        message = f"{output} is a device, a pipe or a socket; give a file name."
        raise click.BadParameter(message, param_hint="'--output'")
    if not output.parent.is_dir():
        blocking = file_in_path(output)
        if blocking is not None:
            raise click.BadParameter(f"{blocking} is a file and no folder.", param_hint="'--output'")
        raise click.BadParameter(f"there is no folder {output.parent}; create it first.", param_hint="'--output'")


def check_output(output: Path, *, overwrite: bool, sources: Sequence[Path] = ()) -> None:
    """Whether ``output`` may be written; ``sources`` are what the command reads and must not replace.

    Raises:
        click.BadParameter: there cannot be a file of this name.
        UsageError: it is one of the sources.
        OutputExistsError: it exists.
    """
    check_folder(output)
    for source in sources:
        if output.exists() and source.exists() and output.samefile(source):
            raise UsageError(f"the output {output} is {source}, which is to be read", hint="give -o another name")
    if os.path.lexists(output) and not overwrite:
        raise OutputExistsError(str(output))
