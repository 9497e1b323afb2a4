"""``prism emulate``: options and help. Running is the launcher's work."""

from __future__ import annotations

import click

from prism_sdk.cli.commands.calibrate import BACKEND
from prism_sdk.cli.commands.observe import DEVICE_MEMORY, KERNELS
from prism_sdk.cli.launching import launch_command, option
from prism_sdk.cli.parsing import RANKS
from prism_sdk.runtime.config import LaunchMode

SANDBOX = option("--sandbox", type=RANKS, help="The ranks to run for real, e.g. 0,5-7.  [default: 0]")


def _refuse_slots(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError("--slots has no meaning for an emulation: all its sandbox ranks run at the same time, "
                               "each with cores of its own. --sandbox says which ranks, and so how many.")  # fmt: skip


NO_SLOTS = option("--slots", hidden=True, expose_value=False, callback=_refuse_slots)


@launch_command(
    LaunchMode.EMULATE,
    output="emulated.prism",
    extra=[SANDBOX, NO_SLOTS, BACKEND, KERNELS, DEVICE_MEMORY],
    graph="The calibrated graph, from `prism calibrate`.",
)
def command() -> None:
    """Run a few ranks of a job for real; all others are replayed from a calibrated graph.

    The real ranks (the sandbox) see the same losses, memory and step times as in the whole job.
    The number of ranks comes from the graph.

    \b
    Example, rank 0 of the job alone:
        prism emulate --graph graph.prism --sandbox 0 -o emulated.prism -- train.py --lr 0.1

    Give the same script and arguments as to `prism record`.
    """
