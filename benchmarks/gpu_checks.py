"""Runs one job over NCCL and under Prism on the GPUs at hand, and compares values, memory and times.

    python benchmarks/gpu_checks.py [record] [full] [moves] [observe] [emulate]

Where there is one GPU, real NCCL runs put both ranks on it: each says that it is on a host of its own (NCCL_HOSTID), so
that NCCL lets them, and goes over sockets.  What torch's allocator does is the same; times of such a run mean nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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
            if kind in ("MEMORY", "LOSS", "STEPS"):
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


TIMED = {
    "ddp": ("ddp", "8", "2048", "4096", "--timed"),
    "fsdp2": ("fsdp2", "8", "2048", "4096", "--timed"),
}
WORKLOADS = {
    "operations": ("operations",),
    "ddp": ("ddp", "3", "1024", "64"),
    "fsdp2": ("fsdp2", "3", "1024", "64"),
}


def compare_memory(ours: Ran, nccl: Ran) -> list[str]:
    """Where allocated, peak or reserved bytes differ: part by part, rank by rank."""
    differences = []
    for rank, theirs in sorted(nccl.said.get("MEMORY", {}).items()):
        mine = ours.said.get("MEMORY", {}).get(rank, {}).get("parts", [])
        if [part[0] for part in mine] != [part[0] for part in theirs["parts"]]:
            differences.append(f"rank {rank}: other parts")
            continue
        for a, b in zip(mine, theirs["parts"], strict=True):
            if a != b:
                differences.append(f"rank {rank} {a[0]}: prism {a[1:]}, nccl {b[1:]}, differ by "
                                   f"{[x - y for x, y in zip(a[1:], b[1:], strict=True)]}")  # fmt: skip
    return differences


def check_record(folder: Path, num_devices: int) -> bool:
    """Every operation, DDP and FSDP2: four ranks share what there is, and two hold what NCCL's hold, byte for byte."""
    with ThreadPoolExecutor() as pool:
        four = {n: pool.submit(prism, "record", folder / f"{n}-4.prism", *w, ranks=4) for n, w in WORKLOADS.items()}
        two = {n: pool.submit(prism, "record", folder / f"{n}-2.prism", *w, ranks=2) for n, w in WORKLOADS.items()}
        nccl = {n: pool.submit(real, *w, ranks=2, num_devices=num_devices) for n, w in WORKLOADS.items()}
    good = True
    for name in WORKLOADS:
        ours, theirs = two[name].result(), nccl[name].result()
        four[name].result().show(f"record {name}, 4 ranks")
        ours.show(f"record {name}, 2 ranks")
        theirs.show(f"NCCL {name}, 2 ranks on {num_devices} GPUs")
        differences = compare_memory(ours, theirs)
        parts = theirs.said.get("MEMORY", {}).get(0, {}).get("parts", [])
        print(f"   {len(parts)} parts a rank, {len(differences)} differ; last {parts[-1:]}", flush=True)
        for line in differences[:10]:
            print("  ", line, flush=True)
        print("   losses: prism", _losses(ours), "nccl", _losses(theirs), "four ranks", _losses(four[name].result()))
        good = good and ours.code == theirs.code == four[name].result().code == 0 and not differences
    return good


def _losses(ran: Ran) -> list[float]:
    return [value["loss"] for _, value in sorted(ran.said.get("LOSS", {}).items())]


def check_full(folder: Path, num_devices: int) -> bool:
    """Ranks that cannot all be resident, and may not move, are refused before the card is full."""
    ranks = 6 * num_devices
    options = ("--slots", "1", "--parked-memory", "0")
    ran = prism("record", folder / "full.prism", "fill", "40", ranks=ranks, options=options)
    print(f"== {ranks} ranks of 40 GiB each: exit {ran.code}, {ran.wall_s:.1f} s; {ran.err[-900:]}", flush=True)
    return ran.code == 1 and "does not fit on GPU" in ran.err


def check_moves(folder: Path, num_devices: int) -> bool:
    """Sixteen ranks a GPU that do not fit together: losses of a job that does fit, and its peaks, to the byte."""
    ranks, large, small = 16 * num_devices, 12, 2
    options = ("--slots", str(num_devices))
    runs = [
        prism("record", folder / "moves.prism", "states", str(large), "3", ranks=ranks, options=options),
        prism("record", folder / "stays.prism", "states", str(small), "3", ranks=ranks, options=options),
    ]
    for size, ran in zip((large, small), runs, strict=True):
        ran.show(f"record, {ranks} ranks of {size} GiB each")
        print("  ", [line for line in ran.err.splitlines() if "parked ranks" in line], flush=True)
    more = (large - small) << 30
    differences = {
        tuple(a - b - more for a, b in zip(mine[1:], theirs[1:], strict=True))
        for rank, value in runs[0].said.get("MEMORY", {}).items()
        for mine, theirs in zip(value["parts"], runs[1].said["MEMORY"][rank]["parts"], strict=True)
    }
    same = _losses(runs[0]) == _losses(runs[1]) and len(_losses(runs[0])) == ranks
    print("   losses equal", same, "bytes differ by", differences, flush=True)
    return runs[0].code == runs[1].code == 0 and same and differences == {(0, 0, 0)}


