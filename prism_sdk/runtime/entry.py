"""The entry point that torch calls at the end of `import torch` (group `torch.backends`).

Responsible for starting the rank agent under a foreign launcher, by environment variable alone.  It must never disturb
an `import torch`: without PRISM_MODE it returns at once, and no error leaves it.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise

_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})
_LAUNCHER_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})


def autoload() -> None:
    """Start observing if PRISM_MODE asks for it and this process is a rank (not a launcher, not a forked worker)."""
    if "PRISM_MODE" not in os.environ:
        return
    try:
        _start()
    except BaseException as error:
        sys.stderr.write(f"prism: not observing this process: {error}\n")


def _start() -> None:
    import json
    import multiprocessing

    from prism_sdk.errors import SettingsError, UsageError
    from prism_sdk.settings import Settings

    if _is_launcher():
        return
    settings = Settings.from_environ()
    if settings.rank is None or settings.world_size is None or multiprocessing.parent_process() is not None:
        return
    if settings.mode != "observe":
        raise UsageError(
            f"PRISM_MODE={settings.mode} needs Prism's own launcher", hint="use `prism record` or `prism emulate`"
        )
    if settings.output is None:
        raise UsageError("PRISM_OUTPUT is not set", hint="set it to the trace to write, e.g. PRISM_OUTPUT=run.prism")
    from prism_sdk.plugins import PluginManager
    from prism_sdk.runtime.agent import start_under_foreign_launcher
    from prism_sdk.runtime.config import LaunchMode, StepRange
    from prism_sdk.runtime.ranks import RankSpec
    from prism_sdk.runtime.shards import parts_directory

    try:
        steps = StepRange.parse(settings.steps or ":")
    except ValueError as error:
        raise SettingsError("PRISM_STEPS", value=str(settings.steps), expected=f"A:B ({error})") from None
    adapters = tuple(PluginManager(settings, only=("adapter",)).adapters())
    os.environ.pop("PRISM_MODE")  # what this rank starts itself (workers, compilers) is not observed
    start_under_foreign_launcher(
        RankSpec(
            mode=LaunchMode.OBSERVE, rank=settings.rank, world_size=settings.world_size, local_rank=0, target="",
            is_module=False, arguments=(), parts_dir=parts_directory(settings.output), token="",
            metadata={"job.argv": json.dumps(sys.argv), "job.launcher": "foreign"}, steps=steps, adapters=adapters,
        )
    )  # fmt: skip


def _is_launcher() -> bool:
    """Whether this process only starts ranks: Slurm gives torchrun a rank number of its own."""
    words = sys.orig_argv[1:4]
    names = {os.path.basename(word) for word in words}
    modules = {after for word, after in pairwise(words) if word == "-m"}
    return bool(names & _LAUNCHERS) or bool(modules & _LAUNCHER_MODULES)
