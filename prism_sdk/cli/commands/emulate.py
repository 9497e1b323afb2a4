"""``prism emulate``: options and help. Running is the launcher's work."""

from __future__ import annotations

from prism_sdk.cli.commands.calibrate import BACKEND
from prism_sdk.cli.commands.record import SLOTS
from prism_sdk.cli.launching import launch_command, option
from prism_sdk.cli.parsing import RANKS
from prism_sdk.runtime.config import LaunchMode

SANDBOX = option("--sandbox", type=RANKS, help="The ranks to run for real, e.g. 0,5-7.  [default: 0]")


@launch_command(
    LaunchMode.EMULATE,
    output="emulated.prism",
    extra=[SANDBOX, SLOTS, BACKEND],
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
