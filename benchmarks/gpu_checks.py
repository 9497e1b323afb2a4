"""Runs one job over NCCL and under Prism on the GPUs at hand, and compares values, memory and times.

    python benchmarks/gpu_checks.py [record] [full] [moves] [observe] [emulate] [graphs] [switch] [limit]

Where there is one GPU, real NCCL runs put both ranks on it: each says that it is on a host of its own (NCCL_HOSTID), so
that NCCL lets them, and goes over sockets.  What torch's allocator does is the same; times of such a run mean nothing.
So `observe` takes one rank there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpu_runs import Ran, compare_memory, losses, prism, real, with_transfers

REPEATS = int(os.environ.get("GPU_CHECK_REPEATS", "5"))
TIMED = {  # steps of more than 100 ms on an H200
    "ddp": ("ddp", "12", "2048", "8192", "--timed"),
    "fsdp2": ("fsdp2", "12", "4096", "20480", "--timed"),
}
TIMED_ALONE = {  # on one GPU, one rank: calls and streams are the same, transfers are not
    "ddp": ("ddp", "12", "2048", "8192", "--timed"),
    "streams": ("streams", "12", "4096", "20480", "--timed"),
}
WORKLOADS = {
    "operations": ("operations",),
    "ddp": ("ddp", "3", "1024", "64"),
    "fsdp2": ("fsdp2", "3", "1024", "64"),
}


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
        print("   losses: prism", losses(ours), "nccl", losses(theirs), "four ranks", losses(four[name].result()))
        good = good and ours.code == theirs.code == four[name].result().code == 0 and not differences
    return good


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
    options = ("--slots", str(num_devices), *os.environ.get("GPU_CHECK_RECORD", "").split())
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
    same = losses(runs[0]) == losses(runs[1]) and len(losses(runs[0])) == ranks
    print("   losses equal", same, "bytes differ by", differences, flush=True)
    return runs[0].code == runs[1].code == 0 and same and differences == {(0, 0, 0)}


def check_observe(folder: Path, num_devices: int) -> bool:
    """Times of the device: steps as the program measures them, communication beside computation, and what it costs.

    Plain and observed runs take turns. Bytes are those of a plain run: of one of them, where they differ among
    themselves (NCCL's backend lets go of tensors when its watchdog has looked, which is a matter of chance).
    """
    good, ranks = True, min(num_devices, 2)
    for name, words in (TIMED if ranks > 1 else TIMED_ALONE).items():
        plain, seen = [], []
        outputs = [folder / f"{name}-{repeat}.prism" for repeat in range(REPEATS)]
        for repeat, output in enumerate(outputs):
            plain.append(real(*words, ranks=ranks, num_devices=num_devices))
            options = () if repeat else ("--kernels", "7:9")
            seen.append(prism("observe", output, *words, ranks=ranks, options=options))
        seen[-1].show(f"observe {name}")
        good = seen[-1].code == 0 and describe(outputs[-1], seen[-1]) and good
        good = seen[0].code == 0 and describe_kernels(outputs[0]) and good
        steps = [[_mean_step(run) for run in runs] for runs in (plain, seen)]
        print("   exits", [run.code for run in [*plain, *seen]], "steps ms: plain", steps[0], "observed", steps[1])
        if not all(all(run) for side in steps for run in side):
            good = False
            continue
        costs = [100 * (mean(b) / mean(a) - 1) for a, b in zip(*steps, strict=True)]
        differences = [compare_memory(run, *plain) for run in seen]
        among = [compare_memory(run, plain[0]) for run in plain[1:]]
        print(f"   observing costs {median(costs):+.2f} %, {[round(cost, 2) for cost in costs]}")
        print("   bytes that no plain run has", differences)
        print("   plain runs differ among themselves in", [len(lines) for lines in among], "places", flush=True)
        good = good and not any(differences) and median(costs) <= 1.0
    return good


_COUNTED = (2, 3, 4, 5, 10, 11)


def _mean_step(ran: Ran) -> list[float]:
    """Each rank's, without the first two and those that `--kernels 7:9` makes longer."""
    ms = [value["ms"] for _, value in sorted(ran.said.get("STEPS", {}).items())]
    return [round(mean(times[step] for step in _COUNTED), 3) for times in ms]


def describe_kernels(path: Path) -> bool:
    """Whether the kernels of steps 7 and 8 are there, and NCCL's among them (which a rank alone does not launch)."""
    from prism_sdk.graph.compare import compare_traces
    from prismtrace import TraceReader

    with TraceReader(path) as reader:
        events = reader.events(0)
        steps = sorted(set(events.columns()["prism.step"].tolist())) if len(events) else []
        is_alone = reader.world_size == 1
        num_nccl = sum("nccl" in (name or "").lower() for name in events.name)
    kernels = compare_traces([path], [path]).ranks[0].kernels
    print(f"   {len(events)} kernels of steps {steps}, {num_nccl} of NCCL; {len(kernels)} names, the longest "
          f"{[(k.name[:40], k.num_real, round(k.real_ns / 1e6, 3)) for k in kernels[:3]]} (ms a step)",
          flush=True)  # fmt: skip
    return steps == [7, 8] and (num_nccl > 0 or is_alone)


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
            mine = np.diff(steps.end_ns)[np.array(_COUNTED) - 1] / 1e6
            told = np.array(seen.said["STEPS"][rank]["ms"])[list(_COUNTED)]
            print(f"   rank {rank}: {len(units)} units, {int(moved.sum())} communications, {int(dated.sum())} with an "
                  f"end, {int((end - start)[dated].sum()) / 1e6:.1f} ms long, {hidden / 1e6:.1f} ms of it beside "
                  f"computing, waits {waits / 1e6:.1f} ms; steps ms {mine.round(2).tolist()} by the program "
                  f"{told.round(2).tolist()}; peaks {steps.memory_peak_bytes.tolist()[-2:]}", flush=True)  # fmt: skip
            good = good and int(dated.sum()) == int(moved.sum()) and (hidden > 0 or reader.world_size == 1)
            good = good and abs(float(mine.mean() / told.mean()) - 1) < 0.02
    return good


def check_emulate(folder: Path, num_devices: int) -> bool:
    """Values and memory of an emulated rank, without peers. The times are made up."""
    source, words = folder / "recorded.prism", WORKLOADS["fsdp2"]
    recorded = prism("record", source, *words, ranks=2)
    recorded.show("record fsdp2, 2 ranks")
    graph = with_transfers(source, folder / "graph.prism", 20_000)
    emulated = prism("emulate", folder / "emulated.prism", *words, ranks=2, options=("--graph", str(graph)))
    emulated.show("emulate fsdp2, rank 0 of 2")
    same = losses(emulated)[:1] == losses(recorded)[:1]
    memory = [v["parts"] for r, v in emulated.said.get("MEMORY", {}).items() if r == 0]
    equal = memory == [recorded.said["MEMORY"][0]["parts"]]
    print("   losses", losses(emulated), losses(recorded), "same", same, "memory equal", equal, flush=True)
    return emulated.code == 0 and same and equal


def check_graphs(folder: Path, num_devices: int) -> bool:
    """Captured communication runs under observe and is one unit; a recording refuses it."""
    from prismtrace import Op, TraceReader

    seen = prism("observe", folder / "captured.prism", "graph", ranks=min(num_devices, 2))
    seen.show("observe graph")
    refused = prism("record", folder / "refused.prism", "graph", ranks=2)
    says = "while a CUDA graph is captured" in refused.err
    print(f"== record graph: exit {refused.code}, says why: {says}; {refused.err[-600:]}", flush=True)
    if seen.code:
        return False
    with TraceReader(folder / "captured.prism") as reader:
        counts = [int((reader.units(rank).op == Op.ALL_REDUCE).sum()) for rank in reader.ranks]
    print("   all_reduce units a rank", counts, "(before the capture, in it; none of three replays)", flush=True)
    return set(counts) == {2} and refused.code == 1 and says


def check_switch(folder: Path, num_devices: int) -> bool:
    """How long it takes from one resident rank's parking to the other's going on, nothing else in between."""
    ran = prism("record", folder / "turns.prism", "turns", "400", ranks=2, options=("--slots", "1"))
    ran.show("record turns, 2 ranks, 1 slot")
    times = switches([said for _, said in sorted(ran.said.get("TURNS", {}).items())])
    if not times:
        return False
    middle, late = median(times), times[len(times) * 95 // 100]
    print(f"   {len(times)} switches: median {middle / 1e3:.0f} us, p95 {late / 1e3:.0f}, max {times[-1] / 1e3:.0f} us")
    return ran.code == 0 and middle < 1_000_000


def switches(said: list[dict[str, Any]]) -> list[int]:
    """From a rank's entering an operation to the other's leaving one, where that is what happens next; ascending."""
    events = sorted(
        (at, rank, kind) for rank, one in enumerate(said) for kind in ("entered", "left") for at in one[kind]
    )
    return sorted(
        after - before
        for (before, rank, kind), (after, other, then) in pairwise(events)
        if rank != other and kind == "entered" and then == "left"
    )


def check_limit(folder: Path, num_devices: int) -> bool:
    """A limit of just what the device has refuses the allocation that the device does; a smaller one, as said."""
    words = ("grow", "64", "--caught")
    plain = real(*words, ranks=1, num_devices=num_devices)
    plain.show("grow, without Prism")
    told = plain.said.get("GROWN", {}).get(0)
    if told is None:
        return False
    good = True
    for limit in (told["total"], 80 << 30):
        for mode in ("record", "observe"):
            options = ("--device-memory", str(limit))
            ran = prism(mode, folder / f"grow-{mode}-{limit}.prism", *words, ranks=1, options=options)
            ran.show(f"grow, {mode} --device-memory {limit}")
            found = ran.said.get("GROWN", {}).get(0, {})
            print(f"   chunks {found.get('num')}, without a limit {told['num']}; total {found.get('total')}, "
                  f"properties {found.get('seen')}", flush=True)  # fmt: skip
            is_whole = limit == told["total"]
            wanted = told["num"] - (0 if is_whole else -((limit - told["total"]) // (64 << 20)))
            good = good and found.get("total") == found.get("seen") == limit
            good = good and abs(found.get("num", 0) - wanted) <= (0 if is_whole else 1)
    return good


CHECKS = {
    "record": check_record, "observe": check_observe, "emulate": check_emulate, "full": check_full,
    "moves": check_moves, "graphs": check_graphs, "switch": check_switch, "limit": check_limit,
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
