"""Checks and measures the NCCL profiler on a machine with GPUs, under PyTorch; about 80 seconds with two GPUs.

    python benchmarks/nccl_profiler_device.py                       # a check, a joined trace, and the overhead
    python benchmarks/nccl_profiler_device.py --parts check,all     # the check, and again with all events
    python benchmarks/nccl_profiler_device.py --rehearse            # no GPU: does the measurement itself work?
    OUT=results python benchmarks/nccl_profiler_device.py           # also writes results/nccl_profiler_device.json

One rank a GPU.  *check*: every collective and message of torch.distributed runs with the library loaded; the records
must agree across ranks, be what torch asked for, have kernel times that lie where the host says the operation ran, and
nothing may be lost.  *joined*: the same under `prism observe --nccl-profiler`; the units must say what NCCL did.
*overhead*: two jobs, with the profiler and without, live side by side and run blocks of steps in turns, so that
both see the same machine; what counts is the median of the pairs' ratios, with what is left of noise beside it.

With a single GPU two ranks share it through a second NCCL_HOSTID (sockets, slow; only the check).  Exit code 1: a check
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
WORKER = Path(__file__).with_name("nccl_profiler_worker.py")
TIMEOUT_S = 60


def library() -> str:
    """The installed library, or one compiled for this run."""
    from prism_sdk.errors import UsageError
    from prism_sdk.nccl.library import find_library

    try:
        return str(find_library())
    except UsageError:
        sys.path.insert(0, str(ROOT / "nccl_profiler" / "tests"))
        from host_runs import SOURCES

        target = Path(tempfile.mkdtemp()) / "libprism_nccl_profiler.so"
        sources = [str(path) for path in SOURCES.glob("*.c")]
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,nodelete"]
        subprocess.run(["cc", *flags, *sources, "-o", str(target), "-ldl", "-lpthread"], check=True)
        return str(target)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def rank_environments(num_ranks: int, environ: dict[str, str], *, shared: bool) -> list[dict[str, str]]:
    """What each rank of one job has in its environment."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_PROFILER")}
    port, found = free_port(), []
    for rank in range(num_ranks):
        own = {
            "RANK": str(rank), "LOCAL_RANK": "0" if shared else str(rank), "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0",
        }  # fmt: skip
        if shared:  # NCCL takes them for ranks of two hosts
            own |= {"NCCL_HOSTID": f"host{rank}", "NCCL_MAX_CTAS": "2", "NCCL_IB_DISABLE": "1"}
        found.append({**settings, **own, **environ})
    return found


def run(num_ranks: int, words: list[str], environ: dict[str, str], *, shared: bool) -> list[Any]:
    """Start the ranks of the worker; returns what each printed as its last line, as JSON."""
    ranks = list[tuple[subprocess.Popen[bytes], IO[str], IO[str]]]()
    with contextlib.ExitStack() as files:
        for own in rank_environments(num_ranks, environ, shared=shared):
            out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            command = [sys.executable, str(WORKER), *words]
            process = subprocess.Popen(command, env=own, stdout=out, stderr=err, cwd=ROOT)
            ranks.append((process, out, err))
        try:
            wait_for_all(ranks)
            return [json.loads(_text(out).strip().splitlines()[-1]) for _, out, _ in ranks]
        finally:
            for process, _, _ in ranks:
                process.kill()
                process.wait()


