"""Compares what-if answers of the simulator with real runs in which the change was really made.

Real runs over gloo on this machine, of paced_training.py (layers sleep) with DDP: a slow rank, several factors, and
another number of replicas. Each answer is simulated from a run without the change.

    python benchmarks/whatif_real.py --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from prism_sdk.simulate import Scenario, load, simulate

PACED = Path(__file__).with_name("paced_training.py")


def observe(folder: Path, name: str, *, ranks: int, imbalance: float) -> Path:
    """One real run; the trace that it leaves."""
    path = folder / f"{name}.prism"
    command = [
        sys.executable, "-m", "prism_sdk.cli.main", "observe", "--nproc-per-node", str(ranks), "-o", str(path), "--",
        str(PACED), "--wrap", "ddp", "--forward-ms", "20", "--steps", "12", "--imbalance", str(imbalance),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cases = [
        ("`--slow rank=1:1.25`", 2, 0.25, Scenario(slow=("rank=1:1.25",))),
        ("`--slow rank=1:1.5`", 2, 0.5, Scenario(slow=("rank=1:1.5",))),
        ("`--slow rank=1:2`", 2, 1.0, Scenario(slow=("rank=1:2",))),
        ("`--dp 4`", 4, 0.0, Scenario(dp=4)),
    ]
    print("| change | unchanged, ms | predicted, ms | real, ms | mean error | worst error |")
    print("|---|---|---|---|---|---|")
    for words, ranks, imbalance, scenario in cases:
        before, predicted, real = [], [], []
        for repeat in range(arguments.repeats):
            with tempfile.TemporaryDirectory() as name:
                base = observe(Path(name), f"base{repeat}", ranks=2, imbalance=0.0)
                changed = observe(Path(name), f"changed{repeat}", ranks=ranks, imbalance=imbalance)
                before.append(simulate(load(base)).step_time_ns / 1e6)
                predicted.append(scenario.run(base).step_time_ns / 1e6)
                real.append(simulate(load(changed)).step_time_ns / 1e6)
        errors = [100 * (p / r - 1) for p, r in zip(predicted, real, strict=True)]
        shown = " | ".join(", ".join(f"{v:.1f}" for v in values) for values in (before, predicted, real))
        worst = max(errors, key=abs)
        print(f"| {words} | {shown} | {statistics.mean(errors):+.2f} % | {worst:+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
