"""The entry point of the ``prism`` command: finds the subcommand, turns errors into one message and an exit code.

It imports no subcommand before it is called for, and never torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from prism_sdk.cli.lazy import LazyGroup
from prism_sdk.errors import ExitCode, PrismError, SettingsError
from prism_sdk.settings import Settings

__all__ = ["cli", "main", "run"]

_COMMANDS = {
    "Run a job": {
        "observe": "Run a job as it is, and write its timed graph.",
        "record": "Run all ranks of a job on few devices, and write its bare graph.",
        "calibrate": "Find the times of a bare graph, a few ranks at a time.",
        "emulate": "Run a few ranks for real; the rest of the job is replayed.",
    },
    "Predict a job, without running it": {
        "simulate": "Predict step time and where it goes, also with changes.",
        "sweep": "Compare variants of a job in one table.",
        "cluster": "Make, fit and check cluster profiles.",
    },
    "Look at results": {
        "analyze": "Say where the time went, or why two traces differ.",
        "report": "Write a self-contained HTML page of a trace.",
        "view": "Show the page of a trace in a browser.",
        "compare": "Compare two traces of a job: times, losses, memory, order.",
        "info": "Show what a trace holds.",
        "cat": "Print rows of a trace.",
        "diff": "Say what changed between two traces.",
    },
    "Look after trace files": {
        "validate": "Check a trace file against the format.",
        "recover": "Save what is readable of a file that was cut off or damaged.",
        "merge": "Join trace files into one, also of unequal clocks.",
        "slice": "Cut ranks, steps or a time window out of a trace.",
        "compact": "Store the structure that ranks share once.",
        "expand": "Write a recorded job with more data-parallel replicas.",
        "redact": "Write a copy without names, paths and payloads.",
        "convert": "Turn files of another format into a trace, or a trace into another format.",
        "nccl": "Bring what NCCL's profiler recorded into a trace, or into a table.",
    },
    "Look after the installation": {
        "plugins": "List plugins, and why one does not load.",
        "plugin": "Start a plugin of your own.",
        "doctor": "Check this machine and this installation.",
    },
}

_REFUSED_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write to standard output may end with; files of Prism's own name themselves in their errors."""

_HELP = """Record a distributed PyTorch training job with few devices, and predict how it runs with many.

The script stays as it is: write `prism observe` where you wrote `torchrun`.

\b
    prism observe   --nproc-per-node 2 -o real.prism -- train.py
    prism record    --nproc-per-node 8 -o bare.prism -- train.py
    prism calibrate --graph bare.prism -o graph.prism -- train.py
    prism emulate   --graph graph.prism --sandbox 0 -o emulated.prism -- train.py
    prism compare   real.prism emulated.prism

Exit codes: 0 fine, 1 a finding or a failed run, 2 wrong usage, 3 an unreadable file, 130 interrupted by Ctrl-C.
"""


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from prism_sdk import __version__

        click.echo(f"prism, version {__version__}")
        context.exit()


@click.group(cls=LazyGroup, commands_by_section=_COMMANDS, package="prism_sdk.cli.commands", help=_HELP)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """The root command; its help text is ``_HELP``."""


def main() -> NoReturn:
    """Run ``prism`` with the process's arguments, and exit; the console script is ``prism_sdk.cli.entry``'s."""
    from prism_sdk.cli import entry

    entry.main()


def run(arguments: Sequence[str], *, interrupted: Callable[[], bool] = lambda: False) -> int:
    """Run ``prism`` with ``arguments`` and return its exit code. Errors become one message on stderr.

    ``interrupted`` says whether Ctrl-C was pressed: where a library swallows it, an error of another kind follows.
    """
    if sys.stdout is None:  # closed by the shell (`>&-`): nobody wants to read it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open as long as the process
    try:
        code = cli.main(args=list(arguments), prog_name="prism", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else ExitCode.OK
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return ExitCode.USAGE
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        return _say_interrupted()
    except (BrokenPipeError, SystemExit):
        # the reader of our output went away (`prism info x | head`), which click turns into SystemExit: not an
        # error, and nobody to say it to
        _drop_output()
        return ExitCode.OK
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _REFUSED_OUTPUT:
            _drop_output()  # the interpreter flushes once more
            click.echo(f"prism: error: standard output cannot be written: {error.strerror}", err=True)
            return ExitCode.FINDING
        code = getattr(error, "exit_code", None)
        return _say_interrupted() if interrupted() and code != ExitCode.INTERRUPTED else _explain(error)


def _drop_output() -> None:
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_interrupted() -> int:
    click.echo("prism: interrupted", err=True)
    return ExitCode.INTERRUPTED


def _explain(error: Exception) -> int:
    if _debug():
        traceback.print_exception(error)
    if isinstance(error, PrismError):
        click.echo(f"prism: error: {error}", err=True)
        return int(error.exit_code)
    code = _trace_error_code(error)
    if code is not None:
        click.echo(f"prism: error: {error}", err=True)
        return code
    if isinstance(error, OSError) and error.filename is not None:
        click.echo(f"prism: error: {error.filename}: {error.strerror}", err=True)
        return ExitCode.UNREADABLE
    click.echo(
        f"prism: error: unexpected {type(error).__name__}: {error}\n"
        "  this is a defect of Prism or of a plugin: PRISM_DEBUG=1 shows where",
        err=True,
    )
    return ExitCode.FINDING


def _trace_error_code(error: Exception) -> int | None:
    errors = sys.modules.get("prismtrace.errors")  # not imported: the error cannot come from there
    if errors is None or not isinstance(error, errors.PrismTraceError):
        return None
    if isinstance(error, errors.TraceUsageError):
        return ExitCode.USAGE
    if isinstance(error, errors.TraceWriteError) and error.errno == errno.EEXIST:  # it came after the check
        return ExitCode.USAGE
    finding = isinstance(error, errors.TraceWriteError | errors.TraceResultError)
    return ExitCode.FINDING if finding else ExitCode.UNREADABLE


def _debug() -> bool:
    try:
        return Settings.from_environ().debug
    except SettingsError:
        return False


if __name__ == "__main__":
    main()
