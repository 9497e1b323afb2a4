"""Runs everything that is checked and measured on GPUs, within ten minutes a call, and goes on after failures.

    python benchmarks/gpu_all.py [--list] [--seconds N] [SECTION ...]

Without names: all sections for the number of GPUs there are, in the order below, until the time is out. Each has a
limit of its own, after which it is ended with all that it started. What a section prints is printed, and kept in
$OUT/NAME.txt (the current folder without OUT); $OUT/all.json has verdicts and times, rewritten after each.

Sections that take a call of their own run by name only: `table`, `frameworks`, `eight`.

Thirty minutes, all on one machine of two GPUs that is let go 30 s after a call: so the next call is made at once (a
new machine costs one or two minutes of the thirty). Seconds are estimates, from earlier runs where there were any. Such
a machine has no network, so each call takes the folder .whl along and begins with

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
    export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1

In .whl (13 MB), for Python 3.12: zstandard, which Prism needs; for call 3 megatron-core 0.17.1, deepspeed 0.19.8 (built
with DS_BUILD_OPS=0), hjson, msgpack, pydantic, pydantic-core, annotated-types. Then, 1,710 s and the start:

1. 400 s: python3 benchmarks/gpu_all.py --seconds 390 probes reduced nccl calibrate
   (60 + 60 + 180, calibrate takes the rest). Look at the probes first: with `pair` or `words` BAD backend `nccl` cannot
   work. `ahead` compares moves into fresh host memory (11 to 21 GB/s before), into memory that the rank used before
   (51 GB/s), that another process did, and that two threads take beforehand. `versions` says the kernel: from Linux 6.1
   on shared memory comes in huge pages, and what another process used should be as fast as what the rank used itself.
2. 560 s: TABLE_STEPS=20 TABLE_REPEATS=3 TABLE_SECONDS=440 python3 benchmarks/gpu_table.py 1f1b interleaved tp dense
   (35 s of recording for each three, 16 s of calibration and nine runs of 9 s a job)
3. 430 s: TABLE_STEPS=20 TABLE_BACKENDS=local TABLE_REPEATS=3 python3 benchmarks/gpu_all.py --seconds 420 frameworks
   (75 s each: Megatron-Core with TP 2, with PP 2, ZeRO-3.)
4. 320 s: CUDA_VISIBLE_DEVICES=0 python3 benchmarks/gpu_all.py --seconds 310 switch limit moves full
   (20 + 60 + 110 + 30), and in the time that is left the same moves without host memory taken ahead:
   CUDA_VISIBLE_DEVICES=0 GPU_CHECK_RECORD='--parked-ahead 0' python3 benchmarks/gpu_checks.py moves
   Compare the lines "device memory of parked ranks" of both: "out ... GB/s" (7.3 with 213 GiB parked beside 125 GiB of
   host memory, before ranks shared it); "host memory taken", once and less than the host has; "out into what was taken"
   against pinned copies (54.5 GB/s).
What was never run on two GPUs, or not since it was mended, is in 2 and 3: these first.

On one GPU, `probes switch limit hold moves graphs` took 480 s, gpu_hold.py --backend=nccl operations fsdp2 ddp 110,
gpu_hold.py operations fsdp2 ddp 90, gpu_hold.py chain beside 45 (with CUDA_DEVICE_MAX_CONNECTIONS=1 too: nothing may be
held up), gpu_alone.py bytes 310, eight 110, limit 60, with ALONE_REPEATS=2 fsdp2 and ddp 300, and with TABLE_STEPS=16
steps=tp,1f1b 180, steps=interleaved 120, steps=moe 110, steps=dense,ddp 160 (with moe no two others: the host's memory
holds no more recordings beside each other).

Where eight GPUs are lent: python3 benchmarks/eight_gpus.py --jobs moe,dense,hsdp,1f1b, then a second call with
--jobs tp,interleaved,ddp, 580 s each. Files that come back: eight_gpus.json, eight_gpus.md, traces.tar.

Each section is a run of a script beside this one, which says more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
SECONDS = 590.0


@dataclass(frozen=True)
class Section:
    """One script with its arguments; `estimate_s` is what it took, or should take, `limit_s` what it may."""

    name: str
    words: tuple[str, ...]
    estimate_s: int
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)


_TWO_TURNS = {"GPU_CHECK_REPEATS": "2"}
ONE = (
    Section("probes", ("gpu_probes.py",), 55, 140),
    Section("switch", ("gpu_checks.py", "switch"), 20, 60),
    Section("limit", ("gpu_checks.py", "limit"), 60, 120),
    Section("hold", ("gpu_hold.py",), 180, 260),
    Section("moves", ("gpu_checks.py", "moves"), 110, 180),
    Section("full", ("gpu_checks.py", "full"), 30, 80),
    Section("graphs", ("gpu_checks.py", "graphs"), 30, 70),
    Section("observe", ("gpu_checks.py", "observe"), 130, 220, _TWO_TURNS),
    Section("calibrate", ("gpu_calibrate.py",), 110, 240),
)
TWO = (
    Section("probes", ("gpu_probes.py",), 60, 140),
    Section("reduced", ("nccl_reduced.py",), 60, 160),
    Section("nccl", ("gpu_hold.py", "--backend=nccl", "operations", "chain", "fsdp2", "ddp"), 180, 270),
    Section("observe", ("gpu_checks.py", "observe"), 130, 240, _TWO_TURNS),
    Section("calibrate", ("gpu_calibrate.py",), 300, 420),
)
ON_DEMAND = (
    Section("table", ("gpu_table.py",), 580, 590),
    Section("frameworks", ("gpu_table.py", "megatron-tp", "megatron-pp", "zero3"), 400, 590),
    Section("eight", ("eight_gpus.py",), 575, 590),
)
"""Sections that run only by name: they take a call of their own."""


def sections(names: list[str], *, num_devices: int) -> list[Section]:
    """What to run, in order. Raises KeyError for a name that no section has."""
    usual = TWO if num_devices > 1 else ONE
    known = {one.name: one for one in (*TWO, *ONE, *usual, *ON_DEMAND)}
    return [known[name] for name in names] if names else list(usual)


def run(section: Section, folder: Path, *, seconds: float) -> tuple[int, float]:
    """Run one section for at most `seconds`; returns its exit status (124 where it was ended) and what it took."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    words = [sys.executable, "-u", str(ROOT / "benchmarks" / section.words[0]), *section.words[1:]]
    started = time.monotonic()
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, errors="replace",
        env={**os.environ, **section.environment, "PYTHONPATH": path},
    )  # fmt: skip
    assert process.stdout is not None
    with (folder / f"{section.name}.txt").open("w") as kept:
        reader = threading.Thread(target=_copy, args=(process.stdout, kept), daemon=True)
        reader.start()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 124
        end_session(process)
        reader.join(5)
    return code, time.monotonic() - started


