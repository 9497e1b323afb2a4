"""What the fork server does before it forks: it makes ranks cheap and leaves nothing that a rank could notice."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from prismtrace import TraceReader


def test_the_rehearsal_runs_and_leaves_nothing_that_a_rank_could_notice() -> None:
    code = """
import gc, json, os, sys, threading, warnings
import torch, torch.distributed as dist
from prism_sdk.runtime import preload

shown = []
warnings.showwarning = lambda *args: shown.append(str(args))
before = torch.get_rng_state(), sys.excepthook, dict(os.environ), torch.get_num_threads()
preload.prepare(imports=["torch._inductor.compile_fx"])
same_environment = before[2] == dict(os.environ)
with preload._one_thread():
    tasks = len(os.listdir("/proc/self/task"))
    preload._rehearse()
    started = len(os.listdir("/proc/self/task")) - tasks
world = dist.distributed_c10d._world
print(json.dumps({
    "same_random_state": torch.equal(before[0], torch.get_rng_state()),
    "same_hook": before[1] is sys.excepthook,
    "same_environment": same_environment,
    "same_threads": before[3] == torch.get_num_threads() and threading.active_count() == 1 and started == 0,
    "initialized": dist.is_initialized(),
    "groups": world.group_count + len(world.pg_map) + len(world.pg_names),
    "shown": shown,
    "rehearsed": "torch.optim.adamw" in sys.modules and hasattr(torch.optim.AdamW.step, "hooked"),
    "kept": len(preload._kept) > 0,
    "collects": gc.isenabled() and gc.get_freeze_count() > 100_000,
    "of_simulations": sorted({"numba", "prism_sdk.simulate"} & sys.modules.keys()),
}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "same_random_state": True,
        "same_hook": True,
        "same_environment": True,
        "same_threads": True,
        "initialized": False,
        "groups": 0,
        "shown": [],
        "rehearsed": True,
        "kept": True,
        "collects": True,
        "of_simulations": [],
    }


def test_a_rank_of_a_tiny_job_has_less_than_13_mib_of_its_own(bench: Any) -> None:
    script = bench.script("""
    import pathlib, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    private = sum(
        int(line.split()[1])
        for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Private")
    )
    pathlib.Path(f"private-{dist.get_rank()}").write_text(str(private))
    dist.barrier()  # all are alive while they look: a page is shared as long as two have it
    """)
    ended = bench.finish(bench.prism("record", script, "--nproc-per-node", "3"))
    assert ended.code == 0, ended.err
    sizes = sorted(int((bench.folder / f"private-{rank}").read_text()) for rank in range(3))
    assert sizes[0] < 13 * 1024, sizes
    with TraceReader(bench.output) as reader:
        assert reader.metadata["job.status"] == "complete"
