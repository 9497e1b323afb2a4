"""``prism doctor``: prints checks. What is checked is in ``prism_sdk.cli.checks``."""

from __future__ import annotations

import click

from prism_sdk.cli.output import echo_json
from prism_sdk.errors import ExitCode
from prism_sdk.wording import counted


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def command(as_json: bool) -> int:
    """Check this machine and this installation, and say what to do about each problem.

    \b
    Example, before the first run:
        prism doctor

    Exit code 0: no problem (warnings do not count); 1: a problem that keeps Prism from running jobs.
    """
    from prism_sdk.cli.checks import run_checks

    checks = []
    for check in run_checks():
        checks.append(check)
        if not as_json:
            hint = f"\n           {check.hint}" if check.hint else ""
            click.echo(f"{check.status:8} {check.name}: {check.detail}{hint}")
    problems = [check for check in checks if check.status == "problem"]
    if as_json:
        echo_json({"ok": not problems, "checks": checks})
    elif problems:
        click.echo(f"{counted(len(problems), 'problem')}")
    else:
        click.echo("Prism can run jobs here")
    return ExitCode.FINDING if problems else ExitCode.OK
