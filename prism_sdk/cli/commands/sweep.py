"""``prism sweep``: simulates several variants of one job and compares them in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from prism_sdk.cli.output import echo_json, echo_table, format_bytes, format_ns
from prism_sdk.cli.parsing import STEPS
from prism_sdk.cli.whatif import expand_variants
from prism_sdk.errors import ExitCode, UsageError
from prism_sdk.runtime.config import StepRange

if TYPE_CHECKING:
    from prism_sdk.simulate.report import Report


@click.command("sweep")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--variant", "variants", multiple=True, metavar="[NAME=]OPTIONS",
              help="Options of `prism simulate`; {a,b} stands for several, in all combinations.")  # fmt: skip
@click.option("--steps", type=STEPS, metavar="A:B", help="Only steps from A up to, not including, B.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(file: Path, variants: tuple[str, ...], steps: StepRange | None, as_json: bool) -> int:
    """Compare variants of a job in one table; the first row is the job as it is.

    \b
    Example:
        prism sweep graph.prism --variant '--slow rank=17:{1.1,1.3,1.5}'
        prism sweep graph.prism --variant 'today=--cluster a.toml' --variant 'new=--cluster b.toml --dp {32,64}'
    """
    from prism_sdk.simulate import Scenario, summarise

    if not variants:
        raise UsageError("there is nothing to compare", hint="give --variant '--slow rank=0:1.2', as often as you like")
    chosen = None if steps is None else steps.as_range()
    named = [("as it is", Scenario()), *expand_variants(variants)]
    reports: list[tuple[str, Report]] = []
    for name, scenario in named:
        base = reports[0][1].step_time_ns if reports else None
        reports.append((name, summarise(scenario.run(file, steps=chosen), base_step_ns=base)))
    if as_json:
        echo_json([{"variant": name, "report": report} for name, report in reports])
        return ExitCode.OK
    first = reports[0][1].step_time_ns
    rows = []
    for name, report in reports:
        change = 100.0 * (report.step_time_ns / first - 1.0) if first else 0.0
        shares = report.shares
        straggler = f"rank {report.stragglers[0].rank}" if report.stragglers else "-"
        between = "-"
        if report.interval is not None:
            between = f"{format_ns(report.interval.low)} to {format_ns(report.interval.high)}"
        rows.append([name, report.num_ranks, format_ns(report.step_time_ns), f"{change:+.2f} %", between,
                     *(f"{value:.1f} %" for value in (shares.busy_percent, shares.bubble_percent,
                                                      shares.imbalance_percent, shares.exposed_percent)),
                     straggler, format_bytes(report.memory_peak_bytes)])  # fmt: skip
    headers = ["variant", "ranks", "step time", "change", "95% interval", "busy", "bubble", "imbalance", "exposed",
               "straggler", "memory"]  # fmt: skip
    echo_table(headers, rows, right=tuple(range(1, 9)))
    for note in reports[0][1].notes:
        click.echo(f"note: {note}")
    return ExitCode.OK
