"""Compares the step time of real runs with that of emulations of one of their ranks, in interleaved repeats.

    python benchmarks/step_time.py --ranks 8 --sandbox-cpus 2 --repeats 5 -- examples/train_fsdp2_gpt.py

The real job has one CPU a rank; recording, calibration and emulation get `--sandbox-cpus` of the same CPUs.  A repeat
is a calibration and an emulation, with a real run before and one after it; its error is the emulated mean step against
the mean of these two, so that a machine whose speed drifts falsifies as little as can be.  Prints the figures as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import prismtrace


def run(cpus: list[int], *arguments: str) -> float:
    started = time.monotonic()
    command = ["taskset", "-c", ",".join(map(str, cpus)), sys.executable, "-m", "prism_sdk.cli.main", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout[-4000:]}")
    return time.monotonic() - started


def step_times_ms(path: Path, rank: int, skip: int) -> list[float]:
    """Durations of the steps of `rank`, without the first `skip`."""
    with prismtrace.TraceReader(path) as reader:
        ends = reader.steps(rank).end_ns.tolist()
    return [(b - a) / 1e6 for a, b in itertools.pairwise(ends)][max(skip - 1, 0) :]


def losses(path: Path, rank: int) -> list[float]:
    with prismtrace.TraceReader(path) as reader:
        return list(reader.steps(rank).loss.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sandbox", type=int, default=0, help="the rank to emulate")
    parser.add_argument("--sandbox-cpus", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip", type=int, default=2, help="steps at the start that do not count")
    parser.add_argument("--option", action="append", default=[], help="passed to calibrate as -O")
    parser.add_argument("--emulate-option", action="append", default=[], help="passed to emulate as -O")
    parser.add_argument("--steps", type=int, default=16, help="steps of each run (passed to the script)")
    parser.add_argument("--record-steps", type=int, default=5, help="steps of the recording; its values serve the rest")
    parser.add_argument("--any-cpus", action="store_true", help="the real job may have fewer CPUs than ranks")
    parser.add_argument(
        "--observed-transfers", action="store_true", help="take transfers from a real run before the others"
    )
    parser.add_argument("--one-calibration", action="store_true", help="calibrate once, not in every repeat")
    parser.add_argument("--json", type=Path)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    recorded, script = [*script, "--steps", str(args.record_steps)], [*script, "--steps", str(args.steps)]
    cpus = sorted(os.sched_getaffinity(0))
    real_cpus, few = cpus[: args.ranks], cpus[: args.sandbox_cpus]
    if len(real_cpus) < args.ranks and not args.any_cpus:
        sys.exit(f"{args.ranks} ranks need {args.ranks} CPUs, this process may use {len(cpus)}")
    options = [part for option in args.option for part in ("-O", option)]
    emulate_options = [part for option in args.emulate_option for part in ("-O", option)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bare, graph = str(work / "bare.prism"), str(work / "graph.prism")
        walls = {"record": run(few, "record", "--nproc-per-node", str(args.ranks), "-o", bare, "--", *recorded)}
        real: list[list[float]] = []
        emulated: list[list[float]] = []
        predicted: list[float] = []
        if args.observed_transfers:
            path = work / "before.prism"
            run(real_cpus, "observe", "--nproc-per-node", str(args.ranks), "-o", str(path), "--", *script)
            print(f"real {mean(step_times_ms(path, args.sandbox, args.skip)):.3f} ms, for its transfers", flush=True)
            options += ["-O", f"transfers={path}"]
        for repeat in range(args.repeats + 1):
            path = work / f"real{repeat}.prism"
            launch = ("--nproc-per-node", str(args.ranks), "-o", str(path))
            walls["observe"] = run(real_cpus, "observe", *launch, "--", *script)
            real.append(step_times_ms(path, args.sandbox, args.skip))
            print(f"real {mean(real[-1]):.3f} ms", flush=True)
            if repeat == args.repeats:
                break
            if not (args.one_calibration and predicted):
                walls["calibrate"] = run(few, "calibrate", "--graph", bare, "-o", graph, *options, "--", *script)
            with prismtrace.TraceReader(graph) as reader:
                predicted.append(float(reader.metadata["calibration.step_ns"]) / 1e6)
            path = work / f"emulated{repeat}.prism"
            walls["emulate"] = run(
                few, "emulate", "--graph", graph, "--sandbox", str(args.sandbox), "-o", str(path), *emulate_options,
                "--", *script,
            )  # fmt: skip
            emulated.append(step_times_ms(path, args.sandbox, args.skip))
            print(f"emulated {mean(emulated[-1]):.3f} ms, predicted {predicted[-1]:.3f} ms", flush=True)
        runs = [losses(work / f"{kind}0.prism", args.sandbox)[: args.record_steps] for kind in ("real", "emulated")]
        loss_difference = max(abs(a - b) for a, b in zip(*runs, strict=True))
    real_means, emulated_means = [mean(r) for r in real], [mean(e) for e in emulated]
    around = [mean(pair) for pair in itertools.pairwise(real_means)]
    errors = [100 * (value / reference - 1) for value, reference in zip(emulated_means, around, strict=True)]
    changes = [100 * (after / before - 1) for before, after in itertools.pairwise(real_means)]
    result = {
        "ranks": args.ranks, "sandbox_cpus": args.sandbox_cpus, "script": " ".join(script), "torch": _torch(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs", "real_ms": real_means, "emulated_ms": emulated_means,
        "real_median_ms": [statistics.median(r) for r in real],
        "emulated_median_ms": [statistics.median(e) for e in emulated],
        "error_percent": errors, "mean_error_percent": mean(errors), "worst_error_percent": max(errors, key=abs),
        "predicted_error_percent": mean([100 * (p / r - 1) for p, r in zip(predicted, around, strict=True)]),
        "real_change_percent": changes, "mean_real_change_percent": mean([abs(change) for change in changes]),
        "predicted_ms": predicted, "largest_loss_difference": loss_difference, "wall_s": walls,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _torch() -> str:
    import importlib.metadata

    return importlib.metadata.version("torch")


if __name__ == "__main__":
    main()
