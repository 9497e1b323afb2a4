"""``prism plugins``: prints the records of the plugin manager."""

from __future__ import annotations

import click

from prism_sdk.cli.output import echo_json, echo_table
from prism_sdk.errors import ExitCode


@click.command("plugins")
@click.option("--plugin", "named", metavar="PLUGIN", multiple=True, help="Load this one too: a module or a .py file.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(named: tuple[str, ...], as_json: bool) -> int:
    """List plugins, what each brings, and why one does not load.

    A plugin that does not load disturbs nothing until you name it, so this command then still ends with exit
    code 0; it ends with 1 when a plugin given to --plugin is broken.

    \b
    Example, to try a plugin that you are writing:
        prism plugins --plugin ./my_plugin.py
    """
    from prism_sdk.plugins import PluginManager

    manager = PluginManager(named=named, report=lambda line: click.echo(line, err=True))
    records = manager.records()
    duplicates = manager.duplicates()
    if as_json:
        echo_json(
            {
                "plugins": [record.to_dict() for record in records],
                "duplicates": [
                    {"kind": error.kind, "name": error.name, "distributions": error.distributions}
                    for error in duplicates
                ],
            }
        )
    else:
        rows = []
        for record in records:
            brings = [f"{kind} {', '.join(names)}" for kind, names in record.brings.items()]
            brings += ["told of runs"] if record.observes else []
            version = " ".join(part for part in (record.distribution, record.version) if part) or record.module
            shown = "; ".join(brings) or "nothing: it registers no object and is told of no run"
            if record.status != "ok":
                shown = f"{record.status}: {record.reason}"
            rows.append((record.name, record.origin, version, shown))
        if rows:
            echo_table(("plugin", "origin", "from", "brings"), rows)
        else:
            click.echo("no plugin is installed")
        for error in duplicates:
            click.echo(f"warning: {error.message}")
    broken = {record.name for record in records if record.status == "broken" and record.origin == "named"}
    broken |= {record.name for record in records if record.status == "broken" and record.name in named}
    return ExitCode.FINDING if broken else ExitCode.OK
