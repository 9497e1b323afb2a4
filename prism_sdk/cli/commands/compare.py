"""``prism compare``: prints a comparison as a table. Comparing is the work of ``prism_sdk.graph.compare``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import echo_json
from prism_sdk.cli.parsing import Number
from prism_sdk.errors import ExitCode


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
    help="End with exit code 1 when the mean step-time error is above this.",
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
    if error is None:
        click.echo("prism: there are no step times to hold against --max-error", err=True)
    elif error > max_error:
        click.echo(f"prism: the mean step-time error, {error:.2f} %, is above {max_error:g} %", err=True)
    else:
        return ExitCode.OK
    return ExitCode.FINDING
