"""``prism analyze``: prints where the time of a trace went. Analysing is the work of ``prism_sdk.analysis``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import echo_json, json_ready
from prism_sdk.cli.parsing import RANKS, STEPS, Number, once
from prism_sdk.errors import ExitCode
from prism_sdk.runtime.config import StepRange


@click.command("analyze")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False, metavar="[FILE_B]")
@once("--ranks", type=RANKS, metavar="LIST", help="Only these ranks, such as 0,4-7.")
@once("--steps", type=STEPS, metavar="A:B", help="Only these steps (B exclusive).")
@click.option("--repeat", "repeats", type=click.Path(path_type=Path), multiple=True, metavar="FILE",
              help="One more run of the same job, for the run-to-run variation (repeatable).")  # fmt: skip
@click.option("--max-gap-us", type=Number(min=0, max=1e9), default=100.0, show_default=True, metavar="US",
              help="Longer pauses between two units are idle time, not the cost of launching.")  # fmt: skip
@once("--by", metavar="COLUMN",
              help="Also say what units cost by the values of a column, such as prism.part.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    file: Path,
    other: Path | None,
    ranks: tuple[int, ...] | None,
    steps: StepRange | None,
    repeats: tuple[Path, ...],
    max_gap_us: float,
    by: str | None,
    as_json: bool,
) -> int:
    """Say where the time of a job went: parts of a step, critical path, stragglers, bubbles, bandwidths, memory.

    With a second file it explains why the two differ in step time.

    \b
    Example:
        prism analyze real.prism
        prism analyze before.prism after.prism
    """
    from prism_sdk.analysis import analyze, breakdown_of, explain, load_job
    from prism_sdk.analysis.text import format_explanation

    chosen = None if steps is None else steps.as_range()
    max_gap_ns = round(max_gap_us * 1000)
    if other is None:
        analysis = analyze(file, ranks=ranks, steps=chosen, repeats=repeats, max_gap_ns=max_gap_ns, by=by,
                           report=lambda line: click.echo(f"prism: {line}", err=True))  # fmt: skip
        if as_json:
            echo_json(analysis.to_dict())
        else:
            click.echo(analysis.format_table(), nl=False)
        return ExitCode.OK
    if by is not None:
        raise click.UsageError("--by belongs to one file")
    if repeats:
        raise click.UsageError("--repeat belongs to one file; `prism compare` takes repeats of two runs")
    jobs = [load_job(path, ranks=ranks, steps=chosen) for path in (file, other)]
    parts = [breakdown_of(job, max_gap_ns=max_gap_ns) for job in jobs]
    try:
        found = explain(jobs[0], jobs[1], first_parts=parts[0], second_parts=parts[1])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        values = json_ready(found)
        assert isinstance(values, dict)
        echo_json({**values, "difference_ns": found.difference_ns, "sentence": found.sentence})
    else:
        click.echo(format_explanation(found), nl=False)
    return ExitCode.OK
