"""``prism expand``: more data-parallel replicas of a recorded job. The work is that of ``prism_sdk.runtime.roles``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import echo_json, format_bytes, json_ready
from prism_sdk.cli.outputs import check_output
from prism_sdk.errors import ExitCode
from prism_sdk.wording import counted


@click.command("expand")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--dp", "num_replicas", type=click.IntRange(1, 1 << 20), metavar="N", required=True,
              help="How many data-parallel replicas the new job has.")  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The file to write."
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(source: Path, num_replicas: int, output: Path, overwrite: bool, as_json: bool) -> int:
    """Write the graph of the same job with more (or fewer) data-parallel replicas.

    Replicas are found from the process groups. New ones do what the recorded ones do, by turns; groups grow, and
    shards become smaller. Times stay what they are: `prism simulate --cluster` predicts those of larger groups.

    \b
    Example, from 64 ranks of which 8 are replicas to 8,192:
        prism expand job.prism --dp 1024 -o large.prism
    """
    from prism_sdk.runtime.roles.growing import grow

    check_output(output, overwrite=overwrite, sources=[source])
    report = grow(source, output, num_replicas=num_replicas, overwrite=overwrite)
    if as_json:
        echo_json({"file": source, "output": output, "bytes": output.stat().st_size, **json_ready(report)})
        return ExitCode.OK
    click.echo(
        f"wrote {output}: {format_bytes(output.stat().st_size)}; {counted(report.world_size, 'rank')}, "
        f"{counted(report.num_replicas, 'replica')} in place of {report.num_replicas_before}, "
        f"{counted(report.num_groups, 'group')}"
    )
    return ExitCode.OK
