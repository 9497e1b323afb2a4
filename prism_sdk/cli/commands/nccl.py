"""``prism nccl``: record files of the NCCL profiler into a trace, or into a table. The work is `prism_sdk.nccl`'s."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from prism_sdk.cli.output import echo_json, echo_table, format_bytes, format_ns
from prism_sdk.cli.outputs import check_output
from prism_sdk.errors import ExitCode, UnreadableError
from prism_sdk.wording import counted

if TYPE_CHECKING:
    from prism_sdk.nccl.attach import AttachReport
    from prism_sdk.nccl.job import NcclJob
    from prism_sdk.nccl.report import NcclReport

_MAX_FINDINGS = 12
_FILES = click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE_OR_FOLDER...")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.group("nccl")
def command() -> None:
    """What NCCL really did: algorithms, protocols, channels and kernel times, from its profiler.

    \b
    Example:
        prism observe --nccl-profiler -o real.prism -- train.py
        prism nccl report real.prism.nccl/
    or, under any launcher, with
        NCCL_PROFILER_PLUGIN=$(python -m prismtrace_nccl_profiler) PRISM_NCCL_OUTPUT=records/
    """


@command.command("import")
@_FILES
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The observed trace of the job."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The trace to write."
)
@click.option(
    "--events",
    type=click.Choice(["none", "tasks", "all"]),
    default="tasks",
    help="What becomes events: a span for each kernel, or everything that was recorded.  [default: tasks]",
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@_JSON
def import_command(
    files: tuple[Path, ...], trace: Path, output: Path, events: str, overwrite: bool, as_json: bool
) -> int:
    """Write a copy of a trace in which the units say what NCCL did.

    \b
    Example:
        prism nccl import records/ --trace real.prism -o joined.prism

    Exit code 1: operations of NCCL that belong to no unit, or move other byte counts than their units say.
    """
    from prism_sdk.nccl.attach import attach

    check_output(output, overwrite=overwrite, sources=[trace, *files])
    report = attach(trace, _load(files, quiet=as_json), output, events=events, overwrite=overwrite)
    if as_json:
        echo_json({"output": output, "report": report})
    else:
        click.echo(f"wrote {output}")
        show_attached(report)
    return ExitCode.OK if report.num_joined == report.num_tasks and not report.num_unequal else ExitCode.FINDING


@command.command("report")
@_FILES
@click.option(
    "--by",
    type=click.Choice(["size", "power"]),
    help="A row for each size, or for all sizes between two powers of two.  [default: power; size with --json]",
)
@_JSON
def report_command(files: tuple[Path, ...], by: str | None, as_json: bool) -> int:
    """Print algbw and busbw by operation, size, algorithm and protocol, as nccl-tests counts them.

    \b
    Example:
        prism nccl report records/

    A time is that of the rank which arrived last: kernels of the others also wait. It needs no trace and no torch.
    A row of several sizes has the bandwidth of their median size and time. Exit code 1: something is missing from the
    records, or contradicts itself; the findings say what.
    """
    from prism_sdk.nccl.report import make_report

    report = make_report(_load(files, quiet=as_json), by=by or ("size" if as_json else "power"))
    if as_json:
        echo_json(report)
    else:
        _show_report(report)
    return ExitCode.FINDING if report.findings else ExitCode.OK


def _load(files: tuple[Path, ...], *, quiet: bool) -> NcclJob:
    from prism_sdk.nccl.job import load_job

    found: list[Path] = []
    for file in files:
        inside = sorted(file.glob("*.ncclrec*")) if file.is_dir() else [file]
        if not inside:
            raise UnreadableError(str(file), reason="the folder holds no record files (*.ncclrec)")
        found += inside
    show = len(found) > 32 and not quiet
    return load_job(found, progress=(lambda text: click.echo(f"prism nccl: {text}", err=True)) if show else None)


def show_attached(report: AttachReport) -> None:
    """Print how a join came out."""
    click.echo(
        f"{report.num_joined} of {counted(report.num_tasks, 'NCCL operation')} of {counted(report.num_ranks, 'rank')} "
        f"belong to {report.num_units_joined} of {counted(report.num_units, 'unit')}; "
        f"{report.num_without_kernel} have no kernel time"
    )
    for device, fit in report.clocks.items():
        room = fit["uncertainty_ns"]
        known = f"within {format_ns(room)}" if room is not None else "known from one side only"
        click.echo(
            f"  GPU {device[:40]}: {fit['num_lower'] + fit['num_upper']} bounds, offset {known}, "
            f"drift {fit['drift'] * 1e9:+.0f} ppb, ends known {format_ns(fit['residual_median_ns'])} late (median)"
        )
    _show_findings(report.findings, report.notes)


def _show_findings(findings: tuple[str, ...], notes: tuple[str, ...]) -> None:
    for text in notes:
        click.echo(f"note: {text}")
    for text in findings[:_MAX_FINDINGS]:
        click.echo(f"finding: {text}")
    if len(findings) > _MAX_FINDINGS:
        click.echo(f"... and {len(findings) - _MAX_FINDINGS} more")


def _show_report(report: NcclReport) -> None:
    rows = [
        (
            row.name, row.num_ranks or "-", _sizes(row.min_bytes, row.max_bytes), row.dtype, row.algo.lower() or "-",
            row.proto.lower() or "-", row.channels or "-", row.num_operations, format_ns(row.median_ns),
            format_ns(row.min_ns), format_ns(row.p90_ns), _bandwidth(row.algbw_gb_per_s),
            _bandwidth(row.busbw_gb_per_s),
        )
        for row in report.rows
    ]  # fmt: skip
    headers = (
        "operation", "ranks", "size", "type", "algo", "proto", "channels", "number", "median", "min", "p90",
        "algbw GB/s", "busbw GB/s",
    )  # fmt: skip
    echo_table(headers, rows, right=(1, 2, 6, 7, 8, 9, 10, 11, 12))
    click.echo()
    click.echo(
        f"{counted(report.num_operations, 'operation')} of {counted(report.num_ranks, 'rank')}; a time is the shortest "
        "kernel time among an operation's ranks:\nit holds waiting only if that rank, too, waited for a peer's kernel"
    )
    for num, why in (
        (report.num_shared, "ran in one launch with others: their times cannot be told apart and do not count"),
        (report.num_without_time, "have no kernel time"),
        (report.num_incomplete, "lack the records of some members: their times may contain waiting"),
    ):
        if num:
            click.echo(f"  {num} {why}")
    _show_findings(report.findings, report.notes)


def _bandwidth(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _sizes(least: int, most: int) -> str:
    return format_bytes(least) if least == most else f"{format_bytes(least)} - {format_bytes(most)}"
