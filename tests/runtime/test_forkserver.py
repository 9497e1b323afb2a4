"""What a rank costs: it shares the pages of what the fork server has imported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"


def test_a_rank_keeps_little_memory_of_its_own_beside_its_model(bench: Any) -> None:
    script = bench.script(f"""
    import os, runpy, sys
    assert {{"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"}} <= sys.modules.keys()
    runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
    private = 0
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Private_Dirty"):
            private += int(line.split()[1])
    print(f"private {{private}} KiB", flush=True)
    """)
    small = ("--width", "64", "--layers", "4", "--batch", "16", "--steps", "3")  # a model of 0.1 MiB
    ended = bench.run("record", script, "--nproc-per-node", "4", "--slots", "2", arguments=small)
    assert ended.code == 0, ended.err
    found = [int(number) for number in re.findall(r"private (\d+) KiB", ended.out)]
    assert len(found) == 4
    assert max(found) < 20 * 1024
