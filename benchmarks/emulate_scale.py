"""Measures what a sandbox rank costs by the size of its job: planning before the run, and the engine at each step.

It writes its own jobs by roles: pipelines of 4 stages (1F1B) with data-parallel replicas.
The engine is driven as a rank drives it: a post and a completion for each boundary operation, no program.

    python benchmarks/emulate_scale.py
    python benchmarks/emulate_scale.py --whole     # also plans from the whole graph, up to 1,024 ranks
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from simulate import write
from trace_data import JobShape

from prism_sdk.graph.contract import contract
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.timing import Timing
from prism_sdk.runtime.emulating import boundary_graph
from prism_sdk.runtime.engine import BoundaryEngine
from prism_sdk.runtime.manifest import read_scripts
from prismtrace import TraceReader


def measure(path: Path, *, rank: int, whole: bool, steps: int) -> dict[str, float]:
    """Planning and driving, in this process."""
    began = time.process_time()
    with TraceReader(path) as reader:
        script = read_scripts(reader, (rank,))[rank]
    graph = JobGraph.load(path) if whole else boundary_graph(path, (rank,))
    plan = contract(graph, sandbox_ranks=(rank,), timing=Timing.from_graph(graph), last_step=script.last_step)
    planned = time.process_time() - began
    times = []
    for _ in range(7):
        engine = BoundaryEngine(plan, rank, None)
        engine.start(0)
        began = time.process_time()
        now = 0
        for one in script.expected:
            if one.stream is not None:
                now = max(now, engine.completion(engine.post(one.stream, one.seq, now)))
        times.append(time.process_time() - began)
    return {
        "planned_s": planned, "ranks": len(graph.ranks), "operations": len(plan) / steps,
        "terms": float(plan.term_offsets[-1]) / steps, "engine_us": 1e6 * statistics.median(times) / steps,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "end_ms": now / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="also plan from the whole graph, up to 1,024 ranks")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--one", nargs=3, metavar=("FILE", "RANK", "WHOLE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        path, rank, whole = arguments.one
        print(json.dumps(measure(Path(path), rank=int(rank), whole=whole == "1", steps=arguments.steps)))
        return
    print(
        "| ranks | units | planned from | planning, CPU s | peak, MiB | operations a step | terms a step "
        "| engine, us a step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for num_ranks in (64, 1024, 8192):
        shape = JobShape(num_ranks)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.prism"
            units = write(path, shape, num_steps=arguments.steps, by_roles=True)
            for whole in (False, True) if arguments.whole and num_ranks <= 1024 else (False,):
                command = [sys.executable, __file__, "--steps", str(arguments.steps), "--one", str(path),
                           str(shape.replicas), str(int(whole))]  # fmt: skip
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                r = json.loads(done.stdout)
                print(f"| {num_ranks:,} | {units:,} | {r['ranks']:,} ranks | {r['planned_s']:.1f} | {r['mib']:,.0f} "
                      f"| {r['operations']:.0f} | {r['terms']:.0f} | {r['engine_us']:,.0f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
