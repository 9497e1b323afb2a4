"""``prism merge``: joins trace files. Merging is the work of ``prismtrace.merge``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.errors import ExitCode, UsageError


@click.command("merge")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The file to write."
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
def command(files: tuple[Path, ...], output: Path, overwrite: bool) -> int:
    """Join trace files of one job, for example one a machine, into one.

    Where two files say different things about the same, the later one counts.

    \b
    Example:
        prism merge node0.prism node1.prism -o job.prism
    """
    import prismtrace

    for file in files:
        if output.exists() and file.exists() and output.samefile(file):
            raise UsageError(f"the output {output} is one of the files to merge", hint="give -o another name")
    prismtrace.merge(files, output, overwrite=overwrite)
    click.echo(f"wrote {output} from {len(files)} files")
    return ExitCode.OK
