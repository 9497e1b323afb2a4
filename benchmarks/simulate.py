"""Measures ``prism simulate``: CPU time and peak memory of the whole command, by number of units.

It writes its own jobs: pipelines of 4 stages with data-parallel replicas, every rank with own times, or by roles.

    python benchmarks/simulate.py                 # up to 2.7 million units at 1,024 ranks
    python benchmarks/simulate.py --huge          # also 100 million units at 8,192 ranks by roles (minutes to write)
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from trace_data import Columns, JobShape, _one_step, groups_of, units_of

from prismtrace import ABSENT, GraphKind, TraceWriter, UnitKind


def calibrated(shape: JobShape, rank: int, *, num_steps: int, own_times: bool) -> Columns:
    """The units of a rank with transfers and gaps, as a calibration gives them."""
    units = num_steps * len(_one_step(shape, shape.stage(rank)))
    sized = JobShape(shape.num_ranks, shape.num_stages, shape.num_microbatches, units)
    columns = units_of(sized, rank, own_times=own_times)
    kind = columns["kind"]
    moves = (kind != UnitKind.COMPUTE) & (kind != UnitKind.WAIT)
    columns["transfer_ns"] = np.where(moves, columns["end_ns"] - columns["start_ns"], ABSENT)
    columns["gap_ns"] = np.where(moves, ABSENT, 5_000)
    return columns


def write(path: Path, shape: JobShape, *, num_steps: int, by_roles: bool) -> int:
    """Write a job; returns its units."""
    total = 0
    with TraceWriter(path, graph_kind=GraphKind.CALIBRATED, world_size=shape.num_ranks, overwrite=True) as writer:
        for group in groups_of(shape):
            writer.add_group(group)
        for rank in range(shape.num_ranks):
            role = shape.stage(rank) + 1 if by_roles else None
            columns = calibrated(shape, rank, num_steps=num_steps, own_times=not by_roles)
            if role is not None and rank % shape.replicas == 0:
                writer.add_role(role, columns)
            writer.add_units(rank, columns, role=role)
            total += len(columns["kind"])
    return total


def run(path: Path) -> tuple[float, float]:
    """CPU seconds and peak MiB of one ``prism simulate``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import resource, sys; from prism_sdk.cli.main import run; code = run(['simulate', sys.argv[1]]); "
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); sys.exit(code)"
    )
    # as installed programs are: with their byte code kept, also where the environment forbids it
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ.setdefault("PYTHONPYCACHEPREFIX", str(path.with_name("bytecode")))
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, float(done.stdout.rsplit("peak", 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--huge", action="store_true", help="also 100 million units at 8,192 ranks by roles")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    jobs = [(JobShape(1024), steps, False) for steps in (6, 12, 23, 46)]
    if arguments.huge:
        jobs += [(JobShape(8192, num_microbatches=64), steps, True) for steps in (7, 29)]
    print("| ranks | units | by roles | file, MB | CPU, s | peak, MiB |")
    print("|---|---|---|---|---|---|")
    for shape, steps, by_roles in jobs:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.prism"
            units = write(path, shape, num_steps=steps, by_roles=by_roles)
            run(path)  # compiles, and fills the file cache
            results = [run(path) for _ in range(1 if units > 10**7 else arguments.repeats)]
            cpu = statistics.median(result[0] for result in results)
            size = path.stat().st_size / 1e6
            peak = max(result[1] for result in results)
            roles = "yes" if by_roles else "no"
            print(f"| {shape.num_ranks:,} | {units:,} | {roles} | {size:.1f} | {cpu:.2f} | {peak:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
