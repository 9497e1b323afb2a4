"""``prism merge``: joins trace files. Merging is the work of ``prismtrace.merge``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prism_sdk.cli.output import echo_json, echo_table, format_ns
from prism_sdk.cli.outputs import check_output
from prism_sdk.errors import ExitCode, UsageError
from prism_sdk.wording import counted, ranks_text

if TYPE_CHECKING:
    from prismtrace import Alignment, Overlap

_MAX_ROWS = 16


@click.command("merge")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The file to write."
)
@click.option(
    "--align",
    is_flag=True,
    help="The files were timed by different clocks: bring them together by collectives that end together.",
)
@click.option(
    "--clocks",
    type=click.Choice(["file", "rank"]),
    help="With --align: each file has a clock of its own (default), or each rank has.",
)
@click.option("--drift", is_flag=True, help="With --align: the clocks also run at different speeds.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    files: tuple[Path, ...],
    output: Path,
    align: bool,
    clocks: str | None,
    drift: bool,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Join trace files of one job, for example one a machine, into one.

    Where two files have rows of the same rank, those of the later one count, and it is said which were replaced.

    \b
    Example:
        prism merge node0.prism node1.prism -o job.prism --align

    With --align the offsets, and how far the ends of collectives are then still apart, are printed and stored in the
    metadata (clock.*). Exit code 1: receives are then before their sends, or collectives torn apart.
    """
    import prismtrace

    if not align and (drift or clocks):
        raise UsageError(f"{'--drift' if drift else '--clocks'} says how to align", hint="add --align")
    if align and clocks != "rank" and len(files) < 2:
        raise UsageError("one file has one clock: there is nothing to align", hint="--clocks rank gives each rank one")
    check_output(output, overwrite=overwrite, sources=files)
    replaced = prismtrace.overlaps(files)
    found = prismtrace.merge(
        files, output, overwrite=overwrite, align=(clocks or "file") if align else None, drift=drift
    )
    if as_json:
        alignment = None if found is None else _as_json(found)
        echo_json({"files": files, "output": output, "replaced": replaced, "alignment": alignment})
    else:
        click.echo(f"wrote {output} from {counted(len(files), 'file')}")
        _show_replaced(replaced)
        if found is not None:
            _show(found, files=files if clocks != "rank" else None)
    return ExitCode.OK if found is None or found.is_causal else ExitCode.FINDING


def _show_replaced(replaced: Sequence[Overlap]) -> None:
    """One line for each pair of files, with the tables that both have of the same ranks."""
    tables: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for item in replaced:
        tables.setdefault((item.replaced, item.kept, item.ranks), []).append(item.table.name.lower())
    lines = [
        f"note: rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}: {', '.join(names)} of {kept} replace those of {old}"
        for (old, kept, ranks), names in tables.items()
    ]
    for line in lines[:_MAX_ROWS]:
        click.echo(line)
    if len(lines) > _MAX_ROWS:
        click.echo(f"... and {len(lines) - _MAX_ROWS} more (--json has all)")


def _as_json(found: Alignment) -> dict[str, Any]:
    return {**vars(found), "is_causal": found.is_causal}


def _show(found: Alignment, *, files: tuple[Path, ...] | None) -> None:
    rows = []
    for item in found.corrections[:_MAX_ROWS]:
        residuals = [found.residual_by_rank[rank] for rank in item.ranks if rank in found.residual_by_rank]
        median = max((one for one, _ in residuals), default=None)
        largest = max((two for _, two in residuals), default=None)
        name = f"rank {item.clock}" if files is None else str(files[int(item.clock)])
        offset = f"{item.offset_ns} ns" if not found.with_drift else f"{item.offset_ns} ns, {item.drift * 1e9:+.1f} ppb"
        rows.append((name, len(item.ranks), offset, format_ns(median), format_ns(largest)))
    click.echo()
    echo_table(("clock", "ranks", "correction", "residual median", "max"), rows, right=(1, 2, 3, 4))
    if len(found.corrections) > len(rows):
        click.echo(f"... and {len(found.corrections) - len(rows)} more clocks")
    outliers = f" ({found.num_outliers} of their ends are outliers and left out)" if found.num_outliers else ""
    click.echo(
        f"{counted(found.num_collectives, 'collective')}{outliers}; ends apart by "
        f"{format_ns(found.before_median_ns)} before, {format_ns(found.residual_median_ns)} after (median), "
        f"{format_ns(found.residual_max_ns)} (max of all)"
    )
    if found.num_early_receives:
        click.echo(
            f"finding: {found.num_early_receives} of {found.num_messages} messages are received before they are sent, "
            f"by up to {format_ns(found.worst_early_ns)}"
        )
    if found.num_apart:
        click.echo(
            f"finding: {found.num_apart} collectives have a member that ends before another begins, "
            f"by up to {format_ns(found.worst_apart_ns)}"
        )
