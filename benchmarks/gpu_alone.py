"""Shows what a single GPU can: a job of eight ranks from end to end, and real steps against emulated ones.

    python benchmarks/gpu_alone.py [eight] [ddp] [fsdp2] [chain] [bytes] [steps] [limit] [shelf]

eight: FSDP2 of eight logical ranks (gpu_table_job.py) is recorded and calibrated on the GPU with modelled transfers,
and rank 0 emulated. Checked: bytes after each step are the recording's, the step is the one that calibration predicted.

bytes, or bytes=KIND,KIND: the jobs of gpu_table.py and of frameworks with few layers: bytes after each step of real
runs of two ranks (on the one GPU, by sockets) and of an emulation of the first one.

steps, or steps=KIND,KIND: the jobs of gpu_table.py, recorded beside each other and calibrated on the one GPU with
modelled transfers: the step that calibration predicted against the one that the emulation takes, and how late it
released transfers. Whether an emulation keeps up with its graph shows there, without a second GPU.

limit: with --device-memory an emulated rank must be refused just where what an observed run had on the device beside
torch's memory (NCCL's) leaves no more room.

shelf: for how long tensors live that were handed to operations and not waited for (shelf_job.py), over NCCL, recorded
and emulated.

ddp, fsdp2, chain (hold_job.py): two ranks over NCCL on the one GPU, against emulations of the first of them, in turns.
NCCL takes two ranks on a GPU that say they are on different hosts, and goes by sockets. CUDA's multi-process service
lets kernels of both run at the same time: without it the GPU is given to one process after the other, and times mean
nothing. The second rank has a 1024th of the first one's rows, so that it takes next to nothing of the GPU; else both
would slow each other down as no two GPUs do. The job is recorded, its transfers are those of one observed run, all
other times are of slices of one rank without its peer.

Environment: ALONE_REPEATS (5), and ALONE_REALS (2), the real runs of `bytes`. --rehearse runs `eight`, `bytes` and
`steps` in small on CPUs, where times mean nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))

from gpu_runs import with_transfers
from gpu_table import (
    FRAMEWORKS,
    KINDS,
    PAYLOADS,
    RECORDED,
    RECORDED_STEPS,
    REHEARSE,
    STEPS,
    WARM,
    Run,
    at_once,
    calibrated_alone,
    keep,
    over_nccl,
    predicted_ms,
    prism,
    record,
    summary,
    words,
)  # fmt: skip

from prismtrace import TraceReader

HOLD_JOB, SHELF_JOB = (Path(__file__).parents[1] / "tests" / "runtime" / f"{name}_job.py" for name in ("hold", "shelf"))
REPEATS = int(os.environ.get("ALONE_REPEATS", "5"))
REALS = int(os.environ.get("ALONE_REALS", "2"))  # of `bytes`
CTAS = "2"
BOTH = "4"  # the kernels of both ranks are on this GPU
OPTIONS = {"emulated": ("-O", f"occupy={BOTH}")}
SHARING = {"GPU_JOB_SHARES": "1", "NCCL_MAX_CTAS": CTAS}
_ALL = (*FRAMEWORKS, *KINDS)
FEW_STEPS = 3
EIGHT = {"TABLE_BLOCKS": "2", "TABLE_BATCH": "8"}


@contextlib.contextmanager
def service(folder: Path) -> Iterator[dict[str, str]]:
    """CUDA's multi-process service, and the variables of a process that uses it."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for name in variables.values():
        Path(name).mkdir()
    environment = {**os.environ, **variables}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=30)
    try:
        yield variables
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, timeout=60)
        for path in (folder / "mps-log").glob("*"):
            print(f"   {path.name}: ...{path.read_text()[-600:]}")


