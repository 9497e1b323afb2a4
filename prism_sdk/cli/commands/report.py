"""``prism report``: writes the page of a trace. Its content is the work of ``prism_sdk.report``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import format_bytes
from prism_sdk.cli.outputs import check_output
from prism_sdk.cli.parsing import RANKS, STEPS, once
from prism_sdk.errors import ExitCode
from prism_sdk.runtime.config import StepRange


@click.command("report")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html", required=True,
              help="The page to write.")  # fmt: skip
@click.option("--compare", type=click.Path(path_type=Path), metavar="REAL",
              help="A real run of the same job, drawn beside it.")  # fmt: skip
@click.option("--step", type=click.IntRange(min=0), metavar="N",
              help="The step of the pipeline chart; the one of median length when left out.")  # fmt: skip
@once("--steps", type=STEPS, metavar="A:B", help="Analyse only these steps (B exclusive).")
@once("--ranks", type=RANKS, metavar="LIST", help="Analyse only these ranks, such as 0,4-7.")
@click.option("--overwrite", is_flag=True, help="Replace the page if it exists.")
def command(
    file: Path,
    output: Path,
    compare: Path | None,
    step: int | None,
    steps: StepRange | None,
    ranks: tuple[int, ...] | None,
    overwrite: bool,
) -> int:
    """Write one self-contained HTML page of a trace: pipeline, heat map, bars, memory, traffic, critical path.

    The page needs no network and no other file.

    \b
    Example:
        prism report real.prism -o report.html
        prism report emulated.prism --compare real.prism -o report.html
    """
    from prism_sdk.report import report_content, write_report

    check_output(output, overwrite=overwrite, sources=[file, *filter(None, [compare])])
    chosen = None if steps is None else steps.as_range()
    content = report_content(file, compare=compare, step=step, ranks=ranks, steps=chosen,
                             report=lambda line: click.echo(f"prism: {line}", err=True))  # fmt: skip
    size = write_report(content, output, overwrite=overwrite)
    click.echo(f"wrote {output} ({format_bytes(size)})")
    for note in content["notes"]:
        click.echo(f"note: {note}")
    return ExitCode.OK
