"""Tries the adapters of Megatron-Core and DeepSpeed on many versions: hooks, and a small recorded job with its names.

    python benchmarks/adapter_versions.py megatron 0.14.0 0.19.2
    python benchmarks/adapter_versions.py deepspeed 0.14.5 0.18.9

It is responsible for installing each version into a folder of its own (`--folder`) and for one line of a table each; it
measures no time. Megatron-Core 0.18 and later need `triton` beside them, which is several hundred MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prismtrace
from prism_sdk.testing import Launches, losses, unit_order

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"


@dataclass(frozen=True)
class Framework:
    """How a framework is installed and what is run."""

    distribution: str
    adapter: str
    job: Path
    options: tuple[str, ...]
    jobs: tuple[tuple[str, ...], ...]


FRAMEWORKS = {
    "megatron": Framework(
        "megatron-core", "MegatronAdapter", PLUGINS / "megatron/tests/megatron_job.py", ("--device", "cpu"),
        (
            ("--tp", "2", "--pp", "2"), ("--pp", "2", "--chunks", "2"),
            ("--pp", "2", "--chunks", "2", "--ep", "2", "--moe"),
        ),
    ),
    "deepspeed": Framework(
        "deepspeed", "DeepSpeedAdapter", PLUGINS / "deepspeed/tests/deepspeed_job.py", (),
        (("pipe:2",), ("zero:3:engine",), ("zero:3:torch",)),
    ),
}  # fmt: skip

_HOOKS = """
import importlib, json, sys
from prism_sdk.adapting.patching import find_hook, version_in_bounds
adapter = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()
version = importlib.metadata.version(adapter.distribution)
missing = []
for hook in adapter.hooks():
    try:
        importlib.import_module(hook.module)
        found = find_hook(hook)
    except ImportError as error:
        found = None
        missing.append(str(error))
    if found is None and hook.required and version_in_bounds(version, hook):
        missing.append(hook.attribute)
print(json.dumps([version, len(adapter.hooks()), missing]))
"""


def install(framework: Framework, version: str, folder: Path) -> Path:
    """The folder with that version, made if it is not there."""
    target = folder / f"{framework.distribution}-{version}"
    if not target.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*command, "--target", str(target), f"{framework.distribution}=={version}"], check=True)
    return target


def hooks(name: str, framework: Framework, environment: dict[str, str]) -> str:
    """How many hooks are there, and which are not."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _HOOKS, f"prismtrace_{name}.adapter", framework.adapter],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    version, number, missing = json.loads(done.stdout.splitlines()[-1])
    return f"{version}: all {number}" if not missing else f"{version}: lacks {', '.join(sorted(set(missing)))}"


def names(trace: Path) -> str:
    """What is wrong with the names of a recording, or `complete`."""
    wrong = []
    sent: Counter[tuple[Any, ...]] = Counter()
    received: Counter[tuple[Any, ...]] = Counter()
    with prismtrace.TraceReader(trace) as reader:
        for rank in reader.ranks:
            if reader.metadata.get(f"rank.{rank}.fidelity") != "full":
                wrong.append(f"rank {rank}: {reader.metadata.get(f'rank.{rank}.fidelity_reasons', 'no names')}")
            order = unit_order(reader, rank)
            passes = {unit.part for unit in order if unit.microbatch is not None}
            if not any(unit.phase == "backward" and unit.microbatch is not None for unit in order):
                wrong.append(f"rank {rank}: no backward pass with a microbatch, parts {sorted(map(str, passes))}")
            for unit in order:
                if unit.op == "send":
                    sent[rank, unit.peer, unit.phase, unit.microbatch] += 1
                elif unit.op == "recv":
                    received[unit.peer, rank, unit.phase, unit.microbatch] += 1
                if unit.op in ("send", "recv") and unit.microbatch is None:
                    wrong.append(f"rank {rank}: a message without microbatch")
    if sent != received:
        wrong.append("sends do not match receives")
    return "; ".join(sorted(set(wrong))[:3]) or "complete"


def main() -> None:
    """Write a table of versions and jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=sorted(FRAMEWORKS))
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("adapter-versions"), help="where versions are installed")
    parser.add_argument("--also", type=Path, action="append", default=[], help="a folder to put on the path too")
    parser.add_argument("--jobs", default="", help="only jobs whose words contain this")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    framework = FRAMEWORKS[options.framework]
    print("| version: hooks | " + " | ".join(" ".join(words) for words in framework.jobs) + " |", flush=True)
    for version in options.versions:
        target = install(framework, version, options.folder)
        paths = [str(path.resolve()) for path in (target, *options.also)]
        # LOCAL_SIZE: old versions of DeepSpeed else ask `numactl` how many ranks a machine has
        environment = {"PYTHONPATH": os.pathsep.join(paths), "LOCAL_SIZE": "4"}
        cells = [hooks(options.framework, framework, environment)]
        launches = Launches(
            options.folder, plugin=f"prismtrace_{options.framework}", environment=environment, timeout_s=240
        )  # fmt: skip
        for words in framework.jobs:
            if options.jobs not in " ".join(words):
                cells.append("-")
                continue
            flags = ["--nproc-per-node", "4", "--slots", "2", *framework.options]
            done = launches.run("record", framework.job, words, options=flags)
            if done.code:
                lines = [line for line in done.err.splitlines() if "Error" in line]
                cells.append(f"fails: {(lines or done.err.splitlines())[-1].strip()[:120]}")
            else:
                cells.append(f"{names(done.trace)}, loss {losses(done.out)[-1]:.6f}")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
