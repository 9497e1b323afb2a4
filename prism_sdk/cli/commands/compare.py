"""``prism compare``: prints a comparison as a table. Comparing is the work of ``prism_sdk.graph.compare``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import echo_json
from prism_sdk.cli.parsing import Number
from prism_sdk.errors import ExitCode
from prism_sdk.wording import ranks_text


@click.command("compare")
@click.argument("real", type=click.Path(path_type=Path), metavar="REAL")
@click.argument("other", type=click.Path(path_type=Path), metavar="OTHER")
@click.option(
    "--real",
    "more_real",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="One more repeat of the real run (repeatable).",
)
@click.option(
    "--other",
    "more_other",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="One more repeat of the other run (repeatable).",
)
@click.option(
    "--max-error",
    type=Number(min=0),
    metavar="PERCENT",
    help="End with exit code 1 when the mean step-time error is above this, or ranks or ends of traces are missing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    real: Path,
    other: Path,
    more_real: tuple[Path, ...],
    more_other: tuple[Path, ...],
    max_error: float | None,
    as_json: bool,
) -> int:
    """Compare two traces of a job: step times, losses, memory, and the order of communication.

    REAL is a trace of `prism observe`; OTHER is compared with it, on the ranks that both have.

    \b
    Example:
        prism compare real.prism emulated.prism

    \b
    Several repeats of each show the spread:
        prism compare real1.prism emulated1.prism --real real2.prism --other emulated2.prism
    """
    from prism_sdk.graph.compare import compare_traces

    comparison = compare_traces([real, *more_real], [other, *more_other])
    if as_json:
        echo_json(comparison.to_dict())
    else:
        click.echo(comparison.format_table(), nl=False)
    if max_error is None:
        return ExitCode.OK
    error = comparison.mean_abs_error_percent
    problems = [f"{name} is unfinished: its end is not held against --max-error" for name in comparison.unfinished]
    if comparison.missing_ranks:
        ranks = ranks_text(comparison.missing_ranks)
        problems.append(f"not all traces have rank {ranks}: the error is that of the other ranks")
    if error is None:
        problems.append("there are no step times to hold against --max-error")
    elif error > max_error:
        problems.append(f"the mean step-time error, {error:.2f} %, is above {max_error:g} %")
    for problem in problems:
        click.echo(f"prism: {problem}", err=True)
    return ExitCode.FINDING if problems else ExitCode.OK
