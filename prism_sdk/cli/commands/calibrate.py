"""``prism calibrate``: options and help. Running is the launcher's work."""

from __future__ import annotations

from prism_sdk.cli.commands.record import SLOTS
from prism_sdk.cli.engines import ADDRESS, engine_option
from prism_sdk.cli.launching import launch_command, option
from prism_sdk.runtime.config import LaunchMode

STRATEGY = option("--strategy", metavar="NAME", help="How to calibrate; `prism plugins` lists them.  [default: slices]")
BACKEND = option(
    "--backend", metavar="NAME", help="How virtual ranks are replayed; `prism plugins` lists them.  [default: local]"
)

_SPREAD = (
    "Spread the slices over the machines of a Ray cluster, which share the folder of the output. What is finished is "
    "kept there until the end: the same command goes on after an interruption."
)


@launch_command(
    LaunchMode.CALIBRATE,
    output="calibrated.prism",
    extra=[SLOTS, STRATEGY, BACKEND, engine_option(_SPREAD), ADDRESS],
    graph="The bare graph, from `prism record`.",
)
def command() -> None:
    """Find the times of a bare graph by running a few ranks at a time.

    Each slice of ranks runs for real while the rest of the job is replayed from the graph. Slices are repeated
    with the new times until those change no more. The number of ranks comes from the graph.

    \b
    Example, after `prism record -o bare.prism`:
        prism calibrate --graph bare.prism -o graph.prism -- train.py --lr 0.1

    Give the same script and arguments as to `prism record`.
    """
