"""Runs a job of the GPU checks over NCCL and under Prism, and keeps what its ranks said.

Responsible for commands, time limits and the comparison of bytes; what is checked is gpu_checks.py's and
gpu_calibrate.py's. It is no script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
JOB = ROOT / "tests" / "runtime" / "gpu_job.py"
SECONDS = float(os.environ.get("GPU_CHECK_SECONDS", "100"))


@dataclass
class Ran:
    """How a run ended, and what its ranks said: kind -> rank -> value."""

    code: int
    wall_s: float
    out: str
    err: str
    said: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.out.splitlines():
            kind, _, text = line.partition(" ")
            if kind in ("MEMORY", "LOSS", "STEPS", "TURNS", "GROWN"):
                value = json.loads(text)
                self.said.setdefault(kind, {})[value["rank"]] = value

    def show(self, title: str) -> None:
        print(f"== {title}: exit {self.code}, {self.wall_s:.1f} s", flush=True)
        if self.code:
            print(f"-- stdout\n{self.out[-2500:]}\n-- stderr\n{self.err[-4500:]}", flush=True)


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def prism(mode: str, output: Path, *words: str, ranks: int, options: tuple[str, ...] = (), **more: str) -> Ran:
    """The job under `prism MODE` with `ranks` ranks."""
    command = [sys.executable, "-m", "prism_sdk.cli.main", mode, "-o", str(output), "--nproc-per-node", str(ranks)]
    command += [*options, "--", str(JOB), *words]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=_environment(**more))
        return Ran(done.returncode, time.monotonic() - started, done.stdout, done.stderr)
    except subprocess.TimeoutExpired as error:
        texts = [x.decode() if isinstance(x, bytes) else x or "" for x in (error.stdout, error.stderr)]
        return Ran(124, SECONDS, *texts)


def real(*words: str, ranks: int, num_devices: int) -> Ran:
    """The job over NCCL, one process a rank."""
    started, processes = time.monotonic(), []
    for rank in range(ranks):
        environment = _environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_port("-".join(words))), NCCL_DEBUG="WARN",
            **_sharing(ranks, num_devices),
        )  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, str(JOB), *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )
        )  # fmt: skip
    outs, errs, code = [], [], 0
    for process in processes:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        outs.append(out)
        errs.append(err)
        code = code or process.returncode
    return Ran(code, time.monotonic() - started, "".join(outs), "\n".join(errs))


def _port(name: str) -> int:
    return 29500 + sum(map(ord, name)) % 400


def _sharing(ranks: int, num_devices: int) -> dict[str, str]:
    return {"GPU_JOB_SHARES": "1"} if ranks > num_devices else {}


def compare_memory(ours: Ran, *nccl: Ran) -> list[str]:
    """Where allocated, peak or reserved bytes are those of no NCCL run: part by part, rank by rank."""
    differences = []
    for rank, first in sorted(nccl[0].said.get("MEMORY", {}).items()):
        mine = ours.said.get("MEMORY", {}).get(rank, {}).get("parts", [])
        theirs = [run.said.get("MEMORY", {}).get(rank, first)["parts"] for run in nccl]
        if any([part[0] for part in mine] != [part[0] for part in parts] for parts in theirs):
            differences.append(f"rank {rank}: other parts")
            continue
        for index, (a, *others) in enumerate(zip(mine, *theirs, strict=True)):
            for at, what in enumerate(("allocated", "peak", "reserved"), 1):
                x, values = a[at], [other[at] for other in others]
                if x not in values:
                    nearest = min(values, key=lambda value: abs(x - value))
                    differences.append(f"rank {rank} part {index} {a[0]}: {what} {x}, nccl {nearest}, by {x - nearest}")
    return differences


def losses(ran: Ran) -> list[float]:
    return [value["loss"] for _, value in sorted(ran.said.get("LOSS", {}).items())]


def with_transfers(source: Path, output: Path, transfer_ns: int | None, *, gb_per_s: float = 50.0) -> Path:
    """A recording whose operations all take `transfer_ns`, or 10 us and what their bytes take; nobody computes."""
    import numpy as np

    from prism_sdk.builtin.slices import write_times
    from prismtrace import ABSENT, GraphKind, TraceReader, UnitKind

    columns = {}
    with TraceReader(source) as reader:
        for rank in reader.ranks:
            units = reader.units(rank)
            kind = units.kind
            talks = np.isin(kind, [UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV])
            size = np.maximum(units.num_elements_in, units.num_elements_out).clip(0) * 4
            known = np.full(len(kind), transfer_ns or 0)
            if transfer_ns is None:
                known = 10_000 + (size / gb_per_s).astype(np.int64)
            columns[rank] = {
                "transfer_ns": np.where(talks, known, ABSENT), "gap_ns": np.where(kind == UnitKind.COMPUTE, 0, ABSENT),
                # what ranks took while they were recorded in turns would else be the virtual ones' computing
                "start_ns": np.zeros_like(units.start_ns), "end_ns": np.zeros_like(units.end_ns),
            }  # fmt: skip
    write_times(source, columns, output, GraphKind.CALIBRATED, {}, with_payloads=True)
    return output
