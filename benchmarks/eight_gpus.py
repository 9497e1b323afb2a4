"""Compares a job on all GPUs of a machine with its emulations on one and two of them, and with predictions from one.

    python benchmarks/eight_gpus.py [--gpus N] [--jobs moe,dense,...] [--seconds S] [--device cpu --tiny]

Jobs (gpu_table_job.py): moe and dense (FSDP2), hsdp (two replicas of half the ranks), 1f1b and interleaved (four stages
deep, replicated), tp (four wide, replicated), ddp. All of them take longer than ten minutes; on eight GPUs call it
twice, with `--jobs moe,dense,hsdp,1f1b` and `--jobs tp,interleaved,ddp`.

Its parts, in this order; each has an estimate and is left out, and named under `cut`, where less time is left:

1. record: all jobs, two at a time.
2. turns 1: of each job calibrate on all GPUs, then a real run (`prism observe`), an emulation on one GPU, one on two.
3. fit: three small jobs on pairs of GPUs; `prism cluster fit` makes a profile of them.
4. alone: each job on a GPU of its own, recorded and calibrated there with transfers of that profile: what somebody
   predicts who has never seen more than two GPUs. They run at the same time, each with a GPU for itself.
5. turns 2 and 3: as turns 1, without calibrating; the third without two GPUs.
6. memory: the first job with less device memory than it needs, real and emulated: whether the same allocation fails.
7. losses: each job in small, with all values recorded: how far losses are from the recording's and from a real run's.
   (Large jobs are recorded without values where these decide nothing but losses; for a pipeline they decide more.)

What is known is written after each part: $OUT/eight_gpus.json, eight_gpus.md (rows of a table), and at the end
traces.tar (redacted: of each job the first real run and the first emulations, of the emulated rank).
Steps 4 to 9 count; 10 and 11 have their kernels recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))

import eight_gpus_report as report
import gpu_table
from gpu_runs import with_transfers
from gpu_table import RECORDED_STEPS, Run, prism

JOBS = ("moe", "dense", "hsdp", "1f1b", "tp", "interleaved", "ddp")
PIPELINES = ("1f1b", "interleaved")
STEPS, SMALL_STEPS, KERNELS = 12, 5, "10:12"
COUNTED = (4, 10)
ESTIMATES_S = {"record": 25.0, "calibrate": 30.0, "turn": 10.0, "fit": 35.0, "alone": 120.0, "memory": 30.0,
               "losses": 40.0}  # fmt: skip
ONE, TWO = "one GPU", "two GPUs"
LIMIT_SHARE = 0.9  # of what the job has at most, for `memory`


@dataclass
class Benchmark:
    """What is asked for, and what is known so far."""

    gpus: int
    jobs: tuple[str, ...]
    seconds: float
    is_tiny: bool
    folder: Path
    out: Path
    turns: int = 3
    started: float = field(default_factory=time.monotonic)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    took_s: dict[str, float] = field(default_factory=dict)
    runs: dict[str, list[tuple[str, Run]]] = field(default_factory=dict)
    traces: dict[str, dict[str, list[Path]]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def rank_of(self, job: str) -> int:
        """The rank that is emulated: of a pipeline one that has a loss."""
        return min(self.gpus, int(os.environ.get("TABLE_WIDEST", "4"))) - 1 if job in PIPELINES else 0

    def graph(self, job: str) -> Path:
        return self.folder / f"{job}-graph.prism"

    # -- parts ------------------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Name, estimate and what to do, in order."""
        yield "record", ESTIMATES_S["record"] * -(-len(self.jobs) // 2), self.record
        for job in self.jobs:
            yield f"{job}: calibrate", ESTIMATES_S["calibrate"], lambda job=job: self.calibrate(job)  # type: ignore[misc]
            yield f"{job}: turns 1", 3 * ESTIMATES_S["turn"], lambda job=job: self.turn(job, (ONE, TWO))  # type: ignore[misc]
        yield "fit", ESTIMATES_S["fit"], self.fit
        yield "alone", ESTIMATES_S["alone"], self.alone
        for number in range(2, self.turns + 1):
            names = (ONE, TWO) if number == 2 else (ONE,)
            for job in self.jobs:
                what = f"{job}: turns {number}"
                yield what, (1 + len(names)) * ESTIMATES_S["turn"], lambda job=job, names=names: self.turn(job, names)  # type: ignore[misc]
        yield "memory", ESTIMATES_S["memory"], lambda: self.memory(self.jobs[0])
        yield "losses", ESTIMATES_S["losses"] * -(-len(self.jobs) // 3), self.losses

    def run(self) -> bool:
        """All parts for which there is time; whether every one of them went well."""
        good = True
        for name, estimate, work in self.parts():
            if self.left_s < (0 if self.is_tiny else estimate):
                self.cut.append(f"{name}: it takes about {estimate:.0f} s, and {self.left_s:.0f} s are left")
                continue
            began = time.monotonic()
            print(f"#### {name}: {self.left_s:.0f} s are left", flush=True)
            try:
                work()
            except Exception as error:  # the other parts are worth as much
                good = False
                self.cut.append(f"{name}: {type(error).__name__}: {error}")
                print(f"BAD {self.cut[-1]}", flush=True)
            self.took_s[name] = round(time.monotonic() - began, 1)
            self.write()
        report.keep_traces(self.traces, self.out / "traces.tar", rank_of=self.rank_of)
        self.write()
        return good

    def record(self) -> None:
        """All jobs, two at a time: they need not be quiet, and memory of two fits."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._record, self.jobs))

    def _record(self, job: str) -> None:
        _alone(self._recording(job, self.folder / f"{job}.prism"))

    def _recording(self, job: str, output: Path, *options: str, **environment: str) -> Run:
        payloads = ("--payloads", gpu_table.PAYLOADS.get(job, "none"))
        return self._prism("record", output, job, *payloads, *options, steps=RECORDED_STEPS, **environment)

    def _prism(self, mode: str, output: Path, job: str, *options: str, steps: int, **environment: str) -> Run:
        gate = self.folder / f"gate-{output.stem}"
        run = prism(mode, output, job, steps, *options, gate=gate, ranks=self.gpus, **environment)
        run.rank, run.counted = self.rank_of(job), COUNTED
        run.seconds = max(min(run.seconds, self.left_s), 5.0)
        return run

    def calibrate(self, job: str) -> None:
        """On all GPUs."""
        bare, more = self.folder / f"{job}.prism", ("-O", "passes=1") if self.is_tiny else ()
        _alone(self._prism("calibrate", self.graph(job), job, "--graph", str(bare), *more, steps=RECORDED_STEPS))

    def turn(self, job: str, names: Sequence[str]) -> None:
        """A real run and emulations, one after the other."""
        if not self.graph(job).exists():
            raise RuntimeError("the job has no calibrated graph")
        known = self.runs.setdefault(job, [])
        number = sum(name == "real" for name, _ in known)
        planned = [("real", self._real(job, number)), *((name, self._emulation(job, name, number)) for name in names)]
        done = gpu_table.in_turns([run for _, run in planned], may_go_on=lambda _: self.left_s > 5 or self.is_tiny)
        known += planned[: len(done)]
        self.results.setdefault(job, {}).update(gpu_table.summary(job, known, names=(ONE, TWO)))
        self._compare(job)
        failed = [run.what for _, run in planned[: len(done)] if run.code]
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed")

    def _kernels(self) -> tuple[str, ...]:
        return () if self.is_tiny else ("--kernels", KERNELS)

    def _real(self, job: str, number: int, *options: str) -> Run:
        output = self._path(job, "real", number)
        return self._prism("observe", output, job, *self._kernels(), *options, steps=STEPS)

    def _emulation(self, job: str, name: str, number: int, *options: str) -> Run:
        output, rank = self._path(job, name, number), self.rank_of(job)
        more = ("-O", "occupy=24") if name == ONE else ("--backend", "nccl")
        if self.is_tiny:
            more = ()
            rank_text = str(rank) if name == ONE else ",".join(map(str, sorted({rank, (rank + 1) % self.gpus})))
        else:
            rank_text = str(rank)
        devices = "0" if name == ONE else "0,1"
        return self._prism(
            "emulate", output, job, "--graph", str(self.graph(job)), "--sandbox", rank_text, *self._kernels(), *more,
            *options, steps=STEPS, CUDA_VISIBLE_DEVICES=devices,
        )  # fmt: skip

    def _path(self, job: str, name: str, number: int) -> Path:
        path = self.folder / f"{job}-{name.replace(' ', '-')}-{number}.prism"
        self.traces.setdefault(job, {}).setdefault(name, []).append(path)
        return path

    def _compare(self, job: str) -> None:
        """What traces say of units, kernels, memory and losses."""
        there = {name: [str(path) for path in paths if path.exists()] for name, paths in self.traces[job].items()}
        for name in (ONE, TWO):
            if there.get("real") and there.get(name):
                said = report.compared(there["real"], there[name], self.rank_of(job))
                self.results[job].setdefault(name, {})["traces"] = said

    # -- predictions ------------------------------------------------------------------------------------------------

    @property
    def profile(self) -> Path:
        return self.folder / "fitted.toml"

    def fit(self) -> None:
        """A profile of one machine from jobs on pairs of GPUs."""
        seen = []
        for number, kind in enumerate(("dense", "ddp", "1f1b")):
            output = self.folder / f"pair-{kind}.prism"
            first = 2 * number % self.gpus
            run = prism(
                "observe", output, kind, RECORDED_STEPS + 2, gate=self.folder / f"gate-pair-{kind}", ranks=2,
                CUDA_VISIBLE_DEVICES=f"{first},{first + 1}",
            )  # fmt: skip
            run.seconds = max(min(run.seconds, self.left_s), 5.0)
            seen.append((run, output))
        if self.gpus >= 6 or self.is_tiny:  # pairs of their own
            with ThreadPoolExecutor(1 if self.is_tiny else 3) as pool:
                list(pool.map(_alone, [run for run, _ in seen]))
        else:
            for run, _ in seen:
                _alone(run)
        base = self.folder / "base.toml"
        _command("cluster", "init", "h200-sxm", "--nodes", "1", "-o", str(base))
        traces = [word for _, output in seen for word in ("--trace", str(output))]
        _command("cluster", "fit", str(base), *traces, "-o", str(self.profile))

    def alone(self) -> None:
        """Each job on a GPU of its own, all at once."""
        if not self.profile.exists():
            raise RuntimeError("there is no fitted profile")
        with ThreadPoolExecutor(1 if self.is_tiny else self.gpus) as pool:
            list(pool.map(self._predict, self.jobs, range(len(self.jobs))))

    def _predict(self, job: str, number: int) -> None:
        bare, graph = self.folder / f"{job}-bare1.prism", self.folder / f"{job}-graph1.prism"
        device = str(number % self.gpus)
        options = ("-O", "transfers=profile", "-O", f"cluster={self.profile}", "-O", "passes=1")
        slots = ("--slots", "2" if self.is_tiny else "1")
        _alone(self._recording(job, bare, *slots, CUDA_VISIBLE_DEVICES=device))
        _alone(
            self._prism("calibrate", graph, job, "--graph", str(bare), *options, steps=RECORDED_STEPS,
                        CUDA_VISIBLE_DEVICES=device)
        )  # fmt: skip
        from prismtrace import TraceReader

        with TraceReader(graph) as reader:
            predicted = float(reader.metadata["calibration.step_ns"]) / 1e6
        real = [run.step_ms for name, run in self.runs.get(job, []) if name == "real" and run.step_ms]
        self.results.setdefault(job, {})["predicted from one GPU"] = {
            "step_ms": round(predicted, 3),
            "error_percent": round(100 * (predicted / mean(real) - 1), 2) if real else None,
        }

    # -- memory -----------------------------------------------------------------------------------------------------

    def memory(self, job: str) -> None:
        """With less device memory than it needs: whether the emulation fails at the same allocation as a real run."""
        if self.is_tiny:
            self.results.setdefault(job, {})["out of memory"] = "not on CPUs"
            return
        parts = next(run.said["MEMORY"]["parts"] for name, run in self.runs.get(job, []) if name == "real")
        limit = ("--device-memory", str(int(LIMIT_SHARE * max(part[2] for part in parts))))
        said = {}
        for name, run in (("real", self._real(job, 90, *limit)), (ONE, self._emulation(job, ONE, 90, *limit))):
            run.start()
            run.finish()
            said[name] = run.said.get("REFUSED") or {"exit": run.code}
        is_same = "step" in said["real"] and said["real"] == said[ONE]
        self.results.setdefault(job, {})["out of memory"] = {"limit": limit[1], "is_same": is_same, **said}

    # -- losses -----------------------------------------------------------------------------------------------------

    def losses(self) -> None:
        """Three jobs at a time: no times are taken."""
        with ThreadPoolExecutor(1 if self.is_tiny else 3) as pool:
            list(pool.map(self._losses, self.jobs))

    def _losses(self, job: str) -> None:
        bare, graph = self.folder / f"{job}-small.prism", self.folder / f"{job}-small-graph.prism"
        rank = self.rank_of(job)
        recorded = self._small("record", bare, job, "--payloads", "full")
        real = self._small("observe", self.folder / f"{job}-small-real.prism", job)
        with_transfers(bare, graph, 20_000)
        options = ("--graph", str(graph), "--sandbox", str(rank))
        emulated = self._small("emulate", self.folder / f"{job}-small-emulated.prism", job, *options)
        self.results.setdefault(job, {})["losses"] = {
            "emulated": emulated, "apart_from_recorded": _apart(emulated, recorded),
            "apart_from_real": _apart(emulated, real),
        }  # fmt: skip

    def _small(self, mode: str, output: Path, job: str, *options: str) -> list[float]:
        """Losses of the job with small layers."""
        run = self._prism(mode, output, job, *options, steps=SMALL_STEPS)
        command = run.commands[0][0]
        if "--small" not in command:
            command.append("--small")
        _alone(run)
        return list(run.said["LOSS"]["losses"])

    # -- what is kept -----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Everything that is known, rewritten."""
        facts = {"gpus": self.gpus, "cut": self.cut, "took_s": self.took_s, "jobs": self.results}
        (self.out / "eight_gpus.json").write_text(json.dumps(facts, indent=1))
        text = report.table(self.results, self.cut, gpus=self.gpus, names=(ONE, TWO))
        (self.out / "eight_gpus.md").write_text(text)


def _apart(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def _alone(run: Run) -> None:
    if not gpu_table.at_once(run):
        raise RuntimeError(f"{run.what} failed: {run.err[-300:]}")


def _command(*words: str) -> None:
    command = [sys.executable, "-m", "prism_sdk.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=gpu_table.environment(), timeout=60)
    if done.returncode:
        raise RuntimeError(f"prism {words[0]} {words[1]}: {done.stderr[-500:]}")


def num_gpus() -> int:
    from prism_sdk.runtime.gpus import num_gpus as found

    return found()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="ranks of the real job [default: all GPUs]")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", choices=("cpu",))
    parser.add_argument("--tiny", action="store_true", help="small layers")
    asked = parser.parse_args(argv)
    if (asked.device is None) == asked.tiny:
        parser.error("--device cpu and --tiny belong together")
    jobs = tuple(asked.jobs.split(","))
    gpus = asked.gpus or (4 if asked.tiny else num_gpus())
    if set(jobs) - set(JOBS) or gpus < 2 or gpus % 2:
        parser.error(f"jobs are {', '.join(JOBS)}, and an even number of GPUs is needed; here are {gpus}")
    gpu_table.REHEARSE = asked.tiny
    out = Path(os.environ.get("OUT", "."))
    with tempfile.TemporaryDirectory() as text:
        benchmark = Benchmark(gpus, jobs, asked.seconds, asked.tiny, Path(text), out, asked.turns)
        good = benchmark.run()
    print((out / "eight_gpus.md").read_text())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
