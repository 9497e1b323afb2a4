"""``prism compact``: stores equal structure once. Finding it is the work of ``prismtrace.compact``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import Ticker, echo_json, format_bytes, json_ready
from prism_sdk.cli.outputs import check_output
from prism_sdk.errors import ExitCode
from prism_sdk.wording import counted


@click.command("compact")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The file to write."
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(source: Path, output: Path, overwrite: bool, as_json: bool) -> int:
    """Write the same trace smaller: the structure that ranks share is stored once, as a role.

    Nothing is lost; readers give the same columns. The more ranks do the same, the more it saves.

    \b
    Example:
        prism compact job.prism -o small.prism
    """
    import prismtrace

    check_output(output, overwrite=overwrite, sources=[source])
    progress = Ticker(f"storing once what ranks of {source} share", of="ranks")
    report = prismtrace.compact(source, output, overwrite=overwrite, progress=progress)
    before, after = source.stat().st_size, output.stat().st_size
    if as_json:
        echo_json({"file": source, "output": output, "bytes_before": before, "bytes": after, **json_ready(report)})
        return ExitCode.OK
    if report.is_copy:
        click.echo(f"wrote {output}: {format_bytes(after)}, a copy: written anew it would be no smaller")
        return ExitCode.OK
    click.echo(
        f"wrote {output}: {format_bytes(after)}, before {format_bytes(before)}; {report.num_members} of "
        f"{counted(report.num_ranks, 'rank')} in {counted(report.num_roles, 'role')}, "
        f"{report.num_shared} of them with their role's times"
    )
    return ExitCode.OK
