"""Runs another training script and writes the durations of its optimizer steps, without Prism's help.

torchrun --nproc-per-node 2 benchmarks/timed_steps.py times.json examples/train_fsdp2_gpt.py --steps 12
"""

import atexit
import itertools
import json
import os
import runpy
import sys
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

output, script, *arguments = sys.argv[1:]
ends: list[int] = []
register_optimizer_step_post_hook(lambda *_: ends.append(time.monotonic_ns()))


def write() -> None:
    if os.environ["RANK"] == "0":
        with open(output, "w") as file:
            json.dump([(b - a) / 1e6 for a, b in itertools.pairwise(ends)], file)


atexit.register(write)
sys.argv = [script, *arguments]
sys.path[0] = os.path.dirname(os.path.abspath(script))
runpy.run_path(script, run_name="__main__")
