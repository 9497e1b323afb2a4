"""A click group that imports a subcommand's module only when that subcommand runs.

It knows the one-line help of each from a table, so that listing them imports nothing; a test keeps the table true.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """``commands_by_section``: section title -> command name -> one line of help. Modules live in ``package``."""

    def __init__(
        self, *args: Any, commands_by_section: Mapping[str, Mapping[str, str]], package: str, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.commands_by_section = commands_by_section
        self.package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name, in the order of the table."""
        return [name for section in self.commands_by_section.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"{self.package}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with a suggestion for a misspelt name."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(names)}."
            raise click.UsageError(f"there is no command {args[0]!r}.{hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of subcommands, by section, without importing one."""
        width = max(len(name) for name in self.list_commands(ctx))
        for title, section in self.commands_by_section.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in section.items()])
