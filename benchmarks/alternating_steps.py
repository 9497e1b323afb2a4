"""Runs another training script under `prism observe` and switches observing off and on between its steps.

    prism observe --nproc-per-node 2 -o o.prism -- benchmarks/alternating_steps.py FOLDER on-off script.py --steps 200

Blocks of three steps go in pairs, one with and one without, in an order drawn by lot that is the same in all ranks.
Between blocks the ranks meet, switch, and meet again, so that all of them switch together; that time is in no step, and
the first step of a block, in which the interpreter's caches are filled anew, does not count.  Off means: torch's own
kernels, no wrappers of adapters, the hooks of backward and optimizer return at once.  With `off-off` for `on-off` every
step is without, and the difference of the pairs is noise.  FOLDER/RANK.json gets for each block whether it was on,
the wall time of its two steps and the CPU time of the process in ns.  The trace that is written means nothing.
"""

import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import sys
import time
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from prism_sdk.runtime import intercept
from prism_sdk.runtime.activating import activate_adapters
from prism_sdk.runtime.agent import Agent

WARM_UP = 4  # blocks
BLOCK = 3  # steps


class Switch:
    """Observing in this rank, on or off."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.own_pid = agent.interceptor.pid
        self.is_on = True

    def turn(self, on: bool) -> None:
        if on == self.is_on:
            return
        agent, spec = self.agent, self.agent.spec
        self.is_on = on
        agent.interceptor.pid = self.own_pid if on else -1  # what `active` looks at
        if on:
            intercept.replace_kernels()
            agent._naming = activate_adapters(spec.adapters or (), spec.plugins, agent.tracer, agent._adapters)
            agent.tracer.resume()
        else:
            intercept.restore_kernels()
            agent._adapters.close()
            agent._adapters = contextlib.ExitStack()


class Steps:
    """Dates the steps, and switches between them."""

    def __init__(self, switch: Switch, *, alternates: bool) -> None:
        self.switch = switch
        self.alternates = alternates
        self.lots = random.Random(7)
        self.turns: list[bool] = []
        self.rows: list[tuple[bool, int, int]] = []
        self.on = True
        self.num_steps = 0
        self.began = (0, 0)  # wall and CPU clock behind the first step of the block

    def next_turn(self) -> bool:
        """Whether the next block is one with observing (in an `off-off` run: is counted as one)."""
        if not self.turns:
            first = self.lots.random() < 0.5
            self.turns = [not first, first]
        return self.turns.pop()

    def ended(self, *_: Any) -> None:
        now, cpu = time.monotonic_ns(), time.process_time_ns()
        self.num_steps += 1
        place = self.num_steps % BLOCK
        if place:
            self.began = (now, cpu) if place == 1 else self.began
            return
        self.rows.append((self.on, now - self.began[0], cpu - self.began[1]))
        self.on = self.next_turn()
        dist.barrier()
        self.switch.turn(self.on and self.alternates)
        dist.barrier()


def main() -> None:
    folder, way, script, *arguments = sys.argv[1:]
    agent = next(one for one in gc.get_objects() if isinstance(one, Agent))
    steps = Steps(Switch(agent), alternates=way == "on-off")
    register_optimizer_step_post_hook(steps.ended)
    rank = os.environ["RANK"]

    def write() -> None:
        steps.switch.turn(True)  # the end of a rank is that of an observed one
        with open(os.path.join(folder, f"{rank}.json"), "w") as file:
            json.dump(steps.rows[1 + WARM_UP :], file)  # the first one was drawn by nobody

    atexit.register(write)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


main()
