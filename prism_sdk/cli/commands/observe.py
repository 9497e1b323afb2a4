"""``prism observe``: options and help. Running is the launcher's work."""

from __future__ import annotations

import click

from prism_sdk.cli.launching import launch_command, option
from prism_sdk.cli.parsing import SIZE, STEPS
from prism_sdk.runtime.config import LaunchMode

PAYLOADS = option(
    "--payloads",
    type=click.Choice(["full", "results", "none"]),
    help="As of `prism record`; `prism observe` keeps no values, and takes `none` alone.",
)

DEVICE_MEMORY = option(
    "--device-memory",
    type=SIZE,
    metavar="SIZE",
    help="Let each GPU have so much memory, e.g. 80GiB: what does not fit is refused as it would be there.",
)
NCCL_PROFILER = option(
    "--nccl-profiler",
    is_flag=True,
    help="Also record what NCCL does (algorithm, protocol, channels, kernel times), and join it to the trace.",
)


KERNELS = option(
    "--kernels",
    type=STEPS,
    help="Record the GPU's kernels in steps A up to, not including, B, A at least 1.  [default: none]",
)


@launch_command(LaunchMode.OBSERVE, output="observed.prism", extra=[PAYLOADS, NCCL_PROFILER, KERNELS, DEVICE_MEMORY])
def command() -> None:
    """Run a job as it is, every rank real, and write its timed graph.

    Write `prism observe` where you wrote `torchrun`; the script stays as it is, and so does what it prints.

    \b
    Example, two ranks on this machine:
        prism observe --nproc-per-node 2 -o real.prism -- train.py --lr 0.1

    The options of Prism end at the script, as torchrun's do; the `--` before it may be left out.

    \b
    Under another launcher (torchrun, Slurm), set the environment in place of this command:
        PRISM_MODE=observe PRISM_OUTPUT=real.prism torchrun --nproc-per-node 2 train.py
    """
