"""Compares steps of real runs on two GPUs with emulations on one, job by job, in turns; on one GPU only their bytes.

    python benchmarks/gpu_table.py [dense] [moe] [ddp] [1f1b] [interleaved] [tp] [--rehearse]
    python benchmarks/gpu_table.py megatron-tp megatron-pp zero3 [--rehearse]

For each job: a recording, an observed calibration on both GPUs, then real and emulated runs in turns, 5 each. What is
known is printed after every job and written to $OUT/table.json, so a run that is cut off is not lost; the graph and the
first trace of each kind are in $OUT/JOB.tar. Environment: TABLE_SECONDS (540) is the time after which no job is begun,
TABLE_REPEATS (5), TABLE_STEPS (12), TABLE_BACKENDS (local,nccl), TABLE_AT_ONCE (3, jobs that are recorded beside each
other), TABLE_OBSERVED (1: one observed run takes its turn too), TABLE_ALONE (1: one emulation of a graph that was
calibrated on one GPU, which has seen no transfer).

About 50 s a job for the preparations and 8 s for each run (torch is loaded while the run before is on the GPU): with
two backends 170 s a job, with one 130 s. --rehearse runs all of it in small on CPUs: times mean nothing then.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

from prism_sdk.runtime.gpus import num_gpus
from prismtrace import TraceReader, slice_trace

ROOT = Path(__file__).parents[1]
JOB = ROOT / "benchmarks" / "gpu_table_job.py"
FRAMEWORKS_JOB = ROOT / "benchmarks" / "gpu_frameworks_job.py"
FRAMEWORKS = ("megatron-tp", "megatron-pp", "zero3")
KINDS = ("dense", "ddp", "tp", "moe", "1f1b", "interleaved")
REHEARSE = "--rehearse" in sys.argv
SECONDS = float(os.environ.get("TABLE_SECONDS", "540"))
RUN_SECONDS = 100.0
REPEATS = int(os.environ.get("TABLE_REPEATS", "5"))
ALONE = "TABLE_ALONE" in os.environ
OBSERVED = "TABLE_OBSERVED" in os.environ
BACKENDS = os.environ.get("TABLE_BACKENDS", "local" if REHEARSE else "local,nccl").split(",")
OPTIONS = {"local": (), "waiting": ("-O", "occupy=off"), "nccl": ("--backend", "nccl")}
PASSES = ("-O", "passes=1") if REHEARSE else ()
RECORDED: dict[str, Run] = {}
AT_ONCE = int(os.environ.get("TABLE_AT_ONCE", "3"))
RECORDED_STEPS, STEPS, WARM = 3, int(os.environ.get("TABLE_STEPS", "12")), 4
PAYLOADS = {
    "1f1b": "full",
    "interleaved": "full",
    "megatron-pp": "full",
}  # what is received decides what is computed; else none are needed


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


@dataclass
class Run:
    """Processes of one run, which wait at a gate before they open a GPU."""

    what: str
    commands: list[tuple[list[str], dict[str, str]]]
    gate: Path
    rank: int = 0
    """Whose sayings are kept."""
    counted: tuple[int, int | None] = (WARM, None)
    """The steps whose mean counts: from, and up to."""
    seconds: float = RUN_SECONDS
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    code: int = -1
    said: dict[str, Any] = field(default_factory=dict)
    out: str = ""
    err: str = ""

    def start(self) -> None:
        for command, more in self.commands:
            self.processes.append(
                subprocess.Popen(
                    command, env=environment(GATE=str(self.gate), **more), stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, text=True, start_new_session=True,
                )
            )  # fmt: skip

    def finish(self) -> None:
        """Open the gate and wait; what the rank said is kept."""
        self.gate.touch()
        until, self.code = time.monotonic() + self.seconds, 0
        for process in self.processes:
            try:
                out, err = process.communicate(timeout=max(until - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                self.kill()
                out, err = process.communicate()
            self.code = self.code or process.returncode
            self.out += out
            self.err += err
            for line in out.splitlines():
                kind, _, text = line.partition(" ")
                if kind in ("STEPS", "LOSS", "MEMORY", "REFUSED") and json.loads(text)["rank"] == self.rank:
                    self.said[kind] = json.loads(text)
        if self.code:
            print(f"   {self.what}: exit {self.code}\n{self.err[-1500:]}", flush=True)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    @property
    def step_ms(self) -> float:
        """Mean of the steps that count; 0 where there are none."""
        times = self.said.get("STEPS", {}).get("ms", [])[slice(*self.counted)]
        return mean(times) if times and not self.code else 0.0


def words(kind: str, steps: int) -> list[str]:
    return [str(FRAMEWORKS_JOB if kind in FRAMEWORKS else JOB), kind, str(steps), *(["--small"] if REHEARSE else [])]


def prism(
    mode: str, output: Path, kind: str, steps: int, *options: str, gate: Path, ranks: int = 2,
    script: Sequence[str] = (), **more: str,
) -> Run:  # fmt: skip
    """The job (or another script with its arguments) under `prism MODE`, with `more` in its environment."""
    device = ["--device", "cpu"] if REHEARSE else []
    size = [] if mode in ("calibrate", "emulate") else ["--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "prism_sdk.cli.main", mode, "-o", str(output), *size, *device, *options, "--"]
    return Run(f"{mode} {kind}", [(command + list(script or words(kind, steps)), more)], gate)


def in_turns(runs: Sequence[Run], *, may_go_on: Callable[[Run], bool] = lambda run: True) -> list[Run]:
    """One after the other, while the next one loads torch; returns those that ran before one that may not."""
    done: list[Run] = []
    for position, run in enumerate(runs):
        if not may_go_on(run):
            run.kill()
            break
        if not run.processes:
            run.start()
        if position + 1 < len(runs) and may_go_on(runs[position + 1]):
            runs[position + 1].start()
        run.finish()
        done.append(run)
    return done


def real(folder: Path, kind: str, number: int) -> Run:
    """The job over NCCL without Prism; in a rehearsal under `observe` on CPUs."""
    gate = folder / f"gate-real-{kind}-{number}"
    if REHEARSE:
        return prism("observe", folder / f"real-{kind}-{number}.prism", kind, STEPS, gate=gate)
    port = 29600 + 10 * (*KINDS, *FRAMEWORKS, "hsdp").index(kind) + number
    return over_nccl(f"real {kind}", words(kind, STEPS), gate=gate, port=port, shares=num_gpus() == 1)


def over_nccl(what: str, script: Sequence[str], *, gate: Path, port: int, shares: bool, **more: str) -> Run:
    """A script on two ranks without Prism; on one GPU, which `shares` says, they talk by sockets."""
    commands = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}  # fmt: skip
        if shares:  # NCCL lets ranks share a GPU that say they are on different hosts
            own |= {"LOCAL_RANK": "0", "NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        commands.append(([sys.executable, *script], own))
    return Run(what, commands, gate)


def at_once(run: Run) -> bool:
    """Run something alone; whether it went well."""
    started = time.monotonic()
    run.start()
    run.finish()
    step = f", step {run.step_ms:.2f} ms" if run.step_ms else ""
    print(f"   {run.what}: exit {run.code}, {time.monotonic() - started:.1f} s{step}", flush=True)
    return run.code == 0


def record(kinds: Sequence[str], folder: Path) -> None:
    """Record some jobs beside each other: the host takes longest for it, and nothing is measured."""
    gate, started = folder / "open", time.monotonic()
    gate.touch()
    runs = []
    for kind in kinds:
        payloads = ("--payloads", PAYLOADS.get(kind, "none"))
        runs.append(prism("record", bare_path(kind, folder), kind, RECORDED_STEPS, *payloads, gate=gate))
        runs[-1].seconds = 2 * RUN_SECONDS
        runs[-1].start()
    for run in runs:
        run.finish()
        print(f"   {run.what}: exit {run.code}, {time.monotonic() - started:.1f} s", flush=True)
    RECORDED.update((kind, run) for kind, run in zip(kinds, runs, strict=True) if not run.code)


def as_recorded(kind: str, folder: Path, real_run: Run) -> dict[str, bool]:
    """Whether the recording has the values of a real run, and in its graph the peaks that the real run's GPU had."""
    few, said = RECORDED_STEPS, RECORDED[kind].said
    with TraceReader(bare_path(kind, folder)) as reader:
        peak = int(reader.steps(0).memory_peak_bytes[:few].max())
    is_there = "LOSS" in real_run.said and "MEMORY" in real_run.said
    return {
        "losses": is_there and said["LOSS"]["losses"] == real_run.said["LOSS"]["losses"][:few],
        "bytes": is_there and said["MEMORY"]["parts"] == real_run.said["MEMORY"]["parts"][:few],
        "peak_of_graph": is_there and peak == real_run.said["MEMORY"]["parts"][few - 1][1],
    }


