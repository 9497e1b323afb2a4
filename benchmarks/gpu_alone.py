"""Shows what a single GPU can: a job of eight ranks from end to end, and real steps against emulated ones.

    python benchmarks/gpu_alone.py [eight] [ddp] [fsdp2] [chain]

eight: FSDP2 of eight logical ranks (gpu_table_job.py) is recorded and calibrated on the GPU with modelled transfers,
and rank 0 emulated. Checked: bytes after each step are the recording's, the step is the one that calibration predicted.

ddp, fsdp2, chain (hold_job.py): two ranks over NCCL on the one GPU, against emulations of the first of them, in turns.
NCCL takes two ranks on a GPU that say they are on different hosts, and goes by sockets. CUDA's multi-process service
lets kernels of both run at the same time: without it the GPU is given to one process after the other, and times mean
nothing. The second rank has a 64th of the first one's rows, so that it takes next to nothing of the GPU; else both
would slow each other down as no two GPUs do. The job is recorded, its transfers are those of one observed run, all
other times are of slices of one rank without its peer. Environment: ALONE_REPEATS (5). --rehearse runs
`eight` in small on CPUs, where times mean nothing.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))

from gpu_table import RECORDED_STEPS, REHEARSE, STEPS, Run, at_once, in_turns, over_nccl, prism, summary

HOLD_JOB = Path(__file__).parents[1] / "tests" / "runtime" / "hold_job.py"
REPEATS = int(os.environ.get("ALONE_REPEATS", "5"))
CTAS = "2"
OPTIONS = {"local": (), "occupy": ("-O", f"occupy={CTAS}")}
SHARING = {"GPU_JOB_SHARES": "1", "NCCL_MAX_CTAS": CTAS}
EIGHT_STEPS = 3
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
    light = {"HOLD_JOB_LIGHT": "64", "GPU_JOB_SECONDS": "150"}
    job, few = [str(HOLD_JOB), kind, str(STEPS)], [str(HOLD_JOB), kind, str(RECORDED_STEPS)]
    graph = folder / "graph.prism"
    if not at_once(prism("record", bare, kind, 0, gate=gate, script=few, **light)):
        return {"failed": "record"}
    with service(folder) as variables:
        if not at_once(prism("observe", seen, kind, 0, gate=gate, script=job, **variables, **light, **SHARING)):
            return {"failed": "observe"}
        words = ("--graph", str(bare), "-O", f"transfers={seen}", "-O", "passes=1", "-O", f"occupy={CTAS}")
        if not at_once(prism("calibrate", graph, kind, 0, *words, gate=gate, script=few, **light)):
            return {"failed": "calibrate"}
        runs: list[tuple[str, Run]] = []
        for number in range(REPEATS):
            port, turn = 29700 + number, folder / f"gate-{number}"
            environment = {**variables, **light, "NCCL_MAX_CTAS": CTAS}
            runs.append(("real", over_nccl(f"real {kind}", job, gate=Path(f"{turn}-real"), port=port, shares=True,
                                           **environment)))  # fmt: skip
            output = folder / f"observed-{number}.prism"
            runs.append(("observed", prism("observe", output, kind, 0, gate=Path(f"{turn}-observed"), script=job,
                                           **variables, **light, **SHARING)))  # fmt: skip
            for name, options in OPTIONS.items():
                output = folder / f"{name}-{number}.prism"
                runs.append((name, prism("emulate", output, kind, 0, "--graph", str(graph), *options,
                                         gate=Path(f"{turn}-{name}"), script=job, **light)))  # fmt: skip
        in_turns([run for _, run in runs])
    found = summary(kind, runs, names=["observed", *OPTIONS])
    found["predicted_ms"] = _predicted_ms(graph)
    found["releases"] = {name: _releases(folder / f"{name}-0.prism") for name in OPTIONS}
    print(f"   predicted by calibration: {found['predicted_ms']} ms; releases: {found['releases']}", flush=True)
    return found


def _predicted_ms(path: Path) -> float:
    from prismtrace import TraceReader

    with TraceReader(path) as reader:
        return round(float(reader.metadata["calibration.step_ns"]) / 1e6, 3)


def _releases(path: Path) -> dict[str, str]:
    from prismtrace import TraceReader

    if not path.exists():
        return {}
    with TraceReader(path) as reader:
        return {key: value for key, value in reader.metadata.items() if ".release" in key}


def eight(kind: str, folder: Path) -> dict[str, Any]:
    """A job of eight ranks, from its recording to an emulated rank."""
    gate, bare, graph = folder / "open", folder / "bare.prism", folder / "graph.prism"
    gate.touch()
    runs = [
        prism("record", bare, "dense", EIGHT_STEPS, "--payloads", "none", gate=gate, ranks=8, **EIGHT),
        prism("calibrate", graph, "dense", EIGHT_STEPS, "--graph", str(bare), "-O", "passes=1", gate=gate, **EIGHT),
        prism("emulate", folder / "emulated.prism", "dense", STEPS, "--graph", str(graph), gate=gate, **EIGHT),
    ]
    for run in runs:
        run.seconds = 240.0
        if not at_once(run):
            return {"failed": run.what}
    recorded, emulated = runs[0].said, runs[2].said
    predicted, step = _predicted_ms(graph), runs[2].step_ms
    are_equal = emulated["MEMORY"]["parts"][:EIGHT_STEPS] == recorded["MEMORY"]["parts"]
    found = {
        "bytes_as_recorded": are_equal, "peak_bytes": emulated["MEMORY"]["parts"][-1][1], "predicted_ms": predicted,
        "emulated_ms": round(step, 3), "apart_percent": round(100 * (step / predicted - 1), 3),
        "steps_ms": [round(ms, 2) for ms in emulated["STEPS"]["ms"]],
    }  # fmt: skip
    if not REHEARSE and (not are_equal or abs(found["apart_percent"]) > 2):
        found["failed"] = "bytes or steps"
    print(f"== eight: {json.dumps(found)}", flush=True)
    return found


def main() -> int:
    results: dict[str, Any] = {}
    for kind in [word for word in sys.argv[1:] if word[:1] != "-"] or ["eight", "ddp", "fsdp2", "chain"]:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as text:
            results[kind] = (eight if kind == "eight" else shared)(kind, Path(text))
        print(f"#### {kind}: {time.monotonic() - started:.1f} s, {results[kind].get('failed', 'ran')}\n", flush=True)
    print(json.dumps(results))
    return 0 if not any("failed" in one for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
