"""``prism record``: options and help. Running is the launcher's work."""

from __future__ import annotations

import click

from prism_sdk.cli.commands.observe import PAYLOADS
from prism_sdk.cli.launching import launch_command, option
from prism_sdk.runtime.config import LaunchMode

SLOTS = option(
    "--slots",
    type=click.IntRange(min=1),
    metavar="K",
    help="How many ranks run at the same time.  [default: one a GPU, else one a core]",
)
WORLD_SIZE = option(
    "--world-size", type=click.IntRange(min=1), metavar="N", help="All ranks of the job; says --nproc-per-node."
)


@launch_command(LaunchMode.RECORD, output="bare.prism", extra=[SLOTS, WORLD_SIZE, PAYLOADS])
def command() -> None:
    """Run all ranks of a job on few devices, by turns, and write its bare graph.

    A rank gives up its slot where it must wait for others. The losses are those of a real run; the graph says
    what every rank does and in which order, and holds no times yet: `prism calibrate` finds them.

    \b
    Example, eight ranks on two slots:
        prism record --nproc-per-node 8 --slots 2 -o bare.prism -- train.py --lr 0.1
    """
