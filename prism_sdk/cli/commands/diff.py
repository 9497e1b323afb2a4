"""``prism diff``: prints what changed between two traces. Comparing is the work of ``prismtrace.diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from prism_sdk.cli.output import echo_json, echo_table, format_ns
from prism_sdk.cli.parsing import once
from prism_sdk.errors import ExitCode, UsageError
from prism_sdk.wording import counted

if TYPE_CHECKING:
    from prismtrace import TraceDiff


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@once(
    "--ignore",
    metavar="CATEGORY,...",
    help="Do not compare these: header, ranks, structure, times, memory, groups, metadata, scalars, payloads, "
    "columns, events.",
)
@click.option("--max", "max_items", type=click.IntRange(min=1), default=8, help="Show so many of each kind (8).")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(a: Path, b: Path, ignore: str | None, max_items: int, as_json: bool) -> int:
    """Say what changed from trace A to trace B: structure, times, groups, losses, metadata, payloads.

    Units are matched by what they are (operation, sizes, members of the group), not by their times. To hold an
    emulation against a real run, with errors in percent, use `prism compare`.

    \b
    Example:
        prism diff monday.prism tuesday.prism
        prism diff monday.prism tuesday.prism --ignore times,memory,metadata

    Exit code 0: nothing that was compared differs; 1: something does.
    """
    import prismtrace

    ignored = [word.strip() for word in (ignore or "").split(",") if word.strip()]
    strange = sorted(set(ignored) - set(prismtrace.DIFF_CATEGORIES))
    if strange:
        hint = f"categories are: {', '.join(prismtrace.DIFF_CATEGORIES)}"
        raise UsageError(f"--ignore has no category {strange[0]!r}", hint=hint)
    found = prismtrace.diff(a, b, ignore=ignored, max_items=max_items)
    if as_json:
        echo_json({"differs": found.differs, "diff": found})
    else:
        _show(found)
    return ExitCode.FINDING if found.differs else ExitCode.OK


def _show(found: TraceDiff) -> None:
    aside = f" (not compared: {', '.join(found.ignored)})" if found.ignored else ""
    if not found.differs:
        click.echo(f"no difference{aside}: {counted(found.num_units_a, 'unit')}")
        return
    click.echo(f"{found.path_a} -> {found.path_b}: {found.num_units_a} -> {counted(found.num_units_b, 'unit')}{aside}")
    click.echo("differences: " + ", ".join(f"{name} {number}" for name, number in found.counts.items()))
    if found.structure:
        click.echo("\nstructure")
        for change in found.structure:
            where = f"rank {change.rank}, " + ("no step" if change.step is None else f"step {change.step}")
            about = "" if change.exact else ", about"
            click.echo(
                f"  {where}{about}: {change.num_added} added, {change.num_removed} removed, "
                f"{change.num_changed} changed; first: {change.first}"
            )
    _show_timing(found)
    for category in dict.fromkeys(item.category for item in found.values):
        click.echo(f"\n{category}")
        for item in found.values:
            if item.category == category:
                click.echo(f"  {item.where}: {_short(item.before)} -> {_short(item.after)}")
    if found.largest_scalar_difference is not None:
        click.echo(f"\nlargest difference of a loss or scalar: {found.largest_scalar_difference:g}")


def _show_timing(found: TraceDiff) -> None:
    if not found.timing:
        return
    click.echo("\ntimes: largest changes of totals")
    rows = []
    for change in found.timing:
        percent = "" if change.change_percent is None else f"{change.change_percent:+.1f} %"
        medians = format_ns(change.median_a_ns), format_ns(change.median_b_ns)
        rows.append((change.by, change.name, change.num_b, *medians, percent, format_ns(change.change_ns)))
    headers = ("by", "name", "number", "median A", "median B", "change", "of the total")
    echo_table(headers, rows, right=(2, 3, 4, 5, 6))


def _short(text: str | None, *, limit: int = 80) -> str:
    if text is None:
        return "nothing"
    text = text.replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 3] + "..."
