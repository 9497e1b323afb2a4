"""Compares what-if answers of the simulator with real runs in which the change was really made, and with emulations.

Real runs over gloo on this machine whose layers sleep: a slow rank, another number of replicas, all computing scaled
(paced_training.py with DDP), another number of microbatches, another schedule, a slow stage (paced_pipeline.py). Each
answer is simulated from a run without the change. `emulated`: rank 0 among peers of which one computes longer by that
factor, emulated.

    python benchmarks/whatif_real.py --repeats 3 [--only microbatches]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prism_sdk.builtin.slices import write_times
from prism_sdk.simulate import Scenario, load, simulate
from prismtrace import GraphKind, TraceReader, UnitKind

HERE = Path(__file__).parent
DDP = (str(HERE / "paced_training.py"), "--wrap", "ddp", "--steps", "12", "--forward-ms")
PIPELINE = (str(HERE / "paced_pipeline.py"), "--steps", "8")


@dataclass(frozen=True)
class Case:
    """A change: in words, to a real run, and to a simulated one."""

    words: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    scenario: Scenario
    ranks: int = 2
    ranks_after: int | None = None
    can_emulate: bool = False


CASES = (
    Case("--slow rank=1:1.25", (*DDP, "20"), (*DDP, "20", "--imbalance", "0.25"), Scenario(slow=("rank=1:1.25",)),
         can_emulate=True),
    Case("--slow rank=1:1.5", (*DDP, "20"), (*DDP, "20", "--imbalance", "0.5"), Scenario(slow=("rank=1:1.5",)),
         can_emulate=True),
    Case("--slow rank=1:2", (*DDP, "20"), (*DDP, "20", "--imbalance", "1"), Scenario(slow=("rank=1:2",)),
         can_emulate=True),
    Case("--scale kind=compute:1.5", (*DDP, "20"), (*DDP, "30"), Scenario(scale=("kind=compute:1.5",))),
    Case("--dp 4", (*DDP, "20"), (*DDP, "20"), Scenario(dp=4), ranks_after=4),
    Case("--microbatches 8", PIPELINE, (*PIPELINE, "--microbatches", "8"), Scenario(microbatches=8), ranks=4),
    Case("--microbatches 3", (*PIPELINE, "--microbatches", "6"), (*PIPELINE, "--microbatches", "3"),
         Scenario(microbatches=3), ranks=3),
    Case("--schedule gpipe", PIPELINE, (*PIPELINE, "--schedule", "gpipe"), Scenario(schedule="gpipe"), ranks=4),
    Case("--schedule 1f1b", (*PIPELINE, "--schedule", "gpipe"), PIPELINE, Scenario(schedule="1f1b"), ranks=4),
    Case("--slow stage=1:1.5", PIPELINE, (*PIPELINE, "--slow-stage", "1:1.5"), Scenario(slow=("stage=1:1.5",)), ranks=4,
         can_emulate=True),
)  # fmt: skip


def prism(mode: str, output: Path, words: Sequence[str], *options: str) -> Path:
    """`prism MODE` of a program; the trace that it leaves."""
    command = [sys.executable, "-m", "prism_sdk.cli.main", mode, "-o", str(output), *options, "--", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return output


def step_ms(path: Path) -> float:
    return simulate(load(path)).step_time_ns / 1e6


def slowed(graph: Path, output: Path, *, rank: int, factor: float) -> Path:
    """A calibrated graph in which a rank computes so many times as long."""
    with TraceReader(graph) as reader:
        units = reader.units(rank)
        length = np.where(units.kind == UnitKind.COMPUTE, units.end_ns - units.start_ns, 0)
        columns = {rank: {"end_ns": units.end_ns + np.round(length * (factor - 1)).astype(np.int64)}}
    write_times(graph, columns, output, GraphKind.CALIBRATED, {}, with_payloads=True)
    return output


def emulated_ms(folder: Path, case: Case) -> float:
    """The step of rank 0 among peers that are as slow as the simulator made them."""
    size = ("--nproc-per-node", str(case.ranks))
    bare = prism("record", folder / "bare.prism", case.before, *size)
    graph = prism("calibrate", folder / "graph.prism", case.before, "--graph", str(bare))
    changed = slowed(graph, folder / "changed-graph.prism", rank=1, factor=float(case.words.rpartition(":")[2]))
    output = prism("emulate", folder / "emulated.prism", case.before, "--graph", str(changed))
    return step_ms(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases that have this in their words")
    arguments = parser.parse_args()
    print("| change | unchanged, ms | predicted, ms | real, ms | mean error | worst error | emulated, ms |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        if arguments.only not in case.words:
            continue
        before, predicted, real = [], [], []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for repeat in range(arguments.repeats):
                size = ("--nproc-per-node", str(case.ranks))
                base = prism("observe", folder / f"base{repeat}.prism", case.before, *size)
                size = ("--nproc-per-node", str(case.ranks_after or case.ranks))
                changed = prism("observe", folder / f"changed{repeat}.prism", case.after, *size)
                before.append(step_ms(base))
                predicted.append(case.scenario.run(base).step_time_ns / 1e6)
                real.append(step_ms(changed))
            emulated = f"{emulated_ms(folder, case):.1f}" if case.can_emulate else ""
        errors = [100 * (p / r - 1) for p, r in zip(predicted, real, strict=True)]
        shown = " | ".join(", ".join(f"{v:.1f}" for v in values) for values in (before, predicted, real))
        worst = max(errors, key=abs)
        mean = statistics.mean(errors)
        print(f"| `{case.words}` | {shown} | {mean:+.2f} % | {worst:+.2f} % | {emulated} |", flush=True)


if __name__ == "__main__":
    main()
