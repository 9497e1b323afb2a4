"""Measures the NCCL profiler without a GPU: nanoseconds a callback, and drops at a given rate of events.

    python benchmarks/nccl_profiler.py                 # cost, and 10^7 events at 10^6 a second
    python benchmarks/nccl_profiler.py --sanitizers    # 10^7 events each under ASan with UBSan, and under TSan

The program that plays NCCL (nccl_profiler/tests/host.c) is compiled with the library's sources.  The cost of a callback
contains what the host program needs to fill in a descriptor, and, per batch of 50, two readings of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "nccl_profiler" / "tests"))
from host_runs import Build, make_build, run_host

from prism_sdk.nccl import read_records

CHANNELS = 24
EVENTS_A_COLLECTIVE = 5 + 1 + CHANNELS  # group api, coll api, launch, group, collective; proxy; kernel channels


def cost(made: Build, folder: Path, repeats: int) -> dict[str, Any]:
    """Median over repeats of the median nanoseconds of each callback."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        played = run_host(made, folder, 5, "measure", 100_000, environ={"PRISM_NCCL_EVENTS": "default"})
        for name, value in played.report.items():
            if name.endswith("_ns") and name != "wall_ns":
                found.setdefault(name, []).append(value)
        clean(folder)
    return {name: statistics.median(values) for name, values in found.items()}


def clean(folder: Path) -> None:
    for left in folder.glob("*.ncclrec*"):
        left.unlink()


def rate(made: Build, folder: Path, *, num_events: int, per_s: float, ring_kib: int, comms: int = 1) -> dict[str, Any]:
    """Play events at a rate (0: as fast as can be) and say what was recorded and dropped."""
    num = num_events // EVENTS_A_COLLECTIVE // comms
    played = run_host(
        made, folder, 5, "normal", num, comms, CHANNELS, per_s,
        environ={"PRISM_NCCL_EVENTS": "default", "PRISM_NCCL_RING_KIB": str(ring_kib)},
        timeout_s=1800,
    )  # fmt: skip
    began = time.monotonic()
    file = read_records(played.files[0])
    num_recorded = len(file.events)
    result = {
        "exit_code": played.exit_code,
        "events": num_recorded,
        "dropped": file.num_lost_events + file.num_orphans,
        "lost_ends": file.num_lost_stops,
        "seconds": played.report["wall_ns"] / 1e9,
        "events_per_s": (num_recorded + file.num_lost_events + file.num_orphans) / (played.report["wall_ns"] / 1e9),
        "file_bytes": played.files[0].stat().st_size,
        "read_seconds": time.monotonic() - began,
        "is_complete": file.is_complete,
    }
    clean(folder)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--per-s", type=float, default=1e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sanitizers", action="store_true", help="run under sanitizers in place of measuring")
    options = parser.parse_args()
    results: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.sanitizers:
            for kind in ("address", "thread"):
                made = make_build(kind, Path(tempfile.mkdtemp(dir=name)))
                results[kind] = rate(made, folder, num_events=options.events, per_s=0, ring_kib=4096, comms=2)
        else:
            made = make_build("plain", Path(tempfile.mkdtemp(dir=name)))
            results["callback"] = cost(made, folder, options.repeats)
            results["paced"] = rate(made, folder, num_events=options.events, per_s=options.per_s, ring_kib=4096)
    print(json.dumps(results, indent=2))


main()
