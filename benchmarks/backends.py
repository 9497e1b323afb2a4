"""Compares the replay backends: step times of emulations of one job under each of them, and of its real runs.

    python benchmarks/backends.py --ranks 4 --sandbox 0,1 -- benchmarks/paced_training.py --wrap ddp --forward-ms 20

The job is recorded and calibrated once; real runs and emulations take turns. A repeat's error is the emulated mean step
against the mean of the real runs before and after it. Prints the figures as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import prismtrace

FACTS = (
    "release_late_median_ns", "release_late_max_ns", "carried_operations", "sent_bytes", "scheduled_sent_bytes",
    "received_bytes", "scheduled_received_bytes", "messages_sent", "messages_received",
)  # fmt: skip


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", "prism_sdk.cli.main", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout[-4000:]}")


def mean_step_ms(path: Path, rank: int, skip: int) -> float:
    with prismtrace.TraceReader(path) as reader:
        ends = reader.steps(rank).end_ns.tolist()[max(skip - 1, 0) :]
    return (ends[-1] - ends[0]) / 1e6 / (len(ends) - 1)


def facts(path: Path, rank: int) -> dict[str, int]:
    with prismtrace.TraceReader(path) as reader:
        return {name: int(reader.metadata.get(f"rank.{rank}.{name}", -1)) for name in FACTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sandbox", default="0")
    parser.add_argument("--backends", default="local,gloo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--record-steps", type=int, default=5)
    parser.add_argument("--skip", type=int, default=2, help="steps at the start that do not count")
    parser.add_argument("--option", action="append", default=[], help="passed to calibrate as -O")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    recorded, script = [*script, "--steps", str(args.record_steps)], [*script, "--steps", str(args.steps)]
    options = [part for option in args.option for part in ("-O", option)]
    backends, rank = args.backends.split(","), int(args.sandbox.split(",")[0])
    size = ("--nproc-per-node", str(args.ranks))
    real: list[float] = []
    emulated: dict[str, list[float]] = {name: [] for name in backends}
    told: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bare, graph, path = str(work / "bare.prism"), str(work / "graph.prism"), work / "run.prism"
        run("record", *size, "-o", bare, "--", *recorded)
        run("calibrate", "--graph", bare, "-o", graph, *options, "--", *script)
        for repeat in range(args.repeats + 1):
            run("observe", *size, "-o", str(path), "--", *script)
            real.append(mean_step_ms(path, rank, args.skip))
            print(f"real {real[-1]:.2f} ms", flush=True)
            for name in backends if repeat < args.repeats else ():
                where = ("--graph", graph, "--sandbox", args.sandbox, "--backend", name, "-o", str(path))
                run("emulate", *where, "--", *script)
                emulated[name].append(mean_step_ms(path, rank, args.skip))
                told[name] = facts(path, rank)
                print(f"{name} {emulated[name][-1]:.2f} ms", flush=True)
    around = [sum(pair) / 2 for pair in itertools.pairwise(real)]
    errors = {
        name: [100 * (value / reference - 1) for value, reference in zip(values, around, strict=True)]
        for name, values in emulated.items()
    }
    result = {
        "ranks": args.ranks, "sandbox": args.sandbox, "script": " ".join(script), "real_ms": real,
        "emulated_ms": emulated, "error_percent": errors,
        "mean_error_percent": {name: sum(values) / len(values) for name, values in errors.items()},
        "worst_error_percent": {name: max(values, key=abs) for name, values in errors.items()},
        "last_run": told,
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
