"""Wall time, start-up, memory and file size of recordings by roles, at a number of logical ranks.

    python benchmarks/roles.py --ranks 64 1024 8192 --slots 2

Jobs: FSDP2 over all ranks, hybrid sharding (groups of eight), a mixture of experts with tensor, pipeline, expert and
data parallelism in plain torch, and a script of Megatron-Core if one is given.  Start-up is the time until the
roles are known, so until every process group of the first rank was made.  Memory is the sum of the private pages of all
rank processes, sampled twice a second, and that of the launcher at its largest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record_scale import private_kib

from prism_sdk.runtime.forkserver import descendants_of
from prismtrace import TraceReader

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

JOBS = {
    "fsdp2": [EXAMPLES / "train_fsdp2_gpt.py", "--steps", "2", "--batch", "2"],
    "hsdp": [EXAMPLES / "train_fsdp2_gpt.py", "--steps", "2", "--batch", "2", "--shard", "8"],
    "moe 4d": [EXAMPLES / "train_moe_4d.py", "--tp", "2", "--pp", "4", "--ep", "4", "--steps", "2"],
}


def run(name: str, ranks: int, slots: int, script: list[Path | str], options: list[str]) -> dict[str, object]:
    """One recording, and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "t.prism"
        command = [sys.executable, "-m", "prism_sdk.cli.main", "record", f"--world-size={ranks}", "--roles=auto",
                   f"--slots={slots}", "-o", str(out), *options, "--", *map(str, script)]  # fmt: skip
        started = time.monotonic()
        known = 0.0
        total = launcher = 0
        with open(Path(folder) / "log", "w+") as log:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
            while process.poll() is None:
                children = descendants_of(process.pid)
                total = max(total, sum(private_kib(pid) for pid in children[1:]))  # less the fork server
                launcher = max(launcher, private_kib(process.pid))
                text = (Path(folder) / "log").read_text()
                known = known or (time.monotonic() - started if " ranks run" in text else 0.0)
                time.sleep(0.25)
            wall = time.monotonic() - started
            text = (Path(folder) / "log").read_text()
        if process.returncode:
            sys.exit(f"{name}: the recording failed\n{text[-3000:]}")
        running = re.search(r"(\d+) of \d+ ranks run", text)
        with TraceReader(out) as reader:
            units = sum(reader.num_units(rank) for rank in reader.ranks)
            facts = reader.metadata
            return {
                "job": name, "ranks": ranks, "processes": int(running[1]) if running else 0,
                "roles": int(facts["roles.num_roles"]), "groups": len(reader.groups), "wall_s": round(wall, 1),
                "start_s": round(known, 1), "ranks_mib": total // 1024, "launcher_mib": launcher // 1024,
                "units": units, "file_kib": out.stat().st_size // 1024,
                "disagreements": len(json.loads(facts["roles.disagreements"])),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), help=f"of {', '.join(JOBS)} and megatron")
    parser.add_argument("--megatron", type=Path, help="a Megatron-Core training script, for the job megatron")
    parser.add_argument("--megatron-args", default="--tp 2 --pp 4 --steps 2")
    args = parser.parse_args()
    jobs: dict[str, tuple[list[Path | str], list[str]]] = {name: (JOBS[name], []) for name in args.jobs if name in JOBS}
    if args.megatron and importlib.util.find_spec("megatron") is not None:
        jobs["megatron"] = ([args.megatron, *args.megatron_args.split()], ["--device", "cpu"])
    for name, (script, options) in jobs.items():
        for ranks in args.ranks:
            print(json.dumps(run(name, ranks, args.slots, script, options)), flush=True)


if __name__ == "__main__":
    main()