def shared(kind: str, folder: Path) -> dict[str, Any]:
    """Real and emulated steps of a job."""
    gate, bare, seen = folder / "open", folder / "bare.prism", folder / "seen.prism"
    gate.touch()
    light = {"HOLD_JOB_LIGHT": "1024", "HOLD_JOB_MORE": "3", "GPU_JOB_SECONDS": "150"}
    job, few = [str(HOLD_JOB), kind, str(STEPS)], [str(HOLD_JOB), kind, str(RECORDED_STEPS)]
    graph = folder / "graph.prism"
    if not at_once(prism("record", bare, kind, 0, "--payloads", "none", gate=gate, script=few, **light)):
        return {"failed": "record"}
    with service(folder) as variables:
        sharing = {**variables, **light, **SHARING}
        first = prism("observe", seen, kind, 0, "--no-pin", gate=gate, script=job, **sharing)
        if not at_once(first):
            return {"failed": "observe"}
        options = ("--graph", str(bare), "-O", f"transfers={seen}", "-O", "passes=1", "-O", f"occupy={BOTH}")
        if not at_once(prism("calibrate", graph, kind, 0, *options, gate=gate, script=few, **light)):
            return {"failed": "calibrate"}
        runs: list[tuple[str, Run]] = []
        for number in range(REPEATS):
            environment = {**variables, **light, "NCCL_MAX_CTAS": CTAS}
            output = folder / f"observed-{number}.prism"
            runs += [
                ("real", over_nccl(f"real {kind}", job, gate=gate, port=29700 + number, shares=True, **environment)),
                ("observed", prism("observe", output, kind, 0, "--no-pin", gate=gate, script=job, **sharing)),
            ]
            for name, options in OPTIONS.items():
                output = folder / f"{name}-{number}.prism"
                runs.append((name, prism("emulate", output, kind, 0, "--graph", str(graph), *options, gate=gate,
                                         script=job, **light)))  # fmt: skip
        for _, run in runs:  # nobody loads torch beside the steps of another
            at_once(run)
    found = summary(kind, runs, names=["observed", *OPTIONS])
    found["predicted_ms"], found["transfers_of_ms"] = predicted_ms(graph), round(first.step_ms, 3)
    found["releases"] = {name: _releases(folder / f"{name}-0.prism") for name in OPTIONS}
    print(f"   predicted by calibration: {found['predicted_ms']} ms; the run that transfers are of: "
          f"{found['transfers_of_ms']} ms; releases: {found['releases']}", flush=True)  # fmt: skip
    keep(kind, graph, seen, *(folder / f"{name}-0.prism" for name in OPTIONS))
    return found