def end_session(process: subprocess.Popen[str]) -> None:
    """End a section and what it has started: launchers end theirs when they are told, the rest is killed."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + patience_s
        while time.monotonic() < until and _is_there(process.pid):
            process.poll()
            time.sleep(0.05)
    process.poll()


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _copy(source: IO[str], kept: IO[str]) -> None:
    with source:
        for line in source:
            sys.stdout.write(line)
            sys.stdout.flush()
            kept.write(line)
            kept.flush()


def run_all(chosen: list[Section], folder: Path, *, seconds: float) -> dict[str, dict[str, float | str]]:
    """Run sections one after the other until the time is out; what came of each."""
    started, results = time.monotonic(), {}  # type: ignore[var-annotated]
    for section in chosen:
        left = seconds - (time.monotonic() - started)
        if left < min(section.estimate_s, section.limit_s) / 2:
            results[section.name] = {"verdict": "not run: no time is left", "seconds": 0.0}
        else:
            print(f"######## {section.name}: about {section.estimate_s} s, {left:.0f} s are left", flush=True)
            code, took = run(section, folder, seconds=min(left, section.limit_s))
            verdict = {0: "good", 124: f"ended after {took:.0f} s"}.get(code, f"BAD (exit {code})")
            results[section.name] = {"verdict": verdict, "seconds": round(took, 1)}
        print(f"######## {section.name}: {results[section.name]['verdict']}\n", flush=True)
        (folder / "all.json").write_text(json.dumps(results, indent=1))
    return results


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from prism_sdk.runtime.gpus import num_gpus

    words = sys.argv[1:]
    seconds = SECONDS
    if "--seconds" in words:
        at = words.index("--seconds")
        seconds = float(words[at + 1])
        del words[at : at + 2]
    num_devices = num_gpus()
    try:
        chosen = sections([word for word in words if word != "--list"], num_devices=num_devices)
    except KeyError as error:
        print(f"there is no section {error}; --list shows those that there are")
        return 2
    if "--list" in words:
        for title, some in (("one GPU", ONE), ("two GPUs", TWO), ("by name", ON_DEMAND)):
            print(f"{title}: {sum(one.estimate_s for one in some)} s")
            for one in some:
                print(f"  {one.name:10} {one.estimate_s:4} s, at most {one.limit_s:4}: {' '.join(one.words)}")
        return 0
    folder = Path(os.environ.get("OUT", "."))
    print(f"{num_devices} GPUs; {', '.join(one.name for one in chosen)}; {seconds:.0f} s", flush=True)
    results = run_all(chosen, folder, seconds=seconds)
    print(json.dumps(results))
    return 0 if all(one["verdict"] == "good" for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
