"""One recording over several machines, from the launch to the file.

Responsible for dividing slots among machines, and for beginning again without a machine that went away; what runs is
the recording of launcher.py or of the roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from prism_sdk.errors import RunError
from prism_sdk.runtime.config import LaunchConfig, LaunchResult
from prism_sdk.runtime.coordinator import Coordinator
from prism_sdk.runtime.launcher import run_job
from prism_sdk.runtime.progress import Progress
from prism_sdk.runtime.spread.host import MachineLostError, SpreadHost, Starter
from prism_sdk.runtime.spread.places import MachineSlots, Places, divide
from prism_sdk.wording import counted


def record_spread(
    config: LaunchConfig, progress: Progress, *, starter: Starter, machines: Sequence[tuple[str, int]]
) -> LaunchResult:  # fmt: skip
    """Record the job of `config` on `machines`, each a name that `starter` knows and a number of CPUs.

    What a recording holds does not depend on where ranks run, so it is the same on any machines. Raises PrismError as
    a recording on one machine does, and RunError when the last machine has gone away.
    """
    left = list(machines)
    while True:
        try:
            return _attempt(config, progress, starter, left)
        except MachineLostError as lost:
            del left[lost.number]
            if not left:
                raise RunError(f"{lost.message}, and no other is left", hint=lost.hint) from lost
            progress.say(f"{lost.message}: the job begins again on the {counted(len(left), 'machine')} that "
                         f"{'is' if len(left) == 1 else 'are'} left")  # fmt: skip


def _attempt(
    config: LaunchConfig, progress: Progress, starter: Starter, machines: Sequence[tuple[str, int]]
) -> LaunchResult:  # fmt: skip
    num_slots = config.num_slots or sum(cpus for _, cpus in machines)
    if config.roles is None:
        num_slots = min(num_slots, config.world_size)
    slots = divide(num_slots, [cpus for _, cpus in machines])
    config = replace(config, num_slots=num_slots)
    progress.say(f"{counted(num_slots, 'slot')} over {counted(sum(map(bool, slots)), 'machine')}")

    def equip(policy: Coordinator) -> None:
        places = Places(slots, world_size=None if config.roles else config.world_size)
        policy.slots = MachineSlots(slots, places, pin=config.pin)
        policy.make_host = partial(
            SpreadHost, starter=starter, places=places,
            machines=[(name, num) for (name, _), num in zip(machines, slots, strict=True)],
        )  # fmt: skip

    if config.roles is not None:
        from prism_sdk.runtime.roles.recording import record_by_roles

        return record_by_roles(config, progress, equip=equip)
    policy = Coordinator(num_slots, pin=config.pin)
    equip(policy)
    return run_job(config, policy, progress)
