"""Prints simulations: what ``prism simulate`` and ``prism sweep`` have in common.

It simulates nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prism_sdk.cli.output import echo_table, format_bytes, format_ns
from prism_sdk.wording import counted

if TYPE_CHECKING:
    from prism_sdk.simulate.report import Report, Shares

__all__ = ["echo_report"]


def _percent(value: float, *, signed: bool = False) -> str:
    return f"{value:+.2f} %" if signed else f"{value:.1f} %"


def echo_report(report: Report, *, before: Report | None = None) -> None:
    """Print a report; ``before`` is that of the same job without the changes that were asked for."""
    words = f"step time  {format_ns(report.step_time_ns)}"
    if report.interval is not None:
        low, high = format_ns(report.interval.low), format_ns(report.interval.high)
        words += f"   {report.interval.confidence:.0%} interval {low} to {high} ({report.interval_basis})"
    click.echo(words)
    if before is not None and before.step_time_ns:
        change = 100.0 * (report.step_time_ns / before.step_time_ns - 1.0)
        click.echo(f"unchanged  {format_ns(before.step_time_ns)}   the changes make it {_percent(change, signed=True)}")
    elif report.recorded_step_ns is not None and report.error_percent is not None:
        error = f"{report.error_percent:+.4f} %"
        click.echo(f"recorded   {format_ns(report.recorded_step_ns)}   simulated against recorded {error}")
    part = f"{report.num_ranks:,} of " if report.world_size > report.num_ranks else ""
    num_ranks = max(report.num_ranks, report.world_size)
    size = f"{part}{counted(num_ranks, 'rank', separator=',')}, {counted(report.num_units, 'unit', separator=',')}"
    click.echo(f"job        {size}, {counted(report.num_steps, 'counted step')}")
    # of what was posted before the counted steps and is waited for in them only the wait is counted
    overlap = max(1.0 - report.exposed_ns / report.communication_ns, 0.0) if report.communication_ns > 0 else None
    hidden = "" if overlap is None else f" of {format_ns(report.communication_ns)} ({overlap:.0%} hidden)"
    click.echo(f"exposed    {format_ns(report.exposed_ns)} of communication a step and rank{hidden}")
    if report.memory_peak_bytes is not None:
        click.echo(f"memory     {format_bytes(report.memory_peak_bytes)} peak, on rank {report.memory_peak_rank}")
    click.echo()
    rows = [_share_row(shares) for shares in (report.shares, *report.stages)]
    echo_table(["time of", "ranks", "busy", "bubble", "imbalance", "exposed", "host"], rows, right=(1, 2, 3, 4, 5, 6))
    click.echo()
    echo_table(
        ["critical path", "time", "share"],
        [[part.what, format_ns(part.time_ns), _percent(part.percent)] for part in report.critical_path],
        right=(1, 2),
    )
    click.echo("on ranks " + ", ".join(f"{part.what} ({part.percent:.0f} %)" for part in report.critical_ranks))
    known = [part for part in report.provenance if part.what != "unspecified"]
    if known:
        click.echo("times are " + ", ".join(f"{part.what} {part.percent:.0f} %" for part in report.provenance))
    if report.stragglers:
        click.echo()
        echo_table(
            ["straggler", "idle time it causes a step", "of the critical path"],
            [[f"rank {s.rank}", format_ns(s.idle_caused_ns), _percent(s.path_percent)] for s in report.stragglers],
            right=(1, 2),
        )
    for note in report.notes:
        click.echo(f"note: {note}")


def _share_row(shares: Shares) -> list[object]:
    values = (shares.busy_percent, shares.bubble_percent, shares.imbalance_percent, shares.exposed_percent,
              shares.host_percent)  # fmt: skip
    return [shares.name, shares.num_ranks, *map(_percent, values)]
