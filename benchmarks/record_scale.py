"""Wall time and memory of a recording against plain gloo under the same fork server, at a number of ranks.

    python benchmarks/record_scale.py --ranks 16 --repeats 3 -- examples/train_ddp.py --steps 4
    python benchmarks/record_scale.py --ranks 1024 --repeats 0 --no-gloo --payloads none -- \
        examples/train_ddp.py --steps 2

Gloo is `prism observe`: real gloo with all ranks at once.  Memory is the sum over all rank processes of their private
pages (smaps_rollup), sampled twice a second; private memory a rank is the largest sample of one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prism_sdk.runtime.forkserver import descendants_of


def private_kib(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                total += int(line.split()[1])
    return total


def run(verb: str, ranks: int, options: list[str], script: list[str], sample: bool) -> tuple[float, int, int]:
    """Wall seconds, largest sum of private KiB over all processes, largest private KiB of one process."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "t.prism")
        command = [sys.executable, "-m", "prism_sdk.cli.main", verb, "-q", f"--nproc-per-node={ranks}", "-o", out]
        started = time.monotonic()
        with open(Path(folder) / "log", "w") as log:
            process = subprocess.Popen([*command, *options, "--", *script], stdout=log, stderr=subprocess.STDOUT)
            total = largest = 0
            while process.poll() is None:
                if sample:
                    sizes = [private_kib(pid) for pid in descendants_of(process.pid)[1:]]  # without the fork server
                    total, largest = max(total, sum(sizes)), max(largest, *sizes, 0)
                time.sleep(0.5 if not sample else max(0.5, ranks / 256))
        wall = time.monotonic() - started
        if process.returncode:
            sys.exit(f"{verb} failed:\n" + (Path(folder) / "log").read_text()[-3000:])
    return wall, total, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--payloads", default="full")
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    gloo: list[float] = []
    record: list[float] = []
    options = ["--slots", str(args.slots), "--payloads", args.payloads]
    for repeat in range(args.repeats):
        record.append(run("record", args.ranks, options, script, False)[0])
        if not args.no_gloo:
            gloo.append(run("observe", args.ranks, [], script, False)[0])
        print(f"repeat {repeat}: record {record[-1]:.2f} s" + (f", gloo {gloo[-1]:.2f} s" if gloo else ""), flush=True)
    wall, total, largest = run("record", args.ranks, options, script, True)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    if record:
        versus = f"; gloo: median {statistics.median(gloo):.2f} s" if gloo else ""
        print(f"record: median {statistics.median(record):.2f} s{versus}")
    cpu_s = cpu.ru_utime + cpu.ru_stime
    print(f"memory of all ranks {total / 2**20:.2f} GiB, largest rank {largest / 1024:.1f} MiB private")
    print(f"(sampled in one more run of {wall:.1f} s); CPU of all runs {cpu_s:.0f} s")


if __name__ == "__main__":
    main()
