"""``prism convert``: converts between traces and other formats. It chooses nothing: ``prism_sdk.conversion`` does."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import echo_json
from prism_sdk.cli.parsing import key_values
from prism_sdk.errors import ExitCode


@click.command("convert")
@click.argument("sources", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="SRC...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DST", required=True, help="The file to write."
)
@click.option("--from", "importer", metavar="NAME", help="The importer; found from the sources when left out.")
@click.option("--to", "exporter", metavar="NAME", help="The exporter; found from the ending of DST when left out.")
@click.option("--lossless", is_flag=True, help="Import everything that the sources hold, not only what a graph needs.")
@key_values(metavar="KEY=VALUE", help="An option of the plugin.")
@click.option("--plugin", "named", metavar="PLUGIN", multiple=True, help="Load this one too: a module or a .py file.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    sources: tuple[Path, ...],
    output: Path,
    importer: str | None,
    exporter: str | None,
    lossless: bool,
    options: tuple[tuple[str, str], ...],
    named: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
) -> int:
    """Turn files of another format into a trace, or a trace into another format.

    SRC are files or folders of one job. The output appears only when it is complete. `prism plugins` lists the
    formats that are installed.

    \b
    Example:
        prism convert rank0.json.gz rank1.json.gz -o job.prism
        prism convert job.prism -o job.perfetto-trace
    """
    from prism_sdk.conversion import convert
    from prism_sdk.plugins import PluginManager

    manager = PluginManager(named=named, report=lambda line: click.echo(line, err=True))
    manager.check_named()
    settings = dict(options)
    if lossless:
        settings["lossless"] = "true"
    used, report = convert(
        manager,
        sources,
        output=output,
        importer=importer,
        exporter=exporter,
        options=settings,
        overwrite=overwrite,
        report=lambda line: click.echo(line, err=True),
    )
    if as_json:
        echo_json({"sources": sources, "output": output, "used": used, "counts": report.counts, "notes": report.notes})
        return ExitCode.OK
    click.echo(f"wrote {output} ({used})")
    for name, number in report.counts.items():
        click.echo(f"  {name.replace('_', ' ')}: {number}")
    for note in report.notes:
        click.echo(f"note: {note}")
    return ExitCode.OK
