"""``prism sweep``: simulates several variants of one job and compares them in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prism_sdk.cli.engines import ADDRESS, engine_option
from prism_sdk.cli.output import Ticker, echo_json, echo_table, format_bytes, format_ns
from prism_sdk.cli.parsing import STEPS, once
from prism_sdk.cli.whatif import expand_variants
from prism_sdk.errors import ExitCode, PrismError, UsageError
from prism_sdk.runtime.config import StepRange

if TYPE_CHECKING:
    from prism_sdk.simulate import Scenario


@click.command("sweep")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--variant", "variants", multiple=True, metavar="[NAME=]OPTIONS",
              help="Options of `prism simulate`; {a,b} stands for several, in all combinations.")  # fmt: skip
@once("--steps", type=STEPS, metavar="A:B", help="Only steps from A up to, not including, B.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@engine_option("Simulate the variants on the machines of a Ray cluster, which share the folder of the file. What is "
               "finished is kept there until the end: the same command goes on after an interruption.")  # fmt: skip
@ADDRESS
def command(
    file: Path, variants: tuple[str, ...], steps: StepRange | None, as_json: bool, engine: str | None,
    address: str | None,
) -> int:  # fmt: skip
    """Compare variants of a job in one table; the first row is the job as it is.

    \b
    Example:
        prism sweep graph.prism --variant '--slow rank=17:{1.1,1.3,1.5}'
        prism sweep graph.prism --variant 'today=--cluster a.toml' --variant 'new=--cluster b.toml --dp {32,64}'
    """
    from prism_sdk.graph.errors import BareGraphError
    from prism_sdk.simulate import Scenario

    if not variants:
        raise UsageError("there is nothing to compare", hint="give --variant '--slow rank=0:1.2', as often as you like")
    if address is not None and engine is None:
        raise UsageError("--address is that of an engine's cluster: give --engine ray too")
    chosen = None if steps is None else steps.as_range()
    named = [("as it is", Scenario()), *expand_variants(variants)]
    try:
        results = _reports(file, named, chosen, engine=engine, address=address)
    except BareGraphError as error:  # variants with a cluster profile have times, but nothing to be compared with
        error.hint = (f"calibrate it first (prism calibrate), or sweep what `prism simulate {file} --cluster NAME -o "
                      "timed.prism` writes")  # fmt: skip
        raise
    refused = [(name, result) for (name, _), result in zip(named, results, strict=True)
               if isinstance(result, PrismError)]  # fmt: skip
    named = [one for one, result in zip(named, results, strict=True) if not isinstance(result, PrismError)]
    reports = [result for result in results if not isinstance(result, PrismError)]
    if as_json:
        echo_json([
            *({"variant": name, "report": report} for (name, _), report in zip(named, reports, strict=True)),
            *({"variant": name, "error": error.message, "hint": error.hint} for name, error in refused),
        ])  # fmt: skip
        return _ended(refused)
    first = reports[0]["step_time_ns"]
    rows = []
    for (name, _), report in zip(named, reports, strict=True):
        change = 100.0 * (report["step_time_ns"] / first - 1.0) if first else 0.0
        shares, interval = report["shares"], report["interval"]
        straggler = f"rank {report['stragglers'][0]['rank']}" if report["stragglers"] else "-"
        between = "-" if interval is None else f"{format_ns(interval['low'])} to {format_ns(interval['high'])}"
        is_part = report["world_size"] > report["num_ranks"]
        num_ranks = f"{report['num_ranks']} of {report['world_size']}" if is_part else report["num_ranks"]
        rows.append([name, num_ranks, format_ns(report["step_time_ns"]), f"{change:+.2f} %", between,
                     *(f"{shares[f'{part}_percent']:.1f} %" for part in ("busy", "bubble", "imbalance", "exposed")),
                     straggler, format_bytes(report["memory_peak_bytes"])])  # fmt: skip
    headers = ["variant", "ranks", "step time", "change", "95% interval", "busy", "bubble", "imbalance", "exposed",
               "straggler", "memory"]  # fmt: skip
    echo_table(headers, rows, right=tuple(range(1, 9)))
    for note in reports[0]["notes"]:
        click.echo(f"note: {note}")
    return _ended(refused)


def _ended(refused: Sequence[tuple[str, PrismError]]) -> ExitCode:
    """Name the variants that cannot be; the exit status."""
    for name, error in refused:
        click.echo(f"prism: error: variant {name!r}: {error}", err=True)
    return refused[0][1].exit_code if refused else ExitCode.OK


def _reports(
    file: Path, named: Sequence[tuple[str, Scenario]], steps: range | None, *, engine: str | None, address: str | None
) -> Sequence[dict[str, Any] | PrismError]:  # fmt: skip
    """What each variant gives, or why it cannot be; the job as it is, the first, must."""
    from prism_sdk.cli.sweeping import report_of, sweep_on_cluster

    if engine is not None:
        return sweep_on_cluster(file, named, steps, address=address)
    reports: list[dict[str, Any] | PrismError] = []
    base_ns = None
    tell = Ticker(f"simulating {file}", of="variants")
    for number, (_, scenario) in enumerate(named):
        tell(number, len(named))
        reading = Ticker(f"variant {number + 1} of {len(named)}: reading {file}", of="ranks")
        try:
            report = report_of(file, scenario, steps, base_ns, progress=reading)
        except PrismError as error:
            if not number:
                raise
            reports.append(error)
        else:
            reports.append(report)
            base_ns = report["step_time_ns"] if base_ns is None else base_ns
    return reports