def bare_path(kind: str, folder: Path) -> Path:
    return folder / f"{kind}-bare.prism"


def prepare(kind: str, folder: Path) -> Path | None:
    """A calibrated graph: the recorded job observed on both GPUs."""
    bare, graph, gate = bare_path(kind, folder), folder / f"{kind}-graph.prism", folder / "open"
    if not bare.exists():
        return None
    # as many steps as are compared: a GPU goes slower for some of them, about a second after it began
    calibrated = at_once(prism("calibrate", graph, kind, STEPS, "--graph", str(bare), *PASSES, gate=gate))
    return graph if calibrated else None


def calibrated_alone(kind: str, folder: Path) -> Path:
    """The graph of a calibration that sees one GPU; its transfers are modelled."""
    graph = folder / f"{kind}-one-gpu.prism"
    options = ("--graph", str(bare_path(kind, folder)), *PASSES)
    at_once(prism("calibrate", graph, kind, STEPS, *options, gate=folder / "open", CUDA_VISIBLE_DEVICES="0"))
    return graph


def table(kind: str, folder: Path) -> dict[str, Any]:
    """All of one job."""
    graph = prepare(kind, folder)
    if graph is None:
        return {"failed": True}
    graphs = {name: (graph, OPTIONS[name]) for name in BACKENDS}
    if ALONE:
        graphs["alone"] = (calibrated_alone(kind, folder), ())
    runs: list[tuple[str, Run]] = []
    for number in range(REPEATS):
        runs.append(("real", real(folder, kind, number)))
        if OBSERVED and not number:
            output, gate = folder / f"{kind}-observed-{number}.prism", folder / f"gate-{kind}-observed-{number}"
            runs.append(("observed", prism("observe", output, kind, STEPS, gate=gate)))
        for name, (path, options) in graphs.items():
            if name == "alone" and number:
                continue
            output, gate = folder / f"{kind}-{name}-{number}.prism", folder / f"gate-{kind}-{name}-{number}"
            runs.append((name, prism("emulate", output, kind, STEPS, "--graph", str(path), *options, gate=gate)))
    in_turns([run for _, run in runs])
    names = [*(["observed"] if OBSERVED else []), *graphs]
    keep(kind, *(path for path, _ in graphs.values()), *(folder / f"{kind}-{name}-0.prism" for name in names))
    found = summary(kind, runs, names=names)
    found["predicted_ms"] = {path.stem: predicted_ms(path) for path, _ in graphs.values()}
    found["recorded_as_real"] = as_recorded(kind, folder, runs[0][1])
    print(f"   predicted: {found['predicted_ms']}, recorded as real: {found['recorded_as_real']}", flush=True)
    return found


