"""``prism validate``: prints findings. Checking is the work of ``prismtrace.validate``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import Ticker, echo_json
from prism_sdk.errors import ExitCode
from prism_sdk.wording import counted


@click.command("validate")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(file: Path, as_json: bool) -> int:
    """Check a trace file against the format: checksums, tables, and what they say together.

    \b
    Example:
        prism validate real.prism

    Exit code 0: no error was found; 1: there are errors; 3: the file cannot be read as a trace at all, or not opened.
    """
    import prismtrace

    findings = prismtrace.validate(file, progress=Ticker(f"checking {file}", of="ranks"))
    if findings and findings[0].code == "PT001":
        _refuse_what_cannot_be_opened(file)
    errors = [finding for finding in findings if _severity(finding) == "error"]
    if as_json:
        echo_json({"file": file, "valid": not errors, "findings": findings})
    else:
        for finding in findings:
            where = f" at {finding.where}" if finding.where else ""
            section = f" (specification {finding.spec_section})" if finding.spec_section else ""
            click.echo(f"{_severity(finding)}: {finding.code}{where}: {finding.message}{section}")
        if errors:
            click.echo(f"{file} is not a valid trace: {counted(len(errors), 'error')}")
        else:
            warnings = f", {counted(len(findings), 'remark')}" if findings else ""
            click.echo(f"{file} is a valid trace{warnings}")
    if not errors:
        return ExitCode.OK
    return ExitCode.FINDING if _is_readable(file) else ExitCode.UNREADABLE


def _refuse_what_cannot_be_opened(file: Path) -> None:
    """A file that does not exist is not an invalid trace: this is said as every other command says it."""
    import prismtrace

    try:
        with prismtrace.TraceReader(file, allow_unfinished=True):
            return
    except prismtrace.TraceReadError:
        raise
    except prismtrace.PrismTraceError:
        return


def _is_readable(file: Path) -> bool:
    """Whether anything of the file can be used, with or without an index."""
    import prismtrace

    try:
        with prismtrace.TraceReader(file, allow_unfinished=True):
            return True
    except prismtrace.PrismTraceError:
        return False


def _severity(finding: object) -> str:
    severity = getattr(finding, "severity", "error")
    return str(getattr(severity, "name", severity)).lower()
