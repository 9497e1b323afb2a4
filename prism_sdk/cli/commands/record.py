"""``prism record``: options and help. Running is the launcher's work."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.commands.observe import DEVICE_MEMORY, PAYLOADS
from prism_sdk.cli.engines import ADDRESS, engine_option
from prism_sdk.cli.launching import launch_command, option
from prism_sdk.cli.parsing import RANKS, SIZE
from prism_sdk.runtime.config import DEFAULT_MAX_ROLES, DEFAULT_SAMPLES, LaunchMode

SLOTS = option(
    "--slots",
    type=click.IntRange(min=1),
    metavar="K",
    help="How many ranks run at the same time.  [default: one a GPU, else one a core]",
)
WORLD_SIZE = option(
    "--world-size", type=click.IntRange(min=1), metavar="N", help="All ranks of the job; says --nproc-per-node."
)
ROLES = option(
    "--roles",
    metavar="auto|LAYOUT|FILE",
    help="Run one rank of each role only; the others take part by symmetry. Roles are found from the process groups "
    "(auto), or stated: tp=2,dp=1024,pp=4, the first varying fastest, or a file with the ranks of a role a line.",
)
PARKED_MEMORY = option(
    "--parked-memory",
    type=SIZE,
    metavar="SIZE",
    help="Host memory for what parked ranks have on a GPU, where others need the room; 0: it stays there.  "
    "[default: what is free, less a twentieth of the host's]",
)
PARKED_AHEAD = option(
    "--parked-ahead",
    type=SIZE,
    metavar="SIZE",
    help="How much of that memory may be taken before anything moves, so that moves need not wait for the system; 0: "
    "none.  [default: 32GiB]",
)
PARKED_DISK = option(
    "--parked-disk",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where it goes once the host's memory is used up.",
)
SAMPLES = option(
    "--samples",
    "num_samples",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --roles: run so many ranks more, to verify that ranks of one role do the same. "
    f" [default: {DEFAULT_SAMPLES}]",
)
MAX_ROLES = option(
    "--max-roles",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --roles auto: how many processes may tell ranks apart; groups that would need more are taken as "
    f"replicas, pipelines never.  [default: {DEFAULT_MAX_ROLES}]",
)
SAMPLE_RANKS = option(
    "--sample-ranks",
    type=RANKS,
    help="With --roles: run these ranks too, e.g. 8,40-41, with those whom they meet in groups that tell roles apart, "
    "so that what follows from their own data is recorded; --samples is 0 then unless given.",
)

_SPREAD = (
    "Run the ranks on the machines of a Ray cluster, one slot a CPU, which share the folder of the output and have the "
    "script at the same place. If a machine goes away the job begins again on the others."
)


@launch_command(
    LaunchMode.RECORD, output="bare.prism",
    extra=[SLOTS, WORLD_SIZE, PAYLOADS, ROLES, MAX_ROLES, SAMPLES, SAMPLE_RANKS, DEVICE_MEMORY, PARKED_MEMORY,
           PARKED_AHEAD, PARKED_DISK, engine_option(_SPREAD), ADDRESS],
)  # fmt: skip
def command() -> None:
    """Run all ranks of a job on few devices, by turns, and write its bare graph.

    A rank gives up its slot where it must wait for others. The losses are those of a real run; the graph says
    what every rank does and in which order, and holds no times yet: `prism calibrate` finds them.

    \b
    Example, eight ranks on two slots:
        prism record --nproc-per-node 8 --slots 2 -o bare.prism -- train.py --lr 0.1

    \b
    Example, a job of 8,192 ranks, of which a few run:
        prism record --world-size 8192 --roles auto --slots 2 -o bare.prism -- train.py
    """