def check_observe(folder: Path, num_devices: int) -> bool:
    """Times of the device: steps as the program measures them, and communication that runs beside computation."""
    good = True
    for name, words in TIMED.items():
        output = folder / f"{name}.prism"
        plain = [real(*words, ranks=2, num_devices=num_devices)]
        seen = prism("observe", output, *words, ranks=2, **_sharing(2, num_devices))
        if num_devices > 1:
            plain.append(real(*words, ranks=2, num_devices=num_devices))
        seen.show(f"observe {name}")
        print("   plain", [run.code for run in plain], "steps ms: plain", [_mean_step(run) for run in plain],
              "observed", _mean_step(seen), "differing in memory:", compare_memory(seen, plain[0])[:6])  # fmt: skip
        good = good and seen.code == 0 and plain[0].code == 0 and not compare_memory(seen, plain[0])
        if seen.code == 0:
            good = describe(output, seen) and good
    return good


def _mean_step(ran: Ran) -> list[float]:
    return [round(sum(v["ms"][2:]) / len(v["ms"][2:]), 3) for _, v in sorted(ran.said.get("STEPS", {}).items())]


def describe(path: Path, seen: Ran) -> bool:
    """Print what an observed trace says, and whether its steps are those that the program measured."""
    import numpy as np

    from prismtrace import ABSENT, TraceReader, UnitKind, validate

    errors = [finding for finding in validate(path) if finding.severity == "error"]
    print("   findings:", errors[:3], flush=True)
    good = not errors
    with TraceReader(path) as reader:
        for rank in range(reader.world_size):
            units, steps = reader.units(rank), reader.steps(rank)
            kind, start, end = units.kind, units.start_ns, units.end_ns
            moved = (kind == UnitKind.COLLECTIVE) | (kind == UnitKind.SEND) | (kind == UnitKind.RECV)
            dated = moved & (end != ABSENT)
            computing = kind == UnitKind.COMPUTE
            hidden = sum(
                int(np.clip(np.minimum(end[computing], end[i]) - np.maximum(start[computing], start[i]), 0, None).sum())
                for i in np.flatnonzero(dated)
            )
            waits = int((end - start)[kind == UnitKind.WAIT].sum())
            mine = np.diff(steps.end_ns)[1:] / 1e6
            told = np.array(seen.said["STEPS"][rank]["ms"][2:])
            print(f"   rank {rank}: {len(units)} units, {int(moved.sum())} communications, {int(dated.sum())} with an "
                  f"end, {int((end - start)[dated].sum()) / 1e6:.1f} ms long, {hidden / 1e6:.1f} ms of it beside "
                  f"computing, waits {waits / 1e6:.1f} ms; steps ms {mine.round(2).tolist()} by the program "
                  f"{told.round(2).tolist()}; peaks {steps.memory_peak_bytes.tolist()[-2:]}", flush=True)  # fmt: skip
            good = good and int(dated.sum()) == int(moved.sum()) and hidden > 0
            good = good and abs(float(mine.mean() / told.mean()) - 1) < 0.02
    return good


def check_emulate(folder: Path, num_devices: int) -> bool:
    """Values and memory of an emulated rank, without peers. The times are made up."""
    source, words = folder / "recorded.prism", WORKLOADS["fsdp2"]
    recorded = prism("record", source, *words, ranks=2)
    recorded.show("record fsdp2, 2 ranks")
    graph = made_up_times(source, folder / "graph.prism")
    emulated = prism("emulate", folder / "emulated.prism", *words, ranks=2, options=("--graph", str(graph)))
    emulated.show("emulate fsdp2, rank 0 of 2")
    same = _losses(emulated)[:1] == _losses(recorded)[:1]
    memory = [v["parts"] for r, v in emulated.said.get("MEMORY", {}).items() if r == 0]
    equal = memory == [recorded.said["MEMORY"][0]["parts"]]
    print("   losses", _losses(emulated), _losses(recorded), "same", same, "memory equal", equal, flush=True)
    return emulated.code == 0 and same and equal


def made_up_times(source: Path, output: Path) -> Path:
    """A recording with times that nobody measured, for the values alone."""
    import numpy as np

    from prism_sdk.builtin.slices import write_times
    from prismtrace import ABSENT, GraphKind, TraceReader, UnitKind

    columns = {}
    with TraceReader(source) as reader:
        for rank in reader.ranks:
            kind = reader.units(rank).kind
            talks = np.isin(kind, [UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV])
            columns[rank] = {
                "transfer_ns": np.where(talks, 20_000, ABSENT),
                "gap_ns": np.where(kind == UnitKind.COMPUTE, 0, ABSENT),
            }
    write_times(source, columns, output, GraphKind.CALIBRATED, {}, with_payloads=True)
    return output


CHECKS = {
    "record": check_record, "observe": check_observe, "emulate": check_emulate, "full": check_full,
    "moves": check_moves,
}  # fmt: skip


def main() -> int:
    import torch

    num_devices = torch.cuda.device_count()
    print("torch", torch.__version__, "devices", num_devices, flush=True)
    results = {}
    with tempfile.TemporaryDirectory() as text:
        for name in sys.argv[1:] or CHECKS:
            started = time.monotonic()
            results[name] = CHECKS[name](Path(text), num_devices)
            verdict = "good" if results[name] else "BAD"
            print(f"#### {name}: {verdict} after {time.monotonic() - started:.1f} s\n", flush=True)
    print(json.dumps(results))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
