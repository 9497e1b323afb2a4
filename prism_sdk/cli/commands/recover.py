"""``prism recover``: prints what was saved. Recovering is the work of ``prismtrace.recover``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import echo_json, format_bytes, json_ready
from prism_sdk.cli.outputs import check_output
from prism_sdk.errors import ExitCode, UnreadableError, UsageError
from prism_sdk.wording import counted


@click.command("recover")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The file to write."
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(file: Path, output: Path, overwrite: bool, as_json: bool) -> int:
    """Save every whole part of a trace file that was cut off or damaged into a new, finished file.

    The damaged file is not changed. The exit code is 0 when the file was whole, 3 when anything is lost or may be:
    bytes that could not be used, or an end that was never written.

    \b
    Example, after a run was killed:
        prism recover real.prism -o saved.prism
    """
    import prismtrace

    check_output(output, overwrite=overwrite, sources=[file])
    _refuse_shards(file)
    report = prismtrace.recover(file, output, overwrite=overwrite)
    code = ExitCode.OK if report.was_finished and not report.lost else ExitCode.UNREADABLE
    if as_json:
        echo_json({"file": file, "output": output, "lost_bytes": report.lost_bytes, **json_ready(report)})
        return code
    rows = f"{counted(report.num_rows, 'row')} in {counted(report.num_chunks, 'chunk')}"
    click.echo(f"wrote {output}: {rows}, {counted(report.num_payloads, 'payload')}")
    if report.was_finished and not report.lost:
        click.echo("the file was whole: nothing had to be recovered")
    for part in report.lost:
        click.echo(f"lost bytes {part.start} to {part.end} ({format_bytes(part.end - part.start)}): {part.reason}")
    if not report.was_finished and not report.lost:
        click.echo(f"the file has no index: what the writer meant to add from byte {file.stat().st_size} on is missing")
    return code


def _refuse_shards(file: Path) -> None:
    """What a killed run leaves is a folder of shards beside its output, which the next run looks after."""
    parts = file if file.is_dir() else file.with_name(file.name + ".parts")
    if file.exists() and not file.is_dir():
        return
    if not any(parts.glob("rank-*.prism")):
        if file.is_dir():
            raise UnreadableError(str(file), reason="it is a folder without shards of a run", hint="give a trace file")
        return  # the library says that there is no such file
    output = parts.with_name(parts.name.removesuffix(".parts"))
    raise UsageError(
        f"{parts} is what a killed run has left: a folder with a shard for each rank, not a trace file",
        hint=f"the next run that writes {output} joins them into {output}.recovered first (if the run is not going on "
        "still); a single shard can be given here",
    )
