"""What observing costs: step times under `prism observe` against torchrun, in interleaved repeats.

    python benchmarks/observe_overhead.py --repeats 5 -- examples/train_fsdp2_gpt.py --steps 12

Both run the same wrapper that dates optimizer steps by itself; ranks are not pinned in either.
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

TIMED = Path(__file__).with_name("timed_steps.py")


def steps_ms(launcher: list[str], out: Path, script: list[str]) -> list[float]:
    command = [sys.executable, *launcher, str(TIMED), str(out), *script]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    times: list[float] = json.loads(out.read_text())
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    os.environ.setdefault("OMP_NUM_THREADS", "1")
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