def keep(name: str, *paths: Path) -> None:
    """Traces to look into later, without values, where there is a place for them."""
    if out := os.environ.get("OUT"):
        with tarfile.open(Path(out, f"{name}.tar"), "w") as archive:
            for path in filter(Path.exists, dict.fromkeys(paths)):
                small = path.with_suffix(".small")
                slice_trace(path, small, keep_payloads=False)
                archive.add(small, path.name)
                small.unlink()


def predicted_ms(path: Path) -> float:
    """The step that a calibration found."""
    if not path.exists():
        return 0.0
    with TraceReader(path) as reader:
        return round(float(reader.metadata["calibration.step_ns"]) / 1e6, 3)


def summary(kind: str, runs: Sequence[tuple[str, Run]], *, names: Sequence[str] = BACKENDS) -> dict[str, Any]:
    """Real steps and those of the others, their errors, and by how many bytes they differ at most."""
    by_name = {name: [run for other, run in runs if other == name] for name in ("real", *names)}
    steps = {name: [round(run.step_ms, 3) for run in some if run.step_ms] for name, some in by_name.items()}
    memory = {name: [run.said.get("MEMORY", {}).get("parts") for run in some if not run.code]
              for name, some in by_name.items()}  # fmt: skip
    found: dict[str, Any] = {"steps_ms": steps, "exits": [run.code for _, run in runs]}
    firsts = {name: some[0].said.get("STEPS", {}).get("ms", []) for name, some in by_name.items() if some}
    found["steps_of_first_ms"] = {name: [round(ms, 1) for ms in all_of] for name, all_of in firsts.items()}
    if steps["real"]:
        whole = mean(steps["real"])
        found["real_ms"] = round(whole, 3)
        found["real_spread_percent"] = round(100 * (max(steps["real"]) - min(steps["real"])) / whole, 3)
        for name in names:
            if steps[name]:
                errors = [100 * (ms / whole - 1) for ms in steps[name]]
                found[name] = {
                    "error_percent": round(mean(errors), 3), "worst_percent": round(max(errors, key=abs), 3),
                    "bytes_as_real": all(parts in memory["real"] for parts in memory[name]),
                    "worst_bytes": max((_apart(parts, memory["real"]) for parts in memory[name]), default=0),
                }  # fmt: skip
    print(f"== {kind}: {json.dumps(found)}", flush=True)
    return found


def _apart(parts: Any, real_parts: list[Any]) -> int:
    """By how many bytes the nearest real run differs, at most in any step."""
    return min(
        (max(abs(a - b) for mine, theirs in zip(parts, other, strict=False) for a, b in zip(mine, theirs, strict=True))
         for other in real_parts if parts and other),
        default=0,
    )  # fmt: skip


def main() -> int:
    started = time.monotonic()
    kinds = [word for word in sys.argv[1:] if not word.startswith("--")] or list(KINDS)
    results: dict[str, Any] = {}
    out = os.environ.get("OUT")
    with tempfile.TemporaryDirectory() as text:
        for position, kind in enumerate(kinds):
            if not position % AT_ONCE:
                record(kinds[position : position + AT_ONCE], Path(text))
            if time.monotonic() - started > SECONDS:
                print(f"== {kind}: no time is left", flush=True)
                continue
            results[kind] = table(kind, Path(text))
            print(f"#### {kind} after {time.monotonic() - started:.1f} s\n", flush=True)
            if out:
                Path(out, "table.json").write_text(json.dumps(results, indent=1))
            for path in Path(text).glob(f"{kind}-*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return 0 if results and not any("failed" in one for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
