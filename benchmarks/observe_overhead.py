"""What observing costs: step times under `prism observe` against torchrun, in interleaved repeats.

    python benchmarks/observe_overhead.py --repeats 5 -- examples/train_fsdp2_gpt.py --steps 12

Both run the same wrapper that dates optimizer steps by itself; ranks are not pinned in either.  Where runs differ by
more than observing can cost, one run tells more, in which steps with and without it alternate:

    python benchmarks/observe_overhead.py --alternate -- examples/train_fsdp2_gpt.py --steps 240

It prints the median of the differences of pairs of blocks of two steps with a 95 % interval (bootstrap over pairs), for
wall time (the slowest rank's) and CPU time (the sum of all ranks), and the same of a run in which nothing alternates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ALTERNATING = Path(__file__).with_name("alternating_steps.py")
TIMED = Path(__file__).with_name("timed_steps.py")


def steps_ms(launcher: list[str], out: Path, script: list[str]) -> list[float]:
    command = [sys.executable, *launcher, str(TIMED), str(out), *script]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    times: list[float] = json.loads(out.read_text())
    return times[1:]


def pairs(folder: Path, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """The ns of a step with and without observing, wall and CPU: two arrays of shape (pairs of blocks, 2)."""
    rows = np.array([json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)])
    rows = rows[:, : rows.shape[1] // 2 * 2]  # rank, block, (on, wall, cpu)
    is_on = rows[0, :, 0] == 1
    found = []
    for values in (rows[:, :, 1].max(axis=0), rows[:, :, 2].sum(axis=0)):
        found.append(np.stack([values[is_on], values[~is_on]], axis=1) / 2)
    return found[0], found[1]


def told(name: str, pair: np.ndarray) -> str:
    """Median and mean of what observing adds, in percent of a step without it."""
    base = np.median(pair[:, 1])
    added = (pair[:, 0] - pair[:, 1]) / base * 100
    lots = np.random.default_rng(0).integers(len(added), size=(4000, len(added)))
    medians, means = np.median(added[lots], axis=1), added[lots].mean(axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    mean_low, mean_high = np.percentile(means, [2.5, 97.5])
    return (f"{name}: step {base / 1e6:.2f} ms, added {np.median(added):+.2f} % (95 %: {low:+.2f} to {high:+.2f}), "
            f"mean {added.mean():+.2f} % ({mean_low:+.2f} to {mean_high:+.2f}), {len(added)} pairs")  # fmt: skip


def alternate(num_ranks: int, script: list[str]) -> None:
    for way, title in (("on-off", "observing in every other block of steps"), ("off-off", "in none: noise")):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "prism_sdk.cli.main", "observe", "-q", f"--nproc-per-node={num_ranks}",
                       "-o", f"{folder}/o.prism", "--", str(ALTERNATING), folder, way, *script]  # fmt: skip
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
            wall, cpu = pairs(Path(folder), num_ranks)
        print(f"{title}\n  {told('wall', wall)}\n  {told('CPU ', cpu)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alternate", action="store_true", help="with and without observing in one run")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.alternate:
        alternate(args.ranks, script)
        return
    plain: list[float] = []
    observed: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        nproc = f"--nproc-per-node={args.ranks}"
        torchrun = ["-m", "torch.distributed.run", "--standalone", nproc]
        prism = ["-m", "prism_sdk.cli.main", "observe", "-q", "--no-pin", nproc, "-o", str(work / "o.prism"), "--"]
        for repeat in range(args.repeats):
            order = [(torchrun, plain), (prism, observed)]
            for launcher, found in order if repeat % 2 == 0 else reversed(order):
                found.append(statistics.median(steps_ms(launcher, work / "times.json", script)))
            print(f"repeat {repeat}: torchrun {plain[-1]:.3f} ms, observe {observed[-1]:.3f} ms", flush=True)
    middle = statistics.median(plain)
    overhead = 100 * (statistics.median(observed) / middle - 1)
    spread = 100 * (max(plain) - min(plain)) / middle
    pairs = [100 * (o / p - 1) for o, p in zip(observed, plain, strict=True)]
    print(f"overhead {overhead:+.2f} % (median of {args.repeats}), pairs {[round(p, 2) for p in pairs]} %, "
          f"spread of torchrun alone {spread:.2f} %")  # fmt: skip


if __name__ == "__main__":
    main()
