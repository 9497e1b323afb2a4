"""``prism slice``: cuts ranks, steps or a time window out of a trace. Cutting is the work of ``prismtrace.slicing``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from prism_sdk.cli.output import Ticker, echo_json, format_ns
from prism_sdk.cli.outputs import check_output
from prism_sdk.cli.parsing import RANKS, STEPS, TIME_WINDOW, once
from prism_sdk.errors import ExitCode, UsageError
from prism_sdk.wording import counted

if TYPE_CHECKING:
    from prism_sdk.runtime.config import StepRange
    from prismtrace import TraceReader


@click.command("slice")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The file to write."
)
@once("--ranks", type=RANKS, metavar="0,4-7", help="Only these ranks.")
@once("--steps", type=STEPS, metavar="A:B", help="Only steps from A up to, not including, B.")
@once(
    "--time",
    "window",
    type=TIME_WINDOW,
    metavar="A:B",
    help="Only units that overlap this time: nanoseconds of the trace's clock, or with a unit (1.5s:2s, 300ms:) "
    "counted from the first time in the trace. Either end may be left out.",
)
@click.option("--drop-payloads", is_flag=True, help="Leave payloads out.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("-q", "--quiet", is_flag=True, help="Do not say how far it is.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    source: Path,
    output: Path,
    ranks: tuple[int, ...] | None,
    steps: StepRange | None,
    window: tuple[int | None, int | None, bool] | None,
    drop_payloads: bool,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Cut a smaller, valid trace out of a trace, by rank, step and time. All conditions must hold.

    Groups and metadata are kept. Rows are numbered from 0 again, and what refers to rows follows; `seq` stays.

    \b
    Example:
        prism slice job.prism -o part.prism --ranks 0,4-7 --steps 3:6
        prism slice job.prism -o part.prism --time 1.5s:2s
    """
    import prismtrace

    if ranks is None and steps is None and window is None:
        raise UsageError("nothing says what to cut", hint="give --ranks, --steps or --time")
    check_output(output, overwrite=overwrite, sources=[source])
    with prismtrace.TraceReader(source) as reader:
        strange = sorted(set(ranks or ()) - set(reader.ranks))
        if strange:
            raise UsageError(f"{source}: rank {strange[0]} has no data", hint="`prism info` lists the ranks")
        time_ns = None if window is None else _absolute(window, reader)
    wanted = None if steps is None else steps.as_range()
    try:
        report = prismtrace.slice_trace(
            source,
            output,
            ranks=ranks,
            steps=wanted,
            time_ns=time_ns,
            keep_payloads=not drop_payloads,
            allow_empty=False,
            overwrite=overwrite,
            progress=None if quiet else Ticker(f"cutting {source}", of="ranks"),
            storing=None if quiet else Ticker(f"storing once what ranks of {output} share", of="ranks"),
        )
    except prismtrace.TraceUsageError as error:
        raise UsageError(str(error), hint="`prism info` shows the steps, `prism cat` the times") from error
    if as_json:
        echo_json({"file": source, "output": output, **vars(report)})
        return ExitCode.OK
    span = ""
    if report.first_ns is not None and report.last_ns is not None:
        span = f", {format_ns(report.last_ns - report.first_ns)}"
    click.echo(
        f"wrote {output}: {report.num_units} of {counted(report.num_units_before, 'unit')} of "
        f"{counted(len(report.ranks), 'rank')}{span}, {counted(report.num_payloads, 'payload')}"
    )
    if report.num_cut_waits:
        click.echo(f"{report.num_cut_waits} waits are for communication outside the slice")
    if not report.num_units:
        click.echo("no unit was selected: what was is in other tables")
    return ExitCode.OK


def _absolute(window: tuple[int | None, int | None, bool], reader: TraceReader) -> tuple[int | None, int | None]:
    """A window that was given from the start of the trace, on the trace's own clock."""
    low, high, relative = window
    if not relative:
        return low, high
    first = reader.first_ns
    if first is None:
        raise UsageError("the trace has no times", hint="cut by --steps or --ranks")
    return (None if low is None else low + first), (None if high is None else high + first)