def _releases(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    with TraceReader(path) as reader:
        return {key: value for key, value in reader.metadata.items() if ".release" in key}


def eight(kind: str, folder: Path) -> dict[str, Any]:
    """A job of eight ranks, from its recording to an emulated rank."""
    gate, bare, graph = folder / "open", folder / "bare.prism", folder / "graph.prism"
    gate.touch()
    runs = [
        prism("record", bare, "dense", FEW_STEPS, "--payloads", "none", gate=gate, ranks=8, **EIGHT),
        prism("calibrate", graph, "dense", FEW_STEPS, "--graph", str(bare), "-O", "passes=1", gate=gate, **EIGHT),
        prism("emulate", folder / "emulated.prism", "dense", STEPS, "--graph", str(graph), gate=gate, **EIGHT),
    ]
    for run in runs:
        run.seconds = 240.0
        if not at_once(run):
            return {"failed": run.what}
    recorded, emulated = runs[0].said, runs[2].said
    # about a second after it began a GPU goes slower for one or two steps: not what a recording of three shows
    predicted, step = predicted_ms(graph), median(emulated["STEPS"]["ms"][WARM:])
    are_equal = emulated["MEMORY"]["parts"][:FEW_STEPS] == recorded["MEMORY"]["parts"]
    found = {
        "bytes_as_recorded": are_equal, "peak_bytes": emulated["MEMORY"]["parts"][-1][1], "predicted_ms": predicted,
        "emulated_ms": round(step, 3), "apart_percent": round(100 * (step / predicted - 1), 3),
        "steps_ms": [round(ms, 2) for ms in emulated["STEPS"]["ms"]],
    }  # fmt: skip
    if not REHEARSE and (not are_equal or abs(found["apart_percent"]) > 2):
        found["failed"] = "bytes or steps"
    keep(kind, graph, folder / "emulated.prism")
    print(f"== eight: {json.dumps(found)}", flush=True)
    return found


def bytes_of(kind: str, folder: Path) -> dict[str, Any]:
    """Where bytes of an emulated rank differ from those of real runs, step by step.

    The times that are replayed are those of a run observed on the shared GPU, or its transfers where values are needed,
    which only a recording has: for how long torch's backend keeps tensors depends on when operations end.
    """
    gate, graph, bare, seen = (folder / name for name in ("open", "graph.prism", "bare.prism", "seen.prism"))
    gate.touch()
    layers = {"TABLE_BLOCKS": "4" if kind in PAYLOADS else "2"}
    started = time.monotonic()
    runs = [prism("observe", seen, kind, FEW_STEPS, gate=gate, GPU_JOB_SHARES="1", **layers)]
    for number in range(0 if REHEARSE else REALS):
        port = 29800 + REALS * _ALL.index(kind) + number
        runs.append(over_nccl(f"real {kind}", words(kind, FEW_STEPS), gate=gate, port=port, shares=True, **layers))
    real = runs[1:] or runs[:1]
    if kind in PAYLOADS:
        transfers = ("--graph", str(bare), "-O", f"transfers={seen}", "-O", "passes=1")
        runs += [prism("record", bare, kind, FEW_STEPS, "--payloads", PAYLOADS[kind], gate=gate, **layers),
                 prism("calibrate", graph, kind, FEW_STEPS, *transfers, gate=gate, **layers)]  # fmt: skip
    options = ("--graph", str(graph if kind in PAYLOADS else seen))
    emulated = prism("emulate", folder / "out.prism", kind, FEW_STEPS, *options, gate=gate, **layers)
    runs.append(emulated)
    for run in runs:
        run.seconds = 150.0
        if not at_once(run):
            return {"failed": run.what}
        if run.what.startswith("record"):
            keep(kind, seen, bare)
    parts = [run.said["MEMORY"]["parts"] for run in real]
    pairs = list(zip(emulated.said["MEMORY"]["parts"], *parts, strict=True))
    apart = [(step, mine, theirs) for step, (mine, *theirs) in enumerate(pairs) if mine not in theirs]
    losses = [run.said["LOSS"]["losses"] for run in (emulated, real[0])]
    found = {
        "steps": len(pairs),
        "differ": len(apart),
        "real_runs_differ": sum(any(one != theirs[0] for one in theirs) for _, *theirs in pairs),
        "peak_bytes": parts[0][-1][1],
        "same_losses": losses[0] == losses[1] if PAYLOADS.get(kind) else "values were not recorded",
    }
    print(f"== bytes of {kind}: {json.dumps(found)} {apart[:2]} {time.monotonic() - started:.0f} s", flush=True)
    return found if not apart else {**found, "failed": "bytes"}


def all_bytes(kind: str, folder: Path) -> dict[str, Any]:
    """Of all jobs, or of those that are named."""
    results: dict[str, Any] = {}
    for one in kind.partition("=")[2].split(",") if "=" in kind else _ALL:
        own = folder / one
        own.mkdir()
        try:
            results[one] = bytes_of(one, own)
        except Exception as error:  # the others go on
            results[one] = {"failed": repr(error)}
    print(json.dumps(results), flush=True)
    wrong = [one for one, found in results.items() if "failed" in found]
    return {**results, **({"failed": wrong} if wrong else {})}


def last_step_ms(graph: Path) -> float:
    """The last step of a graph, which an emulation goes on with: the first ones are often unlike it."""
    with TraceReader(graph) as reader:
        ends = reader.steps(0).end_ns.tolist()[:RECORDED_STEPS]
    return round((ends[-1] - ends[-2]) / 1e6, 3)


def steps_of(kind: str, folder: Path) -> dict[str, Any]:
    """Predicted and emulated steps of all jobs, or of those that are named."""
    kinds = kind.partition("=")[2].split(",") if "=" in kind else list(KINDS)
    results: dict[str, Any] = {}
    record(kinds, folder)
    for one in kinds:
        if one not in RECORDED:
            results[one] = {"failed": "record"}
            continue
        graph, emulated = calibrated_alone(one, folder), folder / f"{one}-emulated.prism"
        run = prism("emulate", emulated, one, STEPS, "--graph", str(graph), gate=folder / "open")
        if not graph.exists() or not at_once(run):
            results[one] = {"failed": "calibrate or emulate"}
            continue
        predicted, times = last_step_ms(graph), run.said["STEPS"]["ms"]
        results[one] = {
            "predicted_ms": predicted, "mean_of_graph_ms": predicted_ms(graph), "emulated_ms": round(run.step_ms, 3),
            "median_ms": round(median(times[WARM:]), 3),
            "apart_percent": round(100 * (run.step_ms / predicted - 1), 3),
            "bytes_as_recorded": run.said["MEMORY"]["parts"][:RECORDED_STEPS] == RECORDED[one].said["MEMORY"]["parts"],
            "steps_ms": [round(ms, 1) for ms in times], "releases": _releases(emulated),
        }  # fmt: skip
        keep(one, graph, emulated)
        print(f"== steps of {one}: {json.dumps(results[one])}", flush=True)
    wrong = [one for one, found in results.items() if "failed" in found]
    return {**results, **({"failed": wrong} if wrong else {})}


def limit(_: str, folder: Path) -> dict[str, Any]:
    """Just enough device memory, and a little less, for what torch and the libraries of an observed run have together.

    With less torch's allocator is refused, gives back what it caches, and tries again, as on a real device.
    """
    gate, seen = folder / "open", folder / "seen.prism"
    gate.touch()
    kind, layers = "dense", {"TABLE_BLOCKS": "2"}
    observed = prism("observe", seen, kind, 3, gate=gate, GPU_JOB_SHARES="1", **layers)
    if not at_once(observed):
        return {"failed": observed.what}
    with TraceReader(seen) as reader:
        others = int(reader.metadata["rank.0.device_other_bytes"])
    peak = max(part[2] for part in observed.said["MEMORY"]["parts"])
    found: dict[str, Any] = {"others_bytes": others, "reserved_bytes": peak}
    for name, size in (("enough", peak + (8 << 20)), ("less", peak - (8 << 20))):
        options = ("--graph", str(seen), "--device-memory", str(size + others))
        run = prism("emulate", folder / f"{name}.prism", kind, 3, *options, gate=gate, **layers)
        run.start()
        run.finish()
        retries = run.said.get("MEMORY", {}).get("retries")
        found[name] = {"exit": run.code, "retries": retries, **run.said.get("REFUSED", {})}
    print(f"== limit: {json.dumps(found)}", flush=True)
    is_exact = found["enough"]["retries"] == 0 and (found["less"]["retries"] or "step" in found["less"])
    return found if not found["enough"]["exit"] and is_exact else {**found, "failed": "limit"}


def shelf(kind: str, folder: Path) -> dict[str, Any]:
    """Bytes that operations hold, over NCCL and under Prism."""
    gate, bare, graph = folder / "open", folder / "bare.prism", folder / "graph.prism"
    gate.touch()
    job = [str(SHELF_JOB)]
    shares = {"GPU_JOB_SHARES": "1"}
    runs = {
        "real": over_nccl("real shelf", job, gate=gate, port=29790, shares=True),
        "observed": prism("observe", folder / "seen.prism", kind, 0, gate=gate, script=job, **shares),
        "recorded": prism("record", bare, kind, 0, gate=gate, script=job),
        "emulated": prism("emulate", folder / "out.prism", kind, 0, "--graph", str(graph), gate=gate, script=job),
    }
    found: dict[str, Any] = {}
    for name, run in runs.items():
        if not at_once(run):
            return {**found, "failed": run.what}
        if name == "recorded":
            with_transfers(bare, graph, 20_000)
        lines = (line.partition(" ") for line in run.out.splitlines())
        said = [json.loads(text) for what, _, text in lines if what == "HELD"]
        found[name] = {one["case"]: one["bytes"] for one in said if not one["rank"]}
    for case, held in found["real"].items():
        others = {name: values.get(case) for name, values in found.items() if values.get(case) != held}
        print(f"   {case:28s} {held} {others or 'in all'}", flush=True)
    apart = [name for name in found if found[name] != found["real"]]
    return {**found, "failed": apart} if apart else found


OTHERS = {"eight": eight, "bytes": all_bytes, "steps": steps_of, "limit": limit, "shelf": shelf}


def main() -> int:
    results: dict[str, Any] = {}
    for kind in [word for word in sys.argv[1:] if word[:1] != "-"] or ["eight", "ddp", "fsdp2", "bytes", "limit"]:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as text:
            results[kind] = OTHERS.get(kind.partition("=")[0], shared)(kind, Path(text))
        print(f"#### {kind}: {time.monotonic() - started:.1f} s, {results[kind].get('failed', 'ran')}\n", flush=True)
    print(json.dumps(results))
    return 0 if not any("failed" in one for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