def wait_for_all(ranks: list[tuple[subprocess.Popen[bytes], IO[str], IO[str]]]) -> None:
    """Until all have ended; raises what the first that failed wrote: the others may wait for it."""
    deadline = time.monotonic() + TIMEOUT_S + 10  # a rank that hangs says where before
    running = True
    while running:
        time.sleep(0.1)
        running = any(process.poll() is None for process, _, _ in ranks)
        for rank, (process, _, err) in enumerate(ranks):
            if process.returncode:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}:\n{_text(err)[-3000:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not done after {TIMEOUT_S} s")


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def check(num_ranks: int, plugin: str, *, shared: bool, events: str = "default") -> dict[str, Any]:
    """Run every operation with the library, and hold the records against what torch was asked for."""
    from prism_sdk.nccl.job import load_job
    from prism_sdk.nccl.operations import operations
    from prism_sdk.nccl.report import make_report

    with tempfile.TemporaryDirectory() as folder:
        environ = {"NCCL_PROFILER_PLUGIN": plugin, "PRISM_NCCL_OUTPUT": f"{folder}/", "PRISM_NCCL_EVENTS": events}
        asked = run(num_ranks, ["check"], environ, shared=shared)
        job = load_job(sorted(Path(folder).glob("*.ncclrec*")))
    problems = list(job.findings())
    if len(job.ranks) != num_ranks:
        problems.append(f"{len(job.ranks)} files of {num_ranks} ranks")
    for one, truth in zip(job.ranks, asked, strict=False):
        problems += compare_with_torch(one, truth)
    num_operations = num_apart = num_disagreeing = 0
    for operation in operations(job):
        num_operations += 1
        needed = 2 if operation.name == "send_recv" else operation.num_ranks or 0
        sides: Counter[tuple[Any, ...]] = Counter()
        for place, tasks in operation.members:
            t = job.ranks[place].tasks
            for task in tasks:
                sides[t.algo[task], t.proto[task], t.dtype[task], int(t.channels[task])] += 1
        is_to_itself = operation.name == "send_recv" and operation.num_members == 1
        num_apart += operation.num_members < needed and not is_to_itself
        # channels of a send and of its receive may differ
        words = {side[:3] if operation.name in ("send_recv", "all_to_all") else side for side in sides}
        num_disagreeing += len(words) != 1
    if num_apart:
        problems.append(f"{num_apart} of {num_operations} operations lack a member")
    if num_disagreeing:
        problems.append(f"{num_disagreeing} operations differ between ranks in algorithm, protocol, type or channels")
    report = make_report(job)
    return {
        "problems": problems,
        "notes": job.notes(),
        "torch": asked[0]["torch"],
        "nccl": asked[0]["nccl"],
        "interface": sorted({comm.interface_version for one in job.ranks for comm in one.file.comms.values()}),
        "num_operations": num_operations,
        "num_tasks": job.num_tasks,
        "num_events": sum(len(one.file.events) for one in job.ranks),
        "clocks": {device: vars(fit) for device, fit in job.clocks.items()},
        "fastest": [
            [row.name, row.num_bytes, row.algo, row.proto, row.channels, row.median_ns, row.busbw_gb_per_s]
            for row in report.rows
            if row.num_bytes >= 1 << 20
        ],
    }


def compare_with_torch(one: Any, truth: dict[str, Any]) -> list[str]:
    """The tasks of one rank against what its worker says it called, in order, and when."""
    from prism_sdk.nccl.tasks import fit_of

    tasks, problems, rank = one.tasks, [], one.rank
    comms = one.file.comms
    ranks = {number: -1 if comm.rank is None else comm.rank for number, comm in comms.items()}
    own_rank = np.array([ranks[comm] for comm in tasks.comm.tolist()], np.int64)
    to_itself = tasks.is_message & (own_rank == tasks.peer)
    untimed = (tasks.kernel_stop_ns == np.iinfo(np.int64).min) & ~to_itself
    # the last stamps of a channel that messages to oneself have shifted were never read
    left_out = untimed & (tasks.num_kernels > 0)
    untimed &= ~left_out
    if np.count_nonzero(left_out) > 0.03 * len(tasks):
        problems.append(f"rank {rank}: {np.count_nonzero(left_out)} of {len(tasks)} kernel times are another's")
    if untimed.any():
        names = Counter(tasks.func[untimed].tolist())
        problems.append(f"rank {rank}: {int(untimed.sum())} tasks have no kernel time: {dict(names)}")
    # collectives in the order of the calls, over all communicators: torch calls from one thread here
    order = np.flatnonzero(~tasks.is_message)
    order = order[np.argsort(tasks.called_ns[order], kind="stable")]
    found = [(str(tasks.func[t]), int(tasks.count[t]), str(tasks.dtype[t])) for t in order.tolist()]
    wanted = [tuple(call) for call in truth["collectives"]]
    if len(found) != len(wanted):
        problems.append(f"rank {rank}: {len(found)} collectives, torch called {len(wanted)}")
    for (func, num, dtype), (func2, num2, dtype2) in zip(found, wanted, strict=False):
        if func != func2 or num != num2 or (dtype2 is not None and dtype != dtype2):
            problems.append(f"rank {rank}: NCCL has {func} {num} {dtype}, torch called {func2} {num2} {dtype2}")
            break
    sent = Counter(
        (str(tasks.func[t]), int(tasks.count[t])) for t in np.flatnonzero(tasks.is_message & ~to_itself).tolist()
    )
    for func, num, at_least in truth["messages"]:
        if sent[func, num] < at_least:
            problems.append(f"rank {rank}: {sent[func, num]} {func} of {num} elements, torch asked for {at_least}")
    # each of these ran alone, between two synchronisations: its kernel lies between them on the host's clock
    fits = [fit_of(one.clocks, one.file, comm) for comm in comms]
    slack = 1000 + max((fit.uncertainty_ns or 0 for fit in fits if fit is not None), default=0)
    for begin, end, name in truth["windows"]:
        inside = (tasks.called_ns >= begin) & (tasks.called_ns <= end)
        timed = inside & (tasks.kernel_stop_ns != np.iinfo(np.int64).min)
        early, late = tasks.kernel_start_ns[timed] < begin - slack, tasks.kernel_stop_ns[timed] > end + slack
        if not inside.any():
            problems.append(f"rank {rank}: nothing was recorded between {begin} and {end} ({name})")
        elif early.any() or late.any():
            problems.append(f"rank {rank}: the kernel of {name} lies outside of the time in which it ran")
    return problems


class LiveJob:
    """The ranks of one job, which run steps when they are told to."""

    def __init__(self, num_ranks: int, environ: dict[str, str]) -> None:
        self._ranks = []
        for own in rank_environments(num_ranks, environ, shared=False):
            err = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the job
            process = subprocess.Popen(
                [sys.executable, str(WORKER), "steps"], env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=err, cwd=ROOT, text=True,
            )  # fmt: skip
            self._ranks.append((process, err))

    def steps(self, num: int) -> list[float]:
        """Times of `num` steps in ms, each that of the slowest rank."""
        for process, _ in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{num}\n")
                process.stdin.flush()
        times = []
        for rank, (process, err) in enumerate(self._ranks):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} ended with {process.wait()}:\n{_text(err)[-3000:]}")
            times.append(json.loads(line))
        return [max(step) for step in zip(*times, strict=True)]

    def close(self) -> None:
        """End the job in order; kill what does not end."""
        for process, _ in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process, err in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()
            err.close()


def overhead(num_ranks: int, plugin: str, *, num_pairs: int = 20, num_steps: int = 12) -> dict[str, Any]:
    """Blocks of steps of two jobs in turns (ABBA); the ratio of each pair's medians, and the noise of the same job."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as jobs:
        started = []
        for environ in ({}, {"NCCL_PROFILER_PLUGIN": plugin, "PRISM_NCCL_OUTPUT": f"{folder}/"}):
            started.append(LiveJob(num_ranks, environ))
            jobs.callback(started[-1].close)
        for job in started:
            job.steps(40)
        blocks: tuple[list[float], list[float]] = ([], [])
        for pair in range(num_pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                blocks[which].append(statistics.median(started[which].steps(num_steps)))
        jobs.close()
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    off, on = (np.array(times) for times in blocks)
    changes = 100 * (on / off - 1)
    draws = np.random.default_rng(0).choice(changes, (2000, len(changes)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    noise = 100 * np.abs(off[1:] / off[:-1] - 1)
    return {
        "without_ms": off.round(3).tolist(), "with_ms": on.round(3).tolist(),
        "median_without_ms": float(np.median(off)), "median_with_ms": float(np.median(on)),
        "median_change_percent": float(np.median(changes)), "interval_95_percent": [float(low), float(high)],
        "noise_percent": float(np.median(noise)), "record_bytes": num_bytes,
        "record_bytes_a_step": num_bytes / num_ranks / (40 + num_pairs * num_steps),
    }  # fmt: skip


def joined(num_ranks: int) -> dict[str, Any]:
    """The check under prism observe, and what the units of its trace say then."""
    from prismtrace import ABSENT, TraceReader, UnitKind

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "real.prism"
        words = ["observe", "--nccl-profiler", "--nproc-per-node", str(num_ranks), "-o", str(trace)]
        done = subprocess.run(
            [sys.executable, "-m", "prism_sdk.cli.main", *words, "--", str(WORKER), "check"], text=True,
            capture_output=True, timeout=TIMEOUT_S + 15, cwd=ROOT, env={**os.environ, "NCCL_NVLS_ENABLE": "0"},
        )  # fmt: skip
        lines = [line for line in done.stderr.splitlines() if "NCCL" in line]
        problems = [] if done.returncode == 0 else [f"exit code {done.returncode}", *done.stderr.splitlines()[-12:]]
        ranks = {}
        if trace.is_file():
            with TraceReader(trace) as reader:
                for rank in reader.ranks:
                    units = reader.units(rank)
                    mine = np.isin(units.kind, (UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV))
                    count = {"units": int(mine.sum()), "joined": 0, "with_kernel_time": 0}
                    if "nccl.num_tasks" in units.column_names:
                        count["joined"] = int((np.asarray(units["nccl.num_tasks"])[mine] != ABSENT).sum())
                        count["with_kernel_time"] = int((np.asarray(units["nccl.kernel_end_ns"])[mine] != ABSENT).sum())
                    ranks[rank] = count
                    if count["joined"] < count["units"] or count["with_kernel_time"] < 0.97 * count["units"]:
                        problems.append(f"rank {rank}: of its communication units only these are joined: {count}")
        return {"exit_code": done.returncode, "said": lines, "ranks": ranks, "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,joined,overhead", help="of check, all, joined, overhead")
    parser.add_argument("--rehearse", action="store_true", help="the measurement of overhead on the CPU, with gloo")
    options = parser.parse_args()
    if options.rehearse:
        print(json.dumps(overhead(2, library(), num_pairs=4, num_steps=3), indent=2))
        return 0
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        print(json.dumps({"skipped": "no GPU"}))
        return 0
    shared = num_gpus == 1
    num_ranks, plugin = 2 if shared else num_gpus, library()
    parts = ["check"] if shared else options.parts.split(",")
    results: dict[str, Any] = {"gpus": num_gpus, "gpu": torch.cuda.get_device_name(0), "seconds": {}}
    for part in parts:
        begin = time.monotonic()
        if part in ("check", "all"):
            events = "all" if part == "all" else "default"
            results[part] = check(num_ranks, plugin, shared=shared, events=events)
        elif part == "joined":
            results[part] = joined(num_ranks)
        else:
            results[part] = overhead(num_ranks, plugin)
        results["seconds"][part] = round(time.monotonic() - begin, 1)
    text = json.dumps(results, indent=2, default=str)
    print(text)
    out = os.environ.get("OUT")
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "nccl_profiler_device.json").write_text(text)
    return 1 if any(results[part].get("problems") for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
